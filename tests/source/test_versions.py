"""What a job has taken in of its input keeps its place, whatever becomes of the files' names and order."""

import gzip
import json
import os
import pathlib
import random
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinf.base.errors import DriftError, InputError
from batchinf.base.storage import Folder
from batchinf.source import files as input_files
from batchinf.source.cache import load_entries
from batchinf.source.files import InputLocation
from batchinf.source.formats import csv
from batchinf.source.rows import Source, open_source
from batchinf.source.versions import versions_at_once


def lines(*numbers: int) -> str:
    return "".join(json.dumps({"x": number}) + "\n" for number in numbers)


def numbers_of(source: Source) -> list[object]:
    found = [row.values["x"] for row in source.read(0, source.num_rows)]
    assert source.read_columns(0, source.num_rows, ["x"])["x"].to_pylist() == found
    source.close()
    return found


class Input:
    """A folder of files, and a job's source over it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.data, self.cache, self.taken = folder / "data", folder / "cache", ()
        self.data.mkdir()

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.data / f"{name}.jsonl").write_text(text)

    def open(self, new: str = "refuse", taken: tuple[str, ...] | None = None) -> Source:
        return open_source(InputLocation(str(self.data)), self.cache, self.taken if taken is None else taken, new)

    def take(self) -> list[object]:
        source = self.open("take")
        self.taken = source.fingerprints
        return numbers_of(source)


@pytest.fixture
def input(tmp_path: pathlib.Path) -> Input:
    found = Input(tmp_path)
    found.write(b=lines(1, 2), d=lines(3, 4))
    assert found.take() == [1, 2, 3, 4]
    return found


def test_what_is_new_comes_behind_wherever_its_name_sorts(input: Input) -> None:
    input.write(a=lines(5), c=lines(6, 7))
    assert input.take() == [1, 2, 3, 4, 5, 6, 7]
    with (input.data / "b.jsonl").open("a") as file:
        file.write(lines(8))
    input.write(e=lines(9), a0=lines(10))
    assert input.take() == [1, 2, 3, 4, 5, 6, 7, 10, 8, 9]
    assert len(input.taken) == 3
    assert numbers_of(input.open()) == [1, 2, 3, 4, 5, 6, 7, 10, 8, 9]
    assert input.take() == [1, 2, 3, 4, 5, 6, 7, 10, 8, 9]
    assert len(input.taken) == 3


def test_earlier_versions_stay_readable(input: Input) -> None:
    first = input.taken
    input.write(a=lines(5))
    input.take()
    assert numbers_of(input.open("ignore", first)) == [1, 2, 3, 4]
    assert numbers_of(input.open("ignore")) == [1, 2, 3, 4, 5]


def test_a_version_is_known_as_that_of_a_job_that_begins_with_it(input: Input, tmp_path: pathlib.Path) -> None:
    def at_once() -> list[str] | None:
        return versions_at_once(Folder(input.cache), input.taken[-1])

    def begun_now(name: str) -> str:
        return open_source(InputLocation(str(input.data)), tmp_path / name).fingerprint

    known = [begun_now("first")]
    input.write(d=lines(3, 4, 5))
    input.take()
    input.write(d=lines(3, 4, 5, 6), e=lines(7))
    input.take()
    known.append(begun_now("third"))
    found = at_once()
    assert found is not None
    assert [found[0], found[2]] == known
    assert found[1] not in known
    # The rows of `a` come last here, and first in a job that begins now.
    input.write(a=lines(8))
    input.take()
    assert at_once() is not None and begun_now("fourth") not in (at_once() or ())
    # Rows are added behind those of another file: each file would have its rows together.
    input.write(b=lines(1, 2, 9))
    input.take()
    assert (at_once() or [])[-1] == input.taken[-1]
    assert versions_at_once(Folder(input.cache), "unknown") is None


def test_renamed_files_are_the_same(input: Input) -> None:
    input.write(a=lines(5))
    input.take()
    os.rename(input.data / "a.jsonl", input.data / "z.jsonl")
    os.rename(input.data / "b.jsonl", input.data / "x.jsonl")
    os.rename(input.data / "d.jsonl", input.data / "b.jsonl")
    for new in ("refuse", "ignore", "take"):
        source = input.open(new)
        assert source.fingerprints == input.taken
        assert numbers_of(source) == [1, 2, 3, 4, 5]


def test_a_file_that_was_renamed_and_appended_to_at_once_is_the_same(input: Input, tmp_path: pathlib.Path) -> None:
    with (input.data / "b.jsonl").open("a") as file:
        file.write(lines(8))
    os.rename(input.data / "b.jsonl", input.data / "z.jsonl")
    input.write(a=lines(9))
    with pytest.raises(DriftError, match=r"1 file is new: a\.jsonl; 1 file is longer than before: z\.jsonl; use --ext"):
        input.open()
    assert numbers_of(input.open("ignore")) == [1, 2, 3, 4]
    assert input.take() == [1, 2, 3, 4, 9, 8]
    assert numbers_of(input.open()) == [1, 2, 3, 4, 9, 8]
    # Of two files that begin with its rows, none is taken for it.
    for name in ("x", "y"):
        (input.data / f"{name}.jsonl").write_text((input.data / "d.jsonl").read_text() + lines(5))
    (input.data / "d.jsonl").unlink()
    with pytest.raises(DriftError, match=r"1 file is gone: d\.jsonl"):
        input.open("take")


def test_a_gone_file_is_not_taken_for_another_that_grew(input: Input) -> None:
    input.write(d=lines(1, 2, 3, 4, 5))  # `b` had 1 and 2, `d` 3 and 4
    (input.data / "b.jsonl").unlink()
    with pytest.raises(DriftError, match=r"1 file is changed: d\.jsonl"):
        input.open("take")
    input.write(d=lines(3, 4), empty="")
    with pytest.raises(DriftError, match=r"1 file is gone: b\.jsonl"):
        input.open("take")


def test_files_of_one_content_are_told_apart_by_their_number(input: Input) -> None:
    input.write(a=lines(1, 2), c=lines(1, 2))
    assert input.take() == [1, 2, 3, 4, 1, 2, 1, 2]
    os.rename(input.data / "a.jsonl", input.data / "f.jsonl")
    assert numbers_of(input.open()) == [1, 2, 3, 4, 1, 2, 1, 2]
    os.remove(input.data / "f.jsonl")
    with pytest.raises(DriftError, match=r"1 file is gone: a\.jsonl"):
        input.open()


def test_what_is_new_is_refused_until_it_is_asked_for(input: Input) -> None:
    input.write(a=lines(5), c=lines(6), e=lines(7), f=lines(8))
    with (input.data / "b.jsonl").open("a") as file:
        file.write(lines(9))
    with pytest.raises(DriftError) as raised:
        input.open()
    assert str(raised.value) == (
        f"{input.data} has more than the job in the output folder knows: 4 files are new: a.jsonl, c.jsonl, e.jsonl "
        "and 1 more; 1 file is longer than before: b.jsonl; use --extend to run the new rows too, or move the new data "
        "away"
    )
    assert numbers_of(input.open("ignore")) == [1, 2, 3, 4]


@pytest.mark.parametrize("new", ["refuse", "ignore", "take"])
def test_what_is_changed_or_gone_is_named(input: Input, new: str) -> None:
    input.write(b=lines(1, 9), e=lines(5))
    os.remove(input.data / "d.jsonl")
    with pytest.raises(DriftError) as raised:
        input.open(new)
    assert str(raised.value) == (
        f"{input.data} is not the input that the job in the output folder began with: 1 file is changed: b.jsonl; 1 "
        "file is gone: d.jsonl; restore these to continue the job, and give corrected rows as a file of their own with "
        "--retry errors --input FILE; or start a new job with another output.path, where "
        "`input.exclude: {job: OLD_OUTPUT, on: prompt_hash}` leaves out the unchanged rows"
    )


@pytest.mark.parametrize(
    ("before", "after", "is_grown"),
    [
        ('{"x": 1}\n', '{"x": 1}\n{"x": 2}\n', True),
        ('{"x": 1}', '{"x": 1}\n{"x": 2}', True),
        ('{"x": 1}', '{"x": 1}\r\n{"x": 2}', True),
        ('{"x": 1', '{"x": 1}\n{"x": 2}', False),
        ('{"x": 1}', '{"x": 1} \n{"x": 2}', False),
        ('{"x": 1}\n\n', '{"x": 1}\n\n\n{"x": 2}\n', True),
        ('{"x": 1}\n{"x": 2}\n', '{"x": 1}\n{"y": 2}\n{"x": 3}\n', False),
        ('{"x": 1}\n{"x": 2}\n', '{"x": 1}\n', False),
    ],
)
def test_a_row_that_went_on_is_changed_and_not_appended_to(
    before: str, after: str, is_grown: bool, tmp_path: pathlib.Path
) -> None:
    input = Input(tmp_path)
    input.write(a=before)
    source = input.open()
    input.taken = source.fingerprints
    source.close()
    input.write(a=after)
    if is_grown:
        assert input.take() == [1, 2]
        assert len(input.taken) == 2
    else:
        with pytest.raises(DriftError, match=r"1 file is changed: a\.jsonl"):
            input.open("take")


def test_blank_lines_alone_are_nothing_new(input: Input) -> None:
    with (input.data / "b.jsonl").open("a") as file:
        file.write("\n\n")
    input.write(z="", y="\n")
    assert input.take() == [1, 2, 3, 4]
    assert len(input.taken) == 1


CSV = [
    ("x\n1\n2\n", "3\n4\n", True),
    ("x\n1\n2", "\n3\n", True),
    ("x\r\n1\r\n", "2\r\n", True),
    ('x\n1\n"2', '\n3"\n4\n', False),
    ("x\n1\n2", "3\n4\n", False),
    ('x\n"1\n1"\n', "2\n", True),
    ('x\n"1"a\n2\n', "3\n", True),
]


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(("before", "more", "is_grown"), CSV)
def test_rows_appended_to_csv(
    before: str, more: str, is_grown: bool, packs: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv, "BLOCK_BYTES", 3)
    path = tmp_path / ("a.csv.gz" if packs else "a.csv")
    pack: Callable[[bytes], bytes] = gzip.compress if packs else bytes
    path.write_bytes(pack(before.encode()))
    location = InputLocation(str(path))
    first = open_source(location, tmp_path / "cache")
    old = first.read(0, first.num_rows)
    first.close()
    path.write_bytes(pack(before.encode()) + pack(more.encode()))  # a gzip file may be of several
    if not is_grown:
        with pytest.raises(DriftError, match="1 file is changed"):
            open_source(location, tmp_path / "cache", first.fingerprints, "take")
        return
    grown = open_source(location, tmp_path / "cache", first.fingerprints, "take")
    assert grown.read(0, first.num_rows) == old
    assert grown.num_rows > first.num_rows
    assert all(row.error is None for row in grown.read(first.num_rows, grown.num_rows))
    grown.close()


def test_a_column_that_is_text_by_now_stays_a_number_in_the_rows_before(tmp_path: pathlib.Path) -> None:
    """A template shows 7.50 as 7.5 in the rows that ran, and in those that are still to run."""
    location = InputLocation(str(tmp_path / "*.csv"))
    (tmp_path / "b.csv").write_text("x,y\n7.50,1\n")
    first = open_source(location, tmp_path / "cache")
    first.close()
    (tmp_path / "a.csv").write_text("x,y\nseven,2\n")
    source = open_source(location, tmp_path / "cache", first.fingerprints, "take")
    for again in (source, open_source(location, tmp_path / "cache", source.fingerprints)):
        assert [row.values for row in again.read(0, 2)] == [{"x": 7.5, "y": 1}, {"x": "seven", "y": 2}]
        assert again.read_columns(0, 2, ["x", "y"]).to_pylist() == [{"x": "7.50", "y": 1}, {"x": "seven", "y": 2}]
        again.close()


def test_parquet_files_are_taken_whole(tmp_path: pathlib.Path) -> None:
    location = InputLocation(str(tmp_path / "*.parquet"))
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "b.parquet")
    first = open_source(location, tmp_path / "cache")
    first.close()
    pq.write_table(pa.table({"x": [3]}), tmp_path / "a.parquet")
    second = open_source(location, tmp_path / "cache", first.fingerprints, "take")
    assert numbers_of(second) == [1, 2, 3]
    pq.write_table(pa.table({"x": [1, 2, 4]}), tmp_path / "b.parquet")
    with pytest.raises(DriftError, match=r"1 file is changed: b\.parquet"):
        open_source(location, tmp_path / "cache", second.fingerprints, "take")


def test_a_record_that_is_gone_or_altered(input: Input) -> None:
    first = input.taken
    input.write(a=lines(5))
    input.take()
    records = {path.stem: path for path in (input.cache / "versions").iterdir()}
    data = records[input.taken[-1]].read_bytes()
    records[input.taken[-1]].write_bytes(data.replace(b"a.jsonl", b"b.jsonl"))
    with pytest.raises(InputError, match=r"is gone or damaged; it says where each row is"):
        input.open()
    records[input.taken[-1]].write_bytes(records[first[0]].read_bytes())  # another's, whole in itself
    with pytest.raises(InputError, match=r"is gone or damaged; it says where each row is"):
        input.open()
    records[input.taken[-1]].write_bytes(data)
    assert numbers_of(input.open()) == [1, 2, 3, 4, 5]


def test_a_first_record_that_is_gone_is_made_again(input: Input) -> None:
    for path in (input.cache / "versions").iterdir():
        path.unlink()
    assert numbers_of(input.open()) == [1, 2, 3, 4]
    input.write(a=lines(5))
    assert input.take() == [1, 2, 3, 4, 5]


def test_a_cache_that_is_gone_is_made_again(input: Input) -> None:
    (input.cache / "files.json").unlink()
    os.rename(input.data / "b.jsonl", input.data / "x.jsonl")
    assert numbers_of(input.open("ignore")) == [1, 2, 3, 4]
    assert load_entries(Folder(input.cache)).keys() == {"x.jsonl", "d.jsonl"}


def test_a_random_history_against_a_list_in_memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "BLOCK_BYTES", 17)
    rng = random.Random(5)
    input = Input(tmp_path)
    contents: dict[str, list[int]] = {}
    expected: list[object] = []
    fresh = iter(range(10**6))
    for _ in range(30):
        came: list[tuple[str, list[int]]] = []
        for _ in range(rng.randint(0, 3)):
            name = f"{rng.choice('abcdefgh')}{rng.randrange(100)}.jsonl"
            rows = [next(fresh) for _ in range(rng.randint(1, 4))]
            if name not in contents:
                contents[name] = rows
                came.append((name, rows))
            elif not any(name == other for other, _ in came):
                contents[name] = contents[name] + rows
                came.append((name, rows))
        grown = {name for name, _ in came}
        if (still := sorted(contents.keys() - grown)) and rng.random() < 0.5:
            old, new = rng.choice(still), f"r{rng.randrange(10**6)}.jsonl"
            contents[new] = contents.pop(old)
        for path in input.data.iterdir():
            path.unlink()
        for name, rows in contents.items():
            (input.data / name).write_text(lines(*rows))
        expected += [row for _, rows in sorted(came) for row in rows]
        if expected:
            assert input.take() == expected

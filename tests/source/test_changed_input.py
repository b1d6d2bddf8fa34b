"""An input that changes, as a table: kind of file × change × moment × size. A wrong row never comes out."""

import csv
import gzip
import io
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence

import datasets
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinf.base.errors import DriftError, UserError
from batchinf.base.storage import Folder
from batchinf.source.digests import ReadDigests
from batchinf.source.files import InputLocation
from batchinf.source.rows import Source, open_source

Row = dict[str, object]
NUM_ROWS = 40  # of each of two files
ID, PROMPT = "id", "prompt"


def rows_of(name: str, label: str) -> list[Row]:
    """Rows of a file; those of another label have the same lengths."""
    return [{ID: f"{name}-{label}-{n:03d}", PROMPT: f"{label} {name} {n:03d} " * 3} for n in range(NUM_ROWS)]


# -- kinds of files ----------------------------------------------------------------------------------------------------


def jsonl(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def text(rows: Sequence[Row]) -> bytes:
    return "".join(f"{row[ID]} {row[PROMPT]}\n" for row in rows).encode()


def array(rows: Sequence[Row]) -> bytes:
    return json.dumps(rows, indent=2).encode()


def as_csv(rows: Sequence[Row]) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, [ID, PROMPT])
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def parquet(rows: Sequence[Row], **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False, "row_group_size": 10}
    pq.write_table(pa.Table.from_pylist(list(rows)), sink, **{**plain, **options})
    return sink.getvalue().to_pybytes()


def large_groups(rows: Sequence[Row]) -> bytes:
    """Parquet that is copied in the scan, because the test lowers `GROUP_ROWS`."""
    return parquet(rows, row_group_size=NUM_ROWS * 2)


def arrow(rows: Sequence[Row], stream: bool = False) -> bytes:
    sink, table = pa.BufferOutputStream(), pa.Table.from_pylist(list(rows))
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


def zipped(write: Callable[[Sequence[Row]], bytes]) -> Callable[[Sequence[Row]], bytes]:
    return lambda rows: gzip.compress(write(rows), 0, mtime=0)


KINDS: dict[str, Callable[[Sequence[Row]], bytes]] = {
    ".jsonl": jsonl,
    ".jsonl.gz": zipped(jsonl),
    ".json": array,
    ".txt": text,
    ".csv": as_csv,
    ".csv.gz": zipped(as_csv),
    ".parquet": parquet,
    ".large.parquet": large_groups,
    ".arrow": arrow,
    ".stream.arrow": lambda rows: arrow(rows, stream=True),
}
GROWING = {".jsonl", ".jsonl.gz", ".txt", ".csv", ".csv.gz"}  # appended rows are no change
# Read from the cache after the scan.
COPIED = {".jsonl.gz", ".json", ".csv", ".csv.gz", ".large.parquet", ".stream.arrow"}


# -- changes -----------------------------------------------------------------------------------------------------------


def in_place(path: pathlib.Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def by_rename(path: pathlib.Path, data: bytes) -> None:
    other = path.with_name(f".{path.name}")
    other.write_bytes(data)
    other.replace(path)


def edited(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    in_place(path, KINDS[kind](rows_of("b", "new" if keeps_size else "newer")))


def one_value(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    """One value of a row that is read early; of Parquet, only bytes that were read count."""
    rows = rows_of("b", "old")
    row = rows[NUM_ROWS // 2 - 1]
    row[PROMPT] = str(row[PROMPT]).replace("old", "new" if keeps_size else "newer " * 20)
    in_place(path, KINDS[kind](rows))


def renamed_over(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    by_rename(path, KINDS[kind](rows_of("b", "new" if keeps_size else "newer")))


def shuffled(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    rows = rows_of("b", "old")[::-1]
    in_place(path, KINDS[kind](rows if keeps_size else rows[1:]))


def appended(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    if kind in (".jsonl", ".txt", ".csv"):
        more = KINDS[kind](rows_of("b", "new")).splitlines(keepends=True)[kind == ".csv" :]
        with path.open("ab") as file:
            file.write(b"".join(more))
    else:
        in_place(path, KINDS[kind]([*rows_of("b", "old"), *rows_of("b", "new")]))


def truncated(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    os.truncate(path, path.stat().st_size // 2)


def swapped(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    """Two files of the input change their names; no byte of them changes."""
    first, between = path.with_name(f"a{kind}"), path.with_name(".between")
    path.rename(between)
    first.rename(path)
    between.rename(first)


def swapped_content(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    first = path.with_name(f"a{kind}")
    data = first.read_bytes(), path.read_bytes()
    in_place(first, data[1])
    in_place(path, data[0])


def touched(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    os.utime(path)


def copied(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    """As a backup is restored: another inode and another mtime."""
    by_rename(path, path.read_bytes())
    os.utime(path, (0, 0))


def made_read_only(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    path.chmod(0o444)


def moved(path: pathlib.Path, kind: str, *, keeps_size: bool) -> None:
    """As a folder is copied to another disk: other inodes, and the mtimes of before."""
    folder = path.parent
    shutil.copytree(folder, folder.with_name("moved"))
    shutil.rmtree(folder)
    folder.with_name("moved").rename(folder)


CHANGES = {
    "edited": [(edited, True), (edited, False)],
    "one value": [(one_value, True), (one_value, False)],
    "replaced by rename": [(renamed_over, True), (renamed_over, False)],
    "shuffled": [(shuffled, True), (shuffled, False)],
    "appended": [(appended, False)],
    "truncated": [(truncated, False)],
    "swapped": [(swapped, True), (swapped_content, True)],
    "touched": [(touched, True), (copied, True), (made_read_only, True), (moved, True)],
}
HARMLESS, SWAPS = {touched, copied, made_read_only, moved}, {swapped, swapped_content}
MOMENTS = ("before a resume", "before the file is opened", "while it is read", "after its last row")
TABLE = [
    pytest.param(kind, change, keeps_size, moment, id=f"{kind[1:]}, {change.__name__}, {keeps_size}, {moment}")
    for kind, changes, moment in itertools.product(KINDS, CHANGES.values(), MOMENTS)
    for change, keeps_size in changes
]
# One of each kind, one of each change and one of each moment are in `make test`.
FEW = TABLE[:: len(TABLE) // 40]


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinf.source.formats.parquet.GROUP_ROWS", NUM_ROWS // 2)
    # Footers here are sound; looking at them in another process takes half a second for each scan.
    monkeypatch.setattr("batchinf.source.formats.parquet._PROBE", "")
    monkeypatch.setattr("batchinf.source.formats.parquet.subprocess.run", no_probe)


def no_probe(*_: object, **__: object) -> object:
    return type("Done", (), {"stdout": "", "returncode": 0})


def opened(folder: pathlib.Path, taken: Sequence[str] = ()) -> Source:
    """The input as a coordinator or a replica opens it."""
    return open_source(InputLocation(str(folder / "in")), folder / "cache", taken, "ignore" if taken else "refuse")


def resumed(folder: pathlib.Path, taken: Sequence[str]) -> Source:
    return open_source(InputLocation(str(folder / "in")), folder / "cache", taken, "leave")


def values(kind: str, name: str) -> list[Row]:
    rows = rows_of(name, "old")
    return [{"text": f"{row[ID]} {row[PROMPT]}"} for row in rows] if kind == ".txt" else rows


def read(source: Source, start: int, stop: int) -> list[Row]:
    """Rows read as for prompts and as for kept columns, which have to agree; the digests are made durable."""
    rows = [dict(row.values) for row in source.read(start, stop)]
    table = source.read_columns(start, stop, source.schema.names).to_pylist()
    assert table == rows
    source.keep_digests()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "change", "keeps_size", "moment"), TABLE)
def test_all_changes(
    kind: str, change: Callable[..., None], keeps_size: bool, moment: str, tmp_path: pathlib.Path
) -> None:
    assert_no_wrong_row(kind, change, keeps_size, moment, tmp_path)


@pytest.mark.parametrize(("kind", "change", "keeps_size", "moment"), FEW)
def test_changes(kind: str, change: Callable[..., None], keeps_size: bool, moment: str, tmp_path: pathlib.Path) -> None:
    assert_no_wrong_row(kind, change, keeps_size, moment, tmp_path)


def assert_no_wrong_row(
    kind: str, change: Callable[..., None], keeps_size: bool, moment: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / f"{name}{kind}").write_bytes(KINDS[kind](rows_of(name, "old")))
    path, expected = tmp_path / "in" / f"b{kind}", [*values(kind, "a"), *values(kind, "b")]
    source = opened(tmp_path)
    taken, size = source.fingerprints, path.stat().st_size
    middle, end = NUM_ROWS + NUM_ROWS // 2, 2 * NUM_ROWS
    found = read(source, 0, {"before the file is opened": NUM_ROWS, "after its last row": end}.get(moment, middle))
    if moment == "before a resume":
        source.close()
    change(path, kind, keeps_size=keeps_size)
    if path.exists() and change not in {truncated, *SWAPS}:
        assert (path.stat().st_size == size) == (keeps_size or change in HARMLESS), "the change is not what it is named"
    noticed = ""
    try:
        if moment == "before a resume":
            source = resumed(tmp_path, taken)
        found += read(source, len(found), end)
        found[NUM_ROWS:] = read(source, NUM_ROWS, end)  # as `id` and kept columns are read again
    except UserError as error:
        noticed = str(error)
    source.close()
    if not noticed and kind == ".parquet" and moment == "before the file is opened":
        # Only its footer was read. So the job may take other bytes for it, all or none, but those of no other file.
        expected = [*values(kind, "a"), *pq.read_table(path).to_pylist()]
        assert found == expected
        assert len({row[ID] for row in found}) == len(found)
        read_again(tmp_path, taken, expected)
        return
    assert found == expected[: len(found)]
    assert not noticed or path.name in noticed or (change in SWAPS and f"a{kind}" in noticed)

    is_harmless = change in HARMLESS or (change is appended and kind in GROWING)
    if is_harmless:
        assert not noticed
        assert found == expected
    elif moment == "before a resume" and change not in SWAPS:
        assert noticed
    # A resume sees what a running job did not need to see, and goes on when the file is put back.
    if is_harmless:
        read_again(tmp_path, taken, expected)
        return
    if change in SWAPS:  # files are known by content
        read_again(tmp_path, taken, expected)
    else:
        with pytest.raises(UserError, match=path.name):  # of a file cut short: that it cannot be read
            resumed(tmp_path, taken)
    for name in "ab":
        by_rename(tmp_path / "in" / f"{name}{kind}", KINDS[kind](rows_of(name, "old")))
    read_again(tmp_path, taken, expected)


def read_again(folder: pathlib.Path, taken: Sequence[str], expected: list[Row]) -> None:
    for open_it in (resumed, opened):
        source = open_it(folder, taken)
        assert read(source, 0, source.num_rows) == expected
        source.close()


def test_table_has_the_kinds_that_are_read_where_they_lie(tmp_path: pathlib.Path) -> None:
    for kind, write in KINDS.items():
        folder = tmp_path / kind
        (folder / "in").mkdir(parents=True)
        (folder / "in" / f"a{kind}").write_bytes(write(rows_of("a", "old")))
        opened(folder).close()
        roles = {name.rpartition(".")[2] for name in os.listdir(folder / "cache")}
        assert (kind in COPIED) == bool(roles & {"lines", "rows"})


# -- datasets ----------------------------------------------------------------------------------------------------------


def saved(folder: pathlib.Path, label: str) -> pathlib.Path:
    shutil.rmtree(folder / "data", ignore_errors=True)
    rows = [{ID: n, PROMPT: f"{label} {n:06d} " * 20} for n in range(2000)]  # many more than at the ends of a file
    datasets.Dataset.from_list(rows).save_to_disk(folder / "data")
    return next((folder / "data").glob("*.arrow"))


@pytest.mark.parametrize("moment", ["before a resume", "while it is read"])
@pytest.mark.parametrize("how", ["edited", "touched", "copied"])
def test_a_saved_dataset(how: str, moment: str, tmp_path: pathlib.Path) -> None:
    path = saved(tmp_path, "old")
    location, cache = InputLocation(str(tmp_path / "data")), tmp_path / "cache"
    source = open_source(location, cache)
    before = read(source, 0, 100)
    if how == "edited":
        data = bytearray(path.read_bytes())
        place = data.index(b"old 001000")
        assert (1 << 16) < place < len(data) - (1 << 16)
        data[place : place + 3] = b"new"
        in_place(path, bytes(data))
    else:
        (touched if how == "touched" else copied)(path, "", keeps_size=True)
    if moment == "before a resume":
        again = open_source(location, cache)
        assert (again.fingerprint == source.fingerprint) == (how != "edited")
    elif how == "edited":
        with pytest.raises(DriftError, match="data"):
            read(source, 990, 1010)
    else:
        assert read(source, 0, 100) == before
    source.close()


# -- Parquet: what was read --------------------------------------------------------------------------------------------


def by_duckdb(table: pa.Table, path: pathlib.Path) -> None:
    duckdb.from_arrow(table).write_parquet(str(path), compression="uncompressed", row_group_size=2048)


def by_pages_of_version_2(table: pa.Table, path: pathlib.Path) -> None:
    pq.write_table(table, path, compression="none", row_group_size=2048, use_dictionary=False, data_page_version="2.0")


def by_pyarrow(table: pa.Table, path: pathlib.Path) -> None:
    pq.write_table(table, path, compression="none", row_group_size=2048)


@pytest.mark.parametrize("write", [by_duckdb, by_pyarrow, by_pages_of_version_2])
@pytest.mark.parametrize("moment", ["while it is read", "before a resume"])
def test_a_file_that_its_writer_shuffles_is_noticed(
    write: Callable[[pa.Table, pathlib.Path], None],
    moment: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batchinf.source.formats.parquet.GROUP_ROWS", 4096)  # no copy is made
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.parquet"
    table = pa.table({ID: [f"{n:06d}" for n in range(4096)], PROMPT: [f"{n:06d} words" for n in range(4096)]})
    write(table, path)
    size = path.stat().st_size
    source = opened(tmp_path)
    read(source, 0, 10)
    # Rows change their places within a row group, so the footer's statistics stay equal.
    write(pa.concat_tables([table.slice(start, 2048).take(list(range(2047, -1, -1))) for start in (0, 2048)]), path)
    assert path.stat().st_size == size
    look = {
        "while it is read": lambda: source.read(4000, 4010),
        "before a resume": lambda: resumed(tmp_path, source.fingerprints),
    }
    with pytest.raises(DriftError, match=r"a\.parquet"):
        look[moment]()
    source.close()


def test_columns_that_were_never_read_may_change(tmp_path: pathlib.Path) -> None:
    """Only bytes that the job has taken in count; the rest may be of gigabytes."""
    (tmp_path / "in").mkdir()
    rows = [{**row, "other": f"{n:03d}"} for n, row in enumerate(rows_of("a", "old"))]
    path = tmp_path / "in" / "a.parquet"
    path.write_bytes(parquet(rows))
    source = opened(tmp_path)
    assert len(source.read(0, NUM_ROWS, [PROMPT])) == NUM_ROWS
    source.keep_digests()
    by_rename(path, parquet([{**row, "other": "new"} for row in rows]))
    again = resumed(tmp_path, source.fingerprints)
    assert [row.values["other"] for row in again.read(0, NUM_ROWS, ["other"])] == ["new"] * NUM_ROWS
    by_rename(path, parquet([{**row, PROMPT: str(row[PROMPT])[::-1]} for row in rows]))
    with pytest.raises(DriftError, match=r"a\.parquet"):
        again.read(0, NUM_ROWS, [ID])
    source.close()
    again.close()


def test_two_that_read_different_versions_do_not_both_go_on(tmp_path: pathlib.Path) -> None:
    """Replicas, or slices: what one has read before the change is durable before the other's rows, or never."""
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.parquet"
    path.write_bytes(parquet(rows_of("a", "old")))
    first = opened(tmp_path)
    second = opened(tmp_path, first.fingerprints)
    first.read(0, 10)
    by_rename(path, parquet(rows_of("a", "new")))
    second.read(20, 30)  # nothing is durable yet, so nothing contradicts it
    second.keep_digests()
    with pytest.raises(DriftError, match=r"a\.parquet"):
        first.keep_digests()
    second.close()
    again = resumed(tmp_path, first.fingerprints)
    assert [row.values[ID] for row in again.read(0, NUM_ROWS)] == [row[ID] for row in rows_of("a", "new")]
    first.close()
    again.close()


def test_a_torn_record_counts_as_absent(tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.parquet"
    path.write_bytes(parquet(rows_of("a", "old")))
    source = opened(tmp_path)
    expected = read(source, 0, NUM_ROWS)
    source.close()
    [kept] = (tmp_path / "cache" / "digests").iterdir()
    data = kept.read_bytes()
    for torn in (data[:-1], data[:-41], data[:50] + bytes([data[50] ^ 1]) + data[51:], b""):
        kept.write_bytes(torn)
        touched(path, "", keeps_size=True)
        again = resumed(tmp_path, source.fingerprints)
        assert read(again, 0, NUM_ROWS) == expected
        again.close()


def test_records_that_arrive_late_are_read(tmp_path: pathlib.Path) -> None:
    """A network file system may show an append's length before its bytes."""
    one, other = ReadDigests(Folder(tmp_path)), ReadDigests(Folder(tmp_path))
    for content in (7, 8):
        one.note(content, [(0, 10, 111)])
        one.keep()
    [kept] = (tmp_path / "digests").iterdir()
    data = kept.read_bytes()
    kept.write_bytes(data[: len(data) // 2] + bytes(len(data) // 2))
    assert other.has(7) and not other.has(8)
    kept.write_bytes(data)
    assert other.has(8)


def test_no_change_is_a_bug(tmp_path: pathlib.Path) -> None:
    """A file that is gone while the job runs is named, too."""
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.parquet"
    path.write_bytes(parquet(rows_of("a", "old")))
    source = opened(tmp_path)
    source.read(0, 1)
    path.unlink()
    with pytest.raises(DriftError, match=r"a\.parquet"):
        source.read(30, 31)
    source.close()

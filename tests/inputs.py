"""Inputs for tests: rows in each format with the expected records, and the comparison with what a source reads."""

import contextlib
import csv
import gzip
import json
import pathlib
import random
import subprocess
import sys
from collections.abc import Callable

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from batchinf.base.errors import InputError
from batchinf.source.files import InputLocation
from batchinf.source.rows import Row, Source, open_source

Records = list[dict[str, object] | str]  # a string: the beginning of the error
Make = Callable[[pathlib.Path], tuple[str, Records]]


def records(num_rows: int, seed: int = 0) -> list[dict[str, object]]:
    rng = random.Random(seed)
    words = ["a", "héllo", "日本", "two words", "😀", 'q"uote', "com,ma", "new\nline", ""]
    return [
        {
            "id": i,
            "prompt": " ".join(rng.choices(words, k=rng.randint(0, 9))),
            "score": rng.choice([0.5, -1.25, 3.0]),
            "is_odd": i % 2 == 1,
            "tags": rng.choices(words, k=i % 3),
            "meta": {"k": i, "v": rng.choice(words)},
        }
        for i in range(num_rows)
    ]


def jsonl_lines(rows: list[dict[str, object]]) -> tuple[bytes, Records]:
    """Lines, some of them with the errors of real files."""
    lines, expected = [], Records()
    for i, row in enumerate(rows):
        line = json.dumps(row, ensure_ascii=i % 2 == 0).encode()
        lines.append(line + b"\r" * (i % 7 == 0))
        expected.append(row)
        if i % 10 == 3:
            lines += [b"", b"  \t", b"\r"]
        if i % 25 == 9:
            for broken, why in [
                (b'{"id": 1 "prompt": 2}', "not JSON: Expecting ',' delimiter at character 10"),
                (b'{"prompt": "a\tb"}', "not JSON: Invalid control character at character 14"),
                (b'{"id": 1', "not JSON"),
                (b'{"id": 1} {"id": 2}', "not JSON: Extra data"),
                (b"[1, 2]", "not a JSON object but an array"),
                (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at byte 13"),
                (b"[" * 100_000, "not JSON: nested too deeply"),
                (b'{"id": ' + b"9" * 5000 + b"}", "not JSON"),
            ]:
                lines.append(broken)
                expected.append(f"line {len(lines)}: {why}")
    return b"\n".join(lines), expected


def make_jsonl(folder: pathlib.Path) -> tuple[str, Records]:
    data, expected = jsonl_lines(records(300))
    (folder / "prompts.jsonl").write_bytes(data)
    return str(folder / "prompts.jsonl"), [f"prompts.jsonl {r}" if isinstance(r, str) else r for r in expected]


def make_jsonl_folder(folder: pathlib.Path) -> tuple[str, Records]:
    expected = Records()
    (folder / "README.md").write_text("not data")
    for name, pack, num_rows in [
        ("a.jsonl", bytes, 70),
        ("b.jsonl.gz", gzip.compress, 50),
        ("c/c.jsonl.lz4", lambda data: pa.compress(data, "lz4", asbytes=True), 20),
        ("c/d.jsonl.zst", lambda data: pa.compress(data, "zstd", asbytes=True), 40),
        ("e.jsonl", lambda data: b"\xef\xbb\xbf" + data, 30),
        ("f.jsonl", lambda data: b"\n\n", 0),
    ]:
        data, some = jsonl_lines(records(num_rows, seed=num_rows))
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(pack(data))
        expected += [f"{name} {r}" if isinstance(r, str) else r for r in some]
    return str(folder), expected


def make_json(folder: pathlib.Path) -> tuple[str, Records]:
    rows = records(300)
    (folder / "a.json").write_text(json.dumps([*rows, 5, None], indent=1, ensure_ascii=False))
    data = b"\xef\xbb\xbf" + b"\n".join(json.dumps(row, indent=2).encode() for row in rows)
    (folder / "b.json.lz4").write_bytes(pa.compress(data, "lz4", asbytes=True))
    broken = [f"a.json value {301 + i}: not a JSON object but {kind}" for i, kind in enumerate(("a number", "null"))]
    return str(folder), [*rows, *broken, *rows]


def make_text(folder: pathlib.Path) -> tuple[str, Records]:
    lines = [b"first", b"", "日本 ".encode(), b"a\rb", b"bad \xff", b"x" * 3000] * 40
    (folder / "prompts.txt").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "q.txt.gz").write_bytes(gzip.compress(b"\r\n".join(lines)))
    expected = Records()
    for name in ("prompts.txt", "q.txt.gz"):
        for i, line in enumerate(lines):
            is_bad = b"\xff" in line
            expected.append(f"{name} line {i + 1}: not UTF-8" if is_bad else {"text": line.decode(errors="replace")})
    return str(folder / "*.t*"), expected


def make_csv(folder: pathlib.Path) -> tuple[str, Records]:
    expected = Records()
    rng = random.Random(1)
    for name, first in [("a.csv", 0), ("b.csv.gz", 1000)]:
        with (gzip.open if name.endswith("gz") else open)(folder / name, "wt", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(["id", "prompt", "score", "code", "maybe"])
            line = 2
            for row in records(300, seed=first):
                code, maybe = f"{rng.randrange(1000):03d}", rng.choice([None, 7])
                writer.writerow([first + row["id"], row["prompt"], row["score"], code, maybe])
                expected.append(
                    {
                        "id": first + row["id"],
                        "prompt": row["prompt"],
                        "score": row["score"],
                        "code": code,
                        "maybe": maybe,
                    }
                )
                line += 1 + str(row["prompt"]).count("\n")
                if row["id"] % 40 == 7:
                    stream.write("\nonly,two\n")
                    expected.append(f"{name} line {line + 1}: 2 fields where the header has 5")
                    stream.write('1,"a"b,2,3,4\n')
                    expected.append(f"{name} line {line + 2}: not CSV")
                    line += 3
    return str(folder), expected


def table(num_rows: int, seed: int = 0) -> pa.Table:
    rows = pa.Table.from_pylist(records(num_rows, seed))
    kind = pa.array([f"kind {i % 3}" for i in range(num_rows)]).dictionary_encode()
    return rows.append_column("kind", kind).append_column("none", pa.nulls(num_rows))


def make_parquet(folder: pathlib.Path) -> tuple[str, Records]:
    first, second = table(300), table(200, seed=1).drop_columns("score")
    pq.write_table(first, folder / "a.parquet", row_group_size=70)
    pq.write_table(second, folder / "b.parquet", row_group_size=7)
    return str(folder), first.to_pylist() + second.to_pylist()


def make_arrow(folder: pathlib.Path) -> tuple[str, Records]:
    rows = table(500)
    with pa.ipc.new_file(folder / "a.arrow", rows.schema) as writer:
        writer.write_table(rows, max_chunksize=33)
    with pa.ipc.new_stream(folder / "b.arrow", rows.schema) as writer:
        writer.write_table(rows, max_chunksize=490)
    pyarrow.feather.write_feather(rows, folder / "c.feather", compression="lz4")
    return str(folder / "*.*"), rows.to_pylist() * 3


def make_saved(folder: pathlib.Path) -> tuple[str, Records]:
    rows = records(300)
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved", num_shards=3)
    return str(folder / "saved"), list(rows)


def make_saved_dict(folder: pathlib.Path) -> tuple[str, Records]:
    splits = {"test": datasets.Dataset.from_list(records(5)), "train": datasets.Dataset.from_list(records(90, 1))}
    datasets.DatasetDict(splits).save_to_disk(folder / "saved")
    return str(folder / "saved"), list(records(90, 1))


def make_images(folder: pathlib.Path) -> tuple[str, Records]:
    expected = Records()
    for number in range(60):
        name = f"{'abc'[number // 20]}/{number:02d}.{'JPG' if number % 2 else 'png'}"
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"a picture is loaded later" * number)
        expected.append({"path": name, "folder": name[0], "num_bytes": 25 * number})
    (folder / "README.md").write_text("not data")
    return str(folder), expected


FORMATS: dict[str, Make] = {
    "jsonl": make_jsonl,
    "jsonl folder": make_jsonl_folder,
    "json": make_json,
    "text": make_text,
    "csv": make_csv,
    "parquet": make_parquet,
    "arrow": make_arrow,
    "images": make_images,
    "saved": make_saved,
    "saved dict": make_saved_dict,
}
FILES = sorted(FORMATS.keys() - {"saved", "saved dict"})


def check(found: Source, expected: Records) -> None:
    """Compare `read` and `read_columns` of random ranges with the expected records."""
    assert found.num_rows == len(expected)
    rng = random.Random(2)
    names = found.schema.names
    ranges = [(0, len(expected)), (0, 0), (len(expected), len(expected)), (len(expected) - 1, len(expected))]
    ranges += [sorted(rng.choices(range(len(expected) + 1), k=2)) for _ in range(40)]
    for start, stop in ranges:
        columns = rng.choice([None, [], rng.sample(names, rng.randint(1, len(names)))])
        wanted = [r if columns is None or isinstance(r, str) else select(r, columns) for r in expected[start:stop]]
        rows = found.read(start, stop, columns if columns is None else [*columns, "no such column"])
        assert [row.row_index for row in rows] == list(range(start, stop))
        assert [same(row, record) for row, record in zip(rows, wanted, strict=True)] == wanted

        columns = rng.sample(names, rng.randint(1, len(names)))
        read = found.read_columns(start, stop, columns)
        assert read.schema == pa.schema([found.schema.field(name) for name in columns])
        records = [{} if isinstance(r, str) else r for r in expected[start:stop]]
        assert read.to_pylist() == [{name: r.get(name) for name in columns} for r in records]


def select(record: dict[str, object], columns: list[str]) -> dict[str, object]:
    return {name: record[name] for name in columns if name in record}


def same(row: Row, expected: dict[str, object] | str) -> dict[str, object] | str:
    """The row in the form of the expected record."""
    if isinstance(expected, str) and row.error is not None and row.error.startswith(expected) and not row.values:
        return expected
    assert row.error is None
    return dict(row.values)


def holds(stored: object, value: object) -> bool:
    """Whether a typed column holds a value. Allowed: floats for integers, nulls in structs, `?` for surrogates."""
    if isinstance(value, dict) and isinstance(stored, dict):
        return value.keys() <= stored.keys() and all(holds(stored[name], value.get(name)) for name in stored)
    if isinstance(value, list) and isinstance(stored, list):
        return len(value) == len(stored) and all(map(holds, stored, value))
    if isinstance(value, str):
        return stored == value.encode(errors="replace").decode()
    if isinstance(value, int) and isinstance(stored, float):
        return float(value) == stored
    return type(stored) is type(value) and (stored == value or (stored != stored and value != value))


def open_jsonl(tmp_path: pathlib.Path, *lines: object) -> Source:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return open_source(InputLocation(str(path)), tmp_path / f"cache of {path.name}")


def data_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def refusal(files: dict[str, bytes], location: InputLocation, folder: pathlib.Path) -> str:
    """The error for an input of these files in `folder`, which is the current folder."""
    with contextlib.chdir(folder):
        for name, data in files.items():
            pathlib.Path(name).parent.mkdir(exist_ok=True)
            pathlib.Path(name).write_bytes(data)
        with pytest.raises(InputError) as raised:
            open_source(location, folder / "cache")
    return str(raised.value)


READ_HUGE = """
import pathlib, sys
from batchinf.source.formats import parquet
from batchinf.source.rows import InputLocation, open_source
def peak():  # not ru_maxrss, which starts at what the parent has
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
parquet.GROUP_ROWS, num_rows = map(int, sys.argv[3:])
before = peak()
source = open_source(InputLocation(sys.argv[1]), pathlib.Path(sys.argv[2]))
first_pass = peak() - before
rows = source.read(source.num_rows - num_rows, source.num_rows)
print(first_pass, peak() - before, len(rows), rows[-1].values["id"])
"""


def peaks(path: pathlib.Path, cache: pathlib.Path, group_rows: int, num_rows: int) -> list[int]:
    """Peak MiB after the scan and after reading the last `num_rows` rows, rows read, and the last id."""
    command = [sys.executable, "-c", READ_HUGE, str(path), str(cache), str(group_rows), str(num_rows)]
    return [int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]

"""About a hundred hurt files for each reader; `make fuzz` runs many. What fuzzing has found stays found."""

import base64
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import fuzz
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinf
import jobs
from batchinf.base.errors import InputError, OutputError
from batchinf.base.storage import Folder
from batchinf.commands.diff import _row_bytes as row_bytes
from batchinf.commands.head import read_head
from batchinf.commands.whole_row import read_whole_row
from batchinf.fleet.local.channel import Channel
from batchinf.fleet.status import STATUS_FILE, read_status
from batchinf.manifest import commit_log
from batchinf.manifest.lock import LOCK, Holder
from batchinf.manifest.state import read_state
from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source

# A whole file of one row but for one bit in its footer.
FOOTER = (
    "UEFSMRUAFRYVFiwVAhUAFQYVBhw2ACgBYRgBYRERAAAAAgAAAAIBAQAAAGEVBBksNQAYBnNjaGVtYRUCABUIJQIYBnByb21wdCUATBwAAAAWAhkc"
    "GRwmABwVDBklBgAZGAZwcm9tcHQVABYCFlAWUCYIPDYAKAFhGAFhEREAGRwVABUAFQIAPBYCGQYZJgACAAAAFlAWAiYIFlAAKCBwYXJxdWV0LWNw"
    "cC1hcnJvdyB2ZXJzaW9uIDI2LjAuMRkcHAAAAJgAAABQQVIx"
)
CASES = int(os.environ.get("CASES", "300"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
SHARES = fuzz.shares(list(fuzz.TARGETS), CASES)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    with pytest.MonkeyPatch.context() as patch:
        out = fuzz.make_job(tmp_path_factory.mktemp("job"))
        patch.setenv(fuzz.JOB, str(out))
        yield out


@pytest.mark.timeout(max(300, CASES))
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_no_hurt_file_is_a_bug(name: str, job: pathlib.Path) -> None:
    counts, failure = fuzz.fuzz(name, range(SHARES[name]), SEED)
    assert not failure, failure
    assert counts["cases"] == SHARES[name]
    assert not fuzz.useless(name, counts)


def test_a_bug_is_found(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: pathlib.Path, made: object, case: list[int]) -> bool:
        if 7 in case:
            raise KeyError(case)
        return False

    monkeypatch.setitem(fuzz.TARGETS, "spec", fuzz.Target(lambda draw, made: [1, 7, 2], run, lambda folder: None))
    with pytest.raises(KeyError) as caught:
        fuzz.run_target("spec", range(5), 0, tmp_path)
    assert caught.value.__notes__ == ["case 0 of spec, seed 0: [7]"]  # the smallest case that still fails


def test_checksums_may_notice_all_damage() -> None:
    assert not fuzz.useless("jsonl.zst", {"cases": 40_000, "noticed": 39_990})
    assert fuzz.useless("jsonl.zst", {"cases": 40_000, "noticed": 0})
    assert fuzz.useless("jsonl", {"cases": 40_000, "noticed": 39_990})


@pytest.mark.parametrize(("noticed", "is_useless"), [(0, True), (40, True), (1, False), (39, False)])
def test_a_target_that_tests_nothing_is_found(noticed: int, is_useless: bool) -> None:
    assert bool(fuzz.useless("spec", {"cases": 40, "noticed": noticed})) is is_useless
    assert bool(fuzz.useless("spec", {"cases": 40_000, "noticed": noticed})) is True


# -- found by fuzzing --------------------------------------------------------------------------------------------------


def test_a_line_with_its_checksum_that_is_no_json(tmp_path: pathlib.Path) -> None:
    import zlib

    (tmp_path / "manifest").mkdir()
    for body in (b"", b"\xff", b"[" * 100_000):
        (tmp_path / "manifest" / "000001.jsonl").write_bytes(body + b',"crc":"%08x"}\n' % zlib.crc32(body + b"}"))
        assert read_state(Folder(tmp_path)) is None


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "event", "name": "ready", "at": "2026-01-01T00:00:00+00:00"},
        {"kind": "ended", "incarnation": "000001.0001", "device_s": -1},
        {
            "kind": "extent",
            "start": 0,
            "num_rows": 2**62,
            "rows_per_shard": 1,
            "first_shard": 0,
            "first_row": 0,
            "stop_row": 2**62,
            "source_fingerprint": "",
        },
        {"kind": "part", "shard": -1},
        {"kind": [], "name": {}},
        {},
    ],
)
def test_a_line_that_means_nothing_is_damage(line: dict[str, object], tmp_path: pathlib.Path) -> None:
    (tmp_path / "manifest").mkdir()
    (tmp_path / "manifest" / "000001.jsonl").write_bytes(commit_log.encode_commits([[line]]))
    with pytest.raises(OutputError, match="damaged"):
        read_state(Folder(tmp_path))


@pytest.mark.parametrize("data", [b"null", b"[]", b'"x"', b"[" * 100_000, b'{"replicas": 5}'])
def test_a_status_or_a_lock_that_is_something_else(data: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / STATUS_FILE).write_bytes(data)
    assert read_status(Folder(tmp_path)) is None
    assert Holder.decode(data) is None


@pytest.mark.parametrize(("name", "value"), [("epoch", None), ("pid", "1\0"), ("host", "\x1b[2J"), ("start_time", 1.5)])
def test_a_lock_with_a_field_of_another_type(name: str, value: object) -> None:
    good = json.loads(Holder.this_process().encode())
    assert Holder.decode(json.dumps(good).encode()) is not None
    assert Holder.decode(json.dumps({**good, name: value}).encode()) is None


def test_a_line_that_is_no_message_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        theirs.sendall(b"null\n")
        assert channel.receive(1.0) == []
        assert channel.is_closed
        assert theirs.recv(1) == b""


def test_text_that_is_not_utf8_is_an_error_row_and_no_bad_part(tmp_path: pathlib.Path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"good", b"b\xffd"]).buffers())
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 2]), bad)
    table = pa.table({"prompt": bad, "tags": nested, "n": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        source = open_source(InputLocation(str(tmp_path / name)), tmp_path / f"cache {name}")
        good, broken = source.read(0, 2, ["prompt"])
        assert good.values == {"prompt": "good"} and good.error is None
        assert not broken.values and name in str(broken.error) and "prompt" in str(broken.error)
        kept = source.read_columns(0, 2, ["prompt", "tags", "n"])
        kept.validate(full=True)
        assert kept["prompt"].to_pylist() == ["good", "b\ufffdd"]
        assert kept["tags"].to_pylist() == [["good"], ["b\ufffdd"]]
        source.close()


def test_offsets_that_point_outside_of_an_arrow_file_are_refused(tmp_path: pathlib.Path) -> None:
    text = pa.array(["some text", "more"])
    offsets = pa.py_buffer(np.array([0, 2**30, 13], np.int32).tobytes())
    wild = pa.Array.from_buffers(pa.string(), 2, [None, offsets, text.buffers()[2]])
    table = pa.Table.from_arrays([wild], ["prompt"])
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(InputError, match="damaged"):
        open_source(InputLocation(str(tmp_path / "a.arrow")), tmp_path / "cache")


def test_a_year_that_python_does_not_have_is_an_error_row(tmp_path: pathlib.Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "at": pa.array([0, 2**62], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source(InputLocation(str(tmp_path / "a.parquet")), tmp_path / "cache")
    first, second = source.read(0, 2)
    assert first.error is None and "at" in str(second.error)
    source.close()


def test_a_damaged_page_of_parquet_names_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": [f"text {i}" for i in range(1000)]}), path)
    data = bytearray(path.read_bytes())
    data[4:40] = bytes(36)
    path.write_bytes(data)
    source = open_source(InputLocation(str(path)), tmp_path / "cache")
    with pytest.raises(InputError, match=r"a\.parquet cannot be read"):
        source.read(0, 10)
    source.close()


def test_a_footer_that_ends_the_process_ends_another_one(tmp_path: pathlib.Path) -> None:
    data = bytearray(base64.b64decode(FOOTER))
    (tmp_path / "a.parquet").write_bytes(data)
    code = f"import pyarrow.parquet as pq; pq.read_metadata({str(tmp_path / 'a.parquet')!r}).row_group(0).column(0)"
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode < 0
    with pytest.raises(InputError, match=r"a\.parquet") if died else contextlib.nullcontext():
        open_source(InputLocation(str(tmp_path / "a.parquet")), tmp_path / "cache").close()


def _chunk_names(data: bytes, name: bytes) -> Iterator[bytes]:
    """Parquet files of which one place in the footer has another name, which is not UTF-8."""
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    while (start := data.find(name, start) + 1) > 0:
        yield data[:start] + b"\xe7" + data[start + 1 :]


def test_a_parquet_column_whose_name_is_not_utf8(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"prompt": ["some text"] * 3}), tmp_path / "whole")
    num_refused = 0
    for number, data in enumerate(_chunk_names((tmp_path / "whole").read_bytes(), b"prompt")):
        path = tmp_path / f"{number}.parquet"
        path.write_bytes(data)
        try:
            source = open_source(InputLocation(str(path)), tmp_path / f"cache {number}")
            source.read(0, 3)
            source.close()
        except InputError as error:
            num_refused += 1
            assert path.name in str(error)  # noqa: PT017
    assert num_refused


def test_readers_name_a_damaged_part(job: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Wherever a part is damaged, readers get rows or an OutputError that names it."""
    out = tmp_path / "out"
    fuzz._link(job, out, "parts")
    part = min((out / "parts").iterdir())
    data = part.read_bytes()
    in_pages = [data[:at] + bytes(30) + data[at + 30 :] for at in range(4, len(data) // 2, 400)]
    readers: list[Callable[[], object]] = [
        lambda: batchinf.open(out).table(),
        lambda: list(batchinf.open(out).batches()),
        lambda: read_head(str(out), 5),
        lambda: read_whole_row(str(out), "0"),
        lambda: row_bytes(batchinf.open(out).parts[0], ["row_index"]),
    ]
    num_refused = [0] * len(readers)
    for damaged in [*_chunk_names(data, b"row_index"), *in_pages]:
        part.write_bytes(damaged)
        for number, read in enumerate(readers):
            try:
                read()
            except OutputError as error:
                num_refused[number] += 1
                assert part.name in str(error)  # noqa: PT017
    assert all(num_refused)


def test_a_list_whose_items_have_no_name_in_utf8(tmp_path: pathlib.Path) -> None:
    table = pa.table({"prompt": ["a"], "tags": pa.array([["x"]], pa.list_(pa.field("iteM", pa.string())))})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    data = (tmp_path / "a.arrow").read_bytes()
    assert data.count(b"iteM") == 2
    (tmp_path / "a.arrow").write_bytes(data.replace(b"iteM", b"ite\xff"))
    source = open_source(InputLocation(str(tmp_path / "a.arrow")), tmp_path / "cache")
    assert source.read_columns(0, 1, ["tags"])["tags"].to_pylist() == [["x"]]
    source.close()


def test_head_names_a_damaged_part(job: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    fuzz._link(job, out, "parts")
    part = min((out / "parts").iterdir())
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(OutputError, match=r"part-000000\.parquet cannot be read"):
        read_head(str(out), 5)
    assert LOCK in {path.name for path in out.iterdir()}


def test_a_traceback_reaches_no_user(job: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    fuzz._link(job, out, "manifest")
    (out / "manifest" / "000009.jsonl").write_bytes(commit_log.encode_commits([[{"kind": "part", "shard": "x"}]]))
    for command in ("status", "head"):
        done = jobs.run(command, out)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")

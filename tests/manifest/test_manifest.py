import contextlib
import copy
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from extents import extent_of_all, next_extent
from headers import header_of
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.manifest.commit_log import encode_commits
from batchinf.manifest.lines import (
    Beginning,
    Bottleneck,
    Chosen,
    Condemned,
    Done,
    EndedReplica,
    InputJob,
    Lost,
    Lowered,
    ModelFiles,
    Platform,
    Recovered,
    Retry,
    Speed,
    StartedReplica,
    Suspects,
    part_line,
    read_line,
    record_line,
)
from batchinf.manifest.lock import LOCK, JobLock, LockLost
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State, last_epoch, read_beginning, read_state
from batchinf.manifest.versions import FORMAT_VERSION, OLDEST_VERSION
from batchinf.records import Lease, Part, PartCounts
from batchinf.schedule.shards import Extent, total_shards

HEADER = header_of(job_id="job", identity={"model": "é", "n": 1}, layout={"x": [1, None]}, spec={"y": 2.5})
FIRST = extent_of_all(0, 100, 10, 0)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make("manifest")
    return folder


def retry_of(**changed: Any) -> Retry:
    fields = {"predicate": "text IS NULL", "overrides": {}, "num_rows": 3, "num_shards": 1, "positions": ""}
    return Retry(number=1, stop_row=20, **fields | changed)


def part(shard: int, num_rows: int = 10, num_errors: int = 0) -> Part:
    return Part(
        shard=shard,
        num_rows=num_rows,
        num_errors=num_errors,
        num_bytes=100 * num_rows,
        num_prompt_tokens=7 * num_rows,
        num_output_tokens=3 * num_rows,
        digest=f"{shard:032x}",
    )


def started(incarnation: str) -> StartedReplica:
    return StartedReplica(1, incarnation, "local", {"pgid": 99}, ("0",), 1.0, 5.0)


_opened: list[Manifest] = []


@pytest.fixture(autouse=True)
def _close_all() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def open_(folder: Folder, epoch: int, lock: JobLock | None = None) -> Manifest:
    """A manifest that is closed at the test's end."""
    _opened.append(Manifest(folder, epoch, lock))
    return _opened[-1]


def begin(folder: Folder, epoch: int = 1) -> Manifest:
    """A job that was begun."""
    manifest = open_(folder, epoch)
    manifest.record(HEADER)
    manifest.extent(FIRST, "input")
    manifest.commit()
    return manifest


def state_of(folder: Folder) -> State:
    state = read_state(folder)
    assert state is not None
    return state


def view(state: State | None) -> dict[str, Any] | None:
    """All that a state says, for comparisons; not the epoch, nor which logs it was read from."""
    if state is None:
        return None
    values = {**vars(state), "committed": state.committed.tolist(), "parts": dict(sorted(state.parts.items()))}
    return {name: copy.copy(value) for name, value in values.items() if name not in ("last_epoch", "_kinds", "_sizes")}


def logs(folder: Folder) -> list[str]:
    return folder.list("manifest")


def test_the_speed_of_the_run_that_ended_a_job_is_kept(folder: Folder) -> None:
    manifest = begin(folder)
    speed = Speed(120.0, 100.0, 2700.0, 900.0, 4, 404_000, Bottleneck("input", 0.75, "it waited", "more cores"))
    manifest.record(Done(speed))
    with pytest.raises(ValueError, match="could not be read again"):
        manifest.record(Done(replace(speed, num_gpus=-1)))
    manifest.commit()
    manifest.close()
    for epoch in (2, 3, 4):
        assert state_of(folder).speed == speed
        open_(folder, epoch).close()
    later = open_(folder, 5)
    later.record(Done())
    later.commit()
    assert state_of(folder).is_done
    assert state_of(folder).speed is None


INPUT_JOB = InputJob(path="first", job_id="a", fingerprint="b", num_rows=5, num_parts=1, epoch=1)
PLATFORM = Platform("NVIDIA H200", {"vllm": "0.32.0"}, {"max_num_seqs": 256}, 1)
CASE = Suspects("a", (2, 4), (Lease(1, 8, 9),), others=(3,))
# By name: a type, records of one key of which the last counts, and those that the state has then.
LAST: dict[str, tuple[type[Any], list[Any], list[Any]]] = {
    "platforms": (Platform, [PLATFORM, replace(PLATFORM, device="x"), replace(PLATFORM, epoch=2, settings={})],
                  [replace(PLATFORM, device="x"), replace(PLATFORM, epoch=2, settings={})]),
    "cases": (Suspects, [CASE, replace(CASE, origin="b"), replace(CASE, suspects=(2,), replica=1)],
              [replace(CASE, origin="b"), replace(CASE, suspects=(2,), replica=1)]),
    "a closed case": (Suspects, [CASE, replace(CASE, leases=())], []),
    "condemned": (Condemned, [Condemned(7, "killed"), Condemned(8, "killed"), Condemned(7, None)],
                  [Condemned(8, "killed")]),
    "lowered": (Lowered, [Lowered({"max_num_seqs": 8}, {}), Lowered({"max_num_seqs": 4}, {"parallel": 1})],
                [Lowered({"max_num_seqs": 4}, {"parallel": 1})]),
    "chosen": (Chosen, [Chosen(1, 2), Chosen(3, 4)], [Chosen(3, 4)]),
    "files": (ModelFiles, [ModelFiles({"a": "00"}), ModelFiles({"a": "01"})], [ModelFiles({"a": "01"})]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAST)
def test_the_last_record_of_a_key_counts(folder: Folder, name: str) -> None:
    manifest = begin(folder)
    kind, records, expected = LAST[name]
    for record in records:
        manifest.record(record)
    manifest.commit()
    manifest.close()
    for epoch in (2, 3, 4, 5):  # as they are, and folded into one
        assert state_of(folder).of(kind) == expected
        open_(folder, epoch).close()


def test_the_last_header_counts_and_a_lost_part_is_remembered(folder: Folder) -> None:
    manifest = begin(folder)
    manifest.record(replace(HEADER, input_job=INPUT_JOB))
    manifest.part(part(1))
    manifest.record(Lost([1]))
    manifest.commit()
    manifest.close()
    for epoch in (2, 3, 4, 5):
        state = state_of(folder)
        assert (state.header, state.has_lost, state.parts) == (replace(HEADER, input_job=INPUT_JOB), True, {})
        open_(folder, epoch).close()


def test_a_round_trip(folder: Folder) -> None:
    manifest = begin(folder)
    manifest.part(part(3, num_errors=2), replica=1, incarnation="000001.0001")
    manifest.part(part(0))
    manifest.record(started("000001.0001"))
    manifest.record(started("000001.0002"))
    manifest.record(EndedReplica("000001.0001", 12.5, has_devices=False))
    manifest.commit()
    manifest.close()
    state = state_of(folder)
    assert (state.header, state.extents, state.source_fingerprints) == (HEADER, (FIRST,), ("input",))
    assert state.parts == {3: replace(part(3, num_errors=2), replica=1, incarnation="000001.0001"), 0: part(0)}
    assert np.flatnonzero(state.committed).tolist() == [0, 3]
    assert len(state.committed) == total_shards([FIRST])
    assert state.counts == PartCounts(num_rows=20, num_errors=2, num_prompt_tokens=140, num_output_tokens=60)
    assert state.num_bytes == 2000
    assert state.device_s == 12.5
    assert state.of(StartedReplica) == [started("000001.0002")]
    assert (state.had_devices, state.has_devices) == (False, True)
    assert (state.is_done, state.last_epoch) == (False, 1)


def test_nothing_counts_before_it_is_committed(folder: Folder) -> None:
    manifest = open_(folder, 1)
    manifest.record(HEADER)
    manifest.extent(FIRST, "input")
    assert read_state(folder) is None
    manifest.commit()
    before = view(state_of(folder))
    manifest.part(part(0))
    assert view(state_of(folder)) == before
    manifest.commit()
    assert state_of(folder).counts.num_rows == 10


def test_a_retried_part_takes_the_place_of_the_first(folder: Folder) -> None:
    manifest = begin(folder)
    manifest.part(part(0, num_rows=10, num_errors=10))
    manifest.part(part(1))
    manifest.part(part(0, num_rows=9))
    manifest.commit()
    state = state_of(folder)
    assert (len(state.parts), state.counts.num_rows, state.counts.num_errors) == (2, 19, 0)


def test_a_retry_and_the_parts_that_it_has_replaced(folder: Folder) -> None:
    manifest = begin(folder)
    for shard in range(3):
        manifest.part(part(shard, num_errors=4))
    manifest.record(Done())
    manifest.commit()
    retry = retry_of(predicate="errors", overrides={"sampling.max_tokens": 9}, positions="d")
    manifest.record(retry)
    manifest.part(replace(part(0), retry=1, digest="new"))
    manifest.commit()
    manifest.close()
    open_(folder, 2).close()
    for epoch in (3, 4):
        state = state_of(folder)
        assert not state.is_done
        assert state.retries == {1: retry}
        assert [state.parts[shard].retry for shard in range(3)] == [1, 0, 0]
        assert state.counts.num_errors == 8
        open_(folder, epoch).close()
    assert logs(folder)[0] == "000003.jsonl"


def test_note_and_forget(folder: Folder) -> None:
    begin(folder)
    state = state_of(folder)
    before = view(state)
    state.note(part(5))
    assert state.committed[5]
    assert state.num_bytes == 1000
    state.forget(5)
    state.forget(6)
    assert view(state) == before


def test_later_rows_reopen_a_job_that_was_done(folder: Folder) -> None:
    manifest = begin(folder)
    manifest.record(Done())
    manifest.commit()
    assert state_of(folder).is_done
    manifest.extent(next_extent([FIRST], 8, 2), "more input")
    manifest.commit()
    state = state_of(folder)
    assert not state.is_done
    assert state.source_fingerprints == ("input", "more input")
    assert len(state.committed) == total_shards(state.extents) == total_shards([FIRST]) + 5


def test_no_manifest(tmp_path: pathlib.Path) -> None:
    assert read_state(Folder(tmp_path)) is None
    assert read_state(Folder(tmp_path / "missing")) is None
    assert last_epoch(Folder(tmp_path)) == 0


def test_an_epoch_that_committed_nothing_counts_as_an_epoch(folder: Folder) -> None:
    open_(folder, 3).close()
    assert (read_state(folder), last_epoch(folder)) == (None, 3)
    begin(folder, 4)
    open_(folder, 6)
    assert (state_of(folder).last_epoch, last_epoch(folder)) == (6, 6)


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_epoch_is_begun_once(folder: Folder, epoch: int) -> None:
    begin(folder, 2)
    with pytest.raises(OutputError, match="another process has just started on"):
        open_(folder, epoch)


def test_a_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OutputError, match=r"cannot create .*000001.jsonl: no such file or directory"):
        open_(Folder(tmp_path / "missing"), 1)


def test_a_failed_commit_keeps_its_lines(folder: Folder) -> None:
    lock = JobLock(folder)
    lock.acquire(lambda: last_epoch(folder))
    begin(folder).close()
    manifest = open_(folder, 2, lock)
    manifest.part(part(0))
    held = folder.read(LOCK)
    folder.delete(LOCK)
    with pytest.raises(LockLost):
        manifest.commit()
    assert folder.read("manifest/000002.jsonl") == b""
    with pytest.raises(LockLost):
        open_(folder, 3, lock)
    assert logs(folder) == ["000001.jsonl", "000002.jsonl"]
    folder.write_atomic(LOCK, held)
    manifest.commit()
    assert state_of(folder).counts.num_rows == 10
    lock.release()


# -- what others wrote -------------------------------------------------------------------------------------------------


def append(folder: Folder, name: str, *commits: list[dict[str, Any]], num_before: int) -> None:
    with folder.path(f"manifest/{name}").open("ab") as file:
        file.write(encode_commits(commits, num_before))


@pytest.mark.parametrize(("version", "age"), [(OLDEST_VERSION - 1, "an older"), (FORMAT_VERSION + 1, "a newer")])
def test_another_format_is_refused(folder: Folder, version: int, age: str) -> None:
    header = {"kind": "header", "format_version": version, "all": "different"}
    append(folder, "000001.jsonl", [header], num_before=0)
    words = (
        f"written by {age} batchinf in format version {version}; "
        f"this one reads versions {OLDEST_VERSION} to {FORMAT_VERSION}: use {age} one"
    )
    with pytest.raises(OutputError, match=f"{words}, or start a new job with --fresh") as refused:
        read_state(folder)
    assert "\n" not in str(refused.value)


def test_unknown_kinds_and_fields_are_passed_over(folder: Folder) -> None:
    begin(folder).close()
    before = state_of(folder)
    line = {**part_line(part(2)), "colour": "red"}
    append(folder, "000001.jsonl", [{"kind": "weather", "rain": True}, line], num_before=1)
    before.note(part(2))
    assert view(state_of(folder)) == view(before)


def test_other_files_are_left_alone(folder: Folder) -> None:
    begin(folder).close()
    before = view(state_of(folder))
    others = ["notes.txt", "1.jsonl", "000002.jsonl~", "000002.json", ".tmp-1-000009.jsonl", "x000002.jsonl"]
    for name in others:
        folder.path(f"manifest/{name}").write_text("{ what is this\n\n")
    assert (view(state_of(folder)), last_epoch(folder)) == (before, 1)
    for epoch in (2, 3):
        open_(folder, epoch).close()
    assert view(state_of(folder)) == before
    assert {path.name for path in folder.path("manifest").iterdir()} == {*others, "000003.jsonl"}


@pytest.mark.parametrize(
    "line",
    [
        part_line(part(99)),
        {"kind": "part", "shard": 1},
        {"kind": "extent", **asdict(extent_of_all(7, 1, 1, 7)), "source_fingerprint": ""},
        {"kind": "header", "format_version": FORMAT_VERSION},
    ],
)
def test_lines_that_do_not_follow_are_damage(folder: Folder, line: dict[str, Any]) -> None:
    begin(folder).close()
    append(folder, "000001.jsonl", [line], num_before=1)
    with pytest.raises(OutputError, match=r"000001.jsonl is damaged: line 3 contradicts .*; restore it from a backup"):
        read_state(folder)


AT = "2026-01-01T00:00:00+00:00"
# By kind: a line with every field that is read again.
RECORDS = (
    replace(HEADER, input_job=INPUT_JOB), retry_of(), ModelFiles({"model.safetensors": "00"}),
    Beginning("a"), Recovered("a"),
    Chosen(1, 2), started("000001.0001"), EndedReplica("000001.0001", 1.0), PLATFORM, replace(CASE, replica=0),
    Condemned(1, ""), Lowered({}, {}), Lost([1]), Done(Speed(2.0, 1.0, 5.0, 5.0)),
)  # fmt: skip
LINES: dict[str, dict[str, Any]] = {
    "extent": {"kind": "extent", **asdict(FIRST), "source_fingerprint": "input", "limit": 5},
    "part": part_line(replace(part(2), retry=1, replica=0, incarnation="000001.0001")),
} | {line["kind"]: line for line in map(record_line, RECORDS)}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, line in LINES.items() for field in line])
def test_a_field_of_another_type_is_damage(name: str, field: str) -> None:
    line = LINES[name]
    assert read_line(line) is not None
    with pytest.raises((ValueError, LookupError)):
        read_line({**line, field: -1.5})


def test_a_manifest_without_its_first_log_is_damage(folder: Folder) -> None:
    begin(folder).close()
    manifest = open_(folder, 2)
    manifest.record(Lost([]))
    manifest.commit()
    folder.delete("manifest/000001.jsonl")
    with pytest.raises(OutputError, match=r"000002.jsonl is damaged: neither it nor a later log has the job's header"):
        read_state(folder)


def beginning(folder: Folder, epoch: int, job_id: str = HEADER.job_id) -> Manifest:
    manifest = open_(folder, epoch)
    manifest.record(Beginning(job_id))
    manifest.record(started(f"{epoch:06d}.0001"))
    manifest.commit()
    return manifest


def test_a_beginning_is_no_job(folder: Folder) -> None:
    beginning(folder, 1).close()
    manifest = beginning(folder, 2)
    manifest.record(EndedReplica("000002.0001", 2.0))
    manifest.commit()
    assert read_state(folder) is None
    before = read_beginning(folder)
    assert (before.job_id, before.device_s, before.last_epoch) == (HEADER.job_id, 2.0, 0)
    assert [one.incarnation for one in before.of(StartedReplica)] == ["000001.0001"]
    manifest.record(HEADER)
    manifest.extent(FIRST, "input")
    manifest.commit()
    manifest.close()
    for epoch in (None, 3, 4):  # as it is, and folded into one
        if epoch is not None:
            open_(folder, epoch).close()
        state = state_of(folder)
        assert (state.job_id, state.device_s) == (HEADER.job_id, 2.0)
        assert state.of(StartedReplica) == before.of(StartedReplica)


@pytest.mark.parametrize("record", [PLATFORM, Recovered(HEADER.job_id), started("000002.0002")])
def test_a_log_of_a_job_that_had_begun_is_no_beginning(folder: Folder, record: Any) -> None:
    manifest = open_(folder, 2) if isinstance(record, StartedReplica) else beginning(folder, 2)
    manifest.record(record)
    manifest.commit()
    with pytest.raises(OutputError, match="neither it nor a later log has the job's header"):
        read_state(folder)


def test_a_beginning_of_another_job_is_damage(folder: Folder) -> None:
    beginning(folder, 1, "another").close()
    begin(folder, 2).close()
    with pytest.raises(OutputError, match=r"000002.jsonl is damaged: it is a log of another job"):
        read_state(folder)


def test_logs_that_cannot_be_read(folder: Folder) -> None:
    folder.path("manifest/000001.jsonl").symlink_to("nowhere")
    with pytest.raises(OutputError, match=r"cannot read .*manifest: no such file or directory"):
        read_state(folder)
    folder.delete("manifest/000001.jsonl")
    folder.make("manifest/000001.jsonl")
    with pytest.raises(OutputError, match=r"cannot read .*manifest: is a directory"):
        read_state(folder)


# -- compaction --------------------------------------------------------------------------------------------------------


def fill(folder: Folder) -> dict[str, Any] | None:
    """Two logs, the second with a torn tail; returns what they say."""
    manifest = begin(folder)
    manifest.part(part(0, num_errors=1), 0, "000001.0001")
    manifest.record(started("000001.0001"))
    manifest.record(started("000001.0002"))
    manifest.record(EndedReplica("000001.0001", 2.5, has_devices=True))
    manifest.commit()
    manifest.close()
    manifest = open_(folder, 2)
    manifest.part(part(4))
    manifest.part(part(0))
    manifest.commit()
    manifest.close()
    with folder.path("manifest/000002.jsonl").open("ab") as file:
        file.write(encode_commits([[part_line(part(5))]], 1)[:-1])
    return view(state_of(folder))


def test_the_third_log_holds_them_all(folder: Folder) -> None:
    before = fill(folder)
    manifest = open_(folder, 3)
    assert logs(folder) == ["000003.jsonl"]
    assert (view(state_of(folder)), state_of(folder).last_epoch) == (before, 3)
    manifest.part(part(5))
    manifest.record(Done())
    manifest.commit()
    manifest.close()
    before = view(state_of(folder))
    for epoch in (4, 5, 8):
        open_(folder, epoch).close()
        assert view(state_of(folder)) == before
    assert logs(folder) == ["000005.jsonl", "000008.jsonl"]


def test_replicas_that_have_ended_are_only_summed_up(folder: Folder) -> None:
    manifest = begin(folder)
    manifest.record(started("a"))
    for number in range(750):
        manifest.record(EndedReplica(str(number), 1.0, has_devices=number == 0))
    manifest.commit()
    for epoch in (2, 3, 4, 5):
        open_(folder, epoch).close()
        state = state_of(folder)
        assert (state.device_s, state.had_devices) == (750, True)
        assert [one.incarnation for one in state.of(StartedReplica)] == ["a"]
    assert sum(map(len, (folder.read(f"manifest/{name}") for name in logs(folder)))) < 10_000


OPEN = """
import sys
from batchinf.manifest.log import Manifest
from batchinf.base.storage import Folder
Manifest(Folder(sys.argv[1]), 3)
"""


@pytest.mark.parametrize(
    ("step", "left"),
    [
        ("before_rename", ["000001.jsonl", "000002.jsonl"]),
        ("before_delete", ["000001.jsonl", "000002.jsonl", "000003.jsonl"]),
        ("before_delete:2", ["000002.jsonl", "000003.jsonl"]),
    ],
)
def test_killed_while_compacting(folder: Folder, step: str, left: list[str]) -> None:
    before = fill(folder)
    environment = {**os.environ, "BATCHINF_FAULTS": f"manifest.compact.{step}=kill"}
    command = [sys.executable, "-c", OPEN, os.fspath(folder.root)]
    assert subprocess.run(command, env=environment, check=False).returncode == -9
    assert (logs(folder), view(state_of(folder))) == (left, before)
    open_(folder, 4).close()
    assert (logs(folder), view(state_of(folder))) == (["000004.jsonl"], before)


@pytest.mark.parametrize("left", [(), (1,), (2,), (1, 2)])
def test_deletions_that_a_power_cut_undoes(folder: Folder, left: tuple[int, ...]) -> None:
    before = fill(folder)
    contents = {number: folder.path(f"manifest/{number:06d}.jsonl").read_bytes() for number in left}
    open_(folder, 3).close()
    for number, content in contents.items():
        folder.path(f"manifest/{number:06d}.jsonl").write_bytes(content)
    assert view(state_of(folder)) == before
    open_(folder, 4).close()
    assert view(state_of(folder)) == before
    assert not {f"{number:06d}.jsonl" for number in left} & {*logs(folder)}


@contextlib.contextmanager
def flipped(path: pathlib.Path, offset: int, bit: int) -> Iterator[None]:
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << bit]), offset)
        yield
        os.pwrite(file.fileno(), byte, offset)


def test_a_half_written_snapshot_counts_for_nothing(folder: Folder) -> None:
    # Where a file system has no hard links the snapshot can be seen half written.
    before = fill(folder)
    old = [folder.path(f"manifest/{name}") for name in logs(folder)]
    for path in old:
        path.with_suffix(".kept").hardlink_to(path)
    open_(folder, 3)
    snapshot = folder.path("manifest/000003.jsonl")
    data = snapshot.read_bytes()
    first_commit = data.index(b"\n", data.index(b'"commit"'))
    for size in reversed(range(0, len(data), 7)):
        os.truncate(snapshot, size)
        if size > first_commit:
            with pytest.raises(OutputError, match=r"000003.jsonl is damaged: its snapshot is incomplete"):
                read_state(folder)
        for path in old:
            path.hardlink_to(path.with_suffix(".kept"))
        assert view(state_of(folder)) == before
        for path in old:
            path.unlink()


def test_a_snapshot_of_which_some_commits_are_written_counts_for_nothing(folder: Folder) -> None:
    manifest = begin(folder)
    manifest.extent(next_extent([FIRST], 2000, 1), "more input")
    for shard in range(1500):
        manifest.part(part(shard))
    manifest.commit()
    open_(folder, 2)
    before = view(state_of(folder))
    old = folder.read("manifest/000001.jsonl")
    open_(folder, 3)
    data = folder.read("manifest/000003.jsonl")
    os.truncate(folder.path("manifest/000003.jsonl"), data.index(b"\n", data.index(b'"commit":1')) + 1)
    with pytest.raises(OutputError, match=r"000003.jsonl is damaged: its snapshot is incomplete"):
        read_state(folder)
    folder.write_atomic("manifest/000001.jsonl", old)
    folder.write_atomic("manifest/000002.jsonl", b"")
    assert view(state_of(folder)) == before


def test_any_byte_of_a_snapshot_is_guarded(folder: Folder) -> None:
    before = fill(folder)
    manifest = open_(folder, 3)
    path = folder.path("manifest/000003.jsonl")
    size = path.stat().st_size
    manifest.part(part(5))
    manifest.commit()
    # Every eleventh will do: all of a line is under one checksum.
    for offset in range(0, path.stat().st_size, 11):
        with flipped(path, offset, offset % 8):
            if offset < size:
                with pytest.raises(OutputError, match=r"000003.jsonl is damaged"):
                    read_state(folder)
            else:
                assert view(state_of(folder)) == before


def test_a_reader_needs_no_lock(folder: Folder) -> None:
    manifest = begin(folder)
    manifest.extent(next_extent([FIRST], 100, 1), "more input")
    manifest.commit()

    def run_epochs() -> None:
        for epoch in range(2, 60):
            manifest = open_(folder, epoch)
            manifest.part(part(epoch))
            manifest.commit()

    thread = threading.Thread(target=run_epochs)
    thread.start()
    seen = [0]
    while thread.is_alive():
        seen.append(len(state_of(folder).parts))
    thread.join()
    assert seen == sorted(seen)
    assert len(state_of(folder).parts) == 58


# -- any history, cut anywhere -----------------------------------------------------------------------------------------


@dataclass
class Model:
    """What a history comes to, kept the simplest way."""

    extents: list[tuple[int, int]] = field(default_factory=lambda: [(FIRST.num_rows, FIRST.rows_per_shard)])
    parts: dict[int, Part] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    device_s: float = 0.0
    is_done: bool = False

    def agrees(self, state: State) -> bool:
        totals = [sum(getattr(part, name) for part in self.parts.values()) for name in ("num_rows", "num_errors")]
        return (
            state.header == HEADER
            and [(extent.num_rows, extent.rows_per_shard) for extent in state.extents] == self.extents
            and len(state.committed) == total_shards(state.extents)
            and state.parts == self.parts
            and set(np.flatnonzero(state.committed)) == self.parts.keys()
            and [state.counts.num_rows, state.counts.num_errors] == totals
            and [one.incarnation for one in state.of(StartedReplica)] == self.groups
            and (state.device_s, state.is_done) == (self.device_s, self.is_done)
        )


def do(step: tuple[str, int], model: Model, manifest: Manifest, extents: list[Extent]) -> None:
    kind, value = step
    match kind:
        case "part":
            model.parts[value % 10] = part(value % 10, 1 + value % 7, value % 2)
            manifest.part(model.parts[value % 10])
        case "event":
            manifest.event(f"happening {value}", value=value)
        case "started" if str(value) not in model.groups:
            model.groups.append(str(value))
            manifest.record(started(str(value)))
        case "ended" if str(value) in model.groups:
            model.groups.remove(str(value))
            model.device_s += value
            manifest.record(EndedReplica(str(value), float(value)))
        case "extent":
            model.extents.append((value, 3))
            extents.append(next_extent(extents, value, 3))
            manifest.extent(extents[-1], "more")
            model.is_done = False
        case "done":
            model.is_done = True
            manifest.record(Done())


STEPS = ["part", "part", "part", "event", "started", "ended", "extent", "done", "commit", "commit", "epoch"]
histories = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 12)), max_size=60)


@settings(max_examples=40, deadline=None)
@given(histories, st.integers(0))
def test_any_history_cut_at_any_byte_is_a_prefix_of_it(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int]], cut: int
) -> None:
    folder = Folder(tmp_path_factory.mktemp("job"))
    folder.make("manifest")
    manifest, model, epoch, extents = begin(folder), Model(), 1, [FIRST]

    def size() -> int:
        return folder.path(f"manifest/{epoch:06d}.jsonl").stat().st_size

    committed = [(size(), copy.deepcopy(model))]
    for step in [*history, ("commit", 0)]:
        do(step, model, manifest, extents)
        if step[0] in ("commit", "epoch"):
            manifest.commit()
            committed.append((size(), copy.deepcopy(model)))
        if step[0] == "epoch":
            manifest.close()
            epoch += 1
            manifest = open_(folder, epoch)
            committed = [(size(), copy.deepcopy(model))]
    manifest.close()
    assert len(logs(folder)) <= 2
    assert model.agrees(state_of(folder))
    least = committed[0][0]
    length = least + cut % (size() - least + 1)
    os.truncate(folder.path(f"manifest/{epoch:06d}.jsonl"), length)
    assert [end_model for end, end_model in committed if end <= length][-1].agrees(state_of(folder))

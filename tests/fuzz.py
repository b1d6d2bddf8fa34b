"""Fuzzing: damages valid files where their structure is, and reads them as the commands do.

    python tests/fuzz.py [--cases 50000] [--seed 0] [--target NAME]...

Each target runs in its own process, because a damaged file may crash a native library. The folder of the crashed case
is kept. A case passes if it succeeds, or if it raises a printable UserError or OSError, which the command line shows as
one line. Everything else is a bug.
"""

import argparse
import contextlib
import copy
import faulthandler
import functools
import gzip
import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jobs
from batchinf.base.errors import RowError, UserError
from batchinf.base.storage import FileHeader, Folder
from batchinf.commands.head import read_head
from batchinf.commands.status import job_status, stored_spec
from batchinf.commands.text.status import status_lines
from batchinf.coordinator import recovery
from batchinf.coordinator.display import status_line
from batchinf.fleet.local.backend import LocalBackend
from batchinf.fleet.local.channel import Channel
from batchinf.fleet.status import STATUS_FILE, read_status
from batchinf.manifest.commit_log import encode_commits
from batchinf.manifest.lock import LOCK, Holder, JobLock
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import parse_part_name
from batchinf.manifest.state import last_epoch, read_state
from batchinf.output import journal, parts
from batchinf.output.journal import Journal
from batchinf.output.parts import OpenShard, verify_part
from batchinf.prompts.builder import Renderer
from batchinf.records import Shard
from batchinf.replica.messages import Assign, Failed, Progress
from batchinf.schedule.shards import total_shards
from batchinf.source.files import InputLocation
from batchinf.source.rows import Row, open_source
from batchinf.spec.file import check_engine_arguments, dump_spec, read_spec
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

CASE_S = 30  # a case that takes longer counts as hanging
MEMORY_BYTES = 8 << 30  # of address space; only a damaged size can ask for more
MAX_ROWS = 2_000  # to read of an input, as a damaged file may claim to have more


@dataclass(frozen=True)
class Target:
    """strategy: makes a case. run: runs one case in its own folder, with the result of `prepare`. weight: its share."""

    strategy: Callable[[Any], st.SearchStrategy[Any]]
    run: Callable[[pathlib.Path, Any, Any], None]
    prepare: Callable[[pathlib.Path], Any]
    weight: int = 1


# -- damage to bytes ---------------------------------------------------------------------------------------------------

_NUMBERS = [
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    256,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    -1,
    -2,
    -(2**31),
    -(2**63),
]
_PLACES = st.tuples(st.sampled_from(["anywhere", "anywhere", "head", "tail"]), st.integers(0, 2**20))
_LENGTHS = st.sampled_from([1, 1, 2, 4, 8, 16, 64, 500])
HURTS = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), _PLACES, st.integers(0, 7)),
        st.tuples(st.just("flip"), _PLACES, st.integers(0, 7)),
        st.tuples(st.just("byte"), _PLACES, st.integers(0, 255)),
        st.tuples(st.just("number"), _PLACES, st.sampled_from(["<i", "<q", ">i"]), st.sampled_from(_NUMBERS)),
        st.tuples(st.just("insert"), _PLACES, st.binary(min_size=1, max_size=16)),
        st.tuples(st.just("cut"), _PLACES, _LENGTHS),
        st.tuples(st.just("zero"), _PLACES, _LENGTHS),
        st.tuples(st.just("repeat"), _PLACES, _LENGTHS, _PLACES),
        st.tuples(st.just("swap"), _PLACES, _PLACES, _LENGTHS),
        st.tuples(st.just("truncate"), _PLACES),
    ),
    min_size=1,
    max_size=4,
)


def hurt(data: bytes, hurts: list[tuple[Any, ...]]) -> bytes:
    """The bytes after all of this damage, in order."""
    out = bytearray(data)
    for kind, place, *rest in hurts:
        at = _at(len(out), place)
        if kind == "flip" and out:
            out[at] ^= 1 << rest[0]
        elif kind == "byte" and out:
            out[at] = rest[0]
        elif kind == "number":
            width = struct.calcsize(rest[0])
            number = struct.pack(rest[0], (rest[1] + 2 ** (8 * width - 1)) % 2 ** (8 * width) - 2 ** (8 * width - 1))
            out[at : at + width] = number
        elif kind == "insert":
            out[at:at] = rest[0]
        elif kind == "cut":
            del out[at : at + rest[0]]
        elif kind == "zero":
            out[at : at + rest[0]] = bytes(len(out[at : at + rest[0]]))
        elif kind == "repeat":
            to = _at(len(out), rest[1])
            out[to:to] = out[at : at + rest[0]]
        elif kind == "swap":
            to, length = _at(len(out), rest[0]), rest[1]
            first, second = out[at : at + length], out[to : to + length]
            out[at : at + length], out[to : to + length] = second[: len(first)], first[: len(second)]
        elif kind == "truncate":
            del out[at:]
    return bytes(out)


def _at(length: int, place: tuple[str, int]) -> int:
    where, number = place
    if length == 0:
        return 0
    if where == "head":
        return number % min(length, 64)
    return length - 1 - number % min(length, 600) if where == "tail" else number % length


# -- damage to values --------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.sampled_from([10**30, 10**400, -(10**400), 0.5, -1.5, 1e308, float("inf"), float("nan")]),
    st.sampled_from(["", "x", "1", "\0", "../x", "/", "\ud800", "\x1b[2J", "a" * 5000, "2020-01-01T00:00:00+00:00"]),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "set", "set", "delete", "rename", "repeat"]), st.integers(0, 2**20), VALUES
    ),
    min_size=1,
    max_size=3,
)


def edit(value: Any, edits: list[tuple[str, int, Any]]) -> Any:
    """A copy of a JSON value with fields set, deleted, renamed or repeated at any depth."""
    holder = [copy.deepcopy(value)]
    for kind, number, new in edits:
        places = list(_slots(holder))
        where, key = places[number % len(places)]
        if kind == "set" or where is holder:
            where[key] = new
        elif kind == "delete":
            del where[key]
        elif isinstance(where, dict):
            where[new if isinstance(new, str) else f"{key}x"] = where[key] if kind == "repeat" else where.pop(key)
        else:
            where.insert(key, copy.deepcopy(where[number % len(where)]))
    return holder[0]


def _slots(value: Any) -> Iterator[tuple[Any, Any]]:
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, inner in items:
        yield value, key
        yield from _slots(inner)


# -- spec --------------------------------------------------------------------------------------------------------------


def _specs(folder: pathlib.Path) -> list[tuple[bytes, Any]]:
    paths = [*sorted((jobs.ROOT / "jobs").glob("*.yaml")), jobs.spec_of(folder)]
    own = b"""# with an anchor, a merge, a block text and all kinds of numbers
model: {name: sample_data/tiny-llama, dtype: float32}
input:
  path: $HOME/x.jsonl
  prompt_template: |
    Say {{ prompt }}
engine: &base {temperature: 0.5, top_p: 1e-1}
sampling: {<<: *base, stop: ["\\n", "end"], max_tokens: 0x10, logprobs: 5}
output: {path: ~/out, keep_columns: [a, b]}
"""
    texts = [path.read_bytes() for path in paths] + [own, own]
    return [(text, yaml.safe_load(text)) for text in texts]


_GOOD_SETS = [
    "sampling.max_tokens=5",
    "model=m",
    "engine.max_model_len=9",
    "output.path=~/o",
    "sampling.stop=[a, b]",
    "input.path=$HOME/x",
]
_SETS = st.lists(
    st.one_of(
        st.sampled_from(_GOOD_SETS),
        st.tuples(
            st.sampled_from(["sampling.max_tokens", "sampling.stop", "model", "engine.x.y", "input", "a.b", "", "."]),
            st.sampled_from(["=", "=", "=", ""]),
            st.one_of(VALUES.map(json.dumps), st.text(max_size=12)),
        ).map("".join),
    ),
    max_size=2,
).map(lambda sets: sets if len(sets) < 2 else sets[:1] if sets[0] in _GOOD_SETS else sets)


def _spec_case(bases: list[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(
        st.integers(0, len(bases) - 1), st.one_of(st.none(), EDITS), st.one_of(st.none(), HURTS), _SETS, st.booleans()
    )


def _run_spec(folder: pathlib.Path, made: list[Any], case: Any) -> None:
    number, edits, hurts, overrides, as_json = case
    text, data = made[number]
    if edits is not None:
        data = edit(data, edits)
        try:
            text = (json.dumps(data) if as_json else yaml.safe_dump(data, allow_unicode=True)).encode(errors="replace")
        except yaml.YAMLError:
            text = json.dumps(data).encode()
    path = folder / "job.yaml"
    path.write_bytes(text if hurts is None else hurt(text, hurts))
    file = read_spec(path, [line.replace("\0", "") for line in overrides])
    again = folder / "again.yaml"
    again.write_text(dump_spec(file.spec))
    assert read_spec(again).spec == file.spec
    check_engine_arguments(file, frozenset({"max_model_len", "temperature", "top_p"}))


# -- the output folder -------------------------------------------------------------------------------------------------


JOB = "BATCHINF_FUZZ_JOB"  # environment variable: the folder of a job that several targets use


def _job(folder: pathlib.Path) -> pathlib.Path:
    """A copy of the output folder of a killed job."""
    if JOB not in os.environ:
        return make_job(folder)
    return pathlib.Path(shutil.copytree(os.environ[JOB], folder / "out"))


def make_job(folder: pathlib.Path) -> pathlib.Path:
    """Make the output folder of a killed job: parts, a journal, two logs."""
    spec = jobs.spec_of(
        folder,
        output={"rows_per_shard": 16},
        sampling={"n": 2, "temperature": 1.0},
        scripted={"step_s": 0.01},
        checkpoint_interval_s=0.05,
    )
    out = folder / "out"
    for num_parts in (2, 4):
        process = jobs.start("run", spec)
        jobs.wait_until(lambda: _counts(out)[0] >= num_parts and _counts(out)[1] >= 3)  # noqa: B023
        jobs.kill(jobs.family(process.pid))
        process.communicate(timeout=60)
    for path in out.glob("*/.tmp-*"):
        path.unlink()
    assert journal.list_shards(Folder(out))
    return out


def _counts(out: pathlib.Path) -> tuple[int, int]:
    """Numbers of parts and segments."""
    return len(Folder(out).list("parts", "part-")), len(Folder(out).list("journal"))


def _link(source: pathlib.Path, target: pathlib.Path, but: str) -> None:
    """Copy a folder with links to its files. Only the entry `but` is a real copy."""
    target.mkdir()
    for path in source.iterdir():
        if path.name == but:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, target / path.name)
        else:
            (target / path.name).symlink_to(path)


def _look(out: pathlib.Path, num_rows: int = 30) -> None:
    """Run `status` and `head`, and check that their output can be printed."""
    errors = []
    for lines in (
        lambda path: status_lines(job_status(path)),
        lambda path: map(
            functools.partial(json.dumps, ensure_ascii=False, default=str), read_head(path, num_rows).rows
        ),
    ):
        try:
            for line in lines(str(out)):
                line.encode()
        except UserError as error:
            errors.append(error)
    if errors:
        raise errors[0]


@dataclass
class _Logs:
    out: pathlib.Path
    raw: list[bytes]
    commits: list[list[dict[str, Any]]]


def _logs(folder: pathlib.Path) -> _Logs:
    out = _job(folder)
    raw = [path.read_bytes() for path in sorted((out / "manifest").iterdir())]
    commits, lines = [], []
    for line in b"".join(raw).splitlines():
        fields = json.loads(line)
        del fields["crc"]
        is_last = fields.pop("commit", None) is not None
        lines.append(fields)
        if is_last:
            commits.append(lines)
            lines = []
    # Kinds of lines that this manifest does not have.
    state = read_state(Folder(out))
    assert state is not None
    group = {"replica": 0, "incarnation": "1.1", "backend": "local", "identity": {"pgid": 7}}
    at = "2026-01-01T00:00:00.000+00:00"
    snapshot = [
        {
            "kind": "snapshot",
            "at": at,
            "replaces": [],
            "device_s": 1.5,
            "event_counts": {"ready": 1},
            "running_replicas": [group],
        }
    ]
    header = next(fields for commit in commits for fields in commit if fields["kind"] == "header")
    extent = next(fields for commit in commits for fields in commit if fields["kind"] == "extent")
    counted = {"kind": "counted_event", "name": "epoch", "at": at, "epoch": 1, "adopted": 0, "lost": []}
    done = {"kind": "done", "name": "done", "at": at}
    commits += [[*snapshot, header, extent, counted, done], [{"kind": "snapshot_end"}]]
    for fields in (fields for commit in commits for fields in commit):
        for name in ("host", "boot_id"):
            if name in fields:
                fields[name] = "another"  # a case must not end a process group of this host
    return _Logs(out, raw, commits)


def _manifest_case(made: _Logs) -> st.SearchStrategy[Any]:
    place = st.integers(0, 2**20)
    ops = st.lists(
        st.one_of(
            st.tuples(st.just("edit"), place, EDITS),
            st.tuples(st.just("edit"), place, EDITS),
            st.tuples(st.just("drop"), place, st.none()),
            st.tuples(st.just("repeat"), place, place),
            st.tuples(st.just("swap"), place, place),
            st.tuples(st.just("foreign"), place, st.dictionaries(st.text(max_size=6), VALUES, max_size=3)),
        ),
        min_size=1,
        max_size=3,
    )
    return st.tuples(
        st.one_of(
            st.tuples(st.just("lines"), ops),
            st.tuples(st.just("lines"), ops),
            st.tuples(st.just("bytes"), HURTS),
            st.tuples(st.just("raw"), st.lists(st.tuples(place, st.binary(max_size=30)), min_size=1, max_size=2)),
        ),
        st.integers(1, 3),
    )


def _run_manifest(folder: pathlib.Path, made: _Logs, case: Any) -> None:
    (kind, hurts), num_logs = case
    out = folder / "out"
    _link(made.out, out, "manifest")
    logs = [path.read_bytes() for path in sorted((out / "manifest").iterdir())]
    if kind == "bytes":
        logs[num_logs % len(logs)] = hurt(logs[num_logs % len(logs)], hurts)
    elif kind == "raw":
        # Lines that are not JSON but have the right checksum.
        lines = logs[-1].splitlines(keepends=True)
        for number, body in hurts:
            body = body.replace(b"\n", b"")
            lines.insert(number % (len(lines) + 1), body + b',"crc":"%08x"}\n' % zlib.crc32(body + b"}"))
        logs[-1] = b"".join(lines)
    else:
        commits = copy.deepcopy(made.commits)
        for what, number, argument in hurts:
            commit = commits[number % len(commits)]
            line = number // len(commits) % len(commit)
            if what == "edit":
                edited = edit(commit[line], argument)
                commit[line] = edited if isinstance(edited, dict) else {"kind": edited}
            elif what == "drop" and len(commits) > 1:
                commits.remove(commit)
            elif what == "repeat":
                commits.insert(argument % len(commits), copy.deepcopy(commit))
            elif what == "swap":
                other = argument % len(commits)
                place = commits.index(commit)
                commits[place], commits[other] = commits[other], commits[place]
            elif what == "foreign":
                commits.insert(number % len(commits), [argument])
        cut = len(commits) * num_logs // 4
        logs = [encode_commits(commits[:cut]), encode_commits(commits[cut:])]
    for path in (out / "manifest").iterdir():
        path.unlink()
    for number, log in enumerate(logs, 1):
        (out / "manifest" / f"{number:06d}.jsonl").write_bytes(log)
    with contextlib.suppress(UserError):
        _look(out)
    own = Folder(out)
    state = read_state(own)
    if state is None:
        return
    stored_spec(state.header.spec)
    LocalBackend().end_leftovers(state.running_replicas, state.job_id)
    for event in state.events:
        assert event.name != "ready" or isinstance(event.fields["versions"], dict)
    epoch = last_epoch(own) + 1
    manifest = Manifest(own, epoch, None, state)
    recovery.note_ended(state, None, manifest)
    manifest.commit()
    manifest.close()
    assert read_state(own) is not None


def _json_case(made: tuple[pathlib.Path, Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(EDITS, st.none()),
        st.tuples(EDITS, st.none()),
        st.tuples(st.none(), HURTS),
        st.tuples(st.none(), st.binary(max_size=40)),
    )


def _json_bytes(base: Any, case: Any) -> bytes:
    edits, hurts = case
    if edits is not None:
        return json.dumps(edit(base, edits)).encode()
    return hurts if isinstance(hurts, bytes) else hurt(json.dumps(base).encode(), hurts)


_HOLDERS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(["host", "machine", "boot_id", "pid_namespace", "since", "token"], st.text(max_size=9)),
        **dict.fromkeys(["pid", "start_time", "epoch", "heartbeat"], st.integers() | st.sampled_from(_NUMBERS)),
    },
)


def _lock_case(made: tuple[pathlib.Path, Any]) -> st.SearchStrategy[Any]:
    return st.one_of(_json_case(made), st.tuples(_HOLDERS, st.none()), st.tuples(_HOLDERS, st.none()))


def _lock_base(folder: pathlib.Path) -> tuple[pathlib.Path, Any]:
    return _job(folder), asdict(Holder.this_process())


def _run_lock(folder: pathlib.Path, made: tuple[pathlib.Path, Any], case: Any) -> None:
    out = folder / "out"
    _link(made[0], out, LOCK)
    is_whole = isinstance(case[0], dict)
    (out / LOCK).write_bytes(json.dumps({**made[1], **case[0]}).encode() if is_whole else _json_bytes(made[1], case))
    for line in status_lines(job_status(str(out))):
        line.encode()
    lock = JobLock(Folder(out))
    try:
        lock.acquire(lambda: 1, takeover_after_s=0.0)
        lock.check()
    finally:
        lock.release()


def _status_base(folder: pathlib.Path) -> tuple[pathlib.Path, Any]:
    out = _job(folder)
    (out / LOCK).write_bytes(Holder.this_process().encode())
    return out, json.loads((out / STATUS_FILE).read_bytes())


def _run_status(folder: pathlib.Path, made: tuple[pathlib.Path, Any], case: Any) -> None:
    out = folder / "out"
    _link(made[0], out, STATUS_FILE)
    (out / LOCK).unlink()
    (out / LOCK).write_bytes(Holder.this_process().encode())
    (out / STATUS_FILE).write_bytes(_json_bytes(made[1], case))
    for line in status_lines(job_status(str(out))):
        line.encode()
    state = read_state(Folder(out))
    assert state is not None
    with contextlib.closing(_Recording()) as manifest:
        recovery.note_ended(state, read_status(Folder(out)), manifest)  # type: ignore[arg-type]
    if (status := read_status(Folder(out))) is not None:
        status_line(status).encode()


class _Recording:
    """Turns the events for a manifest into lines."""

    def event(self, name: str, /, **fields: Any) -> None:
        encode_commits([[{"name": name, **fields}]])

    def close(self) -> None:
        pass


# -- segments and parts ------------------------------------------------------------------------------------------------


def _sealed_segment(data: bytes, payload: bytes, num_rows: int | None = None) -> bytes:
    """A segment's bytes with another payload and the right checksum."""
    header = FileHeader.decode(data)
    assert header is not None
    rows = header.second if num_rows is None else num_rows
    return FileHeader(header.number, len(payload), rows, xxhash.xxh3_128_digest(payload)).encode() + payload


def _journal_case(out: pathlib.Path) -> st.SearchStrategy[Any]:
    names = sorted(path.name for path in (out / "journal").iterdir())
    return st.tuples(
        st.sampled_from(names),
        st.sampled_from(["bytes", "sealed", "sealed", "splice", "keys"]),
        HURTS,
        st.sampled_from(names),
        st.sampled_from(_NUMBERS),
        st.integers(0, 2),
    )


def _run_journal(folder: pathlib.Path, made: pathlib.Path, case: Any) -> None:
    name, kind, hurts, other, number, column = case
    out = folder / "out"
    _link(made, out, "journal")
    path = out / "journal" / name
    data = path.read_bytes()
    if kind == "bytes":
        data = hurt(data, hurts)
    elif kind == "sealed":
        data = _sealed_segment(data, hurt(data[64:], hurts))
    elif kind == "splice":
        second = (made / "journal" / other).read_bytes()
        cut = _at(len(second), hurts[0][1])
        data = data[: len(data) // 2] + second[cut:]
    else:
        table = pa.ipc.open_stream(data[64:]).read_all()
        field = table.schema.field(column)
        bits = 63 if field.type == pa.int64() else 31
        values = table.column(column).to_pylist()
        values[0] = None if number == 7 else max(-(2**bits), min(number, 2**bits - 1))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table.set_column(column, field, pa.array(values, field.type)))
        data = _sealed_segment(data, sink.getvalue().to_pybytes())
    path.write_bytes(data)
    own = Folder(out)
    state = read_state(own)
    assert state is not None
    spec = JobSpec.model_validate(state.header.spec)
    task = task_of(spec)
    index = int(name.split("-")[0])
    shard = OpenShard(jobs_shard(state, index), task, Journal(own, "fuzz", task.result_schema))
    shard.recover()
    shard.are_finished(0, shard.shard.num_rows)
    if shard.segments:
        # What closing the shard does with recovered results.
        parts._Merged(shard).take(0, min(shard.num_results, 3)) if shard.is_complete else [
            s.table().to_pylist() for s in shard.segments
        ]
    shard.close()
    _look(out, 100)


def jobs_shard(state: Any, index: int) -> Shard:
    from batchinf.schedule.shards import shard_at

    assert index < total_shards(state.extents)
    return shard_at(state.extents, index)


def _part_case(out: pathlib.Path) -> st.SearchStrategy[Any]:
    names = sorted(path.name for path in (out / "parts").iterdir())
    return st.tuples(
        st.sampled_from(names),
        st.sampled_from(["bytes", "sealed", "sealed", "splice"]),
        HURTS,
        st.sampled_from(names),
        st.booleans(),
    )


def _run_part(folder: pathlib.Path, made: pathlib.Path, case: Any) -> None:
    name, kind, hurts, other, is_deep = case
    out = folder / "out"
    _link(made, out, "parts")
    path = out / "parts" / name
    data = path.read_bytes()
    if kind == "splice":
        second = (made / "parts" / other).read_bytes()
        data = data[: _at(len(data), hurts[0][1])] + second[_at(len(second), hurts[-1][1]) :]
    else:
        data = hurt(data, hurts)
    if kind == "sealed":
        data = _sealed_part(data)
    path.write_bytes(data)
    own = Folder(out)
    state = read_state(own)
    assert state is not None
    shard = jobs_shard(state, parse_part_name(name) or 0)
    verify_part(own, f"parts/{name}", shard, state.header.fingerprint, deep=is_deep)
    _look(out, 100)


def _sealed_part(data: bytes) -> bytes:
    """The bytes of a part with the right seal, if they still have a place for it."""
    start = max(0, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
    end = bytearray(data[start:])
    with contextlib.suppress(ValueError):
        place = journal._seal_place(end)
        end[place] = journal.UNSEALED["batchinf.seal"].encode()
        digest = xxhash.xxh3_128(data[:start])
        digest.update(end)
        end[place] = digest.hexdigest().encode()
    return data[:start] + bytes(end)


# -- messages ----------------------------------------------------------------------------------------------------------


def _channel_base(folder: pathlib.Path) -> list[Any]:
    from batchinf.records import EngineStats

    messages = [
        Assign((Shard(0, 0, 4), Shard(1, 4, 9)), 2),
        Failed("InputError", "x", 2),
        Progress(1, {"refused": 2}, 3, 4, 5, 6, 0.5, EngineStats()),
    ]
    return [
        {"kind": type(m).__name__, "incarnation": "1", "sequence": i + 1, "body": asdict(m)}
        for i, m in enumerate(messages)
    ]


def _channel_case(base: list[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.integers(0, len(base) - 1), st.one_of(st.tuples(EDITS, st.none()), st.tuples(st.none(), HURTS)))


def _run_channel(folder: pathlib.Path, base: list[Any], case: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, "1")
        theirs.sendall(_json_bytes(base[case[0]], case[1]) + b"\n")
        for message in channel.receive(1.0):
            asdict(message)
        channel.close()


# -- inputs ------------------------------------------------------------------------------------------------------------


def _records() -> list[dict[str, Any]]:
    words = ["a", "héllo", "日本", "two words", "😀", 'q"uote', "com,ma", "new\nline", ""]
    return [
        {
            "id": i,
            "prompt": " ".join(words[i % 9 : i % 9 + 3]),
            "score": i / 4,
            "is_odd": i % 2 == 1,
            "tags": words[: i % 3],
            "meta": {"k": i, "v": words[i % 9]},
        }
        for i in range(60)
    ]


def _table() -> pa.Table:
    table = pa.Table.from_pylist(_records())
    kind = pa.array([f"kind {i % 3}" for i in range(60)]).dictionary_encode()
    times = pa.array([1_700_000_000_000_000 + i for i in range(60)], pa.timestamp("us", "UTC"))
    money = pa.array([None if i % 5 == 0 else i for i in range(60)], pa.int32())
    big = pa.array([f"b{i}" for i in range(60)], pa.large_string())
    for name, column in {"kind": kind, "at": times, "maybe": money, "big": big}.items():
        table = table.append_column(name, column)
    return table


def _input_files(folder: pathlib.Path, format: str) -> list[tuple[str, bytes]]:
    """Undamaged files of a format, by name."""
    lines = "\n".join(json.dumps(record, ensure_ascii=False) for record in _records()).encode()
    deep = b'{"prompt": "x", "deep": ' + b"[" * 400 + b"]" * 400 + b"}\n" + b'{"prompt": "y", "deep": 1}\n' + lines
    if format == "jsonl":
        return [("a.jsonl", lines), ("deep.jsonl", deep)]
    if format == "jsonl.gz":
        return [
            ("a.jsonl.gz", gzip.compress(lines, mtime=0)),
            ("b.jsonl.gz", gzip.compress(lines[:2000], mtime=0) + gzip.compress(lines, mtime=0)),
        ]
    if format == "jsonl.zst":
        return [("a.jsonl.zst", pa.compress(lines, "zstd", asbytes=True))]
    if format == "text":
        return [
            ("a.txt", "first\n\n日本 \r\nbad\x00\n".encode() * 20),
            ("b.txt.gz", gzip.compress(b"one\ntwo\n" * 30, mtime=0)),
        ]
    if format == "csv":
        rows = ["id,prompt,score,code,maybe"]
        rows += ['{},"say ""{}"", please\n",{},{:03d},{}'.format(i, i, i / 4, i, "" if i % 3 else i) for i in range(60)]
        data = "\n".join(rows).encode()
        return [
            ("a.csv", data),
            ("b.csv.gz", gzip.compress(data, mtime=0)),
            ("c.csv", b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")),
        ]
    files = []
    table = _table()
    if format == "parquet":
        options = [
            {},
            {"compression": "zstd", "row_group_size": 13},
            {"compression": "none", "use_dictionary": False},
            {"data_page_version": "2.0", "write_page_checksum": True},
            {"version": "1.0", "row_group_size": 7, "column_encoding": None},
        ]
        for number, chosen in enumerate(options):
            pq.write_table(table, folder / "x", **chosen)
            files.append((f"{number}.parquet", (folder / "x").read_bytes()))
        pq.write_table(table.select(["prompt", "id"]), folder / "x", compression="none", use_dictionary=False)
        files.append(("plain.parquet", (folder / "x").read_bytes()))
    elif format in ("arrow", "arrow stream"):
        make = pa.ipc.new_file if format == "arrow" else pa.ipc.new_stream
        for number, compression in enumerate([None, "lz4", "zstd"]):
            sink = pa.BufferOutputStream()
            with make(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
                writer.write_table(table, max_chunksize=13)
            files.append((f"{number}.arrow", sink.getvalue().to_pybytes()))
    return files


def _input_case(files: list[tuple[str, bytes]]) -> st.SearchStrategy[Any]:
    return st.tuples(st.integers(0, len(files) - 1), HURTS, st.booleans())


def _run_input(folder: pathlib.Path, made: list[tuple[str, bytes]], case: Any) -> None:
    number, hurts, hurts_content = case
    name, data = made[number]
    if name.endswith(".gz") and hurts_content:
        data = gzip.compress(hurt(gzip.decompress(data), hurts), mtime=0, compresslevel=1)
    elif name.endswith(".zst") and hurts_content:
        data = pa.compress(
            hurt(pa.input_stream(pa.py_buffer(data), compression="zstd").read(), hurts), "zstd", asbytes=True
        )
    else:
        data = hurt(data, hurts)
    path = folder / name
    path.write_bytes(data)
    _read_all(InputLocation(str(path)), folder / "cache")


def _read_all(location: InputLocation, cache: pathlib.Path) -> None:
    for _ in range(2):  # with a cold cache, and with a warm one
        source = open_source(location, cache)
        try:
            stop = min(source.num_rows, MAX_ROWS)
            rows = source.read(0, stop)
            assert [row.row_index for row in rows] == list(range(stop))
            for row in rows[-2:]:
                if row.error is not None:
                    row.error.encode(errors="strict")
            start = max(0, source.num_rows - 5)
            source.read(start, source.num_rows, ["prompt"])
            for name in source.schema.names[:12]:
                table = source.read_columns(0, stop, [name])
                assert table.num_rows == stop
                table.validate(full=True)  # parts need valid values
                pq.write_table(table, pa.BufferOutputStream())
        finally:
            source.close()


def _saved_files(folder: pathlib.Path) -> pathlib.Path:
    import datasets

    plain = pa.Table.from_pylist(_records())
    datasets.disable_progress_bars()
    dataset = datasets.Dataset(plain)
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(5))}).save_to_disk(folder / "dict")
    dataset.save_to_disk(folder / "saved", num_shards=2)
    return folder


def _saved_case(made: pathlib.Path) -> st.SearchStrategy[Any]:
    names = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
    docs = [name for name in names if name.endswith(".json")]
    return st.one_of(
        st.tuples(st.sampled_from(docs), EDITS, st.none()),
        st.tuples(st.sampled_from(names), st.none(), HURTS),
    )


def _run_saved(folder: pathlib.Path, made: pathlib.Path, case: Any) -> None:
    name, edits, hurts = case
    top = name.split("/")[0]
    shutil.copytree(made / top, folder / top)
    path = folder / name
    if edits is not None:
        path.write_text(json.dumps(edit(json.loads(path.read_text()), edits)))
    else:
        path.write_bytes(hurt(path.read_bytes(), hurts))
    _read_all(InputLocation(str(folder / top)), folder / "cache")


# -- rows and templates ------------------------------------------------------------------------------------------------

_TEMPLATES = [
    "{{ x }}",
    "{% for item in x %}{{ item }}{{ y }}{% endfor %}",
    "{{ x.name }}{{ y[0] }}",
    "{{ x | join(y) }}",
    "{{ x ~ y }}{{ x * y }}",
    "{{ x | replace(y, x) }}",
    "{{ x | tojson }}{{ y | default('d') | upper | trim }}",
    "{% if x > y %}{{ x }}{% else %}{{ y | length }}{% endif %}",
    "{% for i in range(y) %}{{ x }}{% endfor %}",
    "{% macro f(n) %}{{ x }}{{ f(n) }}{% endmacro %}{{ f(y) }}",
]


def _renderers(folder: pathlib.Path) -> list[Renderer]:
    made = []
    for template in _TEMPLATES:
        made.append(
            Renderer(
                JobSpec(model={"name": "m"}, input={"path": "p", "prompt_template": template}, output={"path": "o"})
            )
        )
    made.append(Renderer(JobSpec(model={"name": "m"}, input={"path": "p", "prompt_column": "x"}, output={"path": "o"})))
    return made


def _prompt_case(made: list[Renderer]) -> st.SearchStrategy[Any]:
    odd = st.sampled_from(
        ["%s", "%999999999d", "%*d", "{0}", "{0:999999999}", "{0.__class__}", "{{ x }}", "file:///etc/passwd"]
    )
    values = st.one_of(VALUES, odd)
    return st.tuples(st.integers(0, len(made) - 1), st.fixed_dictionaries({}, optional={"x": values, "y": values}))


def _run_prompt(folder: pathlib.Path, made: list[Renderer], case: Any) -> None:
    number, values = case
    found = made[number].render(Row(0, values))
    if isinstance(found, RowError):
        assert found.error_type
        found.error_message.encode()
    else:
        assert found
        found.encode()


def _reader(format: str, weight: int = 4) -> Target:
    return Target(_input_case, _run_input, lambda folder: _input_files(folder, format), weight)


TARGETS: dict[str, Target] = {
    "spec": Target(_spec_case, _run_spec, _specs, 6),
    "manifest": Target(_manifest_case, _run_manifest, _logs),
    "journal": Target(_journal_case, _run_journal, _job),
    "part": Target(_part_case, _run_part, _job),
    "lock": Target(_lock_case, _run_lock, _lock_base),
    "status": Target(_json_case, _run_status, _status_base),
    "message": Target(_channel_case, _run_channel, _channel_base, 6),
    "jsonl": _reader("jsonl"),
    "jsonl.gz": _reader("jsonl.gz"),
    "jsonl.zst": _reader("jsonl.zst"),
    "text": _reader("text"),
    "csv": _reader("csv"),
    "parquet": _reader("parquet", 1),  # each case costs a process
    "arrow": _reader("arrow"),
    "arrow stream": _reader("arrow stream"),
    "saved dataset": Target(_saved_case, _run_saved, _saved_files),
    "prompt": Target(_prompt_case, _run_prompt, _renderers, 6),
}


# -- running them ------------------------------------------------------------------------------------------------------


def run_target(name: str, cases: int, seed: int, scratch: pathlib.Path) -> dict[str, int]:
    """Run cases of a target in this process. Returns how they ended. Raises the first failure in its smallest form."""
    target = TARGETS[name]
    (scratch / "made").mkdir()
    made = target.prepare(scratch / "made")
    counts = {"cases": 0, "refused": 0}
    case_folder = scratch / "case"

    @hypothesis.seed(seed)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
        report_multiple_bugs=True,
    )
    @given(target.strategy(made))
    def one(case: Any) -> None:
        shutil.rmtree(case_folder, ignore_errors=True)
        case_folder.mkdir()
        counts["cases"] += 1
        signal.alarm(CASE_S)
        try:
            target.run(case_folder, made, case)
        except UserError as error:
            counts["refused"] += 1
            assert str(error)  # noqa: PT017
        except OSError as error:
            if error.errno is None:
                raise
            counts["refused"] += 1
        finally:
            signal.alarm(0)

    one()
    return counts


def _child(name: str, cases: int, seed: int, scratch: pathlib.Path) -> None:
    faulthandler.enable()
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    started = time.monotonic()
    counts = run_target(name, cases, seed, scratch)
    counts["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    counts["seconds"] = round(time.monotonic() - started)
    print(json.dumps(counts))


def fuzz(name: str, cases: int, seed: int) -> tuple[dict[str, int], str]:
    """Run a target in its own process. Returns how its cases ended, and the failure or ''."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # fsync costs nothing there
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="batchinf-fuzz-", dir=shared))
    command = [
        sys.executable,
        __file__,
        "--child",
        str(scratch),
        "--target",
        name,
        "--cases",
        str(cases),
        "--seed",
        str(seed),
    ]
    environment = {**os.environ, "PYTHONPATH": str(jobs.ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        shutil.rmtree(scratch)
        return json.loads(done.stdout.splitlines()[-1]), ""
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    return {}, f"{name}, seed {seed}: {how}; the last case is in {scratch}/case\n{done.stdout}\n{done.stderr}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=50_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.target or list(TARGETS)
    if options.child:
        _child(names[0], options.cases, options.seed, pathlib.Path(options.child))
        return
    with tempfile.TemporaryDirectory(prefix="batchinf-fuzz-") as folder:
        os.environ[JOB] = str(make_job(pathlib.Path(folder)))
        total, failures = _fuzz_all(names, options.cases, options.seed)
    print(f"total: {total:,} cases, seed {options.seed}, {len(failures)} failed")
    for failure in failures:
        print(f"\n{failure}")
    sys.exit(bool(failures))


def shares(names: list[str], cases: int) -> dict[str, int]:
    """Number of cases of each target, by weight."""
    whole = sum(TARGETS[name].weight for name in names)
    return {name: -(-cases * TARGETS[name].weight // whole) for name in names}


def _fuzz_all(names: list[str], cases: int, seed: int) -> tuple[int, list[str]]:
    total, failures = 0, []
    each = shares(names, cases)
    for name in names:
        counts, failure = fuzz(name, each[name], seed)
        if failure:
            failures.append(failure)
            print(f"{name}: FAILED", flush=True)
        else:
            total += counts["cases"]
            print(
                f"{name}: {counts['cases']:,} cases, {counts['refused']:,} of them refused, {counts['seconds']} s, "
                f"peak {counts['peak_mib']:,} MiB",
                flush=True,
            )
    return total, failures


if __name__ == "__main__":
    main()

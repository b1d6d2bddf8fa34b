"""Fuzzing: damages valid files where their structure is, and reads them as the commands do.

    python tests/fuzz.py [--cases 50000] [--seed 0] [--jobs 1] [--target NAME]...

Each target runs in its own process, because a damaged file may crash a native library. The folder of the crashed case
is kept. A case passes if it succeeds, or if it raises a printable UserError or OSError, which the command line shows as
one line. Everything else is a bug. A target whose damage is noticed in none or in all of its cases has failed too: it
tests nothing.

Seed, target and number of a case decide its damage, in any number of processes.
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
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
import yaml

import jobs
from batchinf.base.errors import RowError, UserError
from batchinf.base.storage import FileHeader, Folder
from batchinf.commands.check import whole_part
from batchinf.commands.head import read_head
from batchinf.commands.status import job_status
from batchinf.coordinator import recovery
from batchinf.coordinator.display import status_line
from batchinf.fleet.local.backend import LocalBackend
from batchinf.fleet.local.channel import Channel
from batchinf.fleet.status import STATUS_FILE, read_status
from batchinf.manifest.commit_log import encode_commits
from batchinf.manifest.lines import (
    Chosen,
    Condemned,
    EndedReplica,
    Lost,
    Lowered,
    Platform,
    StartedReplica,
    Suspects,
    record_line,
)
from batchinf.manifest.lock import LOCK, Holder, JobLock
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import parse_part_name
from batchinf.manifest.state import last_epoch, read_state
from batchinf.manifest.versions import stored_spec
from batchinf.output import parts
from batchinf.output.journal import Journal, list_shards
from batchinf.output.open_lease import OpenLease
from batchinf.output.parts import stated_part
from batchinf.prompts.renderer import Renderer
from batchinf.records import Lease
from batchinf.replica.messages import Assign, Failed, Progress
from batchinf.schedule.shards import total_shards
from batchinf.source.files import InputLocation
from batchinf.source.formats import parquet
from batchinf.source.rows import Row, open_source
from batchinf.spec.file import check_engine_arguments, dump_spec, read_spec
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

CASE_S = 30  # a case that takes longer counts as hanging
MEMORY_BYTES = 8 << 30  # of address space; only a damaged size can ask for more
# Cases of one process. pyarrow 26 keeps up to 1 MiB of addresses for each compressed file that it cannot read. So
# 14,000 cases of jsonl.gz reached the limit, while 290 MiB of memory were used.
BATCH = 5_000
MAX_ROWS = 2_000  # to read of an input, as a damaged file may claim to have more


Draw = random.Random


@dataclass(frozen=True)
class Target:
    """draw: makes a case. run: runs one case in its own folder; True if the damage shows otherwise than by an error.

    Both get the result of `prepare`. weight: the target's share of all cases.
    """

    draw: Callable[[Draw, Any], Any]
    run: Callable[[pathlib.Path, Any, Any], bool]
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
_LENGTHS = (1, 1, 2, 4, 8, 16, 64, 500)
_HURTS = ("flip", "flip", "byte", "number", "insert", "cut", "zero", "repeat", "swap", "truncate")
_WIDTHS = ("<i", "<q", ">i")


def _place(draw: Draw) -> tuple[str, int]:
    return draw.choice(("anywhere", "anywhere", "head", "tail")), draw.randrange(2**20)


def _hurt(draw: Draw) -> tuple[Any, ...]:
    kind, place = draw.choice(_HURTS), _place(draw)
    match kind:
        case "flip":
            return kind, place, draw.randrange(8)
        case "byte":
            return kind, place, draw.randrange(256)
        case "number":
            return kind, place, draw.choice(_WIDTHS), draw.choice(_NUMBERS)
        case "insert":
            return kind, place, draw.randbytes(draw.randint(1, 16))
        case "cut" | "zero":
            return kind, place, draw.choice(_LENGTHS)
        case "repeat":
            return kind, place, draw.choice(_LENGTHS), _place(draw)
        case "swap":
            return kind, place, _place(draw), draw.choice(_LENGTHS)
    return kind, place


def some_hurts(draw: Draw) -> list[tuple[Any, ...]]:
    """Damage for `hurt`."""
    return [_hurt(draw) for _ in range(draw.randint(1, 4))]


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

_ODD_NUMBERS = [10**30, 10**400, -(10**400), 0.5, -1.5, 1e308, float("inf"), float("nan")]
_ODD_TEXTS = ["", "x", "1", "\0", "../x", "/", "\ud800", "\x1b[2J", "a" * 5000, "2020-01-01T00:00:00+00:00"]
_ALPHABETS = [(32, 127), (32, 127), (0, 256), (0, 0xD800), (0xE000, 0x110000)]
_EDITS = ("set", "set", "set", "alike", "alike", "alike", "delete", "rename", "repeat")


def text(draw: Draw, longest: int) -> str:
    """Characters of any kind, without surrogates."""
    return "".join(chr(draw.randrange(*draw.choice(_ALPHABETS))) for _ in range(draw.randint(0, longest)))


def value(draw: Draw, depth: int = 2) -> Any:
    """A JSON value. depth: of lists and objects in it."""
    match draw.randrange(8 if depth else 6):
        case 0:
            return None
        case 1:
            return draw.random() < 0.5
        case 2:
            return draw.choice(_NUMBERS)
        case 3:
            return draw.choice(_ODD_NUMBERS)
        case 4:
            return draw.choice(_ODD_TEXTS)
        case 5:
            return text(draw, 8)
        case 6:
            return [value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    return record(draw, depth - 1)


def record(draw: Draw, depth: int = 1) -> dict[str, Any]:
    """A JSON object."""
    return {text(draw, 6): value(draw, depth) for _ in range(draw.randint(0, 3))}


def some_edits(draw: Draw) -> list[tuple[str, int, Any]]:
    """Changes for `edit`."""
    return [(draw.choice(_EDITS), draw.randrange(2**20), value(draw)) for _ in range(draw.randint(1, 3))]


def edit(value: Any, edits: list[tuple[str, int, Any]]) -> Any:
    """A copy of a JSON value with fields set, deleted, renamed or repeated at any depth. `alike` keeps its type."""
    holder = [copy.deepcopy(value)]
    for kind, number, new in edits:
        places = list(_slots(holder))
        where, key = places[number % len(places)]
        if kind == "alike":
            where[key] = _alike(where[key], number // 31)
        elif kind == "set" or where is holder:
            where[key] = new
        elif kind == "delete":
            del where[key]
        elif isinstance(where, dict):
            where[new if isinstance(new, str) else f"{key}x"] = where[key] if kind == "repeat" else where.pop(key)
        else:
            where.insert(key, copy.deepcopy(where[number % len(where)]))
    return holder[0]


def _alike(old: Any, number: int) -> Any:
    if isinstance(old, bool) or old is None:
        return not old
    if isinstance(old, int | float):
        return type(old)(_NUMBERS[number % len(_NUMBERS)])
    return _ODD_TEXTS[number % len(_ODD_TEXTS)] if isinstance(old, str) else old


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
_SET_FIELDS = ["sampling.max_tokens", "sampling.stop", "model", "engine.x.y", "input", "a.b", "", "."]


def _set(draw: Draw) -> str:
    if draw.random() < 0.5:
        return draw.choice(_GOOD_SETS)
    given = json.dumps(value(draw)) if draw.random() < 0.5 else text(draw, 12)
    return draw.choice(_SET_FIELDS) + draw.choice(("=", "=", "=", "")) + given


def _spec_case(draw: Draw, bases: list[Any]) -> Any:
    edits = some_edits(draw) if draw.random() < 0.5 else None
    hurts = some_hurts(draw) if draw.random() < 0.5 else None
    sets = [_set(draw) for _ in range(draw.randint(0, 2))]
    return draw.randrange(len(bases)), edits, hurts, sets, draw.random() < 0.5


def _run_spec(folder: pathlib.Path, made: list[Any], case: Any) -> bool:
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
    return False


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
        input={"limit": 48},
        output={"rows_per_shard": 8},
        sampling={"n": 2, "temperature": 1.0, "max_tokens": 8},
        parallel={"data_parallel_size": 1},
        scripted={"step_s": 0.02},
        checkpoint_interval_s=0.1,
    )
    out = folder / "out"
    for num_parts in (2, 4):
        process = jobs.start("run", spec)
        jobs.wait_until(lambda: _counts(out)[0] >= num_parts and _counts(out)[1] >= 3)  # noqa: B023
        jobs.kill(jobs.family(process.pid))
        process.communicate(timeout=60)
    for path in out.glob("*/.tmp-*"):
        path.unlink()
    assert list_shards(Folder(out))
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
        lambda path: job_status(path).lines(),
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
    suspects = Suspects("1.1", (3,), (Lease(0, 0, 9),))
    records = [
        StartedReplica(0, "1.1", "local", {"pgid": 7}), EndedReplica("", 1.5), suspects, Condemned(3, "killed"),
        Lowered({"max_num_seqs": 4}, {}), Lost([]), Chosen(1, 2),
    ]  # fmt: skip
    at = "2026-01-01T00:00:00.000+00:00"
    group = {"replica": 0, "incarnation": "1.1", "backend": "local", "identity": {"pgid": 7}}
    old = {
        "kind": "snapshot",
        "replaces": [],
        "device_s": 1.5,
        "event_counts": {"ready": 1},
        "running_replicas": [group],
    }
    header = next(fields for commit in commits for fields in commit if fields["kind"] == "header")
    extent = next(fields for commit in commits for fields in commit if fields["kind"] == "extent")
    counted = {"kind": "counted_event", "name": "ready", "at": at, "device": "", "versions": {}}
    done = {"kind": "done", "name": "done", "at": at}
    commits += [[{"kind": "snapshot", "replaces": []}, header, extent, *map(record_line, records)]]
    commits += [[{"kind": "snapshot_end"}], [old, header, extent, counted, done], [{"kind": "snapshot_end"}]]
    for fields in (fields for commit in commits for fields in commit):
        for name in ("host", "boot_id"):
            if name in fields:
                fields[name] = "another"  # a case must not end a process group of this host
    return _Logs(out, raw, commits)


def _manifest_op(draw: Draw) -> tuple[Any, ...]:
    kind, number = draw.choice(("edit", "edit", "drop", "repeat", "swap", "foreign")), draw.randrange(2**20)
    match kind:
        case "edit":
            return kind, number, some_edits(draw)
        case "foreign":
            return kind, number, record(draw)
    return kind, number, draw.randrange(2**20)


def _manifest_case(draw: Draw, made: _Logs) -> Any:
    kind, hurts = draw.choice(("lines", "lines", "bytes", "raw")), []
    match kind:
        case "lines":
            hurts = [_manifest_op(draw) for _ in range(draw.randint(1, 3))]
        case "bytes":
            hurts = some_hurts(draw)
        case "raw":
            hurts = [(draw.randrange(2**20), draw.randbytes(draw.randint(0, 30))) for _ in range(draw.randint(1, 2))]
    return (kind, hurts), draw.randint(1, 3)


def _run_manifest(folder: pathlib.Path, made: _Logs, case: Any) -> bool:
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
        return True
    stored_spec(state.header.spec)
    LocalBackend().end_leftovers(state.of(StartedReplica), state.job_id)
    for platform in state.of(Platform):
        assert isinstance(platform.versions, dict)
    epoch = last_epoch(own) + 1
    manifest = Manifest(own, epoch, None, state)
    recovery.note_ended(state, None, manifest)
    manifest.commit()
    manifest.close()
    assert read_state(own) is not None
    return False


def _json_case(draw: Draw, made: Any = None) -> Any:
    match draw.randrange(4):
        case 0:
            return None, some_hurts(draw)
        case 1:
            return None, draw.randbytes(draw.randint(0, 40))
    return some_edits(draw), None


def _json_bytes(base: Any, case: Any) -> bytes:
    edits, hurts = case
    if edits is not None:
        return json.dumps(edit(base, edits)).encode()
    return hurts if isinstance(hurts, bytes) else hurt(json.dumps(base).encode(), hurts)


_HOLDER_TEXTS = ["host", "machine", "boot_id", "pid_namespace", "since", "token"]
_HOLDER_NUMBERS = ["pid", "start_time", "epoch", "heartbeat"]


def _lock_case(draw: Draw, made: tuple[pathlib.Path, Any]) -> Any:
    if draw.random() < 0.4:
        return _json_case(draw)
    fields: dict[str, Any] = {name: text(draw, 9) for name in _HOLDER_TEXTS if draw.random() < 0.5}
    numbers = [*_NUMBERS, draw.randrange(2**16)]
    return {**fields, **{name: draw.choice(numbers) for name in _HOLDER_NUMBERS if draw.random() < 0.5}}, None


def _lock_base(folder: pathlib.Path) -> tuple[pathlib.Path, Any]:
    return _job(folder), asdict(Holder.this_process())


def _run_lock(folder: pathlib.Path, made: tuple[pathlib.Path, Any], case: Any) -> bool:
    out = folder / "out"
    _link(made[0], out, LOCK)
    is_whole = isinstance(case[0], dict)
    data = json.dumps({**made[1], **case[0]}).encode() if is_whole else _json_bytes(made[1], case)
    (out / LOCK).write_bytes(data)
    for line in job_status(str(out)).lines():
        line.encode()
    lock = JobLock(Folder(out))
    try:
        lock.acquire(lambda: 1, takeover_after_s=0.0)
        lock.check()
    finally:
        lock.release()
    return Holder.decode(data) is None


def _status_base(folder: pathlib.Path) -> tuple[pathlib.Path, Any]:
    out = _job(folder)
    (out / LOCK).write_bytes(Holder.this_process().encode())
    return out, json.loads((out / STATUS_FILE).read_bytes())


def _run_status(folder: pathlib.Path, made: tuple[pathlib.Path, Any], case: Any) -> bool:
    out = folder / "out"
    _link(made[0], out, STATUS_FILE)
    (out / LOCK).unlink()
    (out / LOCK).write_bytes(Holder.this_process().encode())
    (out / STATUS_FILE).write_bytes(_json_bytes(made[1], case))
    for line in job_status(str(out)).lines():
        line.encode()
    state = read_state(Folder(out))
    assert state is not None
    with contextlib.closing(_Recording()) as manifest:
        recovery.note_ended(state, read_status(Folder(out)), manifest)  # type: ignore[arg-type]
    if (status := read_status(Folder(out))) is None:
        return True
    status_line(status).encode()
    return False


class _Recording:
    """Turns the events for a manifest into lines."""

    def event(self, name: str, /, **fields: Any) -> None:
        encode_commits([[{"name": name, **fields}]])

    def record(self, record: Any) -> None:
        encode_commits([[record_line(record)]])

    def close(self) -> None:
        pass


# -- segments and parts ------------------------------------------------------------------------------------------------


def _sealed_segment(data: bytes, payload: bytes, num_rows: int | None = None) -> bytes:
    """A segment's bytes with another payload and the right checksum."""
    header = FileHeader.decode(data)
    assert header is not None
    rows = header.second if num_rows is None else num_rows
    return FileHeader(header.number, len(payload), rows, xxhash.xxh3_128_digest(payload)).encode() + payload


def _journal_case(draw: Draw, out: pathlib.Path) -> Any:
    names = sorted(path.name for path in (out / "journal").iterdir())
    kind = draw.choice(("bytes", "sealed", "sealed", "splice", "keys"))
    return draw.choice(names), kind, some_hurts(draw), draw.choice(names), draw.choice(_NUMBERS), draw.randrange(3)


def _run_journal(folder: pathlib.Path, made: pathlib.Path, case: Any) -> bool:
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
    shard = OpenLease(jobs_shard(state, index), task, Journal(own, "fuzz", task.result_schema))
    shard.recover()
    shard.unfinished(np.arange(shard.lease.num_rows))
    if shard.segments:
        # What closing the shard does with recovered results.
        parts._Merged(shard).take(0, min(shard.num_results, 3)) if shard.is_complete else [
            s.table().to_pylist() for s in shard.segments
        ]
    shard.close()
    _look(out, 100)
    return bool(shard.damaged)


def jobs_shard(state: Any, index: int) -> Lease:
    from batchinf.schedule.shards import shard_at

    assert index < total_shards(state.extents)
    shard = shard_at(state.extents, index)
    return Lease(index, shard.start, shard.stop)


def _part_case(draw: Draw, out: pathlib.Path) -> Any:
    names = sorted(path.name for path in (out / "parts").iterdir())
    kind = draw.choice(("bytes", "splice"))
    return draw.choice(names), kind, some_hurts(draw), draw.choice(names)


def _run_part(folder: pathlib.Path, made: pathlib.Path, case: Any) -> bool:
    name, kind, hurts, other = case
    out = folder / "out"
    _link(made, out, "parts")
    path = out / "parts" / name
    data = path.read_bytes()
    if kind == "splice":
        second = (made / "parts" / other).read_bytes()
        data = data[: _at(len(data), hurts[0][1])] + second[_at(len(second), hurts[-1][1]) :]
    else:
        data = hurt(data, hurts)
    path.write_bytes(data)
    own = Folder(out)
    state = read_state(own)
    assert state is not None
    shard = jobs_shard(state, parse_part_name(name) or 0)
    stated_part(own, f"parts/{name}", shard, state.header.fingerprint)
    whole_part(own, state, shard.index)
    _look(out, 100)
    return False


# -- messages ----------------------------------------------------------------------------------------------------------


def _channel_base(folder: pathlib.Path) -> list[Any]:
    from batchinf.engines.protocol import EngineStats

    messages = [
        Assign((Lease(0, 0, 4, attempts=2), Lease(1, 4, 9)), ((3, "it kills"),)),
        Failed("InputError", "x", 2),
        Progress(1, {"refused": 2}, 3, 4, 5, 6, 0.5, EngineStats()),
    ]
    return [{"kind": type(m).__name__, "body": asdict(m)} for m in messages]


def _channel_case(draw: Draw, base: list[Any]) -> Any:
    damage = (some_edits(draw), None) if draw.random() < 0.5 else (None, some_hurts(draw))
    return draw.randrange(len(base)), damage


def _run_channel(folder: pathlib.Path, base: list[Any], case: Any) -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        theirs.sendall(_json_bytes(base[case[0]], case[1]) + b"\n")
        received = channel.receive(1.0)
        for message in received:
            asdict(message)
        channel.close()
    return not received


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
        for i in range(30)
    ]


def _table() -> pa.Table:
    table = pa.Table.from_pylist(_records())
    kind = pa.array([f"kind {i % 3}" for i in range(30)]).dictionary_encode()
    times = pa.array([1_700_000_000_000_000 + i for i in range(30)], pa.timestamp("us", "UTC"))
    money = pa.array([None if i % 5 == 0 else i for i in range(30)], pa.int32())
    big = pa.array([f"b{i}" for i in range(30)], pa.large_string())
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
            ("b.jsonl.gz", gzip.compress(lines[:1000], mtime=0) + gzip.compress(lines, mtime=0)),
        ]
    if format == "jsonl.zst":
        return [("a.jsonl.zst", pa.compress(lines, "zstd", asbytes=True))]
    if format == "json":
        values = lines.splitlines()
        return [("a.json", b"[" + b",\n".join(values) + b"]"), ("b.json", lines)]
    if format == "text":
        return [
            ("a.txt", "first\n\n日本 \r\nbad\x00\n".encode() * 10),
            ("b.txt.gz", gzip.compress(b"one\ntwo\n" * 30, mtime=0)),
        ]
    if format == "csv":
        rows = ["id,prompt,score,code,maybe"]
        rows += ['{},"say ""{}"", please\n",{},{:03d},{}'.format(i, i, i / 4, i, "" if i % 3 else i) for i in range(30)]
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


def _input_case(draw: Draw, files: list[tuple[str, bytes]]) -> Any:
    return draw.randrange(len(files)), some_hurts(draw), draw.random() < 0.5


def _run_input(folder: pathlib.Path, made: list[tuple[str, bytes]], case: Any) -> bool:
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
    return _read_all(InputLocation(str(path)), folder / "cache")


def _read_all(location: InputLocation, cache: pathlib.Path) -> bool:
    """Read as jobs do, with a cold cache and with a warm one. Whether there are rows that cannot be read."""
    source = open_source(location, cache)
    try:
        stop = min(source.num_rows, MAX_ROWS)
        rows = source.read(0, stop)
        assert [row.row_index for row in rows] == list(range(stop))
        errors = [row.error for row in rows if row.error is not None]
        for error in errors:
            error.encode(errors="strict")
    finally:
        source.close()
    source = open_source(location, cache)
    try:
        source.read(max(0, source.num_rows - 5), source.num_rows, ["prompt"])
        names = source.schema.names[:12]
        table = source.read_columns(0, stop, names)
        assert table.num_rows == stop or not names
        table.validate(full=True)  # parts need valid values
        pq.write_table(table, pa.BufferOutputStream())
    finally:
        source.close()
    return bool(errors)


def _probe_by_fork(command: list[str], input: str, **_: object) -> "subprocess.CompletedProcess[str]":
    """What `subprocess.run` returns for the process that reads Parquet footers first. A fork starts in a hundredth."""
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as given:
        given.write(input.encode())
        given.seek(0)
        pid = os.fork()
        if pid == 0:
            faulthandler.disable()
            for end, number in ((given.fileno(), 0), (write_end, 1)):
                os.dup2(end, number)
            sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
            exec(command[-1], {})
            os._exit(0)
        os.close(write_end)
        with open(read_end) as stream:
            out = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return subprocess.CompletedProcess(command, code, out, "")


def _saved_files(folder: pathlib.Path) -> pathlib.Path:
    import datasets

    plain = pa.Table.from_pylist(_records())
    datasets.disable_progress_bars()
    dataset = datasets.Dataset(plain)
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(5))}).save_to_disk(folder / "dict")
    dataset.save_to_disk(folder / "saved", num_shards=2)
    return folder


def _saved_case(draw: Draw, made: pathlib.Path) -> Any:
    names = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
    if draw.random() < 0.5:
        return draw.choice([name for name in names if name.endswith(".json")]), some_edits(draw), None
    return draw.choice(names), None, some_hurts(draw)


def _run_saved(folder: pathlib.Path, made: pathlib.Path, case: Any) -> bool:
    name, edits, hurts = case
    top = name.split("/")[0]
    shutil.copytree(made / top, folder / top)
    path = folder / name
    if edits is not None:
        path.write_text(json.dumps(edit(json.loads(path.read_text()), edits)))
    else:
        path.write_bytes(hurt(path.read_bytes(), hurts))
    return _read_all(InputLocation(str(folder / top)), folder / "cache")


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


_ODD_PROMPTS = ["%s", "%999999999d", "%*d", "{0}", "{0:999999999}", "{0.__class__}", "{{ x }}", "file:///etc/passwd"]


def _prompt_case(draw: Draw, made: list[Renderer]) -> Any:
    given = {
        name: draw.choice(_ODD_PROMPTS) if draw.random() < 0.2 else value(draw)
        for name in ("x", "y")
        if draw.random() < 0.9
    }
    return draw.randrange(len(made)), given


def _run_prompt(folder: pathlib.Path, made: list[Renderer], case: Any) -> bool:
    number, values = case
    found = jobs.or_error(made[number].render, Row(0, values))
    if isinstance(found, RowError):
        assert found.error_type
        found.error_message.encode()
        return True
    assert found
    found.encode()
    return False


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
    "json": _reader("json"),
    "parquet": _reader("parquet", 1),  # each case costs a process
    "arrow": _reader("arrow"),
    "arrow stream": _reader("arrow stream"),
    "saved dataset": Target(_saved_case, _run_saved, _saved_files),
    "prompt": Target(_prompt_case, _run_prompt, _renderers, 6),
}


# -- running them ------------------------------------------------------------------------------------------------------


def run_target(name: str, numbers: range, seed: int, scratch: pathlib.Path) -> dict[str, int]:
    """Run cases of a target in this process. Returns how they ended. Raises the first failure, with its damage."""
    target = TARGETS[name]
    (scratch / "made").mkdir()
    made = target.prepare(scratch / "made")
    counts = {"cases": 0, "refused": 0, "noticed": 0}
    for number in numbers:
        case = target.draw(Draw(f"{seed} {name} {number}"), made)
        try:
            refused, noticed = _run_case(target, scratch / "case", made, case)
        except Exception as error:
            case = _smallest(target, scratch / "case", made, case, error)
            error.add_note(f"case {number} of {name}, seed {seed}: {case!r}")
            raise
        counts["cases"] += 1
        counts["refused"] += refused
        counts["noticed"] += refused or noticed
    return counts


def _run_case(target: Target, folder: pathlib.Path, made: Any, case: Any) -> tuple[bool, bool]:
    """Whether a case is refused, and whether its damage shows otherwise."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    signal.alarm(CASE_S)
    try:
        return False, target.run(folder, made, case)
    except UserError as error:
        assert str(error)  # noqa: PT017
    except OSError as error:
        if error.errno is None:
            raise
    finally:
        signal.alarm(0)
    return True, True


def _smallest(target: Target, folder: pathlib.Path, made: Any, case: Any, failure: Exception) -> Any:
    """A case with as little damage as possible that fails in the same way. Its files stay in the folder."""
    for smaller in _smaller(case):
        try:
            _run_case(target, folder, made, smaller)
        except Exception as error:
            if type(error) is type(failure):
                return _smallest(target, folder, made, smaller, error)
    with contextlib.suppress(Exception):
        _run_case(target, folder, made, case)
    return case


def _smaller(case: Any) -> Iterator[Any]:
    """The case without one entry of one of its lists, each in turn."""
    if isinstance(case, list) and len(case) > 1:
        yield from (case[:i] + case[i + 1 :] for i in range(len(case)))
    if isinstance(case, list | tuple):
        for i, item in enumerate(case):
            yield from (type(case)((*case[:i], smaller, *case[i + 1 :])) for smaller in _smaller(item))


def useless(name: str, counts: dict[str, int]) -> str:
    """Why the cases of a target test nothing, or ''.

    The checksums of compressed files notice nearly all damage.
    """
    cases, noticed = counts["cases"], counts["noticed"]
    least, most = (1, cases - 1) if cases < 400 else (0.01 * cases, 0.99 * cases)
    if name.endswith((".gz", ".zst")):
        most = cases
    if cases < 40 or least <= noticed <= most:
        return ""
    return f"{name}: the damage was noticed in {noticed:,} of {cases:,} cases, so they test nothing"


def _child(name: str, numbers: range, seed: int, scratch: pathlib.Path) -> None:
    faulthandler.enable()
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Readers wait until a new file's time of change is certain, and look twice at a damaged manifest. Nothing changes
    # the files of a case.
    time.sleep = lambda _: None
    parquet.subprocess = types.SimpleNamespace(run=_probe_by_fork)  # type: ignore[attr-defined]
    pa.set_cpu_count(1)
    started = time.process_time()
    counts = run_target(name, numbers, seed, scratch)
    counts["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    counts["cpu_ms"] = round((time.process_time() - started) * 1e3)
    print(json.dumps(counts))


def fuzz(name: str, numbers: range, seed: int) -> tuple[dict[str, int], str]:
    """Run cases of a target in their own process. Returns how they ended, and the failure or ''."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # fsync costs nothing there
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="batchinf-fuzz-", dir=shared))
    options = {"target": name, "cases": numbers.stop, "first": numbers.start, "seed": seed, "child": scratch}
    # From the folder of this file, which a fork has in its path like a new process.
    command = [sys.executable, "-m", "fuzz", *(f"--{option}={given}" for option, given in options.items())]
    environment, streams = {**jobs.inherited(), **jobs.quick_start(), "HF_HUB_OFFLINE": "1"}, subprocess.PIPE
    where: dict[str, Any] = {"cwd": pathlib.Path(__file__).parent, "env": environment, "text": True}
    if jobs.may_fork and (server := jobs.fork_server()).can_fork(environment):
        process = server.start(server, command, stdout=streams, stderr=streams, **where)
    else:
        process = subprocess.Popen(command, stdout=streams, stderr=streams, **where)
    out, errors = process.communicate()
    if process.returncode == 0:
        shutil.rmtree(scratch)
        return json.loads(out.splitlines()[-1]), ""
    how = signal.Signals(-process.returncode).name if process.returncode < 0 else f"exit code {process.returncode}"
    return {}, f"{name}, seed {seed}: {how}; the last case is in {scratch}/case\n{out}\n{errors}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=50_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.target or list(TARGETS)
    if options.child:
        _child(names[0], range(options.first, options.cases), options.seed, pathlib.Path(options.child))
        return
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="batchinf-fuzz-") as folder:
        os.environ[JOB] = str(make_job(pathlib.Path(folder)))
        total, failures = _fuzz_all(names, options.cases, options.seed, options.jobs)
    minutes = (time.monotonic() - started) / 60
    print(f"total: {total:,} cases, seed {options.seed}, {minutes:.1f} minutes, {len(failures)} failed")
    for failure in failures:
        print(f"\n{failure}")
    sys.exit(bool(failures))


def shares(names: list[str], cases: int) -> dict[str, int]:
    """Number of cases of each target, by weight."""
    whole = sum(TARGETS[name].weight for name in names)
    return {name: -(-cases * TARGETS[name].weight // whole) for name in names}


def _fuzz_all(names: list[str], cases: int, seed: int, num_jobs: int) -> tuple[int, list[str]]:
    total, failures = 0, []
    each = shares(names, cases)
    with ThreadPoolExecutor(num_jobs) as pool:
        runs = {
            name: [
                pool.submit(fuzz, name, range(first, min(first + BATCH, each[name])), seed)
                for first in range(0, each[name], BATCH)
            ]
            for name in names
        }
        for name, futures in runs.items():
            done = [future.result() for future in futures]
            failed = [failure for _, failure in done if failure]
            found = [counts for counts, failure in done if not failure]
            sums = {key: sum(counts[key] for counts in found) for key in ("cases", "refused", "noticed", "cpu_ms")}
            peak_mib = max((counts["peak_mib"] for counts in found), default=0)
            if not failed and (why := useless(name, sums)):
                failed.append(why)
            failures += failed
            total += sums["cases"]
            print(
                f"{name}: {sums['cases']:,} cases, {sums['refused']:,} refused, {sums['noticed']:,} noticed, "
                f"{sums['cpu_ms'] / 1e3:,.0f} s of CPU, peak {peak_mib:,} MiB{', FAILED' if failed else ''}",
                flush=True,
            )
    return total, failures


if __name__ == "__main__":
    main()

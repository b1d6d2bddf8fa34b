"""The lines of format version 2, whose events were state and history at once, are read as records."""

import pathlib
from dataclasses import asdict
from typing import Any

import pytest
from extents import extent_of_all
from headers import header_of

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.manifest.commit_log import encode_commits
from batchinf.manifest.events import read_events
from batchinf.manifest.lines import Platform, StartedReplica, part_line
from batchinf.manifest.state import State, read_state
from batchinf.records import Part

AT = "2026-01-01T00:00:00+00:00"
SPEED = {"run_s": 9.0, "work_s": 5.0, "prompt_tokens_per_s": 2.0, "output_tokens_per_s": 1.0}
INPUT_JOB = {"path": "first", "job_id": "f", "fingerprint": "b", "num_rows": 5, "num_parts": 1, "epoch": 1}
PART = Part(shard=0, num_rows=10, num_errors=0, num_prompt_tokens=1, num_output_tokens=1, num_bytes=1, digest="0" * 32)


def event(name: str, kind: str = "event", **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "at": AT, **fields}


def started(name: str, *devices: str, kind: str = "event") -> dict[str, Any]:
    replica = {"replica": 0, "incarnation": name, "backend": "local", "identity": {"pgid": 9}}
    return event("replica_started", kind, **replica, devices=[*devices], num_devices=1)


def ended(name: str, device_s: float, kind: str = "event") -> dict[str, Any]:
    return event("replica_ended", kind, incarnation=name, device_s=device_s, cause="")


def ready(device: str, kind: str = "event", **settings: Any) -> dict[str, Any]:
    fields = {"replica": 0, "device": device, "versions": {"vllm": "0.32.0"}, "settings": settings}
    return event("ready", kind, **fields, kept_as=f"platform/{device}")


HEADER = {"kind": "header", **asdict(header_of(job_id="job")), "format_version": 2}
EXTENT = {"kind": "extent", **asdict(extent_of_all(0, 100, 10, 0)), "source_fingerprint": "input"}
PLAIN = [
    event("beginning", job_id="job"),
    started("a", "0"),
    HEADER,
    EXTENT,
    event("epoch", epoch=1, job_id="job", adopted=0, lost=[]),
    ready("H100", slower=["off"]),
    ready("H200"),
    part_line(PART),
    event("input_job", kept_as="input_job", input_job=INPUT_JOB),
    event("death", replica=0, cause="signal 9"),
    event("condemned", kept_as="condemned/3", row_index=3, message="killed"),
    started("b"),
    ended("a", 2.5),
    event("speed", kept_as="speed", speed={**SPEED, "expected": {"work_s": 1.0}}),
    {"kind": "done", "name": "done", "at": AT},
]
SNAPSHOT = [
    {"kind": "snapshot", "at": AT, "replaces": [], "device_s": 2.5, "event_counts": {"ready": 3},
     "running_replicas": [{"replica": 0, "incarnation": "b", "backend": "local", "identity": {"pgid": 9}}]},
    HEADER,
    EXTENT,
    part_line(PART),
    started("a", "0", kind="counted_event"),
    event("epoch", "counted_event", epoch=1),
    ready("H100", "counted_event", slower=["off"]),
    ended("a", 2.5, kind="counted_event"),
    event("lost", "counted_event", shards=[0]),
    ready("H200", "kept_event"),
    event("input_job", "kept_event", kept_as="input_job", input_job=INPUT_JOB),
    event("speed", "kept_event", kept_as="speed", speed=SPEED),
    {"kind": "done", "name": "done", "at": AT},
    {"kind": "snapshot_end"},
]  # fmt: skip


def read(tmp_path: pathlib.Path, *logs: list[dict[str, Any]]) -> State | None:
    folder = Folder(tmp_path)
    folder.make("manifest")
    for number, lines in enumerate(logs, 1):
        folder.write_atomic(f"manifest/{number:06d}.jsonl", encode_commits([[line] for line in lines]))
    return read_state(folder)


@pytest.mark.parametrize("logs", [[PLAIN], [SNAPSHOT], [PLAIN[:6], PLAIN[6:]]], ids=["one log", "snapshot", "two logs"])
def test_events_become_records(tmp_path: pathlib.Path, logs: list[list[dict[str, Any]]]) -> None:
    state = read(tmp_path, *logs)
    assert state is not None
    assert (state.job_id, state.header.format_version, [*state.parts]) == ("job", 2, [0])
    assert (state.device_s, state.has_devices, state.is_done) == (2.5, True, True)
    if logs[0] is not SNAPSHOT:
        assert [replica.incarnation for replica in state.of(StartedReplica)] == ["b"]
    assert [platform.device for platform in state.of(Platform)] == ["H100", "H200"]
    assert state.header.input_job is not None and state.header.input_job.num_rows == 5
    assert state.speed is not None and state.speed.work_s == 5.0
    if len(logs) == 1:
        assert state.slower == ("off",)


def test_the_speed_of_an_earlier_run_is_forgotten(tmp_path: pathlib.Path) -> None:
    again = [event("lost", shards=[0]), part_line(PART), event("forgotten", kept_as="speed"), PLAIN[-1]]
    state = read(tmp_path, PLAIN, again[:2])
    assert state is not None and state.has_lost and not state.is_done
    state = read(tmp_path, PLAIN, again)
    assert state is not None and state.is_done
    assert state.speed is None


def test_people_find_the_history_in_the_logs(tmp_path: pathlib.Path) -> None:
    read(tmp_path, PLAIN)
    events = read_events(Folder(tmp_path))
    assert [each.name for each in events if each.fields.get("cause")] == ["death"]
    assert len(events) == len([line for line in PLAIN if line["kind"] == "event"])


@pytest.mark.parametrize("line", [PLAIN[1], PLAIN[5], PLAIN[8], PLAIN[12], SNAPSHOT[0]])
def test_a_wrong_or_missing_field_is_damage(tmp_path: pathlib.Path, line: dict[str, Any]) -> None:
    needed = {"identity", "versions", "input_job", "device_s"} & line.keys()
    assert needed
    for name in needed:
        for hurt in ({**line, name: -1.5}, {key: value for key, value in line.items() if key != name}):
            with pytest.raises(OutputError, match="is damaged"):
                read(tmp_path, [*PLAIN[:4], hurt, *PLAIN[4:]])

"""Telemetry: a line for each look, of replicas and devices, that costs nothing where it cannot be written."""

import os
import pathlib
import sys
import time
import types

import pytest
from test_placement import GIB, install

import jobs
from batchinf.base.storage import Folder
from batchinf.engines.protocol import EngineStats
from batchinf.fleet.local.devices import NvmlWatch
from batchinf.fleet.status import ReplicaLook, Telemetry, read_looks
from batchinf.manifest.names import TELEMETRY_FOLDER
from batchinf.replica.messages import Progress

PROGRESS = Progress(10, {"refused": 1}, 200, 300, 7, 5, 0.25, EngineStats(3, 2, 0.5, 1, 40, 30), num_waiting=4)


def look() -> ReplicaLook:
    return ReplicaLook.of(1, "000001.0002", "running", PROGRESS)


def test_a_look_is_a_line(tmp_path: pathlib.Path) -> None:
    telemetry = Telemetry(Folder(tmp_path), 3, tuple)
    assert telemetry.is_due
    before = time.time()
    telemetry.look([look()])
    assert not telemetry.is_due
    [found] = read_looks(Folder(tmp_path))
    assert before - 1 <= found["at"] <= time.time() + 1
    assert found["replicas"] == [
        {"replica": 1, "incarnation": "000001.0002", "state": "running", "num_running": 3, "num_waiting": 2,
         "num_ready": 4, "kv_cache_usage": 0.5, "prefix_cache_queries": 40, "prefix_cache_hits": 30,
         "num_preemptions": 1, "num_prompt_tokens": 200, "num_output_tokens": 300, "num_rows": 10, "num_answered": 0,
         "steps": 7, "stalled_by_disk_s": 0.25, "busy_s": 0.0}
    ]  # fmt: skip
    assert found["devices"] == []


def test_devices_are_looked_at(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 2, {1: 20.0})
    nvml = sys.modules["pynvml"]
    monkeypatch.setattr(
        nvml, "nvmlDeviceGetUtilizationRates", lambda handle: types.SimpleNamespace(gpu=90 + handle), raising=False
    )

    def no_power(handle: int) -> int:
        raise nvml.NVMLError("not supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", no_power, raising=False)
    watch = NvmlWatch(["0", "GPU-1"], every_s=0.01)
    jobs.wait_until(lambda: bool(watch.looks()))
    watch.close()
    first, second = watch.looks()
    assert (first.device, first.memory_used_bytes, first.memory_total_bytes) == ("0", 0, 80 * GIB + GIB // 2)
    assert (second.device, second.memory_used_bytes, second.utilization, second.power_w) == (
        "GPU-1",
        20 * GIB,
        91,
        None,
    )


def test_a_torn_line_is_left_out(tmp_path: pathlib.Path) -> None:
    telemetry = Telemetry(Folder(tmp_path), 1, tuple)
    telemetry.look([look()])
    telemetry.look([look()])
    path = tmp_path / TELEMETRY_FOLDER / "000001.jsonl"
    os.truncate(path, path.stat().st_size - 5)
    Telemetry(Folder(tmp_path), 2, tuple).look([])
    assert [len(found["replicas"]) for found in read_looks(Folder(tmp_path))] == [1, 0]


def test_a_job_writes_it(tmp_path: pathlib.Path) -> None:
    jobs.finish(jobs.spec_of(tmp_path, scripted={"step_s": 0.005}))
    found = list(read_looks(Folder(tmp_path / "out")))
    assert {replica["replica"] for one in found for replica in one["replicas"]} == {0, 1}
    assert found == sorted(found, key=lambda one: one["at"])
    # Each replica has a last sample when it ends, so that a short job has its figures too.
    last = {replica["incarnation"]: replica["num_output_tokens"] for one in found for replica in one["replicas"]}
    assert sum(last.values()) == sum(row["num_output_tokens"] or 0 for row in jobs.rows_of(tmp_path / "out"))


def test_no_room_is_no_reason_to_stop(tmp_path: pathlib.Path) -> None:
    telemetry = Telemetry(Folder(tmp_path), 1, tuple)
    (tmp_path / TELEMETRY_FOLDER).rmdir()
    telemetry.look([look()])
    assert not list(read_looks(Folder(tmp_path)))

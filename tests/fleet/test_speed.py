"""Predicted and measured speed of runs, and what limited them."""

import dataclasses
import pathlib
from typing import Any

import pytest

import batchinf
import jobs
from batchinf.base.storage import Folder
from batchinf.coordinator.ending import Summary
from batchinf.engines.protocol import EngineInfo
from batchinf.fleet.speed import bottleneck
from batchinf.fleet.speed_text import speed_lines
from batchinf.fleet.status import ON_TRIAL
from batchinf.manifest.lines import Bottleneck, Speed
from batchinf.manifest.state import read_state

pytestmark = pytest.mark.usefixtures("quick_replicas")

QUICK = {"parallel": {"data_parallel_size": 1}, "scripted": {"step_s": 0.0}}


def engines(**settings: Any) -> dict[int, Any]:
    return {0: EngineInfo(4096, 100, 1, "", {}, settings)}


def looks(
    number: int = 20, rows_a_look: int = 100, utilization: int | None = None, **state: Any
) -> list[dict[str, Any]]:
    """Samples of one replica, one a second. At the end no row is left, so the replica has room then.

    utilization: of its GPU, in percent.
    """
    own = {"replica": 0, "incarnation": "000001.0000", "state": "running", "num_running": 100, "num_waiting": 20,
           "num_ready": 50, "kv_cache_usage": 0.7, **state}  # fmt: skip
    last = {**own, "num_running": 3, "num_waiting": 0, "num_ready": 0, "kv_cache_usage": 0.0}
    return [
        {"at": 1000.0 + place, "replicas": [{**(own if place < number - 2 else last), "steps": place,
                                             "num_rows": place * rows_a_look}],
         "devices": [{"device": "0", "utilization": utilization}]}
        for place in range(number)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "num_gpus", "kind", "words"),
    [
        ({"num_running": 40, "kv_cache_usage": 0.98}, 1, "memory", "engine.gpu_memory_utilization 0.95"),
        ({"num_running": 40, "kv_cache_usage": 0.98}, 4, "memory", "parallel.tensor_parallel_size 2"),
        ({"num_running": 100, "kv_cache_usage": 0.2}, 1, "sequences", "engine.max_num_seqs 200"),
        ({"num_running": 40, "num_waiting": 0, "num_ready": 0}, 1, "input", "input.token_ids_column"),
        ({"num_running": 100, "kv_cache_usage": 0.8}, 1, "compute", "more GPUs"),
        ({"num_running": 60, "num_waiting": 30, "kv_cache_usage": 0.1}, 0, "compute", "a GPU"),
    ],
)
def test_what_limits_by_the_four_rules(state: dict[str, Any], num_gpus: int, kind: str, words: str) -> None:
    found = bottleneck(looks(**state), engines(), num_gpus)
    assert found is not None
    assert found.kind == kind
    assert words in found.change
    assert "{" not in found.reason


def test_a_gpu_that_is_idle_beside_full_queues_waits_for_python() -> None:
    waiting = looks(utilization=66, num_running=100, kv_cache_usage=0.8)
    found = bottleneck(waiting, engines(), 1)
    assert found is not None and (found.kind, found.share) == ("processor", 0.34)
    assert "the GPUs ran nothing for 34% of the time" in found.reason
    assert found.change.startswith("parallel.replicas_per_device 2")
    both = {number: engines()[0] for number in range(2)}
    assert (shared := bottleneck(waiting, both, 1)) is not None
    assert shared.change.startswith("parallel.replicas_per_device 3")
    assert (wide := bottleneck(waiting, engines(tensor_parallel_size=2), 2)) is not None
    assert wide.change.startswith("a faster processor")
    assert (busy := bottleneck(looks(utilization=94, kv_cache_usage=0.8), engines(), 1)) is not None
    assert busy.kind == "compute"
    starved = looks(utilization=20, num_running=40, num_waiting=0, num_ready=0)
    assert (hungry := bottleneck(starved, engines(), 1)) is not None and hungry.kind == "input"
    seen = bottleneck(starved, engines(), 1, has_images=True)
    assert seen is not None and seen.kind == "images" and "rendered" in seen.reason
    speed = Speed(10.0, 5.0, 1.0, 0.0, 1, None, found)
    assert "limited by the engine's Python: " in "\n".join(speed_lines(speed))


def test_the_largest_share_of_the_time_decides() -> None:
    starved = looks(num_running=40, num_waiting=0, num_ready=0)
    half = [*looks()[:6], *starved[6:]]
    assert (found := bottleneck(half, engines(), 1)) is not None
    assert found.kind == "input" and 0.6 < found.share < 0.8
    assert (found := bottleneck([*looks()[:12], *starved[12:]], engines(), 1)) is not None
    assert found.kind == "compute"
    on_trial = looks(state=ON_TRIAL, num_running=1, num_waiting=0, num_ready=0)
    assert (found := bottleneck([*looks()[:6], *on_trial[6:-2], *looks()[-2:]], engines(), 1)) is not None
    assert found.kind == "compute"


def test_the_end_of_a_run_and_short_runs_say_nothing() -> None:
    assert bottleneck(looks(4), engines(), 1) is None
    assert bottleneck([], engines(), 1) is None
    # 95 rows fit into an engine with max_num_seqs 100: more cores for the input would not help.
    starved = {"num_running": 40, "num_waiting": 0, "num_ready": 0}
    assert bottleneck(looks(20, rows_a_look=5, **starved), engines(), 1) is None
    assert bottleneck(looks(20, rows_a_look=6, **starved), engines(), 1) is not None
    # All rows are in the engine or done from the first sample on: it has room because there are no more.
    assert bottleneck(looks(20, rows_a_look=0, num_running=40, num_waiting=0, num_ready=0), engines(), 1) is None


def test_eight_replicas_that_fill_within_a_second_say_nothing() -> None:
    """Many samples of one second are no time: all rows are out in the next one."""
    few = {"num_running": 12, "num_waiting": 0, "num_ready": 0}
    samples = [
        {**look, "replicas": [{**look["replicas"][0], "replica": number, "incarnation": f"000001.{number:04d}"}
                              for number in range(8)]}
        for look in looks(**few)
    ]  # fmt: skip
    everywhere = {number: engines()[0] for number in range(8)}
    assert bottleneck([*samples[:3], samples[-1]], everywhere, 8) is None
    found = bottleneck(samples, everywhere, 8)
    assert found is not None and found.kind == "input"


def test_a_full_cache_at_high_utilization_and_in_fp8() -> None:
    full = looks(num_running=40, kv_cache_usage=0.98)
    first = bottleneck(full, engines(engine_arguments={"gpu_memory_utilization": 0.95}), 1)
    assert first is not None and "engine.kv_cache_dtype fp8" in first.change
    arguments = {"gpu_memory_utilization": 0.95, "kv_cache_dtype": "fp8"}
    second = bottleneck(full, engines(engine_arguments=arguments), 1)
    assert second is not None and second.change == "GPUs with more memory"
    at_two = bottleneck(full, engines(tensor_parallel_size=2), 8)
    assert at_two is not None and "tensor_parallel_size 4" in at_two.change


def test_a_finished_job_has_its_speed_in_the_folder_and_in_status(tmp_path: pathlib.Path) -> None:
    summary = batchinf.run(jobs.spec_of(tmp_path, **QUICK), quiet=True).summary
    state = read_state(Folder(tmp_path / "out"))
    assert state is not None
    found = state.speed
    assert found is not None
    assert found == summary.speed == batchinf.status(tmp_path / "out").jobs[0].speed
    assert round(found.tokens_per_s * found.work_s) == summary.num_prompt_tokens + summary.num_output_tokens
    assert (found.num_gpus, found.tokens_per_s_per_gpu) == (0, None)
    lines = list(batchinf.status(tmp_path / "out").lines())
    assert next(speed_lines(found)) in lines


@pytest.mark.slow
@pytest.mark.all_rows
def test_a_long_run_says_what_limited_it(tmp_path: pathlib.Path) -> None:
    # All outputs of a batch end in the same step, so that nearly every sample sees a full batch.
    script = {"max_num_seqs": 64, "step_s": 0.02, "vary_lengths": False}
    summary = batchinf.run(jobs.spec_of(tmp_path, **{**QUICK, "scripted": script}), quiet=True).summary
    assert summary.speed is not None and summary.speed.bottleneck is not None
    # All 64 sequences run, and the scripted engine has no cache to fill.
    assert summary.speed.bottleneck.kind == "sequences"
    assert "engine.max_num_seqs 128" in "\n".join(summary.lines())


def test_lines_say_what_was_measured_and_what_limited_it() -> None:
    limit = Bottleneck("memory", 0.8, "for 80 % it was full", "engine.gpu_memory_utilization 0.95")
    speed = Speed(150.0, 110.0, 27_000.0, 9_000.0, 4, 404_000, limit)
    first, second = speed_lines(speed)
    assert "9k output tokens/s, 9k tokens/s per GPU" in first
    assert second == "limited by the cache: for 80 % it was full; to try: engine.gpu_memory_utilization 0.95"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0, "less than 1s"), (0.4, "less than 1s"), (0.99, "less than 1s"), (1.0, "1s"), (61, "1m01s")],
)
def test_no_run_takes_0s(seconds: float, told: str) -> None:
    speed = Speed(seconds, seconds, 27_000.0, 9_000.0, 4, 404_000, None)
    assert next(speed_lines(speed)).startswith(f"this run took {told}, and its engines worked {told} of it: ")
    summary = Summary(
        "out", num_rows=1, num_prompt_tokens=1, num_output_tokens=1, num_parts=1, num_bytes=1, device_s=seconds
    )
    assert f"; {told} of replica time over all attempts" in "\n".join(summary.lines())
    on_gpus = dataclasses.replace(summary, has_gpus=True)
    assert f"; {seconds / 3600:.3f} GPU-hours ({told}) over all attempts" in "\n".join(on_gpus.lines())

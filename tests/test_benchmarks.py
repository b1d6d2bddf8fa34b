"""The benchmarks that need no GPU run to their end, in a small size. Nothing timed is asserted."""

import importlib
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("command", [
    "worker_speed.py --rows 200 --out {out}",
    "tail.py --rows 300 --replicas 2 --order input --seeds 1",
    "telemetry.py --replicas 2",
    "wire.py",
    "selection.py --rows 20000",
    "memory.py --rows 300 --out {out}",
    "resume.py --rows 20000 --parts 20 --repeat 1 --out {out}",
    "plan_input.py --rows 20000",
    "scale.py --replicas 4 --rows 20000 --start-s 1 --out {out}",
    "loss.py --kills 1 --rows 200000 --out {out}",
    "house.py",
    "run.py top20 --estimate",
    "run.py small-top20 --shape tiny --rows 40 --rivals '' --scripted 0.01 --out {out}",
    "degrees.py llama-3.1-8b llama-2-7b,memory_gb=17.97,context=512 --gpus 2 --estimate --out {out}",
    "plan.py tiny --tasks generate --seconds 0.2 --out {out}",
])  # fmt: skip
def test_a_benchmark_runs(command: str, tmp_path: pathlib.Path) -> None:
    words = [word.replace("''", "").format(out=tmp_path / "out") for word in command.split()]
    done = subprocess.run(
        [sys.executable, jobs.ROOT / "benchmarks" / words[0], *words[1:]],
        cwd=tmp_path, capture_output=True, text=True, env={**jobs.inherited(), **jobs.quick_start()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    assert done.stdout.strip()


def test_a_trace_is_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of 100 µs on a device that waits 20 µs in the first and 40 in the second."""
    monkeypatch.syspath_prepend(str(jobs.ROOT / "benchmarks"))
    kineto = importlib.import_module("kineto")

    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 7}

    events = [
        *(event("user_annotation", "schedule", ts, 5) for ts in (0, 100, 200)),
        event("kernel", "matmul", 10, 90), event("kernel", "softmax", 20, 70), event("gpu_memcpy", "copy", 130, 60),
        event("python_function", "/x/site-packages/a.py(1): f", 0, 90), event("cpu_op", "aten::mm", 10, 30),
        event("python_function", "/x/site-packages/a.py(1): f", 50, 20), event("kernel", "late", 200, 50),
    ]  # fmt: skip
    lines = kineto.plain_lines(events)
    assert lines[0] == "2 steps of 0.100 ms."
    assert "idle for 25.0%, 0.025 ms a step, in 1 gaps of more than 20 µs" in lines[1]
    assert "| matmul | 0.045 | 40.9 |" in lines
    assert not any("late" in line for line in lines)
    lines = kineto.python_lines(events)
    assert "| a.py(1): f | 0.030 | 66.7 |" in lines  # less the operator inside
    assert "| aten::mm | 0.015 | 33.3 |" in lines
    assert "| a.py(1): f | 0.045 | 100.0 |" in lines

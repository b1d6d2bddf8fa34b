"""The benchmarks that need no GPU run to their end, in a small size. Nothing timed is asserted."""

import pathlib
import subprocess
import sys

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

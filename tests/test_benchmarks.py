"""The benchmarks that need no GPU run to their end, in a small size. Nothing timed is asserted."""

import importlib
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

import jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("command", [
    "worker_speed.py --rows 200 --out {out}",
    "tail.py --rows 30 --replicas 2 --skews 0.2 --lengths equal --jobs 1",
    "scheduler_steps.py --requests 64 --steps 5",
    "scheduler_steps.py --structured --requests 64 --steps 5",
    "memory.py --rows 300 --out {out}",
    "resume.py --rows 20000 --parts 20 --repeat 1 --out {out}",
    "scale.py --replicas 4 --rows 20000 --start-s 1 --out {out}",
    "house.py",
    "run.py top20 --estimate",
    "run.py small-top20 --shape tiny --rows 40 --rivals '' --scripted 0.01 --out {out}",
    "plan.py tiny --tasks generate --seconds 0.2 --out {out}",
])  # fmt: skip
def test_a_benchmark_runs(command: str, tmp_path: pathlib.Path) -> None:
    assert run(command, tmp_path).strip()


def test_a_package_above_its_budget_fails_lint(tmp_path: pathlib.Path) -> None:
    def budget(budgets: str) -> str:
        (tmp_path / "pyproject.toml").write_text(f"[tool.house.code-lines]\n{budgets}")
        command = [sys.executable, str(jobs.ROOT / "benchmarks" / "house.py"), "--budget", "--root", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout == ""
        assert done.returncode == (1 if done.stderr else 0)
        return done.stderr

    (tmp_path / "batchinf" / "job").mkdir(parents=True)
    (tmp_path / "batchinf" / "api.py").write_text('"""A module."""\n\nimport os\n\nNAME = os.name  # a name\n')
    code = 'def opened():\n    """Opened,\n    or not."""\n    text = """1\n    2"""\n    return [\n    text,\n    ]\n'
    (tmp_path / "batchinf" / "job" / "open.py").write_text(code)
    assert budget('"." = 1\njob = 6\n') == ""
    assert "batchinf/job has 6 code lines; its budget in pyproject.toml is 5: " in budget('"." = 1\njob = 5\n')
    assert "batchinf/. has 1 code lines and no budget; " in budget("job = 6\n")
    assert "batchinf/fleet has a budget in pyproject.toml and no code" in budget('"." = 1\njob = 6\nfleet = 1\n')


def test_rounds_of_two_jobs_on_two_lanes(tmp_path: pathlib.Path) -> None:
    jobs = '--compare local --compare slow={{"scripted":{{"step_s":0.02}}}}'
    sizes = "--shape tiny --rows 40 --max-tokens 8 --scripted 0.001"
    table = run(f"run.py plain {sizes} --repeat 2 --devices 0,1 {jobs} --out {{out}}", tmp_path)
    (found,) = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["runs"].keys() == {"batchinf-local", "batchinf-slow"}
    for runs in found["runs"].values():
        assert [(each["round"], each["devices"], each["num_rows"]) for each in runs] == [(1, "0", 40), (2, "1", 40)]
        assert all(each["wall_s"] > each["seconds"] for each in runs)
    last = table.splitlines()[-1].split("|")
    assert [cell.strip() for cell in last[1:4]] == ["plain", "batchinf-slow", "2"]
    assert float(last[9]) > 0
    run(f"run.py plain {sizes} --first-round 3 --compare local --out {{out}}", tmp_path)
    (found,) = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [each["round"] for each in found["runs"]["batchinf-local"]] == [1, 2, 3]
    assert [each["round"] for each in found["runs"]["batchinf-slow"]] == [1, 2]


def test_rounds_in_several_calls(tmp_path: pathlib.Path) -> None:
    command = "run.py plain --shape tiny --rows 40 --max-tokens 8 --scripted 0.001 --compare local --out {out} --resume"
    results = tmp_path / "out" / "results.json"

    def rounds() -> dict[int, dict[str, Any]]:
        (found,) = json.loads(results.read_text())
        return {each["round"]: each for each in found["runs"]["batchinf-local"]}

    run(command, tmp_path)
    (first,) = rounds().values()
    run(f"{command} --repeat 2", tmp_path)
    assert rounds().keys() == {1, 2}
    assert rounds()[1] == first
    assert "plain" in run(f"{command} --repeat 3 --limit-s 20", tmp_path)
    assert rounds().keys() == {1, 2}  # the start of an engine alone is estimated longer
    (found,) = json.loads(results.read_text())
    found["runs"]["batchinf-local"][1] = {"round": 2, "exit_code": 3}
    results.write_text(json.dumps([found]))
    run(f"{command} --repeat 2 --limit-s 500", tmp_path)
    assert rounds().keys() == {1, 2}
    assert "seconds" in rounds()[2] and rounds()[1] == first


def test_rivals_beside_a_job(tmp_path: pathlib.Path) -> None:
    sizes = "--shape tiny --rows 8 --prompt-tokens 16 --max-tokens 8 --dtype float32"
    run(f"run.py n8 {sizes} --rivals raw,flat,ceiling --out {{out}}", tmp_path)
    (found,) = json.loads((tmp_path / "out" / "results.json").read_text())
    kinds = ("batchinf", "raw", "flat", "ceiling")
    assert {kind: each["num_output_tokens"] for kind in kinds for each in found["runs"][kind]} == dict.fromkeys(
        kinds, 8 * 8 * 8
    )
    timed = [
        each[name] for kind in kinds[1:] for each in found["runs"][kind] for name in ("wall_s", "start_s", "seconds")
    ]
    assert len(timed) == 9 and min(timed) > 0


def test_the_estimate_has_each_job_and_rival_of_a_round_on_one_lane(tmp_path: pathlib.Path) -> None:
    printed = run("run.py bare-top20 uneven bare-fp8 --repeat 3 --devices 0,1 --estimate", tmp_path)
    lines = re.findall(r"^ *[\d.]+ +(\d) +(\d)  (.*)$", printed, re.MULTILINE)
    lanes: dict[tuple[str, str], set[str]] = {}
    for number, lane, shown in lines:
        for run_of in shown.removesuffix(" (guess)").split(", "):
            lanes.setdefault((run_of.split()[0], number), set()).add(lane)
    assert {key for key, found in lanes.items() if len(found) != 1} == set()
    assert [lanes["bare-top20", number] for number in "123"] == [{"0"}, {"1"}, {"0"}]
    assert "uneven ceiling (guess)" in printed and "bare-top20 batchinf\n" in printed


def run(command: str, tmp_path: pathlib.Path) -> str:
    """What a script of benchmarks/ prints."""
    words = [word.replace("''", "").format(out=tmp_path / "out") for word in command.split()]
    # Servers fork the scripts and the jobs that they start: the imports take longer than the small sizes here.
    has_vllm = words[0] in ("plan.py", "scheduler_steps.py") or "ceiling" in command
    process = jobs.fork_server(has_vllm=words[0] == "scheduler_steps.py").start(
        jobs.fork_server(has_vllm=has_vllm),
        [sys.executable, str(jobs.ROOT / "benchmarks" / words[0]), *words[1:]],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**jobs.inherited(), **jobs.quick_start()},
    )  # fmt: skip
    out, errors = process.communicate()
    assert process.returncode == 0, errors[-2000:] + out[-2000:]
    assert out.strip()
    return out


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

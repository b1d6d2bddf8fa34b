"""A pipeline of two GPUs: whether its rows and logits are those of one GPU, and how a killed stage ends.

    python benchmarks/pipeline.py --out results

The sample model runs in float32: on one GPU, as a pipeline of two, and as a pipeline of which a worker is killed. Then
the logits of a pipeline are held against transformers by `batchinf verify`. The script prints a table, writes
pipeline.json, and exits with 1 if rows differ, `verify` fails or a process is left.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
from hosts import ROOT, difference, left_processes, rows_in, sample_spec, sampling_of

_WAIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--backend-arguments", type=json.loads, default={}, help="JSON: more engine arguments")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    found: dict[str, dict[str, Any]] = {}
    engine = {"max_model_len": 1024, **args.backend_arguments}
    jobs = (("one", 1, False), ("pipeline", args.pipeline, False), ("killed", args.pipeline, True))
    for name, pipeline, is_hurt in jobs:
        sizes = {"pipeline_parallel_size": pipeline}
        spec = sample_spec(args.out / name, sizes, engine, sampling_of(args.max_tokens))
        found[name] = _run(name, spec, args.out, is_hurt)
        found[name] |= difference(rows_in(args.out / "one"), rows_in(args.out / name))
        _store(found, args.out)
    sections = {"task": "logits", "logits": {"positions": "last", "dtype": "float32"}}
    spec = sample_spec(args.out / "logits", {"pipeline_parallel_size": args.pipeline}, engine, sections)
    found["logits"] = _run("logits", spec, args.out, is_hurt=False)
    verified = subprocess.run(
        [sys.executable, "-m", "batchinf", "verify", args.out / "logits.yaml", "-n", "64"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    found["logits"] |= {"verify": verified.returncode, "says": (verified.stdout or verified.stderr)[-1500:]}
    _store(found, args.out)
    print("| job | exit | seconds | restarts | rows | rows that differ | largest difference of a logprob |")
    for name, job in found.items():
        print(f"| {name} | {job['exit_code']} | {job['wall_s']} | {job['restarts']} | {job.get('num_rows', '')} | "
              f"{job.get('num_different', '')} | {job.get('logprob_difference', '')} |")  # fmt: skip
    print(found["logits"]["says"])
    left = left_processes()
    failed = [name for name, job in found.items() if job["exit_code"] or job.get("num_different") or job.get("verify")]
    if left or failed or not found["killed"]["restarts"]:
        sys.exit(f"failed: {failed}; processes left: {left}; restarts: {found['killed']['restarts']}")


def _run(name: str, spec: dict[str, Any], out: pathlib.Path, is_hurt: bool) -> dict[str, Any]:
    """Run a job. is_hurt: a worker is killed once the first part is there."""
    path = out / f"{name}.yaml"
    path.write_text(json.dumps(spec))
    started, killed = time.monotonic(), list[str]()
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "batchinf", "run", path], cwd=ROOT, stdout=log, stderr=log)
        while is_hurt and not killed and process.poll() is None:
            if any((out / name / "parts").glob("*.parquet")):
                killed = _kill_a_stage(process.pid)
            time.sleep(0.05)
        code = process.wait(_WAIT_S)
    events = [json.loads(line) for log in (out / name / "manifest").glob("*.jsonl") for line in log.open()]
    starts = sum(event["kind"] == "event" and event["name"] == "ready" for event in events)
    return {
        "exit_code": code, "wall_s": round(time.monotonic() - started, 1), "restarts": starts - 1, "killed": killed
    }  # fmt: skip


def _kill_a_stage(pid: int) -> list[str]:
    """Kill the process of the last stage. Returns its name."""
    stages = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "Worker" in (name := " ".join([process.name(), *process.cmdline()])):
                stages.append((name, process.pid))
    if not stages:
        return []
    name, stage = max(stages)
    os.kill(stage, signal.SIGKILL)
    return [name]


def _store(found: dict[str, dict[str, Any]], out: pathlib.Path) -> None:
    (out / "pipeline.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

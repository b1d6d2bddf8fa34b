"""Time a batchinf job and its rivals on one workload, in one run on one machine.

    python benchmarks/run.py top20 tp2 --out results --rivals ceiling,defaults,chunks
    python benchmarks/run.py top20 --shape tiny --rows 200 --out results        # anywhere, on a CPU

Each runs in a process of its own, one after the other. The job's time counts from the first request admitted to the
last part committed. Writes results.json and prints a table.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import psutil
from shapes import make_model, make_prompts
from workloads import WORKLOADS, Workload

HERE = pathlib.Path(__file__).resolve().parent


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--rivals", default="ceiling,defaults,chunks")
    parser.add_argument("--shape")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--dtype")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in args.workloads:
        workload = WORKLOADS[name].sized(args.rows, args.shape)
        if args.dtype:
            workload = dataclasses.replace(workload, dtype=args.dtype)
        results.append(measure(workload, args.out / name, [kind for kind in args.rivals.split(",") if kind]))
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
        print(table(results), flush=True)


def measure(workload: Workload, folder: pathlib.Path, rivals: list[str]) -> dict[str, Any]:
    """All figures of one workload."""
    shutil.rmtree(folder, ignore_errors=True)
    model = make_model(workload.shape, folder / "model")
    prompts = make_prompts(folder / "prompts.parquet", workload.shape, workload.num_rows, workload.prompt_tokens)
    found: dict[str, Any] = {"workload": dataclasses.asdict(workload)}
    found["batchinf"] = run_job(workload, folder, model, prompts)
    given = {
        **dataclasses.asdict(workload),
        "model": str(model),
        "prompts": str(prompts),
        "sampling": workload.sampling(),
        "engine": workload.engine,
    }
    (folder / "workload.json").write_text(json.dumps(given))
    for kind in rivals:
        result = folder / f"{kind}.json"
        command = [sys.executable, str(HERE / "rivals.py"), str(folder / "workload.json"), kind, str(result)]
        with (folder / f"{kind}.log").open("wb") as log:
            subprocess.run(command, stdout=log, stderr=log, check=False)
        found[kind] = json.loads(result.read_text()) if result.exists() else None
    return found


def run_job(workload: Workload, folder: pathlib.Path, model: pathlib.Path, prompts: pathlib.Path) -> dict[str, Any]:
    """Run the workload as a batchinf job; figures from its own manifest."""
    out = folder / "job"
    spec = {
        "model": {
            "name": str(model), "dtype": workload.dtype, "load_format": "dummy", "quantization": workload.quantization
        },
        "input": {"path": str(prompts), "prompt_column": "prompt", "id_column": "id"},
        "sampling": workload.sampling(),
        "parallel": {
            "tensor_parallel_size": workload.tensor_parallel_size,
            "data_parallel_size": workload.data_parallel_size,
        },
        "engine": workload.engine,
        "output": {"path": str(out)},
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(json.dumps(spec))
    started = time.monotonic()
    with (folder / "job.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "batchinf", "run", str(path)], stdout=log, stderr=log)
        cpu_s, peak = watch(process)
    figures = {"exit_code": process.returncode, "wall_s": round(time.monotonic() - started, 1)}
    if process.returncode != 0:
        return {**figures, "log": (folder / "job.log").read_text()[-2000:]}
    return {**figures, **from_manifest(out), "coordinator_cpu_s": cpu_s, "peak_bytes": peak}


def watch(process: "subprocess.Popen[bytes]") -> tuple[float, dict[str, int]]:
    """Wait for a job; its coordinator's processor seconds, and peak resident memory by kind of process."""
    cpu_s, peak = 0.0, {"coordinator": 0, "replica": 0}
    while process.poll() is None:
        try:
            root = psutil.Process(process.pid)
            times = root.cpu_times()
            cpu_s = times.user + times.system
            peak["coordinator"] = max(peak["coordinator"], root.memory_info().rss)
            for child in root.children():
                peak["replica"] = max(peak["replica"], child.memory_info().rss)
        except psutil.Error:
            pass
        time.sleep(0.5)
    return round(cpu_s, 2), peak


def from_manifest(out: pathlib.Path) -> dict[str, Any]:
    """Seconds, tokens and versions of a finished job."""
    lines = [json.loads(line) for log in sorted((out / "manifest").glob("*.jsonl")) for line in log.open()]
    events = [line for line in lines if line["kind"] == "event"]
    parts = [line for line in lines if line["kind"] == "part"]
    ready = [event for event in events if event["name"] == "ready"]
    at = {event["name"]: datetime.datetime.fromisoformat(event["at"]) for event in events}
    seconds = (at["all_committed"] - at["first_request"]).total_seconds()
    num_output, num_prompt = (sum(part[name] for part in parts) for name in ("num_output_tokens", "num_prompt_tokens"))
    return {
        "start_s": [event["start_s"] for event in ready],
        "device": ready[0]["device"],
        "versions": ready[0]["versions"],
        "seconds": round(seconds, 2),
        "num_rows": sum(part["num_rows"] for part in parts),
        "num_errors": sum(part["num_errors"] for part in parts),
        "num_bytes": sum(part["num_bytes"] for part in parts),
        "num_output_tokens": num_output,
        "output_tokens_per_s": round(num_output / seconds, 1),
        "prompt_tokens_per_s": round(num_prompt / seconds, 1),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Output tokens a second, side by side."""
    kinds = ["batchinf", "ceiling", "defaults", "chunks"]
    lines = ["| workload | " + " | ".join(kinds) + " | batchinf / ceiling |", "|" + " --- |" * (len(kinds) + 2)]
    for result in results:
        figures = [(result.get(kind) or {}).get("output_tokens_per_s") for kind in kinds]
        ratio = f"{figures[0] / figures[1]:.3f}" if figures[0] and figures[1] else "-"
        cells = [f"{figure:,.0f}" if figure else "-" for figure in figures]
        lines.append(f"| {result['workload']['name']} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

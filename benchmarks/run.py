"""Time batchinf jobs and their rivals, in one run on one machine.

    python benchmarks/run.py top20 --out results                                # the job and the workload's own rivals
    python benchmarks/run.py score0 score5 --out results --limit-s 520          # rivals of both in one engine start
    python benchmarks/run.py top20 small-top20 --estimate                       # minutes on an H200, nothing is run
    python benchmarks/run.py lognormal --out results --replicas 1,2,4           # for each replica as many rows
    python benchmarks/run.py prefix prefix-input --out results                  # the order of the rows, and its rival
    python benchmarks/run.py lognormal --shape tiny --rows 1500 --max-num-seqs 256 --replicas 1,2,4 --scripted 0.02
    python benchmarks/run.py top20 --shape tiny --rows 200 --out results        # anywhere, on a CPU

Each job runs first, in its own process. Then the rivals run, the fastest kinds first, in one process for all workloads
with the same model and engine arguments. results.json always has the figures so far. A job's time counts from the first
admitted request to the last committed part.
"""

import argparse
import contextlib
import dataclasses
import datetime
import itertools
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
from shapes import make_model, make_prompts
from workloads import STARTS_S, WORKLOADS, Workload

from batchinf.fleet.local.backend import engine_environment
from batchinf.fleet.local.devices import visible_devices

HERE = pathlib.Path(__file__).resolve().parent
KINDS = ("raw", "embed", "ceiling", "sorted", "defaults", "chunks")  # in the order of running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--rivals", help="names with commas between them, for all workloads; '' is none")
    parser.add_argument("--no-jobs", action="store_true", help="measure rivals alone, beside jobs measured before")
    parser.add_argument("--shape")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--replicas", help="numbers of replicas with commas between them")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--engine", type=json.loads, help="JSON: engine arguments of job and rivals, for all workloads")
    parser.add_argument("--job-engine", type=json.loads, help="JSON: engine arguments of the job alone")
    parser.add_argument("--job-parallel", type=json.loads, help="JSON: more of the job's section `parallel`")
    parser.add_argument("--scripted", type=float, help="the scripted engine, a step in so many seconds; no rivals")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end everything after so many seconds")
    parser.add_argument("--estimate", action="store_true", help="print how long it would take on an H200")
    args = parser.parse_args()
    workloads = list(chosen(args))
    if args.estimate:
        print(estimate(workloads))
        return
    deadline = time.monotonic() + args.limit_s
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out, [] if args.no_jobs else [w.name for w in workloads])
    prepared = [(workload, *prepare(workload, args.out)) for workload in workloads]
    for workload, model, prompts in prepared:
        if not args.no_jobs:
            results.add(workload, "batchinf", run_job(workload, args.out / workload.name, model, prompts, deadline))
    for number, group in enumerate(grouped(prepared)):
        run_rivals(group, args.out, number, deadline, results)
    print(results.table(), flush=True)


def chosen(args: argparse.Namespace) -> "itertools.chain[Workload]":
    """The workloads of the command line, in the wanted sizes."""

    def each(name: str) -> list[Workload]:
        numbers = [int(number) for number in args.replicas.split(",")] if args.replicas else [None]
        found = [WORKLOADS[name].sized(args.rows, args.shape, number) for number in numbers]
        changes: dict[str, Any] = {"dtype": args.dtype} if args.dtype else {}
        if args.max_num_seqs:
            changes["max_num_seqs"] = args.max_num_seqs
        given = {"own_engine": args.engine, "job_engine": args.job_engine, "job_parallel": args.job_parallel}
        changes |= {name: value for name, value in given.items() if value is not None}
        if args.scripted is not None:
            changes |= {"scripted_step_s": args.scripted, "rivals": ()}
        elif args.rivals is not None:
            changes["rivals"] = tuple(kind for kind in args.rivals.split(",") if kind)
        return [dataclasses.replace(workload, **changes) for workload in found]

    return itertools.chain.from_iterable(each(name) for name in args.workloads)


def prepare(workload: Workload, out: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Make the workload's empty folder. Returns model folder and prompts, which workloads of the same sizes share."""
    shutil.rmtree(out / workload.name, ignore_errors=True)
    (out / workload.name).mkdir(parents=True)
    model = make_model(workload.shape, out / "models" / workload.shape)
    sizes = f"{workload.shape}-{workload.num_rows}-{workload.prompt_tokens}{'-budgets' * workload.log_normal}"
    sizes += f"-{workload.prefix_tokens}" if workload.prefix_tokens else ""
    path = out / "prompts" / f"{sizes}.parquet"
    if not path.exists():
        make_prompts(
            path,
            workload.shape,
            workload.num_rows,
            workload.prompt_tokens,
            budgets=workload.budgets(),
            prefix_tokens=workload.prefix_tokens,
            rows_per_prefix=workload.rows_per_prefix,
        )
    return model, path


# -- the job -----------------------------------------------------------------------------------------------------------


def run_job(
    workload: Workload, folder: pathlib.Path, model: pathlib.Path, prompts: pathlib.Path, deadline: float
) -> dict[str, Any]:
    """Run the workload as a batchinf job. Returns figures from its manifest."""
    return run_spec(*write_spec(workload, folder, model, prompts), deadline)


def run_spec(path: pathlib.Path, out: pathlib.Path, deadline: float) -> dict[str, Any]:
    """Run the job of a spec file, whose output folder is `out`. Returns figures from its manifest."""
    folder = path.parent
    started = time.monotonic()
    with (folder / "job.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "batchinf", "run", str(path)], stdout=log, stderr=log, start_new_session=True
        )
        cpu_s, peak = watch(process, deadline)
    wall_s = time.monotonic() - started
    figures = {"exit_code": process.returncode, "wall_s": round(wall_s, 1)}
    if process.returncode != 0:
        return {**figures, "log": (folder / "job.log").read_text()[-2000:]}
    share = round(cpu_s / wall_s, 3)
    return {**figures, **from_manifest(out), "coordinator_cpu_s": cpu_s, "coordinator_cores": share, "peak_bytes": peak}


def write_spec(
    workload: Workload, folder: pathlib.Path, model: pathlib.Path, prompts: pathlib.Path
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write the job's spec. Returns the file and the output folder."""
    out = folder / "job"
    sampling = workload.sampling()
    if workload.log_normal:
        sampling["max_tokens"] = {"column": "max_tokens"}
    spec = {
        "model": {
            "name": str(model), "dtype": workload.dtype, "load_format": "dummy", "quantization": workload.quantization
        },
        "input": {"path": str(prompts), "prompt_column": "prompt", "id_column": "id", "order": workload.order},
        "sampling": sampling,
        "parallel": {
            "tensor_parallel_size": workload.tensor_parallel_size,
            "data_parallel_size": workload.data_parallel_size,
            **workload.job_parallel,
        },
        "engine": workload.engine if workload.job_engine is None else workload.job_engine,
        "output": {"path": str(out)},
    }  # fmt: skip
    if workload.task == "score":
        spec |= {
            "task": "score",
            "sampling": {},
            "input": {"path": str(prompts), "text_column": "prompt", "id_column": "id"},
        }
    if workload.is_embedding:
        spec |= {"task": "embed", "sampling": {}}
    if workload.scripted_step_s is not None:
        spec["scripted"] = {
            "step_s": workload.scripted_step_s,
            "max_num_seqs": workload.max_num_seqs,
            "max_model_len": workload.max_model_len,
            "vary_lengths": False,
        }
    path = folder / "job.yaml"
    path.write_text(json.dumps(spec))
    return path, out


def watch(process: "subprocess.Popen[bytes]", deadline: float) -> tuple[float, dict[str, int]]:
    """Wait for a job. Returns the coordinator's processor seconds, and peak RSS by kind of process."""
    cpu_s, peak = 0.0, {"coordinator": 0, "replica": 0}
    while process.poll() is None:
        if time.monotonic() > deadline:
            end(process)  # its replicas notice that and end
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


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
        **from_telemetry(out, at["first_request"].timestamp(), at["all_committed"].timestamp()),
    }


def from_telemetry(out: pathlib.Path, begun: float, ended: float) -> dict[str, Any]:
    """By replica: seconds before its first row and after its last while others worked (and the last parts were
    written), accurate to a second; and the share of prompt tokens from the prefix cache.
    """
    lines = [json.loads(line) for log in sorted((out / "telemetry").glob("*.jsonl")) for line in log.open()]
    looks = [(line["at"], look["replica"], look) for line in lines for look in line["replicas"]]
    late, idle, hits = {}, {}, {}
    for replica in sorted({replica for _, replica, _ in looks}):
        own = [(at, look) for at, number, look in looks if number == replica]
        last = own[-1][1]
        working = [at for at, look in own if look["num_running"] + look["num_waiting"] + look["num_ready"]]
        late[replica] = round(max(0.0, min(working, default=ended) - begun), 1)
        idle[replica] = round(max(0.0, ended - max(working, default=begun)), 1)
        hits[replica] = round(last["prefix_cache_hits"] / max(1, last["prefix_cache_queries"]), 3)
    return {"late_s": late, "idle_s": idle, "prefix_hit_rate": hits}


# -- the rivals --------------------------------------------------------------------------------------------------------

Prepared = tuple[Workload, pathlib.Path, pathlib.Path]


def grouped(prepared: list[Prepared]) -> list[list[Prepared]]:
    """Workloads that one engine can run."""
    groups: dict[str, list[Prepared]] = {}
    for item in prepared:
        if item[0].rivals:
            groups.setdefault(json.dumps(engine_of([item]) | {"max_logprobs": 0}), []).append(item)
    return list(groups.values())


def engine_of(group: list[Prepared]) -> dict[str, Any]:
    workload, model, _ = group[0]
    return {
        "model": str(model),
        "load_format": "dummy",
        "dtype": workload.dtype,
        "quantization": workload.quantization,
        "tensor_parallel_size": workload.tensor_parallel_size,
        "max_logprobs": max(20, *(k for item, *_ in group for k in (item.logprobs or 0, item.prompt_logprobs or 0))),
        **({"runner": "pooling", "convert": "embed"} if workload.is_embedding else {}),
        **workload.engine,
    }


def run_rivals(group: list[Prepared], out: pathlib.Path, number: int, deadline: float, results: "Results") -> None:
    """Run all rivals of a group in one process, which writes each figure at once."""
    wanted = [(workload, kind, path) for kind in KINDS for workload, _, path in group if kind in workload.rivals]
    runs = [
        {
            "kind": kind,
            "prompts": str(prompts),
            "num_rows": workload.rows_of(kind),
            "prompt_tokens": workload.prompt_tokens,
            "has_budgets": workload.log_normal,
            "sampling": workload.sampling() if kind != "ceiling" else {**workload.sampling(), **BARE},
            "chunk_rows": workload.chunk_rows,
            "result": str(out / workload.name / f"{kind}.json"),
        }
        for workload, kind, prompts in wanted
    ]
    path = out / f"rivals-{number}.json"
    path.write_text(json.dumps({"engine": engine_of(group), "runs": runs}))
    with path.with_suffix(".log").open("wb") as log:
        command = [sys.executable, str(HERE / "rivals.py"), str(path)]
        # On a CPU the engine runs like that of a job: in one process, on the same cores.
        own = {} if visible_devices() else engine_environment((), os.cpu_count() or 1)
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **own})
        while process.poll() is None and time.monotonic() < deadline:
            results.collect(wanted, out)
            time.sleep(0.5)
        end(process)
    results.collect(wanted, out)


# Workloads that differ only in these share one ceiling.
BARE: dict[str, Any] = {"logprobs": None, "prompt_logprobs": None, "stop": None}


# -- results -----------------------------------------------------------------------------------------------------------


class Results:
    """Figures by workload and kind. results.json is always up to date."""

    def __init__(self, out: pathlib.Path, fresh: list[str]) -> None:
        self._path = out / "results.json"
        known = json.loads(self._path.read_text()) if self._path.exists() else []
        self._found = {found["workload"]["name"]: found for found in known if found["workload"]["name"] not in fresh}

    def add(self, workload: Workload, kind: str, figures: dict[str, Any]) -> None:
        found = self._found.setdefault(workload.name, {"workload": dataclasses.asdict(workload)})
        found[kind] = figures
        self._path.write_text(json.dumps(list(self._found.values()), indent=1))
        print(workload.name, kind, figures, flush=True)

    def collect(self, wanted: list[tuple[Workload, str, pathlib.Path]], out: pathlib.Path) -> None:
        """Add the figures that the rivals have written."""
        for workload, kind, _ in wanted:
            path = out / workload.name / f"{kind}.json"
            with contextlib.suppress(OSError, json.JSONDecodeError):
                figures = json.loads(path.read_text())
                if self._found.get(workload.name, {}).get(kind) != figures:
                    self.add(workload, kind, figures)

    def table(self) -> str:
        """Tokens a second side by side, and the ratio of the job's figure to each other one."""
        names = ["batchinf", *KINDS]
        lines = [
            f"| workload | {' | '.join(names)} | {' | '.join(f'/ {kind}' for kind in KINDS)} | coordinator, cores |",
            "|" + " --- |" * (len(names) + len(KINDS) + 2),
        ]
        for found in self._found.values():
            name = "prompt_tokens_per_s" if found["workload"]["max_tokens"] == 1 else "output_tokens_per_s"
            figures = [(found.get(kind) or {}).get(name) for kind in names]
            cells = [f"{figure:,.0f}" if figure else "-" for figure in figures]
            cells += [f"{figures[0] / figure:.3f}" if figures[0] and figure else "-" for figure in figures[1:]]
            cores = (found.get("batchinf") or {}).get("coordinator_cores", "-")
            lines.append(f"| {found['workload']['name']} | {' | '.join(cells)} | {cores} |")
        return "\n".join(lines)


def estimate(workloads: list[Workload]) -> str:
    """Minutes of each step on an H200, from measured speeds."""
    lines, total, started = [], 0.0, set()
    engines: dict[str, list[Workload]] = {}

    def add(what: str, seconds: float) -> None:
        nonlocal total
        total += seconds
        lines.append(f"{what:40}{seconds / 60:6.1f}")

    for workload in workloads:
        seconds = STARTS_S["warm" if workload.shape in started else "cold"]
        started.add(workload.shape)
        if speed := workload.h200.get("batchinf"):
            add(f"{workload.name} batchinf", seconds + workload.num_tokens("batchinf") / speed)
        if workload.rivals:
            engines.setdefault(json.dumps([workload.shape, workload.quantization, workload.engine]), []).append(
                workload
            )
    for group in engines.values():
        add(f"an engine for {', '.join(workload.name for workload in group)}", STARTS_S["warm"])
        ceilings = set()
        for workload in group:
            for kind in workload.rivals:
                sizes = (workload.num_rows, workload.prompt_tokens, workload.max_tokens, workload.log_normal)
                if kind == "ceiling" and sizes in ceilings:
                    continue
                ceilings |= {sizes} if kind == "ceiling" else set()
                if speed := workload.h200.get(kind):
                    add(f"{workload.name} {kind}", workload.num_tokens(kind) / speed + 3)
    return "\n".join([*lines, f"{'minutes in all':40}{total / 60:6.1f}"])


if __name__ == "__main__":
    main()

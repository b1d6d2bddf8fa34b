"""Time batchinf jobs and their rivals, in one run on one machine.

    python benchmarks/run.py top20 --out results                                # the job and the workload's own rivals
    python benchmarks/run.py bare-top20 small-embed --repeat 3 --devices 0,1    # three rounds, two GPUs side by side
    python benchmarks/run.py score0 score5 --out results --limit-s 520          # rivals of both in one engine start
    python benchmarks/run.py top20 --repeat 3 --limit-s 520 --resume            # again and again, until all rounds ran
    python benchmarks/run.py top20 small-top20 --repeat 3 --estimate            # minutes on an H200, nothing is run
    python benchmarks/run.py lognormal --out results --replicas 1,2,4           # for each replica as many rows
    python benchmarks/run.py dp2 --compare local,ray --repeat 3                 # two jobs; a Ray cluster runs here
    python benchmarks/run.py json --compare 'chosen={}' --compare 'best={"engine": {"max_num_seqs": 512}}'
    python benchmarks/run.py lognormal --shape tiny --rows 1500 --max-num-seqs 256 --replicas 1,2,4 --scripted 0.02
    python benchmarks/run.py top20 --shape tiny --rows 200 --out results        # anywhere, on a CPU

Each job is a process. The rivals of all workloads with the same model and engine arguments are one process, the fastest
kinds first. `rounds.py` says in which order they run, and on which GPUs. results.json always has the figures so far. A
job's time counts from the first admitted request to the last committed part. `wall_s` is the time of the whole process;
that of a rival leaves out the other rivals of its process.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
from figures import Results
from rounds import Step, estimate, steps_of
from shapes import make_adapter, make_model, make_prompts, make_text
from workloads import WORKLOADS, Workload

from batchinf.fleet.engine_defaults import chosen_arguments, values
from batchinf.fleet.launch import choose_backend
from batchinf.fleet.local.devices import visible_devices
from batchinf.fleet.local.environment import engine_environment
from batchinf.model.memory import fit_of
from batchinf.model.model import resolve
from batchinf.planning.lengths import shared_share
from batchinf.spec.file import read_spec
from batchinf.tasks.registry import task_of  # it also adds the tasks to the spec

HERE = pathlib.Path(__file__).resolve().parent
# Sections of jobs that `--compare` knows by name.
COMPARED: dict[str, dict[str, Any]] = {"local": {}, "ray": {"backend": "ray", "ray": {"address": "auto"}}}
_LOOKS = 60  # at the memory of an engine, that are kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS), metavar="workload", help="see workloads.py")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--rivals", help="names with commas between them, for all workloads; '' is none")
    parser.add_argument("--no-jobs", action="store_true", help="measure rivals alone, beside jobs measured before")
    parser.add_argument("--repeat", type=int, default=1, help="rounds of all jobs and rivals")
    parser.add_argument("--first-round", type=int, default=1, help="results.json keeps the figures of other rounds")
    parser.add_argument("--devices", help="GPUs with commas between them, which work side by side; default: one job's")
    parser.add_argument("--shape")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--replicas", help="numbers of replicas with commas between them")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--engine", type=json.loads, help="JSON: engine arguments of job and rivals, for all workloads")
    parser.add_argument("--tuned-engine", type=json.loads, help="JSON: of `tuned`; default: batchinf's choice")
    parser.add_argument("--job-engine", type=json.loads, help="JSON: engine arguments of the job alone")
    parser.add_argument("--job-parallel", type=json.loads, help="JSON: more of the job's section `parallel`")
    parser.add_argument("--job-spec", type=json.loads, default={}, help="JSON: sections that are merged into each spec")
    parser.add_argument(
        "--compare",
        action="append",
        help="several jobs: 'local,ray', or NAME=JSON with more sections, of which `environment` has variables",
    )
    parser.add_argument("--scripted", type=float, help="the scripted engine, a step in so many seconds; no rivals")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end everything after so many seconds")
    parser.add_argument(
        "--resume", action="store_true", help="run what results.json lacks, and what fits into --limit-s"
    )
    parser.add_argument("--estimate", action="store_true", help="print how long it would take on an H200")
    parser.add_argument("--warm", action="store_true", help="of estimates: the machine has run these models before")
    args = parser.parse_args()
    workloads, jobs = chosen(args), {} if args.no_jobs else jobs_of(args)
    lanes = lanes_of(args.devices, max(workload.num_devices for workload in workloads))
    rounds = range(args.first_round, args.first_round + args.repeat)
    steps = steps_of(workloads, jobs, rounds, len(lanes))
    if args.estimate:
        print(estimate(workloads, steps, len(lanes), args.warm))
        return
    deadline = time.monotonic() + args.limit_s
    args.out.mkdir(parents=True, exist_ok=True)
    fresh = [
        (workload, kind, number) for number in rounds for workload in workloads for kind in (*jobs, *workload.rivals)
    ]
    results = Results(args.out, [] if args.resume else fresh)
    if args.resume:
        results = Results(args.out, [run for run in fresh if not results.has(*run)])
        steps = [step for step in steps if not all(results.has(*run, step.round) for run in step.runs)]
    for workload in workloads:
        prepare(workload, args.out)
    bench = Bench(args.out, jobs, args.tuned_engine, deadline, results, must_fit=args.resume, is_warm=args.warm)
    with ThreadPoolExecutor(len(lanes)) as pool:
        for done in [pool.submit(bench.work, lane, steps) for lane in lanes]:
            done.result()
    print(results.table(), flush=True)


def chosen(args: argparse.Namespace) -> list[Workload]:
    """The workloads of the command line, in the wanted sizes."""
    numbers = [int(number) for number in args.replicas.split(",")] if args.replicas else [None]
    changes: dict[str, Any] = {"dtype": args.dtype} if args.dtype else {}
    if args.max_num_seqs:
        changes["max_num_seqs"] = args.max_num_seqs
    given = {"own_engine": args.engine, "job_engine": args.job_engine, "job_parallel": args.job_parallel}
    changes |= {name: value for name, value in given.items() if value is not None}
    if args.scripted is not None:
        changes |= {"scripted_step_s": args.scripted, "rivals": ()}
    sizes = (args.prompt_tokens, args.max_tokens)
    found = [WORKLOADS[name].sized(args.rows, args.shape, each, *sizes) for name in args.workloads for each in numbers]
    found = [dataclasses.replace(workload, **changes) for workload in found]
    if args.rivals is None or args.scripted is not None:
        return found
    kinds = tuple(kind for kind in args.rivals.split(",") if kind)
    return [dataclasses.replace(workload, rivals=kinds) for workload in found]


def jobs_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The jobs of each workload: their names, and the sections that are merged into their specs."""
    jobs: dict[str, dict[str, Any]] = {}
    for words in args.compare or ():
        name, is_given, text = words.partition("=")
        if not is_given and (unknown := set(words.split(",")) - COMPARED.keys()):
            sys.exit(f"--compare: got {', '.join(unknown)}; write {' or '.join(COMPARED)}, or NAME=JSON")
        wanted = {name: json.loads(text)} if is_given else {each: COMPARED[each] for each in words.split(",")}
        jobs |= {f"batchinf-{name}": merged(args.job_spec, sections) for name, sections in wanted.items()}
    return jobs or {"batchinf": args.job_spec}


def merged(spec: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with the sections in it. A field of a section replaces that field alone."""
    both = {
        name: {**spec[name], **section}
        for name, section in sections.items()
        if isinstance(section, dict) and isinstance(spec.get(name), dict)
    }
    return {**spec, **sections, **both}


@dataclass(frozen=True, slots=True)
class Lane:
    """The GPUs on which one process runs after the other, and its share of the cores. cores: None is all."""

    number: int
    devices: tuple[str, ...]
    cores: frozenset[int] | None

    def environment(self, num_devices: int) -> dict[str, str]:
        """Variables for a process that uses so many of the GPUs."""
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(self.devices[:num_devices])} if self.devices else {}
        return {**os.environ, **chosen}


def lanes_of(devices: str | None, num_devices: int) -> list[Lane]:
    """Lanes of `num_devices` GPUs each. Without `devices`, one lane."""
    names = tuple(devices.split(",")) if devices else visible_devices()[:num_devices]
    if devices and len(names) < num_devices:
        sys.exit(f"--devices: got {devices}; a job of these workloads needs {num_devices} GPUs")
    number, cores = max(1, len(names) // num_devices), sorted(os.sched_getaffinity(0))
    share = len(cores) // number
    return [
        Lane(
            lane,
            names[lane * num_devices : (lane + 1) * num_devices],
            frozenset(cores[lane * share : (lane + 1) * share]) if number > 1 and share else None,
        )
        for lane in range(number)
    ]


def prepare(workload: Workload, out: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Make the workload's folder, and model and prompts, which workloads of the same sizes share. Returns these two."""
    (out / workload.name).mkdir(parents=True, exist_ok=True)
    model, prompts = files_of(workload, out)
    make_model(workload.shape, model, workload.num_labels)
    if workload.lora_rank:
        make_adapter(workload.shape, adapter_of(workload, model), workload.lora_rank)
    if not prompts.exists():
        make_prompts(
            prompts,
            workload.shape,
            workload.num_rows,
            workload.prompt_tokens,
            budgets=workload.budgets(),
            prefix_tokens=workload.prefix_tokens,
            rows_per_prefix=workload.rows_per_prefix,
            first_tokens=workload.first_tokens,
        )
    return model, prompts


def files_of(workload: Workload, out: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The places of model and prompts."""
    sizes = f"{workload.shape}-{workload.num_rows}-{workload.prompt_tokens}"
    sizes += f"-budgets-{workload.max_tokens}" if workload.log_normal else ""
    sizes += f"-{workload.prefix_tokens}" if workload.prefix_tokens else ""
    sizes += f"-first-{workload.first_tokens}" if workload.first_tokens else ""
    return out / "models" / workload.model_name, out / "prompts" / f"{sizes}.parquet"


def adapter_of(workload: Workload, model: pathlib.Path) -> pathlib.Path:
    """The folder of the workload's LoRA adapter."""
    return model.with_name(f"{model.name}-lora-{workload.lora_rank}")


def system_of(workload: Workload) -> str:
    """The system prompt that all rows share; empty without one."""
    return make_text(workload.shape, workload.system_tokens) if workload.system_tokens else ""


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs the steps of this script.

    jobs: sections of each job's spec, by the job's name. must_fit: leave out steps that, by their estimates, end after
    the deadline. is_warm: of these, the compile caches are there.
    """

    out: pathlib.Path
    jobs: Mapping[str, dict[str, Any]]
    tuned_engine: dict[str, Any] | None
    deadline: float
    results: Results
    must_fit: bool
    is_warm: bool

    def work(self, lane: Lane, steps: list[Step]) -> None:
        """Run the steps of a lane, until the deadline."""
        if lane.cores:
            os.sched_setaffinity(0, lane.cores)  # of this thread, and of the processes that it starts
        started: set[str] = set()
        for number, step in enumerate(steps):
            seconds, _ = step.seconds(is_warm=self.is_warm or step.caches in started) if self.must_fit else (0.0, False)
            if step.lane == lane.number and time.monotonic() + seconds < self.deadline:
                started.add(step.caches)
                placed = {"round": step.round, "devices": ",".join(lane.devices)}
                if step.is_job:
                    self._job(step, lane, placed)
                else:
                    self._rivals(step, lane, placed, self.out / f"rivals-{number}.json")

    def _job(self, step: Step, lane: Lane, placed: dict[str, Any]) -> None:
        ((workload, name),) = step.runs
        folder, files = self.out / workload.name, files_of(workload, self.out)
        sections = dict(self.jobs[name])
        environment = lane.environment(workload.num_devices) | sections.pop("environment", {})
        paths = write_spec(workload, folder, *files, sections, f"{name}-{step.round}")
        shutil.rmtree(paths[1], ignore_errors=True)  # an earlier run's job would be resumed
        figures = run_spec(*paths, self.deadline, environment)
        self.results.add(workload, name, {**placed, **figures})

    def _rivals(self, step: Step, lane: Lane, placed: dict[str, Any], path: pathlib.Path) -> None:
        """Run rivals in one process, which writes each figure at once."""
        wanted = [(*run, self.out / run[0].name / f"{run[1]}-{step.round}.json") for run in step.runs]
        for _, _, result in wanted:
            result.unlink(missing_ok=True)
        engine = self._engine(step)
        runs = [rival_run(workload, kind, self.out) | {"result": str(result)} for workload, kind, result in wanted]
        path.write_text(json.dumps({"engine": engine, "runs": runs}, indent=1))
        environment = lane.environment(step.runs[0][0].num_rival_devices)
        if not visible_devices():
            # On a CPU the engine runs like that of a job: in one process, on the same cores.
            environment |= engine_environment((), len(os.sched_getaffinity(0)))
        began = time.monotonic()
        with path.with_suffix(".log").open("wb") as log:
            command = [sys.executable, str(HERE / "rivals.py"), str(path)]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
            while process.poll() is None and time.monotonic() < self.deadline:
                self.results.collect(wanted, placed)
                time.sleep(0.5)
            code, wall_s = process.poll(), time.monotonic() - began
            end(process)
        if code:
            placed["exit_code"], placed["log"] = code, path.with_suffix(".log").read_text()[-2000:]
        self.results.collect(wanted, placed, None if code is None else wall_s)

    def _engine(self, step: Step) -> dict[str, Any]:
        """Arguments of `LLM` for the rivals of a step."""
        workload, kind = step.runs[0]
        most = max(k for item, _ in step.runs for k in (item.logprobs or 0, item.prompt_logprobs or 0, 20))
        engine = {"model": str(files_of(workload, self.out)[0]), "max_logprobs": most, **workload.rival_engine}
        if kind != "tuned":
            return engine
        if self.tuned_engine is not None:
            return engine | self.tuned_engine
        path, _ = write_spec(workload, self.out / workload.name, *files_of(workload, self.out), name="tuned")
        return engine | chosen_engine(path)


def rival_run(workload: Workload, kind: str, out: pathlib.Path) -> dict[str, Any]:
    """All that `rivals.py` must know of a run but its result's place."""
    model, prompts = files_of(workload, out)
    return {
        "call": workload.call_of(kind),
        "prompts": str(prompts),
        "num_rows": workload.rows_of(kind),
        "has_budgets": workload.log_normal,
        "sampling": workload.sampling(kind),
        "chunk_rows": workload.chunk_rows,
        "system": system_of(workload),
        "lora": str(adapter_of(workload, model)) if workload.lora_rank else None,
    }


def chosen_engine(path: pathlib.Path) -> dict[str, Any]:
    """Engine arguments that a job of this spec chooses where the spec is silent, with one replica on a GPU."""
    file = read_spec(path)
    spec = file.spec
    backend, task = choose_backend(spec), task_of(spec)
    devices = backend.devices()
    device_bytes, title = backend.device_size(devices[0]) if devices else (None, "")
    fit = fit_of(resolve(spec.model), spec, device_bytes, title, limits_of=task.default_batch_limits)
    return values(chosen_arguments(spec, fit, task, 1, shared_share=functools.partial(shared_share, file)))


# -- the job -----------------------------------------------------------------------------------------------------------


def run_spec(
    path: pathlib.Path, out: pathlib.Path, deadline: float, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run the job of a spec file, whose output folder is `out`. Returns figures from its manifest."""
    started = time.monotonic()
    with path.with_suffix(".log").open("wb") as log:
        command = [sys.executable, "-m", "batchinf", "run", str(path)]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        watched = watch(process, deadline)
    wall_s = time.monotonic() - started
    figures = {"exit_code": process.returncode, "wall_s": round(wall_s, 1)}
    if process.returncode != 0:
        return {**figures, "log": path.with_suffix(".log").read_text()[-2000:]}
    share = round(watched["coordinator_cpu_s"] / wall_s, 3)
    return {**figures, **from_manifest(out), **watched, "coordinator_cores": share}


def write_spec(
    workload: Workload,
    folder: pathlib.Path,
    model: pathlib.Path,
    prompts: pathlib.Path,
    sections: Mapping[str, Any] | None = None,
    name: str = "job",
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write the job's spec. Returns the file and the output folder. sections: are merged into the spec."""
    out = folder / name
    sampling = workload.sampling()
    if workload.log_normal:
        sampling["max_tokens"] = {"column": "max_tokens"}
    spec: dict[str, Any] = {
        "model": {
            "name": str(model), "dtype": workload.dtype, "load_format": "dummy", "quantization": workload.quantization
        },
        "input": {"path": str(prompts), "prompt_column": "prompt", "id_column": "id", "order": workload.order},
        "sampling": sampling,
        "parallel": {
            "tensor_parallel_size": workload.tensor_parallel_size,
            "pipeline_parallel_size": workload.pipeline_parallel_size,
            "data_parallel_size": workload.data_parallel_size,
            **workload.job_parallel,
        },
        "output": {"path": str(out)},
    }  # fmt: skip
    engine = workload.engine if workload.job_engine is None else workload.job_engine
    if engine:
        spec["engine"] = engine
    if workload.structure and workload.structure[0] == "json":
        spec["max_error_rate"] = 1.0  # a text that `max_tokens` cuts off is no JSON
    if workload.system_tokens:
        spec["input"]["system_prompt"] = system_of(workload)
    if workload.lora_rank:
        spec["model"]["lora"] = str(adapter_of(workload, model))
    if workload.task == "score":
        spec |= {
            "task": "score",
            "sampling": {},
            "input": {"path": str(prompts), "text_column": "prompt", "id_column": "id"},
        }
    if workload.task in ("embed", "classify"):
        spec |= {"task": workload.task, "sampling": {}}
    if workload.scripted_step_s is not None:
        spec["scripted"] = {
            "step_s": workload.scripted_step_s,
            "max_num_seqs": workload.max_num_seqs,
            "max_model_len": workload.max_model_len,
            "vary_lengths": False,
        }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(merged(spec, sections or {})))
    return path, out


def watch(process: "subprocess.Popen[bytes]", deadline: float) -> dict[str, Any]:
    """Wait for a job. Returns the coordinator's processor seconds, peak RSS by kind of process, and a series of looks
    at the engine's memory: seconds, and MiB that are not shared with other processes or files.
    """
    began, every_s, cpu_s = time.monotonic(), 0.5, 0.0
    peak = {"coordinator": 0, "replica": 0, "engine": 0}
    looks: list[tuple[float, int]] = []
    while process.poll() is None:
        if time.monotonic() > deadline:
            end(process)  # its replicas notice that and end
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(process.pid)
            times = root.cpu_times()
            cpu_s = times.user + times.system
            replicas = root.children()
            # Where the engine core has no process of its own, it is in the replica's.
            engines = [below for replica in replicas for below in replica.children(recursive=True)] or replicas
            for kind, processes in (("coordinator", [root]), ("replica", replicas), ("engine", engines)):
                peak[kind] = max([peak[kind], *(each.memory_info().rss for each in processes)])
            own = max((each.memory_info().rss - each.memory_info().shared for each in engines), default=0)
            if not looks or time.monotonic() - began > looks[-1][0] + every_s:
                looks.append((round(time.monotonic() - began, 1), own >> 20))
            if len(looks) > _LOOKS:
                looks, every_s = looks[::2], 2 * every_s
        time.sleep(0.5)
    return {"coordinator_cpu_s": round(cpu_s, 2), "peak_bytes": peak, "engine_mib": looks}


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def from_manifest(out: pathlib.Path) -> dict[str, Any]:
    """Seconds, tokens and versions of a finished job."""
    lines = [json.loads(line) for log in sorted((out / "manifest").glob("*.jsonl")) for line in log.open()]
    events = [json.loads(line) for line in (out / "events.jsonl").open()]
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
        "num_prompt_tokens": num_prompt,
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


if __name__ == "__main__":
    main()

"""Where a job's time goes, by process and thread, from samples of py-spy.

    python benchmarks/profile_job.py small-top20 --out results/profile --seconds 20

Starts the job. After `--after` seconds it samples each replica, its engine core and its workers twice: all threads,
including waiting ones, and the thread that holds the interpreter lock. It prints how each thread spends its time,
writes profile.md and the raw stacks, and ends the job. It needs the program py-spy (`pip install py-spy`; `--py-spy`
names its place) and the permission to trace other processes.
"""

import argparse
import collections
import contextlib
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

import psutil
from run import end, prepare, write_spec
from workloads import WORKLOADS, add_size_arguments, sized_by

# A stack (frames from outermost to innermost, joined by ';') gets the name of the first rule that matches.
RULES = [
    (name, re.compile(pattern))
    for name, pattern in (
        ("front end: unpacking messages", r"process_outputs_socket.*decode \("),
        ("front end: waiting for a message", r"process_outputs_socket"),
        ("front end: waiting for outputs", r"get_output \(.*(get|wait|acquire) \([^;]*(queue|threading)\.py[^;]*$"),
        ("front end: logprobs kept", r"process_outputs \(.*_update_(sample|prompt)_logprobs"),
        ("front end: process_outputs", r"process_outputs \("),
        ("front end: completion to arrays", r"_completion \(.*engines/vllm/engine"),
        ("front end: adding requests", r"_add \(.*worker\.py|add_request \(.*llm_engine"),
        ("front end: rest of step", r"step \([^;]*(llm_engine|engines/vllm/engine)\.py"),
        ("core: packing and sending messages", r"process_output_sockets.*(encode|send)"),
        ("core: output thread waits", r"process_output_sockets"),
        ("core: input thread unpacks", r"process_input_sockets.*(decode|preprocess_add)"),
        ("core: input thread waits", r"process_input_sockets"),
        ("core: holding outputs back", r"_hold \([^;]*engines/vllm/scheduling/scheduler"),
        ("core: slicing logprobs", r"update_from_output.*slice_request"),
        ("core: update_from_output", r"update_from_output \("),
        ("core: schedule", r"schedule \([^;]*sched"),
        ("core: sampling, launched", r"sample_tokens \("),
        ("core: model, launched", r"execute_model \("),
        ("core: waiting for the device's copies", r"get_output \([^;]*(async_utils|gpu_model_runner)"),
        ("core: waiting for the device", r"step_with_batch_queue.*result \(|step_fn.*result \("),
        ("core: rest of the loop", r"run_busy_loop"),
        ("feeder: tokenising", r"feeder\.py.*_tokenize"),
        ("feeder: waiting", r"feeder\.py.*(wait|acquire)[^;]*threading"),
        ("feeder: rest", r"feeder\.py"),
        ("writer: waiting", r"writer\.py.*(wait|acquire) \([^;]*threading\.py[^;]*$"),
        ("writer: decoding", r"writer\.py.*decode \([^;]*replica/answers\.py"),
        ("writer: journal", r"writer\.py.*checkpoint \("),
        ("closer: parts", r"_close \([^;]*writer\.py"),
        ("writer: encoding and the rest", r"writer\.py"),
        ("waiting", r"(wait|poll|select|get|accept|acquire|recv|_worker|sleep|receive) \([^;]*$"),
    )
]
_THREAD = re.compile(r"^thread \((?P<id>[^)]*)\)(: (?P<name>.*))?$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=int, default=20, help="length of each of the two samplings")
    parser.add_argument("--after", type=float, default=10.0, help="seconds from the first request on")
    parser.add_argument("--rate", type=int, default=100, help="samples a second")
    parser.add_argument("--py-spy", default="py-spy")
    parser.add_argument("--job-spec", type=json.loads, default={}, help="JSON: sections that are merged into the spec")
    parser.add_argument("--start-limit-s", type=float, default=300.0)
    add_size_arguments(parser)
    args = parser.parse_args()
    workload = sized_by(args)
    folder = args.out / workload.name
    shutil.rmtree(folder, ignore_errors=True)
    model, prompts = prepare(workload, args.out)
    spec, job = write_spec(workload, folder, model, prompts, args.job_spec)
    with (folder / "job.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "batchinf", "run", str(spec)], stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for_first_request(process, job, args.start_limit_s)
        time.sleep(args.after)
        text = profile(process.pid, folder, args)
    finally:
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        end(process)
        psutil.wait_procs(below, timeout=30)  # the next engine needs this one's device memory
    print(text)
    (folder / "profile.md").write_text(text)


def wait_for_first_request(process: "subprocess.Popen[bytes]", job: pathlib.Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        events = job / "events.jsonl"
        if events.exists() and '"first_request"' in events.read_text():
            return
        time.sleep(0.5)
    sys.exit("the job ended, or its engine did not start in time: see job.log")


def profile(pid: int, folder: pathlib.Path, args: argparse.Namespace) -> str:
    """Sample all processes below the coordinator. Returns the tables."""
    processes = {child.pid: name_of(child) for child in psutil.Process(pid).children(recursive=True) if name_of(child)}
    busy: list[int] = []
    stop = threading.Event()
    threading.Thread(target=watch_devices, args=(busy, stop), daemon=True).start()
    cpu_before = {pid: cpu_s(pid) for pid in processes}
    sampled = {}
    for kind, option in (("all", "--idle"), ("gil", "--gil")):
        running = []
        for pid, name in processes.items():
            path = folder / f"{name}-{pid}-{kind}.txt"
            command = [args.py_spy, "record", "--pid", str(pid), "--duration", str(args.seconds), "--threads", option]
            command += ["--rate", str(args.rate), "--format", "raw", "--nonblocking", "--output", str(path)]
            with path.with_suffix(".log").open("wb") as log:
                running.append((pid, path, subprocess.Popen(command, stdout=log, stderr=log)))
        for pid, path, recorder in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                recorder.wait(args.seconds + 60)
            recorder.kill()
            sampled[pid, kind] = read(path) if path.exists() else {}
    stop.set()
    elapsed_s, samples = 2 * args.seconds, args.rate * args.seconds
    lines = [f"# {args.workload}\n"]
    if busy:
        lines.append(f"Device busy (NVML, any kernel running): {sum(busy) / len(busy):.0f} % of {len(busy)} looks.\n")
    for pid, name in processes.items():
        cores = (cpu_s(pid) - cpu_before[pid]) / elapsed_s
        lines += [f"## {name} ({cores:.2f} cores)\n", *tables(sampled[pid, "all"], sampled[pid, "gil"], samples)]
    return "\n".join(lines)


def name_of(process: psutil.Process) -> str:
    """The role of a process; empty if it is unknown."""
    with contextlib.suppress(psutil.Error):
        line = " ".join(process.cmdline()) + " " + process.name()
        for mark, name in (("batchinf.fleet.local.process", "replica"), ("EngineCore", "core"), ("Worker", "worker")):
            if mark in line:
                return "core" if name == "replica" and "batchinf.fleet.local.process" in _parent(process) else name
        if "spawn_main" in line:
            return "child"
    return ""


def _parent(process: psutil.Process) -> str:
    parent = process.parent()
    return " ".join(parent.cmdline()) if parent is not None else ""  # a forked core has the command line of its replica


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far; 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def watch_devices(busy: list[int], stop: threading.Event) -> None:
    """Append each device's utilisation in per cent to `busy`, four times a second."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no such device
        return
    while not stop.wait(0.25):
        busy.extend(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles)


Stacks = dict[str, collections.Counter[str]]


def read(path: pathlib.Path) -> Stacks:
    """The number of samples of each stack, by thread."""
    threads: Stacks = collections.defaultdict(collections.Counter)
    for line in path.read_text(errors="replace").splitlines():
        stack, _, count = line.rpartition(" ")
        first, _, rest = stack.partition(";")
        found = _THREAD.match(first)
        name = (found["name"] or found["id"]) if found else "?"
        threads[name][rest if found else stack] += int(count)
    return threads


def category(stack: str) -> str:
    """The rule's name for a stack."""
    for name, pattern in RULES:
        if pattern.search(stack):
            return name
    frames = [frame for frame in stack.split(";") if frame]
    return f"other: {frames[-1] if frames else '(none)'}"


def tables(everything: Stacks, holding: Stacks, samples: int) -> list[str]:
    """A table for each thread: per cent of wall time, in total and with the interpreter lock."""
    lines = [f"All threads: lock held {100 * _total(holding) / samples:.0f} % of the time.\n"]
    for thread in sorted(everything, key=lambda name: -sum(holding.get(name, collections.Counter()).values())):
        on_clock, locked = (_by_category(stacks.get(thread)) for stacks in (everything, holding))
        lines += [f"| {thread} | % of the time | % with the lock |", "| --- | ---: | ---: |"]
        for name, count in itertools.islice(on_clock.most_common(), 12):
            lines.append(f"| {name} | {100 * count / samples:.1f} | {100 * locked[name] / samples:.1f} |")
        lines.append("")
    return lines


def _by_category(stacks: "collections.Counter[str] | None") -> "collections.Counter[str]":
    found: collections.Counter[str] = collections.Counter()
    for stack, count in (stacks or {}).items():
        found[category(stack)] += count
    return found


def _total(stacks: Stacks) -> int:
    return sum(sum(counts.values()) for counts in stacks.values())


if __name__ == "__main__":
    main()

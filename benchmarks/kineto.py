"""What the device and the engine core do in 20 steps of a job, by a trace of PyTorch's profiler.

    python benchmarks/kineto.py top20 --out results                                  # one GPU, the workload's shape
    python benchmarks/kineto.py top20 --shape tiny --rows 400 --dtype float32 --out results     # on a CPU

Starts the job with `step_hook` in its engine core and waits for two traces of `--steps` steps each: of decoding steps,
or of steps that read prompts if the workload only reads. The first has kernels and operators, and its steps are as long
as without it. The second has Python's functions too, which slows it. Writes both traces, gzipped, for Perfetto, and
`kineto.md`, then ends the job. An engine of several ranks has its kernels in other processes, which are not traced.
"""

import argparse
import collections
import dataclasses
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil
from run import end, prepare, write_spec
from workloads import WORKLOADS, add_size_arguments, sized_by

_HOOK = pathlib.Path(__file__).resolve().parent / "step_hook"
_KINDS = ("plain", "stacks")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("python_function", "cpu_op", "cuda_runtime", "cuda_driver")
_FOLDER_OR_PLACE = re.compile(r"^.*site-packages/| object at 0x[0-9a-f]+")
_MOST_ROWS = 25

Event = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--after", type=int, default=40, help="steps before the first trace")
    parser.add_argument("--limit-s", type=float, default=480.0, help="time from the start to the second trace")
    parser.add_argument("--job-engine", type=json.loads, help="JSON: engine arguments of the job")
    add_size_arguments(parser)
    args = parser.parse_args()
    workload = sized_by(args)
    if args.job_engine is not None:
        workload = dataclasses.replace(workload, job_engine=args.job_engine)
    model, prompts = prepare(workload, args.out)
    folder = args.out / workload.name
    spec, _ = write_spec(workload, folder, model, prompts)
    prefix = (folder / "trace").resolve()
    traces = {kind: pathlib.Path(f"{prefix}-{kind}.json.gz") for kind in _KINDS}
    for path in traces.values():
        path.unlink(missing_ok=True)
    run(spec, folder, traces.values(), prefix, args, takes_prompts=workload.counts_prompts)
    lines = [f"# {args.workload}: {args.steps} steps\n"]
    for kind, path in traces.items():
        with gzip.open(path) as file:
            events: list[Event] = json.load(file)["traceEvents"]
        lines += [f"## {path.name}\n", *(plain_lines(events) if kind == "plain" else python_lines(events))]
    text = "\n".join(lines)
    print(text)
    (folder / "kineto.md").write_text(text)


def run(
    spec: pathlib.Path,
    folder: pathlib.Path,
    traces: Iterable[pathlib.Path],
    prefix: pathlib.Path,
    args: argparse.Namespace,
    *,
    takes_prompts: bool,
) -> None:
    """Run the job until the traces are there, and end it. takes_prompts: of any steps, not of decoding steps."""
    path = os.pathsep.join(filter(None, (str(_HOOK), os.environ.get("PYTHONPATH"))))
    given = {"STEP_TRACE": str(prefix), "STEP_TRACE_AFTER": str(args.after), "STEP_TRACE_STEPS": str(args.steps)}
    if takes_prompts:
        given["STEP_TRACE_PROMPTS"] = "1"
    with (folder / "job.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "batchinf", "run", str(spec)],
            stdout=log, stderr=log, start_new_session=True, env={**os.environ, "PYTHONPATH": path, **given},
        )  # fmt: skip
    deadline = time.monotonic() + args.limit_s
    try:
        while not all(path.exists() for path in traces):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"no second trace: the job has ended, or its rows are too few; see {folder / 'job.log'}")
            time.sleep(0.5)
    finally:
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        end(process)
        psutil.wait_procs(below, timeout=30)


def plain_lines(events: Sequence[Event]) -> list[str]:
    """The length of the steps, the idle time of the device, and kernels and operators by their own time."""
    begun, _ = schedules(events)
    first, last, num_steps = begun[0], begun[-1], len(begun) - 1
    window = [event for event in events if event.get("ph") == "X" and first <= event["ts"] < last]
    on_device = [event for event in window if event.get("cat") in _ON_DEVICE]
    lines = [f"{num_steps} steps of {(last - first) / num_steps / 1000:.3f} ms."]
    if on_device:
        idle, gaps = idle_us(on_device, first, last)
        between = sum(1 for gap in gaps if gap > 20)
        longest = ", ".join(f"{gap / 1000:.3f}" for gap in sorted(gaps, reverse=True)[:num_steps])
        lines.append(
            f"The device was idle for {idle / (last - first):.1%}, {idle / num_steps / 1000:.3f} ms a step, in "
            f"{between} gaps of more than 20 µs. The longest, in ms: {longest}."
        )
        lines += ["", *table("device", sums(on_device), num_steps)]
    else:
        lines.append("No kernels of a device are in the trace.")
    operators = own_times(event for event in window if event.get("cat") in _ON_HOST)
    return [*lines, "", *table("operator or CUDA call, own time", operators, num_steps)]


def schedules(events: Iterable[Event]) -> tuple[list[float], Any]:
    """When each step began, in µs, and the thread that began them."""
    found = [event for event in events if event.get("name") == "schedule" and event.get("cat") == "user_annotation"]
    if len(found) < 2:
        sys.exit("the trace has no two steps")
    return sorted(event["ts"] for event in found), found[0]["tid"]


def idle_us(events: Iterable[Event], first: float, last: float) -> tuple[float, list[float]]:
    """The time in which no event ran, in µs, and its pieces."""
    gaps, busy_until = list[float](), first
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["ts"] > busy_until:
            gaps.append(event["ts"] - busy_until)
        busy_until = max(busy_until, event["ts"] + event["dur"])
    if last > busy_until:
        gaps.append(last - busy_until)
    return sum(gaps), gaps


def sums(events: Iterable[Event]) -> "collections.Counter[str]":
    """Time in µs by name."""
    found: collections.Counter[str] = collections.Counter()
    for event in events:
        found[event["name"]] += event["dur"]
    return found


def own_times(events: Iterable[Event]) -> "collections.Counter[str]":
    """Time in µs by name, less that of the events inside, thread by thread."""
    found: collections.Counter[str] = collections.Counter()
    stacks: dict[Any, list[tuple[float, str]]] = collections.defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        stack = stacks[event["tid"]]
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        if stack:
            found[stack[-1][1]] -= event["dur"]
        found[event["name"]] += event["dur"]
        stack.append((event["ts"] + event["dur"], event["name"]))
    return found


def python_lines(events: Sequence[Event]) -> list[str]:
    """The functions in which the engine core's main thread spent its time, by their own time and in total."""
    begun, thread = schedules(events)
    num_steps = len(begun) - 1
    window = [event for event in events if event.get("ph") == "X" and begun[0] <= event["ts"] < begun[-1]
              and event["tid"] == thread and event.get("cat") in _ON_HOST]  # fmt: skip
    window = [{**event, "name": _FOLDER_OR_PLACE.sub("", event["name"])} for event in window]
    own, total = own_times(window), sums(_outermost(window))
    lines = [f"{num_steps} steps of {(begun[-1] - begun[0]) / num_steps / 1000:.3f} ms, slowed by the recording.", ""]
    ours = collections.Counter({name: time for name, time in total.items() if ".py(" in name})
    return [*lines, *table("own time", own, num_steps), "", *table("function, with what it calls", ours, num_steps)]


def _outermost(events: Iterable[Event]) -> Iterable[Event]:
    """Without calls of a function inside a call of itself."""
    until: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        key = event["tid"], event["name"]
        if until.get(key, 0.0) <= event["ts"]:
            until[key] = event["ts"] + event["dur"]
            yield event


def table(title: str, times: "collections.Counter[str]", num_steps: int) -> list[str]:
    """The longest times, in ms for each step."""
    total = sum(times.values()) or 1.0
    lines = [f"| {title} | ms a step | % |", "| --- | ---: | ---: |"]
    for name, us in times.most_common(_MOST_ROWS):
        lines.append(f"| {name[:110].replace('|', '/')} | {us / num_steps / 1000:.3f} | {100 * us / total:.1f} |")
    return lines


if __name__ == "__main__":
    main()

"""The processes of `run.py`: which job or rivals run in which round, on which GPUs, and the time for that on H200s.

Workloads whose rivals can share an engine form a cluster. In a round, the jobs and the rivals of a cluster run one
after the other on the same lane, which is the GPUs of one job. The next round takes the next lane and the other order:
first the rivals, then the jobs. So each ratio of a round is of one GPU, and all GPUs are busy. With fewer clusters than
lanes, a cluster is divided.

A round starts its engines anew, also on a single GPU. vLLM's sleep mode would save these starts, but it takes its
memory from another allocator than vLLM as it comes, and the sleeping process would share its cores with the job.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workloads import KINDS, STARTS_S, Workload

Run = tuple[Workload, str]
# Seconds of a process beside its start and its windows: of a job, and of each run of a rival (tokenising, warm-up).
_JOB_S, _RIVAL_S = 6.0, 4.0
_PROMPT_TOKENS_PER_S = 1e6  # that are written to the input


@dataclass(frozen=True, slots=True)
class Step:
    """A process: a job, or rivals that share an engine. runs: each workload, and the name of the job or the rival."""

    round: int
    lane: int
    runs: tuple[Run, ...]
    is_job: bool

    @property
    def shows(self) -> str:
        """For people."""
        return ", ".join(f"{workload.name} {kind}" for workload, kind in self.runs)

    @property
    def caches(self) -> str:
        """Equal for steps with the same compile caches. A job and its rivals compile into different ones."""
        return json.dumps([self.is_job, self.runs[0][0].model_name])

    def seconds(self, *, is_warm: bool) -> tuple[float, bool]:
        """How long it takes on an H200, and whether that is a guess. is_warm: its compile caches are there."""
        found = [workload.seconds(kind) for workload, kind in self.runs if not _is_shared(workload, kind, self)]
        spent = sum(each for each, _ in found) + (_JOB_S if self.is_job else _RIVAL_S * len(found))
        return STARTS_S["warm" if is_warm else "cold"] + spent, any(is_guess for _, is_guess in found)


def steps_of(workloads: Sequence[Workload], jobs: Iterable[str], rounds: Iterable[int], num_lanes: int) -> list[Step]:
    """All processes, in the order in which each lane runs its own. jobs: their names, for each workload."""
    clusters: defaultdict[str, list[Workload]] = defaultdict(list)
    for workload in workloads:
        clusters[_engine_key(workload, "")].append(workload)
    jobs = tuple(jobs)
    steps: list[Step] = []
    number_each = num_lanes if len(clusters) < num_lanes else 1
    parts = [part for cluster in clusters.values() for part in _parts(cluster, number_each)]
    for number, (at, cluster) in itertools.product(rounds, enumerate(parts)):
        own = [((workload, job),) for workload in cluster for job in jobs]
        groups: defaultdict[str, list[Run]] = defaultdict(list)
        for kind, workload in itertools.product(KINDS, cluster):
            if kind in workload.rivals:
                groups[_engine_key(workload, kind)].append((workload, kind))
        found = [Step(number, (number - 1 + at) % num_lanes, runs, True) for runs in own]
        found += [Step(number, (number - 1 + at) % num_lanes, tuple(runs), False) for runs in groups.values()]
        steps += found if number % 2 else reversed(found)
    return steps


def _parts(cluster: list[Workload], number: int) -> list[list[Workload]]:
    """The cluster in at most so many parts, which take about as long: lanes without work cost more than a start."""
    parts: list[list[Workload]] = [[] for _ in range(number)]
    spent = [0.0] * number
    for workload in sorted(cluster, key=_seconds, reverse=True):
        least = spent.index(min(spent))
        parts[least].append(workload)
        spent[least] += _seconds(workload)
    return [part for part in parts if part]


def _seconds(workload: Workload) -> float:
    return sum(workload.seconds(kind)[0] for kind in ("batchinf", *workload.rivals))


def _engine_key(workload: Workload, kind: str) -> str:
    """Equal for rivals that one engine can run."""
    own = {"tuned": kind, "run-batch": [kind, workload.name]}.get(kind)
    return json.dumps([workload.model_name, workload.rival_engine, own])


def estimate(workloads: Sequence[Workload], steps: Sequence[Step], num_lanes: int, is_warm: bool) -> str:
    """Minutes of each process on H200s, from measured and guessed speeds. is_warm: vLLM's caches are there."""
    inputs = {(w.shape, w.num_rows, w.prompt_tokens): w.num_rows * w.prompt_tokens for w in workloads}
    prepared = sum(inputs.values()) / _PROMPT_TOKENS_PER_S
    lines = [f"{'minutes':>7}  round lane", f"{prepared / 60:7.1f}             inputs and models"]
    lanes = [prepared] * num_lanes
    started: set[str] = set()
    for step in steps:
        seconds, is_guess = step.seconds(is_warm=is_warm or step.caches in started)
        started.add(step.caches)
        lanes[step.lane] += seconds
        guess = " (guess)" if is_guess else ""
        lines.append(f"{seconds / 60:7.1f}  {step.round:5} {step.lane:4}  {step.shows}{guess}")
    each = ", ".join(f"{seconds / 60:.1f}" for seconds in lanes)
    return "\n".join([*lines, f"{max(lanes) / 60:7.1f}  minutes in all; by lane: {each}"])


def _is_shared(workload: Workload, kind: str, step: Step) -> bool:
    """Whether an earlier workload of the step has the same ceiling: they differ only in logprobs."""
    if kind != "ceiling":
        return False
    sizes = [_sizes(other) for other, name in step.runs if name == kind]
    names = [other.name for other, name in step.runs if name == kind]
    return sizes.index(_sizes(workload)) < names.index(workload.name)


def _sizes(workload: Workload) -> tuple[object, ...]:
    return workload.num_rows, workload.prompt_tokens, json.dumps(workload.sampling("ceiling")), workload.log_normal

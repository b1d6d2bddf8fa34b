"""A job's history as the telemetry tells it: throughput, what each replica did, restarts and resumes.

Times are seconds of work: a pause in which no process ran the job takes no time.
"""

import bisect
import datetime
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchinf.base.text import clip, duration
from batchinf.manifest.lines import EventLine

Phase = Literal["starting", "busy", "idle", "waiting for the disk", "down"]
PHASES: tuple[Phase, ...] = ("busy", "idle", "waiting for the disk", "starting", "down")
# Samples are at most 15 s apart while a process runs the job.
_PAUSE_S = 60.0
_MOST_BUCKETS = 120
# Replicas do not end at the same moment.
_ENDING_S = 15.0
# Of an interval: if admission waited for the disk for longer, the engine was short of rows because of it.
_DISK_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates between two times of work. rows_per_s: output rows that engines answered."""

    start_s: float
    stop_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    rows_per_s: float


@dataclass(frozen=True, slots=True)
class Period:
    """What a replica did between two times of work."""

    replica: str
    phase: Phase
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A restart of a replica or a resume of the job, at a time of work. at: UTC in ISO format."""

    kind: Literal["restart", "resume"]
    at_s: float
    at: str
    text: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """began_at, ended_at: of the first and the last sample, UTC in ISO format. periods: by replica, in order."""

    work_s: float
    began_at: str
    ended_at: str
    throughput: tuple[Throughput, ...]
    periods: tuple[Period, ...]
    marks: tuple[Mark, ...]

    def seconds(self, replica: str) -> dict[Phase, float]:
        """Seconds that a replica spent in each phase."""
        found: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        for period in self.periods:
            if period.replica == replica:
                found[period.phase] += period.stop_s - period.start_s
        return found

    def mean(self, name: str) -> float:
        """The mean of a rate of `Throughput` over the time of work."""
        total = sum(getattr(one, name) * (one.stop_s - one.start_s) for one in self.throughput)
        return float(total / self.work_s) if self.work_s else 0.0

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(period.replica for period in self.periods))


@dataclass(frozen=True, slots=True)
class _Clock:
    """Seconds of work of a time since 1970. times: of all samples. works: their seconds of work."""

    times: list[float]
    works: list[float]

    @classmethod
    def of(cls, times: Iterable[float]) -> "_Clock":
        every = sorted(set(times))
        steps = (now - before for before, now in itertools.pairwise(every))
        works = itertools.accumulate((step if step <= _PAUSE_S else 0.0 for step in steps), initial=0.0)
        return cls(every, list(works)[: len(every)])

    def work_s(self, time: float) -> float:
        place = bisect.bisect_right(self.times, time) - 1
        if place < 0:
            return 0.0
        later = time - self.times[place]
        most = self.works[place + 1] - self.works[place] if place + 1 < len(self.works) else 0.0
        return self.works[place] + min(later, most)


def timeline(jobs: Mapping[str, tuple[Iterable[dict[str, Any]], Sequence[EventLine]]]) -> Timeline | None:
    """The history of a job, or of its slices: by name, its samples (`read_looks`) and its events. None without samples.

    A sample that is not as it should be is left out.
    """
    by_replica: dict[str, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
    for name, (looks, _) in jobs.items():
        for at, sample in _samples(looks):
            prefix = f"{name}: " if name else ""
            by_replica[f"{prefix}{sample['replica']:g}"].append((at, sample))
    if not by_replica:
        return None
    clock = _Clock.of(at for samples in by_replica.values() for at, _ in samples)
    work_s = clock.works[-1]
    num_buckets = max(1, min(_MOST_BUCKETS, int(work_s)))
    sums = {name: [0.0] * num_buckets for name in _COUNTS}
    periods: list[Period] = []
    for replica, samples in sorted(by_replica.items(), key=lambda item: _natural(item[0])):
        periods += _periods(replica, samples, clock)
        _add_counts(samples, clock, work_s / num_buckets, sums)
    length = max(work_s / num_buckets, 1e-3)
    throughput = tuple(
        Throughput(i * length, (i + 1) * length, *(sums[name][i] / length for name in _COUNTS))
        for i in range(num_buckets if work_s else 0)
    )
    marks = [*_resumes(clock), *(mark for name, (_, events) in jobs.items() for mark in _restarts(name, events, clock))]
    marks.sort(key=lambda mark: mark.at_s)
    return Timeline(work_s, _iso(clock.times[0]), _iso(clock.times[-1]), throughput, tuple(periods), tuple(marks))


# Not `num_rows`: rows that a resume takes from the journal would be a peak.
_COUNTS = ("num_prompt_tokens", "num_output_tokens", "num_answered")
_NUMBERS = ("replica", "steps", "stalled_by_disk_s", "num_running", *_COUNTS)


def _samples(looks: Iterable[dict[str, Any]]) -> Iterable[tuple[float, dict[str, Any]]]:
    for look in looks:
        at = look.get("at") if isinstance(look, dict) else None
        replicas = look.get("replicas") if isinstance(look, dict) else None
        if isinstance(at, int | float) and 0 <= at < 1e11 and isinstance(replicas, list):
            for replica in replicas:
                if isinstance(replica, dict) and all(isinstance(replica.get(name), int | float) for name in _NUMBERS):
                    yield float(at), replica


def _natural(name: str) -> tuple[object, ...]:
    return tuple((0, int(word), "") if word.isdigit() else (1, 0, word) for word in name.replace("/", " ").split())


def _periods(replica: str, samples: Sequence[tuple[float, dict[str, Any]]], clock: _Clock) -> Iterable[Period]:
    """A replica's periods over the whole time of work; neighbours in the same phase are one."""
    pieces: list[tuple[Phase, float, float]] = [("down", 0.0, clock.work_s(samples[0][0]))]
    for (before, first), (now, second) in itertools.pairwise(samples):
        pieces.append((_phase(first, second, now - before), clock.work_s(before), clock.work_s(now)))
    last_s = clock.work_s(samples[-1][0])
    if clock.works[-1] - last_s > _ENDING_S:
        pieces.append(("down", last_s, clock.works[-1]))
    whole = [piece for piece in pieces if piece[2] > piece[1]]
    for phase, group in itertools.groupby(whole, key=lambda piece: piece[0]):
        same = list(group)
        yield Period(replica, phase, same[0][1], same[-1][2])


def _phase(first: dict[str, Any], second: dict[str, Any], passed_s: float) -> Phase:
    if first.get("incarnation") != second.get("incarnation"):
        return "down"
    if second["steps"] == 0 and first.get("state") != "running":
        return "starting"
    if second["stalled_by_disk_s"] - first["stalled_by_disk_s"] > _DISK_SHARE * passed_s:
        return "waiting for the disk"
    # Of two samples in quick succession the second may repeat the number of steps.
    return "busy" if second["steps"] > first["steps"] or second["num_running"] else "idle"


def _add_counts(
    samples: Sequence[tuple[float, dict[str, Any]]], clock: _Clock, length: float, sums: Mapping[str, list[float]]
) -> None:
    """Add what a replica did between its samples to the buckets of time. length: of a bucket, in seconds."""
    known: dict[str, tuple[float, dict[str, Any]]] = {}
    for at, sample in samples:
        before, counts = known.get(str(sample.get("incarnation")), (at - 1.0, {}))
        known[str(sample.get("incarnation"))] = at, sample
        start_s, stop_s = clock.work_s(before), clock.work_s(at)
        for name, buckets in sums.items():
            num_new = max(0.0, sample[name] - counts.get(name, 0))
            for place, share in _shares(start_s, stop_s, length, len(buckets)):
                buckets[place] += num_new * share


def _shares(start_s: float, stop_s: float, length: float, num_buckets: int) -> Iterable[tuple[int, float]]:
    """The buckets that a time falls into, each with its share of it."""
    if length <= 0:
        return
    first, last = (min(num_buckets - 1, int(time / length)) for time in (start_s, stop_s))
    if first == last or stop_s <= start_s:
        yield last, 1.0
        return
    for place in range(first, last + 1):
        inside = min(stop_s, (place + 1) * length) - max(start_s, place * length)
        yield place, max(0.0, inside) / (stop_s - start_s)


def _resumes(clock: _Clock) -> Iterable[Mark]:
    for before, now in itertools.pairwise(clock.times):
        if now - before > _PAUSE_S:
            yield Mark("resume", clock.work_s(now), _iso(now), f"resumed after a pause of {duration(now - before)}")


def _restarts(name: str, events: Sequence[EventLine], clock: _Clock) -> Iterable[Mark]:
    """Replicas that ended with a cause, and were not told to; and resumes that came too soon to be a pause."""
    prefix = f"slice {name}: " if name else ""
    replicas = {e.fields["incarnation"]: e.fields.get("replica", 0) for e in events if e.name == "replica_started"}
    epochs = [event for event in events if event.name == "epoch"]
    for event in events:
        at = datetime.datetime.fromisoformat(event.at).timestamp()
        if event.name == "replica_ended" and event.fields.get("cause"):
            replica = replicas.get(event.fields["incarnation"], "?")
            cause = clip(str(event.fields["cause"]), 300)
            yield Mark("restart", clock.work_s(at), event.at, f"{prefix}replica {replica} ended: {cause}")
        elif event in epochs[1:] and not _follows_pause(at, clock):
            yield Mark("resume", clock.work_s(at), event.at, f"{prefix}resumed")


def _follows_pause(at: float, clock: _Clock) -> bool:
    """Whether the last sample before a time, or the first one after it, is at the edge of a pause."""
    place = bisect.bisect_right(clock.times, at)
    edges = clock.times[max(0, place - 1) : place + 1]
    return len(edges) == 2 and edges[1] - edges[0] > _PAUSE_S


def _iso(time: float) -> str:
    return datetime.datetime.fromtimestamp(time, datetime.UTC).isoformat(timespec="seconds")

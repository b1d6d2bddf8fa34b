"""A job's history as the telemetry tells it: throughput, what each replica did, restarts and resumes.

Times are seconds of work: a pause in which no process ran the job takes no time.
"""

import bisect
import datetime
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from batchinf.base.text import clip, duration
from batchinf.fleet.status import ON_TRIAL
from batchinf.manifest.lines import EventLine

Phase = Literal["starting", "busy", "idle", "waiting for the disk", "down", "stopped"]
PHASES: tuple[Phase, ...] = ("busy", "idle", "waiting for the disk", "starting", "down", "stopped")
# Samples are at most 15 s apart while a process runs the job.
_PAUSE_S = 60.0
_MOST_BUCKETS = 120
# Of a replica: more than its row of the chart has pixels would only be memory.
_MOST_PERIODS = 800
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
    """began_at, ended_at: of the first and the last sample, UTC in ISO format. periods: by replica, in order.

    phases: by replica, its seconds in each phase. In a long job a period has the phase of most of its time.
    engines_s: from the first request to the last, summed over all runs. num_runs: in which an engine ran requests.
    """

    work_s: float
    engines_s: float
    num_runs: int
    began_at: str
    ended_at: str
    throughput: tuple[Throughput, ...]
    periods: tuple[Period, ...]
    marks: tuple[Mark, ...]
    phases: Mapping[str, dict[Phase, float]]

    def seconds(self, replica: str) -> dict[Phase, float]:
        """Seconds that a replica spent in each phase."""
        return self.phases[replica]

    def mean(self, name: str) -> float:
        """The mean of a rate of `Throughput` over the time of work."""
        return self._total(name) / self.work_s if self.work_s else 0.0

    def mean_of_engines(self, name: str) -> float:
        """The mean of a rate of `Throughput` over `engines_s`."""
        return self._total(name) / self.engines_s if self.engines_s else 0.0

    def _total(self, name: str) -> float:
        return float(sum(getattr(one, name) * (one.stop_s - one.start_s) for one in self.throughput))

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(period.replica for period in self.periods))


@dataclass(frozen=True, slots=True)
class _Clock:
    """Seconds of work of a time since 1970. starts, stops: of each time without a pause, ascending."""

    starts: list[float]
    stops: list[float]
    works: list[float]

    @classmethod
    def of(cls, times: Iterable[float]) -> "_Clock | None":
        """The clock of the times of all samples, in any order; None without one."""
        found: list[tuple[float, float]] = []
        for time in times:
            start, stop = found[-1] if found else (time, time)
            if start - _PAUSE_S <= time <= stop + _PAUSE_S:
                found[-1:] = [(min(start, time), max(stop, time))]
            else:  # a pause, the samples of another slice, or a host's clock that was set
                found.append((time, time))
        whole: list[tuple[float, float]] = []
        for start, stop in sorted(found):
            if whole and start <= whole[-1][1] + _PAUSE_S:
                whole[-1] = whole[-1][0], max(whole[-1][1], stop)
            else:
                whole.append((start, stop))
        works = itertools.accumulate((stop - start for start, stop in whole), initial=0.0)
        return cls([start for start, _ in whole], [stop for _, stop in whole], list(works)) if whole else None

    def work_s(self, time: float) -> float:
        place = bisect.bisect_right(self.starts, time) - 1
        return self.works[place] + min(time, self.stops[place]) - self.starts[place] if place >= 0 else 0.0


@dataclass(slots=True)
class _Run:
    """A run of a job or slice. first, last: times of its samples. began_s, ended_s: of its requests, on the clock."""

    first: float
    last: float
    began_s: float = math.inf
    ended_s: float = 0.0


Looks = Callable[[], Iterable[dict[str, Any]]]


def timeline(jobs: Mapping[str, tuple[Looks, Sequence[EventLine]]]) -> Timeline | None:
    """The history of a job, or of its slices: by name, its samples (`read_looks`) and its events. None without samples.

    The samples are read twice, as they may not fit into memory. A sample that is not as it should be is left out.
    """
    runs: dict[str, dict[str, _Run]] = {name: {} for name in jobs}
    clock = _Clock.of(at for name, (looks, _) in jobs.items() for at in _times(looks(), runs[name]))
    if clock is None:
        return None
    work_s = clock.works[-1]
    num_buckets = max(1, min(_MOST_BUCKETS, int(work_s)))
    sums = {name: [0.0] * num_buckets for name in _COUNTS}
    histories: dict[str, _History] = {}
    for name, (looks, _) in jobs.items():
        for at, sample in _samples(looks()):
            replica = f"{name}: {sample['replica']:g}" if name else f"{sample['replica']:g}"
            if replica not in histories:
                histories[replica] = _History(replica, clock, runs[name], sums, work_s / num_buckets)
            histories[replica].add(at, sample)
    ordered = sorted(histories.values(), key=lambda history: _natural(history.replica))
    periods = tuple(period for history in ordered for period in history.close())
    length = max(work_s / num_buckets, 1e-3)
    throughput = tuple(
        Throughput(i * length, (i + 1) * length, *(sums[name][i] / length for name in _COUNTS))
        for i in range(num_buckets if work_s else 0)
    )
    marks = [*_resumes(clock), *(mark for name, (_, events) in jobs.items() for mark in _restarts(name, events, clock))]
    marks.sort(key=lambda mark: mark.at_s)
    phases = {history.replica: history.seconds for history in ordered}
    worked = sorted(
        (run.began_s, run.ended_s) for of_job in runs.values() for run in of_job.values() if run.began_s <= run.ended_s
    )
    return Timeline(
        work_s,
        _length_of_union(worked),
        len(worked),
        _iso(clock.starts[0]),
        _iso(clock.stops[-1]),
        throughput,
        periods,
        tuple(marks),
        phases,
    )


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


def _times(looks: Iterable[dict[str, Any]], runs: dict[str, _Run]) -> Iterable[float]:
    """The times of all samples; notes the runs by epoch."""
    for at, sample in _samples(looks):
        run = runs.setdefault(_epoch(sample), _Run(at, at))
        run.first, run.last = min(run.first, at), max(run.last, at)
        yield at


def _epoch(sample: dict[str, Any]) -> str:
    """The start of the job that started this replica; the name of an incarnation begins with it."""
    return str(sample.get("incarnation")).split(".")[0]


def _length_of_union(spans: Sequence[tuple[float, float]]) -> float:
    """spans: (start, stop), ascending; slices may work at the same time."""
    length, end = 0.0, 0.0
    for start, stop in spans:
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length


def _natural(name: str) -> tuple[object, ...]:
    return tuple((0, int(word), "") if word.isdigit() else (1, 0, word) for word in name.replace("/", " ").split())


@dataclass(slots=True)
class _History:
    """What one replica did, from its samples in order; keeps the last sample of each incarnation.

    runs: of its job or slice, by epoch. sums: of all replicas, in buckets of time. length: of a bucket, in seconds.
    pieces: phases that are not long enough for a period yet. start_s, stop_s: of these pieces.
    """

    replica: str
    clock: _Clock
    runs: Mapping[str, _Run]
    sums: Mapping[str, list[float]]
    length: float
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    periods: list[Period] = field(default_factory=list)
    pieces: dict[Phase, float] = field(default_factory=dict)
    start_s: float = 0.0
    stop_s: float = 0.0
    last: tuple[float, float, dict[str, Any]] | None = None
    known: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict)

    def add(self, at: float, sample: dict[str, Any]) -> None:
        """The next sample. at: seconds since 1970."""
        now_s = self.clock.work_s(at)
        incarnation = str(sample.get("incarnation"))
        if self.last is None:
            self._add_absence(0.0, now_s, None, sample)
        else:
            before, before_s, first = self.last
            if str(first.get("incarnation")) != incarnation:
                self._add_absence(before_s, now_s, first, sample)
            else:
                self._add_piece(_phase(first, sample, at - before), before_s, now_s)
        self.last = at, now_s, sample
        start_s, counts = self.known.get(incarnation) or (self.clock.work_s(at - 1.0), {})
        self.known[incarnation] = now_s, sample
        if sample["steps"]:
            run = self.runs[_epoch(sample)]
            run.began_s, run.ended_s = min(run.began_s, start_s), max(run.ended_s, now_s)
        for name, buckets in self.sums.items():
            if (num_new := sample[name] - counts.get(name, 0)) > 0:
                for place, share in _shares(start_s, now_s, self.length, len(buckets)):
                    buckets[place] += num_new * share

    def close(self) -> list[Period]:
        """All periods over the whole time of work; neighbours in the same phase are one."""
        end_s = self.clock.works[-1]
        if self.last is not None and end_s - self.last[1] > _ENDING_S:
            self._add_absence(self.last[1], end_s, self.last[2], None)
        self._end_period()
        return self.periods

    def _add_absence(
        self, start_s: float, stop_s: float, first: dict[str, Any] | None, second: dict[str, Any] | None
    ) -> None:
        """Add the time between two samples of different incarnations; None: before the first or after the last.

        The replica is down from its last sample to the end of that run, and from the beginning of the next run that has
        it. Between these two the job, or slice, does not run, or runs without it.
        """
        if first is not None and second is not None and _epoch(first) == _epoch(second):
            self._add_piece("down", start_s, stop_s)
            return
        ended_s, began_s = start_s, stop_s
        if first is not None:
            ended_s = min(stop_s, self.clock.work_s(self.runs[_epoch(first)].last))
            ended_s = ended_s if ended_s - start_s > _ENDING_S else start_s
        if second is not None:
            began_s = max(ended_s, self.clock.work_s(self.runs[_epoch(second)].first))
        self._add_piece("down", start_s, ended_s)
        self._add_piece("stopped", ended_s, began_s)
        self._add_piece("down", began_s, stop_s)

    def _add_piece(self, phase: Phase, start_s: float, stop_s: float) -> None:
        if stop_s <= start_s:
            return
        self.seconds[phase] += stop_s - start_s
        if not self.pieces:
            self.start_s = start_s
        self.pieces[phase] = self.pieces.get(phase, 0.0) + stop_s - start_s
        self.stop_s = stop_s
        if stop_s - self.start_s >= self.clock.works[-1] / _MOST_PERIODS:
            self._end_period()

    def _end_period(self) -> None:
        if not self.pieces:
            return
        phase, start_s = max(self.pieces, key=self.pieces.__getitem__), self.start_s
        self.pieces = {}
        if self.periods and self.periods[-1].phase == phase:
            start_s = self.periods.pop().start_s
        self.periods.append(Period(self.replica, phase, start_s, self.stop_s))


def _phase(first: dict[str, Any], second: dict[str, Any], passed_s: float) -> Phase:
    """What a replica did between two samples of one incarnation."""
    if second["steps"] == 0 and first.get("state") not in ("running", ON_TRIAL, "ended"):
        return "starting"
    if second["stalled_by_disk_s"] - first["stalled_by_disk_s"] > _DISK_SHARE * passed_s:
        return "waiting for the disk"
    # Of two samples in quick succession the second may repeat the number of steps.
    return "busy" if second["steps"] > first["steps"] or second["num_running"] else "idle"


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
    for before, now in zip(clock.stops, clock.starts[1:], strict=False):
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
    """Whether a time is in a pause, so between two samples that are far from each other."""
    place = bisect.bisect_right(clock.starts, at) - 1
    return 0 <= place < len(clock.starts) - 1 and at >= clock.stops[place]


def _iso(time: float) -> str:
    return datetime.datetime.fromtimestamp(time, datetime.UTC).isoformat(timespec="seconds")

"""A job's history as the telemetry tells it: throughput, what each replica did, restarts and resumes.

Times are seconds of work: a pause in which no process ran the job takes no time.
"""

import bisect
import datetime
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from batchinf.base.text import clip, duration
from batchinf.fleet.status import ON_TRIAL
from batchinf.manifest.events import EventLine

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
# Not `num_rows`: rows that a resume takes from the journal would be a peak.
# Of an interval: if the engine had requests for longer, it was busy.
_BUSY_SHARE = 0.5
_COUNTS = ("num_prompt_tokens", "num_output_tokens", "num_answered")
_NUMBERS = ("replica", "steps", "stalled_by_disk_s", "num_running", *_COUNTS)

Sample = dict[str, Any]
Span = tuple[float, float]
Looks = Callable[[], Iterable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates between two times of work."""

    start_s: float
    stop_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    rows_per_s: float
    """Output rows that engines answered."""


@dataclass(frozen=True, slots=True)
class Period:
    """What a replica did between two times of work."""

    replica: str
    phase: Phase
    """In a long job, the phase of most of the time."""
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A restart of a replica or a resume of the job."""

    kind: Literal["restart", "resume"]
    at_s: float
    """In seconds of work."""
    at: str
    """UTC in ISO format."""
    text: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The history of a job, or of all its slices."""

    work_s: float
    engines_s: float
    """From the first request to the last, summed over all runs."""
    num_runs: int
    """Runs in which an engine ran requests."""
    ended_at: str
    """The time of the last sample, UTC in ISO format."""
    throughput: tuple[Throughput, ...]
    periods: tuple[Period, ...]
    """By replica, in order."""
    marks: tuple[Mark, ...]
    phases: Mapping[str, dict[Phase, float]]
    """By replica, its seconds in each phase."""

    def total(self, name: str) -> float:
        """The sum over the time of work of what `Throughput` has as a rate."""
        return float(sum(getattr(rates, name) * (rates.stop_s - rates.start_s) for rates in self.throughput))

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(period.replica for period in self.periods))


@dataclass(frozen=True, slots=True)
class _Clock:
    """Converts seconds since 1970 to seconds of work."""

    spans: list[Span]
    """Times without a pause, ascending."""
    works: list[float]
    """Seconds of work at the start of each span, and at the end of the last."""

    @classmethod
    def of(cls, times: Iterable[float]) -> "_Clock":
        """The clock of the times of all samples, in any order."""
        spans: list[Span] = []
        for time in times:
            start, stop = spans[-1] if spans else (-math.inf, -math.inf)
            if start - _PAUSE_S <= time <= stop + _PAUSE_S:
                spans[-1] = (min(start, time), max(stop, time))
            else:  # a pause, the samples of another slice, or a host's clock that was set
                spans.append((time, time))
        joined = _union(spans, _PAUSE_S)
        return cls(joined, list(itertools.accumulate((stop - start for start, stop in joined), initial=0.0)))

    def work_s(self, time: float) -> float:
        place = self._place(time)
        if place < 0:
            return 0.0
        start, stop = self.spans[place]
        return self.works[place] + min(time, stop) - start

    def is_in_pause(self, time: float) -> bool:
        """Whether a time is between two samples that are far from each other."""
        place = self._place(time)
        return 0 <= place < len(self.spans) - 1 and time >= self.spans[place][1]

    def _place(self, time: float) -> int:
        return bisect.bisect_right(self.spans, time, key=lambda span: span[0]) - 1


def _union(spans: Iterable[Span], gap_s: float = 0.0) -> list[Span]:
    """The spans, ascending; those that overlap, or are at most `gap_s` apart, are one."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1] + gap_s:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


@dataclass(slots=True)
class _Run:
    """A run of a job or slice."""

    first: float
    last: float
    """Times of the first and the last sample, since 1970."""
    began_s: float = math.inf
    ended_s: float = 0.0
    """Times of the first and the last request, in seconds of work."""


def timeline(jobs: Mapping[str, tuple[Looks, Sequence[EventLine]]]) -> Timeline | None:
    """The history of a job, or of its slices: by name, its samples (`read_looks`) and its events. None without samples.

    The samples are read twice, as they may not fit into memory. A sample that is not as it should be is left out.
    """
    runs: dict[str, dict[str, _Run]] = {name: {} for name in jobs}
    clock = _Clock.of(at for name, (looks, _) in jobs.items() for at in _times(looks(), runs[name]))
    if not clock.spans:
        return None
    work_s = clock.works[-1]
    edges = np.linspace(0.0, work_s, max(1, min(_MOST_BUCKETS, int(work_s))) + 1)
    sums = np.zeros((len(_COUNTS), len(edges) - 1))
    histories: dict[str, _History] = {}
    for name, (looks, _) in jobs.items():
        for at, sample in _samples(looks()):
            replica = f"{name}: {sample['replica']:g}" if name else f"{sample['replica']:g}"
            if replica not in histories:
                histories[replica] = _History(replica, clock, runs=runs[name], edges=edges, sums=sums)
            histories[replica].add(at, sample)
    rates = np.vstack([edges[:-1], edges[1:], sums / np.diff(edges)]).T.tolist() if work_s else []
    ordered = sorted(histories.values(), key=lambda history: _natural(history.replica))
    worked = [(run.began_s, run.ended_s) for by_epoch in runs.values() for run in by_epoch.values()]
    worked = [(began_s, ended_s) for began_s, ended_s in worked if began_s <= ended_s]
    marks = [*_pauses(clock), *(mark for name, (_, events) in jobs.items() for mark in _marks(name, events, clock))]
    return Timeline(
        work_s=work_s,
        # Slices may work at the same time.
        engines_s=sum(stop - start for start, stop in _union(worked)),
        num_runs=len(worked),
        ended_at=_iso(clock.spans[-1][1]),
        throughput=tuple(itertools.starmap(Throughput, rates)),
        periods=tuple(period for history in ordered for period in history.close()),
        marks=tuple(sorted(marks, key=lambda mark: mark.at_s)),
        phases={history.replica: history.seconds for history in ordered},
    )


def _samples(looks: Iterable[dict[str, Any]]) -> Iterator[tuple[float, Sample]]:
    for look in looks:
        at = look.get("at") if isinstance(look, dict) else None
        if isinstance(at, int | float) and 0 <= at < 1e11 and isinstance(look.get("replicas"), list):
            yield from ((float(at), sample) for sample in look["replicas"] if _is_whole(sample))


def _is_whole(sample: object) -> bool:
    return isinstance(sample, dict) and all(isinstance(sample.get(name), int | float) for name in _NUMBERS)


def _times(looks: Iterable[dict[str, Any]], runs: dict[str, _Run]) -> Iterator[float]:
    """The times of all samples; notes the runs by epoch."""
    for at, sample in _samples(looks):
        run = runs.setdefault(_epoch(sample), _Run(at, at))
        run.first = min(run.first, at)
        run.last = max(run.last, at)
        yield at


def _epoch(sample: Sample) -> str:
    """The start of the job that started this replica; the name of an incarnation begins with it."""
    return str(sample.get("incarnation")).split(".")[0]


def _natural(name: str) -> tuple[object, ...]:
    return tuple((0, int(word), "") if word.isdigit() else (1, 0, word) for word in name.replace("/", " ").split())


@dataclass(slots=True)
class _History:
    """What one replica did, from its samples in order."""

    replica: str
    clock: _Clock
    runs: Mapping[str, _Run]
    """Of its job or slice, by epoch."""
    edges: npt.NDArray[np.float64]
    """Of buckets of time."""
    sums: npt.NDArray[np.float64]
    """[counts, buckets]: of all replicas."""
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    periods: list[Period] = field(default_factory=list)
    pieces: dict[Phase, float] = field(default_factory=dict)
    """Seconds in phases that are not long enough for a period yet."""
    start_s: float = 0.0
    stop_s: float = 0.0
    """The time of `pieces`."""
    last: tuple[float, float, Sample] | None = None
    """The last sample, with its time since 1970 and in seconds of work."""
    known: dict[str, tuple[float, Sample]] = field(default_factory=dict)
    """By incarnation, its last sample, with its time in seconds of work."""

    def add(self, at: float, sample: Sample) -> None:
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
        self.last = (at, now_s, sample)
        start_s, counts = self.known.get(incarnation) or (self.clock.work_s(at - 1.0), {})
        self.known[incarnation] = (now_s, sample)
        if sample["steps"]:
            run = self.runs[_epoch(sample)]
            run.began_s = min(run.began_s, start_s)
            run.ended_s = max(run.ended_s, now_s)
        num_new = np.array([max(0, sample[name] - counts.get(name, 0)) for name in _COUNTS], float)
        self.sums += num_new[:, None] * _shares(start_s, now_s, self.edges)

    def close(self) -> list[Period]:
        """All periods over the whole time of work; neighbours in the same phase are one."""
        end_s = self.clock.works[-1]
        if self.last is not None and end_s - self.last[1] > _ENDING_S:
            self._add_absence(self.last[1], end_s, self.last[2], None)
        self._end_period()
        return self.periods

    def _add_absence(self, start_s: float, stop_s: float, first: Sample | None, second: Sample | None) -> None:
        """Add the time between two samples of different incarnations; None: before the first or after the last.

        The replica is down from its last sample to the end of that run, and from the beginning of the next run that has
        it. Between these two the job, or slice, does not run, or runs without it.
        """
        if first is not None and second is not None and _epoch(first) == _epoch(second):
            # Between two attempts, an engine that stays up waits.
            self._add_piece("idle" if first.get("state") == "waiting" else "down", start_s, stop_s)
            return
        ended_s = start_s
        if first is not None:
            ended_s = min(stop_s, self.clock.work_s(self.runs[_epoch(first)].last))
            ended_s = ended_s if ended_s - start_s > _ENDING_S else start_s
        began_s = stop_s
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
        phase = max(self.pieces, key=self.pieces.__getitem__)
        start_s = self.start_s
        self.pieces = {}
        if self.periods and self.periods[-1].phase == phase:
            start_s = self.periods.pop().start_s
        self.periods.append(Period(self.replica, phase, start_s, self.stop_s))


def _phase(first: Sample, second: Sample, passed_s: float) -> Phase:
    """What a replica did between two samples of one incarnation."""
    if second["steps"] == 0 and first.get("state") not in ("running", ON_TRIAL, "ended"):
        return "starting"
    if second["stalled_by_disk_s"] - first["stalled_by_disk_s"] > _DISK_SHARE * passed_s:
        return "waiting for the disk"
    # Of two samples in quick succession the second may repeat the number of steps, and a step of a task without
    # texts may take longer than the time between samples. Samples of older versions have no `busy_s`.
    worked_s = second.get("busy_s", 0.0) - first.get("busy_s", 0.0)
    is_busy = second["steps"] > first["steps"] or second["num_running"] or worked_s > _BUSY_SHARE * passed_s
    return "busy" if is_busy else "idle"


def _shares(start_s: float, stop_s: float, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The share of a time that is in each bucket."""
    if stop_s > start_s:
        inside = np.minimum(edges[1:], stop_s) - np.maximum(edges[:-1], start_s)
        shares: npt.NDArray[np.float64] = np.maximum(inside, 0.0) / (stop_s - start_s)
        return shares
    shares = np.zeros(len(edges) - 1)
    shares[min(len(shares), max(1, int(np.searchsorted(edges, stop_s, side="right")))) - 1] = 1.0
    return shares


def _pauses(clock: _Clock) -> Iterator[Mark]:
    for (_, stop), (start, _) in itertools.pairwise(clock.spans):
        yield Mark("resume", clock.work_s(start), _iso(start), f"resumed after a pause of {duration(start - stop)}")


def _marks(name: str, events: Sequence[EventLine], clock: _Clock) -> Iterator[Mark]:
    """Replicas that ended with a cause, and were not told to; and resumes that came too soon to be a pause."""
    prefix = f"slice {name}: " if name else ""
    starts = [event.fields for event in events if event.name == "replica_started"]
    replicas = {fields.get("incarnation"): fields.get("replica", 0) for fields in starts}
    num_epochs = 0
    for event in events:
        if event.name == "replica_ended" and event.fields.get("cause"):
            replica = replicas.get(event.fields.get("incarnation"), "?")
            cause = clip(str(event.fields["cause"]), 300)
            yield Mark("restart", clock.work_s(event.time), event.at, f"{prefix}replica {replica} ended: {cause}")
        elif event.name == "epoch":
            num_epochs += 1
            if num_epochs > 1 and not clock.is_in_pause(event.time):
                yield Mark("resume", clock.work_s(event.time), event.at, f"{prefix}resumed")


def _iso(time: float) -> str:
    return datetime.datetime.fromtimestamp(time, datetime.UTC).isoformat(timespec="seconds")

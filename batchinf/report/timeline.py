"""A job's history as the telemetry tells it: throughput, what each replica did, restarts and resumes.

Times are seconds of work: a pause in which no process ran the job takes no time.
"""

import bisect
import datetime
import itertools
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
    """

    work_s: float
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
        total = sum(getattr(one, name) * (one.stop_s - one.start_s) for one in self.throughput)
        return float(total / self.work_s) if self.work_s else 0.0

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


Looks = Callable[[], Iterable[dict[str, Any]]]


def timeline(jobs: Mapping[str, tuple[Looks, Sequence[EventLine]]]) -> Timeline | None:
    """The history of a job, or of its slices: by name, its samples (`read_looks`) and its events. None without samples.

    The samples are read twice, as they may not fit into memory. A sample that is not as it should be is left out.
    """
    clock = _Clock.of(at for looks, _ in jobs.values() for at, _ in _samples(looks()))
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
                histories[replica] = _History(replica, clock, sums, work_s / num_buckets)
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
    return Timeline(work_s, _iso(clock.starts[0]), _iso(clock.stops[-1]), throughput, periods, tuple(marks), phases)


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


@dataclass(slots=True)
class _History:
    """What one replica did, from its samples in order; keeps the last sample of each incarnation.

    sums: of all replicas, in buckets of time. length: of a bucket, in seconds. pieces: phases that are not long enough
    for a period yet. start_s, stop_s: of these pieces.
    """

    replica: str
    clock: _Clock
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
        if self.last is None:
            self._add_piece("down", 0.0, now_s)
        else:
            before, before_s, first = self.last
            self._add_piece(_phase(first, sample, at - before), before_s, now_s)
        self.last = at, now_s, sample
        incarnation = str(sample.get("incarnation"))
        start_s, counts = self.known.get(incarnation) or (self.clock.work_s(at - 1.0), {})
        self.known[incarnation] = now_s, sample
        for name, buckets in self.sums.items():
            if (num_new := sample[name] - counts.get(name, 0)) > 0:
                for place, share in _shares(start_s, now_s, self.length, len(buckets)):
                    buckets[place] += num_new * share

    def close(self) -> list[Period]:
        """All periods over the whole time of work; neighbours in the same phase are one."""
        end_s = self.clock.works[-1]
        if self.last is not None and end_s - self.last[1] > _ENDING_S:
            self._add_piece("down", self.last[1], end_s)
        self._end_period()
        return self.periods

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
    before, now = (str(one.get("incarnation")) for one in (first, second))
    if before != now:
        # The name begins with the start of the job: another start follows a stop, and not the replica's own end.
        return "down" if before.split(".")[0] == now.split(".")[0] else "stopped"
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

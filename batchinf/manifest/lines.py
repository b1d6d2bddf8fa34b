"""The lines of a manifest, and the types of their fields."""

import operator
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter

from batchinf.manifest.commit_log import Fields
from batchinf.records import (
    ALWAYS_WRITTEN,
    COUNT_NAMES,
    Count,
    ExpectedSpeed,
    Extent,
    Flag,
    JsonText,
    Lease,
    Part,
    PositiveCount,
    Seconds,
    Speed,
    StartedReplica,
    Time,
)

MAX_SHARDS = 10**8  # of one extent: a byte each is held in memory
CHOSEN = "chosen"  # an event: how many rows were chosen from how many
BEGINNING = "beginning"  # the event that begins the log of a new job, before replicas start and the job has a header

EXPECTED_SPEED, SPEED = "expected_speed", "speed"  # events: a run's prediction, and its speed when it has ended


@dataclass(frozen=True, slots=True)
class Header:
    """What the job is. identity, layout and spec are JSON values."""

    format_version: PositiveCount
    job_id: JsonText
    created_at: Time
    identity: Fields
    fingerprint: JsonText
    layout: Fields
    spec: Fields


@dataclass(frozen=True, slots=True)
class Retry:
    """A retry that has begun.

    overrides: the changed sampling fields by dotted name, JSON values. num_rows, num_shards: chosen input rows, and the
    shards that hold them. positions: digest of the file of the chosen rows. stop_row: rows from here on came into the
    job later, and do not belong to the retry.
    """

    number: PositiveCount
    predicate: JsonText
    overrides: dict[JsonText, Any]
    num_rows: Count
    num_shards: Count
    positions: JsonText
    stop_row: Count

    def __str__(self) -> str:
        changes = "".join(f", {name} {value}" for name, value in self.overrides.items())
        return f"retry {self.number} ({self.predicate}{changes})"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The local files of the model, its tokenizer and its adapters.

    files: xxh3-128 of all bytes, by name. It is durable before any result of the job.
    """

    files: dict[JsonText, JsonText]


@dataclass(frozen=True, slots=True)
class SnapshotSums:
    """The sums over the logs that a snapshot replaces. running_replicas: those without a `replica_ended` event."""

    replaces: list[JsonText]
    device_s: Seconds
    event_counts: dict[JsonText, Count]
    running_replicas: list[StartedReplica]


class EventLine(NamedTuple):
    """Something that happened, at a UTC time in ISO format."""

    name: str
    at: str
    fields: Fields


# -- fields of events that are read again -----------------------------------------------------------------------------


class _Event(BaseModel):
    # A line may have fields that this version does not know.
    model_config = ConfigDict(extra="ignore")

    name: JsonText
    at: Time
    kept_as: JsonText = ""


class _Chosen(_Event):
    num_rows: Count
    num_input_rows: Count


class _ReplicaEnded(_Event):
    incarnation: JsonText
    device_s: Seconds


class _Beginning(_Event):
    job_id: JsonText


class _Ready(_Event):
    replica: Count = 0
    device: JsonText = ""
    versions: dict[JsonText, JsonText]
    settings: dict[JsonText, Any] = {}


class _Death(_Event):
    origin: JsonText
    replica: Count
    leases: list[Lease]
    suspects: list[Count]
    stage: Literal["replay", "probe", "halve", "lost"]
    accused: list[Count]
    later: list[list[Count]]
    num_deaths: Count
    is_found: Flag
    doubted: Count | None


class _Condemned(_Event):
    row_index: Count
    message: JsonText


class _Forgotten(_Event):
    kept_as: JsonText


class _Lost(_Event):
    shards: list[Count]


class _StepDown(_Event):
    lowered: dict[JsonText, Any]
    applies_to: dict[JsonText, Any]


class _ExpectedSpeed(_Event):
    epoch: Count
    speed: ExpectedSpeed


class _Speed(_Event):
    speed: Speed


class _ReplicaStarted(_Event):
    devices: list[JsonText] = []


_EVENTS: dict[str, type[_Event]] = {
    CHOSEN: _Chosen,
    BEGINNING: _Beginning,
    "replica_started": _ReplicaStarted,
    "replica_ended": _ReplicaEnded,
    "ready": _Ready,
    "death": _Death,
    "condemned": _Condemned,
    "forgotten": _Forgotten,
    "lost": _Lost,
    "oom_step_down": _StepDown,
    EXPECTED_SPEED: _ExpectedSpeed,
    SPEED: _Speed,
}
_TAKEN = {"kind", "name", "at", "commit", "crc"}


class _ExtentOrigin(BaseModel):
    """The fields of an extent's line beside those of `Extent`."""

    source_fingerprint: JsonText
    limit: PositiveCount | None = None


# -- reading ---------------------------------------------------------------------------------------------------------

_HEADER, _RETRY, _SNAPSHOT = TypeAdapter(Header), TypeAdapter(Retry), TypeAdapter(SnapshotSums)
_FILES = TypeAdapter(ModelFiles)
_EXPECTED, _MEASURED = TypeAdapter(ExpectedSpeed), TypeAdapter(Speed)
_EXTENT, _PART, _STARTED = TypeAdapter(Extent), TypeAdapter(Part), TypeAdapter(StartedReplica)


def read_line(line: Fields) -> Header | Extent | Part | Retry | ModelFiles | EventLine | SnapshotSums | None:
    """A line as its record; None for an unknown kind.

    Raises ValueError or LookupError if a field is missing or has another type.
    """
    match line["kind"]:
        case "part" | "replacing":
            if not line.keys() >= ALWAYS_WRITTEN:
                raise LookupError(f"a part without {sorted(ALWAYS_WRITTEN - line.keys())}")
            return _PART.validate_python(line)
        case "event" | "counted_event" | "kept_event" | "done":
            return _read_event(line)
        case "header":
            return _HEADER.validate_python(line)
        case "extent":
            _ExtentOrigin.model_validate(line)
            return _checked(_EXTENT.validate_python(line))
        case "retry":
            return _RETRY.validate_python(line)
        case "files":
            return _FILES.validate_python(line)
        case "snapshot":
            return _SNAPSHOT.validate_python(line)
        case str():
            return None
    raise ValueError("a kind that is no text")


def _checked(extent: Extent) -> Extent:
    num_rows = extent.stop_row - extent.first_row
    if num_rows < extent.num_rows or (extent.positions is None and num_rows != extent.num_rows):
        raise ValueError("more rows, or fewer, than there are")
    if 4 * (extent.num_rows // extent.rows_per_shard) > MAX_SHARDS:
        raise ValueError("more shards than can be")
    return extent


def _read_event(line: Fields) -> EventLine:
    _EVENTS.get(str(line.get("name")), _Event).model_validate(line)
    event = EventLine(line["name"], line["at"], {name: value for name, value in line.items() if name not in _TAKEN})
    if event.name == "replica_started":
        read_started(event)
    return event


def read_started(event: EventLine) -> StartedReplica:
    """The replica of a `replica_started` event. Raises ValueError if a field is not as it should be."""
    return _STARTED.validate_python(event.fields)


def read_expected_speed(event: EventLine) -> ExpectedSpeed:
    """The prediction in an event of this name."""
    return _EXPECTED.validate_python(event.fields["speed"])


def read_speed(event: EventLine) -> Speed:
    """The speed in an event of this name."""
    return _MEASURED.validate_python(event.fields["speed"])


# -- writing ---------------------------------------------------------------------------------------------------------

_PART_NAMES = tuple(
    own.name for own in fields(Part) if own.name not in COUNT_NAMES and own.metadata.get("is_written", True)
)
_part_values = operator.attrgetter(*_PART_NAMES)


def part_line(kind: Literal["part", "replacing"], part: Part) -> Fields:
    return {"kind": kind, **dict(zip(_PART_NAMES, _part_values(part), strict=True)), **part.written()}


def event_line(kind: Literal["event", "counted_event", "kept_event", "done"], event: EventLine) -> Fields:
    """The line of an event. Raises ValueError if it could not be read again."""
    if taken := _TAKEN & event.fields.keys():
        raise ValueError(f"event {event.name}: the line itself has the fields {sorted(taken)}")
    line = {"kind": kind, "name": event.name, "at": event.at, **event.fields}
    try:
        read_line(line)
    except ValueError as error:
        raise ValueError(f"event {event.name} could not be read again: {error}") from error
    return line

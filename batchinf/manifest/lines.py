"""The lines of a manifest, and the types of their fields."""

import datetime
import functools
import operator
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, create_model

from batchinf.base.storage import adapter
from batchinf.manifest.columns import Columns
from batchinf.manifest.commit_log import Fields
from batchinf.records import (
    COUNT_NAMES,
    Count,
    Extent,
    Flag,
    InputJob,
    JsonText,
    Lease,
    Part,
    PositiveCount,
    Repair,
    Seconds,
    Speed,
    StartedReplica,
    Time,
)

# Each part's line and footer has these counts. Any other count is 0 where it is missing: a later version added it.
BASIC_COUNTS = ("num_rows", "num_errors", "num_prompt_tokens", "num_output_tokens")
MAX_SHARDS = 10**8  # of one extent: a byte each is held in memory
CHOSEN = "chosen"  # an event: how many rows were chosen from how many
INPUT_JOB = "input_job"  # an event: the job whose output is read, when --extend took in its new rows
BEGINNING = "beginning"  # the event that begins the log of a new job, before replicas start and the job has a header

SPEED = "speed"  # an event: the speed of a run that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the job is, as it began. Identity, layout and spec are JSON values."""

    format_version: PositiveCount
    batchinf_version: JsonText
    """The version of batchinf that began the job."""
    job_id: JsonText
    created_at: Time
    identity: Fields
    """What a resume must have, too, by dotted name."""
    fingerprint: JsonText
    """Hash of the identity."""
    layout: Fields
    """What was chosen once: how rows are cut into shards, and their order."""
    spec: Fields
    """The spec as resolved."""
    columns: Columns
    """Those of all its parts and journal segments, whichever version writes them."""
    input_job: InputJob | None = None
    """The job whose output it reads (`input.job`), as it was when this one began."""
    input_folder: JsonText | None = None
    """In which relative paths in its rows begin. The path in the spec may be relative to the folder of its start. None:
    no folder is known, or an older version began the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A retry that has begun."""

    number: PositiveCount
    predicate: JsonText
    overrides: dict[JsonText, Any]
    """The changed sampling fields by dotted name, JSON values."""
    num_rows: Count
    """Chosen input rows."""
    num_shards: Count
    """Shards that hold chosen rows."""
    positions: JsonText
    """Digest of the file of the chosen rows."""
    stop_row: Count
    """Rows from here on came into the job later, and do not belong to the retry."""
    repair: Repair | None = None
    """The file that replaces some input rows from this retry on; None: it was given none."""

    def __str__(self) -> str:
        changes = "".join(f", {name} {value}" for name, value in self.overrides.items())
        source = "" if self.repair is None else f", --input {self.repair.path}"
        return f"retry {self.number} ({self.predicate}{changes}{source})"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The local files of the model, its tokenizer and its adapters. It is durable before any result of the job."""

    files: dict[JsonText, JsonText]
    """xxh3-128 of all bytes, by name."""


@dataclass(frozen=True, slots=True)
class SnapshotSums:
    """The sums over the logs that a snapshot replaces."""

    replaces: list[JsonText]
    device_s: Seconds
    event_counts: dict[JsonText, Count]
    running_replicas: list[StartedReplica]
    """Those without a `replica_ended` event."""


class EventLine(NamedTuple):
    """Something that happened, at a UTC time in ISO format."""

    name: str
    at: str
    fields: Fields

    @property
    def time(self) -> float:
        """When it happened, in seconds since 1970."""
        return datetime.datetime.fromisoformat(self.at).timestamp()


# -- fields of events that are read again -----------------------------------------------------------------------------


class _Event(BaseModel):
    # A line may have fields that this version does not know.
    model_config = ConfigDict(extra="ignore")

    name: JsonText
    at: Time
    kept_as: JsonText = ""


_FIELDS: dict[str, dict[str, Any]] = {
    CHOSEN: {"num_rows": Count, "num_input_rows": Count},
    BEGINNING: {"job_id": JsonText},
    "replica_started": {"devices": (list[JsonText], [])},
    "replica_ended": {"incarnation": JsonText, "device_s": Seconds},
    "ready": {
        "replica": (Count, 0),
        "device": (JsonText, ""),
        "versions": dict[JsonText, JsonText],
        "settings": (dict[JsonText, Any], {}),
    },
    "suspects": {
        "origin": JsonText,
        "suspects": list[Count],
        "leases": list[Lease],
        "replica": Count | None,
        "others": list[Count],
        "has_survived": Flag,
        "num_alone": Count,
    },
    INPUT_JOB: {"input_job": InputJob},
    "condemned": {"row_index": Count, "message": JsonText},
    "forgotten": {"kept_as": JsonText},
    "lost": {"shards": list[Count]},
    "oom_step_down": {"lowered": dict[JsonText, Any], "applies_to": dict[JsonText, Any]},
    SPEED: {"speed": Speed},
}
_TAKEN = {"kind", "name", "at", "commit", "crc"}


class _ExtentOrigin(BaseModel):
    """The fields of an extent's line beside those of `Extent`."""

    source_fingerprint: JsonText
    limit: PositiveCount | None = None


# -- reading ---------------------------------------------------------------------------------------------------------

# By the line's kind; parts, extents and events need further checks.
_RECORDS: dict[str, type[Any]] = {"header": Header, "retry": Retry, "files": ModelFiles, "snapshot": SnapshotSums}


def read_line(line: Fields) -> Header | Extent | Part | Retry | ModelFiles | EventLine | SnapshotSums | None:
    """A line as its record; None for an unknown kind. Raises ValueError or LookupError for a missing or wrong field."""
    match line["kind"]:
        case "part":
            if missing := [name for name in BASIC_COUNTS if name not in line]:
                raise LookupError(f"a part without {missing}")
            return adapter(Part).validate_python(line)
        case "event" | "counted_event" | "kept_event" | "done":
            return _read_event(line)
        case "extent":
            _ExtentOrigin.model_validate(line)
            return _checked(adapter(Extent).validate_python(line))
        case str() as kind:
            return adapter(_RECORDS[kind]).validate_python(line) if kind in _RECORDS else None
    raise ValueError("a kind that is no text")


def _checked(extent: Extent) -> Extent:
    num_rows = extent.stop_row - extent.first_row
    if num_rows < extent.num_rows or (extent.positions is None and num_rows != extent.num_rows):
        raise ValueError("more rows, or fewer, than there are")
    if 4 * (extent.num_rows // extent.rows_per_shard) > MAX_SHARDS:
        raise ValueError("more shards than can be")
    return extent


def _read_event(line: Fields) -> EventLine:
    name = str(line.get("name"))
    (_event_model(name) if name in _FIELDS else _Event).model_validate(line)
    event = EventLine(line["name"], line["at"], {name: value for name, value in line.items() if name not in _TAKEN})
    if event.name == "replica_started":
        read_started(event)
    return event


@functools.cache
def _event_model(name: str) -> type[_Event]:
    return create_model(name, __base__=_Event, **_FIELDS[name])


def read_started(event: EventLine) -> StartedReplica:
    """The replica of a `replica_started` event. Raises ValueError if a field is not as it should be."""
    return adapter(StartedReplica).validate_python(event.fields)


# -- writing ---------------------------------------------------------------------------------------------------------

_PART_NAMES = tuple(
    field.name for field in fields(Part) if field.name not in COUNT_NAMES and field.metadata.get("is_written", True)
)
_part_values = operator.attrgetter(*_PART_NAMES)


def part_line(part: Part) -> Fields:
    return {"kind": "part", **dict(zip(_PART_NAMES, _part_values(part), strict=True)), **part.written()}


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

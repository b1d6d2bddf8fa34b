"""The lines of a manifest and the types of their fields. A checksum proves that a line is whole, no more."""

import datetime
import operator
import sys
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from batchinf.records import Part

MAX_SHARDS = 10**8  # of one extent: a byte each is held in memory

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
PositiveCount = Annotated[int, Field(ge=1, le=2**63 - 1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _is_time(text: str) -> str:
    if datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


def _is_text(text: str) -> str:
    text.encode()  # half characters are valid JSON
    return text


LineText = Annotated[str, AfterValidator(_is_text)]
Time = Annotated[LineText, AfterValidator(_is_time)]


class _Line(BaseModel):
    # Of the same format version, a line may yet say more than this reader knows.
    model_config = ConfigDict(strict=True, extra="ignore")


class _Header(_Line):
    format_version: PositiveCount
    job_id: LineText
    created_at: Time
    identity: dict[str, Any]
    fingerprint: LineText
    layout: dict[str, Any]
    spec: dict[str, Any]


class _Extent(_Line):
    start: Count
    num_rows: Count
    rows_per_shard: PositiveCount
    first_shard: Count
    source_fingerprint: LineText
    first_row: Count | None = None
    stop_row: Count | None = None
    selection: LineText | None = None
    order: LineText | None = None
    limit: PositiveCount | None = None

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        first_row = self.start if self.first_row is None else self.first_row
        num_rows = self.num_rows if self.stop_row is None else self.stop_row - first_row
        if num_rows < self.num_rows or (self.selection is None and num_rows != self.num_rows):
            raise ValueError("more rows, or fewer, than there are")
        return self


class _Part(_Line):
    shard: Count
    file: LineText
    num_rows: Count
    num_errors: Count
    num_bytes: Count
    num_prompt_tokens: Count
    num_output_tokens: Count
    digest: LineText
    replica: Count | None
    incarnation: LineText
    num_nan_rows: Count = 0
    num_inf_rows: Count = 0
    num_second_bos: Count = 0
    num_answered: Count | None = None
    num_right: Count = 0
    num_right_per_token: Count = 0
    num_right_per_byte: Count = 0


class _Event(_Line):
    name: LineText
    at: Time


class _Started(_Line):
    replica: Count
    incarnation: LineText
    backend: LineText
    identity: dict[LineText, Any]


class _ReplicaStarted(_Event, _Started):
    devices: list[LineText] = []


class _ReplicaEnded(_Event):
    incarnation: LineText
    device_s: Seconds


class _HeadStart(_Event):
    job_id: LineText


class _Ready(_Event):
    device: str = ""
    versions: dict[LineText, LineText]


class _Death(_Event):
    origin: LineText
    replica: Count
    shards: list[Count]
    suspects: list[Count]
    stage: Literal["replay", "probe", "halve"]
    accused: list[Count]
    later: list[list[Count]]
    num_deaths: Count
    is_found: bool
    doubted: Count | None


class _Condemned(_Event):
    row_index: Count
    message: LineText


class _Forgotten(_Event):
    kept_as: LineText


class _Lost(_Event):
    shards: list[Count]


class _StepDown(_Event):
    lowered: dict[LineText, Any]
    applies_to: dict[LineText, Any]


class _Retry(_Line):
    number: PositiveCount
    predicate: LineText
    overrides: dict[LineText, Any]
    fingerprint: LineText
    num_rows: Count
    num_shards: Count
    selection: LineText


class _Snapshot(_Line):
    replaces: list[LineText]
    device_s: Seconds
    event_counts: dict[LineText, Count]
    running_replicas: list[_Started]


_KINDS: dict[str, type[_Line]] = {
    "header": _Header,
    "extent": _Extent,
    "part": _Part,
    "replacing": _Part,
    "retry": _Retry,
    "event": _Event,
    "counted_event": _Event,
    "kept_event": _Event,
    "done": _Event,
    "snapshot": _Snapshot,
}
# Events of which something is read again.
_EVENTS: dict[str, type[_Event]] = {
    "head_start": _HeadStart,
    "replica_started": _ReplicaStarted,
    "replica_ended": _ReplicaEnded,
    "ready": _Ready,
    "death": _Death,
    "condemned": _Condemned,
    "forgotten": _Forgotten,
    "lost": _Lost,
    "oom_step_down": _StepDown,
}


def check_line(fields: dict[str, Any]) -> None:
    """Raise ValueError or LookupError if a line lacks a field, or has one of another type. Unknown kinds pass."""
    kind = fields["kind"]
    if not isinstance(kind, str):
        raise ValueError("a kind that is no text")
    if (expected := _KINDS.get(kind)) is None:
        return
    if expected is _Event:
        expected = _EVENTS.get(str(fields.get("name")), _Event)
    line = expected.model_validate(fields)
    if isinstance(line, _Extent) and 4 * (line.num_rows // line.rows_per_shard) > MAX_SHARDS:
        raise ValueError("more shards than can be")


class PartLine(NamedTuple):
    """A committed part, and which replica made it where that is known. About 500 bytes of memory."""

    shard: int
    file: str
    num_rows: int
    num_errors: int
    num_bytes: int
    num_prompt_tokens: int
    num_output_tokens: int
    digest: str
    num_nan_rows: int = 0
    num_inf_rows: int = 0
    num_second_bos: int = 0
    num_answered: int | None = None
    num_right: int = 0
    num_right_per_token: int = 0
    num_right_per_byte: int = 0
    retry: int = 0
    replica: int | None = None
    incarnation: str = ""

    @classmethod
    def of(cls, part: "Part | PartLine", replica: int | None = None, incarnation: str = "") -> "PartLine":
        """A part as its line."""
        return cls._make((*_VALUES(part), replica, incarnation))

    def fields(self) -> dict[str, Any]:
        """As they are written."""
        return without_rare(self._asdict())


# What few jobs have.
_RARE = frozenset("num_second_bos num_answered num_right num_right_per_token num_right_per_byte".split())


def without_rare(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a part, without those that few jobs have where there is nothing of them."""
    return {k: v for k, v in fields.items() if k not in _RARE or v != PartLine._field_defaults[k]}


_FIELDS = operator.itemgetter(*PartLine._fields)
_VALUES = operator.attrgetter(*PartLine._fields[:-2])


def part_line(fields: dict[str, Any]) -> PartLine:
    """A line's fields as a part. Raises KeyError where one is missing."""
    line = PartLine(*_FIELDS({**PartLine._field_defaults, **fields}))  # earlier versions said less
    return line._replace(incarnation=sys.intern(line.incarnation))

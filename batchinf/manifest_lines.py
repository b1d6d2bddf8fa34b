"""What the lines of a manifest must hold. A checksum says that a line is whole, not that it means something."""

import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MAX_SHARDS = 10**8  # of one extent: a byte each is held in memory

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**63 - 1)]
# A group of 0 is the reader's own, and 1 is the system's: neither was ever a replica's.
GroupId = Annotated[int, Field(ge=2, le=2**31 - 1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _is_time(text: str) -> str:
    if datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


def _is_text(text: str) -> str:
    text.encode()  # half characters are valid JSON
    return text


Text = Annotated[str, AfterValidator(_is_text)]
Time = Annotated[Text, AfterValidator(_is_time)]


class _Line(BaseModel):
    # Of the same format version, a line may yet say more than this reader knows.
    model_config = ConfigDict(strict=True, extra="ignore")


class _Header(_Line):
    format_version: Positive
    job_id: Text
    created_at: Time
    identity: dict[str, Any]
    fingerprint: Text
    layout: dict[str, Any]
    spec: dict[str, Any]


class _Extent(_Line):
    start: Count
    num_rows: Count
    rows_per_shard: Positive
    first_shard: Count
    source_fingerprint: Text
    first_row: Count | None = None
    stop_row: Count | None = None
    selection: Text | None = None
    order: Text | None = None
    limit: Positive | None = None

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        first_row = self.start if self.first_row is None else self.first_row
        num_rows = self.num_rows if self.stop_row is None else self.stop_row - first_row
        if num_rows < self.num_rows or (self.selection is None and num_rows != self.num_rows):
            raise ValueError("more rows, or fewer, than there are")
        return self


class _Part(_Line):
    shard: Count
    file: Text
    num_rows: Count
    num_errors: Count
    num_bytes: Count
    num_prompt_tokens: Count
    num_output_tokens: Count
    digest: Text
    replica: Count | None
    incarnation: Text
    num_nan_rows: Count = 0
    num_inf_rows: Count = 0
    num_second_bos: Count = 0
    num_answered: Count | None = None
    num_right: Count = 0
    num_right_per_token: Count = 0
    num_right_per_byte: Count = 0


class _Event(_Line):
    name: Text
    at: Time


class _Group(_Line):
    replica: Count
    incarnation: Text
    host: Text
    boot_id: Text
    pgid: GroupId
    pid_start_time: Count


class _ReplicaStarted(_Event, _Group):
    devices: list[Text] = []


class _ReplicaEnded(_Event):
    incarnation: Text
    device_s: Seconds


class _HeadStart(_Event):
    job_id: Text


class _Ready(_Event):
    device: str = ""
    versions: dict[Text, Text]


class _Death(_Event):
    origin: Text
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
    message: Text


class _Forgotten(_Event):
    kept_as: Text


class _Lost(_Event):
    shards: list[Count]


class _StepDown(_Event):
    lowered: dict[Text, Any]
    applies_to: dict[Text, Any]


class _Retry(_Line):
    number: Positive
    predicate: Text
    overrides: dict[Text, Any]
    fingerprint: Text
    num_rows: Count
    num_shards: Count
    selection: Text


class _Snapshot(_Line):
    replaces: list[Text]
    device_s: Seconds
    event_counts: dict[Text, Count]
    process_groups: list[_Group]


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

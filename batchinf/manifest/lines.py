"""The lines of a manifest: each is a record, of which the last with its key counts."""

import operator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from pydantic import BaseModel

from batchinf.base.json_types import Count, Flag, JsonText, PositiveCount, Rate, Seconds, Share, Time
from batchinf.base.storage import adapter
from batchinf.manifest.columns import Columns
from batchinf.manifest.commit_log import Fields
from batchinf.records import COUNT_NAMES, Lease, Part
from batchinf.schedule.shards import Extent

# Each part's line and footer has these counts. Any other count is 0 where it is missing: a later version added it.
BASIC_COUNTS = ("num_rows", "num_errors", "num_prompt_tokens", "num_output_tokens")
MAX_SHARDS = 10**8  # of one extent: a byte each is held in memory


# -- what the job is -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Beginning:
    """A new job, before its replicas start and it has a header."""

    job_id: JsonText


@dataclass(frozen=True, slots=True)
class Recovered:
    """A start that has recovered what earlier ones left. It names the job: a log of another one is damage."""

    job_id: JsonText


@dataclass(frozen=True, slots=True, kw_only=True)
class InputJob:
    """A job whose output rows are the input of another one."""

    path: JsonText
    """Its output folder, as the spec names it."""
    job_id: JsonText
    """Of the first slice, if it has slices."""
    fingerprint: JsonText
    """Of its identity; of the first slice, if it has slices."""
    num_rows: Count
    """Output rows."""
    num_parts: Count
    epoch: Count
    """The number of its last log; the sum over all slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the job is. Identity, layout and spec are JSON values."""

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
    """The job whose output it reads (`input.job`), as it was when its rows were last taken in."""
    input_folder: JsonText | None = None
    """In which relative paths in its rows begin. The path in the spec may be relative to the folder of its start. None:
    no folder is known, or an older version began the job."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """How many input rows a job with `input.where`, `sample`, `limit` or `exclude` chose, and from how many."""

    num_rows: Count
    num_input_rows: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The file from which a retry takes rows in place of those of the input (`--input`)."""

    path: JsonText
    """As the user gave it."""
    name: JsonText
    """Of the copy in the job's folder."""
    content: JsonText
    """xxh3-128 of the name and the bytes, which names the folder of the copy."""
    fingerprint: JsonText
    """Of its rows."""
    num_rows: Count
    """Rows that are taken from it."""
    rows: JsonText
    """Digest of the file with the positions of these rows in the input."""
    places: JsonText
    """Digest of the file with their positions in the copy."""


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
    attempt: Count = 0
    """Enters the seeds of its requests. 0: these have the seeds of the first run, as those of a repair have."""
    is_automatic: Flag = False
    """Begun by the spec's section `retry`."""
    num_mended: Count | None = None
    """Chosen rows that the predicate did not match afterwards; None: they are not counted."""

    def __str__(self) -> str:
        changes = "".join(f", {name} {value}" for name, value in self.overrides.items())
        source = "" if self.repair is None else f", --input {self.repair.path}"
        return f"retry {self.number} ({self.predicate}{changes}{source})"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The local files of the model, its tokenizer and its adapters. It is durable before any result of the job."""

    files: dict[JsonText, JsonText]
    """xxh3-128 of all bytes, by name."""


# -- what has happened -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartedReplica:
    """An incarnation of a replica that has started."""

    replica: Count
    incarnation: JsonText
    backend: JsonText
    identity: dict[JsonText, Any]
    """JSON values by which the backend finds it again, such as a process group. Only that backend reads them."""
    devices: tuple[JsonText, ...] = ()
    """Its GPUs, by the names that the user sees; empty on a processor."""
    num_devices: Seconds = 1.0
    """Devices for the accounting of device time."""
    started_at: Seconds | None = None
    """In seconds since 1970; None if it is not known."""


@dataclass(frozen=True, slots=True)
class EndedReplica:
    """An incarnation of a replica that has ended."""

    incarnation: JsonText
    """Empty for all that ended before a snapshot."""
    device_s: Seconds
    """Its time, times its devices."""
    has_devices: Flag = False
    """Whether it had GPUs."""


@dataclass(frozen=True, slots=True)
class Platform:
    """A device with software versions on which an engine of the job has been up."""

    device: JsonText
    versions: dict[JsonText, JsonText]
    """By name."""
    settings: dict[JsonText, Any]
    """Of its last engine."""
    epoch: Count
    """Of its last engine."""

    @property
    def values(self) -> dict[str, str]:
        """`device`, and versions by name."""
        return {"device": self.device, **self.versions}

    @property
    def key(self) -> object:
        return frozenset(self.values.items())


@dataclass(frozen=True, slots=True)
class Suspects:
    """Deaths that may have one cause, because the same rows were in the engine. Without leases, the case is closed."""

    origin: JsonText
    """The incarnation that died first."""
    suspects: tuple[Count, ...]
    """Rows that were in the engine at every death."""
    leases: tuple[Lease, ...] = ()
    """Those with rows of the case."""
    replica: Count | None = None
    """The replica that runs the suspects apart; None after the first death, as any replica may run the rows again."""
    others: tuple[Count, ...] = ()
    """Rows that later deaths have cleared. They have not run since, but for those of which the engine died too."""
    has_survived: Flag = False
    """An engine has survived rows of the case, so that it is not the engine itself that is broken."""
    num_alone: Count = 0
    """Deaths at which the last suspect was alone in the engine, without the first death of the case."""

    @property
    def is_over(self) -> bool:
        return not self.leases


@dataclass(frozen=True, slots=True)
class Condemned:
    """A row that kills engines."""

    row_index: Count
    message: JsonText | None
    """Of its error; None once the row is in a part."""

    @property
    def is_over(self) -> bool:
        return self.message is None


@dataclass(frozen=True, slots=True)
class Lowered:
    """Engine arguments that were lowered because memory ran out."""

    lowered: dict[JsonText, Any]
    """All that are lower than the spec's by now."""
    applies_to: dict[JsonText, Any]
    """The fields of the spec that decide whether they still apply, with their values then."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Committed shards that have lost their parts."""

    shards: list[Count]


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What limited a run, by its telemetry."""

    kind: Literal["memory", "sequences", "input", "images", "processor", "compute"]
    """Memory for the cache, `max_num_seqs`, input and tokenizer, images, the engine's own work, or the devices."""
    share: Share
    """Of the time."""
    reason: JsonText
    """In words."""
    change: JsonText
    """A change to try."""


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """What one replica did of a run."""

    num_rows: Count
    """Output rows that its engine answered."""
    busy: Share
    """Of `Speed.work_s`: the time in which its engine had requests."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a run was. Rates are of all engines, while they worked."""

    run_s: Seconds
    """From its beginning to its end."""
    work_s: Seconds
    """From the first request to the last part."""
    prompt_tokens_per_s: Rate
    output_tokens_per_s: Rate
    num_gpus: Count = 0
    """0 on processors."""
    cache_tokens: Count | None = None
    """Of one engine; None if it does not say."""
    bottleneck: Bottleneck | None = None
    """None if the run was too short to say."""
    replicas: tuple[ReplicaShare, ...] = ()
    """By number; empty for a single one."""
    late_s: Seconds = 0.0
    """From the first engine that was up to the last one."""

    @property
    def tokens_per_s(self) -> float:
        """Of prompts and outputs together."""
        return self.prompt_tokens_per_s + self.output_tokens_per_s

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """None on processors."""
        return self.tokens_per_s / self.num_gpus if self.num_gpus else None


@dataclass(frozen=True, slots=True)
class Done:
    """Every shard and every retry is done, until rows, a retry or a lost part come later."""

    speed: Speed | None = None
    """The speed of the run that ended; None if no engine worked in it."""


# -- reading ---------------------------------------------------------------------------------------------------------

# By the line's kind. Parts and extents need further checks.
_RECORDS: dict[str, type[Any]] = {
    "beginning": Beginning,
    "header": Header,
    "recovered": Recovered,
    "chosen": Chosen,
    "retry": Retry,
    "files": ModelFiles,
    "started": StartedReplica,
    "ended": EndedReplica,
    "platform": Platform,
    "suspects": Suspects,
    "condemned": Condemned,
    "lowered": Lowered,
    "lost": Lost,
    "done": Done,
}
# The records of which a state has the last one of each key, by the name of the key; "" if there is one at most.
KEYS: dict[type[Any], str] = {
    ModelFiles: "",
    Chosen: "",
    StartedReplica: "incarnation",
    Platform: "key",
    Suspects: "origin",
    Condemned: "row_index",
    Lowered: "",
}


class _ExtentOrigin(BaseModel):
    """The fields of an extent's line beside those of `Extent`."""

    source_fingerprint: JsonText
    limit: PositiveCount | None = None


def read_line(line: Fields) -> Any:
    """A line as its record; None for an unknown kind. Raises ValueError or LookupError for a missing or wrong field."""
    match line["kind"]:
        case "part":
            if missing := [name for name in BASIC_COUNTS if name not in line]:
                raise LookupError(f"a part without {missing}")
            return adapter(Part).validate_python(line)
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


# -- writing ---------------------------------------------------------------------------------------------------------

_PART_NAMES = tuple(
    field.name for field in fields(Part) if field.name not in COUNT_NAMES and field.metadata.get("is_written", True)
)
_part_values = operator.attrgetter(*_PART_NAMES)


def part_line(part: Part) -> Fields:
    return {"kind": "part", **dict(zip(_PART_NAMES, _part_values(part), strict=True)), **part.written()}


def record_line(record: Any) -> Fields:
    """The line of a record that is neither a part nor an extent. Raises ValueError if it could not be read again."""
    [kind] = [kind for kind, each in _RECORDS.items() if isinstance(record, each)]
    line = {"kind": kind, **asdict(record)}
    try:
        read_line(line)
    except ValueError as error:
        raise ValueError(f"{record} could not be read again: {error}") from error
    return line

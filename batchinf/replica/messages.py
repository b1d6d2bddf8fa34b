"""What a coordinator and a replica say to each other. All are frozen and can be serialised; none holds a row."""

from dataclasses import dataclass

from batchinf.model.lora import Adapter
from batchinf.records import EngineInfo, EngineStats, Extent, Part, Shard


@dataclass(frozen=True, slots=True)
class Launch:
    """To a replica, first of all: who it is and what its engine needs.

    spec: the resolved JobSpec as JSON, but for its `input`, of which `Work` has the last word. revision: the commit,
    where model_path is a hub id.
    cpus: the processor cores it may use; empty means all that it inherited.
    adapters: those that requests may name.
    config_limits: `max_model_len` and `vocab_size` by the model's config; None where it does not say.
    """

    replica: int
    incarnation: str
    folder: str
    job_id: str
    spec: str
    model_path: str
    tokenizer_path: str
    revision: str | None
    cpus: tuple[int, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    config_limits: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True, slots=True)
class Work:
    """To a replica, once: what its rows are. Next after `Launch`, or when the input is known.

    input: the resolved section of the spec as JSON.
    metadata: what each part's Parquet metadata carries beside the versions.
    source_folder: what the scan of the input found.
    taken: the fingerprints of what the job has taken in of its input, the last one last.
    extents: the job's, of which the run order is made.
    begun_at: when the job was begun, in ISO format: templates that print the date see this one.
    """

    input: str
    metadata: dict[str, str]
    source_folder: str
    taken: tuple[str, ...]
    extents: tuple[Extent, ...]
    begun_at: str | None


@dataclass(frozen=True, slots=True)
class Assign:
    """To a replica: run these shards after those that you have. `attempts` is the number of the try, from 1.

    condemned: rows of these shards that must not reach the engine, which they kill, each with what to say of it.
    """

    shards: tuple[Shard, ...]
    attempts: int = 1
    condemned: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """To a replica: run nothing but these groups of rows of these shards, one group after the other.

    is_probe: a token for each request will do, and what comes out is not stored.
    """

    shards: tuple[Shard, ...]
    groups: tuple[tuple[int, ...], ...]
    is_probe: bool
    attempts: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """To a replica: give back those of these shards that you have not begun.

    Before `Begin` it has begun none: they are another's at once, and it says nothing.
    """

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """To a replica whose engine is up: run what you have."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To a replica: journal, admit nothing more, finish what can be finished in `drain_s` seconds, and end."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class StartPhase:
    """From a replica: what it is doing before the first row."""

    name: str


@dataclass(frozen=True, slots=True)
class TakesShards:
    """From a replica whose engine is not up yet: it makes requests of shards until it is, and will run so many at once.

    window: requests, as far as can be told.
    """

    window: int


@dataclass(frozen=True, slots=True)
class Ready:
    """From a replica: the engine is up, and waits for `Begin`."""

    engine: EngineInfo
    start_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """From a replica, about once a second: totals since it started. `steps` shows that the engine is alive.

    num_rows: output rows that are finished. num_errors: errors among them. num_answered: those that the engine finished
    without an error, so none from the journal. num_prompt_tokens: of prompts that the engine has run.
    num_output_tokens: generated so far, those of unfinished requests too.
    in_flight: requests in the engine. num_waiting: those that are ready for it.
    """

    num_rows: int
    num_errors: int
    num_prompt_tokens: int
    num_output_tokens: int
    steps: int
    in_flight: int
    stalled_by_disk_s: float
    engine: EngineStats
    num_waiting: int = 0
    num_answered: int = 0


@dataclass(frozen=True, slots=True)
class ShardBegun:
    """From a replica: a shard's first rows are on their way.

    num_recovered: requests that came from the journal. num_recovered_rows: output rows that they finish.
    """

    shard: int
    num_recovered: int
    num_recovered_rows: int


@dataclass(frozen=True, slots=True)
class ShardClosed:
    """From a replica: a shard is whole in `staging/`."""

    part: Part


@dataclass(frozen=True, slots=True)
class Revoked:
    """From a replica: these shards were given back, untouched."""

    shards: tuple[int, ...]


DISK_ERROR = "DiskError"


@dataclass(frozen=True, slots=True)
class Tried:
    """From a replica: a trial's group of rows came out of the engine, which is well."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """From a replica, its last words: why it ends. `cause` is a line that a user can act on.

    error_type: DISK_ERROR where it cannot write and no restart mends that. was_killed: a signal from outside ended its
    engine.
    """

    error_type: str
    cause: str
    exit_code: int
    was_killed: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """From a replica: it has journalled what it had and ends."""


Command = Work | Assign | Trial | Revoke | Begin | Stop
Event = StartPhase | TakesShards | Ready | Progress | ShardBegun | ShardClosed | Revoked | Tried | Failed | Stopped

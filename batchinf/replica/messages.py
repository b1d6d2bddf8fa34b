"""The messages between coordinator and replica: frozen, serialisable, and without rows."""

from dataclasses import dataclass, field

from batchinf.manifest.columns import Columns
from batchinf.model.lora import Adapter
from batchinf.records import EngineInfo, EngineStats, Extent, Lease, Part, RayGroup


@dataclass(frozen=True, slots=True)
class Launch:
    """To a replica, first: who it is and what its engine needs.

    spec: the resolved JobSpec as JSON; the `input` in `Work` replaces its own. revision: the commit if model_path is a
    hub id. cpus: the processor cores that it may use; empty means all that it inherited. adapters: those that requests
    may name. config_limits: `max_model_len` and `vocab_size` from the model's config; None if it does not say.
    ray_group: where the engine's ranks run if it has several hosts.
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
    ray_group: RayGroup | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """To a replica, once: all that depends on the input. Right after `Launch`, or when the input is known.

    input: the resolved section of the spec as JSON. metadata: for each part's Parquet metadata, beside the versions.
    source_folder: the results of the scan. taken: fingerprints of the input's versions, the latest last. extents: of
    the job; they define the run order. begun_at: when the job began, in ISO format; templates see it as today's date.
    """

    input: str
    metadata: dict[str, str]
    source_folder: str
    taken: tuple[str, ...]
    extents: tuple[Extent, ...]
    begun_at: str | None
    columns: Columns
    """Those of the job's parts and segments."""


@dataclass(frozen=True, slots=True)
class Assign:
    """To a replica: run these leases after those that you have.

    condemned: rows of these leases that must not reach the engine, because they kill it, each with its error message.
    progress_s: send `Progress` this often, in seconds, if it has changed; once a second in any case.
    """

    leases: tuple[Lease, ...]
    condemned: tuple[tuple[int, str], ...] = ()
    progress_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Trial:
    """To a replica: run only these groups of rows of these leases, one group after the other.

    is_probe: generate one token for each request, and store nothing.
    """

    leases: tuple[Lease, ...]
    groups: tuple[tuple[int, ...], ...]
    is_probe: bool


@dataclass(frozen=True, slots=True)
class Revoke:
    """To a replica: give back these leases, if you have not begun them. Each is named by its key.

    Before `Begin` none has begun. The coordinator then reassigns them at once, and the replica does not answer.
    """

    leases: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """To a replica whose engine is up: run what you have."""


@dataclass(frozen=True, slots=True)
class Identified:
    """To a replica whose engine is up: the model's digests are durable, so results may be stored."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To a replica: journal, admit nothing more, finish running requests for at most `drain_s` seconds, and end."""

    drain_s: float


# The phase in which the engine itself starts; its log says more. The last phase, after which the engine is up.
STARTING_ENGINE = "starting the engine"
WARMING_UP = "compiling kernels for the job's shapes"


@dataclass(frozen=True, slots=True)
class StartPhase:
    """From a replica: the phase of its start. host: where it runs; the first phase has it."""

    name: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class TakesLeases:
    """From a replica whose engine is not up yet: it can prepare leases already.

    window: requests that it will probably run at once.
    """

    window: int


@dataclass(frozen=True, slots=True)
class Ready:
    """From a replica: the engine is up, and waits for `Begin`."""

    engine: EngineInfo
    start_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """From a replica, about once a second, or more often (`Assign.progress_s`): totals since it started.

    steps: shows that the engine is alive. busy_s: time in which the engine had requests, in seconds.
    num_rows: output rows that are finished. errors: those that failed, by the error's type. num_answered: those that
    the engine finished without an error, so none from the journal. num_prompt_tokens: of prompts that the engine has
    run. num_output_tokens: generated so far, those of unfinished requests too. in_flight: requests in the engine.
    num_waiting: those that are ready for it. num_unstored: those that the engine has finished, and that are not among
    `num_rows` yet: their results are being decoded and encoded.
    """

    num_rows: int
    errors: dict[str, int]
    num_prompt_tokens: int
    num_output_tokens: int
    steps: int
    in_flight: int
    stalled_by_disk_s: float
    engine: EngineStats
    num_waiting: int = 0
    num_answered: int = 0
    busy_s: float = 0.0
    num_unstored: int = 0


@dataclass(frozen=True, slots=True)
class LeaseBegun:
    """From a replica: a lease, named by its key, has begun.

    num_recovered: its requests that came from the journal. num_recovered_rows: output rows that they finish. Both are 0
    if the lease `is_stored`. damaged: names of journal segments that cannot be used. Their results run again.
    """

    lease: tuple[int, int]
    num_recovered: int
    num_recovered_rows: int
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseStored:
    """From a replica: the journal has the results of all rows of a lease, named by its key, that is not a whole shard.

    num_rows: its output rows, as `Progress` has counted them. errors: its results with an error, by type.
    """

    lease: tuple[int, int]
    num_rows: int
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardClosed:
    """From a replica: a shard that it held whole is a part in `staging/`.

    num_rows: its output rows that `Progress` has counted. errors: their results with an error, by type.
    """

    part: Part
    num_rows: int
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Revoked:
    """From a replica: these leases, named by their keys, were given back, untouched."""

    leases: tuple[tuple[int, int], ...]


DISK_ERROR = "DiskError"


@dataclass(frozen=True, slots=True)
class Tried:
    """From a replica: a trial's group of rows has run, and the engine is alive."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """From a replica, last: why it ends. cause: a line that a user can act on.

    error_type: DISK_ERROR if it cannot write, DriftError if the input has changed: no restart helps then. was_killed: a
    signal from outside ended its engine.
    """

    error_type: str
    cause: str
    exit_code: int
    was_killed: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """From a replica, last: it has journalled its results and ends."""


Command = Work | Assign | Trial | Revoke | Begin | Identified | Stop
Event = (
    StartPhase
    | TakesLeases
    | Ready
    | Progress
    | LeaseBegun
    | LeaseStored
    | ShardClosed
    | Revoked
    | Tried
    | Failed
    | Stopped
)


@dataclass(frozen=True, slots=True)
class InFlightRequest:
    """A request that was in the engine. has_output: its prompt has run and it has a token."""

    row_index: int
    has_output: bool

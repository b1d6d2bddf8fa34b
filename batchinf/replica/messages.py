"""The messages between coordinator and replica: frozen, serialisable, and without rows."""

from dataclasses import dataclass, field

from batchinf.engines.protocol import EngineInfo, EngineStats, RayGroup
from batchinf.manifest.columns import Columns
from batchinf.manifest.lines import Retry
from batchinf.model.lora import Adapter
from batchinf.records import Lease, Part
from batchinf.schedule.shards import Extent

Key = tuple[int, int, int]  # of a lease: `Lease.key`

# Error types of `Failed` that no restart mends, beside DriftError.
DISK_ERROR = "DiskError"
# The error type of rows that must not reach an engine, because they kill it.
CONDEMNED = "engine_death"
# The phase in which the engine itself starts; its log says more. The last phase, after which the engine is up.
STARTING_ENGINE = "starting the engine"
# The engine is up, and the coordinator has not sent `Work` yet, or the replica still opens the input.
WAITING_FOR_INPUT = "waiting for the input"
WARMING_UP = "compiling kernels for the job's shapes"

# -- from the coordinator ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """First: who the replica is, and what its engine needs. Again after `Stopped`, to a replica whose engine is up."""

    replica: int
    incarnation: str
    folder: str
    job_id: str
    spec: str
    """The resolved JobSpec as JSON; the `input` in `Work` replaces its own."""
    model_path: str
    tokenizer_path: str
    revision: str | None
    """The commit if `model_path` is a hub id."""
    cpus: tuple[int, ...] = ()
    """The processor cores that it may use; empty: all that it inherited."""
    adapters: tuple[Adapter, ...] = ()
    """Those that requests may name."""
    ray_group: RayGroup | None = None
    """Where the engine's ranks run if it has several hosts."""


@dataclass(frozen=True, slots=True)
class Work:
    """Once for each `Launch`: all that depends on the input. Right after it, or when the input is known."""

    input: str
    """The resolved section of the spec as JSON."""
    metadata: dict[str, str]
    """For each part's Parquet metadata, beside the versions."""
    source_folder: str
    """Has the results of the scan."""
    taken: tuple[str, ...]
    """Fingerprints of the input's versions, the latest last."""
    extents: tuple[Extent, ...]
    """Of the job; they define the run order."""
    begun_at: str | None
    """When the job began, in ISO format; templates see it as today's date."""
    columns: Columns
    """Those of the job's parts and segments."""
    repairs: tuple[Retry, ...] = ()
    """The retries up to this one, from whose files rows are taken. The job's first run reads its input alone."""
    retry: Retry | None = None
    """The retry whose rows these are; None: those of the first run."""


@dataclass(frozen=True, slots=True)
class Assign:
    """Run these leases after those that you have."""

    leases: tuple[Lease, ...]
    condemned: tuple[tuple[int, str], ...] = ()
    """Rows of these leases that must not reach the engine, because they kill it, each with its error message."""
    progress_s: float = 1.0
    """Send `Progress` this often, in seconds, if it has changed; once a second in any case."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Begin these leases, and run only these rows of them."""

    leases: tuple[Lease, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Give back these leases, if you have not begun them."""

    leases: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class MayStore:
    """The content gate is open: the model's digests are durable, so results may be stored. Only after `Ready`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Journal, admit nothing more, finish running requests for at most `drain_s` seconds, and end."""

    drain_s: float
    keeps_engine: bool = False
    """Do not end, but wait for another `Launch`. All rows are stored."""


Command = Launch | Work | Assign | Trial | Revoke | MayStore | Stop

# -- from a replica ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartPhase:
    """The phase of its start."""

    name: str
    host: str = ""
    """Where it runs; empty: as before."""
    shortage: str = ""
    """From the backend, if no host that is left can hold it, until its next phase: what it asks for, and what there is,
    for people."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is up, and takes leases."""

    engine: EngineInfo
    start_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Totals since it started, about once a second, or more often (`Assign.progress_s`)."""

    num_rows: int
    """Output rows that are finished."""
    errors: dict[str, int]
    """Those of them that failed, by the error's type."""
    num_prompt_tokens: int
    """Of prompts that the engine has run."""
    num_output_tokens: int
    """Generated so far, for unfinished requests too."""
    steps: int
    """Shows that the engine is alive."""
    in_flight: int
    """Requests in the engine."""
    stalled_by_disk_s: float
    engine: EngineStats
    num_waiting: int = 0
    """Requests that are ready for the engine."""
    num_answered: int = 0
    """Output rows that the engine finished, also those whose answers are errors; none from the journal."""
    busy_s: float = 0.0
    """Time in which the engine had requests, in seconds, also in a step that has not ended."""
    num_unstored: int = 0
    """Requests that the engine has finished, and whose results are still being decoded: they are not in `num_rows`."""
    num_inputs: float | None = None
    """The input rows of `num_rows`, with the finished shares of unfinished ones. None: all have the same number."""


@dataclass(frozen=True, slots=True)
class LeaseBegun:
    """A lease has begun. The counts are 0 if the lease `is_stored`."""

    lease: Key
    num_recovered: int
    """Its requests that came from the journal."""
    num_recovered_rows: int
    """Output rows that these finish."""
    damaged: tuple[str, ...] = ()
    """Journal segments that cannot be used. Their results run again."""


@dataclass(frozen=True, slots=True)
class LeaseDone:
    """All rows of a lease are finished. A whole shard is a part in `staging/`; the journal has any other lease."""

    lease: Lease
    num_rows: int
    """Its output rows that `Progress` has counted."""
    errors: dict[str, int] = field(default_factory=dict)
    """Their results with an error, by type."""
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Revoked:
    """These leases were given back, untouched: they become pending again."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Tried:
    """The rows of a trial have run, and the engine is alive."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """Last: why it ends."""

    error_type: str
    """The exception's class; DISK_ERROR if it cannot write."""
    cause: str
    """A line that a user can act on."""
    exit_code: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """Last of an incarnation: it has journalled its results. It ends, or waits for another `Launch`."""


Event = StartPhase | Ready | Progress | LeaseBegun | LeaseDone | Revoked | Tried | Failed | Stopped


@dataclass(frozen=True, slots=True)
class InFlightRequest:
    """A request that was in the engine."""

    row_index: int
    has_output: bool
    """Its prompt has run and it has a token."""

"""A job in its two stages: `PreparedJob` is known without the input, and `Job` with it. `open` makes both."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from batchinf.base.slices import Slice, read_cut
from batchinf.base.storage import Folder
from batchinf.manifest.state import State
from batchinf.manifest.versions import stored_spec
from batchinf.model.lora import Adapter, lora_identity
from batchinf.model.model import Model
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer
from batchinf.source.rows import NewRows, Source
from batchinf.spec.file import SpecFile
from batchinf.spec.job import JobSpec, fields, fingerprint
from batchinf.tasks.base import Task
from batchinf.tasks.registry import task_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """What both stages of a job know."""

    file: SpecFile
    """The spec as given."""
    spec: JobSpec
    """The resolved spec. In a `PreparedJob`, its `input` may not be resolved."""
    task: Task = field(init=False, repr=False, compare=False)
    """The task of `spec`."""
    origins: dict[str, str]
    """Where each value of the sampling comes from."""
    folder: Folder
    """The job's folder, or the slice's own."""
    model: Model
    adapters: tuple[Adapter, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", task_of(self.spec))

    @property
    def slice(self) -> Slice | None:
        return self.file.slice


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob(_Stage):
    """A job without its input: all that its replicas need to start. For a retry, with the first sampling of the job."""

    state: State | None
    """That of a job that has begun."""
    new: NewRows
    """How to treat new rows of the input."""
    limit: int | None
    """`input.limit` in the identity."""
    retry: str | None = None
    """A predicate for the rows that run again."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """The retry's sampling, by the fields of the spec."""
    has_rows: bool = True
    """Whether it is known, without the input, that rows will run. Replicas can start then."""

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of a resumed job if its input is still the same."""
        assert self.state is not None
        return self.identity_of(self.state.header.identity["input"])

    def identity_of(self, input_fingerprint: str) -> dict[str, Any]:
        """The job's identity with this input. See `Job.identity`."""
        identity = {**fields(self.spec, "identity"), "model": self.model.fingerprint, "input": input_fingerprint}
        if self.adapters:
            identity["lora"] = lora_identity(self.spec, self.adapters)
        if self.file.slice is not None:
            identity["slice"] = str(self.file.slice)
        if self.state is not None:
            identity["input.limit"] = self.limit
            header = self.state.header
            identity = _without_later_fields(identity, header.identity, stored_spec(header.spec))
        elif self.file.slice is not None and (cut := read_cut(self.spec.output.folder)) is not None:
            plain = stored_spec({name: {"path": "."} for name in ("input", "output")} | {"model": "."})
            identity = _without_later_fields(identity, cut.identity, plain)
        # Through JSON and back, so that it compares equal to the manifest's identity.
        stored: dict[str, Any] = json.loads(json.dumps(identity))
        return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(_Stage):
    """A job with its spec resolved and its input open."""

    source: Source
    identity: dict[str, Any]
    """What must be unchanged on a resume: flat JSON values by dotted name."""

    @property
    def rows(self) -> range:
        """The positions of the rows that belong to the job, or to its slice."""
        num_rows = self.source.num_rows
        return range(num_rows) if self.slice is None else self.slice.rows(num_rows)

    def prompt_builder(self, state: State | None = None) -> PromptBuilder:
        """Makes prompts of the rows, with the limits that are known without the engine. state: see `begun_at`."""
        tokenizer = load_tokenizer(self.model.tokenizer, self.spec.model.trust_remote_code)
        return self.task.prompt_builder(tokenizer, self.model.vocab_size, begun_at(self, state))

    @property
    def fingerprint(self) -> str:
        """Hash of the identity: 32 hexadecimal digits."""
        return fingerprint(self.identity)


def _without_later_fields(identity: dict[str, Any], begun: Mapping[str, Any], plain: JobSpec) -> dict[str, Any]:
    """The identity without fields that came after the job began, if they have their defaults.

    begun: the identity with which the job, or the other slices of it, began. plain: has the defaults of such fields.
    """
    if identity.keys() <= begun.keys() | {"slice"}:
        return identity
    defaults = fields(plain, "identity")
    return {
        name: value
        for name, value in identity.items()
        if name in begun or name not in defaults or value != defaults[name]
    }


def carried_columns(spec: JobSpec) -> list[str]:
    """Input columns that the output has, too: the id first, then the kept ones."""
    return [*([spec.input.id_column] if spec.input.id_column else []), *spec.output.keep_columns]


def carried_fields(spec: JobSpec, source: Source, version: int = -1) -> list[pa.Field]:
    """These columns as fields of the input: see `Source.read_fields`. version: of the input, whose types count."""
    ids = [] if spec.input.id_column is None else [source.id_field(spec.input.id_column, version)]
    return [*ids, *(source.schemas[version].field(name) for name in spec.output.keep_columns)]


def max_model_len(job: Job) -> int | None:
    """The engine's maximum length, as far as it is known without the engine."""
    return job.spec.length_limit(job.model.max_model_len)


def begun_at(job: Job, state: State | None) -> str | None:
    """When the job began, in ISO format, the same for all of its slices; None for a new job, which has no state."""
    cut = None if job.slice is None else read_cut(job.spec.output.folder)
    return (cut.begun_at if cut is not None else "") or (None if state is None else state.header.created_at)

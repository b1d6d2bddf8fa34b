"""Opens a job: resolves spec, model and input together, and checks that a resumed job is still the same."""

import contextlib
import datetime
import glob
import json
import os
import pathlib
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from batchinf.base import faults
from batchinf.base.errors import DriftError, InputError, OutputError, SpecError
from batchinf.base.slices import Cut, Slice, check_place, job_folder, read_cut, source_folder, write_cut
from batchinf.base.storage import Folder
from batchinf.base.text import size_text
from batchinf.job.columns import refuse_equal_ids, refuse_unstorable
from batchinf.manifest.columns import Columns
from batchinf.manifest.lines import Header
from batchinf.manifest.state import State
from batchinf.manifest.versions import FORMAT_VERSION, stored_spec
from batchinf.model.identity import Model, resolve, resolve_sampling, sampling_defaults, text_section
from batchinf.model.lora import Adapter, lora_identity, resolve_adapters
from batchinf.model.memory import Needs
from batchinf.prompts.builder import TOOLS, check_columns, named_columns, with_tools
from batchinf.prompts.checks import check_order, check_prompts
from batchinf.prompts.encoder import check_token_ids, load_tokenizer
from batchinf.prompts.openai import COLUMNS, NUM_LOOKED_AT, check_batch_models, recognised
from batchinf.prompts.row_sampling import check_sampling_columns
from batchinf.records import Extent, Prompt
from batchinf.schedule.positions import Choice
from batchinf.schedule.shards import choose_rows_per_shard
from batchinf.source.files import InputLocation
from batchinf.source.find import NoInputError
from batchinf.source.formats.lines import OpenAIBatch
from batchinf.source.formats.registry import read_as
from batchinf.source.remote import is_url
from batchinf.source.rows import NewRows, Source, open_source
from batchinf.spec.file import SpecFile
from batchinf.spec.job import JobSpec, fields, fingerprint
from batchinf.tasks.base import Task
from batchinf.tasks.registry import task_of
from batchinf.version import __version__

_NUM_SAMPLED = 256


def objection(task: Task, model: Model, source: Source, rows: range, num_rows: int) -> str | None:
    """The error if the output is estimated above `output.max_output_bytes`; else None.

    task: of the resolved spec. rows: positions, with those of the `num_rows` rows that run among them.
    """
    given, per_row = task.spec.output.max_output_bytes, task.estimated_bytes_per_row()
    limit = task.default_max_output_bytes if given is None else given
    if limit is None:
        return None
    # Prompts are read only near the limit: an estimate without them is assumed to be at most 64 times too low.
    if task.sizes_by_prompts and len(rows) and num_rows * per_row > limit // 64:
        per_row = task.estimated_bytes_per_row(_sample(task, model, source, rows))
    if num_rows * per_row <= limit:
        return None
    default = "" if given else ", the default"
    remedies = ", ".join(["take fewer rows (input.limit)", *task.size_remedies])
    estimate = f"{size_text(num_rows * per_row)} ({size_text(per_row)} each)"
    return (
        f"the output of {num_rows:,} rows is estimated at {estimate}, more than {size_text(limit)}{default}; "
        f"{remedies}, or raise it to {_round_up(num_rows * per_row)}"
    )


def _sample(task: Task, model: Model, source: Source, rows: range) -> list[Prompt]:
    """Valid prompts from all parts of the input."""
    places = np.unique(np.linspace(rows.start, rows.stop - 1, min(len(rows), _NUM_SAMPLED)).astype(np.int64))
    tokenizer = load_tokenizer(model.tokenizer, task.spec.model.trust_remote_code)
    builder = task.prompt_builder(tokenizer, model.vocab_size)
    prompts = builder.build(source.read_rows(places, builder.columns), model.max_model_len)
    return [prompt for prompt in prompts if prompt.error is None]


def _round_up(num_bytes: int) -> int:
    digits = 10 ** max(0, len(str(num_bytes)) - 2)
    return int(-(-num_bytes // digits) * digits)


@dataclass(frozen=True, slots=True)
class Job:
    """A job with its spec resolved.

    origins: where each value of the sampling comes from. identity: what must be unchanged on a resume, as flat JSON
    values by dotted name. slice: if the job runs in slices; `folder` is then the slice's own.
    """

    spec: JobSpec
    origins: dict[str, str]
    folder: Folder
    model: Model
    source: Source
    identity: dict[str, Any]
    slice: Slice | None
    adapters: tuple[Adapter, ...]

    @property
    def task(self) -> Task:
        return task_of(self.spec)

    @property
    def location(self) -> InputLocation:
        return location_of(self.spec)

    @property
    def rows(self) -> range:
        """The positions of the rows that belong to the job, or to its slice."""
        num_rows = self.source.num_rows
        return range(num_rows) if self.slice is None else self.slice.rows(num_rows)

    @property
    def fingerprint(self) -> str:
        """Hash of the identity: 32 hexadecimal digits."""
        return fingerprint(self.identity)


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job without its input: all that its replicas need to start.

    file: the spec as given. spec: resolved, except perhaps its `input`. state: of the job to resume. new: how to treat
    new rows of the input. limit: `input.limit` in the identity. The others are as in `Job`.
    """

    file: SpecFile
    spec: JobSpec
    origins: dict[str, str]
    folder: Folder
    model: Model
    adapters: tuple[Adapter, ...]
    state: State | None
    new: NewRows
    limit: int | None

    def over(self, rows: Sequence[Mapping[str, object]]) -> "PreparedJob":
        """The job over an input with such rows. Raises SpecError if they lack what the spec needs."""
        if not any(rows):  # none of them can be read; later ones may be
            return self
        with placing(self.file):
            spec = self._with_columns({name: None for row in rows for name in row})
            check_batch_models(spec, rows)
            return replace(self, spec=spec)

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of a resumed job if its input is still the same."""
        assert self.state is not None
        return self._identity(self.spec, self.state.header.identity["input"])

    def _with_columns(self, columns: Iterable[str]) -> JobSpec:
        """The spec with its `input` resolved. Raises SpecError if the input lacks a column."""
        names, spec = list(columns), self.spec
        # A job that has begun keeps its tools, or none.
        input = recognised(spec.input, names)
        spec = spec.model_copy(update={"input": with_tools(input, names) if self.state is None else input})
        task = task_of(spec)
        task.check_input()
        check_columns(spec, names, task.input_columns)
        check_order(spec)
        return _with_backend(spec, {} if self.state is None else self.state.header.identity)

    def _identity(self, spec: JobSpec, input: str) -> dict[str, Any]:
        identity = {**fields(spec, "identity"), "model": self.model.fingerprint, "input": input}
        if self.adapters:
            identity["lora"] = lora_identity(spec, self.adapters)
        if self.file.slice is not None:
            identity["slice"] = str(self.file.slice)
        if self.state is not None:
            identity["input.limit"] = self.limit
            identity = _without_later_fields(identity, self.state.header)
        # Through JSON and back, so that it compares equal to the manifest's identity.
        found: dict[str, Any] = json.loads(json.dumps(identity))
        return found

    def open(self, cache: pathlib.Path | None = None) -> Job:
        """Scan the input, or find that it is the known one. cache: replaces the output folder's own, for a dry run."""
        with placing(self.file):
            return self._open(cache or source_folder(self.folder, self.file.slice))

    def _open(self, cache: pathlib.Path) -> Job:
        with _refusing_other_job(self.folder, self.spec, self.model, self.state):
            source = open_job_input(self.spec, cache, _taken(self.file, self.state), self.new)
        faults.point("job.input_open")
        if not source.schema.names:
            with contextlib.closing(source):
                [first] = source.read(0, 1)
            raise InputError(f"{self.spec.input.path}: no row can be read; the first: {first.error}")
        spec = self._with_columns(source.schema.names)
        check_sampling_columns(spec.sampling, source.schema)
        refuse_unstorable(spec, source.schema)
        if spec.input.id_column is not None and (self.state is None or self.new == "take"):
            refuse_equal_ids(spec.input.id_column, source)
        if self.state is None and spec.input.is_batch_file:
            rows = source.read(0, min(source.num_rows, NUM_LOOKED_AT), COLUMNS)
            check_batch_models(spec, [row.values for row in rows])
        if self.state is None:  # the output of a begun job keeps its columns
            task_of(spec).output_schema(_carried_fields(spec, source))
        identity = self._identity(spec, source.fingerprints[0])
        return Job(spec, self.origins, self.folder, self.model, source, identity, self.file.slice, self.adapters)


def prepare_job(file: SpecFile, state: State | None = None, new: NewRows = "refuse") -> PreparedJob:
    """Resolve model and sampling, and check all of the spec that does not depend on the input.

    state: of the job to resume, with its model's commit. new: how to treat new rows of the input.
    """
    with placing(file):
        return _prepare_job(file, state, new)


def open_job(
    file: SpecFile, cache: pathlib.Path | None = None, state: State | None = None, new: NewRows = "refuse"
) -> Job:
    """Resolve model and sampling and open the input; see `prepare_job` and `PreparedJob.open`."""
    return prepare_job(file, state, new).open(cache)


@contextlib.contextmanager
def placing(file: SpecFile) -> Iterator[None]:
    """If a SpecError begins with a field's name, add the field's line and column. The same for NoInputError."""
    try:
        yield
    except NoInputError as error:
        raise NoInputError(file.line("input.path", str(error))) from error
    except SpecError as error:
        field = re.match(r"[a-z_]+(\.[a-z_]+|\[[0-9]+\])+(?=[:,])", str(error))
        if field is None:
            raise
        raise SpecError(file.line(field[0], "") + str(error)[field.end() :]) from error


def _began_as(file: SpecFile, state: State | None) -> Mapping[str, Any]:
    """The identity of the folder's job, or what its slices share; empty for a new job."""
    if state is not None:
        return state.header.identity
    cut = read_cut(file.spec.output.path) if file.slice is not None else None
    return {} if cut is None else cut.identity


def with_length(file: SpecFile, length: Any) -> SpecFile:
    """The spec with this number in place of `auto` for `engine.max_model_len`; as it is if `length` is no number."""
    if not file.spec.has_auto_length or not isinstance(length, int):
        return file
    spec = file.spec.model_copy(update={"engine": {**file.spec.engine, "max_model_len": length}})
    return replace(file, spec=spec)


_STRUCTURES_CONFIG = "structured_outputs_config"
# It enforces most keywords of JSON Schema, and says which ones it does not have. It compiles a schema in a few
# milliseconds, where xgrammar may take seconds; a mask costs it more: `benchmarks/structures.py`.
_BACKEND = "guidance"


def _with_backend(spec: JobSpec, began_as: Mapping[str, Any]) -> JobSpec:
    """The spec with a fixed backend for structured outputs, if it has or may have some and names none.

    Without a name, vLLM takes the backend that suits an engine's first structure for all later ones too, and ignores
    parts of them. began_as: the identity of a job that has begun, which keeps what it has.
    """
    config = dict(spec.engine.get(_STRUCTURES_CONFIG) or {})
    has_structures = spec.sampling.structured_outputs is not None or spec.input.is_batch_file
    if spec.scripted is not None or not has_structures or config.get("backend", "auto") != "auto":
        return spec
    before = began_as.get(f"engine.{_STRUCTURES_CONFIG}") or {}
    backend = before.get("backend", "auto") if began_as else _BACKEND
    if backend == "auto":
        return spec
    return spec.model_copy(update={"engine": {**spec.engine, _STRUCTURES_CONFIG: {**config, "backend": backend}}})


def check_output_apart(spec: JobSpec) -> None:
    """Raise SpecError if the output folder is in the input folder: the job would read its own files."""
    if is_url(spec.input.path):
        return
    path, out = os.path.realpath(os.path.expanduser(spec.input.path)), pathlib.Path(os.path.realpath(spec.output.path))
    is_read = False
    if os.path.isdir(path):
        inside = os.path.relpath(out, path).split(os.sep)
        # Hidden folders, and those whose names begin with _, are no part of an input folder.
        is_read = inside[0] != os.pardir and not any(len(name) > 1 and name[0] in "._" for name in inside)
    elif glob.has_magic(path):
        root = os.path.dirname(re.split(r"[*?[]", path)[0])
        files = [out / name for name in ("parts/part-000000.parquet", "manifest/000001.jsonl", "status.json")]
        is_read = out.is_relative_to(root) and ("**" in path or any(file.match(path) for file in files))
    if is_read:
        raise SpecError(
            f"output.path: got {spec.output.path}, which lies in the input {spec.input.path}, so that a resume would "
            "read the job's own files as rows; give a folder outside of it"
        )


def _prepare_job(file: SpecFile, state: State | None, new: NewRows) -> PreparedJob:
    check_output_apart(file.spec)
    began_as = _began_as(file, state)
    file = with_length(file, began_as.get("engine.max_model_len"))
    file = replace(file, spec=_with_backend(file.spec, began_as))
    folder = job_folder(file.spec.output.path, file.slice)
    # If the spec names another revision, the old commit does not count.
    is_same = began_as.get("model.revision") == file.spec.model.revision
    model = resolve(file.spec.model, str(began_as.get("model", "")) if is_same else "")
    sampling, origins = file.spec.sampling, dict[str, str]()
    if task_of(file.spec).takes_generation_config:
        sampling, origins = resolve_sampling(sampling, sampling_defaults(model, file.spec.engine))
    check_token_ids("sampling.logprob_token_ids", sampling.logprob_token_ids, model)
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, model)
    spec = task_of(file.spec.model_copy(update={"sampling": sampling})).resolve(model)
    if state is not None and state.header.spec["input"]["format"] == OpenAIBatch.name:
        spec = spec.model_copy(update={"input": recognised(spec.input, COLUMNS)})
    if state is not None:
        begun = with_tools(spec.input, [state.header.spec["input"].get("tools_column")])
        spec = spec.model_copy(update={"input": begun})
    check_prompts(spec, model)
    _check_heads(spec, model)
    adapters = resolve_adapters(
        spec, model, began_as.get("lora"), reads_prompt_logits=task_of(spec).reads_prompt_logits
    )
    with _refusing_other_job(folder, spec, model, state):
        limit = None if state is None else _limit_as_begun(folder, spec.input.limit, state, new)
    return PreparedJob(file, spec, origins, folder, model, adapters, state, new, limit)


@contextlib.contextmanager
def _refusing_other_job(folder: Folder, spec: JobSpec, model: Model, state: State | None) -> Iterator[None]:
    """Shorten a DriftError to one line if the folder holds another job."""
    try:
        yield
    except DriftError:
        if state is not None:
            _refuse_other_job(folder, spec, model, state.header)
        raise


def _check_heads(spec: JobSpec, model: Model) -> None:
    """Raise SpecError for a tensor-parallel size that vLLM would refuse half a minute later."""
    wanted = spec.parallel.tensor_parallel_size
    legal = Needs(None, None, config=text_section(model.config)).tensor_degrees(64)
    if spec.scripted is None and isinstance(wanted, int) and wanted <= 64 and wanted not in legal:
        raise SpecError(
            f"parallel.tensor_parallel_size: got {wanted}, but the heads or the MLP of '{model.name}' cannot be "
            f"divided by it; must be one of {', '.join(map(str, legal))}"
        )


def _refuse_other_job(folder: Folder, spec: JobSpec, model: Model, header: Header) -> None:
    """Raise DriftError, in one line, if the folder's job has another task, or another model and another input.

    Other differences are shown field by field.
    """
    theirs, before = header.spec, header.identity
    is_other_task = fields(spec, "identity")["task"] != before["task"]
    is_other_model = model.fingerprint != before["model"]
    if is_other_task or (is_other_model and spec.input.path != theirs["input"]["path"]):
        raise DriftError(
            f"{folder.root} holds another job: task {theirs['task']} with {theirs['model']['name']} over "
            f"{theirs['input']['path']}, begun {header.created_at}; give this job another output.path, or run it with "
            "--fresh (in Python fresh=True), which keeps the old folder under another name"
        )


def _limit_as_begun(folder: Folder, limit: int | None, state: State, new: NewRows) -> int | None:
    """The limit in the job's identity. Raising the limit does not change the identity.

    Raises DriftError if the limit is lower, or higher without `--extend`.
    """
    begun, last = state.header.identity.get("input.limit"), state.limit
    is_raised = last is not None and (limit is None or limit > last)
    if limit == last or (new == "take" and is_raised):
        return begun
    error = _drift(f"{folder.root} holds a job", {"input.limit": last}, {"input.limit": limit})
    raise DriftError(f"{error}\nwith --extend, input.limit may be raised, but not lowered")


def _without_later_fields(identity: dict[str, Any], header: Header) -> dict[str, Any]:
    """The identity without fields that came after the job began, if they have their defaults."""
    if identity.keys() <= header.identity.keys():
        return identity
    defaults = fields(stored_spec(header.spec), "identity")
    return {
        name: value
        for name, value in identity.items()
        if name in header.identity or name not in defaults or value != defaults[name]
    }


def _taken(file: SpecFile, state: State | None) -> tuple[str, ...]:
    """Fingerprints of the input that the job has taken in. A new slice has that of the other slices."""
    if state is not None:
        return state.source_fingerprints
    cut = read_cut(file.spec.output.path) if file.slice is not None else None
    return () if cut is None else (str(cut.identity.get("input", "")),)


def carried_columns(spec: JobSpec) -> list[str]:
    """Input columns that the output has, too: the id first, then the kept ones."""
    return [*([spec.input.id_column] if spec.input.id_column else []), *spec.output.keep_columns]


def _carried_fields(spec: JobSpec, source: Source) -> list[pa.Field]:
    return [source.schema.field(name) for name in carried_columns(spec)]


def open_job_input(spec: JobSpec, cache: pathlib.Path, taken: Sequence[str], new: NewRows) -> Source:
    """The job's source. See `open_source`."""
    return open_source(replace(location_of(spec), named=_names_in(spec)), cache, taken, new)


def _names_in(spec: JobSpec) -> tuple[str, ...]:
    """The columns that the spec names, and each word of `input.where`, which may name one."""
    try:
        named = [name for _, name in named_columns(spec, task_of(spec).input_columns)]
    except SpecError:  # raised where the spec is checked
        named = []
    words = re.findall(r'"((?:[^"]|"")+)"|([^\W\d]\w*)', spec.input.where or "")
    return (*named, TOOLS, *(quoted.replace('""', '"') or word for quoted, word in words))


def location_of(spec: JobSpec) -> InputLocation:
    where = spec.input
    format = read_as(where.format)
    is_shuffled = where.order != "input"
    return InputLocation(where.path, format, where.split, where.revision, where.name, is_shuffled=is_shuffled)


def new_header(job: Job, num_replicas: int, choice: Choice | None, job_id: str) -> tuple[Header, Extent]:
    """The manifest lines of a new job: its identity, and how its rows are cut into shards.

    choice: the rows that run, whose file is already written; None: all rows. job_id: None: a new one.
    """
    choice = choice or Choice(1, job.rows.start, len(job.rows), job.rows.start, job.rows.stop)
    rows_per_shard = job.spec.output.rows_per_shard
    if rows_per_shard == "auto":
        rows_per_shard = auto_rows_per_shard(job, choice, num_replicas)
    header = Header(
        format_version=FORMAT_VERSION,
        batchinf_version=__version__,
        job_id=job_id,
        created_at=_now(),
        identity=job.identity,
        fingerprint=job.fingerprint,
        layout={
            "rows_per_shard": rows_per_shard,
            **({} if choice.ordered_by == "input" else {"order": choice.ordered_by}),
        },
        spec=job.spec.model_dump(mode="json"),
        columns=Columns.of_new_job(job.task, _carried_fields(job.spec, job.source)),
    )
    return header, choice.extent(rows_per_shard, first_shard=0)


def auto_rows_per_shard(job: Job, choice: Choice, num_replicas: int) -> int:
    """The value of `output.rows_per_shard: auto` for these rows."""
    return choose_rows_per_shard(choice.num_rows, num_replicas, job.task.estimated_bytes_per_row())


def max_model_len(job: Job) -> int | None:
    """The engine's maximum length, as far as it is known without the engine."""
    return job.spec.length_limit(job.model.max_model_len)


def new_job_id() -> str:
    """A unique id: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def begun_at(job: Job, header: Header | None) -> str | None:
    """When the job began, in ISO format, the same for all of its slices; None for a new job."""
    cut = None if job.slice is None else read_cut(job.spec.output.path)
    return (cut.begun_at if cut is not None else "") or (None if header is None else header.created_at)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def check_drift(
    job: Job | PreparedJob, header: Header, identity: dict[str, Any] | None = None, files: Sequence[str] = ()
) -> None:
    """Raise DriftError if the folder holds another job: in one line, or with a line for each difference.

    identity: instead of the job's own. files: lines about files of the model that differ.
    """
    identity = job.identity if identity is None else identity
    if header.fingerprint == fingerprint(identity) and not files:
        return
    _refuse_other_job(job.folder, job.spec, job.model, header)
    raise _drift(f"{job.folder.root} holds a job", header.identity, identity, files)


def files_drift(what: str, files: Sequence[str]) -> DriftError:
    """The error for files of the model that differ. what: holds the job. files: a line for each."""
    return _drift(what, {}, {}, files)


def join_cut(job: Job, num_rows: int, positions: str | None = None) -> None:
    """Join a slice to the others of its output folder. num_rows, positions: of all slices together.

    Raises DriftError if the others began as another job, and OutputError if they run other rows.
    """
    assert job.slice is not None
    out = job.spec.output.path
    check_place(out, job.slice)
    cut = write_cut(out, Cut(job.slice.num_slices, num_rows, _identity_of_all(job), _now(), positions))
    check_cut(job)
    if (cut.num_rows, cut.positions) != (num_rows, positions):
        raise OutputError(
            f"{out}: its slices began with {cut.num_rows:,} chosen rows, but spec and input now choose {num_rows:,} or "
            "others; restore them, or give the job another output.path"
        )


def check_cut(job: Job) -> None:
    """Raise DriftError if the other slices of the output folder began as another job."""
    out = job.spec.output.path
    check_place(out, job.slice)
    identity, cut = _identity_of_all(job), read_cut(out)
    if cut is not None and cut.identity != identity:
        raise _drift(f"{out} holds slices of a job", cut.identity, identity)


def _identity_of_all(job: Job) -> dict[str, Any]:
    return {name: value for name, value in job.identity.items() if name != "slice"}


def _drift(what: str, before: dict[str, Any], now: dict[str, Any], files: Sequence[str] = ()) -> DriftError:
    lines = [
        f"  {name}: the job has {_show(before, name)}, now it is {_show(now, name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return DriftError(
        f"{what} that began with other settings:\n"
        + "\n".join([*lines, *files])
        + (
            "\nset these back to continue the job, or give the new job another output.path; or start a new job with "
            "--fresh (in Python fresh=True), which keeps the old folder under another name"
        )
    )


def _show(identity: dict[str, Any], name: str) -> str:
    if name not in identity or (name == "input.limit" and identity[name] is None):
        return "nothing"
    meanings = {"model": "a model with content ", "input": "an input with content ", "lora": "adapters with content "}
    meaning = meanings.get(name, "")
    return meaning + json.dumps(identity[name], ensure_ascii=False)

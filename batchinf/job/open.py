"""A job as it is opened: spec, model, input and output folder together, and whether it is still the same job."""

import datetime
import json
import pathlib
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchinf.base import faults
from batchinf.base.errors import DriftError, OutputError, SpecError
from batchinf.base.slices import Cut, Slice, check_place, job_folder, read_cut, source_folder, write_cut
from batchinf.base.storage import Folder
from batchinf.base.text import size_text
from batchinf.manifest.lines import Header
from batchinf.manifest.state import MANIFEST_VERSION, State
from batchinf.model.identity import Model, resolve, resolve_sampling, sampling_defaults
from batchinf.model.lora import Adapter, lora_identity, resolve_adapters
from batchinf.prompts.builder import check_columns, check_sampling_columns
from batchinf.prompts.checks import check_order, check_prompts
from batchinf.prompts.encoder import check_token_ids, load_tokenizer
from batchinf.prompts.openai import check_batch_models, recognised
from batchinf.records import Extent, Prompt
from batchinf.schedule.selection import Choice
from batchinf.schedule.shards import choose_rows_per_shard
from batchinf.source.files import InputLocation
from batchinf.source.formats.registry import read_as
from batchinf.source.rows import NewRows, Source, open_source
from batchinf.spec.file import SpecFile
from batchinf.spec.job import JobSpec, fields, fingerprint
from batchinf.tasks.base import Task
from batchinf.tasks.registry import task_of

_NUM_SAMPLED = 256


def objection(task: Task, model: Model, source: Source, rows: range, num_rows: int) -> str | None:
    """The error if the output is estimated above `output.max_output_bytes`; else None.

    task: of the resolved spec. rows: the `num_rows` that are run are among them.
    """
    given, per_row = task.spec.output.max_output_bytes, task.num_rows_per_input * task.estimated_bytes_per_row()
    limit = task.default_max_output_bytes if given is None else given
    if limit is None:
        return None
    # An estimate without prompts is never off by more.
    if task.sizes_by_prompts and len(rows) and num_rows * per_row > limit // 64:
        per_row = task.estimated_bytes_per_row(_sample(task, model, source, rows))
    if num_rows * per_row <= limit:
        return None
    default = "" if given else ", which holds where the spec is silent"
    remedies = ", ".join(["take fewer rows (input.limit)", *task.size_remedies])
    estimate = f"{size_text(num_rows * per_row)} ({size_text(per_row)} each)"
    return (
        f"the output of {num_rows:,} rows is estimated at {estimate}, more than {size_text(limit)}{default}; "
        f"{remedies}, or raise it to {_round_up(num_rows * per_row)}"
    )


def _sample(task: Task, model: Model, source: Source, rows: range) -> list[Prompt]:
    """Prompts without errors from all over the input."""
    places = np.unique(np.linspace(rows.start, rows.stop - 1, min(len(rows), _NUM_SAMPLED)).astype(np.int64))
    tokenizer = load_tokenizer(model.tokenizer, task.spec.model.trust_remote_code)
    builder = task.prompt_builder(tokenizer, model.vocab_size)
    prompts = builder.build(source.read_rows(places, builder.columns), model.max_model_len)
    return [prompt for prompt in prompts if prompt.error is None]


def _round_up(num_bytes: int) -> int:
    digits = 10 ** max(0, len(str(num_bytes)) - 2)
    return int(-(-num_bytes // digits) * digits)


OnModelFound = Callable[[JobSpec, Model, tuple[Adapter, ...]], object]


@dataclass(frozen=True, slots=True)
class Job:
    """What the user asked for, resolved. `spec` has its sampling filled in; `origins` says where each value is from.

    identity: all that a resume must find unchanged, as flat JSON values by dotted name. slice: which one this is, where
    the job is run in slices; `folder` is its own then.
    """

    spec: JobSpec
    origins: dict[str, str]
    folder: Folder
    model: Model
    source: Source
    identity: dict[str, Any]
    slice: Slice | None = None
    adapters: tuple[Adapter, ...] = ()

    @property
    def task(self) -> Task:
        """What it does with each row."""
        return task_of(self.spec)

    @property
    def location(self) -> InputLocation:
        """Where its input is."""
        return location_of(self.spec)

    @property
    def rows(self) -> range:
        """The rows that are to be run, by their positions in the input."""
        num_rows = self.source.num_rows
        return range(num_rows) if self.slice is None else self.slice.rows(num_rows)

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that stand for the identity."""
        return fingerprint(self.identity)


def open_job(
    file: SpecFile,
    cache: pathlib.Path | None = None,
    state: State | None = None,
    new: NewRows = "refuse",
    found: OnModelFound | None = None,
) -> Job:
    """Resolve model and sampling and open the input. `cache`: in place of the output folder's own, for a dry run.

    state: of the job that is gone on with, its model's commit too. new: what becomes of rows that came since. found: is
    told, before the input is read, of all that does not depend on it: the spec resolved but for its `input`, the model,
    the adapters.
    """
    try:
        return _open_job(file, cache, state, new, found)
    except SpecError as error:
        field = re.match(r"[a-z_]+(\.[a-z_]+|\[[0-9]+\])+(?=[:,])", str(error))
        if field is None:
            raise
        raise SpecError(file.line(field[0], "") + str(error)[field.end() :]) from error


def _began_as(file: SpecFile, state: State | None) -> Mapping[str, Any]:
    """The identity of the folder's job, or what its slices have in common; empty where it has yet to begin."""
    if state is not None:
        return state.header.identity
    cut = read_cut(file.spec.output.path)
    return {} if cut is None else cut.identity


def _open_job(
    file: SpecFile,
    cache: pathlib.Path | None,
    state: State | None,
    new: NewRows,
    found: OnModelFound | None,
) -> Job:
    began_as = _began_as(file, state)
    folder = job_folder(file.spec.output.path, file.slice)
    # Another revision in the spec is another model.
    is_same = began_as.get("model.revision") == file.spec.model.revision
    model = resolve(file.spec.model, str(began_as.get("model", "")) if is_same else "")
    sampling, origins = file.spec.sampling, dict[str, str]()
    if task_of(file.spec).takes_generation_config:
        sampling, origins = resolve_sampling(sampling, sampling_defaults(model, file.spec.engine))
    check_token_ids("sampling.logprob_token_ids", sampling.logprob_token_ids, model)
    spec = task_of(file.spec.model_copy(update={"sampling": sampling})).resolve(model)
    check_prompts(spec, model)
    adapters = resolve_adapters(
        spec, model, began_as.get("lora"), reads_prompt_logits=task_of(spec).reads_prompt_logits
    )
    if found is not None:
        found(spec, model, adapters)
    try:
        # Before the input is looked at, which may have grown too.
        limit = None if state is None else _limit_as_begun(folder, spec.input.limit, state, new)
        source = open_job_input(spec, cache or source_folder(folder, file.slice), _taken(file, state), new)
    except DriftError:
        if state is not None:
            _refuse_other_job(folder, spec, model, state.header)
        raise
    faults.point("job.input_open")
    spec = spec.model_copy(update={"input": recognised(spec.input, source.schema.names)})
    task = task_of(spec)
    task.check_input()
    check_columns(spec, source.schema.names, task.input_columns)
    check_sampling_columns(spec.sampling, source.schema)
    if state is None:
        check_batch_models(spec, source)
    check_order(spec)
    task.output_schema([source.schema.field(name) for name in carried_columns(spec)])
    identity = {**fields(spec, "identity"), "model": model.fingerprint, "input": source.fingerprints[0]}
    if adapters:
        identity["lora"] = lora_identity(spec, adapters)
    if file.slice is not None:
        identity["slice"] = str(file.slice)
    if state is not None:
        identity["input.limit"] = limit
    # Through JSON and back, so that it compares equal to what the manifest gives.
    identity = json.loads(json.dumps(identity))
    return Job(spec, origins, folder, model, source, identity, file.slice, adapters)


def _refuse_other_job(folder: Folder, spec: JobSpec, model: Model, header: Header) -> None:
    """Raise DriftError, in one line, where the folder's job has nothing to do with this one.

    It has another task, or another model over another input. What differs otherwise is shown field by field.
    """
    theirs, before = header.spec, header.identity
    is_other_task = fields(spec, "identity")["task"] != before["task"]
    is_other_model = model.fingerprint != before["model"]
    if is_other_task or (is_other_model and spec.input.path != theirs["input"]["path"]):
        raise DriftError(
            f"{folder.root} holds another job: task {theirs['task']} with {theirs['model']['name']} over "
            f"{theirs['input']['path']}, begun {header.created_at}; give this job another output.path, or run it with "
            "--fresh, which keeps the old folder under another name"
        )


def _limit_as_begun(folder: Folder, limit: int | None, state: State, new: NewRows) -> int | None:
    """What the job's identity says of the limit: one that was raised, or is now, is the same job's.

    Raises DriftError where it is lowered, or raised without `--extend`.
    """
    begun, last = state.header.identity.get("input.limit"), state.limit
    is_raised = last is not None and (limit is None or limit > last)
    if limit == last or (new == "take" and is_raised):
        return begun
    error = _drift(f"{folder.root} holds a job", {"input.limit": last}, {"input.limit": limit})
    raise DriftError(f"{error}\nwith --extend, input.limit may be raised, but not lowered")


def _taken(file: SpecFile, state: State | None) -> tuple[str, ...]:
    """What the job has taken in of its input; a slice that has not begun takes what the others did."""
    if state is not None:
        return state.source_fingerprints
    cut = read_cut(file.spec.output.path) if file.slice is not None else None
    return () if cut is None else (str(cut.identity.get("input", "")),)


def carried_columns(spec: JobSpec) -> list[str]:
    """Input columns that the output has too: the id first, then the kept ones."""
    return [*([spec.input.id_column] if spec.input.id_column else []), *spec.output.keep_columns]


def open_job_input(spec: JobSpec, cache: pathlib.Path, taken: Sequence[str] = (), new: NewRows = "refuse") -> Source:
    """The job's source; what its scan finds is kept in `cache`. See `open_source`."""
    return open_source(location_of(spec), cache, taken, new)


def location_of(spec: JobSpec) -> InputLocation:
    """Where a job's input is."""
    where = spec.input
    format = read_as(where.format)
    return InputLocation(where.path, format, where.split, where.revision, where.name, where.order != "input")


def new_header(
    job: Job, num_replicas: int, choice: Choice | None = None, job_id: str | None = None
) -> tuple[Header, Extent]:
    """What is written once, at a job's first start: its identity, and how its rows are cut.

    choice: the rows that are run, their bitmap written; None is all of the job's. job_id: None is a new one.
    """
    choice = choice or Choice(job.rows.start, len(job.rows), job.rows.start, job.rows.stop)
    rows_per_shard = job.spec.output.rows_per_shard
    if rows_per_shard == "auto":
        rows_per_shard = choose_rows_per_shard(choice.num_rows, num_replicas, job.task.estimated_bytes_per_row())
    header = Header(
        format_version=MANIFEST_VERSION,
        job_id=job_id or new_job_id(),
        created_at=_now(),
        identity=job.identity,
        fingerprint=job.fingerprint,
        layout={
            "rows_per_shard": rows_per_shard,
            **({} if choice.ordered_by == "input" else {"order": choice.ordered_by}),
        },
        spec=job.spec.model_dump(mode="json"),
    )
    return header, choice.extent(rows_per_shard, first_shard=0)


def new_job_id() -> str:
    """32 hexadecimal digits, those of no other job."""
    return uuid.uuid4().hex


def begun_at(job: Job, header: Header | None) -> str | None:
    """When the job was begun, in ISO format, the same for all of its slices; None for one that has yet to begin."""
    cut = None if job.slice is None else read_cut(job.spec.output.path)
    return (cut.begun_at if cut is not None else "") or (None if header is None else header.created_at)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def check_drift(job: Job, header: Header) -> None:
    """Raise DriftError where the folder's job is not this one: in one line, or with each difference on a line."""
    if header.fingerprint == job.fingerprint:
        return
    _refuse_other_job(job.folder, job.spec, job.model, header)
    raise _drift(f"{job.folder.root} holds a job", header.identity, job.identity)


def join_cut(job: Job, num_rows: int, selection: str | None = None) -> None:
    """Join a slice to the others of its output folder, which run so many rows together.

    Raises DriftError where they began as another job, and OutputError where they run other rows.
    """
    assert job.slice is not None
    out = job.spec.output.path
    check_place(out, job.slice)
    cut = write_cut(out, Cut(job.slice.num_slices, num_rows, _identity_of_all(job), _now(), selection))
    check_cut(job)
    if (cut.num_rows, cut.selection) != (num_rows, selection):
        raise OutputError(
            f"{out}: its slices began with {cut.num_rows:,} rows, and other rows are chosen now, {num_rows:,}; "
            "put back what chose them, or give the job another output.path"
        )


def check_cut(job: Job) -> None:
    """Raise DriftError where the other slices of the output folder began as another job."""
    out = job.spec.output.path
    check_place(out, job.slice)
    identity, cut = _identity_of_all(job), read_cut(out)
    if cut is not None and cut.identity != identity:
        raise _drift(f"{out} holds slices of a job", cut.identity, identity)


def _identity_of_all(job: Job) -> dict[str, Any]:
    return {name: value for name, value in job.identity.items() if name != "slice"}


def _drift(what: str, before: dict[str, Any], now: dict[str, Any]) -> DriftError:
    lines = [
        f"  {name}: the job has {_show(before, name)}, now it is {_show(now, name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return DriftError(
        f"{what} that began with other settings:\n"
        + "\n".join(lines)
        + "\nput these back as they were to go on with it, or give the new job another output.path; or begin anew with "
        "--fresh, which keeps the old folder under another name"
    )


def _show(identity: dict[str, Any], name: str) -> str:
    if name not in identity or (name == "input.limit" and identity[name] is None):
        return "nothing"
    meanings = {"model": "a model with content ", "input": "an input with content ", "lora": "adapters with content "}
    meaning = meanings.get(name, "")
    return meaning + json.dumps(identity[name], ensure_ascii=False)

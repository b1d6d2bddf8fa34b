"""Opens a job: resolves spec and model (`prepare_job`), and then its input (`open_input`). All commands use it."""

import contextlib
import functools
import glob
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
from pydantic import ValidationError

from batchinf.base import faults
from batchinf.base.errors import InputError, SpecError
from batchinf.base.slices import job_folder, source_folder
from batchinf.job.columns import refuse_equal_ids, refuse_unstorable
from batchinf.job.drift import limit_as_begun, refusing_other_job
from batchinf.job.forms import form_of_input, refuse_unused, unused_fields
from batchinf.job.input_job import committed_parts
from batchinf.job.job import Job, PreparedJob, carried_fields
from batchinf.job.resolve import before_model, began_as, with_columns, with_model, with_rows
from batchinf.manifest.state import State
from batchinf.model.lora import refuse_head, resolve_adapters
from batchinf.model.model import Model, resolve, text_section
from batchinf.model.splits import splits_of, why_not_split
from batchinf.prompts.checks import check_order, check_prompts
from batchinf.prompts.openai.lines import (
    COLUMNS,
    NUM_LOOKED_AT,
    all_of,
    check_models,
    check_urls,
    missing_columns,
    url_of,
)
from batchinf.prompts.renderer import TOOLS, check_columns, named_columns
from batchinf.prompts.row_sampling import check_sampling_columns
from batchinf.schedule.predicate import Predicate, PredicateError
from batchinf.source.files import InputLocation, say_on_stderr
from batchinf.source.find import NoInputError
from batchinf.source.formats.lines import JsonLines
from batchinf.source.formats.parquet import Parquet
from batchinf.source.formats.registry import read_as
from batchinf.source.remote import is_url
from batchinf.source.rows import NewRows, Source, first_rows, format_of, open_source
from batchinf.spec.file import SpecFile
from batchinf.spec.input import PROMPT_FORMS, InputSpec
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import Task
from batchinf.tasks.registry import task_of, task_of_url, task_type


def open_job(
    file: SpecFile, cache: pathlib.Path | None = None, state: State | None = None, new: NewRows = "refuse"
) -> Job:
    """Resolve model and sampling and open the input; see `prepare_job` and `open_input`."""
    return open_input(prepare_job(file, state, new), cache)


@contextlib.contextmanager
def naming_lines(file: SpecFile) -> Iterator[None]:
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


# -- without the input -------------------------------------------------------------------------------------------------


def prepare_job(file: SpecFile, state: State | None = None, new: NewRows = "refuse") -> PreparedJob:
    """Resolve model and sampling; check all that does not depend on the input. state: of the job to resume."""
    with naming_lines(file):
        _check_output_apart(file.spec)
        file = before_model(file, state, _task_of_lines)
        identity = began_as(file, state)
        # If the spec names another revision, the old commit does not count.
        is_same = identity.get("model.revision") == file.spec.model.revision
        began_with = str(identity.get("model", "")) if is_same else ""
        model = resolve(file.spec.model, began_with, has_images=file.spec.input.has_images)
        task_type(file.spec).check_images(file.spec)
        file, spec, origins = with_model(file, model, state)
        check_prompts(spec, model)
        check_heads(spec, model)
        _check_retry(file, spec, model)
        adapters = resolve_adapters(spec, model, identity.get("lora"))
        folder = job_folder(file.spec.output.folder, file.slice)
        limit = None
        if state is not None:
            with refusing_other_job(folder, spec, model, state):
                limit = limit_as_begun(folder, spec, state, new)
        job = PreparedJob(
            file=file,
            spec=spec,
            origins=origins,
            folder=folder,
            model=model,
            adapters=adapters,
            state=state,
            new=new,
            limit=limit,
        )
        if job.task.reads_prompt_logits:
            refuse_head(adapters)
        return job


def _check_retry(file: SpecFile, spec: JobSpec, model: Model) -> None:
    """Raise SpecError if the rows of the section `retry` cannot run with its sampling. spec: resolved."""
    if (retry := spec.retry) is None:
        return
    try:
        JobSpec.model_validate_json(spec.model_dump_json())  # the model has filled fields of sampling
        tried = file.spec.model_copy(update={"sampling": retry.sampling_of(file.spec.sampling), "retry": None})
        _, tried, _ = with_model(replace(file, spec=tried), model, None)
        check_prompts(tried, model)
    except ValidationError as error:
        raise SpecError(f"retry.set: {error.errors()[0]['msg']}") from None
    except SpecError as error:
        raise SpecError(f"retry.set: {error}") from None


def _task_of_lines(spec: JobSpec) -> str | None:
    """The task that the first lines of a batch file ask for; None for another input, or if they ask for none."""
    rows = first_rows(location_of(spec)) or ()
    if missing_columns({name for row in rows for name in row}):
        return None
    return next(filter(None, (task_of_url(url_of(row)) for row in rows)), None)


def _check_lines(spec: JobSpec, task: Task, rows: Sequence[Mapping[str, object]]) -> None:
    """Raise SpecError if all of the first lines of a batch file are for another task, or name another model."""
    if not spec.input.is_batch_file:
        return
    urls = [url_of(row) for row in rows]
    if all(url not in task.batch_urls and task_of_url(url) is not None for url in urls):
        raise SpecError(
            f"task: got {task.name}, but {all_of(rows)} of {spec.input.path} has another kind of request, such as "
            f"{urls[0]}; must be {task_of_url(urls[0])}"
        )
    check_urls(spec.input.path, rows)
    check_models(spec, rows)


def _check_output_apart(spec: JobSpec) -> None:
    """Raise SpecError if the output folder is in the input folder: the job would read its own files."""
    if is_url(spec.input.path):
        return
    path = os.path.realpath(os.path.expanduser(spec.input.path))
    out = pathlib.Path(os.path.realpath(spec.output.folder))
    if _is_read(path, out):
        raise SpecError(
            f"output.path: got {spec.output.path}, which lies in the input {spec.input.path}, so that a resume would "
            "read the job's own files as rows; give a folder outside of it"
        )


def _is_read(path: str, out: pathlib.Path) -> bool:
    """Whether the input, a folder or a glob, has the files of this output folder."""
    if os.path.isdir(path):
        inside = os.path.relpath(out, path).split(os.sep)
        # Hidden folders, and those whose names begin with _, are no part of an input folder.
        return inside[0] != os.pardir and not any(len(name) > 1 and name[0] in "._" for name in inside)
    if not glob.has_magic(path):
        return False
    root = os.path.dirname(re.split(r"[*?[]", path)[0])
    files = [out / name for name in ("parts/part-000000.parquet", "manifest/000001.jsonl", "status.json")]
    return out.is_relative_to(root) and ("**" in path or any(file.match(path) for file in files))


def check_heads(spec: JobSpec, model: Model) -> None:
    """Raise SpecError for a tensor-parallel size that vLLM would refuse half a minute later."""
    size = spec.parallel.tensor_parallel_size
    splits = splits_of(text_section(model.config), spec.engine)
    if spec.scripted is not None or not isinstance(size, int) or (why := why_not_split(splits, size)) is None:
        return
    legal = [degree for degree in range(1, 65) if why_not_split(splits, degree) is None]
    raise SpecError(
        f"parallel.tensor_parallel_size: got {size}, but {why} in '{model.name}'; must be one of "
        f"{', '.join(map(str, legal))}"
    )


def prepare_run(file: SpecFile, state: State | None, new: NewRows) -> PreparedJob:
    """See `prepare_job`. A new job is checked against the first rows of its input, too."""
    prepared = prepare_job(file, state, new)
    return prepared if state is not None else _over_first_rows(prepared)


def _over_first_rows(prepared: PreparedJob) -> PreparedJob:
    """The new job, checked against the first rows of its input; without rows, it is returned as it is."""
    file = prepared.file
    where = file.spec.input.where
    with naming_lines(file):
        rows = first_rows(location_of(file.spec))
    if rows is None:
        return prepared
    try:
        prepared = over_rows(prepared, rows)
        refuse_unused(prepared.spec, form_of_input(prepared.spec, location_of(file.spec)))
        if where is not None:
            Predicate(where, pa.schema({name: pa.null() for row in rows for name in row}.items()), "input")
    except (SpecError, PredicateError):
        # Later rows may be other ones: the scan decides, and replicas wait for it.
        return replace(prepared, has_rows=False)
    return prepared


def over_rows(prepared: PreparedJob, rows: Sequence[Mapping[str, object]]) -> PreparedJob:
    """The job over an input with such rows. Raises SpecError if they lack what the spec needs."""
    if not any(rows):  # none of them can be read; later ones may be
        return prepared
    with naming_lines(prepared.file):
        prepared = _with_columns(prepared, {name: None for row in rows for name in row})
        _check_lines(prepared.spec, prepared.task, rows)
        return prepared


def _with_columns(prepared: PreparedJob, columns: Iterable[str]) -> PreparedJob:
    """The job with the `input` of its spec resolved. Raises SpecError if the input lacks a column."""
    names = list(columns)
    spec = with_columns(prepared.spec, names, prepared.state)
    if spec.input.is_batch_file:
        _check_is_lines(prepared.spec)
    if spec != prepared.spec:
        prepared = replace(prepared, spec=spec)
    prepared.task.check_input()
    check_columns(spec, names, prepared.task.input_columns)
    check_order(spec)
    return prepared


def _check_is_lines(spec: JobSpec) -> None:
    """Raise SpecError if the rows of a batch file are in files of another format."""
    found = format_of(location_of(spec))
    if found not in (None, JsonLines.name):
        raise SpecError(
            f"input.path: {spec.input.path} has the columns of an OpenAI batch file ({', '.join(COLUMNS)}), but its "
            f"format is {found}; such files are JSON lines: write it as rows.jsonl, or name the prompt's column, as in "
            "input.prompt_column"
        )


# -- with the input ----------------------------------------------------------------------------------------------------


def open_input(
    prepared: PreparedJob, cache: pathlib.Path | None = None, say: Callable[[str], None] = say_on_stderr
) -> Job:
    """Scan the input, or find that it is the known one.

    cache: replaces the output folder's own, for a dry run. say: see `InputLocation`.
    """
    file = prepared.file
    state = prepared.state
    with naming_lines(file), contextlib.ExitStack() as at_error:
        folder = cache or source_folder(prepared.folder)
        with refusing_other_job(prepared.folder, prepared.spec, prepared.model, state):
            source = open_job_input(prepared.spec, folder, _taken(file, state), prepared.new, say=say)
        at_error.enter_context(contextlib.closing(source))
        faults.point("job.input_open")
        if not source.schema.names:
            [first] = source.read(0, 1)
            raise InputError(f"{prepared.spec.input.path}: no row can be read; the first: {first.error}")
        prepared = _with_columns(prepared, source.schema.names)
        prepared = with_rows(prepared, source, say)
        spec = prepared.spec
        of_input = form_of_input(spec, location_of(spec))
        if state is None:
            refuse_unused(spec, of_input)
        for message in unused_fields(spec, of_input=of_input):
            say(f"note: {message}; this job has begun, so the field is passed over")
        check_sampling_columns(spec.sampling, source.schema)
        refuse_unstorable(spec, source.schema)
        if spec.input.id_column is not None and (state is None or prepared.new == "take"):
            refuse_equal_ids(spec.input.id_column, source)
        if state is None and spec.input.is_batch_file:
            rows = source.read(0, min(source.num_rows, NUM_LOOKED_AT), COLUMNS)
            _check_lines(spec, prepared.task, [row.values for row in rows])
        job = Job(
            file=file,
            spec=spec,
            origins=prepared.origins,
            folder=prepared.folder,
            model=prepared.model,
            source=source,
            identity=prepared.identity_of(source.fingerprints[0]),
            adapters=prepared.adapters,
        )
        if state is None:  # the output of a begun job keeps its columns
            job.task.output_schema(carried_fields(spec, source))
            job.task.check_case(carried_fields(spec, source))
        at_error.pop_all()
        return job


def _taken(file: SpecFile, state: State | None) -> tuple[str, ...]:
    """Fingerprints of the input that the job has taken in. A new slice has that of the other slices."""
    if state is not None:
        return state.source_fingerprints
    identity = began_as(file, None)
    return (str(identity.get("input", "")),) if identity else ()


def location_of(spec: JobSpec) -> InputLocation:
    where = spec.input
    return InputLocation(
        path=where.path,
        format=read_as(where.format) if where.job is None else Parquet.name,
        parts=None if where.job is None else functools.partial(committed_parts, where.job),
        split=where.split,
        revision=where.revision,
        name=where.name,
        csv=None if where.csv is None else where.csv.dialect,
        text_columns=_text_columns(where),
        is_shuffled=where.order != "input",
    )


def _text_columns(where: InputSpec) -> tuple[str, ...]:
    """The columns of which each value is a text: the prompt or a part of it, or the name of an adapter."""
    prompt = "prompt" if not where.given(PROMPT_FORMS) else where.prompt_column
    columns = (prompt, where.context_column, where.continuation_column, where.text_column, where.query_column,
               where.document_column, where.adapter_column)  # fmt: skip
    return tuple(column for column in columns if column is not None)


def open_job_input(
    spec: JobSpec,
    cache: pathlib.Path,
    taken: Sequence[str],
    new: NewRows,
    *,
    say: Callable[[str], None] = say_on_stderr,
) -> Source:
    """The job's source. See `open_source`, and `InputLocation` for `say`."""
    location = replace(location_of(spec), named=_names_in(spec), say=say)
    if spec.input.job is not None and taken and new != "take":
        # The rows that the job knows are all there, even if the other job goes on to further ones.
        location = replace(location, parts=functools.partial(committed_parts, spec.input.job, must_be_done=False))
    return open_source(location, cache, taken, new)


def _names_in(spec: JobSpec) -> tuple[str, ...]:
    """The columns that the spec names, and each word of `input.where`, which may name one."""
    try:
        named = [name for _, name in named_columns(spec, task_of(spec).input_columns)]
    except SpecError:  # raised where the spec is checked
        named = []
    words = re.findall(r'"((?:[^"]|"")+)"|([^\W\d]\w*)', spec.input.where or "")
    return (*named, TOOLS, *(quoted.replace('""', '"') or word for quoted, word in words))

"""The steps in which a spec is resolved, in their order: what the user leaves open gets its value.

`open.py` makes the first three steps, and the start of an epoch the fourth one. A job that has begun keeps its values.

1. Before the model is known: rules, task, length, backend of structured outputs, meaning of answers.
2. By the model: parser of tool calls, sampling, values of the task.
3. By the input: its first rows and then its scan give format and columns; all its rows give the meaning of answers.
4. Before replicas start: a length by the longest row (`model_len.py`), degrees by the devices.

Then `choose_engines` in `fleet/launch.py` chooses the engine arguments that are still open, by the devices of a slot.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from batchinf.base.errors import OutputError, SpecError
from batchinf.base.slices import read_cut
from batchinf.job.job import PreparedJob
from batchinf.manifest.state import State
from batchinf.manifest.versions import older_rules, rules_of
from batchinf.model.model import Model, resolve_sampling, sampling_defaults
from batchinf.prompts.encoder import check_token_ids
from batchinf.prompts.openai.lines import COLUMNS
from batchinf.prompts.openai.requests import may_be_batch, recognised
from batchinf.prompts.renderer import with_tools
from batchinf.prompts.tools import with_tool_parser
from batchinf.source.formats.lines import OPENAI
from batchinf.source.rows import Source
from batchinf.spec.file import SpecFile, with_task
from batchinf.spec.input import InputSpec
from batchinf.spec.job import OLDEST_RULES, JobSpec
from batchinf.tasks.base import Task
from batchinf.tasks.registry import stored_task, task_of, task_type

_STRUCTURES_CONFIG = "structured_outputs_config"
# It enforces most keywords of JSON Schema, and says which ones it does not have. It compiles a schema in a few
# milliseconds, where xgrammar may take seconds; a mask costs it more: `benchmarks/history/processor.md`.
_BACKEND = "guidance"
# The only one that has the structural tags by which vLLM forces most models' calls.
_BACKEND_OF_CALLS = "xgrammar"


def began_as(file: SpecFile, state: State | None) -> Mapping[str, Any]:
    """The identity of the folder's job, or what its slices share; empty for a new job."""
    if state is not None:
        return state.header.identity
    cut = read_cut(file.spec.output.folder) if file.slice is not None else None
    return {} if cut is None else cut.identity


# -- 1. before the model is known --------------------------------------------------------------------------------------


def before_model(file: SpecFile, state: State | None, task_of_lines: Callable[[JobSpec], str | None]) -> SpecFile:
    """The spec after the steps that need no model. task_of_lines: reads the task from the lines of a batch file."""
    identity = began_as(file, state)
    file = _with_rules(file, state)
    file = _with_task(file, state, task_of_lines)
    file = with_length(file, identity.get("engine.max_model_len"))
    spec = _with_backend(file.spec, identity)
    return replace(file, spec=_with_answers(spec, identity.get("input.answers", "auto")))


def _with_rules(file: SpecFile, state: State | None) -> SpecFile:
    """The spec with the rules of the folder's job, or of its other slices, if it has begun.

    Raises OutputError for a slice that has not begun beside slices that began by older rules.
    """
    rules = file.spec.rules
    if state is not None:
        rules = max(rules_of(state.header.spec), OLDEST_RULES)
    elif file.slice is not None and (cut := read_cut(file.spec.output.folder)) is not None:
        rules = cut.rules
        if why := older_rules(rules):
            raise OutputError(f"{file.spec.output.path}: {why} for the slices that have not begun")
    return file if rules == file.spec.rules else replace(file, spec=file.spec.model_copy(update={"rules": rules}))


def _with_task(file: SpecFile, state: State | None, task_of_lines: Callable[[JobSpec], str | None]) -> SpecFile:
    """The spec with the task that a batch file's first line asks for, or that a begun job has, if it names none."""
    spec = file.spec
    if "task" in spec.model_fields_set or not (spec.input.is_batch_file or may_be_batch(spec.input)):
        return file
    default = task_type(spec).name
    if state is None:
        task = task_of_lines(spec) or default
    else:
        is_batch_file = state.header.spec["input"]["format"] == OPENAI
        task = stored_task(state.header.spec).name if is_batch_file else default
    return with_task(file, task) if task != default else file


def with_length(file: SpecFile, length: Any) -> SpecFile:
    """The spec with this number in place of `auto` for `engine.max_model_len`; as it is if `length` is no number."""
    if not isinstance(length, int) or not file.spec.has_auto_length:
        return file
    spec = file.spec.model_copy(update={"engine": {**file.spec.engine, "max_model_len": length}})
    return replace(file, spec=spec)


def _with_backend(spec: JobSpec, identity: Mapping[str, Any]) -> JobSpec:
    """The spec with a fixed backend for structured outputs, if it has or may have some and names none.

    Without a name, vLLM takes the backend that suits an engine's first structure for all later ones too, and ignores
    parts of them. identity: of a job that has begun, which keeps what it has.
    """
    config = dict(spec.engine.get(_STRUCTURES_CONFIG) or {})
    may_have = spec.may_have_structures and task_of(spec).pooling is None
    if spec.scripted is not None or not may_have or config.get("backend", "auto") != "auto":
        return spec
    before = identity.get(f"engine.{_STRUCTURES_CONFIG}") or {}
    chosen = _BACKEND if spec.model.tool_parser is None else _BACKEND_OF_CALLS
    backend = before.get("backend", "auto") if identity else chosen
    if backend == "auto":
        return spec
    return spec.model_copy(update={"engine": {**spec.engine, _STRUCTURES_CONFIG: {**config, "backend": backend}}})


def _with_answers(spec: JobSpec, answers: str) -> JobSpec:
    """The spec with this meaning of the answers in place of `auto`."""
    if spec.input.answers != "auto":
        return spec
    return spec.model_copy(update={"input": spec.input.model_copy(update={"answers": answers})})


# -- 2. by the model ---------------------------------------------------------------------------------------------------


def with_model(file: SpecFile, model: Model, state: State | None) -> tuple[SpecFile, JobSpec, dict[str, str]]:
    """The steps that need the model. Returns the spec as given, and as resolved, and where its sampling comes from."""
    task = task_type(file.spec)
    file = replace(file, spec=_with_tool_parser(task, file.spec, model))
    spec, origins = _with_sampling(task, file.spec, model)
    if state is not None:
        spec = spec.model_copy(update={"input": _as_begun(spec.input, state)})
    return file, task.resolve(spec, model), origins


def _with_tool_parser(task: type[Task], spec: JobSpec, model: Model) -> JobSpec:
    """The spec with the parser's name in place of `auto`. Raises SpecError, also for a task without texts."""
    if spec.model.tool_parser is not None and not task.makes_text:
        got = f"got '{spec.model.tool_parser}'; must be left out with task {task.name}, which makes no text"
        raise SpecError(f"model.tool_parser: {got}")
    named = with_tool_parser(spec.model, model, spec.input.chat_template)
    return spec.model_copy(update={"model": named})


def _with_sampling(task: type[Task], spec: JobSpec, model: Model) -> tuple[JobSpec, dict[str, str]]:
    """The spec with the model's own sampling, and where each value comes from. Checks the token ids."""
    sampling = spec.sampling
    origins: dict[str, str] = {}
    if task.takes_generation_config:
        sampling, origins = resolve_sampling(sampling, sampling_defaults(model, spec.engine))
    check_token_ids("sampling.logprob_token_ids", sampling.logprob_token_ids, model)
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, model)
    check_token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids or (), model)
    check_token_ids("sampling.logit_bias", tuple(sampling.logit_bias), model)
    return spec.model_copy(update={"sampling": sampling}), origins


def _as_begun(where: InputSpec, state: State) -> InputSpec:
    """The section with the format and the column of tools that a begun job has."""
    stored = state.header.spec["input"]
    where = recognised(where, COLUMNS) if stored["format"] == OPENAI else where
    return with_tools(where, [stored.get("tools_column")])


# -- 3. by the input ---------------------------------------------------------------------------------------------------


def with_columns(spec: JobSpec, names: Iterable[str], state: State | None) -> JobSpec:
    """The spec over an input with these columns: a batch file is recognised, and tools have their column.

    A job that has begun keeps its tools, or none.
    """
    columns = list(names)
    where = recognised(spec.input, columns)
    spec = spec.model_copy(update={"input": with_tools(where, columns) if state is None else where})
    return _with_backend(spec, {} if state is None else state.header.identity)


def with_rows(prepared: PreparedJob, source: Source, say: Callable[[str], None]) -> PreparedJob:
    """The job with the values that its task reads from all rows, for a job that begins."""
    if began_as(prepared.file, prepared.state):
        return prepared
    return replace(prepared, spec=prepared.task.settle(prepared.spec, source, say))


# -- 4. before replicas start ------------------------------------------------------------------------------------------


def with_longest(prepared: PreparedJob, length: int, answers: str) -> PreparedJob:
    """The job with this length, and with the meaning of answers that the pass over its rows found."""
    file = with_length(prepared.file, length)
    where = prepared.spec.input.model_copy(update={"answers": answers})
    spec = prepared.spec.model_copy(update={"engine": file.spec.engine, "input": where})
    return replace(prepared, file=file, spec=spec)


def with_known_degrees(
    prepared: PreparedJob, with_degrees: Callable[[SpecFile, Mapping[str, Any] | None], SpecFile]
) -> PreparedJob:
    """The job with numbers in place of `auto` for the tensor and pipeline-parallel sizes.

    with_degrees: chooses them on a backend's devices, also given the section `parallel` of a begun job.
    """
    begun_with = None if prepared.state is None else prepared.state.header.spec["parallel"]
    file = with_degrees(prepared.file, begun_with)
    if file is prepared.file:
        return prepared
    spec = prepared.spec.model_copy(update={"parallel": file.spec.parallel})
    return replace(prepared, file=file, spec=spec)

"""`batchinf validate`: checks spec, input, columns, model and prompts without an engine or a GPU.

Each check yields a finding, which is shown before a later check fails. `text.validate` makes lines of findings.
"""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from batchinf.base.errors import DriftError, RowError
from batchinf.base.slices import SOURCE_FOLDER, read_cut
from batchinf.base.storage import Folder
from batchinf.commands.shown_rows import (
    LengthCounts,
    PromptLengths,
    ShownRow,
    find_row,
    random_rows,
    shown_row,
)
from batchinf.engines.installed import RowStructures, check_structures, is_cpu_build
from batchinf.fleet.backend import Backend
from batchinf.fleet.launcher import choose_backend
from batchinf.fleet.parallel import check_devices, check_processor, devices_note, with_degrees
from batchinf.job.choose import choose, chosen_by
from batchinf.job.columns import column_warnings
from batchinf.job.disk_space import check_size, room_warning
from batchinf.job.model_len import length_warning, with_known_length
from batchinf.job.open import Job, begun_at, check_drift, max_model_len, open_job, placing, prepare_job
from batchinf.job.sample import hopeless, sample_rows
from batchinf.manifest.names import others_note
from batchinf.manifest.state import State, read_state
from batchinf.model.identity import check_weights
from batchinf.model.lora import Adapter
from batchinf.model.memory import DEFAULT_GPU_MEMORY_UTILIZATION, Fit, fit_of, on_cpu
from batchinf.prompts.checks import EmptyValues, empty_files_note, repeated_id_warning
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt
from batchinf.schedule.positions import Choice, RunOrder
from batchinf.source.rows import NewRows
from batchinf.spec.file import SpecFile
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

_LONG = 1 << 30  # assumed room in tokens if it is unknown


@dataclass(frozen=True, slots=True)
class RowsToShow:
    """Which rows to show: the first `num_rows`, or as many at random if there is a `seed`, or the named ones."""

    num_rows: int
    named: tuple[str, ...]
    seed: int | None


@dataclass(frozen=True, slots=True)
class SpecFound:
    """The spec is valid."""

    path: str


@dataclass(frozen=True, slots=True)
class ModelFound:
    """The model is complete. commit: on the hub; None: a folder. fit: its memory on one device of this host."""

    name: str
    architectures: tuple[str, ...]
    commit: str | None
    path: str
    fingerprint: str
    adapters: tuple[Adapter, ...]
    gpu_memory_utilization: float
    fit: Fit


@dataclass(frozen=True, slots=True)
class InputFound:
    """The input can be read. columns: their Arrow types by name."""

    path: str
    num_rows: int
    fingerprint: str
    columns: dict[str, str]


@dataclass(frozen=True, slots=True)
class RowsChosen:
    """Number of rows that `where`, `sample`, `exclude` and `limit` choose. chosen_by: these fields, in words."""

    chosen_by: str
    num_rows: int
    num_input_rows: int


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of sampling. origin: the source of its value: `spec`, `generation_config` or `default`."""

    name: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class TaskFound:
    """The task, and what it stores of each row.

    stores: in words; empty if the sampling says enough. sampling: None if the task makes no text. row_sampling: field →
    the column with each row's own value.
    """

    name: str
    stores: str
    sampling: tuple[Setting, ...] | None
    row_sampling: dict[str, str]


@dataclass(frozen=True, slots=True)
class Remark:
    """A line about a setting that is probably a mistake (`warning`), or about structured outputs (`structure`)."""

    kind: Literal["warning", "structure"]
    text: str


@dataclass(frozen=True, slots=True)
class RowsDrawn:
    """The following rows were drawn with this seed."""

    seed: int


@dataclass(frozen=True, slots=True)
class OutputFound:
    """What the output folder holds.

    num_slices: of a job in slices. num_parts: committed parts. drift: why `run` would refuse to resume the job there.
    room_warning: why the disk may be too small. others_note: which other files a new job would find there.
    """

    folder: str
    holds: Literal["nothing", "slices", "done job", "unfinished job"]
    num_slices: int | None
    num_parts: int
    drift: str | None
    room_warning: str | None
    others_note: str | None


ValidateFinding = (
    SpecFound | ModelFound | InputFound | RowsChosen | TaskFound | Remark | PromptLengths | RowsDrawn | ShownRow
    | OutputFound
)  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class ValidateReport:
    """All findings. `print`, and a notebook, show their lines.

    chosen: None if all rows run. seed: of rows drawn at random.
    """

    spec: SpecFound
    model: ModelFound
    input: InputFound
    chosen: RowsChosen | None
    task: TaskFound
    remarks: tuple[Remark, ...]
    prompt_lengths: PromptLengths
    seed: int | None
    rows: tuple[ShownRow, ...]
    output: OutputFound

    @classmethod
    def of(cls, findings: Iterable[ValidateFinding]) -> "ValidateReport":
        """The report of all findings of `validate`."""
        by_type: dict[type, list[Any]] = {}
        for finding in findings:
            by_type.setdefault(type(finding), []).append(finding)
        [drawn] = by_type.get(RowsDrawn, [None])
        [chosen] = by_type.get(RowsChosen, [None])
        return cls(
            spec=by_type[SpecFound][0],
            model=by_type[ModelFound][0],
            input=by_type[InputFound][0],
            chosen=chosen,
            task=by_type[TaskFound][0],
            remarks=tuple(by_type.get(Remark, ())),
            prompt_lengths=by_type[PromptLengths][0],
            seed=None if drawn is None else drawn.seed,
            rows=tuple(by_type.get(ShownRow, ())),
            output=by_type[OutputFound][0],
        )

    def __repr__(self) -> str:
        from batchinf.commands.text.validate import finding_lines  # it imports this module

        drawn = () if self.seed is None else (RowsDrawn(self.seed),)
        chosen = () if self.chosen is None else (self.chosen,)
        first = (self.spec, self.model, self.input, *chosen, self.task, *self.remarks, self.prompt_lengths)
        return "\n".join(line for it in (*first, *drawn, *self.rows, self.output) for line in finding_lines(it))


def validate_job(file: SpecFile, wanted: RowsToShow) -> Iterator[ValidateFinding]:
    """Yield the finding of each check that passes. Raises UserError at the first check that fails.

    The last check is that not all rows of the sample would be error rows.
    """
    folder = Folder(file.spec.output.path)
    state = read_state(folder) if folder.exists("manifest") else None
    remarks: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        # A job that has begun has scanned its input already.
        own = folder.path(SOURCE_FOLDER)
        has_own = own.is_dir()
        cache, known = own if has_own else pathlib.Path(scratch), state if has_own else None
        # For a job that is done, files and rows that have come since do not matter.
        new: NewRows = "leave" if known is not None and known.is_done else "refuse"
        if file.spec.has_auto_length:
            file = with_known_length(prepare_job(file, known, new), remarks.append, cache).file
        file = with_degrees(file, _local(file.spec), remarks.append)
        job = open_job(file, cache, known, new)
        with contextlib.closing(job.source):
            yield SpecFound(str(file.path))
            model = _model(job)
            yield model
            with placing(file):
                remarks += _on_devices(job, model.fit)
            if (warning := length_warning(job.spec, job.model)) is not None:
                remarks.append(warning)
            yield from (Remark("warning", text) for text in remarks)
            yield _input(job)
            yield from (Remark("warning", text) for text in empty_files_note(job.source))
            chosen = None
            if job.spec.input.selects and state is None:
                chosen = choose(job, file, range(job.source.num_rows), job.spec.input.limit, Folder(scratch))
                yield RowsChosen(chosen_by(job), chosen.num_rows, job.source.num_rows)
            num_rows = len(job.rows) if chosen is None else chosen.num_rows
            check_size(file, job, None if state is not None else num_rows)
            yield _task(job)
            yield from (Remark("warning", text) for text in job.task.prompt_warnings(job.model, job.source))
            yield from (Remark("warning", text) for text in column_warnings(job.task, job.source))
            yield from (Remark("warning", text) for text in repeated_id_warning(job.spec, job.source))
            checked = check_structures(dataclasses.replace(file, spec=job.spec), job.model.tokenizer)
            yield from (Remark("structure", text) for text in checked)
            order = None if chosen is None else chosen.order(Folder(scratch))
            lengths = None
            for finding in _prompts(job, wanted, state, order or _positions(job, state)):
                lengths = finding if isinstance(finding, PromptLengths) else lengths
                yield finding
            yield _output(job, folder, state, chosen)
            _refuse_hopeless(lengths, job.spec)


def _model(job: Job) -> ModelFound:
    model = job.model
    check_weights(model, job.spec.model.load_format)
    # All devices are assumed to be alike.
    backend = _local(job.spec)
    device_bytes, device_name = next(map(backend.device_size, backend.devices()), (None, ""))
    spec = job.spec
    if device_bytes is None and is_cpu_build():
        spec, device_name = spec.model_copy(update={"model": on_cpu(spec.model)}), "this machine's processor"
    share = job.spec.engine.get("gpu_memory_utilization") or DEFAULT_GPU_MEMORY_UTILIZATION
    return ModelFound(
        name=model.name,
        architectures=tuple(model.config.get("architectures") or ()),
        commit=model.commit,
        path=model.path,
        fingerprint=model.fingerprint,
        adapters=job.adapters,
        gpu_memory_utilization=float(share),
        fit=fit_of(model, spec, device_bytes, device_name, job.task.default_batch_limits),
    )


def _local(spec: JobSpec) -> Backend:
    # It needs no cluster: devices of other hosts are not looked at.
    return choose_backend(spec.model_copy(update={"backend": "local"}))


def _on_devices(job: Job, fit: Fit) -> Iterator[str]:
    """Warnings about the devices of this host. Raises SpecError for what cannot start on them."""
    if job.spec.scripted is not None or job.spec.backend == "ray":
        return
    backend = _local(job.spec)
    devices = backend.devices()
    if (note := devices_note(devices, is_cpu_build=is_cpu_build())) is not None:
        yield note
    if devices:
        yield from check_devices(job.spec, fit, len(backend.place(job.spec)))
    elif is_cpu_build():
        backend.place(job.spec)
        check_processor(job.spec, fit.max_model_len)


def _input(job: Job) -> InputFound:
    source = job.source
    columns = {field.name: str(field.type) for field in source.schema}
    return InputFound(job.spec.input.path, source.num_rows, source.fingerprint, columns)


def _task(job: Job) -> TaskFound:
    has_sampling = job.task.draws_tokens and not job.task.describe()
    sampling = tuple(_settings(job)) if has_sampling else None
    return TaskFound(job.task.name, job.task.describe(), sampling, dict(job.spec.sampling.columns))


def _settings(job: Job) -> Iterator[Setting]:
    """First the fields that the model's generation_config may set, then the spec's other fields."""
    sampling, origins = job.spec.sampling, job.origins
    for name, origin in origins.items():
        yield Setting(name, getattr(sampling, name), origin)
    others = sampling.model_dump(exclude_defaults=True, exclude={*origins, "columns", "structured_outputs"})
    for name, value in others.items():
        yield Setting(name, value, "spec")


def _positions(job: Job, state: State | None) -> Sequence[int]:
    if state is None or not (order := RunOrder(job.folder, state.extents)).is_whole:
        return job.rows
    return order


def _with_one_sample(spec: JobSpec) -> JobSpec:
    # Only the first request of a row is shown, and a row may have millions.
    return spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"n": 1})})


def _prompts(job: Job, wanted: RowsToShow, state: State | None, positions: Sequence[int]) -> Iterator[ValidateFinding]:
    tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
    begun = begun_at(job, None if state is None else state.header)
    builder, task = (
        job.task.prompt_builder(tokenizer, job.model.vocab_size, begun),
        task_of(_with_one_sample(job.spec)),
    )
    length, id_column = max_model_len(job), job.spec.input.id_column
    named = [find_row(job.source, id_column, text) for text in wanted.named]
    lengths, empty = LengthCounts(len(positions), length, job.spec.sampling.max_tokens), EmptyValues(job.spec)
    structures = RowStructures(job.spec)
    wrong_answers: list[Prompt] = []
    for sampled in sample_rows(positions, wanted.seed or 0):
        rows = job.source.read_rows(np.sort(np.asarray(sampled, np.int64)), builder.columns)
        empty.add(rows)
        for prompt in builder.build(rows, length):
            lengths.add(prompt)
            structures.add(prompt)
            if prompt.scoring is not None and prompt.scoring.answer_error is not None:
                wrong_answers.append(prompt)
    found = lengths.summary()
    yield found
    yield from (Remark("structure", text) for text in structures.lines())
    rate, allowed = sum(error.num_rows for error in found.errors) / max(1, found.num_sampled), job.spec.max_error_rate
    if allowed < rate < 1:
        text = f"warning: {rate:.1%} errors are more than max_error_rate {allowed:.1%}, so that `run` stores all rows"
        yield Remark("warning", f"{text} and then exits with 3; a higher max_error_rate allows this")
    yield from (Remark("warning", text) for text in empty.warnings())
    yield from (Remark("warning", text) for text in _wrong_answers(wrong_answers, len(lengths.lengths)))
    shown = named or list(positions[: wanted.num_rows])
    if wanted.seed is not None and not named:
        shown = random_rows(positions, wanted.num_rows, wanted.seed)
        yield RowsDrawn(wanted.seed)
    sampling = job.spec.sampling if job.task.draws_tokens else None
    columns = list(dict.fromkeys([*builder.columns, *([id_column] if id_column else [])]))
    for position in shown:
        [row] = job.source.read(position, position + 1, columns)
        [prompt] = builder.build([row], length)
        [first, *_] = task.expand(prompt, length or _LONG)
        is_run = position in positions
        row_id = row.values.get(id_column) if id_column else None
        yield shown_row(
            prompt,
            row_id,
            first,
            tokenizer=tokenizer,
            job_sampling=sampling,
            max_model_len=length,
            is_run=is_run,
            is_named=bool(named),
        )


def _wrong_answers(prompts: Sequence[Prompt], num_prompts: int) -> Iterator[str]:
    """A warning of these rows, whose answers are no choices."""
    if not prompts or prompts[0].scoring is None:
        return
    first = f"Row {prompts[0].row_index}: {prompts[0].scoring.answer_error}"
    which = f"{len(prompts):,} of {num_prompts:,} sampled rows have values in input.answer_column that are no choices"
    yield f"warning: {which}; `run` scores them, and their answer is null. {first}"


def _refuse_hopeless(lengths: PromptLengths | None, spec: JobSpec) -> None:
    """Raise UserError if no row of the sample has a prompt, unless `max_error_rate` is 1; `run` does the same."""
    if lengths is not None and lengths.errors and not lengths.histogram and spec.max_error_rate < 1:
        first = lengths.errors[0]
        error = RowError(first.error_type, first.first_message)
        raise hopeless(lengths.num_sampled, lengths.num_rows, first.first_row, error)


def _output(job: Job, folder: Folder, state: State | None, chosen: Choice | None) -> OutputFound:
    found = OutputFound(
        str(folder.root), "nothing", None, 0, None, None, others_note(folder) if state is None else None
    )
    if state is not None:
        holds: Literal["done job", "unfinished job"] = "done job" if state.is_done else "unfinished job"
        found = dataclasses.replace(found, holds=holds, num_parts=len(state.parts), drift=_drift(job, state))
    if (cut := read_cut(str(folder.root))) is not None:
        found = dataclasses.replace(found, holds="slices", num_slices=cut.num_slices)
    if state is not None and state.is_done:
        return found
    warning = room_warning(job, state, 1, None if chosen is None else chosen.num_rows)
    return dataclasses.replace(found, room_warning=warning)


def _drift(job: Job, state: State) -> str | None:
    """The difference to the job in the folder. It is no error: the user may mean a retry or another folder."""
    try:
        check_drift(job, state.header)
    except DriftError as error:
        return str(error)
    return None

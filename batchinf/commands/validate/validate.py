"""`batchinf validate`: checks spec, input, columns, model and prompts without an engine or a GPU.

Each check yields a finding, which is shown before a later check fails.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Literal

from batchinf.base.bucket import StoreError
from batchinf.base.errors import DriftError, RowError
from batchinf.base.slices import SOURCE_FOLDER, read_cut
from batchinf.base.storage import Folder
from batchinf.commands.validate.findings import (
    InputFound,
    ModelFound,
    OutputFound,
    Remark,
    RowsChosen,
    RowsDrawn,
    Setting,
    SpecFound,
    TaskFound,
    ValidateFinding,
)
from batchinf.commands.validate.shown_rows import ShownRow, find_row, random_rows, shown_row
from batchinf.coordinator.retry import check_retry
from batchinf.engines.installed import RowStructures, StructuresCheck, is_cpu_build
from batchinf.fleet.backend import Backend
from batchinf.fleet.launch import choose_backend
from batchinf.fleet.parallel import check_devices, with_degrees
from batchinf.job.choose import choose, chosen_by
from batchinf.job.columns import column_warnings
from batchinf.job.disk_space import check_size, room_warning
from batchinf.job.drift import check_drift
from batchinf.job.job import Job, begun_at, max_model_len
from batchinf.job.model_len import length_warning, with_known_length
from batchinf.job.open import naming_lines, open_input, prepare_job
from batchinf.job.resolve import with_known_degrees
from batchinf.job.sample import hopeless, sampled_rows
from batchinf.manifest.look import Look
from batchinf.manifest.names import others_note
from batchinf.manifest.state import State, read_state
from batchinf.model.memory import fit_of
from batchinf.model.model import check_weights
from batchinf.planning.images import SampledImages
from batchinf.planning.prompt_lengths import LengthCounts, PromptLengths
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.checks import EmptyValues, input_notes, repeated_id_warning
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt
from batchinf.schedule.positions import RunOrder
from batchinf.source.files import say_on_stderr
from batchinf.source.rows import NewRows
from batchinf.spec.file import SpecFile, retried_structures
from batchinf.spec.job import JobSpec
from batchinf.spec.output import OutputSpec
from batchinf.tasks.registry import task_of

_LONG = 1 << 30  # assumed room in tokens if it is unknown


def validate_job(
    file: SpecFile, *, num_rows: int, named: Sequence[str] = (), seed: int | None = None
) -> Iterator[ValidateFinding]:
    """Yield the finding of each check that passes. Raises UserError at the first check that fails.

    The rows that are shown are the named ones; else the first `num_rows`, or as many at random if there is a seed.
    The last check is that not all rows of the sample would be error rows.
    """
    remarks: list[str] = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as opened:
        begun = _begun(file.spec.output, Folder(pathlib.Path(scratch) / "unknown"), remarks)
        state = read_state(begun)
        job = _open(file, state, pathlib.Path(scratch), remarks)
        opened.callback(job.source.close)
        yield SpecFound(str(file.path))
        yield from _model_findings(job, remarks)
        columns = {field.name: str(field.type) for field in job.source.schema}
        yield InputFound(job.spec.input.path, job.source.num_rows, job.source.fingerprint, columns)
        yield from _warnings(input_notes(job.source))
        chosen = None
        if job.spec.input.selects and state is None:
            chosen = choose(job, range(job.source.num_rows), Folder(scratch), limit=job.spec.input.limit)
            yield RowsChosen(chosen_by(job), len(chosen), job.source.num_rows)
        num_chosen = len(job.rows) if chosen is None else len(chosen)
        check_size(job, None if state is not None else num_chosen)
        yield from _warnings(check_retry(job, state))
        yield _task(job)
        yield from _warnings(job.task.prompt_warnings(job.model, job.source))
        yield from _warnings(column_warnings(job.task, job.source))
        with StructuresCheck(dataclasses.replace(job.file, spec=job.spec), job.model.tokenizer) as structures:
            yield from (Remark("structure", text) for text in structures.lines())
        if (retried := retried_structures(dataclasses.replace(job.file, spec=job.spec))) is not None:
            with StructuresCheck(retried, job.model.tokenizer) as structures:
                yield from (Remark("structure", f"{text} (retry.set)") for text in structures.lines())
        positions = _positions(job, state) if chosen is None else chosen
        yield from _warnings(repeated_id_warning(job.spec, job.source, positions))
        lengths = yield from _prompt_findings(job, state, positions, num_rows=num_rows, named=named, seed=seed)
        copy_bytes = sum(file.stat().st_size for file in pathlib.Path(scratch).glob("*.rows"))  # as in the job's folder
        yield _output(job, state, None if chosen is None else num_chosen, begun, copy_bytes=copy_bytes)
        _refuse_hopeless(lengths, job.spec)


def _warnings(texts: Iterable[str]) -> Iterator[Remark]:
    return (Remark("warning", text) for text in texts)


def _begun(output: OutputSpec, unknown: Folder, remarks: list[str]) -> Folder:
    """The folder with the job's manifest; of a job in a bucket, that of a copy, and `unknown` if it does not answer."""
    if not output.is_bucket:
        return Folder(output.folder)
    try:
        return Folder(Look(output.path).root)
    except StoreError as error:
        remarks.append(
            f"warning: whether a job has begun in the output is not known, and what follows is of a new one: {error}"
        )
        return unknown


def _open(file: SpecFile, state: State | None, scratch: pathlib.Path, remarks: list[str]) -> Job:
    """Open the job in the same steps as `run`. Lines about what `auto` means go to `remarks`."""
    folder = Folder(file.spec.output.folder)
    cache = folder.path(SOURCE_FOLDER)
    if not cache.is_dir():  # a job that has begun has scanned its input already
        cache = scratch
        state = None
    # A job that is done can be shown although its input has grown since.
    is_done = state is not None and state.is_done
    new: NewRows = "leave" if is_done else "refuse"
    prepared = prepare_job(file, state, new)
    check_weights(prepared.model, prepared.spec.model.load_format)  # reading the rows may take minutes
    prepared = with_known_length(prepared, remarks.append, cache, progress=say_on_stderr)
    degrees_of = functools.partial(with_degrees, backend=_local(file.spec), say=remarks.append)
    prepared = with_known_degrees(prepared, degrees_of)
    job = open_input(prepared, cache)
    if is_done:
        try:
            open_input(dataclasses.replace(prepared, new="refuse"), cache).source.close()
        except DriftError as error:
            remarks.append(f"warning: `run` is refused: {error}")
    return job


def _model_findings(job: Job, remarks: Sequence[str]) -> Iterator[ValidateFinding]:
    """The model, and warnings. remarks: warnings of earlier checks."""
    yield _model(job)
    with naming_lines(job.file):
        device_notes = [*_on_devices(job)]
    yield from _warnings([*remarks, *device_notes])
    if (warning := length_warning(job.spec, job.model)) is not None:
        yield Remark("warning", warning)


def _model(job: Job) -> ModelFound:
    model = job.model
    return ModelFound(
        name=model.name,
        architectures=tuple(model.config.get("architectures") or ()),
        commit=model.commit,
        path=model.path,
        fingerprint=model.fingerprint,
        adapters=job.adapters,
    )


def _local(spec: JobSpec) -> Backend:
    # It needs no cluster: devices of other hosts are not looked at.
    return choose_backend(spec.model_copy(update={"backend": "local"}))


def _on_devices(job: Job) -> Iterator[str]:
    """Warnings about the devices of this host. Raises SpecError for what cannot start on them."""
    if job.spec.scripted is not None:
        return
    if job.spec.backend == "ray":
        yield "note: the Ray cluster is not asked, so its address, its devices and their memory were not checked"
        return
    backend = _local(job.spec)
    devices = backend.devices()
    if devices or is_cpu_build():
        # All devices are assumed to be alike.
        size = backend.device_size(devices[0]) if devices else (None, "")
        fit = fit_of(job.model, job.spec, *size, limits_of=job.task.default_batch_limits)
        yield from check_devices(job.spec, fit, len(backend.slots_for(job.spec)))
    else:  # such as a login node
        yield "note: no GPU is visible here, so degrees and device memory were not checked"


def _task(job: Job) -> TaskFound:
    has_sampling = job.task.draws_tokens and not job.task.describe()
    sampling = tuple(_settings(job)) if has_sampling else None
    return TaskFound(job.task.name, job.task.describe(), sampling, dict(job.spec.sampling.columns))


def _settings(job: Job) -> Iterator[Setting]:
    """First the fields that the model's generation_config may set, then the spec's other fields."""
    sampling = job.spec.sampling
    for name, origin in job.origins.items():
        yield Setting(name, getattr(sampling, name), origin)
    others = sampling.model_dump(exclude_defaults=True, exclude={*job.origins, "columns", "structured_outputs"})
    for name, value in others.items():
        yield Setting(name, value, "spec")


def _positions(job: Job, state: State | None) -> Sequence[int]:
    if state is None or not (order := RunOrder(job.folder, state.extents)).is_whole:
        return job.rows
    return order


def _prompt_findings(
    job: Job, state: State | None, positions: Sequence[int], *, num_rows: int, named: Sequence[str], seed: int | None
) -> Generator[ValidateFinding, None, PromptLengths]:
    """The lengths of a sample of prompts, warnings about them, and the rows to show. Returns the lengths."""
    tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
    builder = job.task.prompt_builder(tokenizer, job.model.vocab_size, begun_at(job, state))
    places = [find_row(job.source, job.spec.input.id_column, text) for text in named]
    images = SampledImages(job, builder)
    lengths = yield from _sample_findings(job, builder, positions, seed or 0, images=images)
    shown: Sequence[int] = places or positions[:num_rows]
    if seed is not None and not places:
        shown = random_rows(positions, num_rows, seed)
        yield RowsDrawn(seed)
    is_noted = False
    for position in shown:
        row = _shown_row(job, builder, position, tokenizer, images=images)
        note = None if is_noted else row.request_note
        is_noted = is_noted or note is not None
        yield dataclasses.replace(row, is_run=position in positions, is_named=bool(places), request_note=note)
    return lengths


def _sample_findings(
    job: Job, builder: PromptBuilder, positions: Sequence[int], seed: int, *, images: SampledImages
) -> Generator[ValidateFinding, None, PromptLengths]:
    counts = LengthCounts(len(positions), max_model_len(job), job.spec.sampling.max_tokens)
    empty = EmptyValues(job.spec)
    structures = RowStructures(job.spec)
    with_images: list[Prompt] = []
    for rows in sampled_rows(job, positions, builder.columns, seed=seed):
        empty.add(rows)
        for prompt in images.looked_at(builder.build(rows, max_model_len(job))):
            structures.add(prompt)
            if prompt.image_shapes:
                with_images.append(prompt)
            else:
                counts.add(prompt)
    for prompt in images.with_tokens(with_images):
        counts.add(prompt)
    lengths = counts.summary()
    yield lengths
    yield from _warnings(images.notes)
    yield from (Remark("structure", text) for text in structures.lines())
    yield from _warnings(lengths.error_rate_warning(job.spec.max_error_rate))
    yield from _warnings(empty.warnings())
    yield from _warnings(counts.scoring_warnings())
    return lengths


def _shown_row(
    job: Job, builder: PromptBuilder, position: int, tokenizer: object, *, images: SampledImages
) -> ShownRow:
    id_column = job.spec.input.id_column
    columns = list(dict.fromkeys([*builder.columns, *([id_column] if id_column else [])]))
    [row] = job.source.read(position, position + 1, columns)
    [prompt] = builder.build([row], max_model_len(job))
    [whole] = images.with_tokens(images.looked_at([prompt]))
    if whole.error is not None:
        prompt = whole
    # Only the first sample of a row is shown, and a row may have millions.
    sampling = job.spec.sampling.model_copy(update={"n": 1})
    task = task_of(job.spec.model_copy(update={"sampling": sampling}))
    requests = task.requests(prompt, max_model_len(job) or _LONG)
    [(part, request), *_] = requests
    row_as_run = shown_row(
        prompt=part,
        row_id=row.values.get(id_column) if id_column else None,
        request=request,
        tokenizer=tokenizer,
        job_sampling=job.spec.sampling if job.task.draws_tokens else None,
        max_model_len=max_model_len(job),
    )
    num_requests = sum(not each.is_shared for _, each in requests)
    return dataclasses.replace(
        row_as_run,
        num_requests=num_requests,
        num_image_tokens=len(whole.token_ids) - len(prompt.token_ids),
        request_note=task.request_note(prompt),
    )


def _refuse_hopeless(lengths: PromptLengths, spec: JobSpec) -> None:
    """Raise UserError if no row of the sample has a prompt, unless `max_error_rate` is 1; `run` does the same."""
    if lengths.errors and lengths.longest is None and spec.max_error_rate < 1:
        first = lengths.errors[0]
        error = RowError(first.error_type, first.first_message)
        raise hopeless(lengths.num_sampled, lengths.num_rows, first.first_row, error)


def _place_warning(file: SpecFile, root: pathlib.Path) -> str | None:
    """A warning that the user may not write there, or None. Raises SpecError if a file is in the way."""
    place = next((path for path in (root, *root.parents) if os.path.lexists(path)), root)
    if not place.is_dir():
        raise file.error("output.path", f"got {root}, but {place} is no folder; give another path")
    if os.access(place, os.W_OK | os.X_OK):
        return None
    return f"warning: you may not write in {place}, so `run` on this host would be refused; give another output.path"


def _output(job: Job, state: State | None, num_rows: int | None, begun: Folder, *, copy_bytes: int) -> OutputFound:
    """begun: the folder with the manifest; of a job in a bucket, that of a copy."""
    folder = Folder(job.spec.output.folder)
    name = job.spec.output.path if job.spec.output.is_bucket else str(folder.root)
    output = OutputFound(name, others_note=others_note(folder) if state is None else None)
    if state is not None:
        holds: Literal["done job", "unfinished job"] = "done job" if state.is_done else "unfinished job"
        output = dataclasses.replace(output, holds=holds, num_parts=len(state.parts), drift=_drift(job, state))
    if (cut := read_cut(str(begun.root))) is not None:
        output = dataclasses.replace(output, holds="slices", num_slices=cut.num_slices)
    elif state is None and not job.spec.output.is_bucket:
        output = dataclasses.replace(output, warning=_place_warning(job.file, folder.root))
    if state is not None and state.is_done:
        return output
    warning = output.warning or room_warning(job, state, 1, num_rows, copy_bytes=copy_bytes)
    return dataclasses.replace(output, warning=warning)


def _drift(job: Job, state: State) -> str | None:
    """The difference to the job in the folder. It is no error: the user may mean a retry or another folder."""
    try:
        check_drift(job, state.header)
    except DriftError as error:
        return str(error)
    return None

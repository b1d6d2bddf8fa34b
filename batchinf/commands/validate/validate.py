"""What `validate` shows: that spec, input, columns, model and prompts hold together, without an engine or a GPU."""

import bisect
import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from batchinf.base.errors import DriftError
from batchinf.base.slices import SOURCE_FOLDER, read_cut
from batchinf.base.storage import Folder
from batchinf.commands.validate.lengths import TokenLengths, sample_rows
from batchinf.commands.validate.rows import ChosenRows, find_row, random_rows, row_lines, score_lines
from batchinf.engines.installed import check_structures
from batchinf.fleet.choose import choose_backend
from batchinf.job.choose import Chosen, choose, described, max_model_len
from batchinf.job.disk_space import check_size, room_warning
from batchinf.job.open import Job, begun_at, check_drift, open_job
from batchinf.manifest.state import State, read_state
from batchinf.model.identity import check_weights
from batchinf.model.memory import DEFAULT_GPU_MEMORY_UTILIZATION, fit_of, needs_lines
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.row_values import sampling_line, setting
from batchinf.schedule.order import RunOrder
from batchinf.spec.file import SpecFile
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.registry import task_of

_COLUMNS = 100
_LONG = 1 << 30  # tokens that fit where nothing says how many


@dataclass(frozen=True, slots=True)
class Looks:
    """Which rows to show: the first `num_rows`, as many at random with `seed`, or those that are named."""

    num_rows: int
    named: tuple[str, ...] = ()
    seed: int | None = None


def validation_report(file: SpecFile, looks: Looks) -> Iterator[str]:
    """Lines for people, as each check passes. Raises UserError at the first that does not."""
    folder = Folder(file.spec.output.path)
    state = read_state(folder) if folder.exists("manifest") else None
    with tempfile.TemporaryDirectory() as scratch:
        # A job that has begun has its scan of the input behind it.
        own = folder.path(SOURCE_FOLDER)
        job = open_job(file, own, state) if own.is_dir() else open_job(file, pathlib.Path(scratch))
        with contextlib.closing(job.source):
            yield f"spec {file.path}: good"
            yield from _model_lines(job)
            yield from _input_lines(job)
            chosen = choose(job, file, 0, job.spec.input.limit) if job.spec.input.selects and state is None else None
            if chosen is not None:
                yield f"chosen by {described(job)}: {chosen.num_rows:,} of {job.source.num_rows:,} rows"
            num_rows = len(job.rows) if chosen is None else chosen.num_rows
            check_size(file, job, None if state is not None else num_rows)
            if stored := job.task.describe():
                yield stored
            elif job.task.draws_tokens:
                yield from _sampling_lines(job)
            if rows_own := sampling_line(job.spec.sampling):
                yield f"each row's own sampling: {rows_own}; null is the job's"
            yield from job.task.prompt_warnings(job.model, job.source)
            yield from check_structures(file, job.model.tokenizer)
            yield from _prompt_lines(job, looks, state, _positions(job, state, chosen))
            yield from _output_lines(job, folder, state, chosen)


def _model_lines(job: Job) -> Iterator[str]:
    check_weights(job.model, job.spec.model.load_format)
    model = job.model
    architecture = ", ".join(model.config.get("architectures") or ["of unknown architecture"])
    where = f"commit {model.commit}" if model.commit else model.path
    yield f"model {model.name}: {architecture}; weights whole"
    yield f"  {where}, content {model.fingerprint}"
    for adapter in job.adapters:
        yield f"  LoRA adapter {adapter.name}: rank {adapter.rank}, content {adapter.fingerprint}"
    # The first of the devices, which are taken to be alike.
    backend = choose_backend()
    device_bytes, device_name = next(map(backend.device_size, backend.devices()), (None, ""))
    share = job.spec.engine.get("gpu_memory_utilization") or DEFAULT_GPU_MEMORY_UTILIZATION
    fit = fit_of(model, job.spec, device_bytes, device_name, job.task.default_batch_limits)
    yield from needs_lines(fit, float(share))


def _input_lines(job: Job) -> Iterator[str]:
    source = job.source
    yield f"input {job.spec.input.path}: {source.num_rows:,} rows, content {source.fingerprint}"
    yield "columns: " + ", ".join(f"{field.name} {field.type}" for field in source.schema)


def _sampling_lines(job: Job) -> Iterator[str]:
    """What is not vLLM's default, with where it is from, then what is."""
    sampling, origins = job.spec.sampling, job.origins
    said = {name: setting(name, getattr(sampling, name)) for name in origins}
    given = [f"{words} ({origins[name]})" for name, words in said.items() if origins[name] != "default"]
    others = sampling.model_dump(exclude_defaults=True, exclude={*origins, "columns", "structured_outputs"})
    given += [f"{setting(name, value)} (spec)" for name, value in others.items()]
    yield from _wrapped("sampling: ", given or ["nothing is given"])
    yield from _wrapped("  by default ", [words for name, words in said.items() if origins[name] == "default"])


def _wrapped(first: str, words: Sequence[str]) -> Iterator[str]:
    """Words with commas between them, lines of 100 columns; a word is never broken."""
    line = first
    for number, word in enumerate(words):
        end = "," if number < len(words) - 1 else ""
        if len(line) + len(word) > _COLUMNS and line.strip():
            yield line.rstrip()
            line = "  "
        line += f"{word}{end} "
    if words:
        yield line.rstrip()


def _positions(job: Job, state: State | None, chosen: Chosen | None) -> Sequence[int]:
    """The rows that are run."""
    if chosen is not None and chosen.selection is not None:
        return ChosenRows(chosen.num_rows, chosen.selection.rows)
    if chosen is not None:
        return range(chosen.first_row, chosen.stop_row)
    if state is None or not (order := RunOrder(job.folder, state.extents)).is_whole:
        return job.rows
    start = order.extents[0].start
    return ChosenRows(order.num_places, lambda first, stop: order.rows(start + first, start + stop))


def _with_one_sample(spec: JobSpec) -> JobSpec:
    # The first of a row's requests is all that is shown, and there may be millions.
    return spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"n": 1})})


def _prompt_lines(job: Job, looks: Looks, state: State | None, positions: Sequence[int]) -> Iterator[str]:
    tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
    begun = begun_at(job, None if state is None else state.header)
    builder, task = (
        job.task.prompt_builder(tokenizer, job.model.vocab_size, begun),
        task_of(_with_one_sample(job.spec)),
    )
    length, id_column = max_model_len(job), job.spec.input.id_column
    named = [find_row(job.source, id_column, text) for text in looks.named]
    yield ""
    lengths = TokenLengths(len(positions), length, job.spec.sampling.max_tokens)
    for sampled in sample_rows(positions, looks.seed or 0):
        for prompt in builder.build(job.source.read_rows(np.asarray(sampled, np.int64), builder.columns), length):
            lengths.add(prompt)
    yield from lengths.lines()
    shown = named or list(positions[: looks.num_rows])
    if looks.seed is not None and not named:
        shown = random_rows(positions, looks.num_rows, looks.seed)
        yield ""
        yield f"rows drawn with --seed {looks.seed}:"
    sampling = job.spec.sampling if job.task.draws_tokens else SamplingSpec()
    columns = [*builder.columns, *([id_column] if id_column else [])]
    for position in shown:
        [row] = job.source.read(position, position + 1, columns)
        [prompt] = builder.build([row], length)
        [first, *_] = task.expand(prompt, length or _LONG)
        yield ""
        row_id = row.values.get(id_column) if id_column else None
        if job.task.scores_prompts:
            yield from score_lines(prompt, row_id, tokenizer, length, bool(named))
        else:
            yield from row_lines(prompt, row_id, first, tokenizer, sampling, length, bool(named))
        place = bisect.bisect_left(positions, position)
        if place == len(positions) or positions[place] != position:
            yield "  not among the rows that are run"
    yield ""


def _drift_lines(job: Job, state: State) -> Iterator[str]:
    """No error: the settings may be those of a retry, or of a job whose folder is yet to be named."""
    try:
        check_drift(job, state.header)
    except DriftError as error:
        yield f"warning: {error}"


def _output_lines(job: Job, folder: Folder, state: State | None, chosen: Chosen | None) -> Iterator[str]:
    if (cut := read_cut(str(folder.root))) is not None:
        yield f"output {folder.root}: a job in {cut.num_slices} slices"
    elif state is None:
        yield f"output {folder.root}: a new job"
    elif state.is_done:
        yield f"output {folder.root}: the job there is done"
    else:
        yield f"output {folder.root}: a job with {len(state.parts):,} parts to go on with"
    if state is not None:
        yield from _drift_lines(job, state)
    if (state is None or not state.is_done) and (
        warning := room_warning(job, state, 1, None if chosen is None else chosen.num_rows)
    ) is not None:
        yield warning

"""What `validate` shows: that spec, input, columns, model and prompts hold together, without an engine or a GPU."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

from batchinf.choose import Chosen, choose, described
from batchinf.job import Job, begun_at, open_job
from batchinf.job_state import State, read_state
from batchinf.memory import DEFAULT_GPU_MEMORY_UTILIZATION, fit_of, needs_lines
from batchinf.model import check_weights
from batchinf.placement import device_size, visible_devices
from batchinf.prompt import PromptBuilder, load_tokenizer, show
from batchinf.prompt_checks import prompt_warnings
from batchinf.records import Prompt
from batchinf.room import room_warning
from batchinf.row_sampling import sampling_line
from batchinf.slices import SOURCE_FOLDER, read_cut
from batchinf.spec_file import SpecFile
from batchinf.storage import Folder
from batchinf.structures import check_structures

_MOST_IDS = 16


def validation_report(file: SpecFile, num_rows: int) -> Iterator[str]:
    """Lines for people, as each check passes. Raises UserError at the first that does not."""
    folder = Folder(file.spec.output.path)
    state = read_state(folder) if folder.exists("manifest") else None
    with tempfile.TemporaryDirectory() as scratch:
        # A job that has begun has its first pass over the input behind it.
        own = folder.path(SOURCE_FOLDER)
        began_as = None if state is None else state.header.identity
        job = open_job(file, own if own.is_dir() else pathlib.Path(scratch), began_as)
        with contextlib.closing(job.source):
            yield f"spec {file.path}: good"
            yield from _model_lines(job)
            yield from _input_lines(job)
            chosen = choose(job, file, 0, job.spec.input.limit) if job.spec.input.selects and state is None else None
            if chosen is not None:
                yield f"chosen by {described(job)}: {chosen.num_rows:,} of {job.source.num_rows:,} rows"
            yield "sampling: " + ", ".join(
                f"{name} {getattr(job.spec.sampling, name)} ({origin})" for name, origin in job.origins.items()
            )
            if rows_own := sampling_line(job.spec.sampling):
                yield f"each row's own sampling: {rows_own}; null is the job's"
            yield from prompt_warnings(job.spec, job.model, job.source)
            yield from check_structures(file, job.model.tokenizer)
            yield from _prompt_lines(job, num_rows, chosen)
            yield from _output_lines(job, folder, state, chosen)


def _model_lines(job: Job) -> Iterator[str]:
    check_weights(job.model, job.spec.model.load_format)
    model = job.model
    architecture = ", ".join(model.config.get("architectures") or ["of unknown architecture"])
    where = f"commit {model.commit}" if model.commit else model.path
    yield f"model {model.name}: {architecture}, {where}, content {model.fingerprint}; weights whole"
    # The first of the devices, which are taken to be alike.
    device_bytes, device_name = next((device_size(device) for device in visible_devices()), (None, ""))
    share = job.spec.engine.get("gpu_memory_utilization") or DEFAULT_GPU_MEMORY_UTILIZATION
    yield from needs_lines(fit_of(model, job.spec, device_bytes, device_name), float(share))


def _input_lines(job: Job) -> Iterator[str]:
    source = job.source
    yield f"input {job.spec.input.path}: {source.num_rows:,} rows, content {source.fingerprint}"
    yield "columns: " + ", ".join(f"{field.name} {field.type}" for field in source.schema)


def _prompt_lines(job: Job, num_rows: int, chosen: Chosen | None) -> Iterator[str]:
    tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
    state = read_state(job.folder) if job.folder.exists("manifest") else None
    begun = begun_at(job, None if state is None else state.header)
    builder = PromptBuilder(job.spec, tokenizer, job.model.vocab_size, begun)
    length = job.spec.engine.get("max_model_len") or job.model.max_model_len
    if chosen is None or chosen.selection is None:
        rows = job.source.read(0, min(num_rows, job.source.num_rows), builder.columns)
    else:
        first = chosen.selection.rows(0, min(num_rows, chosen.num_rows))
        rows = job.source.read_rows(first, builder.columns)
    for prompt in builder.build(rows, length):
        yield from _one_prompt(tokenizer, prompt)


def _one_prompt(tokenizer: object, prompt: Prompt) -> Iterator[str]:
    if prompt.error is not None:
        yield f"row {prompt.row_index}: {prompt.error.error_type}: {prompt.error.error_message}"
        return
    ids = prompt.token_ids
    more = "" if len(ids) <= _MOST_IDS else ", …"
    yield f"row {prompt.row_index}, {len(ids):,} tokens: {show(tokenizer, ids)!r}"
    yield f"  token ids: {', '.join(map(str, ids[:_MOST_IDS]))}{more}"


def _output_lines(job: Job, folder: Folder, state: State | None, chosen: Chosen | None) -> Iterator[str]:
    if (cut := read_cut(str(folder.root))) is not None:
        yield f"output {folder.root}: a job in {cut.num_slices} slices"
    elif state is None:
        yield f"output {folder.root}: a new job"
    elif state.is_done:
        yield f"output {folder.root}: the job there is done"
    else:
        yield f"output {folder.root}: a job with {len(state.parts):,} parts to go on with"
    if (state is None or not state.is_done) and (
        warning := room_warning(job, state, 1, None if chosen is None else chosen.num_rows)
    ) is not None:
        yield warning

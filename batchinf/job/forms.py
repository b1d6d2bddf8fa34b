"""Which fields have an effect for which forms of input, prompts and jobs. New jobs refuse one that would have none."""

import os
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import SpecError
from batchinf.prompts.openai.lines import CHAT_URL
from batchinf.source.find import is_dataset
from batchinf.source.formats.huggingface import has_splits, is_saved
from batchinf.spec.job import JobSpec, RaySpec
from batchinf.tasks.registry import task_type

HUB = "a dataset of the hub"
SPLITS = "a saved dataset with splits"
SAVED = "a saved dataset without splits"
FILES = "files"
JOB = "the output of another job"
LINES = "lines of a batch file"
LINES_OF_VECTORS = "lines of a batch file of embeddings or rankings"
TEXT = "prompts that are plain text"
CONVERSATION = "conversations"
IDS = "prompts of token ids"
PICTURES = "a column or a part of type image"
IMAGES_IN_ROWS = "conversations in a column"
PARSER = "a job with model.tool_parser"
CHOICES = "choices"
ANSWERS = "a job with input.answer_column"
LOGPROBS = "a job with sampling.logprobs, prompt_logprobs or logprob_token_ids"
SCORED_TOKENS = "task score with output.include_token_logprobs"
STOPS = "a job with sampling.stop, stop_token_ids or skip_special_tokens: false"
OUTPUT_TOKENS = "task generate"
BUCKET = "a job with a bucket as output.path"
RAY = "a job with backend: ray"


@dataclass(frozen=True, slots=True)
class _Use:
    """What a field is for."""

    field: str
    forms: tuple[str, ...]
    """The field has an effect for each of these."""
    remedy: str = "leave it out"


_AS_DATASET = "leave it out and narrow input.path, or set input.format: hf to read a dataset"
_USES = (
    _Use("input.split", (HUB, SPLITS), _AS_DATASET),
    _Use("input.name", (HUB,), _AS_DATASET),
    _Use("input.revision", (HUB,), _AS_DATASET),
    _Use("input.images", (PICTURES, IMAGES_IN_ROWS, LINES), "name the column with pictures in input.images_column"),
    _Use("input.images_column", (TEXT, CONVERSATION, IDS)),
    _Use("input.apply_chat_template", (TEXT,)),
    _Use("input.parallel_tool_calls", (PARSER,), "leave it out, or name the parser in model.tool_parser"),
    _Use("input.answers", (ANSWERS,), "leave it out, or name the column in input.answer_column"),
    _Use("score.one_pass", (CHOICES,)),
    _Use("score.add_bos_token", (TEXT,)),
    _Use("sampling.logprobs_mode", (LOGPROBS,)),
    _Use("sampling.include_stop_str_in_output", (STOPS,)),
    _Use("output.logprobs_dtype", (LOGPROBS, SCORED_TOKENS)),
    _Use("output.include_token_ids", (OUTPUT_TOKENS,)),
    _Use("output.store_timeout_s", (BUCKET,)),
    *(_Use(f"ray.{name}", (RAY,), "leave it out, or set backend: ray") for name in RaySpec.model_fields),
)


def unused_fields(spec: JobSpec, *, of_input: str) -> list[str]:
    """A message about each field that the spec sets and nothing uses. of_input: see `form_of_input`."""
    forms = {of_input, *_forms_of_prompts(spec)}
    is_job = _forms_of_job(spec)
    messages = []
    for use in _USES:
        section_name, name = use.field.split(".")
        section = getattr(spec, section_name)
        value = getattr(section, name)
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        if value != default and not any(form in forms or is_job.get(form) for form in use.forms):
            what = of_input if of_input in (FILES, SAVED, SPLITS) and HUB in use.forms else " and ".join(sorted(forms))
            where = "here" if use.forms[0] in is_job else f"with {what}"
            messages.append(
                f"{use.field}: got {_shown(value)}, which has no effect {where}; it is for "
                f"{' or '.join(use.forms)}: {use.remedy}"
            )
    return messages


def refuse_unused(spec: JobSpec, of_input: str) -> None:
    """Raise SpecError for the first field that the spec sets and nothing uses."""
    for message in unused_fields(spec, of_input=of_input):
        raise SpecError(message)


def form_of_input(spec: JobSpec, location: Any) -> str:
    """The form of the input: files, a dataset, or another job. location: of the spec."""
    if spec.input.job is not None:
        return JOB
    if not is_dataset(location):
        return FILES
    path = os.path.expanduser(spec.input.path)
    return HUB if not is_saved(path) else SPLITS if has_splits(path) else SAVED


def _forms_of_prompts(spec: JobSpec) -> set[str]:
    where = spec.input
    lines = LINES if CHAT_URL in task_type(spec).batch_urls else LINES_OF_VECTORS
    conditions = {
        lines: where.is_batch_file,
        CONVERSATION: where.is_chat and not where.is_batch_file,
        IDS: where.token_ids_column is not None,
        PICTURES: bool(where.image_columns),
        IMAGES_IN_ROWS: where.messages_column is not None,
        CHOICES: where.choices_column is not None or where.choices is not None,
    }
    forms = {form for form, holds in conditions.items() if holds}
    return forms if forms & {LINES, LINES_OF_VECTORS, CONVERSATION, IDS} else {*forms, TEXT}


def _forms_of_job(spec: JobSpec) -> dict[str, bool]:
    """The forms of a job besides those of its input and its prompts, and whether this job has them."""
    sampling = spec.sampling
    task = task_type(spec)
    logprobs = (sampling.logprobs, sampling.prompt_logprobs, sampling.logprob_token_ids or None)
    given = sampling.model_dump(exclude_defaults=True)
    stops = [name for name in ("stop", "stop_token_ids") if name in given or spec.rows_may_set(name)]
    return {
        PARSER: spec.model.tool_parser is not None and not spec.input.is_batch_file,
        ANSWERS: spec.input.answer_column is not None,
        LOGPROBS: task.makes_text and logprobs != (None, None, None),
        SCORED_TOKENS: task.only_scores and spec.output.include_token_logprobs,
        STOPS: task.makes_text and (bool(stops) or not sampling.skip_special_tokens),
        OUTPUT_TOKENS: task.makes_text,
        BUCKET: spec.output.is_bucket,
        RAY: spec.backend == "ray",
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str | int | float) else "it"

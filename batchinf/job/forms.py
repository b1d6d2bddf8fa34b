"""Which fields have an effect for which forms of input and prompts. New jobs refuse a field that would have none."""

import os
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import SpecError
from batchinf.prompts.openai.lines import CHAT_URL
from batchinf.source.find import is_dataset
from batchinf.source.formats.huggingface import has_splits, is_saved
from batchinf.spec.job import JobSpec
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
    _Use("score.one_pass", (CHOICES,)),
    _Use("score.add_bos_token", (TEXT,)),
)


def unused_fields(spec: JobSpec, *, of_input: str) -> list[str]:
    """A message about each field that the spec sets and nothing uses. of_input: see `form_of_input`."""
    forms = {of_input, *_forms_of_prompts(spec)}
    messages = []
    for use in _USES:
        section_name, name = use.field.split(".")
        section = getattr(spec, section_name)
        value = getattr(section, name)
        if value != type(section).model_fields[name].default and not forms & {*use.forms}:
            what = of_input if of_input in (FILES, SAVED, SPLITS) and HUB in use.forms else " and ".join(sorted(forms))
            messages.append(
                f"{use.field}: got {_shown(value)}, which has no effect with {what}; it is for "
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
    has_chats = CHAT_URL in task_type(spec).batch_urls
    conditions = {
        LINES: where.is_batch_file and has_chats,
        LINES_OF_VECTORS: where.is_batch_file and not has_chats,
        CONVERSATION: where.is_chat and not where.is_batch_file,
        IDS: where.token_ids_column is not None,
        PICTURES: bool(where.image_columns),
        IMAGES_IN_ROWS: where.messages_column is not None,
        PARSER: spec.model.tool_parser is not None and not where.is_batch_file,
        CHOICES: where.choices_column is not None or where.choices is not None,
    }
    forms = {form for form, holds in conditions.items() if holds}
    return forms if forms & {LINES, LINES_OF_VECTORS, CONVERSATION, IDS} else {*forms, TEXT}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else "it"

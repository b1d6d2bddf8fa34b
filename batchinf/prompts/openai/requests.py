"""Reads lines of OpenAI batch files: the prompt, as text or token ids, and the sampling parameters."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from batchinf.base.errors import RowError, SpecError
from batchinf.prompts.images import ImageSource
from batchinf.prompts.openai.fields import objection
from batchinf.prompts.openai.lines import (
    CHAT_URL,
    COLUMNS,
    COMPLETIONS_URL,
    BodyReader,
    Truncation,
    are_ids,
    missing_columns,
    refuse_other_api,
    show,
    take_flags,
    take_template_kwargs,
    take_truncation,
    unsupported,
)
from batchinf.prompts.tools import tools_of_line
from batchinf.records import Tools
from batchinf.source.formats.lines import OPENAI, JsonLines
from batchinf.spec.input import PROMPT_FORMS, InputSpec
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import PER_ROW_FIELDS, SamplingSpec

_CHAT_FLAGS = ("add_generation_prompt", "continue_final_message")
# Given to the chat template as variables. A template without such a variable does not see them.
_OF_TEMPLATES = ("reasoning_effort", "verbosity")
# As many as vLLM allows for one prompt.
_MOST_ANSWERS = 16_384
# What a line asks of the form of its answer, and that alone.
_OF_THE_FORM = ("include_reasoning", "return_token_ids")
# Sampling fields that all rows share. A row may only repeat the job's value.
_OF_THE_JOB = ("n", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


@dataclass(frozen=True, slots=True)
class RowRequest:
    """The request of one row: of a line, or of the columns that the spec names.

    One of messages, text and token_ids is the prompt.
    """

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    """Beside a text that spells a placeholder: see `Placeholders.as_text`. Of a text that is too long, those of a piece
    that is long enough to cut. None: the tokenizer makes them."""
    sampling: dict[str, Any] | None = field(default_factory=dict)
    """Fields of SamplingSpec by name, in place of the job's. None: columns have them; see `RowSampling`."""
    own_sampling: SamplingSpec | None = None
    """The job's sampling with the fields of a line. `PromptBuilder` sets it."""
    chat: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template by name."""
    is_chat: bool = False
    """The text has gone through the chat template, so it has its special tokens."""
    tools: Tools | None = None
    """Those that the model may call."""
    truncation: Truncation | None = None
    dimensions: int | None = None
    """See `Prompt`."""
    adds_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens; None: to texts, but not to conversations."""
    images: tuple[ImageSource, ...] = ()
    """Where the images of the text come from."""
    parts: "tuple[RowRequest, ...]" = ()
    """The requests of a line with several prompts, which has none of its own."""
    error: RowError | None = None
    """Why the row, or one of its parts, has no prompt."""
    form: str | None = field(default=None, compare=False)
    """The URL, and the fields that decide on the form of the answer but not on its text, as JSON text."""

    @property
    def prompt(self) -> str | list[int]:
        """The ids, or else the text."""
        return (self.text or "") if self.token_ids is None else self.token_ids


def may_be_batch(where: InputSpec) -> bool:
    """Whether the spec does not say if the input is a batch file. The input's columns then decide."""
    return not where.given(PROMPT_FORMS) and where.format in (None, JsonLines.name)


def recognised(where: InputSpec, columns: Iterable[str]) -> InputSpec:
    """The section with `format: openai` if the input is a batch file. The columns decide if the spec does not say it.

    The id is `custom_id`, unless the spec names another column. Raises SpecError if the spec asks for a batch file and
    the input is not one.
    """
    names = set(columns)
    missing = missing_columns(names)
    if where.is_batch_file or (may_be_batch(where) and "prompt" not in names):
        refuse_other_api(where.path, names)
    if where.is_batch_file:
        for form in where.given(PROMPT_FORMS):
            raise SpecError(f"input.{form}: got it with format openai, whose lines have their prompts; leave it out")
        if missing:
            what = f"got openai, but the input has no column '{missing[0]}'"
            raise SpecError(f"input.format: {what}; a batch request has {', '.join(COLUMNS)}")
    elif missing or not may_be_batch(where):
        return where
    return where.model_copy(update={"format": OPENAI, "id_column": where.id_column or "custom_id"})


class BatchReader(BodyReader[RowRequest]):
    """Lines of a batch file → requests."""

    urls = (CHAT_URL, COMPLETIONS_URL)

    def __init__(self, spec: JobSpec, *, has_samples: bool = True) -> None:
        """See `BodyReader`. has_samples: a line may have several answers."""
        super().__init__(spec)
        self._sampling = spec.sampling
        self._chat_kwargs = spec.input.chat_template_kwargs or {}
        self._parses_calls = spec.model.tool_parser is not None
        self._has_samples = has_samples
        self._takes_images = spec.input.has_images

    def read(self, values: Mapping[str, object]) -> RowRequest:
        url, body = self.open(values)
        return self._completion(body) if url == COMPLETIONS_URL else self._chat(body)

    def _chat(self, body: dict[str, Any]) -> RowRequest:
        form = {"url": CHAT_URL} | _form(body)
        if self._takes_images:
            _refuse_options_of_images(body)
        rendered, tools = tools_of_line(body, has_parser=self._parses_calls)
        truncation = take_truncation(body)
        prompt = {**self._messages(body), "truncation": truncation}
        sampling = self._take_sampling(body, CHAT_URL)
        if rendered:
            prompt["chat"]["tools"] = rendered
        self._check_choice(tools, sampling)
        return RowRequest(**prompt, sampling=sampling, tools=tools, form=json.dumps(form))

    def _completion(self, body: dict[str, Any]) -> RowRequest:
        form = {"url": COMPLETIONS_URL} | _form(body)
        truncation = take_truncation(body)
        prompts = self._texts(body)
        sampling = self._take_sampling(body, COMPLETIONS_URL)
        number = len(prompts)
        num_samples = sampling.get("n", self._sampling.n)
        if number > 1:
            form["n"] = num_samples
            if not self._has_samples:
                raise unsupported(f"body.prompt: got a list of {number:,}; this job has one answer for each line")
            if type(num_samples) is int and number * num_samples > _MOST_ANSWERS:
                got = f"{number:,} prompts with n {num_samples:,}"
                raise unsupported(f"body.prompt: got {got}; a line has at most {_MOST_ANSWERS:,} answers")
        requests = tuple(
            RowRequest(**prompt, sampling=sampling, truncation=truncation, form=json.dumps(form)) for prompt in prompts
        )
        return requests[0] if number == 1 else replace(requests[0], text=None, token_ids=None, parts=requests)

    def _check_choice(self, tools: Tools | None, sampling: Mapping[str, Any]) -> None:
        """Raise RowFailed for a forced call in a text that must follow a structure."""
        has_structure = "structured_outputs" in sampling or self._sampling.structured_outputs is not None
        if tools is not None and tools.choice != "auto" and has_structure:
            what = f"got {tools.name or tools.choice}, which forces a call, beside a structure for the text"
            raise unsupported(f"body.tool_choice: {what}; give one of them")

    def _messages(self, body: dict[str, Any]) -> dict[str, Any]:
        messages = body.pop("messages", None)
        if not isinstance(messages, list) or not messages:
            got = "an empty list" if messages == [] else show(messages)
            raise unsupported(f"body.messages: got {got}; must be a list of messages")
        chat: dict[str, Any] = dict(take_flags(body, _CHAT_FLAGS))
        if variables := self._variables(body):
            chat["chat_template_kwargs"] = variables
        if (documents := body.pop("documents", None)) not in (None, []):
            if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
                raise unsupported(f"body.documents: got {show(documents)}; must be a list of mappings")
            chat["documents"] = documents
        for number, message in enumerate(messages):
            _refuse_functions(f"body.messages, message {number}", message)
        return {"messages": [_with_reasoning(message) for message in messages], "chat": chat}

    def _variables(self, body: dict[str, Any]) -> dict[str, Any]:
        """The row's variables of the chat template, with those that vLLM's server makes of `reasoning_effort`."""
        own = take_template_kwargs(body)
        variables = {name: body.pop(name) for name in _OF_TEMPLATES if name in body}
        for name, value in variables.items():
            if not isinstance(value, str):
                raise unsupported(f"body.{name}: got {show(value)}; must be text")
        effort = variables.get("reasoning_effort")
        if effort is not None and "enable_thinking" not in {**self._chat_kwargs, **own}:
            variables["enable_thinking"] = effort != "none"
        return {**variables, **own}

    def _texts(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The prompts, each as text or token ids."""
        prompt = body.pop("prompt", None)
        prompts = prompt if isinstance(prompt, list) and prompt and not are_ids(prompt) else [prompt]
        if all(isinstance(item, str) for item in prompts):
            return [{"text": item} for item in prompts]
        if all(map(are_ids, prompts)):
            return [{"token_ids": item} for item in prompts]
        got = "an empty list" if prompt == [] else show(prompt)
        raise unsupported(
            f"body.prompt: got {got}; must be a text, the token ids of one, or a list of texts or of token ids"
        )

    def _take_sampling(self, body: dict[str, Any], url: str) -> dict[str, Any]:
        """The row's own sampling. Raises RowFailed for any other field that would change the answer."""
        is_chat = url != COMPLETIONS_URL
        sampling: dict[str, Any] = {}
        if "max_completion_tokens" in body:
            number = body.pop("max_completion_tokens")
            if body.setdefault("max_tokens", number) != number:
                raise unsupported("body.max_tokens: differs from body.max_completion_tokens; give one of them")
        self._check_logprobs(body, is_chat=is_chat)
        self._check_text(body)
        if (structure := _structure_of(body)) is not None:
            sampling["structured_outputs"] = structure
        if body.get("top_k") == -1:  # all tokens, in vLLM, as 0
            body["top_k"] = 0
        for name, value in body.items():
            if name in PER_ROW_FIELDS and (name != "n" or self._has_samples):
                sampling[name] = value
            elif name in _OF_THE_JOB:
                of_job = getattr(self._sampling, name)
                if value != of_job or type(value) is not type(of_job):
                    raise unsupported(f"body.{name}: got {show(value)}, but all rows have sampling.{name} {of_job}")
            elif (why := objection(url, name, value)) is not None:
                raise unsupported(f"body.{name}: {why}")
        return sampling

    def _check_text(self, body: dict[str, Any]) -> None:
        """Raise RowFailed if a row wants a text without a structure in a job with one for all rows."""
        form = body.get("response_format")
        if isinstance(form, dict) and form.get("type") == "text" and self._sampling.structured_outputs is not None:
            raise unsupported("body.response_format: got text, but all rows have sampling.structured_outputs")

    def _check_logprobs(self, body: dict[str, Any], *, is_chat: bool) -> None:
        """Raise RowFailed if a row asks for more logprobs than the job stores."""
        self._check_number("prompt_logprobs", body.pop("prompt_logprobs", None), self._sampling.prompt_logprobs)
        number = body.pop("logprobs", None)
        top = body.pop("top_logprobs", None)
        name = "top_logprobs" if is_chat and top else "logprobs"
        if is_chat:
            number = _number_of_chat(number, top)
        elif number is False:  # as chat lines spell it out
            number = None
        if top is not None and not is_chat:
            raise unsupported(f"body.top_logprobs: {objection(COMPLETIONS_URL, 'top_logprobs', top)}")
        self._check_number(name, number, self._sampling.logprobs)

    def _check_number(self, name: str, number: object, most: int | None) -> None:
        """most: the number of logprobs that the job stores."""
        if number is None:
            return
        if type(number) is not int or number < 0:
            raise unsupported(f"body.{name}: got {show(number)}; must be a whole number, at least 0")
        if most is None or number > most:
            field = name.replace("top_", "")
            raise unsupported(f"body.{name}: asks for {number}, but the job stores other columns: set sampling.{field}")


def _refuse_options_of_images(body: dict[str, Any]) -> None:
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if body.get(name):
            raise unsupported(f"body.{name}: got {show(body[name])}, which is not supported: all images are read alike")


def _number_of_chat(has_logprobs: object, top: object) -> object:
    """How many logprobs a conversation asks for; None: none."""
    if not isinstance(has_logprobs, bool | None):
        raise unsupported(f"body.logprobs: got {show(has_logprobs)}; must be true or false")
    if top and not has_logprobs:
        raise unsupported("body.top_logprobs: given without logprobs: true")
    return top or 0 if has_logprobs else None


def _refuse_functions(place: str, message: object) -> None:
    """Raise RowFailed for OpenAI's `function_call` and role `function` of old, which chat templates do not show."""
    if not isinstance(message, dict):
        return
    if message.get("function_call") is not None:
        raise unsupported(f"{place}: got function_call, which is not supported: write tool_calls")
    if message.get("role") == "function":
        raise unsupported(f"{place}: got the role function, which is not supported: write the role tool")


def _with_reasoning(message: object) -> object:
    """A message with its reasoning under both names that chat templates have for it, as vLLM's server gives it."""
    if isinstance(message, dict) and message.get("role") == "assistant" and message.get("reasoning") is not None:
        return {**message, "reasoning_content": message["reasoning"]}
    return message


def _form(body: dict[str, Any]) -> dict[str, Any]:
    """What a body asks of the form of its answer. Fields that say no more are taken out."""
    return take_flags(body, _OF_THE_FORM) | {name: body[name] for name in ("logprobs", "top_logprobs") if name in body}


def _structure_of(body: dict[str, Any]) -> dict[str, Any] | None:
    """The structure that a body asks for, by one of several fields, which are taken out; None without one."""
    found = {"response_format": _structure(body.pop("response_format", None))}
    found |= {"structured_outputs": body.pop("structured_outputs", None)}
    given = {name: structure for name, structure in found.items() if structure is not None}
    if len(given) > 1:
        raise unsupported(f"body.{sorted(given)[0]}: given beside {sorted(given)[1]}; give one of them")
    return next(iter(given.values()), None)


def _structure(response_format: object) -> dict[str, Any] | None:
    fields = response_format if isinstance(response_format, dict) else {}
    kind = fields.get("type")
    others = [name for name, value in fields.items() if value is not None and name not in ("type", kind)]
    if kind in ("text", "json_object", "json_schema") and others:
        raise unsupported(f"body.response_format.{others[0]}: not known beside type {kind}")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json": {"type": "object"}}
    if kind == "structural_tag":  # the tag is the whole mapping
        return {"structural_tag": fields}
    schema = fields.get("json_schema")
    if kind == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"json": schema["schema"]}
    allowed = "text, json_object, structural_tag, or json_schema with its schema"
    raise unsupported(f"body.response_format: got {show(kind or response_format)}; must be {allowed}")

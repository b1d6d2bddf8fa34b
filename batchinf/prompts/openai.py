"""Reads lines of OpenAI batch files: the prompt, as text or token ids, and the sampling parameters."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchinf.base.errors import RowError, SpecError
from batchinf.prompts.chat import ChatTemplate, read_messages
from batchinf.source.formats.lines import OpenAIBatch
from batchinf.source.rows import Row
from batchinf.spec.input import PROMPT_FORMS, InputSpec
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import PER_ROW_FIELDS

COLUMNS = OpenAIBatch.columns
CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"

# Ignored: they do not change the output.
_WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
# Unsupported fields, with the values that change nothing and are therefore accepted.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "add_special_tokens": (True,),
}
_CHAT_FIELDS = frozenset({"chat_template_kwargs", "add_generation_prompt", "continue_final_message"})
# Sampling fields that all rows share. A row may only repeat the job's value.
_OF_THE_JOB = ("n", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


class _Refused(Exception):
    """The message names the field and the reason."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The request of one line. One of messages, text and token_ids is the prompt.

    sampling: fields of SamplingSpec by name. chat: arguments of the chat template by name.
    """

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    chat: dict[str, Any] = field(default_factory=dict)


def may_be_batch(where: InputSpec) -> bool:
    """Whether the spec does not say if the input is a batch file. The input's columns then decide."""
    is_plain = all(getattr(where, form) is None for form in PROMPT_FORMS)
    return is_plain and where.format in (None, OpenAIBatch.read_as)


def recognised(where: InputSpec, columns: Iterable[str]) -> InputSpec:
    """The section with `format: openai` if the input is a batch file. The columns decide if the spec does not say it.

    The id is `custom_id`, unless the spec names another column. Raises SpecError if the spec asks for a batch file and
    the input is not one.
    """
    names = list(columns)
    is_said = where.is_batch_file
    given = next((form for form in PROMPT_FORMS if getattr(where, form) is not None), None)
    if is_said and given is not None:
        raise SpecError(f"input.{given}: got it with format openai, whose lines have their prompts; leave it out")
    if is_said and not OpenAIBatch.has_its_columns(names):
        missing = next(name for name in COLUMNS if name not in names)
        raise SpecError(f"input.format: got openai, but the input has no column '{missing}'; a batch request has "
                        f"{', '.join(COLUMNS)}")  # fmt: skip
    if not is_said and not (may_be_batch(where) and OpenAIBatch.has_its_columns(names)):
        return where
    return where.model_copy(update={"format": OpenAIBatch.name, "id_column": where.id_column or "custom_id"})


NUM_LOOKED_AT = 100


def check_batch_models(spec: JobSpec, rows: Sequence[Mapping[str, object]]) -> None:
    """Raise SpecError if all of the first lines of a batch file name a model that is not the job's.

    spec: resolved, its input `recognised`. rows: the values of the first lines.
    """
    if not spec.input.is_batch_file:
        return
    reader = BatchReader(spec)
    objections = [reader.model_objection(values) for values in rows]
    if all(objections):
        many = "the only line" if len(rows) == 1 else f"each of the first {len(rows):,} lines"
        raise SpecError(f"model.name: {many} of {spec.input.path} names another model; {objections[0]}")


def _body(values: Mapping[str, object]) -> object:
    """The body of a line. The body is JSON text if its column has mixed types. Raises ValueError or RecursionError."""
    body = values.get("body")
    return json.loads(body) if isinstance(body, str) else body


class BatchReader:
    """Lines of a batch file → requests."""

    def __init__(self, spec: JobSpec) -> None:
        """spec: resolved. `body.model` must be its model's name or one of `engine.served_model_name`."""
        served = spec.engine.get("served_model_name") or []
        self._models = [spec.model.name, *([served] if isinstance(served, str) else served)]
        self._sampling = spec.sampling

    def read(self, values: Mapping[str, object]) -> BatchRequest | RowError:
        """The request of a line, or the error `unsupported_request`, whose message names the field."""
        try:
            return self._read(values)
        except _Refused as error:
            return RowError("unsupported_request", str(error))

    def _read(self, values: Mapping[str, object]) -> BatchRequest:
        for name in COLUMNS:
            if values.get(name) is None:
                raise _Refused(f"{name} is missing; a batch request has {', '.join(COLUMNS)}")
        strange = sorted(set(values) - set(COLUMNS))
        if strange:
            raise _Refused(f"{strange[0]}: not known; a batch request has {', '.join(COLUMNS)}")
        if values["method"] != "POST":
            raise _Refused(f"method: got {_show(values['method'])}; must be POST")
        url, body = values["url"], values["body"]
        if url not in (CHAT_URL, COMPLETIONS_URL):
            raise _Refused(f"url: got {_show(url)}; must be {CHAT_URL} or {COMPLETIONS_URL}")
        if not isinstance(body, dict):
            raise _Refused(f"body: got {_show(body)}; must be a mapping")
        # Null means the same as leaving out the field.
        body = {name: value for name, value in body.items() if value is not None}
        self._check_model(body.pop("model", None))
        prompt = self._messages(body) if url == CHAT_URL else self._text(body)
        return BatchRequest(**prompt, sampling=self._take_sampling(body, is_chat=url == CHAT_URL))

    def model_objection(self, values: Mapping[str, object]) -> str | None:
        """The objection if a line names a model that is not the job's; None if it names no model or cannot be read."""
        try:
            body = _body(values)
        except (ValueError, RecursionError):
            return None
        model = body.get("model") if isinstance(body, dict) else None
        return None if model is None or model in self._models else self._objection(model)

    def _objection(self, model: object) -> str:
        return (
            f"body.model: got {_show(model)}; the job's model is {' or '.join(map(_show, self._models))}: "
            "name it so, or list the name in engine.served_model_name"
        )

    def _check_model(self, model: object) -> None:
        if model is None:
            raise _Refused("body.model is missing; must name the job's model")
        if model not in self._models:
            raise _Refused(self._objection(model))

    def _messages(self, body: dict[str, Any]) -> dict[str, Any]:
        messages = body.pop("messages", None)
        if not isinstance(messages, list) or not messages:
            got = "an empty list" if messages == [] else _show(messages)
            raise _Refused(f"body.messages: got {got}; must be a list of messages")
        chat = {name: body.pop(name) for name in sorted(_CHAT_FIELDS) if name in body}
        for name, value in chat.items():
            kind, words = (dict, "a mapping") if name == "chat_template_kwargs" else (bool, "true or false")
            if not isinstance(value, kind):
                raise _Refused(f"body.{name}: got {_show(value)}; must be {words}")
        return {"messages": messages, "chat": chat}

    def _text(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.pop("prompt", None)
        if isinstance(prompt, str):
            return {"text": prompt}
        if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
            return {"token_ids": prompt}
        raise _Refused(f"body.prompt: got {_show(prompt)}; must be one text, or the token ids of one")

    def _take_sampling(self, body: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
        """The row's own sampling. Raises _Refused for any other field in the body."""
        sampling: dict[str, Any] = {}
        if "max_completion_tokens" in body:
            sampling["max_tokens"] = body.pop("max_completion_tokens")
            if body.pop("max_tokens", sampling["max_tokens"]) != sampling["max_tokens"]:
                raise _Refused("body.max_tokens: differs from body.max_completion_tokens; give one of them")
        self._check_logprobs(body, is_chat=is_chat)
        if (structure := _structure(body.pop("response_format", None))) is not None:
            sampling["structured_outputs"] = structure
        for name, value in body.items():
            if name in PER_ROW_FIELDS:
                sampling[name] = value
            elif name in _OF_THE_JOB:
                own = getattr(self._sampling, name)
                if value != own or type(value) is not type(own):
                    raise _Refused(f"body.{name}: got {_show(value)}, but all rows have sampling.{name} {own}")
            elif name not in _WITHOUT_EFFECT and value not in _DEFAULTS.get(name, ()):
                raise _Refused(f"body.{name}: got {_show(value)}, which is not supported")
        return sampling

    def _check_logprobs(self, body: dict[str, Any], *, is_chat: bool) -> None:
        """Raise _Refused if a row asks for more logprobs than the job stores."""
        stored = -1 if self._sampling.logprobs is None else self._sampling.logprobs
        asked, name = body.pop("logprobs", None), "logprobs"
        top = body.pop("top_logprobs", None)
        if is_chat:
            if not isinstance(asked, bool | None):
                raise _Refused(f"body.logprobs: got {_show(asked)}; must be true or false")
            if top is not None and not asked:
                raise _Refused("body.top_logprobs: given without logprobs: true")
            asked, name = (top or 0, "top_logprobs" if top else "logprobs") if asked else (None, name)
        elif top is not None:
            raise _Refused(f"body.top_logprobs: got {_show(top)}, which is not supported")
        if asked is None:
            return
        if type(asked) is not int or asked < 0:
            raise _Refused(f"body.{name}: got {_show(asked)}; must be a whole number, at least 0")
        if asked > stored:
            raise _Refused(f"body.{name}: asks for {asked}, but the job stores other columns: set sampling.logprobs")


def _structure(wanted: object) -> dict[str, Any] | None:
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json": {"type": "object"}}
    schema = wanted.get("json_schema") if isinstance(wanted, dict) else None
    if kind == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"json": schema["schema"]}
    allowed = "text, json_object, or json_schema with its schema"
    raise _Refused(f"body.response_format: got {_show(kind if kind else wanted)}; must be {allowed}")


def _show(value: object) -> str:
    if isinstance(value, str | int | float) or value is None:
        text = "nothing" if value is None else repr(value)
        return text if len(text) <= 80 else f"{text[:80]}…"
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else type(value).__name__


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """The prompt of a row: text or token ids; the other is None. is_chat: the text already has its special tokens.

    sampling: fields that replace the job's.
    """

    text: str | None
    token_ids: list[int] | None
    is_chat: bool
    sampling: dict[str, Any]


class BatchPrompts:
    """Lines of a batch file → prompts, with the job's chat template and system prompt."""

    def __init__(self, spec: JobSpec, tokenizer: Any, begun_at: str | None) -> None:
        """begun_at: see `ChatTemplate`. The tokenizer needs a chat template only if a row is a conversation."""
        self._reader = BatchReader(spec)
        self._system_prompt = spec.input.system_prompt
        self._chat: ChatTemplate | None = None
        try:
            self._chat = ChatTemplate(spec.input, tokenizer, begun_at)
        except ValueError:
            # The tokenizer has no chat template. Each conversation becomes an error row.
            self._chat = None

    def read(self, row: Row) -> BatchPrompt | RowError:
        """The prompt of a row with its sampling, or the row's error."""
        if row.error is not None:
            return RowError("unreadable", row.error)
        try:
            values = {**row.values, "body": _body(row.values)}
        except (ValueError, RecursionError):
            return RowError("unsupported_request", "body: got text that is not JSON; must be a mapping")
        request = self._reader.read(values)
        if isinstance(request, RowError):
            return request
        if request.messages is None:
            return BatchPrompt(request.text, request.token_ids, False, request.sampling)
        text = self._render(request)
        return text if isinstance(text, RowError) else BatchPrompt(text, None, True, request.sampling)

    def _render(self, request: BatchRequest) -> str | RowError:
        messages = read_messages(request.messages, "body.messages")
        if isinstance(messages, RowError):
            return messages
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        if self._chat is None:
            return RowError("template_error", "the model has no chat template; give one as input.chat_template")
        options = dict(request.chat)
        options |= options.pop("chat_template_kwargs", {})
        if options.get("continue_final_message") and "add_generation_prompt" not in options:
            options["add_generation_prompt"] = False
        return self._chat.render(messages, **options)

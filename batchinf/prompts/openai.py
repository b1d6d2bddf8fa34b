"""Reads lines of OpenAI batch files: the prompt, as text or token ids, and the sampling parameters."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from batchinf.base.errors import RowError, SpecError
from batchinf.prompts.chat import ChatTemplate, read_messages
from batchinf.source.formats.lines import OpenAIBatch
from batchinf.source.rows import Row
from batchinf.spec.input import KWARGS_ELSEWHERE, PROMPT_FORMS, InputSpec
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import PER_ROW_FIELDS

COLUMNS = OpenAIBatch.columns
CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
# Azure's batch files have no `/v1`.
_URLS = {url.removeprefix(prefix): url for url in (CHAT_URL, COMPLETIONS_URL) for prefix in ("", "/v1")}

# Ignored: they do not change the output.
_WITHOUT_EFFECT = frozenset(
    """user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention priority cache_salt
    request_id return_token_ids return_tokens_as_token_ids""".split()
)
# Unsupported fields, with the values that change nothing and are therefore accepted.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # no tools are there to choose from
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "include_reasoning": (True,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
}
_CHAT_FIELDS = frozenset({"chat_template_kwargs", "add_generation_prompt", "continue_final_message"})
# Given to the chat template as variables. A template without such a variable does not see them.
_OF_TEMPLATES = ("reasoning_effort", "verbosity")
# What a line asks of the form of its answer.
_OF_THE_FORM = ("logprobs", "top_logprobs", "include_reasoning", "return_token_ids")
# Of vLLM before 0.12, by the name that the structure has now.
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
# Sampling fields that all rows share. A row may only repeat the job's value.
_OF_THE_JOB = ("n", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


class _Refused(Exception):
    """The message names the field and the reason."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The request of one line. One of messages, text and token_ids is the prompt."""

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of SamplingSpec by name, in place of the job's."""
    chat: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template by name."""
    is_chat: bool = False
    """The text has gone through the chat template, so it has its special tokens."""
    form: str | None = None
    """The URL, and the fields that decide on the form of the answer but not on its text, as JSON text."""


def may_be_batch(where: InputSpec) -> bool:
    """Whether the spec does not say if the input is a batch file. The input's columns then decide."""
    is_plain = all(getattr(where, form) is None for form in PROMPT_FORMS)
    return is_plain and where.format in (None, OpenAIBatch.read_as)


def recognised(where: InputSpec, columns: Iterable[str]) -> InputSpec:
    """The section with `format: openai` if the input is a batch file. The columns decide if the spec does not say it.

    The id is `custom_id`, unless the spec names another column. Raises SpecError if the spec asks for a batch file and
    the input is not one.
    """
    names = set(columns)
    missing = [name for name in COLUMNS if name not in names]
    if where.is_batch_file:
        for form in PROMPT_FORMS:
            if getattr(where, form) is not None:
                what = "got it with format openai, whose lines have their prompts"
                raise SpecError(f"input.{form}: {what}; leave it out")
        if missing:
            what = f"got openai, but the input has no column '{missing[0]}'"
            raise SpecError(f"input.format: {what}; a batch request has {', '.join(COLUMNS)}")
    elif missing or not may_be_batch(where):
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
        self._chat_kwargs = spec.input.chat_template_kwargs or {}

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
        url = _URLS.get(str(values["url"]))
        body = values["body"]
        if url is None:
            raise _Refused(f"url: got {_show(values['url'])}; must be {CHAT_URL} or {COMPLETIONS_URL}")
        if not isinstance(body, dict):
            raise _Refused(f"body: got {_show(body)}; must be a mapping")
        # Null means the same as leaving out the field.
        body = {name: value for name, value in body.items() if value is not None}
        if (model := body.pop("model", None)) not in (None, *self._models):  # without one, vLLM takes its own too
            raise _Refused(self._objection(model))
        form = {"url": url} | {name: body[name] for name in _OF_THE_FORM if name in body}
        prompt = self._messages(body) if url == CHAT_URL else self._text(body)
        sampling = self._take_sampling(body, is_chat=url == CHAT_URL)
        return BatchRequest(**prompt, sampling=sampling, form=json.dumps(form))

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
        for name in chat.get("chat_template_kwargs", {}):
            if name in KWARGS_ELSEWHERE:
                raise _Refused(f"body.chat_template_kwargs.{name}: it is no variable of a chat template")
        if given := {name: body.pop(name) for name in _OF_TEMPLATES if name in body}:
            chat["chat_template_kwargs"] = self._variables(given, chat.get("chat_template_kwargs", {}))
        return {"messages": messages, "chat": chat}

    def _variables(self, given: Mapping[str, object], own: Mapping[str, Any]) -> dict[str, Any]:
        """The row's variables of the chat template, with those that vLLM's server makes of `reasoning_effort`."""
        for name, value in given.items():
            if not isinstance(value, str):
                raise _Refused(f"body.{name}: got {_show(value)}; must be text")
        variables = dict(given)
        effort = variables.get("reasoning_effort")
        if effort is not None and "enable_thinking" not in {**self._chat_kwargs, **own}:
            variables["enable_thinking"] = effort != "none"
        return {**variables, **own}

    def _text(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.pop("prompt", None)
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            [prompt] = prompt  # of one prompt
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
        self._check_text(body, is_chat=is_chat)
        if (structure := _structure_of(body)) is not None:
            sampling["structured_outputs"] = structure
        if body.get("top_k") == -1:  # all tokens, in vLLM, as 0
            body["top_k"] = 0
        for name, value in body.items():
            if name in PER_ROW_FIELDS:
                sampling[name] = value
            elif name in _OF_THE_JOB:
                of_job = getattr(self._sampling, name)
                if value != of_job or type(value) is not type(of_job):
                    raise _Refused(f"body.{name}: got {_show(value)}, but all rows have sampling.{name} {of_job}")
            elif name not in _WITHOUT_EFFECT and value not in _DEFAULTS.get(name, ()):
                raise _Refused(f"body.{name}: got {_show(value)}, which is not supported")
        return sampling

    def _check_text(self, body: dict[str, Any], *, is_chat: bool) -> None:
        """Raise _Refused if a row wants special tokens, or a text without a structure, that the job cannot give it."""
        if (adds := body.pop("add_special_tokens", not is_chat)) is not (not is_chat):
            words = "a chat template writes them itself" if is_chat else "the tokenizer adds them to a text"
            raise _Refused(f"body.add_special_tokens: got {_show(adds)}, which is not supported: {words}")
        form = body.get("response_format")
        if isinstance(form, dict) and form.get("type") == "text" and self._sampling.structured_outputs is not None:
            raise _Refused("body.response_format: got text, but all rows have sampling.structured_outputs")

    def _check_logprobs(self, body: dict[str, Any], *, is_chat: bool) -> None:
        """Raise _Refused if a row asks for more logprobs than the job stores."""
        number = body.pop("logprobs", None)
        top = body.pop("top_logprobs", None)
        name = "top_logprobs" if is_chat and top else "logprobs"
        if is_chat:
            number = _number_of_chat(number, top)
        elif top is not None:
            raise _Refused(f"body.top_logprobs: got {_show(top)}, which is not supported")
        if number is None:
            return
        if type(number) is not int or number < 0:
            raise _Refused(f"body.{name}: got {_show(number)}; must be a whole number, at least 0")
        if self._sampling.logprobs is None or number > self._sampling.logprobs:
            raise _Refused(f"body.{name}: asks for {number}, but the job stores other columns: set sampling.logprobs")


def _number_of_chat(has_logprobs: object, top: object) -> object:
    """How many logprobs a conversation asks for; None: none."""
    if not isinstance(has_logprobs, bool | None):
        raise _Refused(f"body.logprobs: got {_show(has_logprobs)}; must be true or false")
    if top and not has_logprobs:
        raise _Refused("body.top_logprobs: given without logprobs: true")
    return top or 0 if has_logprobs else None


def _structure_of(body: dict[str, Any]) -> dict[str, Any] | None:
    """The structure that a body asks for, by one of several fields, which are taken out; None without one."""
    found = {"response_format": _structure(body.pop("response_format", None))}
    found |= {"structured_outputs": body.pop("structured_outputs", None)}
    found |= {name: {kind: body.pop(name)} for name, kind in _GUIDED.items() if name in body}
    given = {name: structure for name, structure in found.items() if structure is not None}
    if len(given) > 1:
        raise _Refused(f"body.{sorted(given)[0]}: given beside {sorted(given)[1]}; give one of them")
    return next(iter(given.values()), None)


def _structure(response_format: object) -> dict[str, Any] | None:
    fields = response_format if isinstance(response_format, dict) else {}
    kind = fields.get("type")
    others = [name for name, value in fields.items() if value is not None and name not in ("type", kind)]
    if kind in ("text", "json_object", "json_schema") and others:
        raise _Refused(f"body.response_format.{others[0]}: not known beside type {kind}")
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
    raise _Refused(f"body.response_format: got {_show(kind or response_format)}; must be {allowed}")


def _show(value: object) -> str:
    if isinstance(value, str | int | float) or value is None:
        text = "nothing" if value is None else repr(value)
        return text if len(text) <= 80 else f"{text[:80]}…"
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else type(value).__name__


class BatchPrompts:
    """Lines of a batch file → prompts, with the job's chat template and system prompt."""

    def __init__(self, spec: JobSpec, tokenizer: Any, begun_at: str | None) -> None:
        """begun_at: see `ChatTemplate`. The tokenizer needs a chat template only if a row is a conversation."""
        self._reader = BatchReader(spec)
        self._system_prompt = spec.input.system_prompt
        self._chat: ChatTemplate | None = None
        # Without a chat template, each conversation becomes an error row.
        with contextlib.suppress(ValueError):
            self._chat = ChatTemplate(spec.input, tokenizer, begun_at)

    def read(self, row: Row) -> BatchRequest | RowError:
        """The request of a row, its messages as text; or the row's error."""
        if row.error is not None:
            return RowError("unreadable", row.error)
        try:
            values = {**row.values, "body": _body(row.values)}
        except (ValueError, RecursionError):
            return RowError("unsupported_request", "body: got text that is not JSON; must be a mapping")
        request = self._reader.read(values)
        if isinstance(request, RowError) or request.messages is None:
            return request
        text = self._render(request)
        return text if isinstance(text, RowError) else replace(request, messages=None, text=text, is_chat=True)

    def _render(self, request: BatchRequest) -> str | RowError:
        messages = read_messages(request.messages, "body.messages")
        if isinstance(messages, RowError):
            return messages
        if self._system_prompt is not None and not any(it["role"] in ("system", "developer") for it in messages):
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        if self._chat is None:
            return RowError("template_error", "the model has no chat template; give one as input.chat_template")
        options = dict(request.chat)
        options |= options.pop("chat_template_kwargs", {})
        if options.get("continue_final_message") and "add_generation_prompt" not in options:
            options["add_generation_prompt"] = False
        return self._chat.render(messages, **options)

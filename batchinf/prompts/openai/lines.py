"""What all lines of OpenAI batch files share: columns, URLs, the model's name, how a prompt is cut. Readers use it."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

from batchinf.base.errors import RowFailed, SpecError
from batchinf.prompts.encoder import Encoder, Side
from batchinf.source.formats.lines import BATCH_COLUMNS
from batchinf.source.rows import Row
from batchinf.spec.input import KWARGS_ELSEWHERE
from batchinf.spec.job import JobSpec

COLUMNS = BATCH_COLUMNS
_ID_AND_BODY = ("custom_id", "body")  # of lines as Mistral and others take them, with one URL for the whole file
CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
RESPONSES_URL = "/v1/responses"  # known, so that its lines are told what to use
EMBEDDINGS_URL = "/v1/embeddings"
SCORE_URL = "/v1/score"
RERANK_URL = "/v1/rerank"
_KNOWN = (CHAT_URL, COMPLETIONS_URL, RESPONSES_URL, EMBEDDINGS_URL, SCORE_URL, RERANK_URL)
# Azure's batch files have no `/v1`, and nor do vLLM's own names.
_URLS = {alias: url for url in _KNOWN for alias in (url, url.removeprefix("/v1"))} | {"/v2/rerank": RERANK_URL}
# Azure's URLs of requests that are no batch begin so.
_AZURE = re.compile(r"/openai(?:/deployments/(?P<deployment>[^/]+))?(?=/)")


_NO_RESPONSES = "write the instructions and the input as body.messages, and the URL as /v1/chat/completions"

_Request = TypeVar("_Request")


# Columns of lines of other batch APIs, in words: whose they are, and what holds the request.
_OTHERS = {
    ("custom_id", "params"): ("Anthropic's Message Batches", "params"),
    ("key", "request"): ("Gemini's batch API", "request"),
    ("recordId", "modelInput"): ("Amazon Bedrock's batch inference", "modelInput"),
}
# A field of a body → the URL of such a request.
_BY_FIELD = {
    "messages": CHAT_URL, "prompt": COMPLETIONS_URL, "query": RERANK_URL, "text_1": SCORE_URL, "queries": SCORE_URL,
    "items": SCORE_URL, "data_1": SCORE_URL, "input": EMBEDDINGS_URL,
}  # fmt: skip


def missing_columns(names: Collection[str]) -> list[str]:
    """The columns that a file lacks to be a batch file. It may lack method and URL, but not one of them alone."""
    needed = _ID_AND_BODY if not {"method", "url", "prompt"} & {*names} else COLUMNS
    return [name for name in needed if name not in names]


def refuse_other_api(path: str, names: Collection[str]) -> None:
    """Raise SpecError for lines of the batch API of another company, by their columns."""
    for columns, (api, request) in _OTHERS.items():
        if {*names} >= {*columns}:
            raise SpecError(
                f"input.path: {path} has lines of {api} ({', '.join(columns)}), which batchinf does not read; write "
                'each as {"custom_id": …, "body": {"messages": […], "max_tokens": …}} with the messages of its '
                f"{request}, or make a column with the messages and name it in input.messages_column"
            )


def whole_line(values: Mapping[str, object]) -> Mapping[str, object]:
    """The values of a line. Without method and URL, it has those of the form of its body."""
    if values.get("method") is not None or values.get("url") is not None:
        return values
    fields = _fields_of(values)
    url = next((url for field, url in _BY_FIELD.items() if fields.get(field) is not None), None)
    return values if url is None else {**values, "method": "POST", "url": url}


def unsupported(message: str) -> RowFailed:
    """The error of a line that cannot run. message: names the field and the reason."""
    return RowFailed("unsupported_request", message)


def url_of(values: Mapping[str, object]) -> str | None:
    """The URL of a line in OpenAI's form; None if no task runs it."""
    url = whole_line(values).get("url")
    return _URLS.get(_AZURE.sub("", url, count=1).partition("?")[0]) if isinstance(url, str) else None


def _deployment(values: Mapping[str, object]) -> str | None:
    """The name of the model in Azure's URLs `/openai/deployments/{name}/…`."""
    match = _AZURE.match(str(values.get("url")))
    return None if match is None else match["deployment"]


def body_of(values: Mapping[str, object]) -> object:
    """The body of a line. The body is JSON text if its column has mixed types. Raises ValueError or RecursionError."""
    body = values.get("body")
    return json.loads(body) if isinstance(body, str) else body


def named_model(values: Mapping[str, object]) -> tuple[str, object]:
    """Where a line names its model, and the name: None if it names none or cannot be read."""
    model = _fields_of(values).get("model")
    return ("url: the deployment", _deployment(values)) if model is None else ("body.model", model)


def most_logprobs(lines: Iterable[Mapping[str, object]]) -> dict[str, int | None]:
    """The most logprobs of outputs and of prompts that a line asks for, in the spec's fields; None: none asks."""
    most: dict[str, int | None] = {"logprobs": None, "prompt_logprobs": None}
    for values in lines:
        for field, asked in _logprobs_of(_fields_of(values)).items():
            if type(asked) is int and asked >= 0:
                most[field] = max(most[field] or 0, asked)
    return most


def _logprobs_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a body asks for, in the spec's fields; values of any type."""
    number = (body.get("top_logprobs") or 0) if body.get("logprobs") is True else body.get("logprobs")
    return {"logprobs": number, "prompt_logprobs": body.get("prompt_logprobs")}


def _fields_of(values: Mapping[str, object]) -> dict[str, Any]:
    """The fields of a line's body; none if it cannot be read."""
    try:
        body = body_of(values)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


class BodyReader(Generic[_Request]):
    """Reads lines: checks all but the fields of the body that a URL has for itself. A subclass reads those."""

    urls: ClassVar[tuple[str, ...]]
    """The URLs that it reads."""
    takes_images: ClassVar[bool] = True
    """Whether its conversations may have images, in a job with images."""

    def __init__(self, spec: JobSpec) -> None:
        """spec: resolved. `body.model` must be its model's name or one of `engine.served_model_name`."""
        served = spec.engine.get("served_model_name") or []
        self._models = [spec.model.name, *([served] if isinstance(served, str) else served)]

    def read_row(self, row: Row) -> _Request:
        """The request of a row that is a line. Raises RowFailed."""
        if row.error is not None:
            raise RowFailed("unreadable", row.error)
        try:
            body = body_of(row.values)
        except (ValueError, RecursionError):
            raise unsupported("body: got text that is not JSON; must be a mapping") from None
        return self.read({**row.values, "body": body})

    def read(self, values: Mapping[str, object]) -> _Request:
        """The request of a line. Raises RowFailed, whose message names the field."""
        raise NotImplementedError

    def open(self, values: Mapping[str, object]) -> tuple[str, dict[str, Any]]:
        """The URL of a line in OpenAI's form, and its body without nulls and without the model. Raises RowFailed."""
        values = whole_line(values)
        for name in COLUMNS:
            if values.get(name) is None:
                raise unsupported(f"{name} is missing; a batch request has {', '.join(COLUMNS)}")
        if values["method"] != "POST":
            raise unsupported(f"method: got {show(values['method'])}; must be POST")
        url = url_of(values)
        body = values["body"]
        if url == RESPONSES_URL:
            raise unsupported(f"url: got {show(values['url'])}, which is not supported: {_NO_RESPONSES}")
        if url not in self.urls:
            why = "" if url is None else ", as the job's task does not run it: put such lines into a job of their own"
            raise unsupported(f"url: got {show(values['url'])}; must be {' or '.join(self.urls)}{why}")
        if not isinstance(body, dict):
            raise unsupported(f"body: got {show(body)}; must be a mapping")
        # Null means the same as leaving out the field.
        body = {name: value for name, value in body.items() if value is not None}
        if (objection := self.model_objection(values)) is not None:
            raise unsupported(objection)
        body.pop("model", None)
        return url, body

    def model_objection(self, values: Mapping[str, object]) -> str | None:
        """The objection if a line names a model that is not the job's; None if it names no model or cannot be read.

        Without a model, vLLM takes its own, too.
        """
        place, model = named_model(values)
        if model is None or model in self._models:
            return None
        return (
            f"{place}: got {show(model)}; the job's model is {' or '.join(map(show, self._models))}: "
            "name it so, or list the name in engine.served_model_name"
        )


def are_ids(value: object) -> bool:
    """Whether a value is a list of token ids, with at least one."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def take_flags(body: dict[str, Any], names: Sequence[str]) -> dict[str, bool]:
    """The fields of these names, as far as a body has them. They are taken out. Raises RowFailed."""
    flags = {name: body.pop(name) for name in names if name in body}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise unsupported(f"body.{name}: got {show(value)}; must be true or false")
    return flags


def take_template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    """A body's own variables of the chat template, which are taken out. Raises RowFailed."""
    kwargs = body.pop("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise unsupported(f"body.chat_template_kwargs: got {show(kwargs)}; must be a mapping")
    if wrong := [name for name in kwargs if name in KWARGS_ELSEWHERE]:
        raise unsupported(f"body.chat_template_kwargs.{wrong[0]}: it is no variable of a chat template")
    return kwargs


@dataclass(frozen=True, slots=True)
class Truncation:
    """How vLLM's server cuts a prompt that is too long."""

    num_tokens: int
    """That are kept; -1: as many as fit."""
    side: Side | None
    """The side that is cut, with the special tokens there. None: the tokenizer's, and special tokens stay."""

    def cut(
        self, ids: list[int], encoder: Encoder | None, *, most: int | None, room: int | None, default_side: Side
    ) -> list[int]:
        """The ids that are kept. Raises RowFailed.

        encoder: has made the ids of a text; None: they were given. most: the greatest allowed number of tokens; None if
        unknown. room: the number for -1. default_side: what vLLM's tokenizer cuts.
        """
        if most is not None and self.num_tokens > most:
            got = f"got {self.num_tokens:,}; must be at most {most:,}, which max_model_len leaves"
            raise unsupported(f"body.truncate_prompt_tokens: {got}")
        kept = room if self.num_tokens < 0 else self.num_tokens
        if kept is None or len(ids) <= kept:
            return ids
        side = self.side or default_side
        if kept > 0 and (self.side is not None or encoder is None):
            return ids[-kept:] if side == "left" else ids[:kept]
        cut = encoder.cut(ids, kept, side) if kept > 0 and encoder is not None else None
        if cut is None:
            words = f"body.truncate_prompt_tokens: got {kept:,}, which leaves no room beside the special tokens"
            raise unsupported(words)
        return cut


def take_truncation(body: dict[str, Any]) -> Truncation | None:
    """The truncation that a body asks for, which is taken out of it. Raises RowFailed."""
    number = body.pop("truncate_prompt_tokens", None)
    side = body.pop("truncation_side", None)
    if side not in (None, "left", "right"):
        raise unsupported(f"body.truncation_side: got {show(side)}; must be left or right")
    if number is None:  # as in vLLM, the side alone means nothing
        return None
    if type(number) is not int or number < -1 or number == 0:
        raise unsupported(f"body.truncate_prompt_tokens: got {show(number)}; must be a whole number, at least 1, or -1")
    return Truncation(number, cast(Side | None, side))


NUM_LOOKED_AT = 100


def check_urls(path: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Raise SpecError if all of the first lines of a batch file are for `/v1/responses`. rows: their values."""
    if all(url_of(values) == RESPONSES_URL for values in rows):
        raise SpecError(
            f"input.path: {all_of(rows)} of {path} is for {RESPONSES_URL}, which is not supported: {_NO_RESPONSES}"
        )


def check_models(spec: JobSpec, rows: Sequence[Mapping[str, object]]) -> None:
    """Raise SpecError if all of the first lines of a batch file name a model that is not the job's.

    spec: resolved. rows: the values of the first lines.
    """
    reader: BodyReader[object] = BodyReader(spec)
    objections = [reader.model_objection(values) for values in rows]
    if all(objections):
        raise SpecError(f"model.name: {all_of(rows)} of {spec.input.path} names another model; {objections[0]}")


def all_of(rows: Sequence[object]) -> str:
    """The first lines of a batch file in words."""
    return "the only line" if len(rows) == 1 else f"each of the first {len(rows):,} lines"


def show(value: object) -> str:
    """A value of a line, for messages."""
    if isinstance(value, str | int | float) or value is None:
        text = "nothing" if value is None else repr(value)
        return text if len(text) <= 80 else f"{text[:80]}…"
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else type(value).__name__

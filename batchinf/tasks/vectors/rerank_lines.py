"""Reads what a row of task `rerank` asks for: a line of a batch file with `/score` or `/rerank`, or columns."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchinf.base.errors import RowFailed
from batchinf.base.text import name_type
from batchinf.prompts.openai.fields import objection
from batchinf.prompts.openai.lines import (
    RERANK_URL,
    SCORE_URL,
    BodyReader,
    Truncation,
    show,
    take_template_kwargs,
    take_truncation,
    unsupported,
)
from batchinf.prompts.renderer import check_unicode, take, take_list
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.tasks.vectors.section import BI_ENCODER, pooling_of

# The names that vLLM has for the two sides of a score, the first ones first.
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_LIMITS = ("max_tokens_per_query", "max_tokens_per_doc")


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """Queries and the documents that are scored for them."""

    queries: list[str]
    """One for all documents, or one for each."""
    documents: list[str]
    top_n: int | None
    """How many documents are ranked; None: none, as a row has only scores."""
    form: str | None = None
    """See `Prompt.request`."""
    max_tokens_per_query: int = 0
    """Tokens to which a query is cut; 0: it is not. The same for documents."""
    max_tokens_per_doc: int = 0
    truncation: Truncation | None = None
    """Of the prompts."""
    use_activation: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, over the job's."""


class RerankReader(BodyReader[RerankRequest]):
    """Rows → requests."""

    urls = (RERANK_URL, SCORE_URL)

    def __init__(self, spec: JobSpec) -> None:
        """See `BodyReader`."""
        super().__init__(spec)
        self._where = spec.input
        self._pooling = pooling_of(spec)

    def read_row(self, row: Row) -> RerankRequest:
        """See `BodyReader`. A row that is no line has its query and its documents in columns."""
        if self._where.query_column is None:
            return super().read_row(row)
        if row.error is not None:
            raise RowFailed("unreadable", row.error)
        return _checked(self._columns(row.values))

    def _columns(self, values: Mapping[str, object]) -> RerankRequest:
        where = self._where
        assert where.query_column is not None
        query = _text(values, where.query_column, "null_query")
        if where.document_column is not None:
            return RerankRequest([query], [_text(values, where.document_column, "null_document")], None)
        assert where.documents_column is not None
        documents = take_list(values, where.documents_column, "texts", kind=str, null="null_documents")
        if not documents:
            raise RowFailed("no_documents", f"column '{where.documents_column}' has an empty list")
        return RerankRequest([query], documents, self._pooling.top_n or len(documents))

    def read(self, values: Mapping[str, object]) -> RerankRequest:
        url, body = self.open(values)
        read = self._scores if url == SCORE_URL else self._ranking
        queries, documents, top_n = read(body)
        form: dict[str, Any] = {"url": url}
        if url == RERANK_URL and body.pop("return_documents", True):
            form["documents"] = documents
        request = RerankRequest(
            queries=queries,
            documents=documents,
            top_n=top_n,
            form=json.dumps(form, ensure_ascii=False),
            **{name: _whole(name, body.pop(name, 0)) for name in _LIMITS},
            truncation=take_truncation(body),
            use_activation=self._activation(body.pop("use_activation", None)),
            template_kwargs=self._template_kwargs(body),
        )
        for name, value in body.items():
            if (why := objection(url, name, value)) is not None:
                raise unsupported(f"body.{name}: {why}")
        return _checked(request)

    def _scores(self, body: dict[str, Any]) -> tuple[list[str], list[str], None]:
        names = _sides_of(body)
        queries, documents = (_line_texts(f"body.{name}", body.pop(name)) for name in names)
        if len(queries) not in (1, len(documents)):
            got = f"got {len(queries)} texts in {names[0]} and {len(documents)} in {names[1]}"
            raise unsupported(f"body: {got}; must be one in {names[0]}, or as many in both")
        return queries, documents, None

    def _ranking(self, body: dict[str, Any]) -> tuple[list[str], list[str], int]:
        query = body.pop("query", None)
        if not isinstance(query, str):
            raise unsupported(f"body.query: got {show(query)}; must be text")
        documents = _line_texts("body.documents", body.pop("documents", None))
        top_n = _whole("top_n", body.pop("top_n", 0))  # 0 is vLLM's word for all
        return [query], documents, top_n or self._pooling.top_n or len(documents)

    def _activation(self, value: object) -> bool | None:
        if value is not None and not isinstance(value, bool):
            raise unsupported(f"body.use_activation: got {show(value)}; must be true or false")
        # The cosine of two vectors does not change with their lengths.
        return None if self._pooling.score_type == BI_ENCODER else value

    def _template_kwargs(self, body: dict[str, Any]) -> dict[str, Any]:
        kwargs = take_template_kwargs(body)
        given = "chat_template_kwargs" if kwargs else "instruction"
        if "instruction" in body:
            kwargs = {"instruction": body.pop("instruction"), **kwargs}
        if kwargs and self._where.chat_template is None:
            raise unsupported(f"body.{given}: got it, but the job has no input.chat_template, which would use it")
        return kwargs


def _sides_of(body: Mapping[str, object]) -> tuple[str, str]:
    """The names of the two sides that a body has. Raises RowFailed."""
    given = {name for names in _SIDES for name in names if name in body}
    names = next((names for names in _SIDES if given == {*names}), None)
    if names is None:
        got = ", ".join(sorted(given)) or "neither"
        raise unsupported(f"body: got {got}; must have {' or '.join(' and '.join(names) for names in _SIDES)}")
    return names


def _whole(name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise unsupported(f"body.{name}: got {show(value)}; must be a whole number, at least 0")
    return value


def _line_texts(name: str, value: object) -> list[str]:
    """One text or several. Raises RowFailed."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return texts
    got = "an empty list" if texts == [] else show(value)
    raise unsupported(f"{name}: got {got}; must be one text, or a list of texts")


def _text(values: Mapping[str, object], column: str, null: str) -> str:
    value = take(values, column, null)
    if not isinstance(value, str):
        raise RowFailed("wrong_type", f"got {name_type(value)} in column '{column}'; expected a string")
    return value


def _checked(request: RerankRequest) -> RerankRequest:
    """The request, whose texts are valid Unicode. Raises RowFailed."""
    for name, texts in (("query", request.queries), ("document", request.documents)):
        for place, text in enumerate(texts):
            check_unicode(text, name_of(name, place, texts))
    return request


def name_of(name: str, place: int, texts: Sequence[object]) -> str:
    """A query or a document in words."""
    return f"{name} {place}" if len(texts) > 1 else f"the {name}"

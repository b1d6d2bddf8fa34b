"""Export as the files of OpenAI's batch API: a line for each request, in the form that its URL has."""

import base64
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.export.base import ExportedJob, Format, json_lines, rows_of
from batchinf.export.tokens import token_columns, tokens_of
from batchinf.prompts.openai.lines import (
    CHAT_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    RERANK_URL,
    RESPONSES_URL,
    SCORE_URL,
)
from batchinf.results import Results

_LEAST_LOGPROB = -9999.0  # vLLM's server writes it in place of -inf, which JSON does not have
_NAMES = (
    "id", "row_index", "sample_index", "request", "text", "reasoning", "num_reasoning_tokens", "tool_calls",
    "token_ids", "finish_reason", "stop_reason", "embedding", "embeddings", "relevance_score", "relevance_scores",
    "ranking", "num_prompt_tokens", "num_output_tokens", "error_type", "error_message",
)  # fmt: skip

_OF_TEXTS = (CHAT_URL, COMPLETIONS_URL)
# What requests of before could ask of the form of their answers.
_REMOVED = ("functions", "echo", "return_tokens_as_token_ids")

Row = Mapping[str, Any]


class OpenAIBatchExport(Format):
    """Lines `{"id", "custom_id", "response", "error"}`. Ids and times follow from the job and the row alone."""

    name = "openai-batch"
    suffix = ".jsonl"
    splits_errors = True

    def __init__(self, job: ExportedJob, schema: pa.Schema, stream: IO[bytes], errors: IO[bytes]) -> None:
        super().__init__(job, schema, stream, errors)
        self._has_tokens = bool(token_columns("", schema))
        self._held: tuple[Row, ...] = ()

    @classmethod
    def notes(cls, job: ExportedJob) -> list[str]:
        """See `Format`. There is a form for texts, for embeddings and for the scores of documents."""
        spec = job.spec
        if _form_of(job) is None:
            raise UserError(
                f"--to: got openai-batch, which has no form for the output of task {job.task.name}: export it as "
                "jsonl, csv, parquet or hf"
            )
        left_out = []
        if spec.input.documents_column is not None:
            left_out.append("the texts of the documents are left out: the job does not store them; each has its index")
        if spec.sampling.prompt_logprobs is not None:
            left_out.append("prompt_logprobs are left out; jsonl has them")
        if spec.sampling.logprobs is not None and not token_columns("", job.results.own_schema):
            left_out.append("logprobs are left out: the job does not store the tokens that they are of")
        return left_out

    @classmethod
    def columns(cls, wanted: Sequence[str], results: Results) -> list[str]:
        """See `Format`. Raises UserError for wanted columns: the form of the lines is fixed."""
        if wanted:
            raise UserError("--columns: not with openai-batch, whose lines have one form; leave it out")
        schema = results.own_schema
        return [name for name in dict.fromkeys([*_NAMES, *token_columns("", schema)]) if name in schema.names]

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Format`. The samples of the last row wait for others, which may come in the next batch."""
        rows = [*self._held, *rows_of(batch)]
        groups = [tuple(samples) for _, samples in itertools.groupby(rows, lambda row: row["row_index"])]
        self._held = groups.pop() if groups else ()
        self._write(groups)

    def close(self) -> None:
        self._write([self._held] if self._held else [])

    def _write(self, requests: Sequence[tuple[Row, ...]]) -> None:
        for samples in requests:
            line = json_lines([self._line(samples)])
            is_error = all(row["error_type"] is not None for row in samples)
            (self.errors if is_error else self.stream).write(line)

    def _line(self, samples: Sequence[Row]) -> dict[str, Any]:
        """The line of a request. If only some of its samples failed, it has both a response and an error."""
        first = samples[0]
        row_index = first["row_index"]
        name = f"{self.job.results.job_id}-{row_index}"
        answered = [row for row in samples if row["error_type"] is None]
        response = None
        if answered:
            response = {"status_code": 200, "request_id": f"req-{name}", "body": self._body(name, answered, samples)}
        return {
            "id": f"batch_req_{name}",
            "custom_id": self._custom_id(first),
            "response": response,
            "error": _error(samples),
        }

    def _custom_id(self, row: Row) -> str:
        """The row's id. If the job has no ids, its place in the input."""
        # A line that cannot be read has no id, and its place may be the id of another line.
        nameless = f"row_index {row['row_index']}" if "id" in row else str(row["row_index"])
        return nameless if row.get("id") is None else str(row["id"])

    def _body(self, name: str, answered: Sequence[Row], samples: Sequence[Row]) -> dict[str, Any]:
        form = self._form(samples[0])
        url = form["url"]
        prompt_tokens = _num_prompt_tokens(answered, form)
        output_tokens = sum(row["num_output_tokens"] or 0 for row in samples)
        usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + output_tokens}
        created = int(self.job.results.begun_at.timestamp())
        model = self._model()
        shared = {"created": created, "model": model}
        row = answered[0]  # the only one, but of URLs for texts
        if url == EMBEDDINGS_URL:
            return {"id": f"embd-{name}", "object": "list", **shared, "data": _embeddings(row, form), "usage": usage}
        if url == SCORE_URL:
            usage["completion_tokens"] = 0
            return {"id": f"score-{name}", "object": "list", **shared, "data": _scores(row), "usage": usage}
        if url == RERANK_URL:
            return {"id": f"score-{name}", "model": model, "usage": usage, "results": _results(row, form)}
        is_chat = url == CHAT_URL
        usage["completion_tokens"] = output_tokens
        if "num_reasoning_tokens" in samples[0] and (number := _num_reasoning_tokens(samples)) is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": number}
        choice = self._chat_choice if is_chat else self._text_choice
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            "object": "chat.completion" if is_chat else "text_completion",
            **shared,
            "choices": [choice(row, form) for row in answered],
            "usage": usage,
        }

    def _model(self) -> str:
        served = self.job.spec.engine.get("served_model_name") or self.job.spec.model.name
        return str(served if isinstance(served, str) else served[0])

    def _form(self, row: Row) -> dict[str, Any]:
        """What the request asked of the form of its answer; of a job without such requests, all that is stored."""
        form = self._asked(row)
        return form if self._has_tokens else {**form, "logprobs": None}

    def _asked(self, row: Row) -> dict[str, Any]:
        if row.get("request") is not None:
            form: dict[str, Any] = json.loads(row["request"])
            _refuse_removed(row, form)
            return form
        spec = self.job.spec
        url = SCORE_URL if "relevance_score" in row else _form_of(self.job)
        if url is not None and url not in _OF_TEXTS:
            return {"url": url}
        number = spec.sampling.logprobs
        if spec.input.is_chat:
            return {"url": CHAT_URL, "logprobs": number is not None, "top_logprobs": number}
        return {"url": COMPLETIONS_URL, "logprobs": number}

    def _chat_choice(self, row: Row, form: Row) -> dict[str, Any]:
        message = {"role": "assistant", "content": row["text"], "refusal": None}
        if row.get("reasoning") is not None and form.get("include_reasoning", True):
            message["reasoning"] = row["reasoning"]
        if calls := row.get("tool_calls"):
            message["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {name: call[name] for name in ("name", "arguments")}}
                for call in calls
            ]
        content = list(self._content(row, form)) if form.get("logprobs") else None
        return {
            **_choice(row, form),
            "message": message,
            "logprobs": None if content is None else {"content": content, "refusal": None},
        }

    def _content(self, row: Row, form: Row) -> Iterator[dict[str, Any]]:
        num_top = form.get("top_logprobs") or 0
        tokens = [*tokens_of("", row)]
        for token, (text, others) in zip(tokens, self.job.tokens.spell(tokens), strict=True):
            likeliest = zip(others, token.top or (), strict=True)
            top = [_logprob(name, logprob) for name, (_, logprob) in itertools.islice(likeliest, num_top)]
            yield {**_logprob(text, token.logprob), "top_logprobs": top}

    def _text_choice(self, row: Row, form: Row) -> dict[str, Any]:
        number = form.get("logprobs")
        logprobs = None if number is None else self._completion_logprobs(row, number)
        return {**_choice(row, form), "text": row["text"], "logprobs": logprobs}

    def _completion_logprobs(self, row: Row, num_top: int) -> dict[str, Any]:
        tokens = [*tokens_of("", row)]
        spelt = [*self.job.tokens.spell(tokens)]
        texts = [text for text, _ in spelt]
        offsets = [0, *itertools.accumulate(map(len, texts))]
        top: list[dict[str, float | None]] = []
        for token, (text, others) in zip(tokens, spelt, strict=True):
            likeliest = itertools.islice(zip(others, token.top or (), strict=True), num_top)
            # OpenAI's list has the token itself, too, if it is not among them.
            top.append({text: _finite(token.logprob)} | {name: _finite(value) for name, (_, value) in likeliest})
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": top,
            "text_offset": offsets[:-1],
        }


def _num_prompt_tokens(answered: Sequence[Row], form: Row) -> int:
    """The tokens of a request's prompts, each counted once."""
    if (num_samples := form.get("n")) is None:  # it has one prompt
        return int(answered[0]["num_prompt_tokens"])
    return sum({row["sample_index"] // num_samples: row["num_prompt_tokens"] for row in answered}.values())


def _form_of(job: ExportedJob) -> str | None:
    """The URL whose answers the rows become, if they do not say it themselves; None: there is no such form."""
    urls = job.task.batch_urls
    if not urls or (urls[0] in _OF_TEXTS and not job.task.makes_text):
        return None
    return urls[0]


def _scores(row: Row) -> list[dict[str, Any]]:
    scores = row["relevance_scores"] if "relevance_scores" in row else [row["relevance_score"]]
    return [{"index": index, "object": "score", "score": _number(score)} for index, score in enumerate(scores)]


def _results(row: Row, form: Row) -> list[dict[str, Any]]:
    """The ranked documents of a request, the best first, with their texts if it asked for them."""
    texts = form.get("documents")
    return [
        {
            "index": index,
            "document": {"text": None if texts is None else texts[index], "multi_modal": None},
            "relevance_score": _number(row["relevance_scores"][index]),
        }
        for index in row["ranking"]
    ]


def _number(score: float) -> float | None:
    return score if math.isfinite(score) else None  # JSON has no other numbers


def _embeddings(row: Row, form: Row) -> list[dict[str, Any]]:
    """The vector of each input of a request, as numbers, or as base64 of float32 in little-endian order."""
    vectors = row["embeddings"] if "embeddings" in row else [row["embedding"]]
    if form.get("encoding_format") == "base64":
        vectors = [base64.b64encode(np.array(vector, "<f4").tobytes()).decode() for vector in vectors]
    return [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]


def _choice(row: Row, form: Row) -> dict[str, Any]:
    index = row.get("sample_index") or 0
    ids = {"token_ids": row["token_ids"]} if form.get("return_token_ids") and "token_ids" in row else {}
    return {"index": index, "finish_reason": row["finish_reason"], "stop_reason": row["stop_reason"], **ids}


def _refuse_removed(row: Row, form: Row) -> None:
    """Raise UserError for the answer of a job of before to a line that is refused now, whose form is gone."""
    asked = [form["url"]] if form["url"] == RESPONSES_URL else [name for name in _REMOVED if form.get(name)]
    if asked:
        raise UserError(
            f"--to: got openai-batch, but the request of row {row['row_index']} has {asked[0]}, whose answers are not "
            "written any more: export the job as jsonl, or with the batchinf of commit 7d63964a"
        )


def _num_reasoning_tokens(samples: Sequence[Row]) -> int | None:
    """Tokens of the reasoning of a request's answers; None if the job has not counted those of one with a reasoning."""
    numbers = [row.get("num_reasoning_tokens", None if row.get("reasoning") else 0) for row in samples]
    return None if None in numbers else sum(numbers)


def _error(samples: Sequence[Row]) -> dict[str, Any] | None:
    failed = [row for row in samples if row["error_type"] is not None]
    if not failed:
        return None
    first = failed[0]
    message = first["error_message"]
    if len(samples) > 1:
        message = f"{len(failed)} of {len(samples)} samples failed: {message}"
    return {"code": first["error_type"], "message": message}


def _logprob(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": [*text.encode()]}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST_LOGPROB)

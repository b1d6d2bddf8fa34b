"""Each field of a body is used, without effect on the answer, or refused: the table, the readers and the docs agree."""

import inspect
import json
import pathlib
import typing
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

import jobs
from batchinf.base.errors import RowError
from batchinf.prompts.openai.fields import FIELDS, Fields, fields_of, objection
from batchinf.prompts.openai.lines import (
    CHAT_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    RERANK_URL,
    SCORE_URL,
)
from batchinf.prompts.openai.requests import BatchReader, RowRequest
from batchinf.spec.job import JobSpec
from batchinf.tasks.vectors.prompts import EmbeddingReader
from batchinf.tasks.vectors.rerank_lines import RerankReader, RerankRequest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "batch-fields.md"
NAMES = {
    CHAT_URL: "chat",
    COMPLETIONS_URL: "completions",
    EMBEDDINGS_URL: "embeddings",
    SCORE_URL: "score",
    RERANK_URL: "rerank",
}
# Those of the openai package.
PARAMS = {
    CHAT_URL: chat_create_params.CompletionCreateParamsStreaming,
    COMPLETIONS_URL: completion_create_params.CompletionCreateParamsStreaming,
    EMBEDDINGS_URL: embedding_create_params.EmbeddingCreateParams,
}
MESSAGES = [{"role": "user", "content": "Say hello."}]
FUNCTION = {"name": "get_time", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
BODIES: dict[str, dict[str, Any]] = {
    CHAT_URL: {"messages": MESSAGES},
    COMPLETIONS_URL: {"prompt": "Once"},
    EMBEDDINGS_URL: {"messages": MESSAGES},
    SCORE_URL: {"text_1": "a", "text_2": ["b", "c"]},
    RERANK_URL: {"query": "a", "documents": ["b", "c"]},
}
# The two sides of a score by their other names.
NO_SIDES = {"text_1": None, "text_2": None}
# A value for each field that is used, unlike its default, and fields that it needs beside it.
GIVEN: dict[str, Any] = {
    "model": "other", "messages": [*MESSAGES, *MESSAGES], "prompt": "Twice", "input": "Say goodbye.",
    "chat_template_kwargs": {"loud": True}, "add_generation_prompt": False,
    "continue_final_message": True, "documents": [{"text": "a"}], "reasoning_effort": "low", "verbosity": "low",
    "add_special_tokens": True, "truncate_prompt_tokens": 3, "dimensions": 8,
    "max_tokens": 3, "max_completion_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 3,
    "min_p": 0.5, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5,
    "logit_bias": {"3": 1}, "stop": ["a"], "stop_token_ids": [3], "min_tokens": 3, "allowed_token_ids": [3],
    "bad_words": ["a"], "thinking_token_budget": 3, "repetition_detection": {"max_pattern_size": 3, "min_count": 3},
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
 "tools": [TOOL], "tool_choice": "none",
    "parallel_tool_calls": False, "logprobs": 9,
    "prompt_logprobs": 9, "top_logprobs": 9, "include_reasoning": False,
    "return_token_ids": True, "encoding_format": "base64", "n": 3,
    "ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True, "use_activation": False,
    "truncation_side": "left", "text_1": "d", "text_2": "d", "query": "d", "top_n": 1, "max_tokens_per_query": 1,
    "max_tokens_per_doc": 1, "instruction": "Be brief.", "return_documents": False,
    **dict.fromkeys(("queries", "items", "data_1", "data_2"), "d"),
}  # fmt: skip
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    (CHAT_URL, "logprobs"): {"logprobs": True, "top_logprobs": 9},
    (CHAT_URL, "top_logprobs"): {"logprobs": True, "top_logprobs": 9},
    (CHAT_URL, "tool_choice"): {"tools": [TOOL], "tool_choice": "required"},
    (CHAT_URL, "parallel_tool_calls"): {"tools": [TOOL], "parallel_tool_calls": False},
    (EMBEDDINGS_URL, "add_generation_prompt"): {"add_generation_prompt": True},
    (EMBEDDINGS_URL, "input"): {"input": "Say goodbye.", "messages": None},
    **{(url, "truncation_side"): {"truncate_prompt_tokens": 3, "truncation_side": "left"} for url in NAMES},
    (SCORE_URL, "queries"): {**NO_SIDES, "queries": "d", "documents": ["b", "c"]},
    (SCORE_URL, "documents"): {**NO_SIDES, "queries": "a", "documents": ["b", "d"]},
    (SCORE_URL, "items"): {**NO_SIDES, "queries": "a", "items": ["b", "d"]},
    (SCORE_URL, "data_1"): {**NO_SIDES, "data_1": "d", "data_2": ["b", "c"]},
    (SCORE_URL, "data_2"): {**NO_SIDES, "data_1": "a", "data_2": ["b", "d"]},
    (RERANK_URL, "documents"): {"documents": ["b", "d"]},
}  # fmt: skip


TASKS = {EMBEDDINGS_URL: "embed", SCORE_URL: "rerank", RERANK_URL: "rerank"}
Read = RowRequest | RerankRequest


def read(url: str, **body: Any) -> Read | RowError:
    """What a line asks for. A field that is None is left out."""
    task = TASKS.get(url, "generate")
    is_text = task == "generate"
    spec = JobSpec(
        task=task,
        model={"name": "org/model", "tool_parser": "hermes" if is_text else None},
        input={"path": "batch.jsonl", "chat_template": "pair.jinja" if task == "rerank" else None},
        output={"path": "out", "include_prompt": True},
        sampling={"logprobs": 5, "prompt_logprobs": 5} if is_text else {},
    )
    readers: dict[str, Any] = {"embed": EmbeddingReader, "rerank": RerankReader, "generate": BatchReader}
    own = {name: value for name, value in {**BODIES[url], **body}.items() if value is not None}
    values = {"custom_id": "a", "method": "POST", "url": url, "body": own}
    found: Read | RowError = jobs.or_error(readers[task](spec).read, values)
    return found


def each(use: str) -> list[tuple[str, str, Fields]]:
    """URL, name and entry of each field of which this becomes."""
    return [(url, name, it) for it in FIELDS if it.use == use for url in it.urls for name in it.names]


def test_no_field_is_there_twice() -> None:
    for url in NAMES:
        names = [name for fields in FIELDS if url in fields.urls for name in fields.names]
        assert len(names) == len({*names}), url


@pytest.mark.parametrize("url", PARAMS)
def test_no_field_of_the_openai_package_is_forgotten(url: str) -> None:
    names = {*typing.get_type_hints(PARAMS[url])}
    assert {"model", "user"} <= names
    assert names - {*fields_of(url)} == set()


def test_no_field_of_vllms_server_is_forgotten() -> None:
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest
    from vllm.entrypoints.pooling.scoring.protocol import RerankRequest as Rerank
    from vllm.entrypoints.pooling.scoring.protocol import ScoreRequest

    requests = [
        (CHAT_URL, protocol.ChatCompletionRequest),
        (COMPLETIONS_URL, CompletionRequest),
        (EMBEDDINGS_URL, EmbeddingCompletionRequest),
        (EMBEDDINGS_URL, EmbeddingChatRequest),
        (RERANK_URL, Rerank),
        *((SCORE_URL, request) for request in typing.get_args(ScoreRequest)),
    ]
    for url, request in requests:
        assert inspect.isclass(request)
        assert {*request.model_fields} - {*fields_of(url)} == set(), url


@pytest.mark.parametrize(("url", "name", "fields"), each("used"))
def test_a_field_that_is_used_makes_another_request(url: str, name: str, fields: Fields) -> None:
    """Or an error that says what it must be."""
    plain = read(url)
    assert not isinstance(plain, RowError), plain
    found = read(url, **BESIDE.get((url, name), {name: GIVEN[name]}))
    if isinstance(found, RowError):
        assert found.error_message.startswith(f"body.{name if name != 'logprobs' else ''}"), found
        assert "which is not supported" not in found.error_message
        assert name in ("model", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
                        "use_activation", "logprobs", "top_logprobs", "prompt_logprobs")  # fmt: skip
    else:
        assert (found, found.form) != (plain, plain.form)
    assert objection(url, name, GIVEN[name]) is not None  # what no reader uses is not dropped


@pytest.mark.parametrize(("url", "name", "fields"), each("without effect"))
def test_a_field_without_effect_makes_the_same_request(url: str, name: str, fields: Fields) -> None:
    plain = read(url)
    assert not isinstance(plain, RowError), plain
    for value in ("a", 3, True, {"a": 1}):
        found = read(url, **{name: value})
        assert isinstance(found, Read), found
        forms = [json.loads(request.form or "") for request in (plain, found)]
        assert (found, forms[1]) == (plain, forms[0])


@pytest.mark.parametrize(("url", "name", "fields"), each("refused"))
def test_a_field_that_is_refused_is_named_with_the_reason(url: str, name: str, fields: Fields) -> None:
    plain = read(url)
    found = read(url, **{name: "strange"})
    assert isinstance(found, RowError)
    reason = fields.note.replace("`", "")
    assert found == RowError("unsupported_request", f"body.{name}: got 'strange', which is not supported: {reason}")
    for value in fields.accepted:
        assert read(url, **{name: value}) == plain


def test_a_number_is_no_flag() -> None:
    assert objection(CHAT_URL, "stream", 0) is not None
    assert objection(CHAT_URL, "best_of", True) is not None


def table() -> list[str]:
    """The lines of the tables in the docs."""
    words = {"used": "Used", "without effect": "Without effect", "refused": "Refused"}
    lines = []
    for use, title in words.items():
        lines += [f"## {title}", "", "| fields | lines | |", "| --- | --- | --- |"]
        for fields in (it for it in FIELDS if it.use == use):
            names = ", ".join(f"`{name}`" for name in fields.names)
            note = fields.note
            if fields.accepted:
                values = ", ".join(f"`{json.dumps(value)}`" for value in fields.accepted)
                note = f"{note}; accepted: {values}"
            urls = "all" if len(fields.urls) == len(NAMES) else ", ".join(NAMES[url] for url in fields.urls)
            lines.append(f"| {names} | {urls} | {note} |")
        lines.append("")
    return lines


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition("## Used")[1:] == ("## Used", "\n".join(table()).partition("## Used")[2])


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text(encoding="utf-8").partition("## Used")[0] + "\n".join(table()), encoding="utf-8")

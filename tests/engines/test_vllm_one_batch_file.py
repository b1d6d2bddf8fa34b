"""One file with every kind of line, through `vllm run-batch` and through `batchinf run-batch`: equal answers.

An engine generates or pools. So the file is run with a model that generates, with one of embeddings, and with a
cross-encoder; the lines of the other kinds are errors in both programs.
"""

import base64
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import run_batch_lines as given
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

import jobs
from batchinf.commands.run_batch import batch_run, write_answers
from batchinf.commands.verify import verify_job
from batchinf.spec.file import read_spec

pytest.importorskip("vllm")
from vllm.entrypoints.pooling.scoring.protocol import RerankResponse, ScoreResponse

CROSS_ENCODER = jobs.ROOT / "sample_data" / "tiny-reranker"
TEMPLATE = jobs.ROOT / "tests" / "tools.jinja"
# vLLM's names for a template of pairs.
PAIRS = (
    "{%- for message in messages %}{{ '<|start_header_id|>' + message['role'] + '\n' + message['content'] }}"
    "{%- endfor %}{{ instruction | default('') }}"
)
COMMON = ("--dtype", "float32", "--enforce-eager")
POOLING = (*COMMON, "--runner", "pooling")
EMBED = (*POOLING, "--convert", "embed", "--max-model-len", "256", "--hf-overrides", '{"is_matryoshka": true}')
GENERATE = (*COMMON, "--max-model-len", "1024", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
            "--chat-template", str(TEMPLATE))  # fmt: skip


def names(prefix: str) -> set[str]:
    return {line["custom_id"] for line in given.every_kind() if line["custom_id"].startswith(prefix)}


def file_of(folder: pathlib.Path) -> pathlib.Path:
    return given.write(folder / "in.jsonl", given.every_kind())


def verify(folder: pathlib.Path, column: str) -> None:
    spec = read_spec(folder / "job.yaml")
    report = verify_job(spec, num_rows=16, seed=0, device="cpu", tolerance=None)
    report.raise_if_beyond()
    assert any(column in line for line in report.lines()), list(report.lines())


# -- texts and calls ---------------------------------------------------------------------------------------------------


def chat(body: dict[str, Any]) -> dict[str, Any]:
    """What an answer says, but for ids and times."""
    parsed = ChatCompletion.model_validate(body)
    choices = []
    for choice in parsed.choices:
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        tokens = [] if choice.logprobs is None else [token.token for token in choice.logprobs.content or ()]
        choices.append((choice.index, choice.message.content or None, calls, choice.finish_reason, tokens))
    usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": choices, "usage": usage}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_a_model_that_generates(tmp_path: pathlib.Path) -> None:
    path = file_of(tmp_path)
    theirs = given.by_vllm(path, jobs.MODEL, *GENERATE)
    ours = given.by_batchinf(path, jobs.MODEL, *GENERATE)
    assert ours.keys() == theirs.keys() == names("")
    expected, found = given.answered(theirs), given.answered(ours)
    # vLLM answers calls that cannot be parsed with a text.
    assert found.keys() == {*given.CHATS}
    assert expected.keys() == found.keys() | given.BROKEN_CALLS.keys()
    for name, body in found.items():
        assert chat(body) == chat(expected[name]), name
    for name in given.BROKEN_CALLS:
        assert ours[name]["error"]["code"] == "invalid_tool_call"
    assert {answer["error"]["code"] for name, answer in ours.items() if name.startswith(("embed", "score"))} == {
        "unsupported_request"
    }
    of_tokens = [body["logprobs"]["choices"][0]["logprobs"]["content"] for body in (expected, found)]
    for one, other in zip(*of_tokens, strict=True):
        assert abs(one["logprob"] - other["logprob"]) < 1e-3
        assert [top["token"] for top in one["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]
    calls = {name: [call[0] for call in chat(body)["choices"][0][2]] for name, body in found.items()}
    assert (calls["two"], calls["named"]) == (["get_weather", "get_time"], ["get_time"])
    assert calls["required"] and calls["required strict"] == ["get_weather"]


# -- vectors and scores ------------------------------------------------------------------------------------------------


def vectors_of(body: dict[str, Any]) -> list[np.ndarray]:
    """As the openai package gives them: it decodes base64 before its caller sees it."""
    for item in body["data"]:
        if isinstance(item["embedding"], str):
            item["embedding"] = np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist()
    parsed = CreateEmbeddingResponse.model_validate(body)
    assert [item.index for item in parsed.data] == list(range(len(parsed.data)))
    return [np.array(item.embedding, np.float32) for item in parsed.data]


def compare_vectors(expected: dict[str, Any], found: dict[str, Any]) -> None:
    types = [[type(item["embedding"]) for item in body["data"]] for body in (expected, found)]
    assert types[0] == types[1]
    pairs = list(zip(vectors_of(expected), vectors_of(found), strict=True))
    assert all(np.allclose(a, b, atol=1e-5) for a, b in pairs)
    assert {key: found["usage"][key] for key in ("prompt_tokens", "total_tokens")} == {
        key: expected["usage"][key] for key in ("prompt_tokens", "total_tokens")
    }
    assert found.keys() == expected.keys() and found["object"] == expected["object"]


def compare_scores(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    if "results" in expected:
        one, other = RerankResponse.model_validate(expected), RerankResponse.model_validate(found)
        assert found["results"][0].keys() == expected["results"][0].keys()
        assert other.usage == one.usage
        for answer in (one, other):
            in_order = [each.relevance_score for each in answer.results]
            assert in_order == sorted(in_order, reverse=True)
        # Two documents whose scores differ by less than the engine's rounding may change places; what each got may not.
        by_index = [sorted(answer.results, key=lambda each: each.index) for answer in (one, other)]
        assert [each.index for each in by_index[1]] == [each.index for each in by_index[0]]
        assert [each.document for each in by_index[1]] == [each.document for each in by_index[0]]
        scores = [[each.relevance_score for each in results] for results in by_index]
    else:
        of_score, of_ours = ScoreResponse.model_validate(expected), ScoreResponse.model_validate(found)
        assert [each.index for each in of_ours.data] == [each.index for each in of_score.data]
        assert found["data"][0].keys() == expected["data"][0].keys()
        assert of_ours.usage == of_score.usage
        scores = [[each.score for each in answer.data] for answer in (of_score, of_ours)]
    assert np.allclose(scores[0], scores[1], rtol=1e-5, atol=1e-6), scores


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_a_model_of_embeddings(tmp_path: pathlib.Path) -> None:
    """It scores texts, too, as a bi-encoder: here that is a job of its own over the same file."""
    path = file_of(tmp_path)
    expected = given.answered(given.by_vllm(path, jobs.MODEL, *EMBED))
    found = given.answered(given.by_batchinf(path, jobs.MODEL, *EMBED))
    assert found.keys() == names("embedding")
    assert expected.keys() == names("embedding") | names("score")
    for name, body in found.items():
        compare_vectors(expected[name], body)
    verify(tmp_path / "in.job", "embeddings")
    run = batch_run(str(path), str(tmp_path / "scores.jsonl"), str(jobs.MODEL), [*EMBED, "-dp", "1"])
    (tmp_path / "scores.json").write_text(json.dumps({**run.spec, "task": "rerank"}))
    jobs.finish(tmp_path / "scores.json")
    write_answers(run, has_rows=True)
    scored = given.answered(given.answers_in(tmp_path / "scores.jsonl"))
    assert scored.keys() == names("score")
    for name, body in scored.items():
        compare_scores(expected[name], body)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_a_cross_encoder(tmp_path: pathlib.Path) -> None:
    # Only a cross-encoder has an activation, whose absence changes the scores.
    raw = given.lines_of([("/score", {"text_1": given.QUERY, "text_2": given.DOCUMENTS, "use_activation": False})])
    path = given.write(tmp_path / "in.jsonl", [*given.every_kind(), *raw])
    flags = (*POOLING, "--convert", "classify", "--max-model-len", "128")
    expected = given.answered(given.by_vllm(path, CROSS_ENCODER, *flags))
    found = given.answered(given.by_batchinf(path, CROSS_ENCODER, *flags))
    assert found.keys() == expected.keys() == names("score") | {"0"}
    for name, body in found.items():
        compare_scores(expected[name], body)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_template_of_pairs_is_used_as_by_vllm(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pairs.jinja").write_text(PAIRS)
    query, documents, long = given.QUERY, given.DOCUMENTS, given.LONG
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/rerank", {"query": query, "documents": documents}),
        ("/score", {"text_1": query, "text_2": documents[:2], "instruction": " Find the passage."}),
        ("/score", {"text_1": query, "text_2": documents[:2], "chat_template_kwargs": {"instruction": " Other."}}),
        ("/rerank", {"query": query, "documents": [long, "a"], "truncate_prompt_tokens": 30}),
        ("/rerank", {"query": long, "documents": [long], "max_tokens_per_doc": 9, "max_tokens_per_query": 9}),
    ]
    path = given.write(tmp_path / "in.jsonl", given.lines_of(bodies))
    flags = (*POOLING, "--max-model-len", "128", "--chat-template", str(tmp_path / "pairs.jinja"))
    expected = given.answered(given.by_vllm(path, CROSS_ENCODER, *flags))
    found = given.answered(given.by_batchinf(path, CROSS_ENCODER, *flags))
    assert found.keys() == expected.keys() == set(map(str, range(len(bodies))))
    for name, body in found.items():
        compare_scores(expected[name], body)
    scores = [found[number]["data"][0]["score"] for number in "12"]
    assert len({*scores, found["0"]["results"][0]["relevance_score"]}) == 3

"""Lines with `/score` and `/rerank` through `vllm run-batch` and through `batchinf run-batch`, and `task: rerank`."""

import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

import jobs
from batchinf.commands.verify import verify_job
from batchinf.spec.file import read_spec

pytest.importorskip("vllm")
from vllm.entrypoints.pooling.scoring.protocol import RerankResponse, ScoreResponse

CROSS_ENCODER = jobs.ROOT / "sample_data" / "tiny-reranker"
QUERY = "small fox lived wood"
DOCUMENTS = [
    "The sea is blue.",
    "Once a small fox lived in a wood.",
    "",
    "A letter for the fox",
    "A letter for the fox",
]
LONG = "a fox ran over the mountain to see the garden " * 12
# vLLM's names for a template of pairs.
TEMPLATE = (
    "{%- for message in messages %}{{ '<|start_header_id|>' + message['role'] + '\n' + message['content'] }}"
    "{%- endfor %}{{ instruction | default('') }}"
)
# Of lines, each with the ending of its URL.
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS[1]}),
    ("/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
    ("/score", {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS[1:3]}),
    ("/score", {"queries": QUERY, "documents": DOCUMENTS[:2], "user": "me", "priority": 0}),
    ("/score", {"queries": [QUERY], "items": DOCUMENTS[:2]}),
    ("/v1/score", {"data_1": QUERY, "data_2": DOCUMENTS[:2], "use_activation": True}),
    ("/rerank", {"query": QUERY, "documents": DOCUMENTS}),
    ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "padding": "do_not_pad"}),
    ("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS[0], "top_n": 0, "return_documents": True}),
    ("/rerank", {"query": QUERY, "documents": DOCUMENTS[:2], "top_n": 9, "chat_template_kwargs": {}}),
    ("/rerank", {"query": QUERY, "documents": [LONG, DOCUMENTS[1]], "truncate_prompt_tokens": 20}),
    ("/score", {"text_1": LONG, "text_2": [LONG, DOCUMENTS[1]], "truncate_prompt_tokens": -1}),
    ("/score", {"text_1": LONG, "text_2": LONG, "truncate_prompt_tokens": 31, "truncation_side": "left"}),
    ("/score", {"text_1": QUERY, "text_2": LONG, "truncate_prompt_tokens": 31, "truncation_side": "right"}),
    ("/rerank", {"query": LONG, "documents": [LONG, DOCUMENTS[1]], "max_tokens_per_doc": 9, "max_tokens_per_query": 7}),
    ("/rerank", {"query": QUERY, "documents": [LONG], "max_tokens_per_doc": 60, "truncate_prompt_tokens": 24}),
]
# Only a cross-encoder has an activation, whose absence changes the scores.
OF_CROSS_ENCODER: list[tuple[str, dict[str, Any]]] = [
    ("/score", {"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("/score", {"text_1": QUERY, "text_2": LONG * 4}),
    ("/score", {"text_1": QUERY, "text_2": []}),
    ("/score", {"text_1": [QUERY, QUERY], "text_2": DOCUMENTS}),
    ("/rerank", {"query": QUERY, "documents": DOCUMENTS, "truncate_prompt_tokens": 4096}),
    ("/rerank", {"query": QUERY, "documents": DOCUMENTS, "max_tokens_per_doc": 4096}),
]


def lines_of(model: pathlib.Path, bodies: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {"custom_id": str(number), "method": "POST", "url": url, "body": {"model": str(model), **body}}
        for number, (url, body) in enumerate(bodies)
    ]


def both(folder: pathlib.Path, model: pathlib.Path, lines: list[dict[str, Any]], *flags: str) -> list[dict[str, Any]]:
    """The answers of vLLM and of batchinf, by id."""
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    files = ("-i", str(folder / "in.jsonl"), "--model", str(model))
    flags = (*flags, "--runner", "pooling", "--dtype", "float32", "--max-model-len", "128", "--enforce-eager")
    command = (sys.executable, "-m", "vllm.entrypoints.openai.run_batch", *files, "-o", str(folder / "theirs"))
    theirs = subprocess.run(
        [*command, *flags, "--gpu-memory-utilization", "0.1"],
        capture_output=True,
        text=True,
        check=False,
        env={**jobs.inherited(), **jobs.quick_start()},
    )
    assert theirs.returncode == 0, theirs.stderr[-4000:]
    done = jobs.run("run-batch", *files, "-o", folder / "ours", *flags, "-dp", "1")
    assert done.returncode == 0, done.stderr
    answers = [map(json.loads, (folder / name).read_text().splitlines()) for name in ("theirs", "ours")]
    by_id = [{answer["custom_id"]: answer for answer in each} for each in answers]
    assert all(len(each) == len(lines) for each in by_id)
    return by_id


def compare(number: int, url: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    expected, found = (answers[str(number)]["response"] for answers in (theirs, ours))
    assert expected is not None and found is not None, (number, theirs[str(number)], ours[str(number)])
    expected, found = expected["body"], found["body"]
    assert found.keys() == expected.keys()
    if url.endswith("/rerank"):
        one, other = RerankResponse.model_validate(expected), RerankResponse.model_validate(found)
        assert found["results"][0].keys() == expected["results"][0].keys()
        assert other.usage == one.usage
        for answer in (one, other):
            in_order = [each.relevance_score for each in answer.results]
            assert in_order == sorted(in_order, reverse=True), number
        # Two documents whose scores differ by less than the engine's rounding may change places; what each got may not.
        by_index = [sorted(answer.results, key=lambda each: each.index) for answer in (one, other)]
        assert [each.index for each in by_index[1]] == [each.index for each in by_index[0]], number
        assert [each.document for each in by_index[1]] == [each.document for each in by_index[0]]
        scores = [[each.relevance_score for each in results] for results in by_index]
    else:
        of_score, of_ours = ScoreResponse.model_validate(expected), ScoreResponse.model_validate(found)
        assert [each.index for each in of_ours.data] == [each.index for each in of_score.data]
        assert found["data"][0].keys() == expected["data"][0].keys()
        assert of_ours.usage == of_score.usage
        scores = [[each.score for each in answer.data] for answer in (of_score, of_ours)]
    assert np.allclose(scores[0], scores[1], rtol=1e-5, atol=1e-6), (number, scores)


def verify(folder: pathlib.Path) -> None:
    spec = read_spec(folder / "ours.job" / "job.yaml")
    report = verify_job(spec, num_rows=64, seed=0, dtype="float32", device="cpu", tolerance=None)
    report.raise_if_beyond()
    assert any("relevance_scores" in line for line in report.lines()), list(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cross-encoder", "bi-encoder"])
def test_the_scores_are_those_of_vllm_run_batch(kind: str, tmp_path: pathlib.Path) -> None:
    is_cross = kind == "cross-encoder"
    model = CROSS_ENCODER if is_cross else jobs.MODEL
    good = [*GOOD, *(OF_CROSS_ENCODER if is_cross else [])]
    lines = lines_of(model, [*good, *BAD])
    theirs, ours = both(tmp_path, model, lines, *([] if is_cross else ["--convert", "embed"]))
    for number, (url, _) in enumerate(good):
        compare(number, url, theirs, ours)
    for number in range(len(good), len(lines)):
        assert theirs[str(number)]["error"] is not None or theirs[str(number)]["response"]["status_code"] != 200, number
        assert ours[str(number)]["error"] is not None and ours[str(number)]["response"] is None, number
    verify(tmp_path)


@pytest.mark.slow
def test_a_template_of_pairs_is_used_as_by_vllm_run_batch(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pairs.jinja").write_text(TEMPLATE)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/rerank", {"query": QUERY, "documents": DOCUMENTS}),
        ("/score", {"text_1": QUERY, "text_2": DOCUMENTS[:2], "instruction": " Find the passage."}),
        ("/score", {"text_1": QUERY, "text_2": DOCUMENTS[:2], "chat_template_kwargs": {"instruction": " Other."}}),
        ("/rerank", {"query": QUERY, "documents": [LONG, "a"], "truncate_prompt_tokens": 30}),
        ("/rerank", {"query": LONG, "documents": [LONG], "max_tokens_per_doc": 9, "max_tokens_per_query": 9}),
    ]
    lines = lines_of(CROSS_ENCODER, bodies)
    theirs, ours = both(tmp_path, CROSS_ENCODER, lines, "--chat-template", str(tmp_path / "pairs.jinja"))
    for number, (url, _) in enumerate(bodies):
        compare(number, url, theirs, ours)
    scores = [ours[number]["response"]["body"]["data"][0]["score"] for number in "12"]
    assert len({*scores, ours["0"]["response"]["body"]["results"][0]["relevance_score"]}) == 3


@pytest.mark.slow
def test_pairs_of_columns_are_verified(tmp_path: pathlib.Path) -> None:
    """A cross-encoder that is a language model, raw scores, and a document for each row."""
    rows = [{"id": f"r{n}", "query": f"fox {n}", "text": f"{QUERY} of the sea {n}"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=1536, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, pad_token_id=2, num_labels=1,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(jobs.MODEL / name, tmp_path / "model")
    spec = jobs.spec_of(
        tmp_path,
        model={"name": str(tmp_path / "model"), "dtype": "float32"},
        task="rerank",
        input={"path": str(tmp_path / "rows.jsonl"), "query_column": "query", "document_column": "text"},
        pooling={"use_activation": False},
        engine={"max_model_len": 128},
        sampling=None,
        scripted=None,
        parallel={"data_parallel_size": 1},
        output={"keep_columns": []},
    )
    jobs.finish(spec)
    scores = [row["relevance_score"] for row in jobs.rows_of(tmp_path / "out")]
    assert len(set(scores)) == 12 and not all(0 < score < 1 for score in scores)
    report = verify_job(read_spec(spec), num_rows=12, seed=0, dtype="float32", device="cpu", tolerance=None)
    report.raise_if_beyond()

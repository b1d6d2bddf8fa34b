"""Task `rerank`: columns and lines of batch files, prompts as vLLM makes them, and whole jobs that are killed."""

import itertools
import json
import math
import pathlib
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from transformers import AutoTokenizer

import batchinf
import jobs
from batchinf import api
from batchinf.base.errors import OutputError, RowError, SpecError
from batchinf.commands.diff import diff_jobs
from batchinf.commands.export import ExportRequest, export_job
from batchinf.job.open import prepare_job
from batchinf.model.model import resolve
from batchinf.records import Prompt, Reranking
from batchinf.source.rows import Row
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of, task_type
from batchinf.tasks.vectors.rerank import cosines, ranked
from batchinf.tasks.vectors.rerank_lines import RerankReader, RerankRequest
from batchinf.tasks.vectors.rerank_prompts import longest_first

CROSS_ENCODER = jobs.ROOT / "sample_data" / "tiny-reranker"
QUERIES = jobs.ROOT / "sample_data" / "queries.jsonl"
PROMPT_TEXT = "Once a small fox lived in a wood by the sea"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{{ instruction }}"


def spec_of(*, cross: bool = True, **sections: Any) -> JobSpec:
    spec = JobSpec.model_validate(
        {
            "model": str(CROSS_ENCODER if cross else jobs.MODEL),
            "task": "rerank",
            "input": {"path": "in.jsonl", "format": "openai"},
            "output": {"path": "out", "include_prompt": True},
            **sections,
        }
    )
    return task_type(spec).resolve(spec, resolve(spec.model))


COLUMNS = {"path": "in", "query_column": "query", "documents_column": "documents"}


def line(number: object = 0, url: str = "/v1/score", /, **body: Any) -> dict[str, Any]:
    return {"custom_id": str(number), "method": "POST", "url": url, "body": body}


def scored(spec: JobSpec | None = None, /, **body: Any) -> RerankRequest | RowError:
    return jobs.or_error(RerankReader(spec or spec_of()).read, line(**body))


def reranked(spec: JobSpec | None = None, /, **body: Any) -> RerankRequest | RowError:
    values = line(0, "/rerank", **{"query": "q", "documents": ["a", "b"], **body})
    return jobs.or_error(RerankReader(spec or spec_of()).read, values)


def built(values: dict[str, Any], spec: JobSpec | None = None, max_model_len: int | None = 64) -> Prompt:
    spec = spec or spec_of()
    builder = task_of(spec).prompt_builder(AutoTokenizer.from_pretrained(spec.model.name), 1536)
    [prompt] = builder.build([Row(0, values, None)], max_model_len)
    return prompt


# -- lines -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (("text_1", "text_2"), ("a", "b")),
        (("queries", "documents"), ("a", ["b", "c"])),
        (("queries", "items"), (["a"], ["b", "c"])),
        (("data_1", "data_2"), (["a", "b"], ["c", "d"])),
    ],
)
def test_both_sides_of_a_score(names: tuple[str, str], values: tuple[Any, Any]) -> None:
    request = scored(**dict(zip(names, values, strict=True)))
    assert isinstance(request, RerankRequest)
    expected = [[value] if isinstance(value, str) else value for value in values]
    assert [request.queries, request.documents] == expected
    assert (request.top_n, json.loads(request.form or "")) == (None, {"url": "/v1/score"})


def test_a_ranking() -> None:
    request = reranked()
    assert isinstance(request, RerankRequest)
    assert (request.queries, request.documents, request.top_n) == (["q"], ["a", "b"], 2)
    assert json.loads(request.form or "") == {"url": "/v1/rerank", "documents": ["a", "b"]}
    for body, top_n in (({"top_n": 1}, 1), ({"top_n": 0}, 2), ({"top_n": 9}, 9), ({"documents": "a"}, 1)):
        request = reranked(**body)
        assert isinstance(request, RerankRequest)
        assert request.top_n == top_n
    of_job = reranked(spec_of(pooling={"top_n": 1}))
    assert isinstance(of_job, RerankRequest)
    assert of_job.top_n == 1
    bare = reranked(return_documents=False)
    assert isinstance(bare, RerankRequest)
    assert json.loads(bare.form or "") == {"url": "/v1/rerank"}


@pytest.mark.parametrize("body", [
    {"user": "me", "priority": 3, "cache_salt": "x", "request_id": "r", "model": None, "truncation_side": "left"},
    {"padding": "do_not_pad", "mm_processor_kwargs": {}, "chat_template_kwargs": {}, "instruction": None},
    {"max_tokens_per_query": 0, "max_tokens_per_doc": 0},
])  # fmt: skip
def test_fields_that_change_nothing(body: dict[str, Any]) -> None:
    assert reranked(**body) == reranked()
    assert scored(text_1="a", text_2="b", **body) == scored(text_1="a", text_2="b")


@pytest.mark.parametrize(("body", "words"), [
    ({"text_1": "a"}, "body: got text_1; must have text_1 and text_2 or queries and documents or"),
    ({}, "body: got neither; must have text_1 and text_2"),
    ({"text_1": "a", "text_2": "b", "queries": "c"}, "body: got queries, text_1, text_2; must have"),
    ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, "body: got 2 texts in text_1 and 3 in text_2; must be one in text_1"),
    ({"text_1": [], "text_2": "b"}, "body.text_1: got an empty list; must be one text, or a list of texts"),
    ({"text_1": "a", "text_2": {"content": []}}, "body.text_2: got a mapping"),
    ({"text_1": "a", "text_2": "b", "top_n": 1}, "body.top_n: got 1, which is not supported"),
])  # fmt: skip
def test_scores_that_are_refused(body: dict[str, Any], words: str) -> None:
    error = scored(**body)
    assert isinstance(error, RowError)
    assert error.error_type == "unsupported_request"
    assert error.error_message.startswith(words)


@pytest.mark.parametrize(("body", "words"), [
    ({"query": None}, "body.query: got nothing; must be text"),
    ({"query": ["a"]}, "body.query: got a list; must be text"),
    ({"documents": None}, "body.documents: got nothing"),
    ({"documents": [{"text": "a"}]}, "body.documents: got a list; must be one text, or a list of texts"),
    ({"top_n": -1}, "body.top_n: got -1; must be a whole number, at least 0"),
    ({"top_n": True}, "body.top_n: got True"),
    ({"max_tokens_per_doc": 1.5}, "body.max_tokens_per_doc: got 1.5"),
    ({"truncate_prompt_tokens": 0}, "body.truncate_prompt_tokens: got 0"),
    ({"use_activation": "no"}, "body.use_activation: got 'no'; must be true or false"),
    ({"instruction": "find"}, "body.instruction: got it, but the job has no input.chat_template"),
    ({"chat_template_kwargs": {"a": 1}}, "body.chat_template_kwargs: got it, but the job has no input.chat_template"),
    ({"padding": "max_length"}, "body.padding: got 'max_length', which is not supported"),
    ({"rank_fields": ["a"]}, "body.rank_fields: got a list, which is not supported"),
    ({"model": "other"}, "body.model: got 'other'"),
])  # fmt: skip
def test_rankings_that_are_refused(body: dict[str, Any], words: str) -> None:
    error = reranked(**body)
    assert isinstance(error, RowError)
    assert error.error_message.startswith(words)


def test_activation_is_the_lines_own_for_a_cross_encoder() -> None:
    for cross, expected in ((True, False), (False, None)):
        request = reranked(spec_of(cross=cross), use_activation=False)
        assert isinstance(request, RerankRequest)
        assert request.use_activation is expected
    prompt = built(line(text_1="a", text_2=["b", "c"], use_activation=False))
    requests = task_of(spec_of()).expand(prompt, 64)
    assert [(request.request_index, request.use_activation) for request in requests] == [(0, False), (1, False)]


# -- prompts -----------------------------------------------------------------------------------------------------------


def theirs_of(spec: JobSpec, pair: tuple[str, str], max_model_len: int, body: dict[str, Any]) -> tuple[Any, Any]:
    """The ids and the compressed token types by the code of vLLM's server."""
    scoring = pytest.importorskip("vllm.entrypoints.pooling.scoring.io_processor")
    params = pytest.importorskip("vllm.renderers.params")
    tokenizer = AutoTokenizer.from_pretrained(spec.model.name)
    given = {name: body[name] for name in ("truncate_prompt_tokens", "truncation_side") if name in body}
    wanted = params.TokenizeParams(max_total_tokens=max_model_len, **given)
    names = ("multimodal_config", "enable_prompt_embeds", "allowed_local_media_path", "allowed_media_domains")
    config = SimpleNamespace(is_multimodal_model=False, **dict.fromkeys(names))
    processor = object.__new__(scoring.CrossEncoderIOProcessor)
    vars(processor).update(
        model_config=config, tokenizer=tokenizer, supports_score_template=False, model=None, use_sep_token=True
    )
    limits = {name: body.get(name, 0) for name in ("max_tokens_per_query", "max_tokens_per_doc")}
    _, prompt = processor.get_score_prompt(*pair, encode_kwargs=wanted.get_encode_kwargs(), **limits)
    types = prompt.pop("token_type_ids")
    wanted.apply_post_tokenization(tokenizer, prompt)
    types = scoring._apply_post_tokenization_to_token_type_ids(tokenizer, wanted, types)
    return prompt["prompt_token_ids"], scoring.compress_token_type_ids(types)


LONG = " ".join(f"{PROMPT_TEXT} {number}." for number in range(9))


@pytest.mark.parametrize("body", [
    {},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 9},
    {"truncate_prompt_tokens": 30},
    {"truncate_prompt_tokens": 30, "truncation_side": "left"},
    {"truncate_prompt_tokens": 30, "truncation_side": "right"},
    {"max_tokens_per_doc": 5, "max_tokens_per_query": 3},
    {"max_tokens_per_doc": 40, "truncate_prompt_tokens": 35},
], ids=str)  # fmt: skip
def test_prompts_are_those_of_vllms_server(body: dict[str, Any]) -> None:
    """Held against the code with which vLLM's server makes the prompt of a pair."""
    texts = ["a", PROMPT_TEXT, *([LONG] if body else [])]
    queries = texts[:2] if body.get("max_tokens_per_doc") == 40 else texts  # a query that does not fit: see below
    for pair in itertools.product(queries, ["", *texts]):
        prompt = built(line(text_1=pair[0], text_2=pair[1], **body), None, 64)
        ids, start = theirs_of(spec_of(), pair, 64, body)
        assert prompt.error is None
        assert prompt.inputs == (ids,)
        assert prompt.reranking is not None
        assert [len(ids) if it is None else it for it in prompt.reranking.token_type_starts] == [start]


def test_the_longer_text_is_cut_first_as_by_the_tokenizers_library() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CROSS_ENCODER)
    rng = random.Random(3)
    for _ in range(300):
        counts = [rng.randint(0, 12), rng.randint(1, 12)]  # an empty second text is none
        room = rng.randint(1, 20)
        texts = [" of" * count for count in counts]
        assert [len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts] == counts
        cut = tokenizer(*texts, truncation=True, max_length=room + 3).encodings[0].sequence_ids
        assert longest_first(*counts, room) == (cut.count(0), cut.count(1)), (counts, room)


@pytest.mark.parametrize(("body", "words"), [
    ({"truncate_prompt_tokens": 65}, "body.truncate_prompt_tokens: got 65; must be at most max_model_len 64"),
    ({"truncate_prompt_tokens": 3}, "got 3 tokens for a prompt, which leaves no room beside the special tokens"),
    ({"max_tokens_per_query": 64}, "body.max_tokens_per_query: got 64; must be below max_model_len 64"),
    ({"max_tokens_per_doc": 9, "truncate_prompt_tokens": 20},
     "the query has 143 tokens, which leaves no room for the document in 17"),
    ({}, "got 148 tokens; at most 64 fit max_model_len=64"),
])  # fmt: skip
def test_pairs_that_do_not_fit(body: dict[str, Any], words: str) -> None:
    error = built(line(text_1=LONG, text_2="fox", **body)).error
    assert error is not None
    assert error.error_message == words
    assert built(line(text_1="fox", text_2=["a", LONG])).error == RowError(
        "prompt_too_long",
        f"document 1: {built(line(text_1='fox', text_2=LONG)).error.error_message}",  # type: ignore
    )


def test_texts_far_too_long_cost_little() -> None:
    far = "fox " * 200_000
    assert built(line(text_1="fox", text_2=far)).error is not None
    short = built(line(text_1="fox", text_2=far, truncate_prompt_tokens=20))
    assert short.error is None
    assert short.inputs == built(line(text_1="fox", text_2="fox " * 90, truncate_prompt_tokens=20)).inputs


def test_a_bi_encoder_embeds_each_text() -> None:
    spec = spec_of(cross=False)
    prompt = built(line(text_1=["a", "b"], text_2=["c", PROMPT_TEXT]), spec)
    tokenizer = AutoTokenizer.from_pretrained(jobs.MODEL)
    assert prompt.inputs == tuple(tokenizer(text).input_ids for text in ("a", "b", "c", PROMPT_TEXT))
    assert prompt.reranking == Reranking(2, None, (None,) * 4)
    assert built(line(text_1=LONG, text_2="a"), spec).error is not None
    long = built(line(text_1=LONG, text_2=["a", LONG]), spec_of(cross=False)).error
    assert long is not None
    assert long.error_message.startswith("the query: got ")


def test_a_template_of_pairs() -> None:
    spec = spec_of(input={**COLUMNS, "chat_template": TEMPLATE, "chat_template_kwargs": {"instruction": "Find."}})
    prompt = built({"query": "a fox", "documents": ["the sea", "a wood"]}, spec)
    tokenizer = AutoTokenizer.from_pretrained(CROSS_ENCODER)
    texts = [f"[query] a fox [document] {text} Find." for text in ("the sea", "a wood")]
    assert prompt.inputs == tuple(tokenizer(text).input_ids for text in texts)
    lines = spec_of(input={"path": "in", "format": "openai", "chat_template": TEMPLATE})
    of_line = built(line(text_1="a fox", text_2="the sea", instruction="Find."), lines)
    assert of_line.inputs == prompt.inputs[:1]


def test_texts_without_a_separator() -> None:
    prompt = built(line(text_1="a fox", text_2=" in a wood"), spec_of(pooling={"use_sep_token": False}))
    assert prompt.inputs == (AutoTokenizer.from_pretrained(CROSS_ENCODER)("a fox in a wood").input_ids,)
    overrides = {"engine": {"hf_overrides": {"use_sep_token": False}}}
    assert spec_of(**overrides).pooling.use_sep_token is False  # type: ignore[attr-defined]


def test_columns() -> None:
    rows = {"query": "a", "documents": ["b", "c"]}
    spec = spec_of(input=COLUMNS, pooling={"top_n": 1})
    prompt = built(rows, spec)
    assert prompt.reranking is not None
    assert (prompt.reranking.top_n, len(prompt.inputs)) == (1, 2)
    assert built({"query": "a", "documents": '["b", "c"]'}, spec).inputs == prompt.inputs
    pair = {"path": "in", "query_column": "query", "document_column": "text"}
    of_pair = built({"query": "a", "text": "b"}, spec_of(input=pair))
    assert of_pair.inputs == prompt.inputs[:1]


@pytest.mark.parametrize(("values", "kind", "words"), [
    ({"query": None, "documents": ["a"]}, "null_query", "column 'query' is null"),
    ({"query": 3, "documents": ["a"]}, "wrong_type", "got a value of type int in column 'query'; expected a string"),
    ({"query": "a", "documents": None}, "null_documents", "column 'documents' is null"),
    ({"query": "a", "documents": []}, "no_documents", "column 'documents' has an empty list"),
    ({"query": "a", "documents": "b"}, "wrong_type", "got text that is not JSON in column 'documents'; expected"),
    ({"query": "a", "documents": ["b", None]}, "wrong_type", "got a list with null at place 1 in column 'documents'"),
    ({"query": "a", "documents": ["b", "\ud800"]}, "invalid_unicode", "document 1 is not valid Unicode"),
])  # fmt: skip
def test_columns_without_texts(values: dict[str, Any], kind: str, words: str) -> None:
    error = built(values, spec_of(input=COLUMNS)).error
    assert error is not None
    assert error.error_type == kind
    assert error.error_message.startswith(words)


@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs_that_the_spec_cuts(side: str) -> None:
    spec = spec_of(input={**COLUMNS, "on_overlong": f"truncate_{side}"})
    prompt = built({"query": "small fox", "documents": ["a", LONG]}, spec)
    assert (prompt.error, prompt.is_truncated) == (None, True)
    text = (prompt.text or "").splitlines()[1]
    assert len(prompt.inputs[1]) == 64
    assert "small fox" in text
    assert (" 8." in text) == (side == "left")


# -- the spec ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sections", "words"), [
    ({"input": {"path": "in", "query_column": "q"}}, "input.query_column: got it without documents_column or document"),
    ({"input": {"path": "in", "documents_column": "d"}}, "input.documents_column: got it without query_column"),
    ({"input": {**COLUMNS, "document_column": "d"}}, "input.document_column: got it beside documents_column"),
    ({"input": {**COLUMNS, "prompt_column": "p"}}, "input.query_column: got query_column beside prompt_column"),
    ({"input": {"path": "in", "prompt_column": "p"}}, "input.prompt_column: got it with task rerank, whose prompts"),
    ({"input": {**COLUMNS, "system_prompt": "p"}}, "input.system_prompt: got it with task rerank"),
    ({"pooling": {"normalize": False}}, "pooling.normalize: got false; must be left out with task rerank"),
    ({"sampling": {"max_tokens": 3}}, "sampling.max_tokens: got 3; must be left out with task rerank"),
    ({"input": {"path": "in", "query_column": "q", "document_column": "d"}, "pooling": {"top_n": 2}},
     "pooling.top_n: got 2 with input.document_column"),
    ({"pooling": {"score_type": "bi-encoder", "use_activation": True}}, "pooling.use_activation: got true with a bi-"),
    ({"input": COLUMNS, "task": "embed"}, "input.query_column: got it with task embed; must be left out, or set task"),
])  # fmt: skip
def test_specs_that_are_refused(sections: dict[str, Any], words: str) -> None:
    spec = {"model": str(CROSS_ENCODER), "task": "rerank", "input": COLUMNS, "output": {"path": "out"}, **sections}
    with pytest.raises(SpecError) as refused:
        read_spec(spec)
    assert words in str(refused.value)


def test_the_model_decides_how_it_scores() -> None:
    assert spec_of().pooling.score_type == "cross-encoder"  # type: ignore[attr-defined]
    bi = spec_of(cross=False).pooling  # type: ignore[attr-defined]
    assert (bi.score_type, bi.width) == ("bi-encoder", 128)
    as_embedder = spec_of(engine={"convert": "embed"}).pooling  # type: ignore[attr-defined]
    assert (as_embedder.score_type, as_embedder.width) == ("bi-encoder", 64)
    with pytest.raises(SpecError, match="has no classification head, which task rerank needs"):
        spec_of(cross=False, pooling={"score_type": "cross-encoder"})
    three = {"engine": {"hf_overrides": {"id2label": {"0": "a", "1": "b", "2": "c"}}}}
    with pytest.raises(SpecError, match="has 3 labels, and task rerank needs one with 1"):
        spec_of(**three)
    with pytest.raises(SpecError, match=r"input.chat_template: got it with a bi-encoder"):
        spec_of(cross=False, input={**COLUMNS, "chat_template": TEMPLATE})
    with pytest.raises(SpecError, match=r"JinaForRanking of .* needs prompts that task rerank does not make"):
        spec_of(engine={"hf_overrides": {"architectures": ["JinaForRanking"]}})


def test_columns_must_be_named(tmp_path: pathlib.Path) -> None:
    spec = {"model": str(CROSS_ENCODER), "task": "rerank", "input": {"path": str(QUERIES)},
            "output": {"path": str(tmp_path / "out")}, "scripted": {}}  # fmt: skip
    with pytest.raises(SpecError, match=r"input.query_column: missing; name the column of the query"):
        api.validate(spec)


def test_lines_decide_where_the_spec_names_no_task(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "in.jsonl"
    for url in ("/v1/score", "/score", "/rerank", "/v1/rerank", "/v2/rerank"):
        path.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": {}}) + "\n")
        spec = {"model": str(CROSS_ENCODER), "input": {"path": str(path)}, "output": {"path": str(tmp_path / "out")}}
        assert prepare_job(read_spec(spec)).spec.task == "rerank"


# -- scores ------------------------------------------------------------------------------------------------------------


def test_cosines_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    documents = rng.standard_normal((6, 16)).astype(np.float32)
    documents[3] = 0
    for queries in (documents[:1] * 3, rng.standard_normal((6, 16)).astype(np.float32)):
        expected = torch.nn.functional.cosine_similarity(torch.tensor(queries), torch.tensor(documents))
        found = cosines(queries, documents)
        assert found.dtype == np.float32
        assert np.allclose(found, expected.numpy(), atol=1e-6)


def test_equal_scores_keep_the_order_of_the_documents() -> None:
    scores = np.array([0.5, math.nan, 0.7, 0.5, 0.7], np.float32)
    assert ranked(scores).tolist() == [2, 4, 0, 3, 1]


# -- whole jobs --------------------------------------------------------------------------------------------------------

NUM_LINES = 60


def lines_of_a_job() -> list[dict[str, Any]]:
    lines = []
    for number in range(NUM_LINES):
        documents = [f"fox {number} of {place}" for place in range(1 + number % 5)]
        if number % 3 == 0:
            lines.append(line(number, "/score", text_1=f"a {number}", text_2=documents))
        elif number % 3 == 1:
            lines.append(line(number, "/rerank", query=f"a {number}", documents=documents, top_n=number % 4))
        else:
            queries = [f"b {place}" for place in range(len(documents))]
            lines.append(line(number, "/v1/score", queries=queries, documents=documents))
    lines[7] = line(7, "/v1/embeddings", input="a")
    lines[9] = line(9, "/rerank", query="a", documents=["b", "fox " * 400])
    lines[10] = line(10, "/rerank", query="a", documents=["b", "c", "d"], return_documents=False)
    return lines


def job_of(folder: pathlib.Path, model: pathlib.Path, **sections: Any) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    return jobs.spec_of(
        folder,
        **{
            "model": str(model),
            "sampling": None,
            "scripted": {"max_num_seqs": 3, "step_s": 0.005, "max_model_len": 64},
            "checkpoint_interval_s": 0.01,
            "max_error_rate": 1.0,
            **sections,
            "output": {"keep_columns": [], "rows_per_shard": 9, **sections.get("output", {})},
        },
    )


@pytest.mark.parametrize("model", [*jobs.slowly(CROSS_ENCODER), jobs.MODEL], ids=["cross-encoder", "bi-encoder"])
def test_killed_and_run_again(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A job that names no task resumes with the task of its lines, and its rows are those of an unhurt one."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines_of_a_job()))
    outputs = []
    for name, faults in (("unhurt", ""), ("hurt", "journal.before_fsync=kill,coordinator.after_publish:2=kill")):
        spec = job_of(tmp_path / name, model, input={"path": str(path), "id_column": None})
        if faults:
            once = tmp_path / "once"
            once.mkdir()
            assert jobs.run("run", spec, faults=faults, BATCHINF_FAULTS_ONCE=str(once)).returncode == -9
            assert len(list(once.iterdir())) == 2
        jobs.finish(spec)
        outputs.append(batchinf.open(tmp_path / name / "out").table().drop_columns(["attempts"]))
    assert outputs[0].equals(outputs[1])
    rows = outputs[0].to_pylist()
    for row, sent in zip(rows, lines_of_a_job(), strict=True):
        if row["row_index"] in (7, 9):
            assert (row["relevance_scores"], row["ranking"], row["num_output_tokens"]) == (None, None, None)
            continue
        body = sent["body"]
        documents = body.get("documents", body.get("text_2"))
        scores = row["relevance_scores"]
        assert (row["error_type"], len(scores), row["num_output_tokens"]) == (None, len(documents), 0)
        assert len(set(scores)) == len(documents)
        if sent["url"] == "/rerank":
            best = sorted(range(len(scores)), key=lambda place: -scores[place])
            assert row["ranking"] == best[: body.get("top_n") or len(scores)]
        else:
            assert row["ranking"] is None
    assert rows[7]["error_message"].startswith(
        "url: got '/v1/embeddings'; must be /v1/rerank or /v1/score, as the job's"
    )
    assert rows[9]["error_message"].startswith("document 1: got ")
    # Each query and each document has its own number.
    assert len({score for row in rows for score in row["relevance_scores"] or ()}) > 2 * NUM_LINES
    check_export(tmp_path / "hurt" / "out", rows)


def check_export(out: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """The answers as vLLM's types read them."""
    path = out.parent / "a.jsonl"
    assert export_job(str(out), ExportRequest(path=str(path), to="openai-batch")).num_rows == NUM_LINES
    answers = [json.loads(text) for text in path.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [str(n) for n in range(NUM_LINES) if n not in (7, 9)]
    types = pytest.importorskip("vllm.entrypoints.pooling.scoring.protocol")
    for answer in answers:
        row = rows[int(answer["custom_id"])]
        body = answer["response"]["body"]
        if row["ranking"] is None:
            parsed = types.ScoreResponse.model_validate(body)
            assert [item.score for item in parsed.data] == row["relevance_scores"]
            assert [item.index for item in parsed.data] == list(range(len(parsed.data)))
        else:
            parsed = types.RerankResponse.model_validate(body)
            assert [item.index for item in parsed.results] == row["ranking"]
            scores = [row["relevance_scores"][place] for place in row["ranking"]]
            assert [item.relevance_score for item in parsed.results] == scores
            texts = lines_of_a_job()[row["row_index"]]["body"]["documents"]
            has_texts = row["row_index"] != 10
            expected = [texts[place] if has_texts else None for place in row["ranking"]]
            assert [item.document.text for item in parsed.results] == expected
        assert parsed.usage.prompt_tokens == parsed.usage.total_tokens == row["num_prompt_tokens"]
    errors = [json.loads(text) for text in (out.parent / "a.errors.jsonl").read_text().splitlines()]
    assert [error["error"]["code"] for error in errors] == ["unsupported_request", "prompt_too_long"]


@pytest.mark.slow
def test_columns_pairs_and_a_comparison(tmp_path: pathlib.Path) -> None:
    """A list of documents, one document, and two jobs whose scores differ."""
    rows = [{"id": f"r{n}", "query": f"fox {n}", "documents": [f"a {n}", "b", "c"], "text": f"a {n}"} for n in range(9)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    one = {"task": "rerank", "parallel": {"data_parallel_size": 1}}
    lists = {**COLUMNS, "path": str(path)}
    pairs = {"path": str(path), "query_column": "query", "document_column": "text"}
    outs = {}
    for name, model, sections in (
        ("lists", CROSS_ENCODER, {"input": lists, "pooling": {"top_n": 2}}),
        ("raw", CROSS_ENCODER, {"input": lists, "pooling": {"use_activation": False}}),
        ("bi", jobs.MODEL, {"input": lists}),
        ("pairs", CROSS_ENCODER, {"input": pairs}),
    ):
        jobs.finish(job_of(tmp_path / name, model, **one, **sections))
        outs[name] = tmp_path / name / "out"
    tables = {name: batchinf.open(out).table() for name, out in outs.items()}
    assert tables["lists"].schema.field("relevance_scores").type.value_type == pa.float32()
    assert [len(row) for row in tables["lists"]["ranking"].to_pylist()] == [2] * 9
    assert tables["pairs"].schema.field("relevance_score").type == pa.float32()
    firsts = [scores[0] for scores in tables["lists"]["relevance_scores"].to_pylist()]
    assert tables["pairs"]["relevance_score"].to_pylist() == firsts
    assert all(0 < score < 1 for score in firsts)
    assert any(not 0 < score < 1 for scores in tables["raw"]["relevance_scores"].to_pylist() for score in scores)
    assert tables["bi"]["num_prompt_tokens"].to_pylist() != tables["lists"]["num_prompt_tokens"].to_pylist()

    same = list(diff_jobs(str(outs["lists"]), str(outs["lists"])).lines())
    assert same[0] == "outputs: 0 of 9 changed (0.00%), by relevance_scores"
    other = list(diff_jobs(str(outs["raw"]), str(outs["bi"])).lines())
    assert other[0] == "outputs: 9 of 9 changed (100.00%), by relevance_scores"
    assert any(text.startswith("relevance_scores: 9 rows differ; of 27 numbers, B - A is ") for text in other), other
    assert any(text.startswith("ranking: ") for text in other), other
    with pytest.raises(
        OutputError, match="no column that decides whether a row has changed means the same in both jobs"
    ):
        diff_jobs(str(outs["lists"]), str(outs["pairs"]))
    pairs = diff_jobs(*[str(outs["pairs"])] * 2).changes
    assert (pairs.num_both, pairs.num_changed, pairs.decides) == (9, 0, ("relevance_score",))

    for name, key in (("lists", "results"), ("pairs", "data")):
        done = export_job(str(outs[name]), ExportRequest(path=str(tmp_path / f"{name}.jsonl"), to="openai-batch"))
        assert any("texts of the documents are left out" in note for note in done.notes) == (name == "lists")
        bodies = [
            json.loads(text)["response"]["body"] for text in (tmp_path / f"{name}.jsonl").read_text().splitlines()
        ]
        assert [len(body[key]) for body in bodies] == [2 if name == "lists" else 1] * 9


def test_a_width_of_a_cross_encoder_is_refused() -> None:
    with pytest.raises(SpecError, match=r"pooling.width: got 7 with a cross-encoder, whose score is one number"):
        spec_of(pooling={"width": 7})
    assert spec_of(pooling={"width": 1}).pooling.width == 1  # type: ignore[attr-defined]

"""Lines of batch files that ask for embeddings: what each field does, which task runs them, jobs that are killed."""

import base64
import json
import pathlib
from typing import Any

import numpy as np
import pictures
import pytest
from openai.types import CreateEmbeddingResponse
from transformers import AutoTokenizer

import batchinf
import jobs
from batchinf import api
from batchinf.base.errors import OutputError, RowError, SpecError
from batchinf.commands.diff import diff_jobs
from batchinf.commands.export import ExportRequest, export_job
from batchinf.job.open import prepare_job
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.openai.requests import RowRequest
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of
from batchinf.tasks.vectors.prompts import EmbeddingReader

URL = "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hello"}]
WIDTH = 128  # of the sample model


def spec_of(**sections: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": sections.pop("model", str(jobs.MODEL)),
            "task": "embed",
            "pooling": {"width": WIDTH, **sections.pop("pooling", {})},
            "input": {"path": "in.jsonl", "format": "openai", **sections.pop("input", {})},
            "output": {"path": "out", "include_prompt": True},
            **sections,
        }
    )


def line(number: object = 0, /, **body: Any) -> dict[str, Any]:
    return {"custom_id": str(number), "method": "POST", "url": URL, "body": body}


def read(spec: JobSpec | None = None, /, **body: Any) -> RowRequest | RowError:
    return jobs.or_error(EmbeddingReader(spec or spec_of()).read, line(**body))


def built(spec: JobSpec | None = None, max_model_len: int = 64, /, **body: Any) -> Prompt:
    tokenizer = AutoTokenizer.from_pretrained(jobs.MODEL)
    builder = task_of(spec or spec_of()).prompt_builder(tokenizer, 1536)
    [prompt] = builder.build([Row(0, line(**body), None)], max_model_len)
    return prompt


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("a", (RowRequest(text="a"),)),
        (["a"], (RowRequest(text="a"),)),
        (["a", "b"], (RowRequest(text="a"), RowRequest(text="b"))),
        ([1, 2], (RowRequest(token_ids=[1, 2]),)),
        ([[1, 2], [3]], (RowRequest(token_ids=[1, 2]), RowRequest(token_ids=[3]))),
    ],
)
def test_forms_of_the_input(value: object, inputs: tuple[RowRequest, ...]) -> None:
    request = read(input=value)
    assert isinstance(request, RowRequest)
    assert request.parts == inputs


@pytest.mark.parametrize("body", [{"messages": MESSAGES}, {"input": MESSAGES}, {"input": [MESSAGES, MESSAGES]}])
def test_conversations(body: dict[str, Any]) -> None:
    """As vLLM's server does, the prompt does not end with the header of an assistant's turn."""
    prompt = built(**body)
    tokenizer = AutoTokenizer.from_pretrained(jobs.MODEL)
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False, return_dict=False)
    assert prompt.inputs == (expected,) * (2 if body.get("input", MESSAGES) != MESSAGES else 1)
    with_turn = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert with_turn != expected
    assert built(**body, add_generation_prompt=True).inputs[0] == with_turn


@pytest.mark.parametrize(
    "body",
    [
        {
            "user": "me",
            "metadata": {"a": 1},
            "priority": 3,
            "cache_salt": "x",
            "request_id": "r",
            "service_tier": "auto",
        },
        {"encoding_format": "float", "dimensions": WIDTH, "truncation_side": "left", "padding": "do_not_pad"},
        {"embed_dtype": "float32", "endianness": "native", "use_activation": True, "mm_processor_kwargs": {}},
        {"model": None, "chat_template_kwargs": {}, "add_generation_prompt": False, "add_special_tokens": True},
    ],
)
def test_fields_that_change_nothing(body: dict[str, Any]) -> None:
    assert built(input="Once", **body).inputs == built(input="Once").inputs
    request = read(input="Once", **body)
    assert isinstance(request, RowRequest)
    assert request.dimensions is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "body.input: got nothing; must be one text"),
        ({"input": []}, "body.input: got an empty list"),
        ({"input": ["a", [1]]}, "body.input: got a list; must be one text"),
        ({"input": [1.5]}, "body.input: got a list"),
        ({"input": {"text": "a"}}, "body.input: got a mapping"),
        ({"messages": "a"}, "body.messages: got 'a'; must be a conversation"),
        ({"input": "a", "messages": MESSAGES}, "body.input: given beside body.messages"),
        ({"input": "a", "model": "other"}, "body.model: got 'other'"),
        ({"input": "a", "encoding_format": "bytes"}, "body.encoding_format: got 'bytes'; must be float or base64"),
        ({"input": "a", "dimensions": 0}, "body.dimensions: got 0; must be a whole number, at least 1, at most 128"),
        ({"input": "a", "dimensions": 129}, "body.dimensions: got 129"),
        ({"input": "a", "dimensions": "8"}, "body.dimensions: got '8'"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "body.truncate_prompt_tokens: got 0"),
        ({"input": "a", "truncation_side": "top"}, "body.truncation_side: got 'top'"),
        ({"input": "a", "use_activation": False}, "body.use_activation: got False, but all rows have"),
        ({"input": "a", "add_special_tokens": 1}, "body.add_special_tokens: got 1; must be true or false"),
        ({"input": "a", "padding": "max_length"}, "body.padding: got 'max_length', which is not supported"),
        ({"input": "a", "embed_dtype": "float16"}, "body.embed_dtype: got 'float16', which is not supported"),
        ({"input": "a", "add_generation_prompt": True}, "body.add_generation_prompt: got it without a conversation"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "body.chat_template_kwargs.tokenize"),
        ({"input": "a", "normalize": True}, "body.normalize: got True, which is not supported"),
    ],
)  # fmt: skip
def test_what_is_refused(body: dict[str, Any], words: str) -> None:
    error = read(**body)
    assert isinstance(error, RowError)
    assert error.error_type == "unsupported_request"
    assert error.error_message.startswith(words)


def test_dimensions_and_the_form_of_the_answer() -> None:
    asked = read(input="a", dimensions=8, encoding_format="base64")
    assert isinstance(asked, RowRequest)
    assert (asked.dimensions, json.loads(asked.form or "")) == (8, {"url": URL, "encoding_format": "base64"})
    cut = spec_of(pooling={"dimensions": 8})
    for number, expected in ((8, None), (WIDTH, WIDTH), (16, 16)):
        request = read(cut, input="a", dimensions=number)
        assert isinstance(request, RowRequest)
        assert request.dimensions == expected


def test_special_tokens() -> None:
    plain, bare = built(input="Once upon"), built(input="Once upon", add_special_tokens=False)
    assert plain.inputs[0][1:] == bare.inputs[0]
    [chat], [dressed] = built(messages=MESSAGES).inputs, built(messages=MESSAGES, add_special_tokens=True).inputs
    assert dressed == [chat[0], *chat]


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_truncation_is_that_of_vllm(side: str | None) -> None:
    """Held against the class with which vLLM's server tokenises a request."""
    params = pytest.importorskip("vllm.renderers.params")
    tokenizer = AutoTokenizer.from_pretrained(jobs.MODEL)
    text = "Once upon a time there was a small fox who lived in a wood by the sea"
    ids = list(range(5, 35))
    for number in (2, 5, 12, -1):
        wanted = params.TokenizeParams(max_total_tokens=12, truncate_prompt_tokens=number, truncation_side=side)
        encoded = [tokenizer.encode(text, **wanted.get_encode_kwargs()), ids]
        expected = [wanted.apply_post_tokenization(tokenizer, {"prompt_token_ids": them}) for them in encoded]
        body = {"truncate_prompt_tokens": number, "truncation_side": side}
        for value, tokens in zip((text, ids), expected, strict=True):
            assert built(None, 12, input=value, **body).inputs == (tokens["prompt_token_ids"],)


@pytest.mark.parametrize(("number", "words"), [
    (13, "body.truncate_prompt_tokens: got 13; must be at most 12, which max_model_len leaves"),
    (1, "body.truncate_prompt_tokens: got 1, which leaves no room beside the special tokens"),
])  # fmt: skip
def test_truncation_that_is_refused(number: int, words: str) -> None:
    error = built(None, 12, input="Once upon a time", truncate_prompt_tokens=number).error
    assert error == RowError("unsupported_request", words)


def test_one_bad_input_makes_an_error_row_that_names_it() -> None:
    prompt = built(None, 8, input=["a", "fox " * 40])
    assert prompt.error is not None
    assert prompt.error.error_type == "prompt_too_long"
    assert prompt.error.error_message.startswith("input 1: got ")
    assert built(input=["a", ""]).error == RowError("empty_prompt", "input 1: the prompt is an empty string")
    assert built(input=[[5], [9999]]).error == RowError(
        "invalid_token_id", "input 1: token id 9999 is outside the model's vocabulary of 1,536"
    )
    assert built(input="").error == RowError("empty_prompt", "the prompt is an empty string")


def test_an_image_is_an_error_in_a_job_with_images_too() -> None:
    """It would be left out: a line has one vector for each text."""
    spec = spec_of(model=str(pictures.VISION), input={"images": {}})
    builder = task_of(spec).prompt_builder(load_tokenizer(spec.model.name, False), None)
    parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "What is it?"}]
    bodies = [{"messages": [{"role": "user", "content": content}]} for content in (parts, parts[1:])]
    image, text = builder.build([Row(0, line(**body), None) for body in bodies], 64)
    assert image.error is not None
    assert image.error.error_message.startswith("body.messages, message 0: got a part of type 'image_url'; only")
    assert text.error is None


def test_inputs_that_the_spec_cuts() -> None:
    prompt = built(spec_of(input={"on_overlong": "truncate_left"}), 8, input=["a", "fox " * 40])
    assert (prompt.error, prompt.is_truncated) == (None, True)
    assert [len(ids) for ids in prompt.inputs] == [2, 8]
    assert prompt.token_ids == [*prompt.inputs[0], *prompt.inputs[1]]


# -- the task ----------------------------------------------------------------------------------------------------------


def write(path: pathlib.Path, lines: list[dict[str, Any]]) -> pathlib.Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    return path


CHAT_LINE = {
    "custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES},
}  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "task"),
    [
        ([line(input="a"), CHAT_LINE], "embed"),
        ([CHAT_LINE, line(input="a")], "generate"),
        ([{**CHAT_LINE, "url": "/v1/other"}, {**line(input="a"), "url": "/embeddings"}], "embed"),
        ([{**CHAT_LINE, "url": "/v1/other"}], "generate"),
    ],
)
@pytest.mark.parametrize("form", [None, "openai"])
def test_the_first_line_decides_where_the_spec_names_no_task(
    lines: list[dict[str, Any]], task: str, form: str | None, tmp_path: pathlib.Path
) -> None:
    path = write(tmp_path / "in.jsonl", lines)
    given: dict[str, Any] = {
        "model": str(jobs.MODEL),
        "input": {"path": str(path), "format": form},
        "output": {"path": str(tmp_path / "out")},
    }
    assert prepare_job(read_spec(given)).spec.task == task
    named = prepare_job(read_spec({**given, "task": "logits"}))
    assert named.spec.task == "logits"


def test_a_spec_that_does_not_fit_the_lines(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "in.jsonl", [line(input="a"), line(1, input="b")])
    given: dict[str, Any] = {
        "model": str(jobs.MODEL),
        "input": {"path": str(path)},
        "output": {"path": str(tmp_path / "out")},
        "scripted": {},
    }
    with pytest.raises(SpecError, match=r"sampling.max_tokens: got 5; must be left out with task embed"):
        api.validate({**given, "sampling": {"max_tokens": 5}})
    message = (
        f"task: got generate, but each of the first 2 lines of {path} has another kind of request, such as "
        "/v1/embeddings; must be embed"
    )
    with pytest.raises(SpecError) as raised:
        api.validate({**given, "task": "generate"})
    assert message in str(raised.value)
    with pytest.raises(SpecError, match="whose lines ask for text, embeddings or scores; must be another format"):
        api.validate({**given, "task": "hidden_states"})


# -- whole jobs --------------------------------------------------------------------------------------------------------

NUM_LINES = 60


def lines_of_a_job() -> list[dict[str, Any]]:
    lines = []
    for number in range(NUM_LINES):
        texts = [f"fox {number} of {place}" for place in range(1 + number % 4)]
        body = {"input": texts[0] if len(texts) == 1 else texts, "dimensions": 8 if number % 5 == 0 else None}
        lines.append(line(number, **body, encoding_format="base64" if number % 2 else "float"))
    lines[7] = {**CHAT_LINE, "custom_id": "7"}
    lines[9] = line(9, input=["a", "fox " * 400])
    return lines


def test_killed_and_run_again(tmp_path: pathlib.Path) -> None:
    """A job that names no task resumes with the task of its lines, and its rows are those of an unhurt one."""
    path = write(tmp_path / "in.jsonl", lines_of_a_job())
    outputs = []
    for name, faults in (("unhurt", ""), ("hurt", "journal.before_fsync=kill,coordinator.after_publish:2=kill")):
        (tmp_path / name).mkdir()
        spec = jobs.spec_of(
            tmp_path / name,
            input={"path": str(path), "id_column": None},
            sampling=None,
            output={"keep_columns": [], "rows_per_shard": 9},
            scripted={"max_num_seqs": 3, "step_s": 0.005, "max_model_len": 64},
            checkpoint_interval_s=0.01,
            max_error_rate=1.0,
        )
        if faults:
            once = tmp_path / "once"
            once.mkdir()
            assert jobs.run("run", spec, faults=faults, BATCHINF_FAULTS_ONCE=str(once)).returncode == -9
            assert len(list(once.iterdir())) == 2
        jobs.finish(spec)
        outputs.append(batchinf.open(tmp_path / name / "out").table().drop_columns(["attempts"]))
    assert outputs[0].equals(outputs[1])
    rows = outputs[0].to_pylist()
    for number, row in enumerate(rows):
        if number in (7, 9):
            assert (row["embeddings"], row["num_output_tokens"]) == (None, None)
            continue
        assert row["error_type"] is None
        widths = [len(vector) for vector in row["embeddings"]]
        assert widths == [8 if number % 5 == 0 else WIDTH] * (1 + number % 4)
        assert np.allclose(np.linalg.norm(row["embeddings"][0]), 1)
        tokens = AutoTokenizer.from_pretrained(jobs.MODEL)(lines_of_a_job()[number]["body"]["input"]).input_ids
        num_tokens = len(tokens) if isinstance(tokens[0], int) else sum(map(len, tokens))
        assert (row["num_prompt_tokens"], row["num_output_tokens"]) == (num_tokens, 0)
    assert rows[7]["error_message"].startswith("url: got '/v1/chat/completions'; must be /v1/embeddings")
    assert rows[9]["error_message"].startswith("input 1: got ")
    # Each text has its own vector: line 12 has one, and line 13 another and one more.
    assert len({tuple(vector) for row in rows for vector in row["embeddings"] or ()}) > NUM_LINES

    done = export_job(str(tmp_path / "hurt" / "out"), ExportRequest(path=str(tmp_path / "a.jsonl"), to="openai-batch"))
    assert done.num_rows == NUM_LINES
    answers = [json.loads(text) for text in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [str(n) for n in range(NUM_LINES) if n not in (7, 9)]
    for answer in answers:
        row = rows[int(answer["custom_id"])]
        body = answer["response"]["body"]
        for item in body["data"]:
            assert isinstance(item["embedding"], str if row["row_index"] % 2 else list)
            if row["row_index"] % 2:  # the openai package decodes it so
                item["embedding"] = np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist()
        parsed = CreateEmbeddingResponse.model_validate(body)
        assert [item.index for item in parsed.data] == list(range(len(row["embeddings"])))
        assert [item.embedding for item in parsed.data] == row["embeddings"]
        assert parsed.usage.prompt_tokens == parsed.usage.total_tokens == row["num_prompt_tokens"]
    with pytest.raises(OutputError, match="lists of 8 to 128 items are no array"):
        diff_jobs(str(tmp_path / "hurt" / "out"), str(tmp_path / "unhurt" / "out"))
    errors = [json.loads(text) for text in (tmp_path / "a.errors.jsonl").read_text().splitlines()]
    assert [error["error"]["code"] for error in errors] == ["unsupported_request", "prompt_too_long"]


def test_two_jobs_are_compared(tmp_path: pathlib.Path) -> None:
    lines = [line(0, input="a"), line(1, input=["b", "c"]), line(2, input="")]
    path = write(tmp_path / "in.jsonl", lines)
    outs = []
    for name, pooling in (("a", {}), ("b", {"dtype": "float16"}), ("c", {"dimensions": 8})):
        (tmp_path / name).mkdir()
        spec = jobs.spec_of(
            tmp_path / name,
            task="embed",
            pooling=pooling,
            input={"path": str(path), "id_column": None},
            engine={"hf_overrides": {"is_matryoshka": True}},
            sampling=None,
            output={"keep_columns": []},
            parallel={"data_parallel_size": 1},
            max_error_rate=1.0,
        )
        jobs.finish(spec)
        outs.append(str(tmp_path / name / "out"))
    same = list(diff_jobs(outs[0], outs[0]).lines())
    assert same[0] == "outputs: 0 of 3 changed (0.00%), by embeddings"
    close = list(diff_jobs(outs[0], outs[1]).lines())
    assert any(text.startswith("embeddings: 2 rows differ; of 384 numbers, ") for text in close), close
    assert any("cosine 1.0000" in text or "cosine 0.9999" in text for text in close), close
    with pytest.raises(OutputError, match="embeddings: vectors of 128 and of 8 numbers cannot be compared"):
        diff_jobs(outs[0], outs[2])

"""OpenAI's batch files as whole jobs: each supported field on real vLLM, each other one an error row that names it."""

import json
import pathlib
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.base.errors import SpecError
from batchinf.job.open import open_job
from batchinf.model.model import resolve_sampling
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.openai.requests import recognised
from batchinf.source.rows import Row
from batchinf.spec.file import read_spec
from batchinf.spec.input import InputSpec
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

if TYPE_CHECKING:
    from batchinf.engines.vllm.engine import VllmEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = str(jobs.MODEL)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if shout is defined %}LOUD {% endif %}{% if verbosity is defined %}"
    "<{{ reasoning_effort }}, {{ verbosity }}, {{ enable_thinking }}> {% endif %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def schema_of(name: str) -> dict[str, Any]:
    """One text alone; all of these have the same keys at their top."""
    return {"type": "string", "enum": [name]}


def line(number: int, url: str, body: dict[str, Any]) -> dict[str, Any]:
    body = {"model": MODEL, **({"messages": MESSAGES} if url == CHAT else {"prompt": "Once upon"}), **body}
    return {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}


# What each is held to, beside its body.
GOOD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {}, {}),
    (CHAT, {"max_tokens": 5, "temperature": 0}, {"num_tokens": 5}),
    (CHAT, {"max_completion_tokens": 6, "temperature": 0, "ignore_eos": True}, {"num_tokens": 6}),
    (CHAT, {"temperature": 0.7, "top_p": 0.9, "seed": 3, "top_k": 20, "min_p": 0.01}, {}),
    (CHAT, {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "temperature": 0}, {}),
    (CHAT, {"stop": ["e"], "temperature": 0, "max_tokens": 40}, {"stop": "e"}),
    (CHAT, {"min_tokens": 7, "stop_token_ids": [5], "temperature": 0, "max_tokens": 8}, {"num_tokens": 8}),
    (CHAT, {"response_format": {"type": "json_object"}, "max_tokens": 40, "temperature": 0}, {"begins": "{"}),
    *[(CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": schema_of(name)}}, "temperature": 0},
       {"begins": f'"{name}"'}) for name in ("first", "second")],
    (CHAT, {"logprobs": True, "top_logprobs": 2}, {}),
    (CHAT, {"user": "me", "metadata": {"a": "b"}, "n": 1, "stream": False}, {}),
    (CHAT, {"chat_template_kwargs": {"shout": True}}, {"ends": "LOUD [assistant] "}),
    (CHAT, {"reasoning_effort": "low", "verbosity": "high"}, {"ends": "<low, high, True> [assistant] "}),
    (CHAT, {"structured_outputs": {"choice": ["certainly"]}, "temperature": 0}, {"begins": "certainly"}),
    (CHAT, {"structured_outputs": {"regex": "xy{3}"}, "temperature": 0}, {"begins": "xyyy"}),
    (CHAT, {"messages": [*MESSAGES, {"role": "assistant", "content": "Well,"}], "continue_final_message": True},
     {"ends": "[assistant] Well,"}),
    (CHAT, {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "abc"}}},
     {"begins": "abc"}),
    (CHAT, {"structured_outputs": {"json_object": True}, "max_tokens": 9}, {"begins": "{"}),
    (CHAT, {"logit_bias": {"11": 100}, "temperature": 0, "max_tokens": 3}, {"begins": "&&&"}),
    (CHAT, {"logit_bias": {"11": 100}, "repetition_detection": {"max_pattern_size": 1, "min_count": 2}},
     {"num_tokens": 2}),
    (CHAT, {"allowed_token_ids": [11], "bad_words": [], "logit_bias": {}, "max_tokens": 4}, {"begins": "&&&&"}),
    (CHAT, {"bad_words": ["&"], "allowed_token_ids": [11, 12], "max_tokens": 4}, {"begins": "''''"}),
    (COMPLETIONS, {"thinking_token_budget": -1, "prompt": "Once upon"}, {"ends": "Once upon"}),
    (COMPLETIONS, {}, {"ends": "Once upon"}),
    (COMPLETIONS, {"prompt": [1, 5, 6, 7], "logprobs": 2}, {"ids": [1, 5, 6, 7]}),
]  # fmt: skip
BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tools": [{"type": "function"}]}, "body.tools"),
    (CHAT, {"logit_bias": {"a": 1}}, "sampling.logit_bias"),
    (CHAT, {"response_format": {"type": "structural_tag"}}, "sampling.structured_outputs.structural_tag"),
    (CHAT, {"allowed_token_ids": []}, "sampling.allowed_token_ids"),
    (
        CHAT,
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}},
        "sampling.repetition_detection.min_count",
    ),
    (CHAT, {"n": 0}, "sampling.n"),
    (CHAT, {"stream": True}, "body.stream"),
    (CHAT, {"top_logprobs": 9, "logprobs": True}, "body.top_logprobs"),
    (CHAT, {"prompt_logprobs": 0}, "body.prompt_logprobs"),
    (CHAT, {"audio": {}}, "body.audio"),
    (CHAT, {"model": "gpt-5"}, "body.model"),
    (CHAT, {"temperature": 9}, "sampling.temperature"),
    (CHAT, {"max_tokens": "5"}, "sampling.max_tokens"),
    (CHAT, {"messages": [{"role": "user"}]}, "body.messages, message 0"),
    (CHAT, {"response_format": {"type": "grammar"}}, "body.response_format"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "body.prompt"),
    (CHAT, {"echo": True}, "body.echo"),
    (COMPLETIONS, {"echo": True}, "body.echo"),
    (CHAT, {"guided_choice": ["certainly"]}, "body.guided_choice"),
    ("/v1/responses", {"input": "Say hello."}, "url: got '/v1/responses', which is not supported: write"),
    (COMPLETIONS, {"best_of": 2}, "body.best_of"),
    ("/v1/embeddings", {}, "url"),
]


def batch() -> list[dict[str, Any]]:
    """Good and bad requests in turn."""
    lines = [line(number, url, body) for number, (url, body, _) in enumerate([*GOOD, *BAD])]
    return [lines[place] for place in sorted(range(len(lines)), key=lambda place: place % 7)]


def spec_of(**sections: Any) -> JobSpec:
    spec = {
        "model": {"name": MODEL},
        "input": {"path": "batch.jsonl", "format": "openai", "chat_template": TEMPLATE},
        "output": {"path": "out", "include_prompt": True},
        "sampling": {"logprobs": 2, "max_tokens": 16, "ignore_eos": True},
        "engine": {"max_model_len": 512},
        **sections,
    }
    parsed = JobSpec.model_validate(spec)
    sampling, _ = resolve_sampling(parsed.sampling, {})
    return parsed.model_copy(update={"sampling": sampling})


def test_lines_may_ask_for_the_prompt_logprobs_that_the_job_stores() -> None:
    tokenizer = load_tokenizer(MODEL, False)
    builder = PromptBuilder(spec_of(sampling={"prompt_logprobs": 2, "max_tokens": 4}), tokenizer, len(tokenizer))
    asked = [0, 2, 3, -1, True]
    rows = [Row(row, line(row, COMPLETIONS, {"prompt_logprobs": number})) for row, number in enumerate(asked)]
    found = [None if prompt.error is None else prompt.error.error_message for prompt in builder.build(rows, 512)]
    assert found == [
        None,
        None,
        "body.prompt_logprobs: asks for 3, but the job stores other columns: set sampling.prompt_logprobs",
        "body.prompt_logprobs: got -1; must be a whole number, at least 0",
        "body.prompt_logprobs: got True; must be a whole number, at least 0",
    ]


def test_each_field_on_real_vllm(vllm_engine: "VllmEngine") -> None:
    spec, tokenizer = spec_of(), load_tokenizer(MODEL, False)
    task, builder = task_of(spec), PromptBuilder(spec, tokenizer, len(tokenizer))
    rows = [Row(number, line(number, url, body)) for number, (url, body, _) in enumerate(GOOD)]
    prompts = builder.build(rows, 512)
    assert [prompt.error for prompt in prompts] == [None] * len(GOOD)
    for prompt in prompts:
        for request in task.expand(prompt, 512):
            vllm_engine.add(request)
    found = {}
    while vllm_engine.num_unfinished():
        found.update({completion.request.row_index: completion for completion in vllm_engine.step()})
    texts = {row: tokenizer.decode(done.token_ids.tolist(), skip_special_tokens=True) for row, done in found.items()}
    for number, (_, body, expected) in enumerate(GOOD):
        prompt, completion = prompts[number], found[number]
        sampling = completion.request.sampling
        for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "min_tokens"):
            if name in body:
                assert getattr(sampling, name) == body[name]
        assert len(completion.token_ids) <= completion.request.max_tokens
        if "num_tokens" in expected:
            assert len(completion.token_ids) == expected["num_tokens"]
        if "stop" in expected:
            assert (completion.stop_reason, completion.finish_reason) == (expected["stop"], "stop")
        if "begins" in expected:
            assert "".join(texts[number].split()).startswith(expected["begins"])
        if "ends" in expected:
            assert (prompt.text or "").endswith(expected["ends"])
        if "ids" in expected:
            assert prompt.token_ids == expected["ids"]
        elif body.get("messages", MESSAGES) and prompt.text and prompt.text.startswith(tokenizer.bos_token):
            assert prompt.token_ids.count(tokenizer.bos_token_id) == 1
    # The conversation's ids are transformers' own.
    ids = tokenizer.apply_chat_template(MESSAGES, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=True)
    assert prompts[0].token_ids == list(ids["input_ids"] if hasattr(ids, "keys") else ids)


@pytest.mark.parametrize(
    ("messages", "is_added"),
    [
        ([{"role": "user", "content": "a"}], True),
        (MESSAGES, False),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "own"}], False),
        ([{"role": "developer", "content": "own"}, {"role": "user", "content": "a"}], False),
    ],
)
def test_the_system_prompt_is_for_lines_without_one(messages: list[dict[str, str]], is_added: bool) -> None:
    where = {"path": "batch.jsonl", "format": "openai", "chat_template": TEMPLATE, "system_prompt": "Be kind."}
    tokenizer = load_tokenizer(MODEL, False)
    builder = PromptBuilder(spec_of(input=where), tokenizer, len(tokenizer))
    [prompt] = builder.build([Row(0, line(0, CHAT, {"messages": messages}))], 512)
    assert prompt.text is not None
    assert ("Be kind." in prompt.text) is is_added


def test_a_whole_job(tmp_path: pathlib.Path) -> None:
    """Recognised by its lines; each bad request is a row that names the field."""
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in batch()))
    spec = jobs.spec_of(
        tmp_path,
        input={"path": str(path), "id_column": None, "chat_template": TEMPLATE},
        output={"keep_columns": [], "include_prompt": True},
        sampling={"ignore_eos": True},
        parallel={"data_parallel_size": 1},
        max_error_rate=1,
    )
    jobs.finish(spec)
    rows = {row["id"]: row for row in jobs.table_of(tmp_path / "out").to_pylist()}
    assert [row["id"] for row in rows.values()] == [row["custom_id"] for row in batch()]
    for number, (_, body, _) in enumerate(GOOD):
        row = rows[f"request-{number}"]
        # The scripted engine follows no structure.
        assert row["error_type"] in (None, "invalid_json", "structure_violated"), row["error_message"]
        most = body.get("max_tokens") or body.get("max_completion_tokens") or 32
        assert row["num_output_tokens"] <= most
    for number, (_, _, words) in enumerate(BAD, len(GOOD)):
        row = rows[f"request-{number}"]
        assert row["error_type"] in ("unsupported_request", "invalid_sampling", "invalid_messages")
        assert row["error_message"].startswith(words)
        assert row["text"] is None


def test_what_is_taken_for_a_batch_file(tmp_path: pathlib.Path) -> None:
    names = ["custom_id", "method", "url", "body"]
    assert recognised(InputSpec(path="a.jsonl"), names).format == "openai"
    assert recognised(InputSpec(path="a.jsonl"), names).id_column == "custom_id"
    assert recognised(InputSpec(path="a.jsonl", id_column="url"), names).id_column == "url"
    assert recognised(InputSpec(path="a.jsonl", prompt_column="body"), names).format is None
    assert recognised(InputSpec(path="a.jsonl"), names[:3]).format is None
    with pytest.raises(SpecError, match="got openai, but the input has no column 'body'"):
        recognised(InputSpec(path="a.jsonl", format="openai"), names[:3])
    with pytest.raises(SpecError, match=r"input\.prompt_column: got it with format openai"):
        recognised(InputSpec(path="a.jsonl", format="openai", prompt_column="x"), names)
    assert recognised(InputSpec(path="a.jsonl"), ["custom_id", "body"]).format == "openai"
    assert recognised(InputSpec(path="a.jsonl"), ["custom_id", "body", "prompt"]).format is None
    path = tmp_path / "batch.jsonl"
    path.write_text(json.dumps(line(0, COMPLETIONS, {})) + "\n")
    spec = jobs.spec_of(tmp_path, input={"path": str(path), "id_column": None}, output={"keep_columns": []})
    job = open_job(read_spec(spec), tmp_path / "cache")
    assert (job.spec.input.format, job.spec.input.id_column) == ("openai", "custom_id")
    job.source.close()


@pytest.mark.parametrize(
    ("values", "api"),
    [
        ({"custom_id": "a", "params": {}}, r"Anthropic's Message Batches \(custom_id, params\)"),
        ({"key": "a", "request": {}}, "Gemini's batch API"),
        ({"recordId": "a", "modelInput": {}}, "Amazon Bedrock's batch inference"),
    ],
)
def test_lines_of_other_batch_apis_are_named(values: dict[str, Any], api: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text(json.dumps(values) + "\n")
    where = {"path": str(path), "id_column": None}
    for more in ({}, {"format": "openai"}):
        spec = jobs.spec_of(tmp_path, input={**where, **more}, output={"keep_columns": []})
        with pytest.raises(SpecError, match=f"has lines of {api}.*write each as"):
            open_job(read_spec(spec), tmp_path / "cache")
    spec = jobs.spec_of(tmp_path, input={**where, "prompt_column": next(iter(values))}, output={"keep_columns": []})
    open_job(read_spec(spec), tmp_path / "cache").source.close()


def test_lines_without_method_and_url_are_a_whole_job(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "batch.jsonl"
    lines = [{"custom_id": f"r{number}", "body": {"input": f"text {number}"}} for number in range(3)]
    path.write_text("".join(json.dumps(values) + "\n" for values in lines))
    sections: dict[str, Any] = {"sampling": None, "output": {"keep_columns": []}}
    jobs.finish(jobs.spec_of(tmp_path, input={"path": str(path), "id_column": None}, **sections))
    rows = jobs.rows_of(tmp_path / "out")
    assert jobs.state_of(tmp_path / "out").header.spec["task"] == "embed"
    assert [(row["id"], row["error_type"], row["num_prompt_tokens"] > 0) for row in rows] == [
        (f"r{number}", None, True) for number in range(3)
    ]


def test_other_keys_of_lines_are_named_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(json.dumps({**line(n, CHAT, {}), "priority": n, "kept": n}) + "\n" for n in range(3)))
    given = {"id_column": None, "path": str(path)}
    done = jobs.finish(jobs.spec_of(tmp_path, input=given, output={"keep_columns": ["kept"]}))
    words = f"warning: lines of {path} have priority beside custom_id, method, url, body; the job does not use it;"
    assert done.stderr.count(words) == 1
    assert [row["kept"] for row in jobs.rows_of(tmp_path / "out")] == [0, 1, 2]


@pytest.mark.parametrize("name", ["batch.parquet", "batch.csv"])
def test_a_batch_file_in_another_format(name: str, tmp_path: pathlib.Path) -> None:
    row = line(0, CHAT, {})
    table = pa.Table.from_pylist([{**row, "body": json.dumps(row["body"])}])
    path = tmp_path / name
    if name.endswith("csv"):
        pyarrow.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    spec = jobs.spec_of(tmp_path, input={"path": str(path), "id_column": None}, output={"keep_columns": []})
    with pytest.raises(SpecError, match=r"the columns of an OpenAI batch file .*, but its format is (parquet|csv);"):
        open_job(read_spec(spec), tmp_path / "cache")


def test_another_model_in_every_line_is_found_before_a_replica_starts(tmp_path: pathlib.Path) -> None:
    lines = [line(number, CHAT, {"model": "gpt-4o"}) for number in range(3)]
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    given = {"input": {"path": str(path), "id_column": None}, "output": {"keep_columns": []}}
    spec = jobs.spec_of(tmp_path, **given)
    refused = jobs.run("run", spec)
    assert refused.returncode == 2
    [error] = [text for text in refused.stderr.splitlines() if text.startswith("error: ")]
    assert f"each of the first 3 lines of {path} names another model; body.model: got 'gpt-4o'" in error
    assert "served_model_name" in error
    assert not list((tmp_path / "out" / "logs").iterdir())
    # One line of the job's model, and the others are error rows.
    path.write_text(path.read_text() + json.dumps(line(3, CHAT, {})) + "\n")
    job = open_job(read_spec(spec))
    job.source.close()


def test_a_file_of_responses_alone_does_not_start(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text(json.dumps(line(0, "/v1/responses", {"input": "Say hello."})) + "\n")
    spec = jobs.spec_of(tmp_path, input={"path": str(path), "id_column": None}, output={"keep_columns": []})
    refused = jobs.run("run", spec)
    assert refused.returncode == 2
    assert "the only line of" in refused.stderr
    assert "write the instructions and the input as body.messages" in refused.stderr

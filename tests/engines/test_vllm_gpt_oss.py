"""A whole job with a small gpt-oss model has the reasoning, the answers and the calls of vLLM's server."""

import json
import pathlib
from typing import Any

import pytest
import run_batch_lines as given
from gpt_oss import CALL_STEPS, HarmonyTokenizer, write_model
from openai.types.chat import ChatCompletion

import jobs
from batchinf.commands.export import ExportRequest, export_job

pytest.importorskip("vllm")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]


def bodies() -> dict[str, dict[str, Any]]:
    tokens = HarmonyTokenizer()
    answers = {"logit_bias": {str(tokens.token("final")): 2}}
    calls = {"logit_bias": {str(tokens.token(step)): 2 for step in CALL_STEPS}, "tools": TOOLS}
    return {
        "thinks": {},
        "thinks unseen": {"include_reasoning": False},
        "is cut off in its thoughts": {"max_tokens": 5},
        "answers at once": {**answers, "logit_bias": {**answers["logit_bias"], str(tokens.token("Yes")): 2}},
        "calls": calls,
        "may not call": {"tools": TOOLS, "tool_choice": "none"},
    }


def seen(body: dict[str, Any]) -> dict[str, Any]:
    [choice] = ChatCompletion.model_validate(body).choices
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]
    return {
        "content": choice.message.content or None,
        "reasoning": getattr(choice.message, "reasoning", None),
        "calls": calls,
        "finish_reason": choice.finish_reason,
        "tokens": body["usage"]["completion_tokens"],
        "reasoning_tokens": body["usage"]["completion_tokens_details"]["reasoning_tokens"],
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_parts_of_an_answer_are_those_of_vllms_server(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model").mkdir()
    model = write_model(tmp_path / "model")
    # The penalty makes the model end its thoughts: see `write_model`.
    common = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "presence_penalty": 1.0}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "tiny", "max_tokens": 40, **common, **body}}
        for name, body in bodies().items()
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    spec = jobs.spec_of(
        tmp_path,
        model={"name": str(model), "tool_parser": "openai", "reasoning_parser": "openai_gptoss"},
        input={"path": str(tmp_path / "in.jsonl"), "id_column": None},
        sampling={"temperature": None, "max_tokens": None, "logprobs": None},
        engine={"max_model_len": 512, "max_num_seqs": 8, "served_model_name": "tiny"},
        output={"keep_columns": []},
        parallel={"data_parallel_size": 1},
        scripted=None,
    )
    jobs.finish(spec)
    export_job(str(tmp_path / "out"), ExportRequest(to="openai-batch", path=str(tmp_path / "out.jsonl")))
    exported = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    ours = {line["custom_id"]: seen(line["response"]["body"]) for line in exported}
    flags = [
        *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "openai", "--reasoning-parser", "openai_gptoss"),
    ]
    answers = given.answered(given.by_vllm(tmp_path / "in.jsonl", model, *flags))
    theirs = {name: seen(body) for name, body in answers.items()}
    assert ours == theirs
    assert (ours["thinks"]["reasoning"], ours["thinks"]["content"]) == ("So it is", "Yes!")
    assert (ours["thinks unseen"]["reasoning"], ours["thinks unseen"]["content"]) == (None, "Yes!")
    assert (ours["answers at once"]["reasoning"], ours["answers at once"]["content"]) == (None, "Yes!")
    cut = ours["is cut off in its thoughts"]
    assert (cut["reasoning"], cut["content"], cut["finish_reason"]) == ("So it", None, "length")
    assert ours["calls"]["calls"] == [("get_weather", {"city": "Rome"})]
    assert ours["calls"]["finish_reason"] == "tool_calls"

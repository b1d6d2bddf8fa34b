"""Whole jobs with tools on real vLLM: the same calls as from `vllm run-batch`, and the same ids after a kill."""

import hashlib
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

import batchinf
import jobs
from batchinf.commands.export import ExportRequest, export_job

pytest.importorskip("vllm")

TEMPLATE = pathlib.Path(__file__).parents[1] / "tools.jinja"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
HOUR = {"type": "object", "properties": {"h": {"enum": [1, 2]}}, "required": ["h"], "additionalProperties": False}
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": CITY}
WEATHER = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": HOUR, "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_time"}}
ASK = [{"role": "user", "content": "Weather in Rome?"}]
CALLED = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
PAST = [
    *ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
]


def written(*calls: tuple[str, dict[str, Any]]) -> str:
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


TWO = written(("get_weather", {"city": "Rome"}), ("get_time", {"h": 1}))
GOOD: dict[str, dict[str, Any]] = {
    "free": {"tools": [WEATHER, TIME], "parallel_tool_calls": None},
    "none": {"tools": [WEATHER], "tool_choice": "none"},
    "past": {"messages": PAST, "tools": [WEATHER]},
    "two": {"tools": [WEATHER], "structured_outputs": {"choice": [f"Let me see. {TWO}"]}},
    "one": {"tools": [WEATHER], "tool_choice": "auto", "structured_outputs": {"choice": [f"{TWO}"]},
            "parallel_tool_calls": None},
    "required": {"tools": [STRICT, TIME], "tool_choice": "required", "parallel_tool_calls": False},
    "required strict": {"tools": [STRICT], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": [WEATHER, TIME], "tool_choice": NAMED},
    "plain": {},
}  # fmt: skip
# vLLM's server answers these with a text, as if the model had called no tool.
BAD: dict[str, dict[str, Any]] = {
    "broken": {"tools": [WEATHER], "structured_outputs": {"choice": ['<tool_call>\n{"name": "get_weather", "argum']}},
    "cut off": {"tools": [STRICT], "tool_choice": "required", "max_tokens": 9},
}

# vLLM's server passes over `functions`.
OLD = {
    "old": {"functions": [FUNCTION], "structured_outputs": {"choice": [written(("get_weather", {"city": "Rome"}))]}},
    "old named": {"functions": [TIME["function"]], "function_call": {"name": "get_time"}},
}


def lines() -> list[dict[str, Any]]:
    common = {"messages": ASK, "temperature": 0, "max_tokens": 160}
    return [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": common | body}
        for name, body in (GOOD | OLD | BAD).items()
    ]


def spec_of(folder: pathlib.Path) -> pathlib.Path:
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines()))
    return jobs.spec_of(
        folder,
        model={"name": str(jobs.MODEL), "tool_parser": "hermes"},
        input={"path": str(folder / "in.jsonl"), "id_column": None, "chat_template": {"file": str(TEMPLATE)}},
        sampling={"temperature": None, "max_tokens": None, "logprobs": None},
        engine={"max_model_len": 1024, "max_num_seqs": 16},
        output={"keep_columns": [], "rows_per_shard": 4},
        parallel={"data_parallel_size": 1},
        scripted=None,
        max_error_rate=1.0,
    )


def served(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The body of each line's answer, by `vllm run-batch`."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.run_batch"),
        *("-i", str(folder / "in.jsonl"), "-o", str(folder / "served.jsonl")),
        *("--model", str(jobs.MODEL), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(TEMPLATE)),
    ]
    environment = {**jobs.inherited(), **jobs.quick_start(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in (folder / "served.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["custom_id"]: line["response"]["body"] for line in found}


def seen(body: dict[str, Any]) -> tuple[Any, ...]:
    [choice] = ChatCompletion.model_validate(body).choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or None, calls, choice.finish_reason, body["usage"]["prompt_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_job_has_the_calls_of_the_server(tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path)
    assert jobs.run("run", spec, faults="coordinator.after_publish:2=kill").returncode == -9
    jobs.run("run", spec)
    out = tmp_path / "out"
    rows = {row["id"]: row for row in jobs.rows_of(out)}
    assert {name for name, row in rows.items() if row["error_type"] is not None} == {*BAD}
    # Ids follow from job and row.
    job_id = batchinf.open(out).job_id
    for row in rows.values():
        for number, call in enumerate(row["tool_calls"] or ()):
            key = f"{job_id},{row['row_index']},0,{number}"
            assert call["id"] == f"call_{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}"
    export_job(str(out), ExportRequest(to="openai-batch", path=str(tmp_path / "out.jsonl")))
    exported = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["custom_id"] for line in exported] == [*GOOD, *OLD]
    by_server = served(tmp_path)
    for line in exported[: len(GOOD)]:
        assert seen(line["response"]["body"]) == seen(by_server[line["custom_id"]]), line["custom_id"]
    assert [call["name"] for call in rows["two"]["tool_calls"]] == ["get_weather", "get_time"]
    assert [call["name"] for call in rows["named"]["tool_calls"]] == ["get_time"]
    for name in ("required", "required strict"):
        [call] = rows[name]["tool_calls"]
        assert set(json.loads(call["arguments"])) <= {"city", "h"}
    for line, reason in zip(exported[len(GOOD) :], ("function_call", "stop"), strict=True):
        [choice] = ChatCompletion.model_validate(line["response"]["body"]).choices
        assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == (reason, None, None)
        assert choice.message.function_call is not None
        assert choice.message.function_call.name == rows[line["custom_id"]]["tool_calls"][0]["name"]
    for name in BAD:
        assert rows[name]["error_type"] == "invalid_tool_call"
        assert rows[name]["text"] == by_server[name]["choices"][0]["message"]["content"]

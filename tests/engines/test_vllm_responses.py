"""Lines of `/v1/responses` on real vLLM: the answers are those of vLLM's server, and the openai package reads them."""

import json
import pathlib
import shutil
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

import jobs
from batchinf.commands.export import ExportRequest, export_job

pytest.importorskip("vllm")

# It closes the thinking in the prompt if it is off, so that the text is an answer. It writes no BOS: for responses, but
# not for chats, vLLM's tokenizer adds one to each prompt, also beside the template's own.
TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}[assistant] <think>{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"""
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": CITY, "strict": True}
CALL = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Rome"}'}
PAST = [
    {"role": "user", "content": "Weather in Rome?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
    CALL,
    {"type": "function_call_output", "call_id": "call_1", "output": "Sunny."},
]
OFF = {"reasoning": {"effort": "none"}}
# The penalty keeps the sample model from endless white space, which JSON allows.
CALLS = {"max_output_tokens": 160, "frequency_penalty": 2.0, **OFF}
FORMAT = {"type": "json_schema", "name": "city", "schema": {"enum": ["Rome", "Oslo"]}, "strict": True}
BODIES: dict[str, dict[str, Any]] = {
    "thinks": {"input": "Say hello."},
    "thinks unseen": {"input": "Say hello.", "include_reasoning": False},
    "text": {"input": "Say hello.", **OFF},
    "instructions": {"input": "Say hello.", "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me", **OFF},
    "items": {"input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [
        {"type": "input_text", "text": "Say"}, {"type": "input_text", "text": "hello."}]}], **OFF},
    "turns": {"input": [{"role": "user", "content": "Say."}, {"type": "message", "role": "assistant", "content": [
        {"type": "output_text", "text": "What?", "annotations": []}]}, {"role": "user", "content": "Hi."}], **OFF},
    "schema": {"input": "Where?", "text": {"format": FORMAT}, **OFF},
    "required": {"input": "Weather?", "tools": [TOOL], "tool_choice": "required", **CALLS},
    "named": {"input": "Weather?", "tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"},
              **CALLS},
    "tools unused": {"input": "Weather?", "tools": [TOOL], "tool_choice": "none", **OFF},
    "past": {"input": PAST, "tools": [TOOL], "tool_choice": "none", **OFF},
    "continued": {"input": [{"role": "user", "content": "Tell."}, {"type": "message", "role": "assistant",
                  "status": "incomplete", "content": [{"type": "output_text", "text": "Once upon"}]}]},
    "logprobs": {"input": "Say hello.", "include": ["message.output_text.logprobs"], "top_logprobs": 2, **OFF},
    "sampled": {"input": "Say hello.", "top_k": 1, "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1,
                "presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ["e"], **OFF},
    "wide": {"input": "Grüß dich 🦊", "truncation": "auto", "service_tier": "flex", "store": False, **OFF},
}  # fmt: skip
REFUSED = {
    "image": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a/b.png"}]}]},
    "search": {"input": "News?", "tools": [{"type": "web_search_preview"}]},
}


HELLO = [{"role": "user", "content": "Say hello."}]
CHATS: dict[str, dict[str, Any]] = {
    "chat thinks": {"messages": HELLO, "max_tokens": 40},
    "chat thinks unseen": {"messages": HELLO, "include_reasoning": False, "max_tokens": 40},
    "chat is cut off in its thoughts": {"messages": HELLO, "max_tokens": 1},
    "chat": {"messages": HELLO, "reasoning_effort": "none"},
    "chat after thoughts": {"messages": [*HELLO, {"role": "assistant", "reasoning": "Hm.", "content": "Hi."}, *HELLO],
                            "reasoning_effort": "none"},
}  # fmt: skip


def lines(bodies: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    common = {"model": "tiny", "temperature": 0}
    made = []
    for name, body in bodies.items():
        is_chat = "messages" in body
        url = "/v1/chat/completions" if is_chat else "/v1/responses"
        most = {} if is_chat else {"max_output_tokens": 12}
        made.append({"custom_id": name, "method": "POST", "url": url, "body": {**common, **most, **body}})
    return made


def thinker(folder: pathlib.Path) -> pathlib.Path:
    """The sample model with two of its special tokens made marks of thinking, which models have as plain tokens."""
    shutil.copytree(jobs.MODEL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    marks = {"<|start_header_id|>": "<think>", "<|end_header_id|>": "</think>"}
    for token in tokenizer["added_tokens"]:
        if token["content"] in marks:
            token |= {"content": marks[token["content"]], "special": False}
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {marks.get(name, name): number for name, number in vocab.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def served(folder: pathlib.Path, model: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The answers of vLLM's server."""
    asked = lines(BODIES | CHATS)
    for line in asked[len(BODIES) :]:
        line["body"]["add_special_tokens"] = True  # the BOS
    (folder / "good.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in asked))
    (folder / "template.jinja").write_text(TEMPLATE)
    arguments = [
        *("-i", str(folder / "good.jsonl"), "-o", str(folder / "served.jsonl"), "--served-model-name", "tiny"),
        *("--model", str(model), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
        *("--chat-template", str(folder / "template.jinja")),
    ]
    jobs.run_vllm("vllm_responses", *arguments)
    found = [json.loads(line) for line in (folder / "served.jsonl").read_text(encoding="utf-8").splitlines()]
    return dict(zip(BODIES | CHATS, found, strict=True))


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """What is the same for two servers. The status of an item is not compared: vLLM calls each one completed."""
    parsed = Response.model_validate(answer).model_dump(mode="json", warnings=False)
    if not parsed["temperature"]:
        parsed["top_p"] = None  # vLLM makes 1 of it, as it changes nothing then
    items = []
    for item in parsed["output"]:
        kept = {name: value for name, value in item.items() if name not in ("id", "status", "call_id") and value}
        for part in kept.get("content") or ():
            part.pop("logprobs", None)
        items.append(kept)
    names = ("status", "incomplete_details", "instructions", "metadata", "model", "parallel_tool_calls", "temperature",
             "top_p", "tool_choice", "tools", "truncation", "text", "user", "max_output_tokens", "object", "background",
             "service_tier", "reasoning")  # fmt: skip
    usage = {name: parsed["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")}
    usage["reasoning_tokens"] = parsed["usage"]["output_tokens_details"]["reasoning_tokens"]
    return {**{name: parsed[name] for name in names}, "output": items, "usage": usage}


def seen(answer: dict[str, Any]) -> dict[str, Any]:
    """What a chat's answer says."""
    [choice] = ChatCompletion.model_validate(answer).choices
    return {
        "content": choice.message.content or None,
        "reasoning": getattr(choice.message, "reasoning", None),
        "finish_reason": choice.finish_reason,
        "tokens": {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "reasoning_tokens": answer["usage"]["completion_tokens_details"]["reasoning_tokens"],
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_answers_are_those_of_vllms_server(tmp_path: pathlib.Path) -> None:
    model = thinker(tmp_path / "thinker")
    asked = lines(BODIES | CHATS | REFUSED)
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in asked))
    spec = jobs.spec_of(
        tmp_path,
        model={"name": str(model), "tool_parser": "hermes", "reasoning_parser": "qwen3"},
        input={"path": str(tmp_path / "in.jsonl"), "id_column": None, "chat_template": "{{ bos_token }}" + TEMPLATE},
        sampling={"temperature": None, "max_tokens": None, "logprobs": 2},
        engine={"max_model_len": 1024, "max_num_seqs": 16, "served_model_name": "tiny"},
        output={"keep_columns": [], "include_prompt": True},
        parallel={"data_parallel_size": 1},
        scripted=None,
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    rows = {row["id"]: row for row in jobs.rows_of(tmp_path / "out")}
    assert {name for name, row in rows.items() if row["error_type"] is not None} == {*REFUSED}
    export_job(str(tmp_path / "out"), ExportRequest(to="openai-batch", path=str(tmp_path / "out.jsonl")))
    exported = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    ours = {line["custom_id"]: line["response"]["body"] for line in exported}
    theirs = served(tmp_path, model)
    assert [*ours] == [*BODIES, *CHATS]
    for name in BODIES:
        assert without_ids(ours[name]) == without_ids(theirs[name]), name
    for name in CHATS:
        assert seen(ours[name]) == seen(theirs[name]), name
    assert seen(ours["chat thinks"])["reasoning"]
    assert 0 < seen(ours["chat thinks"])["reasoning_tokens"] < 40
    assert seen(ours["chat is cut off in its thoughts"])["reasoning_tokens"] == 1
    assert seen(ours["chat is cut off in its thoughts"])["content"] is None
    kinds = {name: [item["type"] for item in ours[name]["output"]] for name in BODIES}
    assert kinds["thinks"] == ["reasoning", "message"]
    assert kinds["thinks unseen"] == ["message"]
    assert kinds["continued"] == ["reasoning"]
    assert kinds["required"] == kinds["named"] == ["function_call"]
    assert kinds["text"] == kinds["past"] == ["message"]
    assert ours["schema"]["output"][0]["content"][0]["text"] in ('"Rome"', '"Oslo"')
    both = [answer["logprobs"]["output"][0]["content"][0]["logprobs"] for answer in (ours, theirs)]
    assert len(both[0]) == len(both[1]) == 12
    for found, expected in zip(*both, strict=True):
        assert abs(found["logprob"] - expected["logprob"]) < 1e-3
        assert [top["token"] for top in found["top_logprobs"]] == [top["token"] for top in expected["top_logprobs"]]

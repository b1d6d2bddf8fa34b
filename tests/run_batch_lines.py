"""One batch file with every kind of line that `vllm run-batch` takes, and its answers from both programs."""

import json
import pathlib
from typing import Any

import jobs

SMALL_FOX = "Once upon a time there was a small fox who lived in a wood"
QUERY = "small fox lived wood"
DOCUMENTS = [
    "The sea is blue.",
    "Once a small fox lived in a wood.",
    "",
    "A letter for the fox",
    "A letter for the fox",
]
LONG = "a fox ran over the mountain to see the garden " * 12
_HELLO = [{"role": "user", "content": "hello there"}]
_CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"],
         "additionalProperties": False}  # fmt: skip
_HOUR = {"type": "object", "properties": {"h": {"enum": [1, 2]}}, "required": ["h"], "additionalProperties": False}
_FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": _CITY}
_WEATHER = {"type": "function", "function": _FUNCTION}
_STRICT = {"type": "function", "function": {**_FUNCTION, "strict": True}}
_TIME = {"type": "function", "function": {"name": "get_time", "parameters": _HOUR, "strict": True}}
_ASK = [{"role": "user", "content": "Weather in Rome?"}]
_CALLED = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
_PAST = [
    *_ASK,
    {"role": "assistant", "content": None, "tool_calls": [_CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
]


def _written(*calls: tuple[str, dict[str, Any]]) -> str:
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


_TWO = _written(("get_weather", {"city": "Rome"}), ("get_time", {"h": 1}))
_NAMED = {"type": "function", "function": {"name": "get_time"}}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"enum": ["Rome", "Oslo"]}}}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"n": 2, "temperature": 0.5, "top_k": 1},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "max_tokens": 8},
    "schema": {"response_format": _SCHEMA},
    "regex": {"structured_outputs": {"regex": "a{3}"}},
    "stop": {"stop": ["e"], "presence_penalty": 0.5},
    "free": {"tools": [_WEATHER, _TIME], "parallel_tool_calls": None},
    "none": {"tools": [_WEATHER], "tool_choice": "none"},
    "past": {"messages": _PAST, "tools": [_WEATHER]},
    "two": {"tools": [_WEATHER], "structured_outputs": {"choice": [f"Let me see. {_TWO}"]}},
    "one": {"tools": [_WEATHER], "tool_choice": "auto", "structured_outputs": {"choice": [f"{_TWO}"]},
            "parallel_tool_calls": None},
    "required": {"tools": [_STRICT, _TIME], "tool_choice": "required", "parallel_tool_calls": False},
    "required strict": {"tools": [_STRICT], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": [_WEATHER, _TIME], "tool_choice": _NAMED},
}  # fmt: skip
# vLLM's server answers these with a text, as if the model had called no tool.
BROKEN_CALLS: dict[str, dict[str, Any]] = {
    "broken": {"tools": [_WEATHER], "structured_outputs": {"choice": ['<tool_call>\n{"name": "get_weather", "argum']}},
    "cut off": {"tools": [_STRICT], "tool_choice": "required", "max_tokens": 9},
}
EMBEDDINGS: list[dict[str, Any]] = [
    {"input": SMALL_FOX},
    {"input": ["A fox", "the sea is blue", "wood"], "user": "me", "encoding_format": "float"},
    {"input": [5, 6, 7, 8]},
    {"input": [[5, 6, 7], [8, 9]], "encoding_format": "base64"},
    {"input": SMALL_FOX, "dimensions": 16},
    {"input": ["A", "B"], "dimensions": 8, "encoding_format": "base64"},
    {"messages": _HELLO},
    {"messages": _HELLO, "add_generation_prompt": True},
    {"input": [_HELLO, [{"role": "system", "content": "Be brief."}, *_HELLO]]},
    {"input": SMALL_FOX, "truncate_prompt_tokens": 4},
    {"input": SMALL_FOX, "truncate_prompt_tokens": 4, "truncation_side": "left"},
    {"input": f"{SMALL_FOX} " * 60, "truncate_prompt_tokens": -1},
    {"input": SMALL_FOX, "add_special_tokens": False},
]
SCORES: list[tuple[str, dict[str, Any]]] = [
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
# Both programs refuse these lines with each model.
BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": _HELLO, "stream": True}),
    ("/v1/chat/completions", {"messages": _HELLO, "model": "another"}),
    ("/v1/chat/completions", {"messages": _HELLO, "temperature": 9}),
    ("/v1/embeddings", {"input": "fox " * 400}),
    ("/v1/embeddings", {"input": SMALL_FOX, "dimensions": 4096}),
    ("/v1/embeddings", {"input": SMALL_FOX, "truncate_prompt_tokens": 4096}),
    ("/v1/embeddings", {"input": []}),
    ("/score", {"text_1": QUERY, "text_2": LONG * 4}),
    ("/score", {"text_1": QUERY, "text_2": []}),
    ("/score", {"text_1": [QUERY, QUERY], "text_2": DOCUMENTS}),
    ("/rerank", {"query": QUERY, "documents": DOCUMENTS, "truncate_prompt_tokens": 4096}),
    ("/rerank", {"query": QUERY, "documents": DOCUMENTS, "max_tokens_per_doc": 4096}),
]


def chat_lines(bodies: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    common = {"messages": _ASK, "temperature": 0, "max_tokens": 160}
    return [_line(name, "/v1/chat/completions", common | body) for name, body in bodies.items()]


def every_kind() -> list[dict[str, Any]]:
    """The lines of the file. Their bodies name no model, but for one, which names a model that does not exist."""
    return [
        *chat_lines(CHATS | BROKEN_CALLS),
        *(_line(f"embedding-{number}", "/v1/embeddings", body) for number, body in enumerate(EMBEDDINGS)),
        *(_line(f"score-{number}", url, body) for number, (url, body) in enumerate(SCORES)),
        *(_line(f"bad-{number}", url, body) for number, (url, body) in enumerate(BAD)),
        _line("unknown", "/v1/images/generations", {"messages": _HELLO}),
    ]


def lines_of(bodies: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Lines of bodies with their URLs, numbered from 0."""
    return [_line(str(number), url, body) for number, (url, body) in enumerate(bodies)]


def _line(name: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: pathlib.Path, lines: list[dict[str, Any]]) -> pathlib.Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def answers_in(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The lines of a file of answers, by `custom_id`."""
    return {line["custom_id"]: line for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def answered(answers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The bodies of the answers that are no errors, by `custom_id`."""
    return {
        name: answer["response"]["body"]
        for name, answer in answers.items()
        if answer["error"] is None and answer["response"]["status_code"] == 200
    }


def by_vllm(path: pathlib.Path, model: pathlib.Path, *flags: str) -> dict[str, dict[str, Any]]:
    """The answers of `vllm run-batch` to a file, by `custom_id`."""
    output = path.with_suffix(".theirs")
    files = ("-i", str(path), "-o", str(output))
    memory = ("--gpu-memory-utilization", "0.1")
    jobs.run_vllm("vllm.entrypoints.openai.run_batch", *files, "--model", str(model), *flags, *memory)
    return answers_in(output)


def by_batchinf(path: pathlib.Path, model: pathlib.Path, *flags: str) -> dict[str, dict[str, Any]]:
    """The answers of `batchinf run-batch`. Its job is beside the file, with the ending `.job`."""
    output = path.with_suffix(".ours")
    done = jobs.run("run-batch", "-i", path, "-o", output, "--model", model, *flags, "-dp", "1")
    answers = answers_in(output)
    has_errors = any(answer["error"] is not None for answer in answers.values())
    assert done.returncode == (3 if has_errors else 0), done.stderr
    return answers

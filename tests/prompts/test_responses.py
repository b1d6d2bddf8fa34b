"""Lines with `/v1/responses`: the conversation is that of vLLM's server, and the openai package reads the answer."""

import json
from typing import Any

import pytest
from openai.types.responses import Response

from batchinf.base.errors import RowError
from batchinf.commands.run_batch import asked_by_lines
from batchinf.export.openai_responses import response_of
from batchinf.prompts.openai.requests import BatchReader, BatchRequest
from batchinf.records import Tools
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec

USER = {"role": "user", "content": "Weather?"}
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}, "strict": True}
TOOL = {"type": "function", **FUNCTION}
NESTED = {"type": "function", "function": FUNCTION}
CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "Sunny."}
REASONING = {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SUMMARY = {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "Hm."}]}
ANSWER = {"type": "message", "id": "m1", "role": "assistant", "status": "completed",
          "content": [{"type": "output_text", "text": "It rains.", "annotations": []}]}  # fmt: skip
LOGPROBS = {"include": ["message.output_text.logprobs"]}


def reader(**sampling: Any) -> BatchReader:
    model = {"name": "org/model", "tool_parser": "hermes"}
    sampling = {"logprobs": 5, **sampling}
    return BatchReader(JobSpec(model=model, input={"path": "in"}, output={"path": "out"}, sampling=sampling))


def line(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"input": "Hi.", **body}}


def read(**body: Any) -> BatchRequest:
    found = reader().read(line(**body))
    assert isinstance(found, BatchRequest), found
    return found


@pytest.mark.parametrize(
    "items",
    [
        "Weather?",
        [USER],
        [{"type": "message", **USER}, {"role": "developer", "content": "Be brief."}],
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        [USER, {"role": "assistant", "content": "It rains."}, USER],
        [USER, ANSWER, USER],
        [USER, CALL, RESULT],
        [USER, REASONING, CALL, {**CALL, "call_id": "c2"}, RESULT, {**RESULT, "call_id": "c2"}],
        [USER, REASONING, ANSWER, USER],
        [USER, SUMMARY, ANSWER, CALL, RESULT],
        [USER, ANSWER, ANSWER],
        [USER, ANSWER, REASONING, USER],
        [USER, REASONING, REASONING, USER],
        [USER, CALL, ANSWER],
        [USER, REASONING],
    ],
)
@pytest.mark.parametrize("instructions", [None, "Be kind."])
def test_the_conversation_is_that_of_vllms_server(items: Any, instructions: str | None) -> None:
    protocol = pytest.importorskip("vllm.entrypoints.openai.responses.protocol")
    from vllm.entrypoints.openai.responses.utils import construct_input_messages

    # vLLM changes the messages that it is given.
    request = protocol.ResponsesRequest(input=json.loads(json.dumps(items)), instructions=instructions)
    expected = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    found = read(input=items, instructions=instructions).messages
    assert found is not None
    assert [seen(message) for message in found] == [seen(message) for message in expected]


def seen(message: dict[str, Any]) -> dict[str, Any]:
    """What a chat template gets: the server makes text of null, and names the kinds of parts anew."""
    content = message.get("content") or ""
    parts = [part["text"] for part in content] if isinstance(content, list) else [content]
    names = ("role", "reasoning", "tool_call_id", "tool_calls")
    return {"content": parts, **{name: message[name] for name in names if message.get(name)}}


def test_several_parts_of_an_answer_are_joined() -> None:
    """vLLM's server takes the first alone."""
    parts = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    messages = read(input=[USER, {**ANSWER, "content": parts}]).messages
    assert messages is not None
    assert messages[-1] == {"role": "assistant", "content": "a\nb"}
    two = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert read(input=[USER, CALL, {**RESULT, "output": two}]).messages[-1]["content"] == "a\nb"  # type: ignore[index]


@pytest.mark.parametrize("item", [ANSWER, {"role": "assistant", "content": "Well,"}])
@pytest.mark.parametrize("status", ["incomplete", "in_progress", "completed"])
def test_an_item_that_is_not_complete_is_continued(item: dict[str, Any], status: str) -> None:
    is_open = status != "completed"
    wanted = {"continue_final_message": True, "add_generation_prompt": False} if is_open else {}
    assert read(input=[USER, {**item, "status": status}]).chat == wanted


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9},
         {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9}),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"structured_outputs": {"json": {"type": "object"}}}),
        ({"text": {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": {"type": "null"}}}},
         {"structured_outputs": {"json": {"type": "null"}}}),
        ({"structured_outputs": {"regex": "a"}}, {"structured_outputs": {"regex": "a"}}),
        ({"top_logprobs": 50}, {}),  # without `include`, nothing is asked for
        ({**LOGPROBS, "top_logprobs": 5}, {}),
        ({"include": ["reasoning.encrypted_content"], "truncation": "auto", "max_tool_calls": 3}, {}),
        ({"background": False, "stream": False, "store": True, "tools": [], "tool_choice": "auto"}, {}),
    ],
)  # fmt: skip
def test_fields_of_the_answer(body: dict[str, Any], sampling: dict[str, Any]) -> None:
    request = read(**body)
    assert (request.sampling, request.chat, request.tools) == (sampling, {}, None)


def test_effort_and_verbosity_are_variables_of_the_template() -> None:
    request = read(reasoning={"effort": "none", "summary": "auto"}, text={"verbosity": "low"})
    variables = {"reasoning_effort": "none", "enable_thinking": False, "verbosity": "low"}
    assert request.chat == {"chat_template_kwargs": variables}


def test_tools_are_those_of_a_chat() -> None:
    for choice, tools in (
        ("auto", Tools(json.dumps([NESTED]))),
        ("required", Tools(json.dumps([NESTED]), "required")),
        ({"type": "function", "name": "get_weather"}, Tools(json.dumps([NESTED]), "named", "get_weather")),
        ("none", None),
    ):
        request = read(tools=[TOOL], tool_choice=choice)
        assert request.tools == tools
        assert request.chat == {"tools": [NESTED]}
    assert read(tools=[TOOL], parallel_tool_calls=False).tools == Tools(json.dumps([NESTED]), are_parallel=False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": None}, "body.input: got nothing; must be text or a list of items"),
        ({"input": []}, "body.input: got an empty list; must be text or a list of items"),
        ({"input": ["a"]}, "body.input[0]: got text; must be a mapping"),
        ({"input": [USER, {"type": "item_reference", "id": "m1"}]}, "body.input[1]: got an item of type "
         "'item_reference'; only texts, reasoning, function calls and outputs are read"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "body.input[0]: got a "
         "part of type 'input_file'; only parts with text are read: input_text, output_text, text, refusal"),
        ({"input": [{"role": "user"}]}, "body.input[0]: got null for content; must be text, or a list of parts of "
         "text"),
        ({"input": [{**REASONING, "encrypted_content": "x"}]}, "body.input[0]: got encrypted_content, which only "
         "OpenAI can read; leave out the item"),
        ({"instructions": ["a"]}, "body.instructions: got a list; must be text"),
        ({"messages": [USER]}, "body.messages: got a list, which is not supported: /v1/responses has no such field"),
        ({"max_tokens": 5}, "body.max_tokens: got 5, which is not supported: /v1/responses has no such field; did "
         "you mean max_output_tokens?"),
        ({"previous_response_id": "r"}, "body.previous_response_id: got 'r', which is not supported: no answers are "
         "kept between requests: write them into input"),
        ({"tools": [{"type": "web_search"}]}, "body.tools: got a tool of type web_search, which batchinf does not run; "
         "must be {type: function, name, description, parameters}"),
        ({"tools": [NESTED]}, "body.tools: got a function without a name; must be {type: function, name, description, "
         "parameters}"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, 'body.tool_choice: got {"type": '
         '"allowed_tools"}; '
         "must be none, auto, required, or {type: function, name: …}"),
        ({"include": ["all"]}, "body.include: got 'all'; must be message.output_text.logprobs"),
        ({**LOGPROBS, "top_logprobs": 6}, "body.top_logprobs: asks for 6, but the job stores other columns: set "
         "sampling.logprobs"),
        ({"reasoning": "low"}, "body.reasoning: got text; must be a mapping"),
        ({"reasoning": {"effort": 3}}, "body.reasoning.effort: got 3; must be text"),
        ({"reasoning": {"mode": "pro"}}, "body.reasoning.mode: got 'pro', which is not supported"),
        ({"text": {"style": "a"}}, "body.text.style: got 'a'; it has format and verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "body.text.format: got 'xml'; must be text, json_object, "
         "structural_tag, or json_schema with its schema"),
    ],
)  # fmt: skip
def test_what_it_cannot_say_is_named(body: dict[str, Any], message: str) -> None:
    assert reader().read(line(**body)) == RowError("unsupported_request", message)


def test_a_response_has_one_answer() -> None:
    assert reader(n=2, temperature=1.0).read(line()) == RowError(
        "unsupported_request", "url: a response has one answer, but all rows have sampling.n 2"
    )


def test_the_job_stores_the_logprobs_that_lines_ask_for(tmp_path: Any) -> None:
    lines = [line(top_logprobs=9), line(**LOGPROBS, top_logprobs=3), line(include=None)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    assert asked_by_lines(str(tmp_path / "in.jsonl"))["sampling"]["logprobs"] == 3


# -- answers -----------------------------------------------------------------------------------------------------------

ROW = {"text": "Hi.", "finish_reason": "stop", "num_prompt_tokens": 5, "num_output_tokens": 3}


def answer(row: dict[str, Any], **body: Any) -> Response:
    form = json.loads(read(**body).form or "")
    token = {"token": "H", "logprob": -1.0, "bytes": None}
    made = response_of(
        "job-0",
        {**ROW, **row},
        form,
        logprobs=[{**token, "top_logprobs": [token]}] if form.get("logprobs") else None,
        sampling=SamplingSpec(temperature=0.7, top_p=1.0),
        created=1,
        model="org/model",
    )
    return Response.model_validate(json.loads(json.dumps(made)))


def test_an_answer_repeats_what_was_asked() -> None:
    asked = {"instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 9, "top_p": 0.5, "tools": [TOOL],
             "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "user": "me"}  # fmt: skip
    made = answer({}, **asked)
    dumped = made.model_dump(mode="json", exclude_unset=True)
    for name, value in asked.items():
        assert dumped[name] == value
    assert (made.temperature, made.tool_choice, made.parallel_tool_calls) == (0.7, "auto", True)
    assert (made.id, made.created_at, made.status, made.error) == ("resp_job-0", 1, "completed", None)
    assert made.output_text == "Hi."
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (5, 3, 8)
    assert answer({}).tool_choice == "none"


def test_reasoning_text_and_calls_are_items() -> None:
    calls = [{"id": "call_1", "name": "get_weather", "arguments": "{}"}]
    made = answer({"reasoning": "Hm.", "tool_calls": calls}, tools=[TOOL])
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]
    assert made.output[2].call_id == "call_1"  # type: ignore[union-attr]
    unseen = answer({"reasoning": "Hm.", "tool_calls": calls, "text": None}, tools=[TOOL], include_reasoning=False)
    assert [item.type for item in unseen.output] == ["function_call"]


def test_an_answer_that_was_cut_off_says_so() -> None:
    made = answer({"finish_reason": "length", "reasoning": "Hm.", "text": None})
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in made.output] == ["reasoning"]
    [item] = answer({"finish_reason": "length"}).output
    assert item.status == "incomplete"  # type: ignore[union-attr]


def test_logprobs_have_bytes() -> None:
    [item] = answer({}, **LOGPROBS).output
    [token] = item.content[0].logprobs  # type: ignore[union-attr]
    assert (token.token, token.bytes, token.top_logprobs[0].bytes) == ("H", [72], [72])
    assert answer({}).output[0].content[0].logprobs is None  # type: ignore[union-attr]

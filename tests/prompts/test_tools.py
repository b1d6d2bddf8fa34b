"""The tools of a row: from a line of a batch file, a column or the spec; rendered, and given to the parser of calls."""

import json
import pathlib
from typing import Any

import pytest
from conftest import MODEL
from transformers import PreTrainedTokenizerFast

import jobs
from batchinf.base.errors import RowError, SpecError
from batchinf.model.model import Model
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.openai.requests import BatchReader, RowRequest
from batchinf.prompts.tools import with_tool_parser
from batchinf.records import Prompt, Tools
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec, ModelSpec
from batchinf.tasks.registry import task_of

TEMPLATE = (pathlib.Path(__file__).parents[1] / "tools.jinja").read_text(encoding="utf-8")
MESSAGES = [{"role": "user", "content": "What time is it?"}]
FUNCTION = {"name": "get_time", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
SERVED = {"type": "function", "function": {"name": "get_time", "description": None, **FUNCTION}}
OTHER = {"type": "function", "function": {"name": "get_weather", "strict": True, "unknown": 1}}
TEXT = json.dumps([TOOL])
NAMED = {"type": "function", "function": {"name": "get_time"}}


def reader(parser: str | None = "hermes", **sampling: Any) -> BatchReader:
    model = {"name": "org/model", "tool_parser": parser}
    return BatchReader(JobSpec(model=model, input={"path": "in"}, output={"path": "out"}, sampling=sampling))


def chat(**body: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, **body}
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}


def read(body: dict[str, Any], **options: Any) -> RowRequest:
    found = jobs.or_error(reader(**options).read, chat(**body))
    assert isinstance(found, RowRequest), found
    return found


def refusal(body: dict[str, Any], **options: Any) -> str:
    found = jobs.or_error(reader(**options).read, chat(**body))
    assert isinstance(found, RowError), found
    assert found.error_type == "unsupported_request"
    return found.error_message


@pytest.mark.parametrize(
    ("body", "tools"),
    [
        ({"tools": [TOOL]}, Tools(TEXT)),
        ({"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}, Tools(TEXT)),
        ({"tools": [TOOL], "parallel_tool_calls": False}, Tools(TEXT, are_parallel=False)),
        ({"tools": [TOOL], "tool_choice": "required"}, Tools(TEXT, "required")),
        ({"tools": [TOOL], "tool_choice": NAMED}, Tools(TEXT, "named", "get_time")),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
    ],
)  # fmt: skip
def test_the_tools_of_a_line(body: dict[str, Any], tools: Tools | None) -> None:
    request = read(body)
    assert request.tools == tools
    assert request.chat == {"tools": [SERVED]}


def test_a_line_without_tools_is_as_before() -> None:
    for body in ({}, {"tools": []}, {"tools": None}, {"tool_choice": "auto"}, {"function_call": "none"}):
        assert read(body) == RowRequest(messages=MESSAGES)


def test_tools_are_rendered_as_by_the_server() -> None:
    """With null for what is missing, and without what it does not know."""
    [tool] = read({"tools": [OTHER]}).chat["tools"]
    function = {"name": "get_weather", "description": None, "parameters": None, "strict": True}
    assert tool == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": {}}, "body.tools: got a mapping; must be a list"),
        ({"tools": ["a"]}, "body.tools: got text for a tool; must be {type: function"),
        ({"tools": [{"type": "web_search"}]}, "body.tools: got a tool of type web_search; must be"),
        ({"tools": [{"type": "function"}]}, "body.tools: got a tool without function; must be"),
        ({"tools": [{"function": {}}]}, "body.tools: got a function without a name; must be"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "got a list for parameters of the function f;"),
        ({"tools": [TOOL], "tool_choice": "any"}, 'body.tool_choice: got "any"; must be none, auto, required, or'),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
         "body.tool_choice: got f; the tools are get_time"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "body.parallel_tool_calls: got a value of type int; must be"),
        ({"tool_choice": "required"}, 'body.tool_choice: got "required", but there are no tools'),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
         "body.tool_choice: got required, which forces a call, beside a structure for the text; give one of them"),
    ],
)  # fmt: skip
def test_lines_that_cannot_run(body: dict[str, Any], message: str) -> None:
    assert message in refusal(body)


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"tool_choice": NAMED}])
def test_without_a_parser_calls_are_refused(choice: dict[str, Any]) -> None:
    message = refusal({"tools": [TOOL], **choice}, parser=None)
    assert message.startswith("body.tools: got tools with tool_choice ")
    assert "name vLLM's parser in model.tool_parser" in message
    assert read({"tools": [TOOL], "tool_choice": "none"}, parser=None).tools is None


def test_a_call_is_not_forced_in_a_job_with_a_structure() -> None:
    structure = {"structured_outputs": {"choice": ["a"]}}
    assert "beside a structure" in refusal({"tools": [TOOL], "tool_choice": "required"}, **structure)
    assert read({"tools": [TOOL]}, **structure).tools == Tools(TEXT)


# -- beside conversations ----------------------------------------------------------------------------------------------


def prompt_of(values: dict[str, Any], parser: str | None = "hermes", **where: Any) -> Prompt:
    spec = JobSpec(
        model={"name": str(MODEL), "tool_parser": parser},
        input={"path": "in", "messages_column": "messages", "chat_template": TEMPLATE, **where},
        output={"path": "out", "include_prompt": True},
        sampling={"temperature": 0.0},
    )
    builder = PromptBuilder(spec, PreTrainedTokenizerFast.from_pretrained(MODEL), None)
    [prompt] = builder.build([Row(0, {"messages": MESSAGES, **values}, None)], 2048)
    [request] = task_of(spec).expand(prompt, 2048)
    assert request.tools == prompt.tools
    return prompt


def test_tools_of_a_column() -> None:
    for value in ([TOOL], TEXT):
        prompt = prompt_of({"tools": value}, tools_column="tools")
        assert prompt.error is None
        assert prompt.tools == Tools(TEXT)
        assert json.dumps(TOOL) in (prompt.text or "")
    assert prompt_of({"tools": None}, tools_column="tools").tools is None


def test_tools_of_the_spec() -> None:
    """A row's own come first."""
    for choice, tools in ((None, Tools(TEXT)), ("required", Tools(TEXT, "required")), ("none", None)):
        prompt = prompt_of({}, tools=[TOOL], tool_choice=choice)
        assert prompt.tools == tools
        assert "get_time" in (prompt.text or "")
    own = [{"type": "function", "function": {"name": "get_weather"}}]
    prompt = prompt_of({"tools": own}, tools=[TOOL], tools_column="tools", parallel_tool_calls=False)
    assert prompt.tools == Tools(json.dumps(own), are_parallel=False)
    assert "get_time" not in (prompt.text or "")


def test_a_column_with_a_named_tool() -> None:
    assert prompt_of({"tools": [TOOL]}, tools_column="tools", tool_choice="get_time").tools == Tools(
        TEXT, "named", "get_time"
    )
    prompt = prompt_of({"tools": [TOOL]}, tools_column="tools", tool_choice="get_news")
    assert prompt.error == RowError("invalid_tools", "input.tool_choice: got get_news; the tools are get_time")


def test_a_column_without_a_parser_is_only_rendered() -> None:
    plain = [{"name": "get_time"}]  # no tool of OpenAI's, but one that the template prints
    prompt = prompt_of({"tools": plain}, parser=None, tools_column="tools")
    assert (prompt.error, prompt.tools) == (None, None)
    assert '{"name": "get_time"}' in (prompt.text or "")
    refused = prompt_of({"tools": plain}, tools_column="tools")
    assert refused.error is not None
    assert refused.error.error_type == "invalid_tools"


# -- auto --------------------------------------------------------------------------------------------------------------


def resolved(kind: str, template: str, folder: pathlib.Path) -> str | None:
    (folder / "chat_template.jinja").write_text(template)
    model = Model(
        name="org/model",
        path=str(folder),
        commit=None,
        fingerprint="",
        config={"model_type": kind},
        generation_config={},
        has_chat_template=True,
        max_model_len=None,
        vocab_size=None,
        tokenizer=str(folder),
    )
    return with_tool_parser(ModelSpec(name="org/model", tool_parser="auto"), model, None).tool_parser


def test_auto_is_by_type_and_template(tmp_path: pathlib.Path) -> None:
    assert resolved("qwen3_moe", "{{ messages }}<tool_call>", tmp_path) == "hermes"
    assert resolved("qwen3_moe", "{{ messages }}<tool_call><function=", tmp_path) == "qwen3_coder"
    with pytest.raises(SpecError, match="whose chat template has no <tool_call>, is not known; give vLLM's name"):
        resolved("qwen2", "{{ messages }}", tmp_path)
    with pytest.raises(SpecError, match="of type gpt2, is not known"):
        resolved("gpt2", "{{ messages }}<tool_call>", tmp_path)


def test_auto_has_names_of_the_installed_parsers() -> None:
    pytest.importorskip("vllm")
    from batchinf.engines.installed import parser_names
    from batchinf.prompts.tools import _PARSERS

    known = parser_names("tool_parsers")
    assert known is not None
    assert {name for forms in _PARSERS.values() for _, name in forms} <= set(known)

"""Tool calls of finished texts, by vLLM's own parsers: split, with ids, or an error that keeps the text."""

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import MODEL
from gpt_oss import HarmonyTokenizer
from transformers import PreTrainedTokenizerFast

import jobs
from batchinf.base.errors import SpecError
from batchinf.engines.protocol import ParsedAnswer
from batchinf.records import Completion, Request, Result, ToolCall, Tools
from batchinf.replica.answers import Answers, Detokenizer, answers_of
from batchinf.replica.calls import with_ids
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec

pytest.importorskip("vllm")

WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
TOOLS = json.dumps([{"type": "function", "function": function} for function in (WEATHER, TIME)])
AUTO = Tools(TOOLS)
CALLS = pa.list_(pa.struct([(name, pa.string()) for name in ("id", "name", "arguments")]))
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The sample model's, with the marks of thinking and of calls."""
    made = PreTrainedTokenizerFast.from_pretrained(MODEL)
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    made.add_tokens(["<|turn|>"], special_tokens=True)
    return made


def spec_of(parser: str, reasoning_parser: str | None = None) -> JobSpec:
    return JobSpec(
        model={"name": str(MODEL), "tool_parser": parser, "reasoning_parser": reasoning_parser},
        input={"path": "in"},
        output={"path": "out"},
        sampling={"temperature": 0.0},
        engine={"structured_outputs_config": {"backend": "xgrammar"}},
    )


def answers(tokenizer: Any, parser: str = "hermes", reasoning_parser: str | None = None) -> Answers:
    return answers_of(spec_of(parser, reasoning_parser), tokenizer, Detokenizer(tokenizer), "job-1")


def read(
    made: Answers,
    tokenizer: Any,
    text: str,
    *,
    tools: Tools | None = AUTO,
    forced: dict[str, Any] | None = None,
    reason: str = "stop",
    row: int = 0,
    prompt: str = "So",
) -> Result:
    """The answer of a text. forced: the structure that the tools force on it."""
    sampling = SamplingSpec(temperature=0.0).model_copy(update={"structured_outputs": forced})
    ids = tokenizer(text, add_special_tokens=False).input_ids + ([tokenizer.eos_token_id] if reason == "stop" else [])
    request = Request(row, 0, tokenizer(prompt).input_ids, sampling, max_tokens=999, tools=tools)
    [found] = made.read([jobs.unread(Completion(request, np.array(ids, np.int32), reason))])
    return found


def structure_of(tokenizer: Any, tools: Tools, parser: str = "hermes") -> dict[str, Any]:
    from batchinf.engines.vllm.structured_output.tools import CallParser

    structure = CallParser(spec_of(parser), tokenizer).structure(tools, None)
    assert structure is not None
    return structure


def said(found: Result) -> tuple[str | None, str]:
    """The text of an answer without a call, and the finish reason."""
    assert found.completion is not None
    assert (found.reasoning, found.error, found.tool_calls, found.num_reasoning_tokens) == (None,) * 4
    return found.text, found.completion.finish_reason


def reason_of(found: Result) -> str:
    assert found.completion is not None
    return found.completion.finish_reason


def calls_of(found: Result) -> list[tuple[str, str]]:
    assert found.error is None, found.error
    return [(call.name, call.arguments) for call in found.tool_calls or ()]


def test_calls_are_beside_the_text(tokenizer: Any) -> None:
    made = answers(tokenizer)
    found = read(made, tokenizer, f"Let me see. {ROME}\n{NOW}")
    assert calls_of(found) == [("get_weather", '{"city": "Rome"}'), ("get_time", "{}")]
    assert (found.text, reason_of(found)) == ("Let me see. ", "tool_calls")
    assert read(made, tokenizer, NOW).text is None
    # One call, where the request wants no more.
    single = read(made, tokenizer, f"{ROME}\n{NOW}", tools=Tools(TOOLS, are_parallel=False))
    assert calls_of(single) == [("get_weather", '{"city": "Rome"}')]


def test_a_text_without_a_call(tokenizer: Any) -> None:
    found = read(answers(tokenizer), tokenizer, "It rains.<|turn|>")
    assert said(found) == ("It rains.", "stop")
    assert said(read(answers(tokenizer), tokenizer, f"{ROME}<|turn|>", tools=None)) == (ROME, "stop")
    for parser in ("hermes", "qwen3_coder"):
        assert said(read(answers(tokenizer, parser), tokenizer, "")) == ("", "stop")


def test_ids_follow_from_job_and_row(tokenizer: Any) -> None:
    first = read(answers(tokenizer), tokenizer, f"{ROME}{NOW}").tool_calls
    assert first is not None
    assert first == read(answers(tokenizer), tokenizer, f"{ROME}{NOW}").tool_calls
    other = read(answers(tokenizer), tokenizer, f"{ROME}{NOW}", row=1).tool_calls
    assert other is not None
    ids = [call.id for call in (*first, *other)]
    assert len(set(ids)) == 4
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", each) for each in ids)


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        ('<tool_call>{"name": "get_wea', "stop", "the tool parser failed: JSONDecodeError: "),
        ('<tool_call>{"name": "get_wea', "length", "the tool parser failed (cut off after "),
        ('<tool_call>{"name": "get_time"}</tool_call>', "stop", "the tool parser failed: KeyError: 'arguments'"),
        ('<tool_call>{"name": "get_time", "arguments": "now"}</tool_call>', "stop",
         'the arguments of get_time are no JSON mapping: "now"'),
        ('<tool_call>{"name": "get_time", "arguments": {"a": "\\ud800"}}</tool_call>', "stop",
         "the call of get_time has a lone surrogate"),
        (NOW, "length", "the text ended before its calls did (cut off after "),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_used(text: str, reason: str, message: str, tokenizer: Any) -> None:
    found = read(answers(tokenizer), tokenizer, text, reason=reason)
    assert found.error is not None
    assert found.error.error_type == "invalid_tool_call"
    assert found.error.error_message.startswith(message)
    assert (found.text, found.tool_calls) == (text, None)


CODER = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("text", [CODER[:18], CODER[:55]])
def test_a_parser_that_drops_what_is_cut_off(text: str, tokenizer: Any) -> None:
    """vLLM's server gives no call, or one without arguments, and drops the rest of the text."""
    made = answers(tokenizer, "qwen3_coder")
    found = read(made, tokenizer, text, reason="length")
    assert found.error is not None
    assert found.error.error_type == "invalid_tool_call"
    assert "cut off after" in found.error.error_message
    assert found.text == text
    assert calls_of(read(made, tokenizer, f"Hi {CODER}")) == [("get_weather", '{"city": "Rome"}')]


def test_required_calls(tokenizer: Any) -> None:
    made = answers(tokenizer)
    required = Tools(TOOLS, "required")
    forced = structure_of(tokenizer, required)
    assert [*forced] == ["structural_tag"]
    found = read(made, tokenizer, ROME, tools=required, forced=forced)
    assert (calls_of(found), reason_of(found)) == ([("get_weather", '{"city": "Rome"}')], "tool_calls")
    of_name = Tools(TOOLS, "named", "get_time")
    named = read(made, tokenizer, NOW, tools=of_name, forced=structure_of(tokenizer, of_name))
    assert (calls_of(named), reason_of(named)) == ([("get_time", "{}")], "stop")
    for text, reason in (("It rains.", "stop"), (ROME[:20], "length")):
        found = read(made, tokenizer, text, tools=required, forced=forced, reason=reason)
        assert found.error is not None
        assert found.error.error_type == "invalid_tool_call"
        assert found.text == text


def test_required_calls_as_json(tokenizer: Any) -> None:
    """By a parser without a structural tag of its own: the text is a list of calls, or the arguments of the named."""
    made = answers(tokenizer, "pythonic")
    text = '[{"name": "get_weather", "parameters": {"city": "Rome"}}]'
    required = Tools(TOOLS, "required")
    forced = structure_of(tokenizer, required, "pythonic")
    assert [*forced] == ["json"]
    found = read(made, tokenizer, text, tools=required, forced=forced)
    assert calls_of(found) == [("get_weather", '{"city": "Rome"}')]
    named = Tools(TOOLS, "named", "get_weather")
    arguments = structure_of(tokenizer, named, "pythonic")
    found = read(made, tokenizer, '{"city": "Oslo"}', tools=named, forced=arguments)
    assert calls_of(found) == [("get_weather", '{"city": "Oslo"}')]
    found = read(made, tokenizer, text[:30], tools=required, forced=forced, reason="length")
    assert found.error is not None
    assert found.error.error_type == "invalid_tool_call"
    assert found.error.error_message.startswith("the text does not parse as JSON (finish_reason length: cut off after ")
    assert found.text == text[:30]


def test_reasoning_and_calls_in_one_text(tokenizer: Any) -> None:
    made = answers(tokenizer, reasoning_parser="deepseek_r1")
    found = read(made, tokenizer, f"Where? <tool_call></think>{ROME}")
    assert found.reasoning == "Where? <tool_call>"
    assert found.num_reasoning_tokens == len(tokenizer("Where? <tool_call>", add_special_tokens=False).input_ids)
    assert calls_of(found) == [("get_weather", '{"city": "Rome"}')]
    # The prompt has closed the thinking.
    closed = read(made, tokenizer, f"So. {ROME}", prompt="a<think></think>")
    assert (closed.reasoning, closed.text) == (None, "So. ")
    assert calls_of(closed) == [("get_weather", '{"city": "Rome"}')]
    failed = read(made, tokenizer, 'Where?</think><tool_call>{"name')
    assert failed.error is not None
    assert (failed.reasoning, failed.text) == ("Where?", '<tool_call>{"name')


def test_parsers_that_cannot_be_had(tokenizer: Any) -> None:
    with pytest.raises(SpecError, match=r"model\.tool_parser: got 'hermez'; the installed vLLM has .*hermes"):
        answers(tokenizer, "hermez")
    with pytest.raises(SpecError, match=r"model\.tool_parser: 'mistral' does not go with this model's tokenizer: "):
        answers(tokenizer, "mistral")


def test_ids_that_the_model_has_written() -> None:
    def id_of(given: str, text: str) -> str:
        request = Request(3, 0, [1], SamplingSpec(), tools=Tools(TOOLS))
        parsed = ParsedAnswer(reasoning=None, text=None, calls=(ToolCall(given, "get_time", "{}"),), whole=text)
        [call] = with_ids(parsed, request, text, "job-1").calls
        return call.id

    assert id_of("functions.get_time:0", "x functions.get_time:0 y") == "functions.get_time:0"
    assert re.fullmatch(r"[0-9a-f]{9}", id_of("Ab3dE6gH9", "x"))  # as Mistral's templates want it


def test_calls_are_stored(tokenizer: Any) -> None:
    from batchinf.records import Prompt
    from batchinf.tasks.generate.task import Generate

    spec = JobSpec(
        model={"name": str(MODEL), "tool_parser": "hermes"},
        input={"path": "in"},
        output={"path": "out"},
        sampling={"temperature": 0.0},
    )
    results = [
        Result(Prompt(row, [1], None, None), 0, 1, None, "", None, 1, tool_calls=calls)
        for row, calls in enumerate([None, (ToolCall("call_1", "get_time", "{}"),)])
    ]
    column = Generate(spec).encode(results)["tool_calls"]
    assert column.to_pylist() == [None, [{"id": "call_1", "name": "get_time", "arguments": "{}"}]]


def test_other_calls_are_a_change(tokenizer: Any) -> None:
    """`diff` compares names and arguments: ids differ between jobs."""
    from batchinf.tasks.compare import Changes, example_lines
    from batchinf.tasks.generate.task import Generate

    @dataclasses.dataclass
    class Job:
        folder: str
        spec: dict[str, Any]
        own_schema: pa.Schema

    def call(call_id: str, city: str) -> list[dict[str, str]]:
        return [{"id": call_id, "name": "get_weather", "arguments": json.dumps({"city": city})}]

    values = {
        "key": pa.array([0, 1, 2]),
        "sample_index": pa.array([0, 0, 0]),
        **{f"prompt_hash_{job}": pa.array([1, 1, 1]) for job in "ab"},
        **{f"text_{job}": pa.nulls(3, pa.string()) for job in "ab"},
        **{f"error_type_{job}": pa.nulls(3, pa.string()) for job in "ab"},
        **{f"finish_reason_{job}": pa.array(["tool_calls"] * 3) for job in "ab"},
        "tool_calls_a": pa.array([call("a0", "Rome"), call("a1", "Rome"), None], CALLS),
        "tool_calls_b": pa.array([call("b0", "Rome"), call("b1", "Oslo"), call("b2", "Rome")], CALLS),
    }
    schema = pa.schema([(name[:-2], column.type) for name, column in values.items() if name.endswith("_a")])
    job = Job("out", {"sampling": {}}, schema)
    changes = Changes(job, job, Generate.compared, num_examples=3)
    table = changes.take(pa.RecordBatch.from_pydict(values))
    assert table["is_changed"].to_pylist() == [False, True, True]
    summary = changes.summary()
    shown = [line for row in summary.examples for line in example_lines("id", row)]
    assert any("Oslo" in line for line in shown)


# -- gpt-oss -----------------------------------------------------------------------------------------------------------

THOUGHT = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
CALLED = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Rome"}<|call|>'
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "calls"),
    [
        (THOUGHT + CALLED, "Look.", None, [("get_weather", '{"city": "Rome"}')]),
        (f"{THOUGHT}<|channel|>final<|message|>It rains.<|return|>", "Look.", "It rains.", []),
        ("<|channel|>analysis<|message|>So it goes", "So it goes", None, []),
        ("<|channel|>final<|message|>It rains.<|return|>", None, "It rains.", []),
    ],
)
def test_calls_and_reasoning_of_gpt_oss(
    text: str, reasoning: str | None, answer: str | None, calls: list[tuple[str, str]]
) -> None:
    from batchinf.engines.vllm.structured_output.tools import CallParser

    tokens = HarmonyTokenizer()
    parser = CallParser(spec_of("openai", "openai_gptoss"), tokens)
    token_ids = tokens.encode(text)
    for _ in range(2):
        request = Request(0, 0, [1], SamplingSpec(), tools=AUTO)
        found = parser.read(request, tokens.decode(token_ids), token_ids)
        assert (found.reasoning, found.text, found.problem) == (reasoning, answer, None)
        assert [(call.name, call.arguments) for call in found.calls] == calls


def test_no_reasoning_of_gpt_oss_is_dropped() -> None:
    """As vLLM's server, which chooses its parser of reasoning by itself."""
    with pytest.raises(
        SpecError, match=r"^model.tool_parser: got openai without .*; add model.reasoning_parser: openai_"
    ):
        answers(HarmonyTokenizer(), "openai")


@pytest.mark.parametrize("tools", [Tools(TOOLS, "required"), Tools(TOOLS, "named", "get_time")])
def test_a_call_of_gpt_oss_is_forced_after_its_thoughts(tools: Tools) -> None:
    from batchinf.engines.vllm.structured_output.tools import CallParser

    found = CallParser(spec_of("openai", "openai_gptoss"), HarmonyTokenizer()).structure(tools, None)
    assert found is not None
    assert "<|channel|>analysis<|message|>" in found["structural_tag"]
    assert ("get_weather" in found["structural_tag"]) == (tools.choice == "required")

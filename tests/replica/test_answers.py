"""What is made of a completion's text: structures that were missed, reasoning split off by vLLM's own parsers."""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from conftest import MODEL
from gpt_oss import HarmonyTokenizer
from transformers import PreTrainedTokenizerFast

import jobs
from batchinf.base.errors import RowError, SpecError
from batchinf.engines.installed import (
    StructuresCheck,
    check_structures_config,
    parser_names,
    structures_config,
)
from batchinf.prompts.row_sampling import RowSampling
from batchinf.records import Completion, Prompt, Request, Result
from batchinf.replica.answers import Answers, Detokenizer
from batchinf.spec.file import SpecFile
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.generate.task import Generate

SCHEMA: dict[str, Any] = {}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The sample model's, with a plain mark before a thought and a special one after it, as some models have them."""
    made = PreTrainedTokenizerFast.from_pretrained(MODEL)
    made.add_tokens(["<think>", "</think>"])
    made.add_tokens(["<|turn|>"], special_tokens=True)
    return made


def make_spec(structure: dict[str, Any] | None = None, parser: str | None = None, **fields: Any) -> JobSpec:
    return JobSpec(
        model={"name": str(MODEL), "reasoning_parser": parser},
        input={"path": "in"},
        output={"path": "out"},
        sampling=SamplingSpec(structured_outputs=structure, temperature=0.0, **fields),
    )


def completion_of(
    tokenizer: Any,
    text: str,
    reason: str = "length",
    stop: Any = None,
    prompt: str = "So",
    sampling: SamplingSpec | None = None,
) -> Completion:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if (reason, stop) == ("stop", None):
        ids.append(tokenizer.eos_token_id)
    request = Request(0, 0, tokenizer(prompt).input_ids, sampling or SamplingSpec(), max_tokens=9)
    engine_text = text if isinstance(stop, str) else None
    return Completion(request, np.array(ids, np.int32), reason, stop, engine_text)


def answer(
    spec: JobSpec, tokenizer: Any, *given: Any, matcher: Any = None, reasoner: Any = None, **named: Any
) -> Result:
    completion = completion_of(tokenizer, *given, sampling=spec.sampling, **named)
    [found] = Answers(spec, tokenizer, Detokenizer(tokenizer), reasoner=reasoner, matcher=matcher).read(
        [jobs.unread(completion)]
    )
    return found


def stored(found: Result) -> dict[str, Any]:
    """What was read in a completion, by field."""
    names = ("text", "reasoning", "error", "tool_calls", "num_reasoning_tokens")
    return {name: value for name in names if (value := getattr(found, name)) is not None}


def parts(found: Result) -> tuple[str | None, str | None]:
    """The answer and the reasoning."""
    return found.text, found.reasoning


def cut_off(found: Result) -> str:
    """The message of an error, without the number of tokens."""
    assert found.error is not None
    return re.sub(r" after [\d,]+ tokens?\)", ")", found.error.error_message)


# -- structures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ['{"a": [1, 2.5, null]}', " [] ", "3", '"ü😀"', "1" * 5000, '{"a": 1e999}'])
def test_json_that_parses_is_good(text: str, tokenizer: Any) -> None:
    for reason in ("stop", "length"):
        assert stored(answer(make_spec({"json": SCHEMA}), tokenizer, text, reason)) == {"text": text}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": "bro', "Unterminated string starting at: line 1 column 7 (char 6)"),
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ('{"a": 1} more', "Extra data: line 1 column 10 (char 9)"),
        ("NaN", "NaN is no JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_json_that_does_not_parse_is_an_error_beside_its_text(text: str, words: str, tokenizer: Any) -> None:
    found = answer(make_spec({"json": SCHEMA}), tokenizer, text)
    assert found.text == text
    assert found.error is not None
    assert found.error.error_type == "invalid_json"
    assert cut_off(found) == f"the text does not parse as JSON (finish_reason length: cut off): {words}"


def test_text_and_tokens_of_a_missed_structure_are_stored(tokenizer: Any) -> None:
    spec = make_spec({"json": SCHEMA})
    completion = completion_of(tokenizer, '{"a', sampling=spec.sampling)
    found = Answers(spec, tokenizer, Detokenizer(tokenizer)).read([jobs.unread(completion)])
    [row] = Generate(spec).encode(found).to_pylist()
    assert (row["text"], row["error_type"], row["finish_reason"]) == ('{"a', "invalid_json", "length")
    assert row["token_ids"] == completion.token_ids.tolist()
    assert "reasoning" not in row


def test_a_choice_is_one_of_them_however_it_ended(tokenizer: Any) -> None:
    spec = make_spec({"choice": ["pos", "positive"]})
    for text, reason in (("pos", "length"), ("positive", "stop"), (" pos", "stop")):
        assert stored(answer(spec, tokenizer, text, reason)) == {"text": text}
    found = answer(spec, tokenizer, "posit")
    assert found.error is not None
    assert found.error.error_type == "invalid_choice"
    assert cut_off(found) == "the text is none of the choices (finish_reason length: cut off): got 'posit'"
    error = RowError("structure_violated", "the text is none of the choices (finish_reason stop): got 'posit'")
    assert stored(answer(spec, tokenizer, "posit", "stop")) == {"text": "posit", "error": error}


@pytest.mark.parametrize(
    ("schema", "text", "words"),
    [
        ({"if": {"properties": {"mood": {"const": "bad"}}}, "then": {"required": ["why"]}}, '{"mood": "bad"}',
         "at $: 'why' is a required property"),
        ({"properties": {"a": {"items": {"minimum": 5}}}}, '{"a": [6, 2.5]}',
         "at $.a[1]: 2.5 is less than the minimum of 5"),
        ({"type": "object"}, "[]", "at $: [] is not of type 'object'"),
        ({"enum": ["x" * 300]}, '"y"', f"at $: breaks enum: ['{'x' * 58}…"),
        (False, "1", "at $: nothing is allowed here"),
        ({"pattern": r"^\d$"}, '"٣"', r"at $: '٣' does not match '^\\d$'"),
        ({"multipleOf": 0.01}, "0.075", "at $: 0.075 is not a multiple of 0.01"),
    ],
)  # fmt: skip
def test_a_finished_text_that_breaks_its_schema_is_an_error_at_its_place(
    schema: Any, text: str, words: str, tokenizer: Any
) -> None:
    spec = make_spec({"json": json.dumps(schema)})
    for reason, stop in (("stop", None), ("stop", "END"), ("repetition", None)):
        found = answer(spec, tokenizer, text, reason, stop)
        assert found.text == text
        assert found.error is not None and found.error.error_type == "structure_violated"
        ended = f" (finish_reason {reason}{f', stop_reason {stop}' if stop else ''})"
        assert found.error.error_message == f"the text breaks the schema{ended}: {words}"
    assert stored(answer(spec, tokenizer, text, "length")) == {
        "text": text
    }  # it was cut off, which its finish_reason says


def test_numbers_of_a_text_are_exact_however_long(tokenizer: Any) -> None:
    for schema, text in (
        ({"multipleOf": 0.01}, "0.07"),
        ({"const": 0.1}, "1e-1"),
        ({"type": "integer"}, "1" * 5000),
        ({"type": "integer"}, "2.0"),
        ({"maximum": 1e300}, "1e299"),
    ):
        assert stored(answer(make_spec({"json": schema}), tokenizer, text, "stop")) == {"text": text}
    found = answer(make_spec({"json": SCHEMA}), tokenizer, "1e99999999", "stop")
    assert found.error is not None
    assert found.error.error_message.endswith("the number 1e99999999 has too many digits")


def test_a_text_that_recurses_deeply_costs_one_row(tokenizer: Any) -> None:
    schema = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}
    text = "[" * 900 + "]" * 900
    found = answer(make_spec({"json": schema}), tokenizer, text, "stop")
    assert found.error is not None and found.error.error_type == "structure_violated"
    assert found.error.error_message.endswith("nested too deeply to be checked")


def test_rows_may_have_structures_of_their_own(tokenizer: Any) -> None:
    rows = RowSampling(SamplingSpec(temperature=0.0, max_tokens=9))
    structures = ({"json": SCHEMA}, None, {"choice": ["a", "b"]})
    given = [rows.with_values({"structured_outputs": structure}) for structure in structures]
    assert all(isinstance(sampling, SamplingSpec) for sampling in given)
    answers = Answers(make_spec(), tokenizer, Detokenizer(tokenizer))
    found = answers.read([jobs.unread(completion_of(tokenizer, "{", sampling=each)) for each in given])
    assert [answer.error and answer.error.error_type for answer in found] == ["invalid_json", None, "invalid_choice"]


def test_without_a_grammar_at_hand_what_was_cut_is_not_whole(tokenizer: Any) -> None:
    spec = make_spec({"regex": "[0-9]{4}"})
    assert stored(answer(spec, tokenizer, "1234", "stop")) == {"text": "1234"}
    found = answer(spec, tokenizer, "1234", "length")
    assert found.error is not None
    assert cut_off(found) == "the text does not match the regex (finish_reason length: cut off)"


@pytest.mark.parametrize("backend", ["guidance", "xgrammar", "auto", "outlines"])
@pytest.mark.parametrize(
    ("structure", "whole", "cut"),
    [
        ({"regex": "[0-9]{4}(-x)?"}, ["1234", "1234-x"], ["", "123", "1234-"]),
        ({"regex": r"(\w+\s?)+\."}, ["a b."], ["word " * 400]),  # over which Python's `re` never ends
        ({"grammar": 'root ::= "yes" (", " [a-z]+)* "."'}, ["yes.", "yes, a, b."], ["yes", "yes, a,"]),
        ({"grammar": "start: /a+/ b?\nb: \"b\""}, ["a", "aab"], ["", "ba"]),
    ],
)  # fmt: skip
def test_a_text_is_held_against_the_backend_s_own_grammar(
    structure: dict[str, Any], whole: list[str], cut: list[str], backend: str, tokenizer: Any
) -> None:
    pytest.importorskip("vllm")
    from batchinf.engines.vllm.structured_output.structures import matcher

    spec = make_spec(structure)
    of = functools.partial(matcher, backend=backend)
    for text in whole:
        assert stored(answer(spec, tokenizer, text, matcher=of)) == {"text": text}
    for text in cut:
        for reason, stop in (("length", None), ("stop", None), ("stop", "END"), ("stop", 5)):
            if text or reason == "length":
                found = answer(spec, tokenizer, text if stop != 5 else f"{text}x", reason, stop, matcher=of)
                assert found.error is not None
                assert found.error.error_type == ("invalid_structure" if reason == "length" else "structure_violated")


# -- reasoning -------------------------------------------------------------------------------------------------------


def reasoner_of(parser: str, tokenizer: Any, kwargs: dict[str, Any] | None = None) -> Any:
    pytest.importorskip("vllm")
    from batchinf.engines.vllm.structured_output.structures import VllmReasoner

    return VllmReasoner(parser, tokenizer, kwargs or {})


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("<think>It is so.</think>Yes.", "It is so.", "Yes."),
        ("It is so.</think>Yes.", "It is so.", "Yes."),
        ("<think>It goes on and", "It goes on and", None),
    ],
)
def test_reasoning_is_split_off(parser: str, text: str, reasoning: str, rest: str | None, tokenizer: Any) -> None:
    reasoner = reasoner_of(parser, tokenizer)
    mark = tokenizer.convert_tokens_to_ids("</think>")
    for reason in ("stop", "length"):
        ids = completion_of(tokenizer, text, reason).token_ids.tolist()
        # Parsers differ in whether the end-of-sequence token is one of the reasoning.
        end = ids.index(mark) if mark in ids else len(ids) - (reason == "stop" and parser == "qwen3")
        counted = ids[text.startswith("<think>") : end]
        found = answer(make_spec(parser=parser), tokenizer, text, reason, reasoner=reasoner)
        text_of = {} if rest is None else {"text": rest}
        assert stored(found) == {**text_of, "reasoning": reasoning, "num_reasoning_tokens": len(counted)}


def test_where_the_prompt_has_shut_the_thinking_all_is_the_answer(tokenizer: Any) -> None:
    reasoner = reasoner_of("deepseek_r1", tokenizer)
    spec = make_spec(parser="deepseek_r1")
    found = answer(spec, tokenizer, "Yes.", "stop", reasoner=reasoner, prompt="So <think>\n\n</think>\n\n")
    assert stored(found) == {"text": "Yes.", "num_reasoning_tokens": 0}
    assert parts(answer(spec, tokenizer, "Hm.", "stop", reasoner=reasoner, prompt="So <think>\n")) == (None, "Hm.")


def test_each_row_s_parser_has_the_variables_of_its_own_template(tokenizer: Any) -> None:
    """deepseek_v3 looks for a reasoning only where the template was told to think."""
    reasoner = reasoner_of("deepseek_v3", tokenizer, {"thinking": False})
    text = "It is so.</think>Yes."
    plain = completion_of(tokenizer, text)
    own = json.dumps({"thinking": True})
    thinking = dataclasses.replace(plain, request=dataclasses.replace(plain.request, template_kwargs=own))
    made = Answers(make_spec(parser="deepseek_v3"), tokenizer, Detokenizer(tokenizer), reasoner=reasoner)
    found = made.read(list(map(jobs.unread, (plain, thinking, plain))))
    assert list(map(parts, found)) == [(text, None), ("Yes.", "It is so."), (text, None)]
    assert [each.num_reasoning_tokens for each in found] == [
        0,
        thinking.token_ids.tolist().index(tokenizer.convert_tokens_to_ids("</think>")),
        0,
    ]


def test_a_parser_that_cannot_count_leaves_the_number_out(tokenizer: Any) -> None:
    reasoner = reasoner_of("granite", tokenizer)
    text = "Here is my thought process: Hm. Here is my response: Yes."
    found = answer(make_spec(parser="granite"), tokenizer, text, reasoner=reasoner)
    assert found.reasoning
    assert found.num_reasoning_tokens is None


def test_special_tokens_are_seen_by_the_parser_and_stand_in_neither_part(tokenizer: Any) -> None:
    marked = PreTrainedTokenizerFast.from_pretrained(MODEL)
    marked.add_tokens(["<think>", "</think>", "<|turn|>"], special_tokens=True)
    reasoner = reasoner_of("deepseek_r1", marked)
    text = "<think>It is<|turn|> so.</think>Yes<|turn|>."
    spec = make_spec(parser="deepseek_r1")
    assert parts(answer(spec, marked, text, reasoner=reasoner)) == ("Yes.", "It is so.")
    # As the engine decodes it that looks for stop strings: it keeps them too.
    assert parts(answer(spec, marked, text, "stop", "END", reasoner=reasoner)) == ("Yes.", "It is so.")
    kept = make_spec(parser="deepseek_r1", skip_special_tokens=False)
    assert parts(answer(kept, marked, text, reasoner=reasoner)) == ("Yes<|turn|>.", "It is<|turn|> so.")
    # Words that look like a special token, in a text that has none, are the model's own.
    plain = completion_of(tokenizer, "a</think>b")
    spelt = [*plain.token_ids.tolist(), *tokenizer("<|tu").input_ids[1:], *tokenizer("rn|>").input_ids[1:]]
    [found] = Answers(spec, tokenizer, Detokenizer(tokenizer), reasoner=reasoner_of("deepseek_r1", tokenizer)).read(
        [jobs.unread(Completion(plain.request, np.array(spelt, np.int32), "length"))]
    )
    assert parts(found) == ("b<|turn|>", "a")


def test_a_structure_is_looked_for_after_the_thinking(tokenizer: Any) -> None:
    reasoner = reasoner_of("deepseek_r1", tokenizer)
    spec = make_spec({"json": SCHEMA}, parser="deepseek_r1")
    assert parts(answer(spec, tokenizer, "hm {</think>{}", reasoner=reasoner)) == ("{}", "hm {")
    found = answer(spec, tokenizer, "hm {}", reasoner=reasoner)
    assert (found.text, found.reasoning) == (None, "hm {}")
    assert found.error is not None
    assert found.error.error_type == "invalid_json"
    assert cut_off(found) == "no text came after the reasoning (finish_reason length: cut off)"


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
         ("So.", "Yes.")),
        ("<|channel|>final<|message|>Yes.<|return|>", (None, "Yes.")),
        ("<|channel|>analysis<|message|>So it goes", ("So it goes", None)),
        ('{"a": 1}', (None, '{"a": 1}')),  # with a structure, the engine forbids the marks
    ],
)  # fmt: skip
def test_the_text_of_gpt_oss_is_split_by_vllm_s_whole_parser(text: str, split: tuple[str | None, str | None]) -> None:
    tokens = HarmonyTokenizer()
    token_ids = tokens(text)["input_ids"]
    reasoner = reasoner_of("openai_gptoss", tokens)
    request = Request(0, 0, [], SamplingSpec())
    for _ in range(2):
        assert reasoner.split(request, tokens.decode(token_ids), token_ids) == split
        num_tokens = 0 if split[0] is None else len(tokens.encode(split[0]))
        assert reasoner.num_tokens(request, split[0], token_ids) == num_tokens


@pytest.mark.parametrize(
    ("parser", "words"),
    [
        ("openai_gptoss", "it splits the trial text <|channel|>analysis<|message|>a<|end|>"),
        ("qwen3", "the tokenizer has no token </think>, with which the reasoning ends"),
        ("deepseek_v4", "the tokenizer has no token </think>, with which the reasoning ends"),
        ("deepseek_r1", "could not locate think start/end tokens in the tokenizer!"),
    ],
)
def test_a_parser_without_its_marks_is_refused(parser: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        reasoner_of(parser, PreTrainedTokenizerFast.from_pretrained(MODEL))
    assert f"model.reasoning_parser: '{parser}' does not go with this model's tokenizer: " in str(caught.value)
    assert words in str(caught.value)


def test_a_parser_that_fails_costs_one_row(tokenizer: Any) -> None:
    class Failing:
        def split(self, request: Request, text: str, token_ids: Any) -> tuple[str | None, str | None]:
            raise KeyError(text)

    found = answer(make_spec(parser="x"), tokenizer, "Yes.", reasoner=Failing())
    assert found.text == "Yes."
    assert found.error is not None
    assert found.error.error_message == "the reasoning parser failed: KeyError: 'Yes.'"


def test_the_output_has_reasoning_after_the_text(tokenizer: Any) -> None:
    task = Generate(make_spec(parser="qwen3"))
    names = task.output_schema([]).names
    place = names.index("text")
    assert names[place + 1 : place + 3] == ["reasoning", "num_reasoning_tokens"]
    result = Result(Prompt(0, [1], None, None), 0, 1, completion_of(tokenizer, "a"), None, None, 1, "a")
    [row] = task.encode([result]).to_pylist()
    assert (row["text"], row["reasoning"]) == (None, "a")


# -- ahead of a run --------------------------------------------------------------------------------------------------


def refusal(spec: JobSpec) -> str:
    file = SpecFile(spec, {"": "job.yaml"}, "job.yaml")
    with pytest.raises(SpecError) as caught, StructuresCheck(file, str(MODEL)) as check:
        list(check.lines())
    return str(caught.value)


def test_parsers_are_known_without_vllm_s_import() -> None:
    pytest.importorskip("vllm")
    from vllm.reasoning import ReasoningParserManager

    assert parser_names("reasoning") == tuple(sorted(ReasoningParserManager.lazy_parsers))


def test_the_config_of_structures_is_known_without_vllm_s_import() -> None:
    pytest.importorskip("vllm")
    from vllm.config import StructuredOutputsConfig
    from vllm.config.structured_outputs import StructuredOutputsBackend

    backends = get_args(StructuredOutputsBackend)
    names = [field.name for field in dataclasses.fields(StructuredOutputsConfig)]
    known = structures_config()
    assert known is not None and ([*known[0]], known[1]) == (names, backends)
    flags = [name for name in names if isinstance(getattr(StructuredOutputsConfig(), name), bool)]
    others = [{}, {"backend": "foo"}, {"backend": ["xgrammar"]}, {"backend": None}, {"bakend": "xgrammar"}]
    others += [{name: value} for name in names for value in (False, "", None, 5, 0.5, [], ["a"], {})]
    for config in [*others, *({"backend": backend, flag: True} for backend in backends for flag in flags)]:
        spec = make_spec().model_copy(update={"engine": {"structured_outputs_config": config}})
        ours = is_allowed(check_structures_config, SpecFile(spec, {"": "job.yaml"}, "job.yaml"))
        assert ours == is_allowed(lambda config: StructuredOutputsConfig(**config), config), config


def is_allowed(check: Callable[[Any], object], given: Any) -> bool:
    try:
        check(given)
    except (SpecError, ValueError):
        return False
    return True


def test_an_unknown_parser_is_one_line() -> None:
    pytest.importorskip("vllm")
    names = ", ".join(parser_names("reasoning") or ())
    assert refusal(make_spec(parser="qwen33")) == (
        f"job.yaml: model.reasoning_parser: got 'qwen33'; the installed vLLM has {names}"
    )


def test_what_vllm_would_refuse_is_a_line_each(tmp_path: pathlib.Path) -> None:
    """In a whole job, whose processes the tests' server forks: one of their own would import vLLM for 10 s."""
    pytest.importorskip("vllm")
    spec = jobs.spec_of(
        tmp_path,
        model={"name": str(MODEL), "reasoning_parser": "deepseek_r1"},
        sampling={"structured_outputs": {"regex": "(?=a)b"}},
        engine={"structured_outputs_config": {"backend": "xgrammar"}},
        parallel={"data_parallel_size": 1},
        scripted=None,
    )
    done = jobs.run("run", spec)
    assert done.returncode == 2
    first, second = (line.partition(": ")[2] for line in done.stderr.partition("error: ")[2].splitlines())
    assert first.startswith(
        "sampling.structured_outputs.regex: cannot be compiled: xgrammar: Failed to transform regex into a grammar: "
        "Regex parsing error"
    )
    assert second == (
        "model.reasoning_parser: 'deepseek_r1' does not go with this model's tokenizer: "
        "DeepSeekR1ReasoningParser reasoning parser could not locate think start/end tokens in the tokenizer!"
    )


@pytest.mark.parametrize(
    ("choices", "config", "is_sure"),
    [
        (["a", '"b"'], {}, True),
        (["a\nb"], {}, False),
        (["a"], {"backend": "guidance"}, True),
        (["a"], {"backend": "outlines"}, False),
    ],
)
def test_choices_need_no_import_of_vllm(choices: list[str], config: dict[str, str], is_sure: bool) -> None:
    pytest.importorskip("vllm")
    spec = make_spec({"choice": choices})
    spec = spec.model_copy(update={"engine": {"structured_outputs_config": config}, "scripted": None})
    with StructuresCheck(SpecFile(spec, {"": "job.yaml"}, "job.yaml"), str(MODEL)) as check:
        assert check.is_done == is_sure
        if is_sure:
            assert list(check.lines()) == ["structured outputs: choice, valid"]


@pytest.mark.parametrize(
    ("structure", "backend", "words"),
    [
        ({"regex": "("}, "auto", "xgrammar: Failed to transform regex into a grammar: Regex parsing error at"),
        ({"regex": "(?<=a)b"}, "xgrammar", "Lookbehind is not supported"),
        ({"grammar": 'root ::= "a" foo'}, "auto", 'Rule "foo" is not defined'),
        ({"json": '{"type": "array", "uniqueItems": true}'}, "xgrammar", "features not supported by xgrammar"),
        ({"json": '{"type": "objekt"}'}, "guidance", "guidance: Invalid type: objekt"),
        ({"json": "{}"}, "guidanc", "no such backend; must be auto, xgrammar, guidance, outlines, lm-format-enforcer"),
    ],
)  # fmt: skip
def test_structures_that_do_not_compile(structure: dict[str, str], backend: str, words: str) -> None:
    pytest.importorskip("vllm")
    from batchinf.engines.vllm.structured_output.structures import compiled_by

    with pytest.raises(ValueError, match=r".") as caught:
        compiled_by(structure, backend)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ("; guidance: " in str(caught.value)) == (backend == "auto")


def test_structures_that_compile_say_by_what() -> None:
    pytest.importorskip("vllm")
    from batchinf.engines.vllm.structured_output.structures import compiled_by

    for structure in (
        {"regex": "a+"},
        {"choice": ["a", '"b"', "\\", "日本", "a|b ) ::= x"]},
        {"grammar": 'root ::= "a"'},
        {"json": '{"type": "object"}'},
    ):
        assert compiled_by(structure, "auto") == "xgrammar"
    assert compiled_by({"regex": r"\p{L}+"}, "auto") == "guidance"  # which xgrammar cannot

"""Fields of sampling on real vLLM, of the whole job and of single rows: what they forbid is not in the output."""

import functools
import json
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from conftest import MODEL
from pydantic import ValidationError

from batchinf.base.errors import RowFailed
from batchinf.engines.protocol import EngineStats
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.row_sampling import RowSampling
from batchinf.records import Completion, Prompt, Request
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import NOT_TAKEN, PER_ROW_FIELDS, STRUCTURE_FIELDS, SamplingSpec
from batchinf.tasks.registry import task_of

pytest.importorskip("vllm")
from vllm import SamplingParams

if TYPE_CHECKING:
    from batchinf.engines.vllm.engine import VllmEngine

NUM_ROWS = 12
MAX_TOKENS = 20
tokenizer = functools.cache(functools.partial(load_tokenizer, str(MODEL), False))


@functools.cache
def prompts() -> list[list[int]]:
    lines = (MODEL.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_ROWS]
    return [tokenizer()(json.loads(line)["prompt"]).input_ids for line in lines]


def run(engine: "VllmEngine", samplings: Sequence[SamplingSpec]) -> list[Completion]:
    """The requests of each prompt, with these samplings in turn, all in one batch. In the order of rows and samples."""
    task = task_of(JobSpec(model={"name": str(MODEL)}, input={"path": "rows.jsonl"}, output={"path": "out"}))
    for row, (ids, sampling) in enumerate(zip(prompts(), samplings, strict=True)):
        for request in task.expand(Prompt(row, ids, None, None, sampling), len(ids) + MAX_TOKENS):
            engine.add(request)
    found = {}
    while engine.num_unfinished():
        found.update({done.request.key: done for done in engine.step()})
    return [found[key] for key in sorted(found)]


def of_job(engine: "VllmEngine", **fields: Any) -> list[Completion]:
    return run(engine, [SamplingSpec(**{"temperature": 0, "ignore_eos": True, **fields})] * NUM_ROWS)


def of_rows(engine: "VllmEngine", field: str, values: Sequence[Any], **fields: Any) -> list[Completion]:
    """values: of the rows in turn, as a column has them."""
    job = {"temperature": 0, "ignore_eos": True, "columns": {field: "own"}, **fields}
    rows = RowSampling(SamplingSpec(**job))
    samplings = [rows.of({"own": values[row % len(values)]}) for row in range(NUM_ROWS)]
    assert all(isinstance(sampling, SamplingSpec) for sampling in samplings), samplings
    return run(engine, samplings)  # type: ignore[arg-type]


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def text(completion: Completion) -> str:
    return tokenizer().decode(completion.token_ids.tolist(), skip_special_tokens=True)


@pytest.fixture
def free(vllm_engine: "VllmEngine") -> list[list[int]]:
    """The greedy tokens without any of the fields."""
    return tokens(of_job(vllm_engine))


def test_an_engine_goes_on_after_another_warm_up(vllm_engine: "VllmEngine", free: list[list[int]]) -> None:
    """For a retry, an engine that is up is warmed up again. Its figures begin anew."""
    spec = JobSpec(model={"name": str(MODEL)}, input={"path": "rows.jsonl"}, output={"path": "out"})
    vllm_engine.warm_up(task_of(spec).warm_up_request())
    assert vllm_engine.stats() == EngineStats()
    assert vllm_engine.num_unfinished() == 0
    assert tokens(of_job(vllm_engine)) == free


def test_allowed_token_ids(vllm_engine: "VllmEngine", free: list[list[int]]) -> None:
    few = [20, 21, 300]
    assert all(set(output) - set(few) for output in free)
    sampled = tokens(of_job(vllm_engine, allowed_token_ids=few, temperature=1.0))
    assert set().union(*sampled) == set(few)
    own = tokens(of_rows(vllm_engine, "allowed_token_ids", [[7, 8], None, [9]]))
    for row, output in enumerate(own):
        assert set(output) <= {7, 8} if row % 3 == 0 else output == free[row] if row % 3 == 1 else set(output) == {9}


def test_logit_bias(vllm_engine: "VllmEngine", free: list[list[int]]) -> None:
    common = max(set().union(*free), key=lambda token: sum(output.count(token) for output in free))
    assert not any(common in output for output in tokens(of_job(vllm_engine, logit_bias={common: -100})))
    own = [{str(common): -100.0}, None, json.dumps({"11": 100}), [(common, -100.0), ("12", None)]]
    for row, output in enumerate(tokens(of_rows(vllm_engine, "logit_bias", own))):
        if row % 4 == 1:
            assert output == free[row]
        elif row % 4 == 2:
            assert output == [11] * MAX_TOKENS
        else:
            assert common not in output


def test_bad_words(vllm_engine: "VllmEngine", free: list[list[int]]) -> None:
    bad = [" the", "and", "e"]
    params = SamplingParams(bad_words=bad)
    params.update_from_tokenizer(vllm_engine._engine.input_processor.tokenizer)
    forbidden = {ids[0] for ids in params.bad_words_token_ids if len(ids) == 1}
    assert forbidden & set().union(*free)
    assert not forbidden & set().union(*tokens(of_job(vllm_engine, bad_words=bad)))
    own = tokens(of_rows(vllm_engine, "bad_words", [bad, None]))
    assert not forbidden & set().union(*own[::2])
    assert own[1::2] == free[1::2]
    # Of a text of several tokens, the last one is forbidden after the others.
    runs = ((row, output[place : place + 3]) for row, output in enumerate(free) for place in range(MAX_TOKENS - 3))
    encode = functools.partial(tokenizer().encode, add_special_tokens=False)
    row, longer = next(run for run in runs if encode(tokenizer().decode(run[1]).lstrip()) == run[1])
    without = tokens(of_job(vllm_engine, bad_words=tokenizer().decode(longer)))[row]
    assert longer not in [without[place : place + 3] for place in range(MAX_TOKENS)]


def test_repetition_detection(vllm_engine: "VllmEngine") -> None:
    rule = {"max_pattern_size": 2, "min_count": 4}
    stuck = of_job(vllm_engine, repetition_detection=rule, logit_bias={11: 100})
    for completion in stuck:
        assert (completion.finish_reason, completion.stop_reason) == ("repetition", "repetition_detected")
        assert completion.token_ids.tolist() == [11] * 4
        assert text(completion) == tokenizer().decode([11] * 4)
    own = of_rows(
        vllm_engine, "repetition_detection", [{**rule, "min_pattern_size": None}, None, '{"max_pattern_size": 0}'],
        logit_bias={11: 100},
    )  # fmt: skip
    assert [completion.finish_reason for completion in own] == ["repetition", "length", "length"] * (NUM_ROWS // 3)


TAG = {
    "structures": [{"begin": "<a>", "schema": {"enum": [1, 22]}, "end": "</a>"}],
    "triggers": ["<a>"],
}


def test_structures_of_rows(vllm_engine: "VllmEngine", free: list[list[int]]) -> None:
    schemas = [{"enum": ["first"]}, None, json.dumps({"enum": ["third"]})]
    for row, done in enumerate(of_rows(vllm_engine, "structured_outputs.json", schemas, ignore_eos=False)):
        if row % 3 == 1:
            assert done.token_ids.tolist()[:5] == free[row][:5]
        else:
            assert text(done) == ('"first"' if row % 3 == 0 else '"third"')
    choices = [["yes", "no"], ["maybe"]]
    for row, done in enumerate(of_rows(vllm_engine, "structured_outputs.choice", choices, ignore_eos=False)):
        assert text(done) in choices[row % 2]
    # The free text is driven into the trigger. After it comes the tag, and nothing else.
    begin = tokenizer().encode("<a>", add_special_tokens=False)
    own = of_rows(vllm_engine, "structured_outputs.structural_tag", [TAG, None], logit_bias={begin[0]: 50},
                  ignore_eos=False)  # fmt: skip
    assert len({text(done) for done in own[::2]} | {""}) > 1
    objects = of_job(vllm_engine, structured_outputs={"json_object": True}, ignore_eos=False)
    assert all(text(done).startswith("{") for done in objects)


def test_structural_tags_of_backends() -> None:
    from batchinf.engines.vllm.structured_output.structures import compiled_by

    old, new = (SamplingSpec(structured_outputs={"structural_tag": tag}).structured_outputs or {} for tag in (
        TAG, {"format": {"type": "const_string", "value": "ab"}}))  # fmt: skip
    assert [compiled_by(old, backend) for backend in ("guidance", "xgrammar")] == ["guidance", "xgrammar"]
    assert compiled_by(new, "xgrammar") == "xgrammar"
    with pytest.raises(ValueError, match="none with `format`"):
        compiled_by(new, "guidance")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("allowed_token_ids", [10**6], "out-of-vocab"),
        ("logit_bias", {10**6: 1}, "out-of-vocab"),
        ("bad_words", [f"word{number}" for number in range(200)], "Too many bad words"),
        ("bad_words", ["x " * 1200], "at most 1,024"),
        ("thinking_token_budget", 5, "needs model.reasoning_parser"),
    ],
)
def test_values_that_would_end_the_engine_cost_their_row(
    vllm_engine: "VllmEngine", field: str, value: Any, words: str
) -> None:
    sampling = SamplingSpec(**{"temperature": 0, field: value})
    with pytest.raises(RowFailed) as caught:
        vllm_engine.add(Request(0, 0, [5, 6, 7], sampling, max_tokens=4))
    assert caught.value.error.error_type == "invalid_sampling"
    assert words in caught.value.error.error_message
    assert vllm_engine.num_unfinished() == 0
    assert len(of_job(vllm_engine)) == NUM_ROWS


# -- all fields of vLLM ------------------------------------------------------------------------------------------------


def test_each_field_of_the_installed_vllm_is_taken_or_refused_with_a_reason() -> None:
    """A field of a later version fails here, until it is one of `SamplingSpec` or of `NOT_TAKEN`."""
    fields = {field for field in SamplingParams.__struct_fields__ if not field.startswith("_")}
    assert fields - set(SamplingSpec.model_fields) == set(NOT_TAKEN)
    assert not set(NOT_TAKEN) & set(SamplingSpec.model_fields)
    own = {"columns", "logprobs_mode"}  # of a job, and of vLLM's engine
    assert set(SamplingSpec.model_fields) - own <= fields
    for field, reason in NOT_TAKEN.items():
        with pytest.raises(ValidationError, match=re.escape(f"not supported: {reason}")):
            SamplingSpec(**{field: None})


def test_each_field_of_rows_is_in_one_of_these_tests() -> None:
    source = re.sub(r"\(\s+", "(", pathlib.Path(__file__).read_text(encoding="utf-8"))
    source = re.sub(r"\s+", " ", source)
    elsewhere = {"thinking_token_budget"}  # it needs a model with marks: tests/replica/test_reasoning_job.py
    for field in (*PER_ROW_FIELDS, *STRUCTURE_FIELDS):
        assert field in elsewhere or f'of_rows(vllm_engine, "{field}"' in source, field


GREEDY_FIELDS: list[tuple[str, Any]] = [("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0), ("temperature", 0)]


@pytest.mark.parametrize(("field", "value"), GREEDY_FIELDS)
def test_of_the_job_what_leaves_one_token_is_greedy(
    vllm_engine: "VllmEngine", free: list[list[int]], field: str, value: Any
) -> None:
    assert tokens(of_job(vllm_engine, **{"temperature": 1.5, field: value})) == free
    assert tokens(of_job(vllm_engine, temperature=1.5)) != free


def test_of_rows_what_leaves_one_token_is_greedy(vllm_engine: "VllmEngine", free: list[list[int]]) -> None:
    found = [
        of_rows(vllm_engine, "top_k", [1, None], temperature=1.5),
        of_rows(vllm_engine, "top_p", [1e-6, None], temperature=1.5),
        of_rows(vllm_engine, "min_p", [1.0, None], temperature=1.5),
        of_rows(vllm_engine, "temperature", [0, None], temperature=1.5),
    ]
    for completions in map(tokens, found):
        assert completions[::2] == free[::2]
        assert all(output != free[row] for row, output in enumerate(completions) if row % 2)


def doubled(output: Sequence[int]) -> int:
    """Tokens that an output has more than once."""
    return len(output) - len(set(output))


def test_penalties(vllm_engine: "VllmEngine", free: list[list[int]]) -> None:
    """A bias makes a token likely, so that without the penalty it comes again."""
    bias = {11: 100}
    stuck = tokens(of_job(vllm_engine, logit_bias=bias))
    assert stuck == [[11] * MAX_TOKENS] * NUM_ROWS
    assert sum(map(doubled, free)) > 0
    # 100 more tokens of one kind cost more than the bias gives.
    heavy = {"repetition_penalty": 1000.0}
    assert all(output.count(11) <= 1 for output in tokens(of_job(vllm_engine, logit_bias=bias, **heavy)))
    for row, output in enumerate(tokens(of_rows(vllm_engine, "repetition_penalty", [1000.0, None], logit_bias=bias))):
        assert (output.count(11) <= 1) == (row % 2 == 0)
    for name, found in (
        ("presence_penalty", tokens(of_rows(vllm_engine, "presence_penalty", [2.0, None]))),
        ("frequency_penalty", tokens(of_rows(vllm_engine, "frequency_penalty", [2.0, None]))),
    ):
        of_all = tokens(of_job(vllm_engine, **{name: 2.0}))
        assert sum(map(doubled, of_all)) < sum(map(doubled, free))
        assert found[::2] == of_all[::2]
        assert found[1::2] == free[1::2]


def test_lengths_and_stops(vllm_engine: "VllmEngine", free: list[list[int]]) -> None:
    end = tokenizer().eos_token_id
    wants_end = {"logit_bias": {end: 100}, "ignore_eos": False}
    assert all(output == [end] for output in tokens(of_job(vllm_engine, **wants_end)))
    held = tokens(of_job(vllm_engine, **wants_end, min_tokens=7))
    assert all(len(output) == 8 and end not in output[:7] for output in held)
    own = tokens(of_rows(vllm_engine, "min_tokens", [7, None], **wants_end))
    assert [len(output) for output in own] == [8, 1] * (NUM_ROWS // 2)
    # Each row ends at its own sixth token, or before, where the same token stands earlier.
    sixth = [output[5] for output in free]
    ended = of_rows(vllm_engine, "stop_token_ids", [[token] for token in sixth])
    for row, done in enumerate(ended):
        assert done.token_ids.tolist() == free[row][: free[row].index(sixth[row]) + 1]
        assert (done.finish_reason, done.stop_reason) == ("stop", sixth[row])
    assert all(sixth[0] not in output[:-1] for output in tokens(of_job(vllm_engine, stop_token_ids=[sixth[0]])))
    letters = [re.findall(r"[a-z]", tokenizer().decode(output)) for output in free]
    assert any(letters)
    words = [found[-1] if found else "zzz" for found in letters]
    for row, done in enumerate(of_rows(vllm_engine, "stop", [[word] for word in words])):
        assert done.stop_reason == (words[row] if letters[row] else None)
        assert (words[row] in text(done)) == bool(letters[row])
        assert words[row] not in tokenizer().decode(done.token_ids.tolist()[:-1])
    budgets = [3, None, 1]
    lengths = [len(output) for output in tokens(of_rows(vllm_engine, "max_tokens", budgets, max_tokens=5))]
    assert lengths == [3, 5, 1] * (NUM_ROWS // 3)


def test_seeds(vllm_engine: "VllmEngine") -> None:
    sampled = {"temperature": 1.5}
    same = [tokens(of_rows(vllm_engine, "seed", [3, None], **sampled)) for _ in range(2)]
    assert same[0] == same[1]
    other = tokens(of_rows(vllm_engine, "seed", [4, None], **sampled))
    assert all((output == same[0][row]) == (row % 2 == 1) for row, output in enumerate(other))


def test_samples_of_rows(vllm_engine: "VllmEngine") -> None:
    found = of_rows(vllm_engine, "n", [3, None, 1], temperature=1.5)
    by_row: dict[int, list[tuple[int, ...]]] = {}
    for done in found:
        by_row.setdefault(done.request.row_index, []).append(tuple(done.token_ids.tolist()))
    assert [len(by_row[row]) for row in range(NUM_ROWS)] == [3, 1, 1] * (NUM_ROWS // 3)
    assert all(len(set(samples)) == len(samples) for samples in by_row.values())


def test_regexes_and_grammars_of_rows(vllm_engine: "VllmEngine") -> None:
    found = of_rows(vllm_engine, "structured_outputs.regex", ["[0-9]{3}", "ab?c"], ignore_eos=False)
    for row, done in enumerate(found):
        assert re.fullmatch(("[0-9]{3}", "ab?c")[row % 2], text(done))
    grammars = ['root ::= "left" | "right"', 'root ::= "up"']
    found = of_rows(vllm_engine, "structured_outputs.grammar", grammars, ignore_eos=False)
    assert {text(done) for done in found[1::2]} == {"up"}
    assert {text(done) for done in found[::2]} <= {"left", "right"}

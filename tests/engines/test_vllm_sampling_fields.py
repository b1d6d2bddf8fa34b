"""Fields of sampling on real vLLM, of the whole job and of single rows: what they forbid is not in the output."""

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from conftest import MODEL

from batchinf.base.errors import RequestRefused
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.row_sampling import RowSampling
from batchinf.records import Completion, Request
from batchinf.spec.sampling import SamplingSpec

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
    """One request for each prompt, with these samplings in turn, all in one batch."""
    for row, (prompt, sampling) in enumerate(zip(prompts(), samplings, strict=True)):
        seed = None if sampling.temperature == 0 else row
        engine.add(Request(row, 0, prompt, sampling, max_tokens=MAX_TOKENS, seed=seed))
    found = {}
    while engine.num_unfinished():
        found.update({done.request.row_index: done for done in engine.step()})
    return [found[row] for row in range(NUM_ROWS)]


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


def test_penalties(vllm_engine: "VllmEngine", free: list[list[int]]) -> None:
    repeated = [len(output) - len(set(output)) for output in free]
    assert sum(repeated) > NUM_ROWS
    # So large that no token comes twice, and none of the prompt.
    for output, prompt in zip(tokens(of_job(vllm_engine, repetition_penalty=50)), prompts(), strict=True):
        assert len(set(output)) == len(output)
        assert not set(output) & set(prompt)
    for field in ("frequency_penalty", "presence_penalty"):
        own = tokens(of_rows(vllm_engine, field, [2.0, None]))
        assert own[1::2] == free[1::2]
        assert sum(len(output) - len(set(output)) for output in own[::2]) < sum(repeated[::2]) / 2


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
    from batchinf.engines.vllm.structures import compiled_by

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
    with pytest.raises(RequestRefused) as caught:
        vllm_engine.add(Request(0, 0, [5, 6, 7], sampling, max_tokens=4))
    assert caught.value.error.error_type == "invalid_sampling"
    assert words in caught.value.error.error_message
    assert vllm_engine.num_unfinished() == 0
    assert len(of_job(vllm_engine)) == NUM_ROWS

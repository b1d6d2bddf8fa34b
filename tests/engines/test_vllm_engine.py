"""The adapter on real vLLM: held against `LLM.generate`, against transformers, and against an engine that is killed."""

import functools
import itertools
import json
import re
import tempfile
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

import jobs
from batchinf.base.errors import BatchinfError, EngineDeadError, EngineStartError, RowError, RowFailed
from batchinf.prompts.row_sampling import RowSampling
from batchinf.records import Completion, Prompt, Request
from batchinf.replica.answers import Answers, Detokenizer
from batchinf.replica.token_count import TokenCount
from batchinf.spec.job import JobSpec, ParallelSpec
from batchinf.spec.retry import FIXED_SAMPLING, SAMPLING
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import seed_of
from batchinf.tasks.generate.task import Generate
from batchinf.tasks.registry import task_of

vllm = pytest.importorskip("vllm")
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.engine import FinishReason, output_processor  # noqa: E402
from vllm.v1.engine.logprobs import LogprobsProcessor  # noqa: E402
from vllm.v1.outputs import LogprobsLists, LogprobsTensors  # noqa: E402

from batchinf.engines.vllm import engine as adapter  # noqa: E402
from batchinf.engines.vllm import logprobs as vllm_logprobs  # noqa: E402
from batchinf.engines.vllm.engine import VllmEngine  # noqa: E402
from batchinf.engines.vllm.structured_output.structures import check_once, matcher, tell_parser  # noqa: E402

NUM_PROMPTS = 40
MAX_TOKENS = 24
MAX_MODEL_LEN = 512
GREEDY = SamplingSpec(temperature=0, logprobs=5, prompt_logprobs=3)
SAMPLED = SamplingSpec(temperature=0.9, top_p=0.95, top_k=50)
STOPS = ("e", ".", "\n")
NUM_STRUCTURED = 24
STRUCTURES: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"json": {"enum": [{"mood": "good", "score": 3}, {"mood": "bad"}, None]}}, r'(\{"mood".*\}|null)'),
    "regex": ({"regex": "[0-9]{4}-[0-9]{2}(x|yy)*"}, "[0-9]{4}-[0-9]{2}(x|yy)*"),
    "choice": ({"choice": ["positive", "negative", "no opinion at all"]}, "positive|negative|no opinion at all"),
    "grammar": ({"grammar": 'root ::= "yes" (", " [a-z]+)* "."'}, r"yes(, [a-z]+)*\."),
}
# Each row's own values, as columns of an input have them.
OWN: list[dict[str, Any]] = [
    {
        "temperature": (0, 0.7, 1.1)[row % 3],
        "max_tokens": None if row % 11 == 10 else 1 + row % 17,
        "top_k": None if row % 2 else 20 + row,
        "seed": None if row % 5 else row // 10,
        "stop": (None, "e", [".", "th"], None)[row % 4],
        "repetition_penalty": 1.2 if row % 7 == 6 else None,
    }
    for row in range(NUM_PROMPTS)
]


@dataclass(frozen=True)
class Reference:
    """What vLLM's own front end makes of the sample prompts."""

    prompts: list[list[int]]
    greedy: list[Any]
    stopped: list[Any]
    stopped_with_text: list[Any]
    sampled: list[Any]
    mixed: list[Any]
    structured: dict[str, list[Any]]


# Of the session: where it ends, vLLM tears down what it shares with the tests' own engine in this process.
@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    """`LLM.generate` in this process, with vLLM's own defaults for all that the adapter chooses."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lines = (MODEL.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    spread = [json.loads(line)["prompt"] for line in lines[:: len(lines) // NUM_PROMPTS]][:NUM_PROMPTS]
    prompts = [tokenizer(prompt).input_ids for prompt in spread]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = LLM(str(MODEL), dtype="float32", enforce_eager=True, max_model_len=MAX_MODEL_LEN)

    def generate(**params: Any) -> list[Any]:
        each = [SamplingParams(max_tokens=MAX_TOKENS, seed=seed, **params) for seed in range(len(prompts))]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return list(llm.generate(inputs, each, use_tqdm=False))

    def generate_each(each: list[SamplingParams]) -> list[Any]:
        return list(
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[: len(each)]], each, use_tqdm=False)
        )

    yield Reference(
        prompts,
        greedy=generate(temperature=0, logprobs=5, prompt_logprobs=3),
        stopped=generate(temperature=0, stop=list(STOPS), min_tokens=3),
        stopped_with_text=generate(temperature=0, stop=list(STOPS), include_stop_str_in_output=True),
        sampled=generate(temperature=0.9, top_p=0.95, top_k=50),
        mixed=generate_each([own_params(row, own) for row, own in enumerate(OWN)]),
        structured={
            kind: generate_each([structured_params(row, structure) for row in range(NUM_STRUCTURED)])
            for kind, (structure, _) in STRUCTURES.items()
        },
    )
    llm.llm_engine.engine_core.shutdown()


def own_params(row: int, own: dict[str, Any]) -> SamplingParams:
    """What `LLM.generate` is given for a row, put together by hand."""
    seed = None if own["temperature"] == 0 else seed_of(own["seed"] if own["seed"] is not None else 3, row, 0)
    given = {name: value for name, value in own.items() if value is not None and name != "seed"}
    return SamplingParams(**{"max_tokens": MAX_TOKENS, **given}, seed=seed)


def structured_params(row: int, structure: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, seed=row, max_tokens=1 + row, structured_outputs=StructuredOutputsParams(**structure)
    )


@pytest.fixture
def engine(vllm_engine: VllmEngine) -> Iterator[VllmEngine]:
    """The shared engine; whatever a test does, it is alive and empty afterwards."""
    yield vllm_engine
    assert vllm_engine.num_unfinished() == 0
    assert len(run(vllm_engine, requests([[5, 6, 7]], SamplingSpec(temperature=0)))) == 1


def requests(prompts: Sequence[list[int]], sampling: SamplingSpec, max_tokens: int = MAX_TOKENS) -> list[Request]:
    """One request for each prompt, seeded with its position where it samples."""
    is_greedy = sampling.temperature == 0
    return [
        Request(row, 0, prompt, sampling, max_tokens=max_tokens, seed=None if is_greedy else row)
        for row, prompt in enumerate(prompts)
    ]


def run(engine: VllmEngine, given: Sequence[Request]) -> list[Completion]:
    """Completions in the order of their requests."""
    for request in given:
        engine.add(request)
    assert engine.num_unfinished() == len(given)
    completions = {}
    while engine.num_unfinished():
        completions.update({completion.request.key: completion for completion in engine.step()})
    assert engine.step() == []
    return [completions[request.key] for request in given]


def assert_same(one: Completion, other: Completion) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
    for a, b in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
        if a is None or b is None:
            assert a is b
            continue
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.ranks.tolist() == b.ranks.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def assert_same_outputs(completions: Sequence[Completion], references: Sequence[Any], texts: Sequence[str]) -> None:
    assert len(completions) == len(references) == NUM_PROMPTS
    for completion, expected, text in zip(completions, references, texts, strict=True):
        answer = expected.outputs[0]
        assert completion.token_ids.tolist() == list(answer.token_ids)
        assert completion.token_ids.dtype == np.int32
        assert (completion.finish_reason, completion.stop_reason) == (answer.finish_reason, answer.stop_reason)
        assert text == answer.text


def assert_same_logprobs(rows: Any, expected: list[dict[int, Any]], own: list[int], k: int) -> None:
    """Arrays against vLLM's dictionaries, which hold a token among the likeliest only once."""
    n = len(own)
    assert (rows.token_ids.dtype, rows.logprobs.dtype, rows.ranks.dtype) == (np.int32, np.float32, np.int32)
    assert rows.token_ids.shape == rows.logprobs.shape == (n, k + 1)
    assert rows.ranks.shape == (n,)
    assert all(array.flags.c_contiguous for array in (rows.token_ids, rows.logprobs, rows.ranks))
    assert rows.token_ids[:, 0].tolist() == own
    for token_ids, logprobs, rank, position in zip(rows.token_ids, rows.logprobs, rows.ranks, expected, strict=True):
        assert set(token_ids.tolist()) == set(position)
        assert rank == position[int(token_ids[0])].rank
        assert (np.diff(logprobs[1:]) <= 0).all()
        for token_id, logprob in zip(token_ids.tolist(), logprobs.tolist(), strict=True):
            assert logprob == pytest.approx(position[token_id].logprob, abs=1e-4)


def test_greedy_equals_llm_generate(engine: VllmEngine, reference: Reference) -> None:
    completions = run(engine, requests(reference.prompts, GREEDY))
    texts = Detokenizer(AutoTokenizer.from_pretrained(MODEL)).decode(completions, GREEDY)
    assert_same_outputs(completions, reference.greedy, texts)
    assert {completion.finish_reason for completion in completions} >= {"length"}
    for completion, expected in zip(completions, reference.greedy, strict=True):
        answer = expected.outputs[0]
        assert completion.text is None
        assert completion.cumulative_logprob == pytest.approx(answer.cumulative_logprob, abs=1e-4)
        assert_same_logprobs(completion.logprobs, answer.logprobs, list(answer.token_ids), k=5)
        own = completion.request.prompt_token_ids[1:]
        assert_same_logprobs(completion.prompt_logprobs, expected.prompt_logprobs[1:], own, k=3)


def test_logprobs_equal_transformers(engine: VllmEngine, reference: Reference) -> None:
    import torch

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for completion in run(engine, requests(reference.prompts[:8], GREEDY)):
        prompt = completion.request.prompt_token_ids
        token_ids = torch.tensor([prompt + completion.token_ids.tolist()])
        with torch.no_grad():
            scores = model(token_ids).logits[0].log_softmax(-1).numpy()
        assert completion.logprobs is not None
        assert completion.prompt_logprobs is not None
        prompt_rows = np.take_along_axis(scores[: len(prompt) - 1], completion.prompt_logprobs.token_ids, axis=1)
        np.testing.assert_allclose(completion.prompt_logprobs.logprobs, prompt_rows, atol=1e-3)
        rows = np.take_along_axis(scores[len(prompt) - 1 : -1], completion.logprobs.token_ids, axis=1)
        np.testing.assert_allclose(completion.logprobs.logprobs, rows, atol=1e-3)
        assert completion.cumulative_logprob == pytest.approx(rows[:, 0].sum(), abs=1e-2)


def test_stop_strings_equal_llm_generate(engine: VllmEngine, reference: Reference) -> None:
    sampling = SamplingSpec(temperature=0, stop=STOPS, min_tokens=3)
    completions = run(engine, requests(reference.prompts, sampling))
    assert_same_outputs(completions, reference.stopped, [completion.text or "" for completion in completions])
    assert {completion.stop_reason for completion in completions} & set(STOPS)

    sampling = SamplingSpec(temperature=0, stop=STOPS, include_stop_str_in_output=True)
    completions = run(engine, requests(reference.prompts, sampling))
    assert_same_outputs(completions, reference.stopped_with_text, [completion.text or "" for completion in completions])


def test_stop_token_is_kept_and_makes_no_text(engine: VllmEngine, reference: Reference) -> None:
    greedy = run(engine, requests(reference.prompts[:1], GREEDY))[0]
    stop = int(greedy.token_ids[5])
    length = greedy.token_ids.tolist().index(stop) + 1
    sampling = SamplingSpec(temperature=0, stop_token_ids=(stop,), logprobs=0)
    completion = run(engine, requests(reference.prompts[:1], sampling))[0]
    assert completion.token_ids.tolist() == greedy.token_ids[:length].tolist()
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.logprobs is not None
    assert completion.logprobs.token_ids.shape == (length, 1)


def test_seeded_samples_equal_llm_generate_in_any_batch(engine: VllmEngine, reference: Reference) -> None:
    given = requests(reference.prompts, SAMPLED)
    together = run(engine, given)
    texts = Detokenizer(AutoTokenizer.from_pretrained(MODEL)).decode(together, SAMPLED)
    assert_same_outputs(together, reference.sampled, texts)
    for one, other in zip(together, reversed(run(engine, given[::-1])), strict=True):
        assert_same(one, other)
    for one, request in list(zip(together, given, strict=True))[:6]:
        assert_same(one, run(engine, [request])[0])


def test_rows_with_their_own_sampling_equal_llm_generate(engine: VllmEngine, reference: Reference) -> None:
    columns = {name: name for name in OWN[0]}
    job = SamplingSpec(temperature=1.0, max_tokens=MAX_TOKENS, seed=3, columns=columns)
    rows = RowSampling(job)
    task = Generate(JobSpec(model="m", input={"path": "in"}, output={"path": "out"}, sampling=job))
    given = []
    for row, (own, token_ids) in enumerate(zip(OWN, reference.prompts, strict=True)):
        sampling = rows.of(own)
        assert isinstance(sampling, SamplingSpec)
        given += task.expand(Prompt(row, token_ids, None, None, sampling), MAX_MODEL_LEN)
    completions = run(engine, given)
    texts = Detokenizer(AutoTokenizer.from_pretrained(MODEL)).decode(completions, job)
    assert_same_outputs(completions, reference.mixed, texts)
    for own, completion in zip(OWN, completions, strict=True):
        assert len(completion.token_ids) <= (own["max_tokens"] or MAX_TOKENS)
        assert (completion.text is None) == (own["stop"] is None)  # vLLM decodes only where it must
    assert {completion.stop_reason for completion in completions} & {"e", ".", "th"}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structures_equal_llm_generate_and_all_are_whole_or_marked(
    kind: str, engine: VllmEngine, reference: Reference
) -> None:
    structure, whole = STRUCTURES[kind]
    sampling = SamplingSpec(temperature=0.8, structured_outputs=structure)
    given = [
        Request(row, 0, reference.prompts[row], sampling, max_tokens=1 + row, seed=row) for row in range(NUM_STRUCTURED)
    ]
    completions = run(engine, given)
    for completion, expected in zip(completions, reference.structured[kind], strict=True):
        assert completion.token_ids.tolist() == list(expected.outputs[0].token_ids)
        assert completion.finish_reason == expected.outputs[0].finish_reason
    spec = JobSpec(model="m", input={"path": "in"}, output={"path": "out"}, sampling=sampling)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    matcher_of = functools.partial(matcher, backend="auto")
    answers = Answers(spec, tokenizer, Detokenizer(tokenizer), matcher=matcher_of).read(
        list(map(jobs.unread, completions))
    )
    marks = {"json": "invalid_json", "choice": "invalid_choice"}
    for answer, expected in zip(answers, reference.structured[kind], strict=True):
        assert answer.text == expected.outputs[0].text
        if re.fullmatch(whole, answer.text):
            assert answer.error is None
        else:
            assert answer.error is not None
            assert answer.error.error_type == marks.get(kind, "invalid_structure")
            assert expected.outputs[0].finish_reason == "length"
    assert {answer.error is None for answer in answers} == {True, False}


def test_a_structure_that_the_engine_core_cannot_compile_costs_one_row(
    engine: VllmEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM ends such a request with `error`, which would be the same again. The others run on."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    compile_grammar = XgrammarBackend.compile_grammar

    def fail(self: Any, kind: Any, text: str, stop_token_ids: Any = None) -> Any:
        if "never" in text:
            raise ValueError("too complex")
        return compile_grammar(self, kind, text, stop_token_ids)

    monkeypatch.setattr(XgrammarBackend, "compile_grammar", fail)
    samplings = [
        SamplingSpec(temperature=0, structured_outputs={"regex": regex}, logprobs=1, prompt_logprobs=0)
        for regex in ("a{3}", "never", "b{3}")
    ]
    given = [Request(row, 0, reference.prompts[row], each, max_tokens=9) for row, each in enumerate(samplings)]
    completions = run(engine, given)
    assert [completion.finish_reason for completion in completions] == ["stop", "error", "stop"]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    spec = JobSpec(model="m", input={"path": "in"}, output={"path": "out"}, sampling=samplings[0])
    answers = Answers(spec, tokenizer, Detokenizer(tokenizer)).read(list(map(jobs.unread, completions)))
    assert [answer.text for answer in answers] == ["aaa", None, "bbb"]
    assert answers[1].error == RowError(
        "refused", "vLLM ended the request: it could not compile the structure; the replica's log says why"
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"allowed_token_ids": [70]}, "aaa"), ({"allowed_token_ids": [300]}, None), ({"bad_words": "a"}, None)],
)
def test_a_structure_without_a_token_that_other_fields_allow_costs_one_row(
    engine: VllmEngine, reference: Reference, fields: dict[str, Any], text: str | None
) -> None:
    """vLLM draws any token, which the grammar rejects, and ends that request with `error`. The others run on."""
    sampling = SamplingSpec(temperature=0, structured_outputs={"regex": "a{3}"}, logprobs=1, prompt_logprobs=0)
    samplings = [sampling, sampling.model_copy(update=fields), sampling]
    given = [Request(row, 0, reference.prompts[row], each, max_tokens=9) for row, each in enumerate(samplings)]
    completions = run(engine, given)
    assert [completion.finish_reason for completion in completions] == ["stop", "error", "stop"]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    spec = JobSpec(model="m", input={"path": "in"}, output={"path": "out"}, sampling=sampling)
    answers = Answers(spec, tokenizer, Detokenizer(tokenizer)).read(list(map(jobs.unread, completions)))
    assert [answer.text for answer in answers] == ["aaa", text, "aaa"]
    assert answers[1].error is not None
    assert "its structure does not allow the last token" in answers[1].error.error_message


def test_a_structure_is_checked_once(engine: VllmEngine, reference: Reference) -> None:
    check_once()
    check_once()  # of each other they make no chain
    sampling = SamplingSpec(temperature=0, structured_outputs={"regex": "a{3}"})
    given = [Request(row, 0, reference.prompts[row], sampling, max_tokens=9) for row in range(4)]
    decode = AutoTokenizer.from_pretrained(MODEL).decode
    for completion in (*run(engine, given), *run(engine, given)):
        assert decode(completion.token_ids, skip_special_tokens=True) == "aaa"
    refused = SamplingSpec(temperature=0, structured_outputs={"regex": "("})
    for _ in range(2):
        with pytest.raises(RowFailed):
            engine.add(Request(0, 0, [5, 6], refused, max_tokens=9))


def test_the_core_s_parser_gets_the_template_s_variables(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    core, processor = engine._engine.engine_core, engine._engine.input_processor
    given: list[Any] = []
    add = core.add_request
    monkeypatch.setattr(core, "add_request", lambda request: (given.append(request), add(request)))
    monkeypatch.setattr(processor, "process_inputs", processor.process_inputs)  # put back afterwards
    tell_parser(engine._engine, None)('{"thinking": true}')
    run(engine, requests([[5, 6, 7]], SamplingSpec(temperature=0)))
    assert given[0].reasoning_parser_kwargs == {"chat_template_kwargs": {"thinking": True}}


def test_samples_of_a_row_differ_by_their_seeds(engine: VllmEngine, reference: Reference) -> None:
    given = [
        Request(0, index, reference.prompts[0], SAMPLED, max_tokens=MAX_TOKENS, seed=1000 + index) for index in range(8)
    ]
    outputs = [tuple(completion.token_ids.tolist()) for completion in run(engine, given)]
    assert len(set(outputs)) > 4
    assert outputs == [tuple(completion.token_ids.tolist()) for completion in run(engine, given)]


def test_requests_of_any_shape_share_a_batch(engine: VllmEngine, reference: Reference) -> None:
    shapes = [
        SamplingSpec(temperature=0, logprobs=k, prompt_logprobs=prompt_k)
        for k, prompt_k in ((None, None), (0, None), (50, None), (None, 0), (5, 50), (20, 3))
    ]
    given = [
        Request(row, 0, reference.prompts[row], sampling, max_tokens=8 + row) for row, sampling in enumerate(shapes)
    ]
    together = run(engine, given)
    for request, completion in zip(given, together, strict=True):
        assert len(completion.token_ids) <= request.max_tokens
        assert_same(completion, run(engine, [request])[0])
    assert together[2].logprobs is not None
    assert together[2].logprobs.token_ids.shape[1] == 51


def test_prompt_logprobs_are_not_read_from_the_cache(engine: VllmEngine) -> None:
    # Three blocks of the cache on a CPU, filled by a request that wants none.
    prompt = [5 + place * 7 % 900 for place in range(400)]
    plain, scored = SamplingSpec(temperature=0), SamplingSpec(temperature=0, prompt_logprobs=2)
    run(engine, requests([prompt], plain, 1))
    hits = engine.stats().prefix_cache_hits
    run(engine, requests([prompt], plain, 1))
    assert engine.stats().prefix_cache_hits > hits  # it is in the cache
    first, second = (run(engine, requests([prompt], scored, 1))[0].prompt_logprobs for _ in range(2))
    assert first is not None and second is not None
    assert first.logprobs.shape == (399, 3)
    assert not np.isnan(first.logprobs).any()
    np.testing.assert_array_equal(first.logprobs, second.logprobs)
    np.testing.assert_array_equal(first.token_ids, second.token_ids)


def test_logprobs_that_are_not_those_of_the_tokens_name_their_request(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = vllm_logprobs.LogprobRows.extend
    monkeypatch.setattr(
        vllm_logprobs.LogprobRows, "extend", lambda self, *arrays: extend(self, *(a[1:] for a in arrays))
    )
    with pytest.raises(BatchinfError, match=r"^row 0, request 0: vLLM gave 0 rows of logprobs for 1 tokens$"):
        run(engine, requests([[5, 6, 7]], SamplingSpec(temperature=0, logprobs=2), 1))
    assert engine.num_unfinished() == 0


def test_prompt_of_one_token_has_no_prompt_logprobs(engine: VllmEngine) -> None:
    completion = run(engine, requests([[5]], GREEDY))[0]
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs.token_ids.shape == (0, 4)
    assert completion.prompt_logprobs.ranks.shape == (0,)


def test_flat_logprobs_are_the_same(engine: VllmEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    given = requests(reference.prompts[:6], GREEDY)
    arrays = run(engine, given)
    monkeypatch.setattr(output_processor, "LogprobsProcessor", LogprobsProcessor)
    for one, other in zip(arrays, run(engine, given), strict=True):
        assert_same(one, other)
        assert one.cumulative_logprob == other.cumulative_logprob


def test_vllm_has_the_seam_for_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm_logprobs.install_arrays()
    monkeypatch.setattr(vllm_logprobs, "allowed", lambda piece: False)
    assert not vllm_logprobs.install_arrays()


def processors(k: int) -> tuple[Any, Any]:
    """Ours and vLLM's own for the same request."""
    params = SamplingParams(logprobs=k, prompt_logprobs=k, flat_logprobs=True, detokenize=False)
    request = types.SimpleNamespace(sampling_params=params)
    ours = vllm_logprobs.ArrayLogprobsProcessor.from_new_request(None, request)
    return ours, LogprobsProcessor.from_new_request(None, request)


@pytest.mark.parametrize(("k", "wider"), [(0, 0), (5, 0), (5, 3), (200, 0)])
def test_several_positions_and_chunks_at_a_time(k: int, wider: int) -> None:
    """As speculative decoding and prompts in chunks have them; neighbours in a batch may want a larger k."""
    import torch

    random = np.random.default_rng(k)
    ours, vllms = processors(k)
    for num_positions, num_scored in ((0, 7), (0, 3), (1, 0), (4, 0), (1, 0)):
        shape = (num_positions, k + 1 + wider)
        lists = LogprobsLists(
            random.integers(0, 1000, shape, np.int32),
            -random.random(shape, np.float32),
            random.integers(1, 9, num_positions),
        )
        shape = (num_scored, k + 1)
        tensors = LogprobsTensors(
            torch.from_numpy(random.integers(0, 1000, shape, np.int32)),
            torch.from_numpy(-random.random(shape, np.float32)),
            torch.from_numpy(random.integers(1, 9, num_scored)),
        )
        output = types.SimpleNamespace(
            new_logprobs=lists if num_positions else None,
            new_prompt_logprobs_tensors=tensors if num_scored else None,
            prompt_token_id_logprobs=None,
        )
        ours.update_from_output(output)
        vllms.update_from_output(output)
        for array in (*lists[:3], *tensors[:3]):
            array[...] = 0  # what is kept must be a copy
    for kept, flat, num_tokens in (
        (ours.logprobs, vllms.logprobs, 6),
        (ours.prompt_logprobs, vllms.prompt_logprobs, 10),
    ):
        arrays, expected = (vllm_logprobs.token_logprobs(rows, k, num_tokens) for rows in (kept, flat))
        assert arrays is not None
        assert expected is not None
        for name in ("token_ids", "logprobs", "ranks"):
            one, other = getattr(arrays, name), getattr(expected, name)
            assert one.dtype == other.dtype
            assert one.flags.c_contiguous
            np.testing.assert_array_equal(one, other)
    total = np.cumsum(vllm_logprobs.token_logprobs(ours.logprobs, k, 6).logprobs[:, 0], dtype=float)[-1]  # type: ignore[union-attr]
    assert total == vllms.cumulative_logprob
    with pytest.raises(BatchinfError, match="6 rows of logprobs for 5 tokens"):
        vllm_logprobs.token_logprobs(ours.logprobs, k, 5)


def test_finish_reasons_are_those_of_vllm() -> None:
    assert {str(reason) for reason in FinishReason} == adapter.FINISHED | adapter.CUT_SHORT
    assert not adapter.FINISHED & adapter.CUT_SHORT
    engine: Any = object.__new__(adapter.VllmEngine)
    for reason in FinishReason:
        output = types.SimpleNamespace(outputs=[types.SimpleNamespace(finish_reason=str(reason))])
        assert engine._came_whole(output) is (str(reason) in ("stop", "length", "repetition"))
    with pytest.raises(BatchinfError, match="unknown reason, 'bored'"):
        engine._came_whole(types.SimpleNamespace(outputs=[types.SimpleNamespace(finish_reason="bored")]))


@pytest.mark.parametrize("place", ["core", "output"])
@pytest.mark.parametrize(("error", "words"), [
    (types.SimpleNamespace(code="x", message="the grammar is\nlost", retryable=False), ": the grammar is lost"),
    ("the grammar is lost", ": the grammar is lost"),
    (None, " and says no more of them"),
])  # fmt: skip
def test_vllm_s_words_of_a_request_that_ends_with_error_are_told(place: str, error: Any, words: str) -> None:
    """0.33 has them in the outputs of its core, and 0.32 in its own outputs."""
    ended = types.SimpleNamespace(request_id="0-0", outputs=[types.SimpleNamespace(finish_reason="error")])
    core = types.SimpleNamespace(request_id="0-0", error=error if place == "core" else None)
    if place == "output":
        ended.error = error
    unfinished = [True, False]
    processor = types.SimpleNamespace(process_outputs=lambda _: types.SimpleNamespace(request_outputs=[ended]))
    vllms = types.SimpleNamespace(
        output_processor=processor,
        has_unfinished_requests=lambda: unfinished.pop(0),
        step=lambda: processor.process_outputs([core]).request_outputs,
        engine_core=types.SimpleNamespace(),
    )
    engine: Any = object.__new__(adapter.VllmEngine)
    engine._engine, engine._death, engine._request_error = vllms, None, ""
    engine._live = {"0-0": Request(0, 0, [5], SamplingSpec(), max_tokens=9)}
    engine._hear_errors()
    assert engine.step() == []
    with pytest.raises(EngineDeadError) as caught:
        engine.step()
    assert str(caught.value) == f"vLLM's engine died in a step: RuntimeError: it cut 1 request short{words}"


@pytest.mark.parametrize(
    ("prompt", "sampling", "error_type"),
    [
        ([], SamplingSpec(), "empty_prompt"),
        ([5] * MAX_MODEL_LEN, SamplingSpec(), "prompt_too_long"),
        ([5, -1], SamplingSpec(), "invalid_token_id"),
        ([5, 1 << 40], SamplingSpec(), "invalid_token_id"),
        ([5], SamplingSpec(logprobs=51), "invalid_sampling"),
        ([5], SamplingSpec(prompt_logprobs=51), "invalid_sampling"),
        ([5], SamplingSpec(min_tokens=MAX_TOKENS + 1), "invalid_sampling"),
        ([5], SamplingSpec(stop_token_ids=(10**6,)), "invalid_sampling"),
        ([5], SamplingSpec.model_construct(temperature=9.0), "invalid_sampling"),
    ],
)
def test_refused_requests_leave_the_engine_unharmed(
    engine: VllmEngine, prompt: list[int], sampling: SamplingSpec, error_type: str
) -> None:
    engine.add(Request(1, 0, [5, 6, 7], SamplingSpec(temperature=0), max_tokens=4))
    with pytest.raises(RowFailed) as caught:
        engine.add(Request(0, 0, prompt, sampling, max_tokens=MAX_TOKENS, seed=0))
    assert caught.value.error.error_type == error_type
    assert caught.value.error.error_message
    assert engine.num_unfinished() == 1
    while engine.num_unfinished():
        engine.step()


def test_request_refused_halfway_in_leaves_the_engine_unharmed(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: object) -> None:
        raise ValueError("the core will not have it")

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine.engine_core, "add_request", refuse)
        with pytest.raises(RowFailed) as caught:
            engine.add(Request(0, 0, [5], SamplingSpec(), max_tokens=4, seed=0))
    assert caught.value.error == RowError("refused", "the core will not have it")
    assert not engine._engine.has_unfinished_requests()


def test_prompt_of_the_greatest_length_runs(engine: VllmEngine) -> None:
    completion = run(engine, requests([[5] * (MAX_MODEL_LEN - 1)], SamplingSpec(temperature=0)))[0]
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


def test_warm_up_leaves_nothing_behind(engine: VllmEngine) -> None:
    sampling = SamplingSpec(temperature=0.7, logprobs=50, prompt_logprobs=2, min_tokens=10, stop="x")
    engine.warm_up(Request(-1, 0, [1] * 8, sampling, max_tokens=4, seed=0))
    assert engine.num_unfinished() == 0
    assert engine.step() == []
    with pytest.raises(RowFailed):
        engine.warm_up(Request(-1, 0, [1] * 8, SamplingSpec(logprobs=51), max_tokens=12, seed=0))


def test_stats_follow_the_engine(engine: VllmEngine, reference: Reference) -> None:
    before = engine.stats()
    longest = max(reference.prompts, key=len)
    assert len(longest) > 128  # a block of the KV cache on a CPU
    for request in requests([longest] * 4, SamplingSpec(temperature=0)):
        engine.add(request)
    engine.step()
    during = engine.stats()
    assert during.num_running == 4
    assert 0 < during.kv_cache_usage < 1
    while engine.num_unfinished():
        engine.step()
    after = engine.stats()
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert after.prefix_cache_queries - before.prefix_cache_queries == 4 * len(longest)
    assert after.prefix_cache_hits > before.prefix_cache_hits


def test_tokens_of_unfinished_requests_are_counted(engine: VllmEngine) -> None:
    engine.begun()  # of the requests of other tests
    count, seen = TokenCount(counts_output=True), [0]
    for request in requests([[5, 6, 7]] * 4, SamplingSpec(temperature=0, ignore_eos=True), 24):
        engine.add(request)
    while engine.num_unfinished():
        finished = engine.step()
        gone = {completion.request.key for completion in finished}
        begun = [request for request in engine.begun() if request.key not in gone]
        count.step(begun, finished, engine.stats().num_running)
        seen.append(count.latest[1])
    assert count.latest == (4 * 3, 4 * 24)
    assert all(0 <= after - before <= 4 for before, after in itertools.pairwise(seen))


def test_info_says_what_ran(engine: VllmEngine) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    info = engine.info
    assert (info.max_model_len, info.vocab_size, info.device) == (MAX_MODEL_LEN, config["vocab_size"], "cpu")
    assert info.max_num_seqs > 0
    assert {"batchinf", "vllm", "torch", "transformers", "python"} <= info.versions.keys()
    assert info.settings["dtype"] == "float32"
    assert info.settings["kv_cache_size_tokens"] > MAX_MODEL_LEN
    assert info.settings["engine_arguments"]["max_logprobs"] == 50
    json.dumps(info.settings)


def test_secrets_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "xyzzy")
    monkeypatch.setenv("VLLM_PORT", "4321")
    found = adapter._environment()
    assert (found["VLLM_API_KEY"], found["VLLM_PORT"]) == ("(not recorded)", "4321")


def job(engine_arguments: dict[str, Any], **sampling: Any) -> JobSpec:
    return JobSpec(
        model={"name": str(MODEL)},
        input={"path": "prompts.jsonl"},
        output={"path": "out"},
        sampling=SamplingSpec(**sampling),
        engine=engine_arguments,
    )


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"sampling": {"prompt_logprobs": 0}}, False),
        ({"task": "score", "input": {"text_column": "t"}}, False),
        (
            {"task": "score", "input": {"context_column": "c", "choices": ["a", "b"]}, "score": {"one_pass": False}},
            False,
        ),
        ({"task": "score", "input": {"text_column": "t"}, "engine": {"enable_prefix_caching": True}}, True),
        # One request for all choices of a row reads the cache.
        ({"task": "score", "input": {"context_column": "c", "choices": ["a", "b"]}}, None),
        ({"task": "logits", "logits": {"positions": {"column": "places"}, "vocab_size": 100}}, None),
        ({"task": "embed"}, None),
        ({}, None),
    ],
)
def test_the_prefix_cache_is_off_if_no_request_can_read_it(sections: dict[str, Any], expected: bool | None) -> None:
    own = {"model": {"name": str(MODEL)}, "input": {"path": "x", **sections.pop("input", {})}, "output": {"path": "y"}}
    arguments = adapter.engine_arguments(task_of(JobSpec.model_validate({**own, **sections})), "m", "t", None)
    assert arguments.get("enable_prefix_caching") is expected


@pytest.mark.parametrize("first", [{}, {"logprobs": 2}, {"structured_outputs": {"regex": "a+"}, "logprobs": 2}])
def test_an_engine_stays_up_for_a_retry_only_with_its_own_arguments(first: dict[str, Any]) -> None:
    others: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "max_tokens": 500, "min_tokens": 2, "seed": 7,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "stop": ["x"], "ignore_eos": True,
        "stop_token_ids": [5], "include_stop_str_in_output": True, "skip_special_tokens": False, "bad_words": ["x"],
        "allowed_token_ids": [5], "logit_bias": {5: 1.0}, "thinking_token_budget": 5,
        "structured_outputs": {"json": {"type": "object"}},
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    }  # fmt: skip
    changeable = SamplingSpec.model_fields.keys() - {name.removeprefix(SAMPLING) for name in FIXED_SAMPLING}
    assert others.keys() == changeable - {"columns"}
    own = {"model": {"name": str(MODEL), "reasoning_parser": "qwen3"}, "input": {"path": "x"}, "output": {"path": "y"}}

    def of(sampling: dict[str, Any]) -> tuple[JobSpec, object]:
        spec = JobSpec.model_validate({**own, "sampling": sampling})
        known = task_of(spec)
        arguments = adapter.engine_arguments(known, "m", "t", None)
        return spec, (arguments, adapter.wants_late_mask(known), adapter.scored_ks(known))

    spec, needs = of(first)
    kept = set()
    for name, value in [*others.items(), ("structured_outputs", None)]:
        other, other_needs = of({**first, name: value})
        if other.engine_needs == spec.engine_needs:
            assert other_needs == needs, name
            kept.add(name)
    assert kept >= others.keys() - {"thinking_token_budget", "structured_outputs"}


def test_engine_arguments_come_from_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 2}

    def arguments(spec: JobSpec) -> dict[str, Any]:
        return adapter.engine_arguments(task_of(spec), "m", "t", None)

    defaults = arguments(job({}))
    assert (defaults["model"], defaults["tokenizer"], defaults["seed"]) == ("m", "t", 0)
    assert (defaults["dtype"], defaults["enforce_eager"]) == ("float32", True)
    assert not {"revision", "max_logprobs", "enable_prefix_caching"} & defaults.keys()
    assert arguments(job({}, logprobs=21))["max_logprobs"] == 21
    assert arguments(job({"max_logprobs": -1}, logprobs=21))["max_logprobs"] == -1
    assert arguments(job({"max_logprobs": 5}, prompt_logprobs=7))["max_logprobs"] == 7
    assert arguments(job({"seed": 3, "enforce_eager": False}))["enforce_eager"] is False
    for sizes, is_whole in (({"max_num_batched_tokens": 64, "max_model_len": 65}, False), ({"max_model_len": 65}, True),
                            ({"max_num_batched_tokens": 64, "max_model_len": 64}, True)):  # fmt: skip
        assert arguments(job(sizes)).get("enable_chunked_prefill") is (False if is_whole else None)
    assert "async_scheduling" not in arguments(job({"speculative_config": speculation}))
    pipeline = job({}).model_copy(update={"parallel": ParallelSpec(pipeline_parallel_size=2)})
    assert "async_scheduling" not in arguments(pipeline)
    with pytest.raises(EngineStartError, match="max_model_length"):
        VllmEngine(task_of(job({"max_model_length": 5})), "m", "t")


def test_a_mapping_for_structured_outputs_goes_with_a_reasoning_parser() -> None:
    given = {"model": str(MODEL), "structured_outputs_config": {"backend": "xgrammar"}, "reasoning_parser": "qwen3"}
    config = adapter.engine_args(given).create_engine_config().structured_outputs_config
    assert (config.backend, config.reasoning_parser) == ("xgrammar", "qwen3")


def died(how: str) -> dict[str, Any]:
    """What the owner of an engine saw of its death: see `dying_engines.py`."""
    with tempfile.TemporaryDirectory() as rpc:  # short: the names of sockets have at most 107 characters
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_RPC_BASE_PATH": rpc}
        said = jobs.run_vllm("dying_engines", how, str(MODEL), environment=own)
    return json.loads(said.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_killed_engine_core_is_an_engine_dead_error(name: str) -> None:
    """What SIGTERM cuts short never comes out: it is still unfinished."""
    seen = died(name)
    assert seen["error"]
    assert 0 < len(seen["completed"]) <= 4
    assert all(completed == [4, "length"] for completed in seen["completed"])
    assert seen["num_unfinished"] == 12 - len(seen["completed"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_exception_in_a_step_is_the_end_of_the_engine() -> None:
    seen = died("exception")
    text, cause = seen["step"]
    assert "in a step" in text
    assert cause == "RuntimeError"
    assert seen["again"][0] == seen["add"][0] == text
    assert seen["num_unfinished"] == 1
    assert "closed" in seen["closed"][0]
    assert seen["another"] == 1

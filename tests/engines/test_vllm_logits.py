"""Full-vocabulary and chosen logits on real vLLM, held against transformers in float32; each logprobs mode too."""

import functools
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from held import held

import jobs
from batchinf.base.errors import BatchinfError
from batchinf.records import Completion, Prompt, Request, Result, RowsWanted
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.logits.section import LogitsSpec
from batchinf.tasks.registry import task_of
from jobs import MODEL

pytest.importorskip("vllm")
if TYPE_CHECKING:
    from batchinf.engines.vllm.engine import VllmEngine

VOCAB_SIZE = 1536
PROMPTS = [list(range(10, 10 + length)) for length in (1, 2, 5, 30, 100)]
GREEDY = SamplingSpec(temperature=0.0)


def start(logits: LogitsSpec | None = None, engine: dict[str, Any] | None = None, **sampling: Any) -> "VllmEngine":
    from batchinf.engines.vllm.engine import VllmEngine

    spec = JobSpec(
        model={"name": str(MODEL), "dtype": "float32"},
        task="generate" if logits is None else "logits",
        logits=logits,
        input={"path": "prompts.jsonl"},
        output={"path": "out"},
        sampling=SamplingSpec(**sampling),
        engine={"max_model_len": 512, **(engine or {})},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return VllmEngine(task_of(spec), str(MODEL), str(MODEL))


@pytest.fixture(scope="module")
def engine() -> Iterator["VllmEngine"]:
    started = start(LogitsSpec(dtype="float32", vocab_size=VOCAB_SIZE))
    yield started
    started.close()


def complete(engine: "VllmEngine", requests: Sequence[Request]) -> list[Completion]:
    """All of them in one batch, in their order."""
    for request in requests:
        engine.add(request)
    found: dict[int, Completion] = {}
    while len(found) < len(requests):
        found.update({completion.request.row_index: completion for completion in engine.step()})
    return [found[request.row_index] for request in requests]


def wanting(
    prompts: Sequence[list[int]],
    positions: Sequence[Sequence[int] | None],
    dtype: str = "float32",
    token_ids: tuple[int, ...] | None = None,
    max_tokens: int = 1,
) -> list[Request]:
    width = len(token_ids) if token_ids else VOCAB_SIZE
    return [
        Request(
            row, 0, prompt, GREEDY, max_tokens=max_tokens, seed=None, rows=RowsWanted(place, token_ids, width, dtype)
        )
        for row, (prompt, place) in enumerate(zip(prompts, positions, strict=True))
    ]


@functools.cache
def model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def reference(token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """[num_tokens, vocab_size]: the logits after each of these tokens, by transformers."""
    import torch

    with torch.no_grad():
        return model()(torch.tensor([list(token_ids)])).logits[0].numpy()


def log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def values_of(completion: Completion) -> npt.NDArray[Any]:
    assert completion.values is not None
    return completion.values


def test_after_the_last_token(engine: "VllmEngine") -> None:
    done = complete(engine, wanting(PROMPTS, [[len(prompt) - 1] for prompt in PROMPTS]))
    for prompt, completion in zip(PROMPTS, done, strict=True):
        np.testing.assert_allclose(values_of(completion), reference(prompt)[-1:], atol=1e-3, rtol=0)


def test_after_each_token_of_the_prompt(engine: "VllmEngine") -> None:
    done = complete(engine, wanting(PROMPTS, [range(len(prompt)) for prompt in PROMPTS]))
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert values_of(completion).shape == (len(prompt), VOCAB_SIZE)
        np.testing.assert_allclose(values_of(completion), reference(prompt), atol=1e-3, rtol=0)


def test_after_tokens_that_are_named_in_any_order_and_twice(engine: "VllmEngine") -> None:
    places = [(0,), (1, 0), (4, 0, 4), (29, 3), (99, 99)]
    done = complete(engine, wanting(PROMPTS, places))
    for prompt, place, completion in zip(PROMPTS, places, done, strict=True):
        np.testing.assert_allclose(values_of(completion), reference(prompt)[list(place)], atol=1e-3, rtol=0)


@pytest.mark.slow
def test_positions_of_prompts_that_are_run_in_pieces() -> None:
    engine = start(
        LogitsSpec(dtype="float32", vocab_size=VOCAB_SIZE),
        {"max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_chunked_prefill": True},
    )
    # The second has none in its second piece, the third one alone at an edge of each.
    prompts = [PROMPTS[4], PROMPTS[4][1:], PROMPTS[3], PROMPTS[4]]
    places = [(80, 0, 15, 16, 99, 31), (2, 70), (15, 16), range(100)]
    try:
        done = complete(engine, wanting(prompts, places))
    finally:
        engine.close()
    for prompt, place, completion in zip(prompts, places, done, strict=True):
        np.testing.assert_allclose(values_of(completion), reference(prompt)[list(place)], atol=1e-3, rtol=0)


def test_rows_of_positions_are_all_there_or_none_are_taken() -> None:
    from batchinf.engines.vllm.logprobs import VocabularyRows, vocabulary_rows

    prompt, generated = VocabularyRows(), VocabularyRows()
    column = np.zeros((3, 1), np.int32)
    prompt.extend(column, np.array([[1.0], [4.0], [7.0]], np.float32), np.array([2, 5, 8], np.int32))
    generated.extend(column[:1], np.array([[9.0]], np.float32), np.zeros(1, np.int32))
    for positions, expected in (((1, 4, 7, 9), [1, 4, 7, 9]), ((9, 4, 4), [9, 4, 4]), ((7, 1), [7, 1])):
        found = vocabulary_rows(RowsWanted(positions, None, 1, "float32"), generated, prompt)
        assert found[:, 0].tolist() == expected
    with pytest.raises(BatchinfError, match=r"^vLLM's worker gave rows of 3 positions, and not of all that are wanted"):
        vocabulary_rows(RowsWanted((1, 3, 9), None, 1, "float32"), generated, prompt)


def test_where_each_output_token_was_generated(engine: "VllmEngine") -> None:
    done = complete(engine, wanting(PROMPTS, [None] * len(PROMPTS), max_tokens=7))
    for prompt, completion in zip(PROMPTS, done, strict=True):
        expected = reference([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
        assert len(expected) == len(completion.token_ids) > 0
        np.testing.assert_allclose(values_of(completion), expected, atol=1e-3, rtol=0)
        assert (values_of(completion).argmax(-1) == completion.token_ids).all()


def verified(engine: "VllmEngine", spec: JobSpec, prompts: Sequence[Prompt]) -> Any:
    """What `batchinf verify` counts of the column of a job with these prompts."""
    task = task_of(spec)
    done = complete(engine, [task.expand(prompt, 512)[0] for prompt in prompts])
    results = [Result(prompt, 0, 1, it, None, None, 1) for prompt, it in zip(prompts, done, strict=True)]
    assert spec.logits is not None
    tallies = held(spec, pa.Table.from_batches([task.encode(results)]), prompts)
    assert [*tallies] == [spec.logits.values]
    tally = tallies[spec.logits.values]
    counts = [len(values_of(completion)) for completion in done]
    assert (tally.num_positions, tally.num_values) == (sum(counts), sum(counts) * spec.logits.width)
    return tally


def spec_of(logits: dict[str, Any], **sampling: Any) -> JobSpec:
    spec = {"model": {"name": str(MODEL), "dtype": "float32"}, "task": "logits", "input": {"path": "in"},
            "output": {"path": "out"}, "sampling": sampling}  # fmt: skip
    return JobSpec.model_validate({**spec, "logits": {"vocab_size": VOCAB_SIZE, **logits}})


def own_ids(prompt: Prompt, positions: Any) -> tuple[tuple[int, ...], ...]:
    """Other tokens for each row, and for each position where all tokens of the prompt have values."""
    num_lists = len(prompt.token_ids) if positions == "all" else 1
    return tuple((prompt.row_index, 1535 - number, 700) for number in range(num_lists))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("positions", ["last", "all", "generated", {"column": "places"}])
@pytest.mark.parametrize("token_ids", [(), (700, 3, 1535), (9,), "own"])
def test_what_is_stored_is_verified(
    engine: "VllmEngine", positions: Any, dtype: str, token_ids: tuple[int, ...] | str, tmp_path: pathlib.Path
) -> None:
    from batchinf.engines.vllm.worker import install

    sampling = {"temperature": 0.9, "max_tokens": 4, "seed": 5} if positions == "generated" else {}
    tokens = {"token_ids_column": "ids", "num_token_ids": 3} if token_ids == "own" else {"token_ids": token_ids}
    spec = spec_of({"positions": positions, "dtype": dtype, **tokens}, **sampling)
    assert spec.logits is not None
    prompts = [Prompt(row, ids, None, None, positions=(0, len(ids) - 1, 0)) for row, ids in enumerate(PROMPTS)]
    if token_ids == "own":
        prompts = [replace(prompt, value_token_ids=own_ids(prompt, positions)) for prompt in prompts]
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.sampler, "gather_logprobs", runner.sampler.gather_logprobs)
        patch.setattr(runner, "_get_prompt_logprobs_dict", runner._get_prompt_logprobs_dict)
        wanted = task_of(spec).vocabulary_rows
        assert install(engine._engine, "install_vocabulary_rows", wanted.dtype, wanted.token_ids)
        tally = verified(engine, spec, prompts)
    # Logits of up to 16 are rounded by half of 2**-7 at the most.
    assert tally.max_abs_delta < (1e-3 if dtype == "float32" else 8e-3)
    assert tally.sum_abs_delta / tally.num_values < (1e-4 if dtype == "float32" else 2e-3)
    assert tally.num_agreeing == (None if len(token_ids) == 1 else tally.num_positions)


@pytest.mark.parametrize("has_seam", [True, False])
def test_float16_is_the_rounded_float32_and_chosen_tokens_are_columns(
    engine: "VllmEngine", has_seam: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchinf.engines.vllm.worker import install

    places = [range(len(prompt)) for prompt in PROMPTS]
    chosen = (700, 3, 1535)
    full = [values_of(c) for c in complete(engine, wanting(PROMPTS, places))]
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    with monkeypatch.context() as patch:
        # What `install` puts in their place is to be gone afterwards.
        patch.setattr(runner.sampler, "gather_logprobs", runner.sampler.gather_logprobs)
        patch.setattr(runner, "_get_prompt_logprobs_dict", runner._get_prompt_logprobs_dict)
        if has_seam:
            assert install(engine._engine, "install_vocabulary_rows", "float16", chosen)
        else:  # vLLM's own: all ids in order of rank
            patch.setattr(runner.sampler, "gather_logprobs", type(runner.sampler).gather_logprobs)
            own = type(runner)._get_prompt_logprobs_dict
            patch.setattr(runner, "_get_prompt_logprobs_dict", functools.partial(own, runner))
        few = [values_of(c) for c in complete(engine, wanting(PROMPTS, places, "float16", chosen))]
    for rows, columns in zip(full, few, strict=True):
        assert columns.dtype == np.float16
        np.testing.assert_allclose(columns, rows[:, list(chosen)].astype(np.float16), atol=0, rtol=1e-3)
    again = [values_of(c) for c in complete(engine, wanting(PROMPTS, places))]
    for rows, same in zip(full, again, strict=True):
        np.testing.assert_allclose(rows, same, atol=1e-5, rtol=0)


def test_logprobs_are_the_log_softmax_of_all_of_the_vocabulary(tmp_path: pathlib.Path) -> None:
    engine = start(LogitsSpec(dtype="float32", vocab_size=VOCAB_SIZE, values="logprobs"))
    try:
        done = complete(engine, wanting(PROMPTS, [range(len(prompt)) for prompt in PROMPTS]))
        spec = spec_of({"positions": "all", "dtype": "float32", "values": "logprobs"})
        prompts = [Prompt(row, ids, None, None) for row, ids in enumerate(PROMPTS)]
        assert verified(engine, spec, prompts).max_abs_delta < 1e-3
    finally:
        engine.close()
    for prompt, completion in zip(PROMPTS, done, strict=True):
        np.testing.assert_allclose(values_of(completion), log_softmax(reference(prompt)), atol=1e-3, rtol=0)


CHOSEN = (5, 900, 17)


def processed(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Temperature 0.7, then the 40 likeliest."""
    scaled = logits / 0.7
    least = np.sort(scaled, axis=-1)[:, -40][:, None]
    return np.where(scaled < least, -np.inf, scaled)


@pytest.mark.parametrize("mode", ["processed_logprobs", *jobs.slowly("raw_logprobs", "raw_logits", "processed_logits")])
def test_modes_of_logprobs_and_tokens_of_ones_own_choice(mode: Any, vllm_engine: "VllmEngine") -> None:
    is_default = mode == "raw_logprobs"
    engine = vllm_engine if is_default else start(logprobs_mode=mode, logprob_token_ids=CHOSEN)
    sampling = SamplingSpec(temperature=0.7, top_k=40, top_p=1.0, prompt_logprobs=2)
    requests = [
        Request(row, 0, prompt, sampling, max_tokens=4, seed=7 + row, logprob_token_ids=CHOSEN[row % 2 :])
        for row, prompt in enumerate(PROMPTS)
    ]
    try:
        done = complete(engine, requests)
    finally:
        if not is_default:
            engine.close()
    for completion in done:
        prompt, found = completion.request.prompt_token_ids, completion.logprobs
        scores = reference([*prompt, *completion.token_ids])
        of_prompt = completion.prompt_logprobs
        assert of_prompt is not None
        assert len(of_prompt.logprobs) == len(prompt) - 1
        # Those of the prompt know no temperature and no top k.
        raw = scores[: len(prompt) - 1]
        raw = log_softmax(raw) if mode.endswith("logprobs") else raw
        rows = np.arange(len(raw))[:, None]
        np.testing.assert_allclose(of_prompt.logprobs, raw[rows, of_prompt.token_ids], atol=1e-3, rtol=0)
        expected = scores[len(prompt) - 1 : -1]
        if mode.startswith("processed"):
            expected = processed(expected)
        if mode.endswith("logprobs"):
            expected = log_softmax(expected)
        assert found is not None
        assert (found.token_ids[:, 0] == completion.token_ids).all()
        ids = completion.request.logprob_token_ids
        assert ids is not None
        assert (found.token_ids[:, 1:] == ids).all()
        rows = np.arange(len(expected))[:, None]
        np.testing.assert_allclose(found.logprobs, expected[rows, found.token_ids], atol=1e-3, rtol=0)


@pytest.mark.parametrize("token_ids", [None, [8, 3]])
@pytest.mark.parametrize("logits_mode", [True, False])
def test_rows_of_the_second_runner_whose_own_scores_need_a_gpu(token_ids: list[int] | None, logits_mode: bool) -> None:
    import torch

    from batchinf.engines.vllm.worker import ScoreRows, v2_scores

    def theirs(*arguments: Any, **named: Any) -> str:
        return "their own"

    scores = v2_scores(ScoreRows("float32", token_ids), theirs)
    logits = torch.randn(600, 12, generator=torch.Generator().manual_seed(0))
    sampled = torch.arange(600)
    assert scores(logits, 11, sampled, logits_mode=logits_mode) == "their own"
    found = scores(logits, 12, sampled, None, logits_mode=logits_mode)
    expected = logits.numpy() if logits_mode else log_softmax(logits.numpy())
    np.testing.assert_allclose(found.logprobs, expected if token_ids is None else expected[:, token_ids], atol=1e-5)
    assert found.logprob_token_ids[:, 0].tolist() == sampled.tolist()


def test_rows_of_the_second_runner_where_tokens_are_drafted_or_nobody_takes_them() -> None:
    import torch

    from batchinf.engines.vllm.worker import ScoreRows, v2_scores

    logits, sampled = torch.zeros((3, 12)), torch.arange(3)
    scores = v2_scores(ScoreRows("float16", None), lambda *_, **__: "their own")
    assert scores(logits, 12, sampled, [0, 1, 3]) == "their own"
    assert scores(logits, 12, sampled, cu_num_logits=[0, 1, 3]) == "their own"
    unsent = v2_scores(ScoreRows("float16", None, is_sent=False), lambda *_, **__: "their own")(logits, 12, sampled)
    assert (unsent.logprobs.shape, unsent.logprob_token_ids.shape) == ((3, 0), (3, 1))


def test_pieces_of_a_long_prompt_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.v1.outputs import LogprobsTensors

    from batchinf.engines.vllm import worker

    class OnDevice(torch.Tensor):
        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            return self.as_subclass(torch.Tensor)

    def piece(num_rows: int) -> LogprobsTensors:
        rows = [torch.ones((num_rows, 1)), torch.ones((num_rows, 5), dtype=torch.float16), torch.ones(num_rows)]
        return LogprobsTensors(*(tensor.as_subclass(OnDevice) for tensor in rows))

    monkeypatch.setattr(worker, "_DEVICE_BYTES", 100)
    kept = worker.PiecesOfPrompts()
    kept["a"], kept["b"] = [], []
    for name, num_rows in (("a", 4), ("b", 10), ("a", 7), ("a", 1)):
        kept[name].append(piece(num_rows))
    where = {name: {type(tensor) for each in pieces for tensor in each[:3]} for name, pieces in kept.items()}
    assert where == {"a": {torch.Tensor}, "b": {OnDevice}}
    assert [len(each.logprobs) for each in kept["a"]] == [4, 7, 1]
    kept["a"].clear()
    kept["a"].append(piece(1))
    assert isinstance(kept["a"][0].logprobs, OnDevice)

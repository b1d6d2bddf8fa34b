"""Full-vocabulary and chosen logits on real vLLM, held against transformers in float32; each logprobs mode too."""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from batchinf.records import Completion, Request, RowsWanted
from batchinf.spec import JobSpec, SamplingSpec
from batchinf.spec_logits import LogitsSpec
from jobs import MODEL

pytest.importorskip("vllm")
if TYPE_CHECKING:
    from batchinf.vllm_engine import VllmEngine

VOCAB_SIZE = 1536
PROMPTS = [list(range(10, 10 + length)) for length in (1, 2, 5, 30, 100)]
GREEDY = SamplingSpec(temperature=0.0)


def start(logits: LogitsSpec | None = None, **sampling: Any) -> "VllmEngine":
    from batchinf.vllm_engine import VllmEngine

    spec = JobSpec(
        model={"name": str(MODEL), "dtype": "float32"},
        task="generate" if logits is None else "logits",
        logits=logits,
        input={"path": "prompts.jsonl"},
        output={"path": "out"},
        sampling=SamplingSpec(**sampling),
        engine={"max_model_len": 512},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return VllmEngine(spec, str(MODEL), str(MODEL))


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
        Request(row, 0, prompt, GREEDY, max_tokens, None, rows=RowsWanted(place, token_ids, width, dtype))
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


def test_where_each_output_token_was_generated(engine: "VllmEngine") -> None:
    done = complete(engine, wanting(PROMPTS, [None] * len(PROMPTS), max_tokens=7))
    for prompt, completion in zip(PROMPTS, done, strict=True):
        expected = reference([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
        assert len(expected) == len(completion.token_ids) > 0
        np.testing.assert_allclose(values_of(completion), expected, atol=1e-3, rtol=0)
        assert (values_of(completion).argmax(-1) == completion.token_ids).all()


@pytest.mark.parametrize("has_seam", [True, False])
def test_float16_is_the_rounded_float32_and_chosen_tokens_are_columns(
    engine: "VllmEngine", has_seam: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchinf.vllm_worker import install_rows

    places = [range(len(prompt)) for prompt in PROMPTS]
    chosen = (700, 3, 1535)
    full = [values_of(c) for c in complete(engine, wanting(PROMPTS, places))]
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    with monkeypatch.context() as patch:
        # What `install_rows` puts in their place is to be gone afterwards.
        patch.setattr(runner.sampler, "gather_logprobs", runner.sampler.gather_logprobs)
        patch.setattr(runner, "_get_prompt_logprobs_dict", runner._get_prompt_logprobs_dict)
        if has_seam:
            assert install_rows(engine._engine, LogitsSpec(dtype="float16", token_ids=chosen))
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


def test_logprobs_are_the_log_softmax_of_all_of_the_vocabulary() -> None:
    engine = start(LogitsSpec(dtype="float32", vocab_size=VOCAB_SIZE, values="logprobs"))
    try:
        done = complete(engine, wanting(PROMPTS, [range(len(prompt)) for prompt in PROMPTS]))
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


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_modes_of_logprobs_and_tokens_of_ones_own_choice(mode: Any, vllm_engine: "VllmEngine") -> None:
    is_default = mode == "raw_logprobs"
    engine = vllm_engine if is_default else start(logprobs_mode=mode, logprob_token_ids=CHOSEN)
    sampling = SamplingSpec(temperature=0.7, top_k=40, top_p=1.0)
    requests = [
        Request(row, 0, prompt, sampling, 4, 7 + row, logprob_token_ids=CHOSEN[row % 2 :])
        for row, prompt in enumerate(PROMPTS)
    ]
    try:
        done = complete(engine, requests)
    finally:
        if not is_default:
            engine.close()
    for completion in done:
        prompt, found = completion.request.prompt_token_ids, completion.logprobs
        expected = reference([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
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

    from batchinf.vllm_worker import Rows, v2_scores

    def theirs(*arguments: Any, **named: Any) -> str:
        return "their own"

    scores = v2_scores(Rows("float32", token_ids), theirs)
    logits = torch.randn(600, 12, generator=torch.Generator().manual_seed(0))
    sampled = torch.arange(600)
    assert scores(logits, 11, sampled, logits_mode=logits_mode) == "their own"
    found = scores(logits, 12, sampled, None, logits_mode=logits_mode)
    expected = logits.numpy() if logits_mode else log_softmax(logits.numpy())
    np.testing.assert_allclose(found.logprobs, expected if token_ids is None else expected[:, token_ids], atol=1e-5)
    assert found.logprob_token_ids[:, 0].tolist() == sampled.tolist()


def test_rows_of_the_second_runner_where_tokens_are_drafted_or_nobody_takes_them() -> None:
    import torch

    from batchinf.vllm_worker import Rows, v2_scores

    logits, sampled = torch.zeros((3, 12)), torch.arange(3)
    scores = v2_scores(Rows("float16", None), lambda *_, **__: "their own")
    assert scores(logits, 12, sampled, [0, 1, 3]) == "their own"
    assert scores(logits, 12, sampled, cu_num_logits=[0, 1, 3]) == "their own"
    unsent = v2_scores(Rows("float16", None, is_sent=False), lambda *_, **__: "their own")(logits, 12, sampled)
    assert (unsent.logprobs.shape, unsent.logprob_token_ids.shape) == ((3, 0), (3, 1))


def test_pieces_of_a_long_prompt_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.v1.outputs import LogprobsTensors

    from batchinf import vllm_worker

    class OnDevice(torch.Tensor):
        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            return self.as_subclass(torch.Tensor)

    def piece(num_rows: int) -> LogprobsTensors:
        rows = [torch.ones((num_rows, 1)), torch.ones((num_rows, 5), dtype=torch.float16), torch.ones(num_rows)]
        return LogprobsTensors(*(tensor.as_subclass(OnDevice) for tensor in rows))

    monkeypatch.setattr(vllm_worker, "_DEVICE_BYTES", 100)
    kept = vllm_worker.PiecesOfPrompts()
    kept["a"], kept["b"] = [], []
    for name, num_rows in (("a", 4), ("b", 10), ("a", 7), ("a", 1)):
        kept[name].append(piece(num_rows))
    where = {name: {type(tensor) for each in pieces for tensor in each[:3]} for name, pieces in kept.items()}
    assert where == {"a": {torch.Tensor}, "b": {OnDevice}}
    assert [len(each.logprobs) for each in kept["a"]] == [4, 7, 1]
    kept["a"].clear()
    kept["a"].append(piece(1))
    assert isinstance(kept["a"][0].logprobs, OnDevice)

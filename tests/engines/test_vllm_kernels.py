"""The kernels for logprobs, held against PyTorch's own functions.

Triton runs on GPUs alone. Here PyTorch takes the place of Triton's language: the same code runs, one row at a time.
"""

import ast
import pathlib
import types
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

import triton_on_cpu

from batchinf.engines.vllm import worker
from batchinf.engines.vllm.arguments import engine_arguments, scored_ks
from batchinf.engines.vllm.kernels import scores as kernels
from batchinf.records import Request
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.registry import task_of
from jobs import MODEL

pytestmark = pytest.mark.skipif(kernels.HAS_TRITON, reason="the kernel is compiled here")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces Triton's language and the launch of the kernel."""
    monkeypatch.setattr(kernels, "tl", triton_on_cpu.language)
    for name in ("score_kernel", "maxima_kernel"):
        monkeypatch.setattr(kernels, name, triton_on_cpu.Launcher(getattr(kernels, name)))
    monkeypatch.setattr(kernels, "_TILE", (16, 8))
    monkeypatch.setattr(kernels, "_SEGMENT", 4)
    monkeypatch.setattr(kernels, "_GROUP", 2)
    monkeypatch.setattr(torch.Tensor, "topk", topk)


def topk(values: torch.Tensor, k: int, dim: int = -1, sorted: bool = True) -> Any:
    """As on a GPU: of equal values the first ones are taken."""
    found = torch.sort(values, dim=dim, descending=True, stable=True)
    return torch.return_types.topk((found.values[..., :k], found.indices[..., :k]))


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(vocab_size)) * 5).to(dtype)


def check(logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """`token_scores` gives PyTorch's logprobs, likeliest tokens and ranks."""
    expected = logits.float().log_softmax(-1)
    own = logits.gather(1, token_ids[:, None])
    for k in (0, 1, 2, 5):
        if k > -(-logits.shape[1] // 4):  # the number of segments
            continue
        ids, logprobs, ranks = kernels.token_scores(logits, token_ids, k)
        assert ids.shape == logprobs.shape == (len(logits), k + 1)
        assert ids[:, 0].tolist() == token_ids.tolist()
        assert ranks.tolist() == (logits >= own).sum(-1).tolist()
        torch.testing.assert_close(logprobs, expected.gather(1, ids), rtol=1e-6, atol=1e-6)
        # The first of several equally likely tokens.
        assert ids[:, 1:].tolist() == topk(logits, k).indices.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 100, 1024])
def test_logprobs_are_those_of_pytorch(vocab_size: int, dtype: torch.dtype) -> None:
    logits = random_logits(7, vocab_size, dtype)
    check(logits, torch.arange(7) * 31 % vocab_size)


def test_the_likeliest_token_scored() -> None:
    logits = random_logits(5, 100)
    check(logits, logits.argmax(-1))


def test_tokens_with_equal_logits() -> None:
    logits = torch.full((3, 50), 2.5)
    logits[1, 20:] = -1.0
    check(logits, torch.tensor([0, 49, 17]))


def test_impossible_tokens() -> None:
    logits = random_logits(4, 40)
    logits[0, :30] = -torch.inf  # a whole step of the kernel
    logits[1, 1:] = -torch.inf
    logits[2, ::2] = -torch.inf
    check(logits, torch.tensor([0, 0, 4, 39]))


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_row_without_numbers_has_a_token_of_the_vocabulary(value: float) -> None:
    logits = torch.full((1, 20), value)
    ids, _, _ = kernels.token_scores(logits, torch.tensor([3]), 1)
    assert ids.tolist() == [[3, 0]]


def test_very_large_logits() -> None:
    check(random_logits(3, 60) * 1e4 - 1e5, torch.tensor([1, 2, 3]))


def test_rows_of_a_wider_matrix() -> None:
    """vLLM cuts off the logits of tokens that pad the vocabulary."""
    logits = random_logits(6, 64)[:, :50]
    assert not logits.is_contiguous()
    check(logits, torch.tensor([0, 10, 20, 30, 40, 49]))


def test_annotations_are_those_of_triton() -> None:
    """Triton's compiler looks up the names in annotations and refuses names of Python."""
    source = pathlib.Path(kernels.__file__).read_text()
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    assert [kernel.name for kernel in found] == ["one_pass", "score_kernel", "maxima_kernel"]
    for kernel in found:
        assert kernel.returns is None
        annotations = [argument.annotation for argument in kernel.args.args if argument.annotation is not None]
        assert {ast.unparse(annotation) for annotation in annotations} == {"tl.constexpr"}


def test_a_row_that_is_not_a_number() -> None:
    logits = random_logits(2, 40)
    logits[0, 33] = torch.nan
    _, logprobs, _ = kernels.token_scores(logits, torch.tensor([3, 3]), 1)
    assert logprobs[0].isnan().all() and not logprobs[1].isnan().any()


def theirs(logits: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor, **_: Any) -> Any:
    """What vLLM's function gives, by PyTorch."""
    ids = torch.cat((token_ids[:, None], logits.topk(num_logprobs).indices), dim=1)
    ranks = (logits >= logits.gather(1, token_ids[:, None])).sum(-1)
    return worker.LogprobsTensors(ids, logits.float().log_softmax(-1).gather(1, ids), ranks)


def off_by_one(*arguments: Any) -> Any:
    right = theirs(*arguments)
    return right._replace(selected_token_ranks=right.selected_token_ranks + 1)


def other_tokens(*arguments: Any) -> Any:
    right = theirs(*arguments)
    ids = right.logprob_token_ids.clone()
    ids[0, -1] = (ids[0].max() + 1) % 100
    return right._replace(logprob_token_ids=ids)


def test_it_is_used_only_where_it_gives_what_vllm_gives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    device = torch.device("cpu")
    for k in (0, 1, 3):
        assert kernels.is_right(theirs, 100, torch.bfloat16, device, ks=[k])
        assert capsys.readouterr().out == ""
        assert not kernels.is_right(off_by_one, 100, torch.bfloat16, device, ks=[k])
        assert "not used: AssertionError" in capsys.readouterr().out
    assert not kernels.is_right(other_tokens, 100, torch.bfloat16, device, ks=[3])
    assert "not used: AssertionError" in capsys.readouterr().out
    monkeypatch.setattr(kernels, "token_scores", lambda *_: 1 / 0)
    assert kernels.is_right(theirs, 100, torch.bfloat16, device, ks=[4])  # too many of 25 segments: vLLM's are used
    assert not kernels.is_right(theirs, 100, torch.bfloat16, device, ks=[3])
    assert "not used: ZeroDivisionError" in capsys.readouterr().out


def test_other_requests_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "token_scores", lambda *_: ("ids", "logprobs", "ranks"))
    scores = worker.scores_in_one_pass(lambda *_, **__: "their own", [0, 5])
    logits, token_ids = random_logits(2, 1000), torch.tensor([1, 2])
    state = {"logprob_token_ids_state": object(), "expanded_idx_mapping": torch.tensor([0, 1])}
    for k in (0, 2, 5, 31):
        assert scores(logits, k, token_ids, logits_mode=False)[:3] == ("ids", "logprobs", "ranks")
        plain = {**state, "max_per_req_token_ids": 0, "logits_mode": False}
        assert scores(logits, k, token_ids, None, **plain)[:3] == ("ids", "logprobs", "ranks")
    assert scores(logits, 1, token_ids) == "their own"  # its kernel was not compared
    assert scores(logits, 32, token_ids) == "their own"  # too many
    assert scores(logits, 2, token_ids, logits_mode=True) == "their own"
    assert scores(logits, 2, token_ids, [1, 1]) == "their own"
    assert scores(logits, 2, token_ids, **state, max_per_req_token_ids=3) == "their own"
    assert scores(logits, 2, token_ids, new=torch.tensor([0, 0])) == "their own"


def runner(**changed: Any) -> Any:
    config = types.SimpleNamespace(get_vocab_size=lambda: 100, dtype=torch.float32)
    found = {"prompt_logprobs_worker": object(), "model_config": config, "device": torch.device("cpu"), **changed}
    return types.SimpleNamespace(**found)


def test_a_worker_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(compute_topk_scores=theirs)
    monkeypatch.setattr(worker.importlib, "import_module", lambda name: module)
    assert not worker._install_kernels(runner(), [1])  # without Triton
    assert module.compute_topk_scores is theirs
    # Stages of a pipeline but the last have no logits, and the last one decides.
    assert worker._install_kernels(runner(prompt_logprobs_worker=None, is_last_pp_rank=False), [1])
    assert not worker._install_kernels(runner(prompt_logprobs_worker=None), [1])
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    assert worker._install_kernels(runner(), [1])
    logits, token_ids = random_logits(3, 100), torch.tensor([1, 2, 3])
    own, expected = module.compute_topk_scores(logits, 1, token_ids), theirs(logits, 1, token_ids)
    torch.testing.assert_close(own.logprobs, expected.logprobs)
    assert own.logprob_token_ids.tolist() == expected.logprob_token_ids.tolist()


@pytest.mark.parametrize(
    ("changed", "is_there"),
    [
        ({"task": "score", "input": {"path": "rows.jsonl", "text_column": "text"}}, True),
        ({"sampling": {"max_tokens": 2, "prompt_logprobs": 0}}, True),
        ({"sampling": {"max_tokens": 2, "logprobs": 5}}, True),
        ({"sampling": {"max_tokens": 2}}, False),
        ({"task": "embed"}, False),
    ],
)
def test_jobs_with_logprobs_can_be_given_it(changed: dict[str, Any], is_there: bool) -> None:
    sections = {"model": {"name": str(MODEL)}, "input": {"path": "rows.jsonl"}, "output": {"path": "out"}}
    task = task_of(JobSpec.model_validate({**sections, **changed}))
    given = engine_arguments(task, str(MODEL), str(MODEL), None)
    assert (given.get("worker_extension_cls") == worker.WORKER_EXTENSION) == is_there


def start(**engine: Any) -> Any:
    """Real vLLM on a CPU, which has the V1 runner, for a job that scores."""
    from batchinf.engines.vllm.engine import VllmEngine

    spec = {
        "model": {"name": str(MODEL), "dtype": "float32"}, "task": "score", "engine": {"max_model_len": 512, **engine},
        "input": {"path": "rows.jsonl", "text_column": "text"}, "output": {"path": "out"},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return VllmEngine(task_of(JobSpec.model_validate(spec)), str(MODEL), str(MODEL))


def scored(engine: Any, mode: str) -> list[Any]:
    """Prompts of several lengths in one batch, with several numbers of logprobs."""
    engine._engine.vllm_config.model_config.logprobs_mode = mode
    for row, (length, k) in enumerate([(300, 1), (1, 2), (2, 0), (65, 5), (64, 1), (130, 0), (33, 20)]):
        prompt = [(7 * row + 13 * place) % 1500 + 3 for place in range(length)]
        engine.add(Request(row, 0, prompt, SamplingSpec(temperature=0, prompt_logprobs=k), max_tokens=2))
    found = {}
    while engine.num_unfinished():
        found |= {completion.request.row_index: completion.prompt_logprobs for completion in engine.step()}
    return [found[row] for row in sorted(found)]


@pytest.mark.parametrize(
    "engine",
    [{}, pytest.param({"max_num_batched_tokens": 64, "enable_chunked_prefill": True}, marks=pytest.mark.slow)],
)
def test_the_v1_runner_takes_them_in_pieces(engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are equal to those of vLLM's own code, which takes those of a whole prompt at once."""
    monkeypatch.setattr(worker, "_CHUNK", 30)
    widest, running = [0], start(**engine)
    runner = running._engine.model_executor.driver_worker.worker.model_runner
    gather = runner.sampler.gather_logprobs

    def watched(scores: torch.Tensor, *arguments: Any) -> Any:
        widest.append(len(scores))
        return gather(scores, *arguments)

    monkeypatch.setattr(runner.sampler, "gather_logprobs", watched)
    modes = ("raw_logprobs", "raw_logits")
    try:
        all_ours = [scored(running, mode) for mode in modes]
        assert max(widest) <= 30
        del runner._get_prompt_logprobs_dict  # vLLM's own is behind it
        all_theirs = [scored(running, mode) for mode in modes]
        assert max(widest) > 30
    finally:
        running.close()
    for mode, ours, theirs in zip(modes, all_ours, all_theirs, strict=True):
        assert any((rows.logprobs > 0).any() for rows in ours) == (mode == "raw_logits")
        assert [len(rows.ranks) for rows in ours] == [299, 0, 1, 64, 63, 129, 32]
        for mine, their in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(mine.token_ids, their.token_ids)
            np.testing.assert_allclose(mine.logprobs, their.logprobs, atol=1e-5, rtol=0)
            np.testing.assert_array_equal(mine.ranks, their.ranks)


@pytest.mark.parametrize(
    ("changed", "ks"),
    [
        ({"sampling": {"logprobs": 5, "prompt_logprobs": 0}}, [0, 5]),
        ({"sampling": {"logprobs": 1}}, [1]),
        ({"task": "score", "input": {"path": "rows.jsonl", "text_column": "text"}}, [1]),  # whether it is the likeliest
        ({"task": "logits", "logits": {"vocab_size": 9}}, []),
        ({}, []),
    ],
)
def test_the_numbers_of_logprobs_of_a_job(changed: dict[str, Any], ks: list[int]) -> None:
    sections = {"model": {"name": str(MODEL)}, "input": {"path": "rows.jsonl"}, "output": {"path": "out"}}
    assert scored_ks(task_of(JobSpec.model_validate({**sections, **changed}))) == ks


def test_a_version_with_another_source_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "allowed", lambda piece: piece not in ("rows_v1", "rows_v2"))
    start().close()
    assert "vLLM's own code takes the logprobs" in capfd.readouterr().out

"""The kernel for the attention of decoding, held against PyTorch's attention, and when it takes FlashAttention's place.

Triton runs on GPUs alone. Here PyTorch takes the place of Triton's language.
"""

import dataclasses
import functools
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import triton_on_cpu
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from batchinf.engines.vllm.arguments import engine_arguments
from batchinf.engines.vllm.kernels import attention, comparison, long_requests, whole_steps
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of
from benchmarks.mutants import pytorch_attention
from jobs import MODEL, inherited, quick_start

pytestmark = pytest.mark.skipif(attention.HAS_TRITON, reason="the kernel is compiled here")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_requests, "_PARTS_OF_LONGEST", 1)  # these batches are small
    monkeypatch.setattr(attention, "tl", triton_on_cpu.language)
    monkeypatch.setattr(attention, "decode_kernel", triton_on_cpu.Launcher(attention.decode_kernel))


def arguments(lengths: Any, heads: tuple[int, int] = (4, 2), head_size: int = 64, **changed: Any) -> dict[str, Any]:
    num_heads, num_key_heads = heads
    made: dict[str, Any] = {"dtype": torch.float32, **changed}
    shape = comparison.AttentionShape(num_heads=num_heads, num_key_heads=num_key_heads, head_size=head_size, **made)
    return comparison.example(lengths, shape, "cpu")


def expected(given: dict[str, Any]) -> torch.Tensor:
    """PyTorch's attention over the tokens of each request, gathered from the cache."""
    group = given["q"].shape[1] // given["k"].shape[2]
    block_size = given["k"].shape[1]
    rows = []
    for request, length in enumerate(given["seqused_k"].tolist()):
        if not length:
            rows.append(torch.zeros_like(given["out"][:1]))
            continue
        at = torch.arange(length)
        blocks = given["block_table"][request][at // block_size].long()
        keys, values = (
            given[name][blocks, at % block_size].float().repeat_interleave(group, dim=1).transpose(0, 1)
            for name in "kv"
        )
        query = given["q"][request, :, None].float()
        mixed = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=given["softmax_scale"])
        rows.append(mixed.transpose(0, 1).to(given["out"].dtype))
    return torch.cat(rows)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (16, 1), (8, 2)])
@pytest.mark.parametrize("shape", [(64, 2, 3), (16, 1, 2)])
def test_attention_is_that_of_pytorch(heads: tuple[int, int], shape: tuple[int, int, int]) -> None:
    given = arguments((1, 15, 16, 17, 64, 65, 130), heads)
    attention.run_ours(given, shape)
    torch.testing.assert_close(given["out"], expected(given), rtol=1e-5, atol=1e-5)


def test_float8_numbers_have_their_scales() -> None:
    given = arguments((5, 70), is_fp8=True)
    before = expected(given)
    for name, scale in (("q_descale", 0.5), ("k_descale", 0.75), ("v_descale", 2.0)):
        given[name] = torch.full((), scale).expand(2, 2)
    attention.run_ours(given)
    given["softmax_scale"] *= 0.5 * 0.75
    torch.testing.assert_close(given["out"], expected(given) * 2.0, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(given["out"], before, atol=0.01)


def test_a_request_without_tokens_gives_zeros() -> None:
    """A graph's batch is filled up with such requests."""
    given = arguments((9, 3))
    given["seqused_k"][1] = 0
    given["out"].fill_(7.0)
    attention.run_ours(given)
    torch.testing.assert_close(given["out"], expected(given), rtol=1e-5, atol=1e-5)


def test_a_query_within_a_larger_tensor() -> None:
    """vLLM's queries lie beside their keys and values."""
    given = arguments((20, 40))
    wide = torch.randn(2, 6, 64)
    given["q"] = wide[:, :4]
    assert not given["q"].is_contiguous()
    attention.run_ours(given)
    torch.testing.assert_close(given["out"], expected(given), rtol=1e-5, atol=1e-5)


def test_a_cache_of_more_than_two_billion_numbers() -> None:
    given = arguments((20, 40), is_fp8=True)
    before = expected(given)
    # The memory is not touched but for the blocks that are used.
    block_size, num_heads, width = given["k"].shape[1], given["k"].shape[2], 2 * given["k"].shape[3]
    last = 1 + 2**31 // (block_size * num_heads * width)
    cache = torch.empty((last + 1, num_heads, block_size, width), dtype=torch.float8_e4m3fn)
    num_used = len(given["k"])
    used = cache[last + 1 - num_used :].transpose(1, 2).split(width // 2, dim=-1)
    for one, other in zip(used, (given["k"], given["v"]), strict=True):
        one.copy_(other)
    given["k"], given["v"] = cache.transpose(1, 2).split(width // 2, dim=-1)
    given["block_table"] += last + 1 - num_used
    attention.run_ours(given)
    torch.testing.assert_close(given["out"], before, rtol=1e-3, atol=1e-3)


@pytest.fixture
def any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", 1)


def half(lengths: Any = (5, 6), **changed: Any) -> dict[str, Any]:
    return arguments(lengths, dtype=torch.bfloat16, **changed)


def as_vllm_calls(given: dict[str, Any]) -> dict[str, Any]:
    """With the arguments that vLLM passes besides, which are nothing for most models."""
    others = ("alibi_slopes", "dynamic_causal", "s_aux", "mask_mod", "aux_tensors")
    plan = {"scheduler_metadata": torch.zeros(1), "num_splits": 32, "window_size": [-1, -1], "softcap": 0}
    return {**given, **dict.fromkeys(others), **plan}


@pytest.mark.usefixtures("any_batch")
def test_batches_that_decode_are_taken() -> None:
    assert attention.takes(as_vllm_calls(half()))
    assert attention.takes(as_vllm_calls(half(is_fp8=True)))
    assert attention.takes(half(heads=(16, 1), head_size=128))
    assert attention.takes({**half(), "return_softmax_lse": False})


def test_small_batches_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", 4)
    assert attention.takes(half())  # 2 requests with 2 heads of keys
    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", 5)
    assert not attention.takes(half())


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, two elements apart."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.usefixtures("any_batch")
@pytest.mark.parametrize("change", [
    lambda given: {"max_seqlen_q": 2},
    lambda given: {"causal": False},
    lambda given: {"causal": torch.ones(2)},
    lambda given: {"window_size": [127, 0]},
    lambda given: {"softcap": 30.0},
    lambda given: {"alibi_slopes": torch.ones(4)},
    lambda given: {"s_aux": torch.ones(4)},
    lambda given: {"return_softmax_lse": True},
    lambda given: {"some_new_argument": 1},
    lambda given: {"fa_version": 2},
    lambda given: {"softmax_scale": None},
    lambda given: {"block_table": None},
    lambda given: {"out": None},
    lambda given: {"seqused_k": None},
    lambda given: {"seqused_k": given["seqused_k"].long()},
    lambda given: {"seqused_k": given["seqused_k"].repeat(2)},
    lambda given: {"seqused_k": given["seqused_k"][:1]},
    lambda given: {"v": given["v"].view(torch.float16)},
    lambda given: {"k": given["k"][0], "v": given["v"][0]},
    lambda given: {"q": given["q"].float()},
    lambda given: {name: given[name].float() for name in "qkv"},
    lambda given: {name: given[name][..., :32] for name in "qkv"},
    lambda given: {"q": given["q"].repeat(1, 9, 1)},
    lambda given: {"q": given["q"].repeat(2, 1, 1)},
    lambda given: {"q": strided(given["q"])},
    lambda given: {"k": strided(given["k"]), "v": strided(given["v"])},
    lambda given: {"v": given["v"].contiguous()},
    lambda given: {"out": strided(given["out"])},
    lambda given: {"block_table": given["block_table"].long()},
    lambda given: {"block_table": given["block_table"].T.contiguous().T},
    lambda given: {"cu_seqlens_q": torch.tensor([0, 1, 1, 2])},
])  # fmt: skip
def test_all_else_is_left_to_vllm(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    given = as_vllm_calls(half((5, 40)))
    calls = []
    choice = long_requests.GraphChoice(2, attention.pays_in_step)
    attend = attention.attention_of_decoding(lambda *arguments, **named: calls.append((arguments, named)), choice)
    assert attend(**given) is given["out"]
    assert not calls
    changed = {**given, **change(given)}
    assert attend(**changed) is None
    assert len(calls) == 1
    attend(1, **given)
    assert len(calls) == 2
    choice.has_long_request = True
    assert attend(**given) is None
    assert len(calls) == 3


@pytest.mark.usefixtures("any_batch")
def test_scales_by_head_are_left_to_vllm() -> None:
    given = half(is_fp8=True)
    assert not attention.takes({**given, "k_descale": torch.ones(2, 2)})
    assert not attention.takes({**given, "q_descale": None})
    assert not attention.takes({**given, "v_descale": torch.ones((), dtype=torch.bfloat16).expand(2, 2)})
    assert attention.takes({**half(), "q_descale": None})


class Impl:
    def __init__(
        self, head_size: int = 64, version: int = 3, cache: str = "auto", num_heads: int = 4,
        others: tuple[Any, Any, Any] = (0, None, None), window: Any = (-1, -1),
    ) -> None:  # fmt: skip
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, 2, head_size
        self.vllm_flash_attn_version, self.kv_cache_dtype = version, cache
        self.sliding_window = window
        self.logits_soft_cap, self.alibi_slopes, self.sinks = others


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module, with PyTorch's attention as FlashAttention."""
    module = types.SimpleNamespace(
        flash_attn_varlen_func=pytorch_attention,
        FlashAttentionImpl=Impl,
    )
    monkeypatch.setattr(attention, "flash_attn", module)
    monkeypatch.setattr(attention, "HAS_TRITON", True)
    monkeypatch.setattr(attention, "is_right", functools.partial(attention.is_right, device="cpu"))
    monkeypatch.setattr(attention, "_CHECKED_TIMES", 1)  # other tests have all requests of the comparison
    return module


SIZES: Any = (torch.bfloat16, 32, 400)


def install(layers: Any) -> bool:
    return attention.install(layers, *SIZES, choice=long_requests.GraphChoice(2, attention.pays_in_step))


def layers(*impls: Any) -> dict[str, Any]:
    return {str(number): types.SimpleNamespace(impl=impl) for number, impl in enumerate(impls)}


def test_it_replaces_vllm_s_only_where_it_gives_the_same(
    backend: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = backend.flash_attn_varlen_func
    others = ((30.0, None, None), (0, torch.ones(4), None), (0, None, torch.ones(4)))
    for other in (Impl(head_size=96), Impl(version=2), Impl(num_heads=34), Impl(num_heads=5), object(),
                  Impl(window=(127, 0)), *(Impl(others=these) for these in others)):  # fmt: skip
        assert not install(layers(other))
    assert not install(layers())
    assert backend.flash_attn_varlen_func is theirs
    compared: list[Any] = []
    with monkeypatch.context() as patch:
        check = attention.is_right
        patch.setattr(attention, "is_right", lambda *given: compared.append(given[1:]) or check(*given))
        assert install(layers(Impl(), Impl(head_size=96), Impl(cache="fp8"), None))
    scales = (0.5, 0.75, 2.0)  # a layer without scales
    of = functools.partial(comparison.AttentionShape, num_heads=4, num_key_heads=2, head_size=64, scales=scales)
    dtype, block_size, longest = SIZES
    shapes = [of(dtype=dtype, block_size=block_size, is_fp8=is_fp8) for is_fp8 in (False, True)]
    assert sorted(compared, key=str) == [(shape, longest) for shape in shapes]
    assert backend.flash_attn_varlen_func.__wrapped__ is theirs
    # A second engine in the process.
    assert install(layers(Impl(window=None)))
    assert backend.flash_attn_varlen_func.__wrapped__ is theirs
    assert not capsys.readouterr().out
    backend.flash_attn_varlen_func = theirs

    monkeypatch.setattr(attention, "_LOG2_E", 1.0)
    assert not install(layers(Impl()))
    assert backend.flash_attn_varlen_func is theirs
    assert "the kernel for decoding is not used: AssertionError" in capsys.readouterr().out
    monkeypatch.undo()


@pytest.mark.parametrize("missing", ["flash_attn_varlen_func", "Triton", "variance"])
def test_where_it_cannot_run_vllm_s_stays(missing: str, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = backend.flash_attn_varlen_func
    if missing == "Triton":
        monkeypatch.setattr(attention, "HAS_TRITON", False)
    elif missing == "variance":  # an engine in this process may have made vLLM keep the variables' values
        assert hasattr(attention.envs, "VLLM_BATCH_INVARIANT")
        monkeypatch.setattr(attention, "envs", types.SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    else:  # vLLM imports it where its library is
        del backend.flash_attn_varlen_func
    assert not install(layers(Impl()))
    assert getattr(backend, "flash_attn_varlen_func", theirs) is theirs


@pytest.mark.parametrize(("mode", "is_installed"), [
    (CUDAGraphMode.FULL_AND_PIECEWISE, True), (CUDAGraphMode.FULL_DECODE_ONLY, True), (CUDAGraphMode.PIECEWISE, True),
    (CUDAGraphMode.NONE, True), (CUDAGraphMode.FULL, False),
])  # fmt: skip
def test_it_is_installed_before_the_graphs_are_captured(
    mode: CUDAGraphMode, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with one kind of graph for all batches, which may be captured as if it were for decoding alone."""
    done: list[Any] = []
    monkeypatch.setattr(attention, "install", lambda *given, choice: done.append(given))
    monkeypatch.setattr(attention, "all_agree", lambda is_so: is_so)
    monkeypatch.setattr(attention.Worker, "compile_or_warm_up_model", lambda self: done.append("graphs") or 3)
    assert worker_of(mode).compile_or_warm_up_model() == 3
    assert done == [*([({"layer": 1}, *SIZES)] if is_installed else []), "graphs"]


def worker_of(mode: CUDAGraphMode, data_parallel_size: int = 1) -> Any:
    """Our worker before its graphs are captured. A step returns how its graph is chosen."""
    worker: Any = attention.DecodingWorker.__new__(attention.DecodingWorker)
    worker.vllm_config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(static_forward_context={"layer": 1}, cudagraph_mode=mode),
        model_config=types.SimpleNamespace(
            dtype=SIZES[0], max_model_len=SIZES[2], get_num_kv_heads=lambda config: config.heads
        ),
        cache_config=types.SimpleNamespace(block_size=SIZES[1]),
        parallel_config=types.SimpleNamespace(heads=2, data_parallel_size=data_parallel_size),
    )
    worker.model_runner = types.SimpleNamespace(cudagraph_manager=types.SimpleNamespace(dispatch=dispatched))
    return worker


def dispatched(num_reqs: int, num_tokens: int, uniform_token_count: int | None, num_active_loras: int) -> int | None:
    return uniform_token_count


def decoding(lengths: tuple[int, ...], **changed: Any) -> Any:
    """What vLLM's scheduler says of a step in which requests with so many tokens have one new token each."""
    return types.SimpleNamespace(**{
        "scheduled_cached_reqs": types.SimpleNamespace(num_computed_tokens=[length - 1 for length in lengths]),
        "num_scheduled_tokens": dict.fromkeys(map(str, range(len(lengths))), 1),
        "total_num_scheduled_tokens": len(lengths),
    } | changed)  # fmt: skip


@pytest.mark.parametrize(("mode", "installs", "others", "num_ranks", "chosen"), [
    (CUDAGraphMode.FULL_AND_PIECEWISE, True, True, 1, None),
    (CUDAGraphMode.FULL_AND_PIECEWISE, False, True, 1, 1),  # the kernel is not there
    (CUDAGraphMode.FULL_AND_PIECEWISE, True, False, 1, 1),  # another rank does not have it
    (CUDAGraphMode.FULL_AND_PIECEWISE, True, True, 2, 1),  # data parallel ranks choose together
    (CUDAGraphMode.FULL_DECODE_ONLY, True, True, 1, 1),  # without graphs, such a step would be slower still
])  # fmt: skip
def test_a_step_with_one_long_request_leaves_the_graphs_of_decoding(
    mode: CUDAGraphMode, installs: bool, others: bool, num_ranks: int, chosen: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(attention, "all_agree", lambda is_so: is_so and others)
    monkeypatch.setattr(long_requests, "_PARTS_OF_LONGEST", 4)
    monkeypatch.setattr(attention, "_LEAST_PROGRAMS", 6)
    monkeypatch.setattr(attention, "install", lambda *given, choice: installs)
    monkeypatch.setattr(attention.Worker, "compile_or_warm_up_model", lambda self: 3)
    monkeypatch.setattr(
        attention.Worker, "execute_model", lambda self, step: self.model_runner.cudagraph_manager.dispatch(
            len(step.num_scheduled_tokens), step.total_num_scheduled_tokens, 1, num_active_loras=0
        ),
    )  # fmt: skip
    worker = worker_of(mode, num_ranks)
    assert worker.execute_model(decoding((900, 10, 10))) == 1  # a step before the graphs are there
    worker.compile_or_warm_up_model()
    assert worker.execute_model(decoding((51, 40, 10))) == chosen  # 4 * 51 > 101 * 2
    assert worker.execute_model(decoding((50, 40, 10))) == 1
    assert worker.execute_model(decoding((900, 10, 10))) == chosen
    # Outside of the graphs, FlashAttention keeps such a step.
    assert (worker._graph_choice is not None and worker._graph_choice.has_long_request) is installs
    assert worker.execute_model(decoding((900, 10))) == 1  # too few for the kernel
    assert worker.execute_model(decoding((900, 10, 10), total_num_scheduled_tokens=9)) == 1  # some read prompts
    assert worker.execute_model(decoding((900, 10, 10), num_scheduled_tokens=dict.fromkeys("abcd", 1))) == 1


def test_the_runners_of_the_installed_vllm_choose_graphs_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments that are changed, vLLM's own code leaves the graphs of decoding."""
    monkeypatch.setattr(long_requests, "_PARTS_OF_LONGEST", 4)
    choice = long_requests.GraphChoice(2, lambda num, heads: True)
    long, short = decoding((99999, *(1,) * 15)), decoding((1,) * 16)
    manager: Any = CudaGraphManager.__new__(CudaGraphManager)
    full, pieces = (
        BatchExecutionDescriptor(mode, 16, num_reqs, uniform_token_count=count)
        for mode, num_reqs, count in ((CUDAGraphMode.FULL, 16, 1), (CUDAGraphMode.PIECEWISE, None, None))
    )
    manager._graphs_captured, manager._lora_dispatch_map, manager._max_lora_case = True, {}, 0
    runner = types.SimpleNamespace(cudagraph_manager=manager)
    assert choice.install(runner)
    choice.leaves_graphs = True
    # Graphs for one new token, and for at most two.
    for graph in (full, dataclasses.replace(full, uniform_token_count=None, max_query_len=2)):
        manager._candidates = {(16, 0): [graph, pieces]}
        assert manager.dispatch(16, 16, 1, num_active_loras=0, max_query_len=1) == graph
        for step, wanted in ((short, graph), (long, pieces), (short, graph)):
            choice.look(step)
            assert manager.dispatch(16, 16, 1, num_active_loras=0, max_query_len=1) == wanted

    config = VllmConfig()
    graphs = config.compilation_config
    graphs.cudagraph_mode, graphs.cudagraph_capture_sizes = CUDAGraphMode.FULL_AND_PIECEWISE, [16]
    graphs.max_cudagraph_capture_size, graphs.mode = 16, CompilationMode.VLLM_COMPILE
    graphs.splitting_ops = list(graphs._attention_ops)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 1)
    assert choice.install(types.SimpleNamespace(cudagraph_manager=None, cudagraph_dispatcher=dispatcher))
    for step, mode in ((short, CUDAGraphMode.FULL), (long, CUDAGraphMode.PIECEWISE), (short, CUDAGraphMode.FULL)):
        choice.look(step)
        assert dispatcher.dispatch(num_tokens=16, uniform_decode=True)[0] == mode


_RANK = """
import os, sys
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from batchinf.engines.vllm.kernels.long_requests import all_agree
rank, folder = int(sys.argv[1]), sys.argv[2]
os.environ["VLLM_DIST_IDENT"] = folder.replace("/", "-")  # as vLLM's worker for processors does
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(2, rank, f"file://{folder}/meeting", rank, "gloo")
    initialize_model_parallel(2)
print([all_agree(one) for one in ([True, True, False, False], [True, False, True, False])[rank]], flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_tensor_parallel_ranks_leave_the_graphs_together(tmp_path: pathlib.Path) -> None:
    environment = {**inherited(), **quick_start()}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.communicate(timeout=120)[0].splitlines()[-1] == "[True, False, False, False]"


def test_a_single_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_requests, "get_tp_group", lambda: types.SimpleNamespace(world_size=1))
    assert [long_requests.all_agree(is_so) for is_so in (True, False)] == [True, False]


def test_a_runner_that_chooses_in_another_way_is_left_alone() -> None:
    choice = long_requests.GraphChoice(2, lambda num, heads: True)
    assert not choice.install(types.SimpleNamespace())
    assert not choice.install(types.SimpleNamespace(cudagraph_manager=types.SimpleNamespace(dispatch=lambda step: 1)))


@pytest.mark.parametrize(("task", "engine", "wanted"), [
    ("generate", {}, f"{attention.__name__}.DecodingWorker"),
    ("generate", {"worker_cls": None}, None),
    ("score", {}, f"{whole_steps.__name__}.PromptWorker"),
    ("embed", {}, f"{whole_steps.__name__}.PromptWorker"),
])  # fmt: skip
def test_jobs_on_nvidia_gpus_have_a_worker_of_their_own(
    task: str, engine: dict[str, Any], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = JobSpec.model_validate({
        "model": {"name": str(MODEL)}, "input": {"path": "x.jsonl", "text_column": "text"} if task == "score" else
        {"path": "x.jsonl", "prompt_column": "text"}, "output": {"path": "out"}, "task": task, "engine": engine,
    })  # fmt: skip
    assert "worker_cls" not in engine_arguments(task_of(spec), str(MODEL), str(MODEL), None)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    assert engine_arguments(task_of(spec), str(MODEL), str(MODEL), None).get("worker_cls") == wanted

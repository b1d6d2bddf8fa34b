"""The kernel for the attention of decoding, held against PyTorch's attention, and when it takes FlashAttention's place:
for whole steps, and for the requests that decode in steps that also read prompts.

Triton runs on GPUs alone. Here PyTorch takes the place of Triton's language.
"""

import dataclasses
import functools
import inspect
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
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from batchinf.engines.vllm.arguments import engine_arguments
from batchinf.engines.vllm.kernels import attention, comparison, long_requests, mixed_steps, whole_steps
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
    counts = changed.pop("counts", None)
    num_heads, num_key_heads = heads
    made: dict[str, Any] = {"dtype": torch.float32, **changed}
    shape = comparison.AttentionShape(num_heads=num_heads, num_key_heads=num_key_heads, head_size=head_size, **made)
    return comparison.example(lengths, shape, "cpu", counts)


def expected(given: dict[str, Any]) -> torch.Tensor:
    """PyTorch's attention over the tokens of each request, gathered from the cache. New tokens are a request's last."""
    group = given["q"].shape[1] // given["k"].shape[2]
    block_size = given["k"].shape[1]
    starts, rows = given["cu_seqlens_q"].tolist(), []
    for request, length in enumerate(given["seqused_k"].tolist()):
        new = slice(starts[request], starts[request + 1])
        if not length:
            rows.append(torch.zeros_like(given["out"][new]))
            continue
        at = torch.arange(length)
        blocks = given["block_table"][request][at // block_size].long()
        keys, values = (
            given[name][blocks, at % block_size].float().repeat_interleave(group, dim=1).transpose(0, 1)
            for name in "kv"
        )
        query = given["q"][new].float().transpose(0, 1)
        sees = at[None] <= torch.arange(length - query.shape[1], length)[:, None]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=sees, scale=given["softmax_scale"]
        )
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
    monkeypatch.setattr(attention, "_LEAST_IN_MIXED_STEP", 1)


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
    attend = attention.attention_of_decoding(lambda *arguments, **named: calls.append((arguments, named)))
    assert attend(**given) is given["out"]
    assert not calls
    changed = {**given, **change(given)}
    assert attend(**changed) is None
    assert len(calls) == 1
    attend(1, **given)
    assert len(calls) == 2


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
        CommonAttentionMetadata=CommonAttentionMetadata,
        FlashAttentionImpl=Impl,
        FlashAttentionMetadataBuilder=type("TheirBuilder", (Builder,), {"build": Builder.build}),
    )
    monkeypatch.setattr(attention, "optional", lambda _, name, cost: getattr(module, name, None))
    monkeypatch.setattr(attention.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(attention, "HAS_TRITON", True)
    for piece in (attention, mixed_steps):
        monkeypatch.setattr(piece, "is_right", functools.partial(piece.is_right, device="cpu"))
    # Other tests have all requests of the comparison.
    monkeypatch.setattr(attention, "_CHECKED_TIMES", 1)
    monkeypatch.setattr(mixed_steps, "_CHECKED_DECODES", (40, 33, 64))
    return module


SIZES: Any = (torch.bfloat16, 32, 400)


def layers(*impls: Any) -> dict[str, Any]:
    return {str(number): types.SimpleNamespace(impl=impl) for number, impl in enumerate(impls)}


def test_it_replaces_vllm_s_only_where_it_gives_the_same(
    backend: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = backend.flash_attn_varlen_func
    others = ((30.0, None, None), (0, torch.ones(4), None), (0, None, torch.ones(4)))
    for other in (Impl(head_size=96), Impl(version=2), Impl(num_heads=34), Impl(num_heads=5), object(),
                  Impl(window=(127, 0)), *(Impl(others=these) for these in others)):  # fmt: skip
        assert not attention.install(layers(other), *SIZES)
    assert not attention.install(layers(), *SIZES)
    assert backend.flash_attn_varlen_func is theirs
    compared: list[Any] = []
    with monkeypatch.context() as patch:
        check = attention.is_right
        patch.setattr(attention, "is_right", lambda *given: compared.append(given[1:]) or check(*given))
        assert attention.install(layers(Impl(), Impl(head_size=96), Impl(cache="fp8"), None), *SIZES)
    scales = (0.5, 0.75, 2.0)  # a layer without scales
    of = functools.partial(comparison.AttentionShape, num_heads=4, num_key_heads=2, head_size=64, scales=scales)
    dtype, block_size, longest = SIZES
    shapes = [of(dtype=dtype, block_size=block_size, is_fp8=is_fp8) for is_fp8 in (False, True)]
    assert sorted(compared, key=str) == [(shape, longest) for shape in shapes]
    assert backend.flash_attn_varlen_func.__wrapped__ is theirs
    build = backend.FlashAttentionMetadataBuilder.build
    assert build.__wrapped__ is Builder.build
    # A second engine in the process.
    assert attention.install(layers(Impl(window=None)), *SIZES)
    assert backend.flash_attn_varlen_func.__wrapped__ is theirs
    assert backend.FlashAttentionMetadataBuilder.build is build
    assert not capsys.readouterr().out
    backend.flash_attn_varlen_func = theirs

    monkeypatch.setattr(attention, "_LOG2_E", 1.0)
    assert not attention.install(layers(Impl()), *SIZES)
    assert backend.flash_attn_varlen_func is theirs
    assert "the kernel for decoding is not used: AssertionError" in capsys.readouterr().out
    monkeypatch.undo()


@pytest.mark.parametrize("missing", ["flash_attn_varlen_func", "FlashAttentionImpl", "Triton", "variance"])
def test_where_it_cannot_run_vllm_s_stays(missing: str, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = backend.flash_attn_varlen_func
    if missing == "Triton":
        monkeypatch.setattr(attention, "HAS_TRITON", False)
    elif missing == "variance":  # an engine in this process may have made vLLM keep the variables' values
        assert hasattr(attention.envs, "VLLM_BATCH_INVARIANT")
        monkeypatch.setattr(attention, "envs", types.SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    else:
        monkeypatch.setattr(attention, "optional", lambda _, name, cost: None if name == missing else theirs)
    assert not attention.install(layers(Impl()), *SIZES)
    assert backend.flash_attn_varlen_func is theirs


def test_without_vllm_s_builder_the_kernel_runs_whole_steps(backend: Any) -> None:
    del backend.FlashAttentionMetadataBuilder
    theirs = backend.flash_attn_varlen_func
    assert attention.install(layers(Impl()), *SIZES)
    assert backend.flash_attn_varlen_func.__wrapped__ is theirs


@pytest.mark.parametrize(("mode", "is_installed"), [
    (CUDAGraphMode.FULL_AND_PIECEWISE, True), (CUDAGraphMode.FULL_DECODE_ONLY, True), (CUDAGraphMode.PIECEWISE, True),
    (CUDAGraphMode.NONE, True), (CUDAGraphMode.FULL, False),
])  # fmt: skip
def test_it_is_installed_before_the_graphs_are_captured(
    mode: CUDAGraphMode, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with one kind of graph for all batches, which may be captured as if it were for decoding alone."""
    done: list[Any] = []
    monkeypatch.setattr(attention, "install", lambda *given: done.append(given))
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
    monkeypatch.setattr(attention, "install", lambda *given: installs)
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


# -- steps in which some requests decode and others read prompts -------------------------------------------------------


class Builder:
    """In place of vLLM's. A plan names the requests that it is for."""

    def __init__(self, *, speculates: bool = False, num_ranks: int = 1) -> None:
        self.num_heads_kv, self.dcp_world_size, self.use_full_cuda_graph = 2, num_ranks, True
        self.vllm_config = types.SimpleNamespace(speculative_config=object() if speculates else None)
        self.calls: list[int] = []

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        self.calls.append(common.num_reqs)
        assert common.num_actual_tokens == common.query_start_loc[-1] == len(common.slot_mapping)
        assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist()
        assert common.max_query_len == common.query_start_loc_cpu.diff().max()
        assert common.max_seq_len == common.seq_lens.max() == common.seq_lens_cpu_upper_bound.max()
        return types.SimpleNamespace(
            query_start_loc=common.query_start_loc,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            scheduler_metadata=common.seq_lens.tolist(),
            max_num_splits=32 if self.use_full_cuda_graph else 0,
        )


def step_of(lengths: tuple[int, ...], new: tuple[int, ...], **changed: Any) -> tuple[dict[str, Any], Any]:
    """Arguments of FlashAttention, and vLLM's description, of a step. new: its tokens of each request."""
    given = arguments(lengths, dtype=torch.bfloat16, **changed)
    starts = torch.tensor((0, *new)).cumsum(0).to(torch.int32)
    shape = (sum(new), *given["q"].shape[1:])
    given |= {"q": torch.randn(shape).to(given["q"].dtype), "out": torch.full(shape, 9.0, dtype=torch.bfloat16)}
    given |= {"cu_seqlens_q": starts, "max_seqlen_q": max(new)}
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=given["seqused_k"],
        seq_lens_cpu_upper_bound=given["seqused_k"].clone(), num_reqs=len(new), num_actual_tokens=sum(new),
        max_query_len=max(new), max_seq_len=max(lengths), block_table_tensor=given["block_table"],
        slot_mapping=torch.zeros(sum(new), dtype=torch.int64),
    )  # fmt: skip
    return given, common


def built(builder: Builder, common: Any, common_prefix_len: int = 0, least: int = 2) -> Any:
    """The step's metadata, if `least` requests that decode are enough for the kernel."""
    builder.__class__ = vllms_own(lambda num, heads: heads == 2 and num >= least)
    return builder.build(common_prefix_len, common)


def vllms_own(pays: Callable[[int, int], bool], **changed: Any) -> type:
    """vLLM's class, after the kernel is installed."""
    made = type("FlashAttentionMetadataBuilder", (Builder,), {"build": Builder.build, **changed})
    mixed_steps.install(made, pays)
    return made


def attend(given: dict[str, Any], metadata: Any) -> list[int]:
    """What vLLM's layers do with a step. Returns the number of requests in each call of FlashAttention."""
    calls = []

    def flash_attn_varlen_func(**named: Any) -> torch.Tensor:
        calls.append(len(named["seqused_k"]))
        assert named["scheduler_metadata"] == named["seqused_k"].tolist()  # the plan of these requests
        assert named["num_splits"] == (32 if len(named["seqused_k"]) == len(LENGTHS) else 0)
        assert named["max_seqlen_k"] == max(named["seqused_k"])
        assert named["max_seqlen_q"] == max(named["cu_seqlens_q"].diff())
        assert all(named[name].shape == (len(named["seqused_k"]), 2) for name in ("q_descale", "k_descale"))
        out: torch.Tensor = named["out"].copy_(expected(named))
        return out

    given = as_vllm_calls(given) | {
        "cu_seqlens_q": metadata.query_start_loc, "max_seqlen_q": metadata.max_query_len,
        "max_seqlen_k": metadata.max_seq_len, "scheduler_metadata": metadata.scheduler_metadata,
        "num_splits": metadata.max_num_splits,
    }  # fmt: skip
    assert attention.attention_of_decoding(flash_attn_varlen_func)(**given) is given["out"]
    return calls


LENGTHS, NEW = (5, 40, 17, 30, 12), (1, 1, 1, 9, 12)


@pytest.mark.usefixtures("any_batch")
@pytest.mark.parametrize("is_fp8", [False, True])
def test_requests_that_decode_beside_prompts_leave_flash_attention(is_fp8: bool) -> None:
    given, common = step_of(LENGTHS, NEW, is_fp8=is_fp8)
    builder = Builder()
    metadata = built(builder, common)
    assert builder.calls == [2, 5]
    assert builder.use_full_cuda_graph
    assert metadata.max_num_splits == 32  # of the whole step
    assert attend(given, metadata) == [2]
    torch.testing.assert_close(given["out"], expected(given), rtol=0.02, atol=0.02)


def test_fewer_requests_are_enough_beside_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_LEAST_IN_MIXED_STEP", 6)
    given, common = step_of(LENGTHS, NEW)
    assert attend(given, built(Builder(), common)) == [2]  # 3 requests with 2 heads of keys
    monkeypatch.setattr(attention, "_LEAST_IN_MIXED_STEP", 7)
    assert attend(given, built(Builder(), common)) == [5]
    assert [attention.pays_in_mixed_step(num, 2) for num in (3, 4)] == [False, True]


@pytest.mark.usefixtures("any_batch")
def test_prompts_have_the_plan_of_a_step_without_a_graph() -> None:
    """In a graph, vLLM lets FlashAttention take memory for 32 splits."""
    _, common = step_of(LENGTHS, NEW)
    step = mixed_steps.mixed_step_of({"cu_seqlens_q": built(Builder(), common).query_start_loc, "seqused_k": 1,
                                      "block_table": 1})  # fmt: skip
    assert step is not None
    assert (step.num_decodes, step.others.max_num_splits) == (3, 0)


@pytest.mark.usefixtures("any_batch")
def test_a_step_s_metadata_may_get_another_block_table() -> None:
    given, common = step_of(LENGTHS, NEW)
    metadata = built(Builder(), common)
    given["block_table"] = given["block_table"].flip(0).contiguous()
    attend(given, metadata)
    torch.testing.assert_close(given["out"], expected(given), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("any_batch")
def test_a_layer_that_the_kernel_cannot_do_has_the_whole_step() -> None:
    given, common = step_of(LENGTHS, NEW)
    metadata = built(Builder(), common)
    given["k"], given["v"] = strided(given["k"]), strided(given["v"])
    assert attend(given, metadata) == [5]
    torch.testing.assert_close(given["out"], expected(given), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("any_batch")
@pytest.mark.parametrize("has", ["seqused_k", "block_table"])
def test_attention_without_a_cache_is_left_to_vllm(has: str) -> None:
    """Layers of an encoder have the same metadata."""
    given, common = step_of(LENGTHS, NEW)
    starts = built(Builder(), common).query_start_loc
    calls: list[Any] = []
    attend = attention.attention_of_decoding(lambda **named: calls.append(named))
    attend(q=given["q"], out=given["out"], cu_seqlens_q=starts, **{has: given[has]})
    assert len(calls) == 1


@pytest.mark.usefixtures("any_batch")
@pytest.mark.parametrize(("new", "builder", "change"), [
    ((1, 1, 1, 1, 1), {}, {}),  # no prompts
    ((9, 1, 1, 1, 1), {}, {}),  # those that decode are not the first
    ((1, 9, 9, 9, 9), {}, {}),  # too few
    (NEW, {"speculates": True}, {}),
    (NEW, {"num_ranks": 2}, {}),
    (NEW, {}, {"causal": False}),
    (NEW, {}, {"causal": torch.ones(5)}),
    (NEW, {}, {"mm_req_doc_ranges": {0: [(0, 2)]}}),
])  # fmt: skip
def test_other_steps_are_left_to_vllm(new: tuple[int, ...], builder: dict[str, Any], change: dict[str, Any]) -> None:
    _, common = step_of((20, 40, 17, 30, 12), new)
    own = Builder(**builder)
    metadata = built(own, dataclasses.replace(common, **change))
    assert own.calls == [5]
    assert metadata.query_start_loc is common.query_start_loc


def test_a_step_with_a_common_prefix_is_left_to_vllm() -> None:
    _, common = step_of(LENGTHS, NEW)
    builder = Builder()
    assert built(builder, common, 16).query_start_loc is common.query_start_loc
    assert builder.calls == [5]


@pytest.mark.parametrize("new", [NEW, (1,) * 5])
@pytest.mark.parametrize("known", [None, [20, 40, 17, 30]])
def test_a_step_whose_lengths_the_host_does_not_know_is_left_to_vllm(
    known: list[int] | None, new: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 0.26, attention in chunks has more batches than requests whose lengths are given."""
    monkeypatch.setattr(long_requests, "_PARTS_OF_LONGEST", 2**40)
    _, common = step_of(LENGTHS, new)
    made = vllms_own(lambda num, heads: True, build=lambda *given: given)
    own = made()
    changed = dataclasses.replace(common, seq_lens_cpu_upper_bound=None if known is None else torch.tensor(known))
    assert own.build(0, changed) == (own, 0, changed)


@pytest.mark.parametrize(("longest", "calls"), [(62, [2, 5]), (63, [5])])
def test_a_step_with_one_long_request_is_left_to_vllm(
    longest: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single program would read its tokens, one after the other."""
    monkeypatch.setattr(long_requests, "_PARTS_OF_LONGEST", 4)
    _, common = step_of((longest, 40, 22, 900, 12), NEW)
    builder = Builder()
    built(builder, common)
    assert builder.calls == calls


@pytest.mark.usefixtures("any_batch")
@pytest.mark.parametrize(("longest", "calls"), [(62, []), (63, [5])])
def test_a_step_that_only_decodes_is_left_to_vllm_if_one_request_is_long(
    longest: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that run outside of the graphs of decoding."""
    monkeypatch.setattr(long_requests, "_PARTS_OF_LONGEST", 4)
    given, common = step_of((longest, 20, 20, 20, 2), (1,) * 5)
    assert attend(given, built(Builder(), common)) == calls
    torch.testing.assert_close(given["out"], expected(given), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("new", "prefix", "parts"), [(NEW, 0, 1), ((1,) * 5, 16, 2**40)])
def test_all_that_vllm_gives_its_builder_arrives(
    new: tuple[int, ...], prefix: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_requests, "_PARTS_OF_LONGEST", parts)
    calls: list[Any] = []

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, *more: Any, **named: Any) -> Any:
        calls.append((common_prefix_len, more, named))
        return Builder.build(self, common_prefix_len, common_attn_metadata)

    _, common = step_of(LENGTHS, new)
    made = vllms_own(lambda num, heads: True, build=build)()
    for more, named in (((True,), {}), ((), {"fast_build": True})):
        calls.clear()
        assert made.build(prefix, common, *more, **named).query_start_loc is not common.query_start_loc
        assert calls == [(prefix, more, named)] * (2 if new == NEW else 1)


@pytest.mark.parametrize("new", [NEW, (1,) * 5])
def test_builders_for_other_kinds_of_attention_are_left_to_vllm(
    new: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_requests, "_PARTS_OF_LONGEST", 1 if new == NEW else 2**40)
    _, common = step_of(LENGTHS, new)
    own = type("ChunkedLocalAttentionBuilder", (vllms_own(lambda num, heads: True),), {})()
    assert own.build(0, common).query_start_loc is common.query_start_loc
    assert own.calls == [5]


def test_builders_share_the_memory_of_a_step_but_not_its_plan() -> None:
    _, common = step_of(LENGTHS, NEW)
    one, other = built(Builder(), common), built(Builder(), common, least=9)
    assert one.query_start_loc.data_ptr() == other.query_start_loc.data_ptr()
    given = {"seqused_k": 1, "block_table": 1}
    assert mixed_steps.mixed_step_of({**given, "cu_seqlens_q": one.query_start_loc}) is not None
    assert mixed_steps.mixed_step_of({**given, "cu_seqlens_q": other.query_start_loc}) is None


def test_the_installed_vllm_has_what_mixed_steps_need() -> None:
    theirs = flash_attn.FlashAttentionMetadataBuilder
    assert list(inspect.signature(theirs.build).parameters)[1:3] == ["common_prefix_len", "common_attn_metadata"]
    source = inspect.getsource(theirs)
    for name in ("num_heads_kv", "dcp_world_size", "use_full_cuda_graph"):
        assert f"self.{name} = " in source or f"self.{name}, " in source
    assert "if self.use_full_cuda_graph and scheduler_metadata is not None:" in source
    assert "self.vllm_config = vllm_config" in inspect.getsource(AttentionMetadataBuilder)
    known = {field.name for field in dataclasses.fields(flash_attn.FlashAttentionMetadata)}
    assert {"query_start_loc", "max_query_len", "max_seq_len", "scheduler_metadata", "max_num_splits"} <= known


def test_a_builder_that_fails_has_its_graphs_back() -> None:
    _, common = step_of(LENGTHS, NEW)

    def fails(*_: Any) -> None:
        raise ValueError("no")

    builder = vllms_own(lambda num, heads: True, build=fails)()
    with pytest.raises(ValueError, match="no"):
        builder.build(0, common)
    assert builder.use_full_cuda_graph

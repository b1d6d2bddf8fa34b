"""CUDA graphs for whole steps of prompts: FlashAttention's plan is for requests of any lengths."""

import dataclasses
import inspect
import types
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn

from batchinf.engines.vllm.kernels import whole_steps
from batchinf.spec.job import WHOLE_STEPS


class Builder:
    """In place of vLLM's: a plan is the lengths for which FlashAttention chooses its tiles."""

    def __init__(self, mode: CUDAGraphMode) -> None:
        self.vllm_config = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(cudagraph_mode=mode),
            scheduler_config=types.SimpleNamespace(max_num_batched_tokens=16384),
            model_config=types.SimpleNamespace(max_model_len=4096),
        )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        return common.max_query_len, common.max_seq_len, common.seq_lens.tolist(), common_prefix_len, fast_build


class Layer:
    """In place of vLLM's AttentionLayerBase, of which layers with a state are too."""

    def __init__(self, impl: Any = None) -> None:
        if impl is not None:
            self.impl = impl


class Impl:
    vllm_flash_attn_version = 3
    attn_type = "decoder"
    num_heads, num_kv_heads, head_size = 4, 2, 8
    kv_cache_dtype = "fp8_e4m3"


class OtherImpl(Impl):
    pass


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module for FlashAttention."""
    module = types.SimpleNamespace(
        FlashAttentionImpl=Impl,
        FlashAttentionMetadataBuilder=type("TheirBuilder", (Builder,), {"build": Builder.build}),
        CUDAGraphMode=CUDAGraphMode,
        flash_attn_varlen_func=lambda **named: None,
    )
    monkeypatch.setattr(whole_steps, "flash_attn", module)
    monkeypatch.setattr(whole_steps, "AttentionLayerBase", Layer)
    monkeypatch.setattr(whole_steps, "is_right", lambda *given: True)
    return module


def step(*lengths: int) -> Any:
    """vLLM's description of a step of whole prompts."""
    starts = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=seq_lens, num_reqs=len(lengths),
        num_actual_tokens=sum(lengths), max_query_len=max(lengths), max_seq_len=max(lengths),
        block_table_tensor=torch.zeros((len(lengths), 1), dtype=torch.int32),
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
    )  # fmt: skip


def worker_of(
    mode: CUDAGraphMode, layers: Any, monkeypatch: pytest.MonkeyPatch, *, is_asked: bool = True
) -> CUDAGraphMode:
    """The kind of graphs after our worker has loaded the model."""
    worker: Any = whole_steps.PromptWorker.__new__(whole_steps.PromptWorker)
    worker.vllm_config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(static_forward_context=layers, cudagraph_mode=mode),
        additional_config={WHOLE_STEPS: True} if is_asked else {},
        cache_config=types.SimpleNamespace(block_size=16),
        model_config=types.SimpleNamespace(dtype=torch.bfloat16),
    )
    monkeypatch.setattr(whole_steps.Worker, "load_model", lambda self, **named: named, raising=False)
    assert worker.load_model(load_dummy_weights=True) == {"load_dummy_weights": True}
    chosen: CUDAGraphMode = worker.vllm_config.compilation_config.cudagraph_mode
    return chosen


PLAIN = {"0": Layer(Impl()), "experts": types.SimpleNamespace()}
OTHER = {**PLAIN, "1": Layer(OtherImpl())}
WITH_STATE = {**PLAIN, "1": Layer()}


def test_all_steps_with_whole_graphs_have_the_plan_of_the_longest(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker_of(CUDAGraphMode.FULL, PLAIN, monkeypatch) == CUDAGraphMode.FULL
    builder = backend.FlashAttentionMetadataBuilder(CUDAGraphMode.FULL)
    assert builder.build(0, step(1, 1)) == (16384, 4096, [1, 1], 0, False)
    common = step(700, 30, 2)
    assert builder.build(0, common, fast_build=True) == (16384, 4096, [700, 30, 2], 0, True)
    assert (common.max_query_len, common.max_seq_len) == (700, 700)  # vLLM's other builders read it


@pytest.mark.parametrize(
    ("mode", "is_asked"),
    [
        (CUDAGraphMode.PIECEWISE, False),
        (CUDAGraphMode.FULL_AND_PIECEWISE, True),
        (CUDAGraphMode.NONE, True),
        (CUDAGraphMode.NONE, False),
    ],
)
def test_other_graphs_keep_vllm_s_plan(
    mode: CUDAGraphMode, is_asked: bool, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = backend.FlashAttentionMetadataBuilder.build
    assert worker_of(mode, PLAIN, monkeypatch, is_asked=is_asked) == mode
    assert backend.FlashAttentionMetadataBuilder.build is theirs
    whole_steps.install()  # as another engine of this process would
    assert backend.FlashAttentionMetadataBuilder(mode).build(0, step(5, 3)) == (5, 5, [5, 3], 0, False)


def test_models_that_make_vectors_have_them_if_asked(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has changed FULL to PIECEWISE for them."""
    assert worker_of(CUDAGraphMode.PIECEWISE, PLAIN, monkeypatch) == CUDAGraphMode.FULL
    assert worker_of(CUDAGraphMode.PIECEWISE, OTHER, monkeypatch) == CUDAGraphMode.PIECEWISE


def test_a_capture_reads_no_further_than_the_table_of_blocks(backend: Any) -> None:
    """vLLM's V1 runner captures a step of 16,384 tokens as if each request had 16,384."""
    whole_steps.install()
    common = step(16384, 30, 4096)
    *_, lengths, _, _ = backend.FlashAttentionMetadataBuilder(CUDAGraphMode.FULL).build(0, common)
    assert lengths == [4096, 30, 4096]
    assert common.seq_lens.tolist() == lengths  # the memory that the graph reads
    pieces = step(16384)
    backend.FlashAttentionMetadataBuilder(CUDAGraphMode.PIECEWISE).build(0, pieces)
    assert pieces.seq_lens.tolist() == [16384]


def test_a_user_s_own_graphs_stay(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_of(CUDAGraphMode.FULL, OTHER, monkeypatch, is_asked=False) == CUDAGraphMode.FULL
    assert worker_of(CUDAGraphMode.FULL, PLAIN, monkeypatch, is_asked=False) == CUDAGraphMode.FULL
    builder = backend.FlashAttentionMetadataBuilder(CUDAGraphMode.FULL)
    assert builder.build(0, step(3)) == (16384, 4096, [3], 0, False)


def test_it_is_installed_once(backend: Any) -> None:
    whole_steps.install()
    ours = backend.FlashAttentionMetadataBuilder.build
    whole_steps.install()
    assert backend.FlashAttentionMetadataBuilder.build is ours


@pytest.mark.parametrize("layers", [{}, {"experts": types.SimpleNamespace()}, OTHER, WITH_STATE])
def test_other_attention_has_graphs_of_pieces(layers: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_of(CUDAGraphMode.FULL, layers, monkeypatch) == CUDAGraphMode.PIECEWISE


def test_so_have_builds_without_flash_attention(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del backend.flash_attn_varlen_func
    assert worker_of(CUDAGraphMode.FULL, PLAIN, monkeypatch) == CUDAGraphMode.PIECEWISE


def test_a_wrong_plan_is_not_used(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(whole_steps, "is_right", lambda *given: compared.append(given[3:]))
    theirs = backend.FlashAttentionMetadataBuilder.build
    assert worker_of(CUDAGraphMode.FULL, PLAIN, monkeypatch) == CUDAGraphMode.PIECEWISE
    assert backend.FlashAttentionMetadataBuilder.build is theirs
    [[shape]] = compared
    assert (shape.num_heads, shape.num_key_heads, shape.head_size, shape.is_fp8) == (4, 2, 8, True)


def test_an_older_flash_attention_has_them_too(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Impl, "vllm_flash_attn_version", 2)
    assert worker_of(CUDAGraphMode.FULL, PLAIN, monkeypatch) == CUDAGraphMode.PIECEWISE


def test_attention_without_a_cache_has_graphs_of_pieces(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Impl, "attn_type", "encoder_only")
    assert worker_of(CUDAGraphMode.FULL, PLAIN, monkeypatch) == CUDAGraphMode.PIECEWISE


def test_the_installed_vllm_has_what_whole_steps_need(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = flash_attn.FlashAttentionMetadataBuilder
    monkeypatch.setattr(theirs, "build", theirs.build)  # restored after the test
    whole_steps.install()
    assert issubclass(theirs, AttentionMetadataBuilder)
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    assert {"max_query_len", "max_seq_len"} <= known
    assert AttentionType.DECODER == "decoder" and issubclass(Attention, AttentionLayerBase)
    assert issubclass(MambaBase, AttentionLayerBase)
    source = inspect.getsource(flash_attn.FlashAttentionImpl)
    assert "self.vllm_flash_attn_version" in source and "self.attn_type" in source
    assert hasattr(whole_steps.Worker, "load_model")

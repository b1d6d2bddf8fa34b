"""What a model needs, by its config and its weight files; what fits on a device."""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch  # noqa: F401  # with these two here, models are counted in this process
import transformers  # noqa: F401
from safetensors.numpy import save_file

import jobs
from batchinf.model import answers, parameters
from batchinf.model.cache import KvCache, LayerCache
from batchinf.model.memory import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    GIB,
    Fit,
    fit_of,
    on_cpu,
)
from batchinf.model.model import Model
from batchinf.model.parameters import count_parameters
from batchinf.model.weights import Weights
from batchinf.spec.job import JobSpec, ModelSpec
from benchmarks.shapes import SHAPES

H100_BYTES = 85_017_493_504  # 79.2 GiB, as NVML gives it
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL_8X7B = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_8B = SHAPES["llama-3.1-8b"]
ONE_LAYER = KvCache(((LayerCache("full", 1, 2, 2),),), "bfloat16")


def model_of(config: dict[str, Any], path: str = "org/name") -> Model:
    return Model("name", path, None, "", config, {}, False, config.get("max_position_embeddings"), None, path)


def needs_of(config: dict[str, Any], path: str = "org/name", kv_cache_dtype: str = "auto", **model: Any) -> Fit:
    spec = {"model": {"name": "m", **model}, "input": {"path": "x"}, "output": {"path": "y"}}
    spec["engine"] = {"kv_cache_dtype": kv_cache_dtype}
    return fit_of(model_of(config, path), JobSpec.model_validate(spec), None)


# The number of parameters as the models' safetensors indices sum up to.
@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (LLAMA_8B, 8_030_261_248),
        (SHAPES["llama-3.2-1b"], 1_235_814_400),
        (SHAPES["llama-3.3-70b"], 70_553_706_496),
        (SHAPES["qwen3-8b"], 8_190_735_360),
        (SHAPES["qwen3-32b"], 32_762_123_264),
        (QWEN3_30B_A3B, 30_532_122_624),
        (MIXTRAL_8X7B, 46_702_792_704),
    ],
)
def test_parameters_of_models_as_published(config: dict[str, Any], num_parameters: int) -> None:
    assert sum(tensor.num_parameters for tensor in count_parameters(config).tensors) == num_parameters
    assert needs_of(config).weight_bytes == 2 * num_parameters
    assert needs_of(config, dtype="float32").weight_bytes == 4 * num_parameters


def test_the_sample_model_is_counted_alike_by_config_and_by_file() -> None:
    config = json.loads((jobs.MODEL / "config.json").read_text())
    by_file, by_config = needs_of(config, str(jobs.MODEL)), needs_of(config, str(jobs.MODEL), load_format="dummy")
    assert by_file.weight_bytes == by_config.weight_bytes
    assert by_file.weight_bytes is not None
    # Against the file itself: in 16 bits, and little but tensors is in it.
    assert 0 <= (jobs.MODEL / "model.safetensors").stat().st_size - by_file.weight_bytes < 100_000


@pytest.mark.parametrize(
    ("config", "tensor", "pipeline", "expected"),
    [
        (LLAMA_8B, 1, 1, 131_072),
        (LLAMA_8B, 2, 1, 65_536),
        (LLAMA_8B, 16, 1, 16_384),  # eight heads on sixteen ranks: each holds one
        (LLAMA_8B, 1, 2, 65_536),
        (SHAPES["llama-3.3-70b"], 1, 1, 327_680),
        (SHAPES["llama-3.3-70b"], 4, 1, 81_920),
        (SHAPES["qwen3-8b"], 1, 1, 147_456),
        (SHAPES["qwen3-8b"], 1, 8, 5 * 4096),  # 36 layers on eight stages: the fullest has five
        (DEEPSEEK_V3, 1, 1, 70_272),
        (DEEPSEEK_V3, 8, 1, 70_272),  # the compressed row is on every rank
    ],
)
def test_bytes_of_a_cached_token(config: dict[str, Any], tensor: int, pipeline: int, expected: int) -> None:
    kv_cache = needs_of(config).kv_cache
    assert kv_cache is not None
    assert kv_cache.sequence_bytes(1, tensor, pipeline) == expected


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "expected"),
    [("auto", "auto", 131_072), ("fp8", "auto", 65_536), ("fp8_e5m2", "float32", 65_536), ("auto", "float32", 262_144),
     ("bfloat16", "float32", 131_072)],
)  # fmt: skip
def test_the_type_of_the_cache_counts(kv_cache_dtype: str, dtype: str, expected: int) -> None:
    kv_cache = needs_of(LLAMA_8B, kv_cache_dtype=kv_cache_dtype, dtype=dtype).kv_cache
    assert kv_cache is not None
    assert kv_cache.bytes_per_token() == expected


@pytest.mark.parametrize(
    ("changes", "kv_cache_dtype"),
    [
        ({"layer_types": ["full_attention", "a new kind"], "num_hidden_layers": 2}, "auto"),
        ({"is_encoder_decoder": True}, "auto"),
        ({"mamba_d_state": 128}, "auto"),
        ({"num_key_value_heads": [8, 4]}, "auto"),
        ({"num_hidden_layers": None}, "auto"),
        ({"quantization_config": {"quant_method": "awq", "kv_cache_scheme": {"num_bits": 4}}}, "auto"),
        ({}, "nvfp4"),
        ({"model_type": "a new one"}, "auto"),
    ],
)
def test_a_cache_of_another_kind_is_unknown(changes: dict[str, Any], kv_cache_dtype: str) -> None:
    needs = needs_of({**LLAMA_8B, **changes}, kv_cache_dtype=kv_cache_dtype)
    assert needs.kv_cache is None
    assert any(why.startswith("KV cache: ") for why in needs.unknown)


def test_a_window_that_is_named_and_not_used_counts_for_nothing() -> None:
    config = {**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False}
    assert needs_of(config).kv_cache == needs_of(LLAMA_8B).kv_cache


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({"model_type": "a new one"}, {}),
        ({"quantization_config": {"quant_method": "a new one"}}, {}),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, {}),
        ({}, {"quantization": "quark"}),
    ],
)
def test_weights_that_cannot_be_counted_are_unknown(changes: dict[str, Any], model: dict[str, Any]) -> None:
    needs = needs_of({**LLAMA_8B, **changes}, **model)
    assert needs.weight_bytes is None
    assert any(why.startswith("weights: ") for why in needs.unknown)


def test_quantization_on_loading_halves_the_matrices_alone() -> None:
    matrices = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    others = 8_030_261_248 - matrices
    scales = 32 * 7 * 4
    assert needs_of(LLAMA_8B, quantization="fp8").weight_bytes == matrices + scales + 2 * others


def test_weights_by_their_files(tmp_path: pathlib.Path) -> None:
    layer, head = np.zeros((8, 16), np.float32), np.zeros((32, 8), np.float32)
    tensors = {
        "model.layers.0.mlp.up_proj.weight": layer,
        "model.norm.weight": head[:, 0].copy(),
        "lm_head.weight": head,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    path = str(tmp_path)
    assert needs_of({}, path).weight_bytes == 2 * (128 + 32 + 256)
    assert needs_of({}, path, dtype="float32").weight_bytes == 4 * (128 + 32 + 256)
    assert needs_of({}, path, quantization="fp8").weight_bytes == 128 + 4 + 2 * (32 + 256)
    assert needs_of({"tie_word_embeddings": True}, path).weight_bytes == 2 * (128 + 32)
    # Quantized already: as it is stored.
    assert needs_of({"quantization_config": {"quant_method": "x"}}, path).weight_bytes == 4 * (128 + 32 + 256)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert needs_of({}, path).weight_bytes is None


def test_experts_in_one_tensor_by_their_files(tmp_path: pathlib.Path) -> None:
    path, layer = str(tmp_path), "model.layers.0.mlp."
    tensors = {layer + "experts.gate_up_proj": np.zeros((4, 8, 16), np.float32),
               layer + "router.weight": np.zeros((4, 8), np.float32)}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    needs = needs_of({}, path)
    assert needs.parameters == {"expert": 4 * 8 * 16, "other": 4 * 8}
    assert needs.weight_bytes == 2 * (4 * 8 * 16 + 4 * 8)
    by_fp8 = needs_of({}, path, quantization="fp8").weight_bytes
    assert by_fp8 is not None and 4 * 8 * 16 < by_fp8 - 2 * 4 * 8 < 1.1 * 4 * 8 * 16
    # Two numbers of 4 bits in each byte, and a scale for 32 of them.
    blocks = {layer + "experts.gate_up_proj_blocks": np.zeros((4, 8, 2, 16), np.uint8),
              layer + "experts.gate_up_proj_scales": np.zeros((4, 8, 2), np.uint8)}  # fmt: skip
    save_file(blocks, tmp_path / "model.safetensors")
    needs = needs_of({"quantization_config": {"quant_method": "mxfp4"}}, path)
    assert needs.parameters == {"expert": 4 * 8 * 64, "other": 4 * 8 * 2}
    assert needs.weight_bytes == 4 * 8 * 2 * 16 + 4 * 8 * 2


def fit(name: str = "llama-3.1-8b", **fields: Any) -> Fit:
    return replace(needs_of(SHAPES[name]), **{"device_bytes": H100_BYTES, "max_model_len": 131_072, **fields})


@pytest.mark.parametrize("length", [2048, 32_768, 131_072])
@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.3-70b", "llama-3.2-1b"])
def test_what_fits_is_what_can_be_added_up(name: str, degrees: tuple[int, int], length: int) -> None:
    found = fit(name, max_model_len=length, tensor_parallel_size=degrees[0], pipeline_parallel_size=degrees[1])
    assert found.weight_bytes is not None
    weights = found.weight_bytes
    kv_cache = needs_of(SHAPES[name]).kv_cache
    assert kv_cache is not None
    each = kv_cache.sequence_bytes(1, *degrees)
    for share in (0.2, 0.5, 0.9):
        pool, tokens = H100_BYTES * share, found.most_tokens(share)
        assert tokens is not None
        if tokens:
            assert weights + tokens * each <= pool < weights + (tokens + 1) * each + 2
        else:
            assert weights + each > pool - 2
        assert found.fits(share) == (found.least_utilization() <= share)  # type: ignore[operator]
    # The least share is given in whole hundredths.
    least = found.least_utilization()
    assert least is not None
    assert (least - 0.01) * H100_BYTES < weights + length * each <= least * H100_BYTES + 2


def test_known_models_on_known_devices() -> None:
    assert fit().fits(0.92) is True
    assert fit("llama-3.3-70b").fits(0.92) is False
    assert fit("llama-3.3-70b", tensor_parallel_size=2).fits(0.92) is False
    assert fit("llama-3.3-70b", tensor_parallel_size=4).fits(0.92) is True
    assert fit(device_bytes=24 * GIB).fits(0.92) is False
    assert fit(device_bytes=24 * GIB, max_model_len=8192).fits(0.92) is True


@pytest.mark.parametrize(("weights", "kv_cache"), [(None, ONE_LAYER), (Weights.of_total(10), None)])
def test_where_something_is_unknown_nothing_is_claimed(weights: Weights | None, kv_cache: KvCache | None) -> None:
    found = Fit(weights, kv_cache, device_bytes=H100_BYTES, max_model_len=1000)
    assert (found.most_tokens(0.9), found.least_utilization(), found.fits(0.9)) == (None,) * 3
    assert Fit(Weights.of_total(10), ONE_LAYER, max_model_len=10).fits(0.9) is None


def test_the_length_is_the_engines() -> None:
    spec = {"model": "m", "input": {"path": "x"}, "output": {"path": "y"}}
    model = model_of(LLAMA_8B)
    assert fit_of(model, JobSpec.model_validate(spec), None).max_model_len == 131_072
    assert fit_of(model, JobSpec.model_validate({**spec, "engine": {"max_model_len": 4096}}), 1).max_model_len == 4096
    assert fit_of(model, JobSpec.model_validate({**spec, "engine": {"max_model_len": -1}}), 1).max_model_len == 131_072


def test_the_default_share_is_vllms() -> None:
    cache = pytest.importorskip("vllm.config.cache")
    assert cache.CacheConfig().gpu_memory_utilization == DEFAULT_GPU_MEMORY_UTILIZATION


def test_a_cache_on_a_processor_is_float32() -> None:
    for dtype, expected in (("auto", "float32"), ("bfloat16", "bfloat16")):
        spec = on_cpu(ModelSpec(name="m", dtype=dtype))
        kv_cache = needs_of(LLAMA_8B, dtype=spec.dtype).kv_cache
        assert kv_cache is not None
        assert kv_cache.dtype == expected


def test_equal_configs_are_counted_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting takes 5 s in a process of its own. A model's own code is read from its folder, and may change there."""
    asked: list[Any] = []

    @contextlib.contextmanager
    def answering(module: str, question: dict[str, Any], *rest: Any) -> Iterator[SimpleNamespace]:
        asked.append(question["folder"])
        yield SimpleNamespace(answer=lambda: {"config": question["config"], "tensors": []})

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(parameters, "sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(answers, "Question", answering)
    for folder in ("a", "b"):
        assert parameters.described({"x": 1}, folder=folder).config == {"x": 1}
    parameters.described({"x": 2}, folder="a")
    for folder in ("a", "a"):
        parameters.described({"x": 1}, trust_remote_code=True, folder=folder)
    assert asked == [None, None, "a", "a"]

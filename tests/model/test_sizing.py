"""Published figures of weights, caches and degrees, and what they really are. docs/memory.md shows them."""

import dataclasses
from typing import Any

import pytest
import torch  # noqa: F401  # with these two here, models are counted in this process
import transformers  # noqa: F401
from model_configs import MIXTRAL_8X7B

from batchinf.model.cache import KvCache
from batchinf.model.memory import DEFAULT_GPU_MEMORY_UTILIZATION, GIB, Fit, fit_of
from batchinf.model.model import Model
from batchinf.model.parameters import count_parameters
from batchinf.planning.degrees import Degrees, Machine, best, options, reason_for, that_fit
from batchinf.planning.gpus import gpu_like, gpu_named, why_not
from batchinf.planning.throughput import Workload
from batchinf.spec.job import JobSpec
from benchmarks.shapes import SHAPES

LLAMA_8B, LLAMA_70B = SHAPES["llama-3.1-8b"], SHAPES["llama-3.3-70b"]
LLAMA_405B = {**LLAMA_70B, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
              "num_attention_heads": 128, "num_key_value_heads": 8}  # fmt: skip
QWEN_72B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064,
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip


def gemma(num_layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    text = {
        "model_type": "gemma3_text", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": num_layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "sliding_window": 1024,
    }  # fmt: skip
    return {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}


GEMMA = {
    "4B": gemma(34, 2560, 10240, 8, 4, 256),
    "12B": gemma(48, 3840, 15360, 16, 8, 256),
    "27B": gemma(62, 5376, 21504, 32, 16, 128),
}
GB = 10**9


def needs(config: dict[str, Any], quantization: str | None = None, kv_cache_dtype: str = "auto") -> Fit:
    model = Model("m", "org/m", None, "", config, {}, False, None, None, "org/m")
    sections = {"model": {"name": "m", "load_format": "dummy", "quantization": quantization}, "input": {"path": "x"}}
    spec = {**sections, "output": {"path": "y"}, "engine": {"kv_cache_dtype": kv_cache_dtype}}
    return fit_of(model, JobSpec.model_validate(spec), None)


def weight_gb(config: dict[str, Any], quantization: str | None = None) -> float:
    found = needs(config, quantization).weight_bytes
    assert found is not None
    return found / GB


def cache_of(config: dict[str, Any]) -> KvCache:
    found = needs(config).kv_cache
    assert found is not None
    return found


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "published", "exact", "exact_fp8"),
    [
        (LLAMA_8B, (16, 8, 4), 16.06, 9.08),
        (LLAMA_70B, (140, 70, 35), 141.11, 72.66),
        (LLAMA_405B, (810, 405, 203), 811.71, 410.06),
    ],
)
def test_weights_of_llama(
    config: dict[str, Any], published: tuple[int, int, int], exact: float, exact_fp8: float
) -> None:
    num_parameters = sum(tensor.num_parameters for tensor in count_parameters(config).tensors)
    # What is published is the number of parameters times the bits of the layers' matrices.
    for bits, figure in zip((16, 8, 4), published, strict=True):
        assert num_parameters * bits / 8 / GB == pytest.approx(figure, rel=0.015)
    assert weight_gb(config) == pytest.approx(exact, abs=0.006)
    assert weight_gb(config) * GB == 2 * num_parameters
    assert weight_gb(config, "fp8") == pytest.approx(exact_fp8, abs=0.006)


def test_weights_of_others() -> None:
    assert weight_gb(QWEN_72B) == pytest.approx(145.41, abs=0.006)
    assert weight_gb(QWEN_72B) == pytest.approx(144, rel=0.015)
    assert weight_gb(MIXTRAL_8X7B) == pytest.approx(93.41, abs=0.006)
    assert weight_gb(MIXTRAL_8X7B) * GB / GIB == pytest.approx(86.99, abs=0.006)


# The files of these checkpoints on the hub have these sizes. What is published for them is up to 9 % off.
@pytest.mark.parametrize(
    ("config", "published", "files"), [(QWEN_72B, 38, 41.6), (LLAMA_70B, 37, 39.77), (MIXTRAL_8X7B, 26, 24.65)]
)
def test_four_bits_have_scales_and_embeddings_of_sixteen(
    config: dict[str, Any], published: float, files: float
) -> None:
    quantized = {**config, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    assert weight_gb(quantized) == pytest.approx(files, rel=0.005)
    assert weight_gb(quantized) == weight_gb(config, "awq")
    assert weight_gb(quantized) == pytest.approx(published, rel=0.1)


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "gib"),
    [
        (LLAMA_8B, 15.625),
        (LLAMA_70B, 39.0625),
        (LLAMA_405B, 61.52),
        ({**LLAMA_405B, "num_key_value_heads": 16}, 123.05),  # what is published
    ],
)
def test_cache_of_one_request_of_128_000_tokens(config: dict[str, Any], gib: float) -> None:
    assert cache_of(config).sequence_bytes(128_000) / GIB == pytest.approx(gib, abs=0.006)


@pytest.mark.parametrize(
    ("name", "gb"),
    [("4B", (0.206, 0.289, 0.793, 2.81)), ("12B", (0.604, 0.872, 2.48, 8.93)), ("27B", (0.772, 1.11, 3.12, 11.2))],
)
def test_caches_of_gemma_3(name: str, gb: tuple[float, ...]) -> None:
    cache = cache_of(GEMMA[name])
    for tokens, figure in zip((4, 8, 32, 128), gb, strict=True):
        assert cache.sequence_bytes(tokens * 1024) / GB == pytest.approx(figure, rel=0.006)


def rule_of_thumb(config: dict[str, Any], tokens: int, item_bytes: float = 2) -> float:
    """As published, in GB: every layer keeps the whole width of every token."""
    text = config["text_config"]
    return float(2 * text["num_hidden_layers"] * text["hidden_size"] * item_bytes * tokens / GB)


@pytest.mark.parametrize(
    ("name", "by_formula", "published", "published_128k"),
    [("4B", 1.43, 1.4, 44.8), ("12B", 3.02, 3.1, 99.2), ("27B", 5.46, 5.5, 176)],
)
def test_the_rule_of_thumb_for_gemma_3(name: str, by_formula: float, published: float, published_128k: float) -> None:
    config = GEMMA[name]
    assert rule_of_thumb(config, 4096) == pytest.approx(by_formula, abs=0.006)
    assert rule_of_thumb(config, 4096) == pytest.approx(published, rel=0.027)
    assert published * 32 == pytest.approx(published_128k, rel=0.001)
    real = cache_of(config).sequence_bytes(131_072) / GB
    assert 10 < rule_of_thumb(config, 131_072) / real < 17


@pytest.mark.parametrize(
    ("name", "published", "published_int4", "exact"),
    [("4B", 9.6, 2.4, 7.76), ("12B", 28.8, 7.2, 23.53), ("27B", 64.8, 16.2, 54.02)],
)
def test_the_rule_of_thumb_for_the_weights_of_gemma_3(
    name: str, published: float, published_int4: float, exact: float
) -> None:
    nominal = int(name.removesuffix("B"))
    assert (nominal * 2 * 1.2, nominal * 0.5 * 1.2) == pytest.approx((published, published_int4))
    assert sum(needs(GEMMA[name]).parameters.values()) * 2 / GB == pytest.approx(exact, abs=0.006)


def test_the_published_number_of_cards_adds_gb_to_gib() -> None:
    for config, published in ((LLAMA_8B, 1), (LLAMA_70B, 2.24), (LLAMA_405B, 11.66)):
        cache = cache_of({**config, "num_key_value_heads": 16} if config is LLAMA_405B else config)
        nominal = {4096: 16, 8192: 140, 16384: 810}[config["hidden_size"]]
        cards = (nominal + cache.sequence_bytes(128_000) / GIB) / 80
        assert max(1, cards) == pytest.approx(published, abs=0.006)


def test_int4_weights_do_not_shrink_the_cache() -> None:
    assert needs(GEMMA["4B"], "awq").kv_cache == needs(GEMMA["4B"]).kv_cache


# -- degrees -----------------------------------------------------------------------------------------------------------


def fit(config: dict[str, Any], gpu: str, quantization: str | None = None) -> Fit:
    device = gpu_named(gpu)
    return dataclasses.replace(needs(config, quantization), device_bytes=device.memory_bytes, device_name=device.title)


def least(config: dict[str, Any], gpu: str, context: int, quantization: str | None = None, node: int = 16) -> Degrees:
    return next(
        that_fit(
            fit(config, gpu, quantization), Machine(None, node, 64 // node, DEFAULT_GPU_MEMORY_UTILIZATION), context
        )
    )


@pytest.mark.parametrize(
    ("config", "gpu", "quantization", "context", "tensor", "tokens"),
    [
        (LLAMA_70B, "h200", None, 8192, 2, 399_169),
        (LLAMA_8B, "a100-40", None, 8192, 1, 158_781),
        (LLAMA_70B, "a100-80", None, 8192, 2, 34_096),
        (LLAMA_70B, "a100-40", None, 8192, 4, 19_475),
        (LLAMA_70B, "a100-40", "fp8", 2048, 2, 3_320),
        (LLAMA_70B, "a100-40", "fp8", 8192, 4, None),
        (LLAMA_405B, "h100-80", "fp8", 8192, 8, 384_596),
        (LLAMA_405B, "h200", None, 8192, 8, 534_634),
        (LLAMA_8B, "rtx-4090", None, 8192, 1, 38_320),
        (LLAMA_8B, "rtx-4090", None, 131_072, 2, None),
        (QWEN_72B, "rtx-4090", None, 8192, 8, None),
        (QWEN_72B, "h100-80", None, 8192, 2, None),
        (QWEN_72B, "a100-40", None, 4096, 4, 6_337),
        # What one 80 GB card is said to do in 1, 2.24 and 11.66 parts.
        (LLAMA_8B, "h100-80", None, 131_072, 1, None),
        (LLAMA_70B, "h100-80", None, 131_072, 4, None),
        (LLAMA_405B, "h100-80", None, 131_072, 16, None),
    ],
)
def test_least_degrees(
    config: dict[str, Any], gpu: str, quantization: str | None, context: int, tensor: int, tokens: int | None
) -> None:
    found = least(config, gpu, context, quantization)
    assert (found.tensor, found.pipeline) == (tensor, 1)
    if tokens is not None:
        assert found.cache_tokens == pytest.approx(tokens, rel=2e-5)


def test_the_case_of_a_published_study_where_the_cache_is_starved() -> None:
    """Llama-2-7B on GPUs with little memory: 0.9 GB of cache on one, 7.6 GB on each of two."""
    config, share = SHAPES["llama-2-7b"], DEFAULT_GPU_MEMORY_UTILIZATION
    assert weight_gb(config) == pytest.approx(13.48, abs=0.006)
    small = dataclasses.replace(needs(config), device_bytes=17_970_000_000, max_model_len=512)
    for tensor, published in ((1, 0.9), (2, 7.6)):
        at = dataclasses.replace(small, tensor_parallel_size=tensor)
        assert (at.cache_bytes(share, at.step_bytes) or 0) / GB == pytest.approx(published, rel=0.03)
    work = Workload(10**6, 128, 128, 128)
    found = options(small, Machine(gpu_named("h200"), 2, 1, share), 512, work)
    assert [it.degrees.tensor for it in found] == [1, 2]
    assert (chosen := best(found)) is not None and chosen.degrees.tensor == 2


def test_no_degree_of_one_node() -> None:
    share = DEFAULT_GPU_MEMORY_UTILIZATION
    assert not list(that_fit(fit(LLAMA_405B, "h100-80"), Machine(None, 8, 1, share), 8192))
    assert not list(that_fit(fit(LLAMA_70B, "h200"), Machine(None, 1, 1, share), 8192))
    found = least(LLAMA_405B, "h100-80", 8192, node=8)
    assert (found.tensor, found.pipeline) == (8, 2)


def test_the_reason_does_not_deny_a_faster_pipeline() -> None:
    work = Workload(10**6, 1024, 256, 1280)
    machine = Machine(gpu_named("h100-80"), 16, 2, DEFAULT_GPU_MEMORY_UTILIZATION)
    found = options(fit(LLAMA_405B, "h100-80"), machine, 8192, work)
    assert (chosen := best(found)) is not None and chosen.degrees.pipeline == 1
    assert max(found, key=lambda option: option.tokens_per_s).degrees.pipeline > 1
    assert "no larger tensor-parallel size predicts clearly more" in reason_for(chosen, found, work, machine)


def test_70b_on_eight_h200_is_tensor_2_data_4() -> None:
    machine = Machine(gpu_named("h200"), 8, 1, DEFAULT_GPU_MEMORY_UTILIZATION)
    chosen = best(options(fit(LLAMA_70B, "h200"), machine, 8192))
    assert chosen is not None
    assert (chosen.degrees.tensor, chosen.data, chosen.degrees.cache_tokens) == (2, 4, 399_169)


def test_gpus_that_cannot_run_a_type_or_a_build() -> None:
    assert "7.5" in (why_not(gpu_named("v100-16"), "float16") or "")
    assert "bfloat16" in (why_not(gpu_named("rtx-2080-ti"), "bfloat16") or "")
    assert why_not(gpu_named("rtx-2080-ti"), "float16") is None
    assert why_not(gpu_named("a100-40"), "bfloat16") is None
    sizes = {"h200": 141, "h100-80": 80, "h100-40": 40, "a100-40": 40, "a100-80": 80, "a40": 48, "a6000": 48,
             "rtx-4090": 24, "rtx-3090": 24, "v100-16": 16, "v100-32": 32, "rtx-2080-ti": 11}  # fmt: skip
    for name, published in sizes.items():
        assert gpu_named(name).memory_bytes == pytest.approx(published * GB, rel=0.08)


@pytest.mark.parametrize(
    ("title", "mib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 81_008, "h100-80"),
        ("NVIDIA H100 PCIe", 81_079, "h100-pcie"),
        ("NVIDIA H100 NVL", 95_320, "h100-94"),
        ("NVIDIA A100-PCIE-40GB", 40_339, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 81_251, "a100-80"),
    ],
)
def test_a_device_is_found_in_the_table_whatever_its_driver_leaves(title: str, mib: int, name: str) -> None:
    found = gpu_like(title, mib << 20)
    assert found is not None and (found.name, found.memory_bytes) == (name, mib << 20)


def test_offload_and_a_fixed_cache() -> None:
    plain = fit(LLAMA_70B, "a100-80")
    offloaded = dataclasses.replace(plain, engine={"cpu_offload_gb": 80})
    assert plain.weight_bytes is not None and offloaded.weight_bytes == plain.weight_bytes - 80 * GIB
    assert next(that_fit(offloaded, Machine(None, 8, 1, 0.92), 8192)).num_devices == 1
    fixed = dataclasses.replace(fit(LLAMA_8B, "h200"), engine={"kv_cache_memory_bytes": 4 * GIB})
    found = next(that_fit(fixed, Machine(None, 8, 1, 0.92), 8192))
    assert found.cache_tokens == 4 * GIB // 131_072
    too_much = dataclasses.replace(fixed, engine={"kv_cache_memory_bytes": 130 * GIB})
    assert next(that_fit(too_much, Machine(None, 8, 1, 0.92), 8192)).num_devices > 1

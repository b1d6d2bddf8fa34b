"""Predicted tokens a second and caches beside those measured on H200s (benchmarks/history/vllm-0.26.md)."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch  # noqa: F401  # with these two here, models are counted in this process
import transformers  # noqa: F401

from batchinf.model.memory import CHOSEN_EXPERTS, DEFAULT_GPU_MEMORY_UTILIZATION, Fit, fit_of
from batchinf.model.model import Model
from batchinf.planning.degrees import Machine, best, degrees_of, options
from batchinf.planning.gpus import gpu_named
from batchinf.planning.throughput import Prediction, Workload, prediction_of, shape_of
from batchinf.spec.job import WHOLE_STEPS, JobSpec
from batchinf.tasks.registry import task_of
from benchmarks.shapes import SHAPES

CONTEXT, SHARE = 2048, DEFAULT_GPU_MEMORY_UTILIZATION
LENGTHS = {"generate": (256, 128), "score": (1024, 1), "embed": (128, 0)}
LOGITS: dict[str, Literal["all", "last", "none"]] = {"generate": "last", "score": "all", "embed": "none"}


@dataclass(frozen=True)
class Measured:
    """One job. num_rows: of one replica. tokens_per_s: of the output for `generate`, else of the prompts.

    lengths: tokens of a prompt and of an output; default: `LENGTHS`. engine: more arguments of the engine. cached:
    tokens with which all prompts begin.
    """

    shape: str
    task: str
    num_rows: int
    tokens_per_s: float | None
    cache_tokens: int | None
    quantization: str | None = None
    cache: str = "auto"
    tensor: int = 1
    pipeline: int = 1
    cache_gb: float | None = None
    lengths: tuple[int, int] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    cached: int = 0


def _tokens_in_a_step(number: int) -> dict[str, int]:
    return {"max_num_batched_tokens": number}


MEASURED = [
    Measured("llama-3.1-8b", "generate", 3072, 12_238, 914_304),
    Measured("llama-3.1-8b", "score", 900, 38_165, 919_888, engine=_tokens_in_a_step(7680)),
    Measured("llama-3.1-8b", "embed", 4800, 43_070, 919_600),
    Measured("llama-3.1-8b", "generate", 3500, 16_710, 1_934_400, "fp8", "fp8"),
    Measured("llama-3.1-8b", "generate", 8192, 29_837, None, "fp8", "fp8", lengths=(128, 128)),
    Measured("llama-3.1-8b", "generate", 3500, None, 4_037_840, "fp8", "fp8", tensor=2),
    Measured("llama-3.1-8b", "generate", 2176, 19_275, 1_965_344, tensor=2),
    Measured("llama-3.1-8b", "generate", 2240, 19_624, 1_953_776, pipeline=2),
    Measured("llama-3.3-70b", "generate", 704, 1_791, 187_104, "fp8"),
    Measured("llama-3.3-70b", "score", 128, 7_564, 191_392, "fp8", engine=_tokens_in_a_step(7680)),
    Measured("llama-3.3-70b", "generate", 448, 3_833, 606_992, "fp8", tensor=2),
    Measured("llama-3.3-70b", "generate", 750, 4_048, 606_992, "fp8", tensor=2),
    # Its speed was 2,808: the stages of this pipeline waited for each other, which no term knows.
    Measured("llama-3.3-70b", "generate", 512, None, 596_976, "fp8", pipeline=2),
    Measured("llama-3.2-1b", "generate", 12_288, 86_592, 4_097_440, lengths=(128, 128), engine={"max_num_seqs": 2048}),
    Measured("llama-3.2-1b", "score", 3072, 173_909, 4_113_184, engine=_tokens_in_a_step(7680)),
    Measured("llama-3.2-1b", "embed", 48_000, 245_974, 4_092_192),
    Measured("qwen3-0.6b", "embed", 131_072, 338_455, None),
    Measured("qwen3-0.6b", "score", 32_768, 326_793, 1_186_912, lengths=(129, 1)),
    Measured("qwen3-0.6b", "embed", 65_536, 516_525, None, engine={"additional_config": {WHOLE_STEPS: True}}),
    Measured(
        "qwen3-0.6b",
        "score",
        32_768,
        376_637,
        1_186_912,
        lengths=(129, 1),
        engine={"additional_config": {WHOLE_STEPS: True}},
    ),
    Measured("llama-3.1-8b", "generate", 4096, 13_481, None, lengths=(1160, 128), cached=1024),
    # vLLM's estimate for CUDA graphs was 15.4 GiB too large, so its cache was smaller than the memory allows.
    Measured("qwen3-30b-a3b", "generate", 4096, 14_794, None),
    Measured("llama-2-7b", "generate", 64, 883, 1_728, cache_gb=0.9),
    Measured("llama-2-7b", "generate", 640, 9_384, 29_168, cache_gb=7.65, tensor=2),
]


@pytest.mark.parametrize("measured", MEASURED, ids=lambda it: f"{it.shape}-{it.task}-{it.tensor}-{it.pipeline}")
def test_predictions_are_near_what_was_measured(measured: Measured) -> None:
    predicted, cache_tokens = predict(measured)
    if measured.cache_tokens is not None:
        assert cache_tokens == pytest.approx(measured.cache_tokens, rel=0.015)
    if measured.tokens_per_s is not None:
        unit = "output_tokens_per_s" if measured.task == "generate" else "prompt_tokens_per_s"
        assert getattr(predicted, unit) == pytest.approx(measured.tokens_per_s, rel=0.25)


@pytest.mark.parametrize(
    ("shape", "quantization", "memory_gb", "tensor"),
    [
        ("llama-3.1-8b", None, None, 1),  # measured on two: 22,970 tokens/s; tensor 2: 19,275; pipeline 2: 19,624
        ("llama-3.3-70b", "fp8", None, 2),  # 3,582 as two replicas; tensor 2: 3,833; pipeline 2: 2,808
        ("llama-2-7b", None, 17.97, 2),  # 1,767 as two replicas; tensor 2: 9,384
    ],
)
def test_auto_takes_the_degrees_that_were_measured_best(
    shape: str, quantization: str | None, memory_gb: float | None, tensor: int
) -> None:
    context = CONTEXT if memory_gb is None else 512
    memory = gpu_named("h200").memory_bytes if memory_gb is None else int(memory_gb * 1e9)
    fit = fit_on(shape, "generate", {"max_model_len": context}, quantization, memory)
    machine = Machine(gpu_named("h200"), 2, 1, SHARE)
    chosen = best(options(fit, machine, context, Workload(10**6, 256, 128, 128)))
    assert chosen is not None
    assert (chosen.degrees.tensor, chosen.degrees.pipeline, chosen.data) == (tensor, 1, 2 // tensor)


def fit_on(shape: str, task: str, engine: dict[str, Any], quantization: str | None, device_bytes: int) -> Fit:
    spec = JobSpec(
        model={"name": "m", "load_format": "dummy", "dtype": "bfloat16", "quantization": quantization},
        task=task,
        input={"path": "x", **({"text_column": "text"} if task == "score" else {"prompt_column": "prompt"})},
        output={"path": "y"},
        engine=engine,
    )
    model = Model("m", "org/m", None, "", SHAPES[shape], {}, False, None, None, "org/m")
    return fit_of(model, spec, device_bytes, gpu_named("h200").title, limits_of=task_of(spec).default_batch_limits)


def predict(measured: Measured) -> tuple[Prediction, int]:
    """The speed of one replica, and the tokens of its cache."""
    context = CONTEXT if measured.cache_gb is None else 512
    engine: dict[str, Any] = {"max_model_len": context, "kv_cache_dtype": measured.cache, **measured.engine}
    if measured.cache_gb is not None:
        engine["kv_cache_memory_bytes"] = int(measured.cache_gb * 1e9)
    gpu = gpu_named("h200")
    fit = fit_on(measured.shape, measured.task, engine, measured.quantization, gpu.memory_bytes)
    degrees = degrees_of(fit, measured.tensor, measured.pipeline, context=context, share=SHARE)
    prompt, output = measured.lengths or LENGTHS[measured.task]
    work = Workload(measured.num_rows, prompt, output, output, LOGITS[measured.task], measured.cached)
    shape = shape_of(fit)
    assert shape is not None
    at = dataclasses.replace(fit, tensor_parallel_size=measured.tensor, pipeline_parallel_size=measured.pipeline)
    prediction = prediction_of(at, shape, gpu=gpu, work=work, share=SHARE)
    return prediction, degrees.cache_tokens


_TINY = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
         "vocab_size": 1000, "moe_intermediate_size": 128, "head_dim": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512}, 1 / 4),
        ({"model_type": "ernie4_5_moe", "moe_num_experts": 64, "moe_k": 6, "intermediate_size": 512}, 6 / 64),
        ({"model_type": "hunyuan_v1_moe", "num_experts": 16, "moe_topk": [2, 4], "intermediate_size": 256}, 3 / 16),
    ],
    ids=["one number", "another name", "a number for each layer"],
)
def test_only_the_experts_that_compute_a_token_count(config: dict[str, Any], share: float) -> None:
    spec = JobSpec(model={"name": "m", "load_format": "dummy", "dtype": "bfloat16"}, task="embed",
                   input={"path": "x", "prompt_column": "p"}, output={"path": "y"})  # fmt: skip
    model = Model("m", "org/m", None, "", {**_TINY, **config}, {}, False, None, None, "org/m")
    fit = fit_of(model, spec, 80 << 30, "NVIDIA H100")
    shape = shape_of(fit)
    assert shape is not None and fit.parameters["expert"] > 0
    assert shape.expert_parameters == pytest.approx(share * fit.parameters["expert"])
    assert shape_of(dataclasses.replace(fit, config={**fit.config, **dict.fromkeys(CHOSEN_EXPERTS)})) is None

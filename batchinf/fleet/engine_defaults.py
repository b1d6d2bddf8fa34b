"""Engine arguments and the number of replicas on each device, chosen where the spec leaves them open.

Only for CUDA devices, but for `input.images.max_per_row`. A value in the spec always wins, and `null` in the spec is
vLLM's own default.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from batchinf.base.errors import ModelError, SpecError
from batchinf.engines.installed import vllm_version
from batchinf.model.image_tokens import image_tokens
from batchinf.model.memory import GIB, Fit, default_limits
from batchinf.model.model import Model
from batchinf.planning.gpus import gpu_like
from batchinf.planning.image_rows import ImagesOfRows
from batchinf.spec.job import WHOLE_STEPS, JobSpec
from batchinf.tasks.base import Task

# The measurement of the figures below, and vLLM's version in it.
MEASUREMENT = 'benchmarks/history/vllm-0.26.md, "Settings where the spec is silent, and several replicas on a device"'
_MEASURED_WITH = (0, 26)
# vLLM's own choice for offline jobs on a large device. The rules hold for such devices.
_LARGE_MAX_NUM_SEQS = 1024
# With smaller weights, the engine's Python may limit the speed, not the GPU.
_SMALL_WEIGHT_BYTES = 4 * GIB
# For a small model that generates: a large GPU is faster with a larger batch.
_SMALL_MAX_NUM_SEQS = 2048
# Share of a device's memory for all of its engines together. The rest is for CUDA contexts and graphs.
_SHARED_UTILIZATION = 0.88
# For tasks that only read prompts, two engines make 1.18 times the tokens of one in scores, and 1.32 times in
# embeddings, if a step is not one CUDA graph. If it is, one engine keeps the GPU busy. For tasks that generate, one
# engine of a 1B model leaves its GPU idle for only 1.4 % of a decoding step.
_REPLICAS_OF_SMALL = 2
# An engine's process and the replica's thread keep two cores busy, and tokenising needs more than one for small models.
_CORES_PER_REPLICA = 4
# For a second engine on a device. It is up 16 s after the first, or 50 s without compiled kernels. It pays if the input
# keeps one engine busy for more than 2 minutes.
LEAST_INPUT_BYTES = 200 << 20
# The prefix cache takes a fifth of an embedding job's speed, in Python, and 0.14 to 0.23 of that of a job with
# recurrent layers (benchmarks/RESULTS.md). It pays if it saves that share of the prompts.
_LEAST_SHARED = 0.2
# From here on, a step that reads prompts has four sizes of graphs between a power of two and the next.
_DENSE_GRAPHS = 2048
# The distance between two batch sizes with a graph, up to a size. Padding costs more in small batches.
_GRAPH_STEPS = ((8, 64), (16, 128), (32, 512), (64, 1024), (128, 4096))

# With one of these in the spec, engines cannot share a device by smaller shares of its memory.
_SIZES_OF_CACHE = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"})
# With one of these in the spec, the graphs are the user's choice.
_GRAPHS = frozenset({"compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "enforce_eager"})
# With one of these in the spec, vLLM may refuse asynchronous scheduling.
_NOT_ASYNCHRONOUS = frozenset({"distributed_executor_backend", "speculative_config"})
_HOPPER = 9  # compute capability
# No model that vLLM runs makes more tokens of an image: one for each 14 × 14 pixels.
_LEAST_PIXELS = 196
# With one of these in the spec, a graph of a whole step may not run, or not be for steps of any lengths.
_NOT_FOR_WHOLE_STEPS = frozenset(
    {"additional_config", "attention_backend", "attention_config", "kv_transfer_config", "speculative_config",
     "worker_cls"}
)  # fmt: skip


WithReason = tuple[Any, str]


def values(chosen: Mapping[str, WithReason]) -> dict[str, Any]:
    """Engine arguments without the reasons for them."""
    return {name: value for name, (value, _) in chosen.items()}


def lines_of(chosen: Mapping[str, WithReason]) -> list[str]:
    """For people: each argument with its value and reason, and where the rules come from; empty without any."""
    if not chosen:
        return []
    version = vllm_version()
    other = "" if version in (None, _MEASURED_WITH) else f", and this is {_dotted(version)}"
    return [
        "engine arguments that the spec leaves open:",
        *(f"  {name} {shown(value)}: {reason}" for name, (value, reason) in chosen.items()),
        f"  (rules: {MEASUREMENT}; measured with vLLM {_dotted(_MEASURED_WITH)}{other})",
    ]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def shown(value: Any) -> str:
    """A setting for people: JSON, but of a long list of numbers only the ends."""
    return re.sub(r"\[(\d+, \d+, \d+), (?:\d+, ){3,}(\d+)\]", r"[\1, ..., \2]", json.dumps(value))


def replicas_per_device(spec: JobSpec, fit: Fit, task: Task, num_devices: int) -> int:
    """The number of engines on each device. fit: the model on one of the devices.

    Raises SpecError if the spec wants more than one for a model that is distributed over devices, or more memory than
    there is.
    """
    number = spec.parallel.replicas_per_device
    if spec.backend == "ray":
        if number not in ("auto", 1):
            raise SpecError(f"parallel.replicas_per_device: got {number} with backend ray; must be 1: leave it out")
        return 1
    if number == "auto":
        return _chosen_replicas_per_device(spec, fit, task, num_devices)
    if number > 1:
        _check_sharing(spec, number)
    return number


def _chosen_replicas_per_device(spec: JobSpec, fit: Fit, task: Task, num_devices: int) -> int:
    num_replicas = spec.parallel.data_parallel_size
    if num_replicas != "auto" and num_replicas <= num_devices:
        return 1
    may_gain = math.prod(spec.parallel.sizes) == 1 and gains_from_sharing(spec, fit, task, num_devices)
    return _REPLICAS_OF_SMALL if may_gain and _input_bytes(spec) >= LEAST_INPUT_BYTES else 1


def _check_sharing(spec: JobSpec, number: int) -> None:
    if math.prod(spec.parallel.sizes) > 1:
        raise SpecError(
            f"parallel.replicas_per_device: got {number} with tensor_parallel_size "
            f"{spec.parallel.tensor_parallel_size} x pipeline_parallel_size {spec.parallel.pipeline_parallel_size}; "
            "replicas can share a device only if each has one device: leave out this field or the degrees"
        )
    share = spec.engine.get("gpu_memory_utilization")
    if share is not None and number * float(share) > 1:
        raise SpecError(
            f"engine.gpu_memory_utilization: got {share}, but {number} replicas share a device and would take "
            f"{number * float(share):g} of it together; give at most {_shared_utilization(number)}, or leave it out"
        )


def _shared_utilization(num_replicas: int) -> float:
    return int(_SHARED_UTILIZATION / num_replicas * 100) / 100


def gains_from_sharing(spec: JobSpec, fit: Fit, task: Task, num_devices: int) -> bool:
    """Whether several engines on a device are faster than one, if the input is long enough. num_devices: at least 1."""
    if task.draws_tokens or _SIZES_OF_CACHE & spec.engine.keys():
        return False
    runs_whole_steps = _has_prompt_graphs(spec, fit, task) and _can_run_whole_steps(spec, fit)
    if runs_whole_steps:  # one engine keeps the device busy
        return False
    num_cores = len(os.sched_getaffinity(0)) // num_devices
    return _is_small(fit) and num_cores >= _CORES_PER_REPLICA * _REPLICAS_OF_SMALL


def _is_large(fit: Fit) -> bool:
    return default_limits(fit.device_bytes, fit.device_name)["max_num_seqs"] == _LARGE_MAX_NUM_SEQS


def _input_bytes(spec: JobSpec) -> int:
    """The size of a local input of files; 0 if it is unknown, or if the job takes only a part of it."""
    if spec.input.limit is not None or spec.input.sample is not None or spec.input.where is not None:
        return 0
    path = pathlib.Path(spec.input.path).expanduser()
    try:
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError:
        return 0


def chosen_arguments(
    spec: JobSpec,
    fit: Fit,
    task: Task,
    num_per_device: int,
    *,
    shared_share: Callable[[], float | None] = lambda: None,
) -> dict[str, WithReason]:
    """Engine arguments that the spec leaves open, for replicas of which `num_per_device` share a device.

    shared_share: of the prompts, see `planning.lengths`. It is called only if the choice depends on it.
    """
    if fit.device_bytes is None:
        return {}
    chosen: dict[str, WithReason] = {}
    if num_per_device > 1:
        share = _shared_utilization(num_per_device)
        chosen["gpu_memory_utilization"] = share, f"{num_per_device} replicas share each GPU"
    if task.draws_tokens and _is_large(fit):
        chosen |= _for_outputs(spec, fit, num_per_device)
    if _has_prompt_graphs(spec, fit, task):
        chosen |= _for_prompts(spec, fit, task)
    if _overlaps_steps(spec, fit, task):
        chosen |= _for_vectors()
    if _overlaps_steps(spec, fit, task) or _caches_states(spec, fit, task):
        chosen |= _without_prefixes(spec, shared_share)
    return {name: choice for name, choice in chosen.items() if name not in spec.engine}


def _for_vectors() -> dict[str, WithReason]:
    """For a task that makes a vector of each prompt, with a small model on a large device."""
    return {"async_scheduling": (True, "the engine prepares the next step while the GPU computes")}


def _without_prefixes(spec: JobSpec, shared_share: Callable[[], float | None]) -> dict[str, WithReason]:
    """No prefix cache, where it costs more than it saves; see `_LEAST_SHARED`."""
    share = shared_share() if "enable_prefix_caching" not in spec.engine else None
    if share is None or share >= _LEAST_SHARED:
        return {}
    return {"enable_prefix_caching": (False, f"in a sample, {share:.0%} of the text repeats beginnings of prompts")}


def _caches_states(spec: JobSpec, fit: Fit, task: Task) -> bool:
    """Whether vLLM keeps the states of recurrent layers for prompts that begin alike, and no row has several outputs.

    In that mode of the cache (`align`), the scheduler's short loops are off. Outputs of one row have one prompt.
    """
    cache = fit.kv_cache
    has_states = cache is not None and cache.has_states
    return task.draws_tokens and has_states and spec.sampling.n == 1 and not spec.rows_may_set("n")


def _for_outputs(spec: JobSpec, fit: Fit, num_per_device: int) -> dict[str, WithReason]:
    """For a task that generates tokens on a large device."""
    chosen: dict[str, WithReason] = {}
    most = _LARGE_MAX_NUM_SEQS
    if _is_small(fit) and num_per_device == 1:
        # vLLM refuses a batch of more sequences than tokens.
        most = min(_SMALL_MAX_NUM_SEQS, fit.limits["max_num_batched_tokens"])
        chosen["max_num_seqs"] = most, "a small model on a large GPU is faster with a larger batch"
    if _is_small(fit) and math.prod(spec.parallel.sizes) == 1:
        # With our worker, a 1B job was slower in 7 of 8 pairs (benchmarks/RESULTS.md).
        chosen["worker_cls"] = None, "a small model is faster where vLLM's FlashAttention decodes"
    if not _GRAPHS & spec.engine.keys():
        sizes = graph_sizes(int(spec.engine.get("max_num_seqs", most) or _LARGE_MAX_NUM_SEQS))
        graphs = {"cudagraph_capture_sizes": sizes}
        chosen["compilation_config"] = graphs, "CUDA graphs for batches up to max_num_seqs"
    return chosen


def _for_prompts(spec: JobSpec, fit: Fit, task: Task) -> dict[str, WithReason]:
    """For a task that only reads prompts, with a small model on a large device."""
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": prompt_graph_sizes(fit.limits["max_num_batched_tokens"])}
    if not _can_run_whole_steps(spec, fit):
        return {"compilation_config": (graphs, "CUDA graphs for steps up to max_num_batched_tokens")}
    chosen: dict[str, WithReason] = {
        "compilation_config": (graphs, "a CUDA graph for a whole step, up to max_num_batched_tokens"),
        "additional_config": ({WHOLE_STEPS: True}, "these graphs have the attention of all layers too"),
        # Otherwise each graph has memory for 32 parts of a long request's keys, which pay in decoding.
        "attention_config": (
            {"flash_attn_max_num_splits_for_cuda_graph": 1},
            "steps of prompts have enough work without splitting requests",
        ),
    }
    if task.pooling is None:  # for vectors vLLM would change it
        graphs["cudagraph_mode"] = "FULL"
    return chosen


def _has_prompt_graphs(spec: JobSpec, fit: Fit, task: Task) -> bool:
    return _overlaps_steps(spec, fit, task) or _only_scores(spec, fit, task)


def _only_scores(spec: JobSpec, fit: Fit, task: Task) -> bool:
    """Whether a job only scores prompts, with a small model whose steps wait for the engine's Python."""
    is_open = not _GRAPHS & spec.engine.keys() and _can_run_whole_steps(spec, fit)
    return task.only_scores and _is_small(fit) and math.prod(spec.parallel.sizes) == 1 and is_open


def _can_run_whole_steps(spec: JobSpec, fit: Fit) -> bool:
    """Whether a CUDA graph of a whole step of prompts is possible; see `engines.vllm.kernels.whole_steps`.

    It needs FlashAttention 3, which vLLM has for Hopper, and a cache of keys and values in all layers.
    """
    gpu = gpu_like(fit.device_name, fit.device_bytes)
    if gpu is None or gpu.capability[0] != _HOPPER:
        return False
    is_open = not _NOT_FOR_WHOLE_STEPS & spec.engine.keys() and spec.model.lora is None and not spec.input.has_images
    return is_open and _is_plain_decoder(fit)


def _is_plain_decoder(fit: Fit) -> bool:
    """Whether each token sees only those before it, and all layers keep keys and values."""
    config = fit.config
    cache = fit.kv_cache
    if cache is None or cache.has_states:
        return False
    # Encoders have no such field, and decoders that see all tokens say so.
    is_causal = "num_key_value_heads" in config and config.get("is_causal", True)
    return bool(is_causal and not config.get("use_bidirectional_attention"))


def _is_small(fit: Fit) -> bool:
    """Whether the engine's Python may limit a model's speed on its device, which is large."""
    return fit.weight_bytes is not None and fit.weight_bytes <= _SMALL_WEIGHT_BYTES and _is_large(fit)


def _overlaps_steps(spec: JobSpec, fit: Fit, task: Task) -> bool:
    """Whether a job makes one vector for each prompt, with a small model whose steps wait for the engine's Python.

    Asynchronous scheduling pays only together with graphs: without them, Python is not done before the GPU.
    """
    pooling = task.pooling
    if pooling is None or pooling.all_positions or pooling.layers or math.prod(spec.parallel.sizes) != 1:
        return False
    return _is_small(fit) and not {*_GRAPHS, *_NOT_ASYNCHRONOUS, "async_scheduling"} & spec.engine.keys()


def prompt_graph_sizes(max_num_batched_tokens: int) -> list[int]:
    """Tokens of steps with a CUDA graph. Steps are padded to the next size: from 2,048 on by at most a quarter."""
    sizes = {max_num_batched_tokens}
    size = 1
    while size < max_num_batched_tokens:
        sizes.add(size)
        size += 1 << (size.bit_length() - 3) if size >= _DENSE_GRAPHS else size
    return sorted(sizes)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes with a CUDA graph, up to `max_num_seqs`: dense for small batches, where padding costs more."""
    sizes = {1, 2, 4, max_num_seqs}
    size = 0
    for step, last in _GRAPH_STEPS:
        while size + step <= min(last, max_num_seqs):
            size += step
            sizes.add(size)
    return sorted(sizes)


def with_most_images(spec: JobSpec, rows: ImagesOfRows, say: Callable[[str], None]) -> JobSpec:
    """The spec with the most images that a row of the input has as `max_per_row`, if the user gave none.

    vLLM measures the memory of a step with as many images in each sequence.
    """
    images = spec.input.images
    if images is None or rows.most_per_row is None or "max_per_row" in images.model_fields_set:
        return spec
    most = max(1, rows.most_per_row)
    if most >= images.max_per_row:
        return spec
    say(f"input.images.max_per_row {most}, and not {images.max_per_row}: no row of the input has more images")
    where = spec.input.model_copy(update={"images": images.model_copy(update={"max_per_row": most})})
    return spec.model_copy(update={"input": where})


def step_for_images(spec: JobSpec, model: Model, fit: Fit, rows: ImagesOfRows) -> dict[str, WithReason]:
    """`max_num_batched_tokens` with its reason, if an image of the rows has more tokens than a step has by default.

    Some models cannot compute a part of an image: vLLM would not start, or never run the row.
    """
    name = "max_num_batched_tokens"
    usual = fit.limits[name]
    if fit.device_bytes is None or name in spec.engine or rows.largest is None:
        return {}
    if rows.largest[0] * rows.largest[1] < usual * _LEAST_PIXELS:
        return {}
    try:
        tokens = image_tokens(model, [rows.largest], spec.engine, trust_remote_code=spec.model.trust_remote_code)
    except ModelError:  # they cannot be counted
        return {}
    number = tokens.get(rows.largest, 0)
    return {name: (number, "the largest image of a sample has so many tokens")} if number > usual else {}

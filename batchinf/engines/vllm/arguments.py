"""Converts a spec to vLLM's types: EngineArgs, SamplingParams, and requests for LoRA adapters."""

import json
import operator
import pathlib
from collections.abc import Mapping
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from batchinf.base.errors import EngineStartError
from batchinf.base.text import one_line
from batchinf.engines.installed import importing
from batchinf.engines.vllm.images import image_arguments
from batchinf.engines.vllm.scheduling.scheduler import SCHEDULER
from batchinf.engines.vllm.worker import POSITIONS
from batchinf.engines.vllm.worker import WORKER_EXTENSION as WORKER
from batchinf.model.files import read_json
from batchinf.model.lora import Adapter, rank_for
from batchinf.model.memory import on_cpu, vocab_size_of
from batchinf.model.model import derive_max_model_len
from batchinf.records import Request
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import MAPPINGS, SamplingSpec
from batchinf.tasks.base import Task

# Adapters in one batch, if the spec does not say: each takes memory on the device.
_MOST_IN_A_BATCH = 8
_MOST_IN_MEMORY = 64
GUIDANCE = "guidance"


def lora_arguments(adapters: tuple[Adapter, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """EngineArgs for these adapters. given: the spec's own arguments, which are kept."""
    if not adapters:
        return {}
    number = len(adapters)
    chosen: dict[str, Any] = {"enable_lora": True, "max_lora_rank": rank_for(adapters)}
    chosen["max_loras"] = min(number, _MOST_IN_A_BATCH)
    if number > _MOST_IN_A_BATCH:
        chosen["max_cpu_loras"] = min(number, _MOST_IN_MEMORY)
    arguments: dict[str, Any] = {name: value for name, value in chosen.items() if name not in given}
    if current_platform.is_cpu():
        # The CPU kernels of 0.32 read index -1 ("no adapter") as the last slot (torch_ops/lora_ops.py), so rows of the
        # plain model get the adapter in that slot. With one slot more than adapters, the last slot stays zero.
        arguments["max_loras"] = max(given.get("max_loras", 0), number + 1)
        arguments["max_cpu_loras"] = max(given.get("max_cpu_loras") or 0, number + 1)
        # On a CPU, an lm_head that can have an adapter fails with prompt logprobs. So only modules that the adapters
        # change can have one.
        modules = {module for adapter in adapters for module in adapter.modules}
        if all(adapter.modules for adapter in adapters) and not modules & {"experts", "base_layer"}:
            arguments["lora_target_modules"] = given.get("lora_target_modules") or sorted(modules)
    return arguments


def lora_requests(adapters: tuple[Adapter, ...]) -> dict[str | None, Any]:
    """vLLM's LoRARequest of each adapter, by name; None stands for the plain model. Prefix caches use the names."""
    if not adapters:
        return {None: None}
    from vllm.lora.request import LoRARequest

    numbered = enumerate(adapters, start=1)
    return {None: None} | {
        adapter.name: LoRARequest(adapter.name, number, adapter.path) for number, adapter in numbered
    }


def load_adapters(engine: Any, requests: Mapping[str | None, Any]) -> None:
    """Load each adapter once. A bad adapter would otherwise kill the engine at a request. Raises EngineStartError."""
    for name, request in requests.items():
        if request is None:
            continue
        try:
            engine.add_lora(request)
        except Exception as error:
            words = one_line(f"{type(error).__name__}: {error}", 400)
            raise EngineStartError(f"vLLM cannot load the LoRA adapter '{name}': {words}") from error


# Fields of SamplingSpec with the same name in SamplingParams. None: vLLM's default.
_SAMPLING = """temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty min_tokens
    include_stop_str_in_output ignore_eos skip_special_tokens logprobs prompt_logprobs""".split()
# Fields that are given to SamplingParams only where they are set.
_IF_SET = ("allowed_token_ids", "bad_words", "thinking_token_budget", *MAPPINGS)
_UNSET: tuple[Any, ...] = (None, (), {})
# The values of a SamplingSpec that make a template of SamplingParams. Requests with the same values share a template,
# and add their own `max_tokens` and `seed`.
template_of = operator.attrgetter(*_SAMPLING, "stop", "stop_token_ids", *_IF_SET, "structured_outputs")

# By name, because their modules import vLLM's worker, which only worker processes need.
_DECODING_WORKER = f"{__package__}.kernels.attention.DecodingWorker"
_PROMPT_WORKER = f"{__package__}.kernels.whole_steps.PromptWorker"


def engine_arguments(task: Task, model_path: str, tokenizer_path: str, revision: str | None) -> dict[str, Any]:
    """EngineArgs by name: those of the spec, and batchinf's choice for others."""
    spec = task.spec
    path = pathlib.Path(model_path, "config.json")
    config = read_json(path) if path.is_file() else {}
    given = {"model": model_path, "tokenizer": tokenizer_path, "revision": revision, "scheduler_cls": SCHEDULER}
    given |= _spec_arguments(spec) | {"logprobs_mode": task.logprobs_mode}
    chosen = {"seed": 0, "disable_log_stats": False} | _device_arguments(task, config) | _scheduling_arguments(task)
    chosen |= _worker_arguments(task)
    known = EngineArgs.__dataclass_fields__  # names differ between versions
    arguments = {name: value for name, value in (given | chosen).items() if name in known} | spec.engine
    sampling = spec.sampling
    num_logprobs = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0, len(sampling.logprob_token_ids))
    if -1 < arguments.get("max_logprobs", EngineArgs.max_logprobs) < num_logprobs:
        arguments["max_logprobs"] = num_logprobs
    return {name: value for name, value in arguments.items() if value is not None}


def _spec_arguments(spec: JobSpec) -> dict[str, Any]:
    """The arguments that fields of the spec name."""
    arguments = spec.model.model_dump(include={"dtype", "quantization", "load_format", "trust_remote_code"})
    arguments |= spec.parallel.model_dump(include={"tensor_parallel_size", "pipeline_parallel_size"})
    # A structure begins after the thinking, and a budget ends it.
    if spec.may_have_structures or spec.sampling.may_have("thinking_token_budget"):
        arguments["reasoning_parser"] = spec.model.reasoning_parser
    return arguments


def _device_arguments(task: Task, config: dict[str, Any]) -> dict[str, Any]:
    """The arguments that depend on the device and its memory. config: of the model."""
    vocab_size = vocab_size_of(config)
    if current_platform.is_cpu():
        defaults = _cpu_defaults(task.spec, derive_max_model_len(config))
        return defaults | task.default_batch_limits(vocab_size, None)
    return task.default_batch_limits(vocab_size, current_platform.get_device_total_memory())


def _scheduling_arguments(task: Task) -> dict[str, Any]:
    """Prefixes that no request reads are not kept: filling the cache takes up to half of the scheduler's Python."""
    return {} if task.reads_prefix_cache else {"enable_prefix_caching": False}


def _worker_arguments(task: Task) -> dict[str, Any]:
    """The workers of a task, and the extension that it needs in them."""
    arguments: dict[str, Any] = {}
    if task.vocabulary_rows is not None:
        arguments["max_logprobs"] = -1
    if task.vocabulary_rows is not None or wants_late_mask(task) or scored_ks(task):
        arguments["worker_extension_cls"] = WORKER
    if task.spec.input.has_images:
        arguments |= image_arguments(task.spec)
    elif current_platform.is_cuda():
        arguments["worker_cls"] = _DECODING_WORKER if task.draws_tokens else _PROMPT_WORKER
    return arguments


def engine_args(arguments: dict[str, Any]) -> EngineArgs:
    """The EngineArgs of these arguments."""
    config = arguments.get("structured_outputs_config")
    if isinstance(config, dict):
        # vLLM converts other mappings before it sets the reasoning parser as an attribute of this one.
        with importing("engine.structured_outputs_config"):
            from vllm.config import StructuredOutputsConfig
        arguments = {**arguments, "structured_outputs_config": StructuredOutputsConfig(**config)}
    return EngineArgs(**arguments)


def scored_ks(task: Task) -> list[int]:
    """The numbers of logprobs that requests want for tokens of prompts and outputs, ascending; empty without any."""
    if task.vocabulary_rows is not None:
        return []
    sampling = task.warm_up_request().sampling
    return sorted({k for k in (sampling.logprobs, sampling.prompt_logprobs) if k is not None})


def wants_late_mask(task: Task) -> bool:
    """Whether requests may want raw logprobs of structured outputs. With a batch file they may."""
    spec = task.spec
    sampling = spec.sampling
    has_logprobs = spec.rows_may_set("logprobs") or sampling.logprobs is not None or bool(sampling.logprob_token_ids)
    return task.logprobs_mode.startswith("raw_") and spec.may_have_structures and has_logprobs


def _cpu_defaults(spec: JobSpec, max_model_len: int | None) -> dict[str, Any]:
    # A seeded request with a chunked prompt kills the engine. vLLM refuses to do without chunks in smaller steps.
    tokens, length = spec.engine.get("max_num_batched_tokens"), spec.engine.get("max_model_len", max_model_len)
    holds_longest = tokens is None or (length is not None and tokens >= length)
    whole = {"enable_chunked_prefill": False} if holds_longest else {}
    return {"enforce_eager": True, "dtype": on_cpu(spec.model).dtype, **whole}


def extra_of(request: Request) -> dict[str, Any]:
    """The fields of SamplingParams that a request adds to its sampling: the logprobs that it wants."""
    if request.rows is not None:
        # The row after the prompt's last token belongs to the first output token.
        is_after = request.rows.positions is None or all(
            position == len(request.prompt_token_ids) - 1 for position in request.rows.positions
        )
        return {"logprobs": -1} if is_after else {"logprobs": -1, "prompt_logprobs": -1}
    if request.logprob_token_ids:
        return {"logprobs": None, "logprob_token_ids": list(request.logprob_token_ids)}
    return {}


def positions_of(request: Request) -> dict[str, Any] | None:
    """`extra_args` for our extension of vLLM's workers: the wanted rows of the prompt; None: no choice of rows.

    The row of the last token belongs to the first output token, not to the prompt.
    """
    if request.rows is None or request.rows.positions is None or isinstance(request.rows.positions, range):
        return None
    last = len(request.prompt_token_ids) - 1
    chosen = sorted({position for position in request.rows.positions if position < last})
    return {POSITIONS: chosen} if chosen else None


def for_backend(structure: dict[str, Any], backend: str) -> dict[str, Any]:
    """The structure as this backend gets it. Raises ValueError if guidance cannot take it."""
    if backend == GUIDANCE and "format" in json.loads(structure.get("structural_tag", "{}")):
        raise ValueError("guidance takes structural tags with `structures` and `triggers`, and none with `format`; "
                         "engine.structured_outputs_config: {backend: xgrammar} takes both")  # fmt: skip
    if backend != GUIDANCE or "json" not in structure:
        return structure
    from batchinf.engines.vllm.structured_output.guidance import relaxed

    return {"json": relaxed(structure["json"])[0]}


def _as_in_vllm(name: str, value: Any) -> Any:
    if name == "repetition_detection":
        with importing("sampling.repetition_detection"):
            from vllm.sampling_params import RepetitionDetectionParams
        return RepetitionDetectionParams(**value)
    return list(value) if isinstance(value, tuple) else value


def sampling_params(
    sampling: SamplingSpec,
    keeps_special_tokens: bool = False,
    extra: dict[str, Any] | None = None,
    backend: str = "auto",
) -> Any:
    """SamplingParams without `max_tokens` and `seed`. vLLM decodes text only if it must look for stop strings.

    keeps_special_tokens: overrides the job and keeps them in the text, because they may mark the end of the thinking.
    extra: see `extra_of`. backend: of structured outputs. Raises ValueError for a structure that it cannot take.
    """
    given = {name: value for name in _SAMPLING if (value := getattr(sampling, name)) is not None}
    given |= {name: _as_in_vllm(name, value) for name in _IF_SET if (value := getattr(sampling, name)) not in _UNSET}
    if keeps_special_tokens:
        given["skip_special_tokens"] = False
    if sampling.structured_outputs is not None:
        with importing("sampling.structured_outputs"):
            from vllm.sampling_params import StructuredOutputsParams
        given["structured_outputs"] = StructuredOutputsParams(**for_backend(sampling.structured_outputs, backend))
    return SamplingParams(
        **given | (extra or {}),
        stop=list(sampling.stop_strings),
        stop_token_ids=list(sampling.stop_token_ids),
        max_tokens=None,
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
        flat_logprobs=True,
        skip_clone=True,  # a shallow copy instead of a deep one
    )

"""A spec in vLLM's words: EngineArgs by name, and SamplingParams."""

import json
import operator
import pathlib
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from batchinf.engines.vllm.scheduler import SCHEDULER
from batchinf.engines.vllm.worker import POSITIONS
from batchinf.engines.vllm.worker import WORKER_EXTENSION as WORKER
from batchinf.model.memory import vocab_size_of
from batchinf.records import Request
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import Task

# Fields of SamplingSpec that SamplingParams has under the same name; None leaves vLLM's default.
_SAMPLING = """temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty min_tokens
    include_stop_str_in_output ignore_eos skip_special_tokens logprobs prompt_logprobs""".split()
# What a template of SamplingParams is made of; requests with one have `max_tokens` and `seed` of their own.
TEMPLATE_OF = operator.attrgetter(*_SAMPLING, "stop", "stop_token_ids")


def engine_arguments(task: Task, model_path: str, tokenizer_path: str, revision: str | None) -> dict[str, Any]:
    """EngineArgs by name: the spec's, and what batchinf chooses where the spec is silent."""
    spec = task.spec
    given = {"model": model_path, "tokenizer": tokenizer_path, "revision": revision, "scheduler_cls": SCHEDULER}
    given |= spec.model.model_dump(include={"dtype", "quantization", "load_format", "trust_remote_code"})
    given |= spec.parallel.model_dump(include={"tensor_parallel_size", "pipeline_parallel_size"})
    if spec.sampling.structured_outputs is not None or spec.input.is_batch_file:  # they begin after the thinking
        given["reasoning_parser"] = spec.model.reasoning_parser
    given["logprobs_mode"] = task.logprobs_mode
    chosen = {"seed": 0, "disable_log_stats": False} | (_cpu_defaults(spec) if current_platform.is_cpu() else {})
    if task.vocabulary_rows is not None:
        chosen |= {"max_logprobs": -1, "worker_extension_cls": WORKER}
    chosen |= task.default_batch_limits(
        _vocab_size(model_path),
        None if current_platform.is_cpu() else current_platform.get_device_total_memory(),
        float(spec.engine.get("gpu_memory_utilization", EngineArgs.gpu_memory_utilization)),
    )
    known = EngineArgs.__dataclass_fields__  # they come and go between versions
    arguments = {name: value for name, value in (given | chosen).items() if name in known} | spec.engine
    wanted = max(spec.sampling.logprobs or 0, spec.sampling.prompt_logprobs or 0, len(spec.sampling.logprob_token_ids))
    if -1 < arguments.get("max_logprobs", EngineArgs.max_logprobs) < wanted:
        arguments["max_logprobs"] = wanted
    return {name: value for name, value in arguments.items() if value is not None}


def _cpu_defaults(spec: JobSpec) -> dict[str, Any]:
    # float32 is twice as fast as bfloat16 there, and a seeded request whose prompt comes in chunks kills the engine.
    dtype = "float32" if spec.model.dtype == "auto" else spec.model.dtype
    whole = {} if "max_num_batched_tokens" in spec.engine else {"enable_chunked_prefill": False}
    return {"enforce_eager": True, "dtype": dtype, **whole}


def _vocab_size(model_path: str) -> int | None:
    """By the model's config, where that lies here."""
    path = pathlib.Path(model_path, "config.json")
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return vocab_size_of(config)


def extra_of(request: Request) -> dict[str, Any]:
    """Of SamplingParams, what a request has beside its sampling: which logprobs it wants."""
    if request.rows is not None:
        # The row after the prompt's last token is that of the first output token.
        is_after = request.rows.positions is None or all(
            position == len(request.prompt_token_ids) - 1 for position in request.rows.positions
        )
        return {"logprobs": -1} if is_after else {"logprobs": -1, "prompt_logprobs": -1}
    if request.logprob_token_ids:
        return {"logprobs": None, "logprob_token_ids": list(request.logprob_token_ids)}
    return {}


def positions_of(request: Request) -> dict[str, Any] | None:
    """`extra_args` for our part in vLLM's workers: which rows of the prompt are wanted, where it is not all of them.

    The last token's is that of the first output token, and none of the prompt's.
    """
    if request.rows is None or request.rows.positions is None or isinstance(request.rows.positions, range):
        return None
    last = len(request.prompt_token_ids) - 1
    chosen = sorted({position for position in request.rows.positions if position < last})
    return {POSITIONS: chosen} if chosen else None


def sampling_params(
    sampling: SamplingSpec, keeps_special_tokens: bool = False, extra: dict[str, Any] | None = None
) -> Any:
    """SamplingParams that lack only `max_tokens` and `seed`. vLLM decodes only where it must look for stop strings.

    keeps_special_tokens: in the text, whatever the job says: the marks between thinking and answer may be such. extra:
    see `extra_of`.
    """
    given = {name: value for name in _SAMPLING if (value := getattr(sampling, name)) is not None}
    if keeps_special_tokens:
        given["skip_special_tokens"] = False
    if sampling.structured_outputs is not None:
        given["structured_outputs"] = StructuredOutputsParams(**sampling.structured_outputs)
    return SamplingParams(
        **given | (extra or {}),
        stop=list(sampling.stop_strings),
        stop_token_ids=list(sampling.stop_token_ids),
        max_tokens=None,
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
        flat_logprobs=True,
        skip_clone=True,  # a shallow copy in place of a deep one, from 0.26 to 0.33
    )

"""The adapter to vLLM's engine for text.

Tested with vLLM 0.32.0 and compared with the source of 0.33.0. Comments name the differences.
"""

import contextlib
import copy
import fcntl
import gc
import math
import os
import platform
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
import vllm
from vllm import LLMEngine, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import core_client
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from batchinf.base import faults
from batchinf.base.errors import BatchinfError, EngineDeadError, EngineStartError, RowFailed
from batchinf.base.text import counted, one_line
from batchinf.engines.installed import structures_backend
from batchinf.engines.protocol import DEVICE_LOCK, EngineInfo, EngineStats, RayGroup
from batchinf.engines.vllm.arguments import (
    engine_args,
    engine_arguments,
    extra_of,
    load_adapters,
    lora_arguments,
    lora_requests,
    positions_of,
    sampling_params,
    scored_ks,
    template_of,
    wants_late_mask,
)
from batchinf.engines.vllm.hosts import engine_on_hosts
from batchinf.engines.vllm.images import Rendering
from batchinf.engines.vllm.known_sources import PIECES, allowed, line_if_off, pieces_off
from batchinf.engines.vllm.logprobs import install_arrays, token_logprobs, vocabulary_rows
from batchinf.engines.vllm.worker import install, join_results
from batchinf.model.lora import Adapter
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.images import RenderedPrompt
from batchinf.records import Completion, Request
from batchinf.spec.job import WHOLE_STEPS
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import Task
from batchinf.version import __version__

# All values of vLLM's FinishReason. Outputs that were cut short have to run again: a signal to the process group ends
# every running request with `abort`.
FINISHED = frozenset({"stop", "length", "repetition"})
CUT_SHORT = frozenset({"abort", "error"})

_NO_RAW = (
    f"vLLM {vllm.__version__} as it is set here gives no raw logprobs of structured outputs, only those after the "
    "grammar's mask: set sampling.logprobs_mode to processed_logprobs or processed_logits, leave out "
    "sampling.logprobs, or use task: score with choices"
)
_NO_THINKING = (
    "thinking_token_budget needs model.reasoning_parser, or engine.reasoning_config, with the marks of the reasoning"
)
_NOT_COMPILED = "it could not compile the structure; the replica's log says why"
_TOKEN_REJECTED = (
    "its structure does not allow the last token. If allowed_token_ids or bad_words forbid each token that the "
    "structure allows, or its end, change them; a structure cannot have the text of a special token"
)
_REFUSALS = (VLLMValidationError, ValueError, TypeError)  # the first is not a ValueError
_WARM_UP_REQUESTS = 8
_WATCH_S = 0.2
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")
_MOST_TEMPLATES = 1024

# vLLM collects garbage five times when an engine starts and twice when it ends. Its import makes a million objects that
# are never garbage. If it skips them, a start on a CPU takes 1.1 s of processor time instead of 3.3.
gc.freeze()


@contextlib.contextmanager
def _device_turn() -> Iterator[None]:
    """Wait until no other engine starts on a shared device: vLLM measures how much memory its start takes there."""
    if (path := os.environ.get(DEVICE_LOCK)) is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Processes that vLLM forked have copies of the file, so closing it would not free the lock.
            fcntl.flock(file, fcntl.LOCK_UN)


def _start(arguments: dict[str, Any], ray_group: RayGroup | None) -> LLMEngine:
    """vLLM's engine. Raises EngineStartError."""
    context = UsageContext.LLM_CLASS  # gives the batch limits of offline jobs, not of a server
    try:
        with _device_turn():
            if ray_group is None:
                return LLMEngine.from_engine_args(engine_args(arguments), usage_context=context)
            return engine_on_hosts(ray_group, engine_args(arguments), context)
    except Exception as error:
        raise EngineStartError(f"vLLM could not start: {_describe(error)}") from error


def _install(engine: Any, task: Task) -> None:
    """Put our own code for the rows and logprobs of a task into the workers. Says which of it this vLLM cannot take."""
    rows = task.vocabulary_rows
    if rows is not None and not install(engine, "install_vocabulary_rows", rows.dtype, rows.token_ids):
        print("rows of logits come in vLLM's own order, which is slower", flush=True)
    if ks := scored_ks(task):
        if not install(engine, "install_scores", ks):
            print("vLLM's own code takes the logprobs, which is slower or needs more memory", flush=True)
        join_results(engine)


class VllmEngine:
    """One vLLM engine, driven by its own `LLMEngine.step` loop. Implements `engines.protocol.Engine`."""

    output_room = 1  # tokens that must fit after a prompt
    arguments = staticmethod(engine_arguments)

    def __init__(
        self,
        task: Task,
        model_path: str,
        tokenizer_path: str,
        revision: str | None = None,
        adapters: tuple[Adapter, ...] = (),
        ray_group: RayGroup | None = None,
    ) -> None:
        """ray_group: see `Launch`."""
        environment = _environment()  # before vLLM adds its own
        self._task = task
        spec = task.spec
        arguments = self.arguments(task, model_path, tokenizer_path, revision)
        arguments |= lora_arguments(adapters, arguments)
        install_arrays()
        if ray_group is not None:
            arguments["distributed_executor_backend"] = "ray"
        if "VLLM_ENGINE_READY_TIMEOUT_S" not in os.environ:
            # Not by the variable: it is part of the key of vLLM's compile cache.
            core_client.VLLM_ENGINE_READY_TIMEOUT_S = math.ceil(spec.start_timeout_s)
        self._engine: Any = _start(arguments, ray_group)
        self._rendering: Rendering | None = None
        if spec.input.images is not None:
            self._rendering = Rendering(self._engine)
            if current_platform.is_cuda():
                print("vLLM's own attention and steps are used: those of batchinf are for text alone", flush=True)
        self._tell_parser: Any = None
        if "reasoning_parser" in arguments:
            from batchinf.engines.vllm.structured_output.structures import tell_parser

            self._tell_parser = tell_parser(self._engine, spec.input.chat_template_kwargs)
        _install(self._engine, task)
        self._lacks_raw = wants_late_mask(task) and not install(self._engine, "install_late_mask")
        self._stats = _Stats()
        self._stats.replace_loggers(self._engine)
        self._request_error = ""  # vLLM's words of the latest request that ended with `error`
        self._hear_errors()
        client = self._engine.engine_core
        self._watchdog = _Watchdog(client) if all(hasattr(client, name) for name in _Watchdog.NEEDS) else None
        self._live: dict[str, Request] = {}
        self._unbegun: deque[tuple[Request, Any]] = deque()  # requests without a token yet, with vLLM's state
        self._death: str | None = None
        self._templates: dict[str, Any] = {}
        self._latest: tuple[Any, ...] = (None, None, None)  # the sampling and the rest of the key, and its template
        self._keeps_special_tokens = spec.model.reasoning_parser is not None
        self._backend = structures_backend(arguments)
        self._calls = None
        if spec.model.tool_parser is not None:
            from batchinf.engines.vllm.structured_output.tools import CallParser

            self._calls = CallParser(spec, load_tokenizer(tokenizer_path, spec.model.trust_remote_code))
        self._adapters = lora_requests(adapters)
        self._finds_thinking = getattr(getattr(self._engine.vllm_config, "reasoning_config", None), "enabled", False)
        self.info = _info(self._engine.vllm_config, arguments, environment)
        self._started()

    def _hear_errors(self) -> None:
        """Keep vLLM's words of a request's own error: 0.33 has them in the core's output and drops them offline."""
        processor = self._engine.output_processor
        process = processor.process_outputs

        def process_outputs(outputs: list[Any], *arguments: Any, **named: Any) -> Any:
            processed = process(outputs, *arguments, **named)
            for output in (*outputs, *processed.request_outputs):
                if (error := getattr(output, "error", None)) is not None:
                    self._request_error = one_line(str(getattr(error, "message", error)), 400)
            return processed

        processor.process_outputs = process_outputs

    def _started(self) -> None:
        """For subclasses: called when vLLM is up and `info` is set."""

    def warm_up(self, request: Request) -> None:
        """See `Engine.warm_up`. Raises RowFailed if vLLM would refuse every request of the job."""
        load_adapters(self._engine, self._adapters)
        names = list(self._adapters)
        for number in range(_WARM_UP_REQUESTS):
            params = self._params(request)
            params.min_tokens = 0  # it may exceed the `max_tokens` of this short request: see `_check`
            adapter = names[number % len(names)]
            self._submit(f"warm-up-{number}", replace(request, adapter=adapter), params)
        self._run_warm_up()

    def _run_warm_up(self) -> list[Any]:
        """The outputs of the requests that were added."""
        outputs = []
        with self._alive("while it warmed up"):
            while self._engine.has_unfinished_requests():
                outputs += self._engine.step()
            self._engine.reset_prefix_cache()
        self._stats.latest = EngineStats()  # without the rows before, if the engine stays up for a retry
        return outputs

    def add(self, request: Request) -> None:
        """See `Engine.add`."""
        self._check(request)
        request = self._forced(request)
        request_id = f"{request.row_index}-{request.request_index}"
        self._submit(request_id, request, self._params(request))
        if request.rendered is not None:  # vLLM has the tensors now
            request = replace(request, rendered=None)
        self._live[request_id] = request
        states = getattr(self._engine.output_processor, "request_states", {})
        if (state := next(reversed(states.values()), None)) is not None and hasattr(state, "is_prefilling"):
            self._unbegun.append((request, state))

    def render(self, token_ids: list[int], images: Sequence[Any]) -> RenderedPrompt:
        """See `Engine.render`."""
        assert self._rendering is not None
        return self._rendering.render(token_ids, images)

    def step(self) -> list[Completion]:
        """See `Engine.step`. Returns at once if nothing runs; `LLMEngine.step` would wait forever."""
        if self._death:
            raise EngineDeadError(self._death)
        if not self._live:
            return []
        faults.point("engine.step")
        with self._alive("in a step"):
            if not self._engine.has_unfinished_requests():
                said = f": {self._request_error}" if self._request_error else " and says no more of them"
                raise RuntimeError(f"it cut {counted(len(self._live), 'request')} short{said}")
            outputs = self._engine.step()
        return [self._checked(output) for output in outputs if self._came_whole(output) or self._cannot_run(output)]

    def begun(self) -> list[Request]:
        """See `Engine.begun`. It checks only the oldest: prompts run about in the order of arrival."""
        begun = []
        while self._unbegun and not self._unbegun[0][1].is_prefilling:
            begun.append(self._unbegun.popleft()[0])
        return begun

    def num_unfinished(self) -> int:
        """See `Engine.num_unfinished`. Aborted requests count."""
        return len(self._live)

    def stats(self) -> EngineStats:
        """See `Engine.stats`. vLLM's own scheduler counts preemptions only if its prefix cache is on."""
        return self._stats.latest

    def close(self) -> None:
        """See `Engine.close`. A second call does nothing."""
        engine, self._engine, self._death = self._engine, None, "the engine is closed"
        if engine is None:
            return
        if self._watchdog is not None:
            self._watchdog.stopped.set()
        engine.engine_core.shutdown()
        del engine
        # If it ran in this process, free its memory, so that another one can start.
        if self._watchdog is None and cleanup_dist_env_and_memory is not None:
            cleanup_dist_env_and_memory()

    def _params(self, request: Request) -> Any:
        """The request's own SamplingParams, because vLLM changes the object: a copy of a template.

        Most jobs have one sampling for all rows. So the latest template is found without making its key, which takes
        2 µs, and 100 µs with a thousand biases. The copy shares with its template the values that vLLM replaces or
        extends by the same ids each time, and the structure, which vLLM rewrites once to an equivalent form.
        """
        extra = extra_of(request)
        keeps = self._keeps_special_tokens or request.tools is not None
        if request.sampling is not self._latest[0] or (extra, keeps) != self._latest[1]:
            template = self._template(request.sampling, extra, keeps_special_tokens=keeps)
            self._latest = request.sampling, (extra, keeps), template
        params = copy.copy(self._latest[2])
        params.max_tokens, params.seed = request.max_tokens, request.seed
        if (positions := positions_of(request)) is not None:
            params.extra_args = positions
        return params

    def _forced(self, request: Request) -> Request:
        """The request with the structure that its tools force on the text, which is checked with the answer."""
        sampling = request.sampling
        if request.tools is None or self._calls is None:
            return request
        try:
            structure = self._calls.structure(request.tools, sampling.structured_outputs, request.template_kwargs)
        except ValueError as error:
            raise RowFailed("invalid_tools", str(error)) from error
        return replace(request, sampling=sampling.model_copy(update={"structured_outputs": structure}))

    def _template(self, sampling: SamplingSpec, extra: dict[str, Any], *, keeps_special_tokens: bool) -> Any:
        """The cached template. Its key is by value: rows may all have their own objects and differ only in `seed`."""
        key = repr((template_of(sampling), extra, keeps_special_tokens))
        found = self._templates.get(key)
        if found is None:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            if sampling.structured_outputs:
                from batchinf.engines.vllm.structured_output.structures import check_once

                check_once()
                if self._lacks_raw and (sampling.logprobs is not None or extra):
                    raise RowFailed("invalid_sampling", _NO_RAW)
            try:
                found = self._templates[key] = sampling_params(sampling, keeps_special_tokens, extra, self._backend)
            except _REFUSALS as error:
                raise RowFailed("invalid_sampling", str(error)) from error
            self._check_bad_words(found)
        return found

    def _check_bad_words(self, params: Any) -> None:
        """Raise RowFailed for more tokens of bad words than a request of the V2 runner holds: its worker would
        raise an error, which ends the engine."""
        most = getattr(vllm.envs, "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", None)
        if not params.bad_words or most is None:
            return
        trial = copy.copy(params)
        try:
            trial.update_from_tokenizer(self._engine.input_processor.tokenizer)
        except _REFUSALS as error:
            raise RowFailed("invalid_sampling", str(error)) from error
        if (number := sum(map(len, trial.bad_words_token_ids))) > most:
            message = (
                f"bad_words has {number:,} tokens; vLLM's runner takes at most {most:,}: give fewer or shorter ones"
            )
            raise RowFailed("invalid_sampling", message)

    def _check(self, request: Request) -> None:
        """Raise RowFailed if a request cannot run: with a clearer message than vLLM's, and for what vLLM misses."""
        token_ids, limit, size = request.prompt_token_ids, self.info.max_model_len, self.info.vocab_size
        if not token_ids:
            raise RowFailed("empty_prompt", "the prompt has no tokens")
        if len(token_ids) + self.output_room > limit:
            fits = f"{limit - 1} leave room for one of output" if self.output_room else f"{limit} fit max_model_len"
            message = f"the prompt has {len(token_ids)} tokens; at most {fits}"
            raise RowFailed("prompt_too_long", message)
        low, high = min(token_ids), max(token_ids)  # 7 µs for a list of 256; numpy takes 15
        if low < 0 or high >= size:
            raise RowFailed("invalid_token_id", f"got token ids from {low} to {high}; the vocabulary has {size}")
        if request.sampling.thinking_token_budget not in (None, -1) and not self._finds_thinking:
            raise RowFailed("invalid_sampling", _NO_THINKING)
        least, most = request.sampling.min_tokens, request.max_tokens
        if least > most:  # vLLM checks it when the core process decodes SamplingParams; the core then goes silent
            raise RowFailed("invalid_sampling", f"min_tokens is {least}, but only {most} tokens may be generated")

    def _submit(self, request_id: str, request: Request, params: Any) -> None:
        if self._death:
            raise EngineDeadError(self._death)
        if self._tell_parser is not None:
            self._tell_parser(request.template_kwargs)
        try:
            with self._alive("when a request was added", harmless=_REFUSALS):
                prompt = request.rendered or tokens_input(request.prompt_token_ids)
                adapter = self._adapters[request.adapter]
                self._engine.add_request(request_id=request_id, prompt=prompt, params=params, lora_request=adapter)
        except _REFUSALS as error:
            self._engine.abort_request([request_id])  # part of vLLM may have added it
            is_sampling = getattr(error, "parameter", None) in SamplingParams.__struct_fields__
            raise RowFailed("invalid_sampling" if is_sampling else "refused", str(error)) from error

    @contextlib.contextmanager
    def _alive(self, where: str, harmless: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Treat the engine as dead if it raises anything but `harmless`: at least its batch is lost."""
        try:
            yield
        except harmless:
            raise
        except Exception as error:
            self._death = f"vLLM's engine died {where}: {_describe(error)}"
            raise EngineDeadError(self._death) from error

    def _checked(self, output: Any) -> Completion:
        request = self._live[output.request_id]
        try:
            return self._completion(output)
        except BatchinfError as error:
            raise BatchinfError(f"row {request.row_index}, request {request.request_index}: {error}") from error

    def _completion(self, output: Any) -> Completion:
        request, answer = self._live.pop(output.request_id), output.outputs[0]
        sampling, num_scored = request.sampling, len(request.prompt_token_ids) - 1
        if not answer.token_ids:  # see `_cannot_run`
            return Completion(request, np.zeros(0, np.int32), answer.finish_reason, answer.stop_reason)
        if request.rows is not None:
            values = request.rows.own_columns(vocabulary_rows(request.rows, answer.logprobs, output.prompt_logprobs))
            token_ids = np.array(answer.token_ids, np.int32)
            return Completion(request, token_ids, answer.finish_reason, answer.stop_reason, values=values)
        k = len(request.logprob_token_ids) if request.logprob_token_ids else sampling.logprobs
        logprobs = token_logprobs(answer.logprobs, k, len(answer.token_ids))
        return Completion(
            request=request,
            token_ids=np.array(answer.token_ids, np.int32),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            text=answer.text if sampling.stop_strings else None,
            # Added from left to right in float64, as in vLLM.
            cumulative_logprob=None if logprobs is None else float(np.cumsum(logprobs.logprobs[:, 0], dtype=float)[-1]),
            logprobs=logprobs,
            prompt_logprobs=token_logprobs(output.prompt_logprobs, sampling.prompt_logprobs, num_scored),
        )

    def _came_whole(self, output: Any) -> bool:
        reason = output.outputs[0].finish_reason
        if reason not in FINISHED | CUT_SHORT:
            raise BatchinfError(f"vLLM ended a request for an unknown reason, {reason!r}")
        return reason in FINISHED

    def _cannot_run(self, output: Any) -> bool:
        """Whether a request ended with `error` because of its structure: it would do so again."""
        request = self._live.get(output.request_id)
        if request is None or request.sampling.structured_outputs is None:
            return False
        answer = output.outputs[0]
        if answer.finish_reason != "error":
            return False
        answer.stop_reason = self._request_error or (_TOKEN_REJECTED if answer.token_ids else _NOT_COMPILED)
        self._request_error = ""
        return True


def _describe(error: Exception) -> str:
    # Ray's error of a rank on another host begins with a long traceback.
    error = cause if isinstance(cause := getattr(error, "cause", None), Exception) else error
    # All lines: the first line of pydantic's errors only says how many there are.
    return one_line(f"{type(error).__name__}: {error}", 400)


class _Watchdog(threading.Thread):
    """Ends waits for a killed EngineCore process: vLLM 0.32 and 0.33 notice its death, but wakes no waiting thread."""

    NEEDS = ("resources", "outputs_queue", "utility_results")  # missing if the engine runs in this process

    def __init__(self, client: Any) -> None:
        super().__init__(name="engine-watchdog", daemon=True)
        # It holds no reference to the client, which ends its engine when it is freed.
        self._resources, self._outputs, self._calls = (getattr(client, name) for name in self.NEEDS)
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """Watch until stopped, or until the engine is dead."""
        while not self.stopped.wait(_WATCH_S):
            if self._resources.engine_dead:
                self._outputs.put_nowait(VllmEngineDeadError())
                for call in list(self._calls.values()):
                    call.set_exception(VllmEngineDeadError())
                return


class _Stats:
    """The scheduler's figures after the latest step. vLLM calls them unstable, so each is read with a default."""

    def __init__(self) -> None:
        self.latest = EngineStats()

    def replace_loggers(self, engine: Any) -> None:
        """Let vLLM call only `record`, after each step."""
        engine.logger_manager, engine.log_stats, engine.output_processor.log_stats = None, False, False
        engine.output_processor.update_scheduler_stats = lambda stats: self.record(stats) if stats else None

    def record(self, scheduler_stats: Any) -> None:
        last, cache = self.latest, getattr(scheduler_stats, "prefix_cache_stats", None)
        num_skipped = getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
        self.latest = EngineStats(
            num_running=getattr(scheduler_stats, "num_running_reqs", 0),
            num_waiting=getattr(scheduler_stats, "num_waiting_reqs", 0) + num_skipped,
            kv_cache_usage=getattr(scheduler_stats, "kv_cache_usage", 0.0),
            num_preemptions=last.num_preemptions + getattr(cache, "preempted_requests", 0),
            prefix_cache_queries=last.prefix_cache_queries + getattr(cache, "queries", 0),
            prefix_cache_hits=last.prefix_cache_hits + getattr(cache, "hits", 0),
        )


_PARTS = ("scheduler_cls", "worker_cls", "worker_extension_cls")


def parts_of(arguments: dict[str, Any], is_v2: bool) -> set[str]:
    """The parts of this package that an engine has: `Piece.used_by` has their names."""
    given = {name: str(arguments.get(name)).rpartition(".")[2] for name in _PARTS}
    # The kernels and graphs are for FlashAttention 3.
    if not current_platform.is_cuda() or not current_platform.is_device_capability(90):
        del given["worker_cls"]
    if given.get("worker_cls") == "PromptWorker" and not (arguments.get("additional_config") or {}).get(WHOLE_STEPS):
        del given["worker_cls"]
    given["worker_extension_cls"] += "_V2" if is_v2 else "_V1"
    return {"front_end", *given.values()}


def _info(config: Any, arguments: dict[str, Any], environment: dict[str, str]) -> EngineInfo:
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    is_v2 = getattr(config, "use_v2_model_runner", None)
    not_used = pieces_off(parts_of(arguments, bool(is_v2)))
    for piece in not_used:
        allowed(piece)  # prints its line, also for a piece that nothing has asked for, since another one is off
    return EngineInfo(
        max_model_len=model.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        vocab_size=model.hf_text_config.vocab_size,
        device=current_platform.get_device_name(),
        versions=_versions(),
        settings={
            "dtype": str(model.dtype).removeprefix("torch."),
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "use_v2_model_runner": is_v2,
            # The one that was requested. Which one vLLM chose by itself is only in its log.
            "attention_backend": str(getattr(getattr(config, "attention_config", None), "backend", None) or "auto"),
            "kv_cache_size_tokens": getattr(cache, "kv_cache_size_tokens", None)
            or (cache.num_gpu_blocks or 0) * cache.block_size,
            # Pieces of this package that are not for this version of vLLM, and lines about those that cost much.
            "not_used": not_used,
            "slower": [line_if_off(piece) for piece in not_used if PIECES[piece].costs_much],
            "engine_arguments": arguments,
            "environment": environment,
        },
    )


def _environment() -> dict[str, str]:
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith("VLLM_")}
    return {name: "(not recorded)" if any(s in name for s in _SECRETS) else value for name, value in found.items()}


def _versions() -> dict[str, str]:
    versions = {"batchinf": __version__, "python": platform.python_version()}
    versions |= {module.__name__: str(module.__version__) for module in (vllm, torch, transformers)}
    if torch.version.cuda:
        import pynvml

        pynvml.nvmlInit()
        versions |= {"cuda": torch.version.cuda, "driver": str(pynvml.nvmlSystemGetDriverVersion())}
    return versions

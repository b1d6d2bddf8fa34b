"""Out of memory: recognises the errors of vLLM and torch, and lowers the engine arguments for the next start.

Only runtime engine arguments are lowered, for all replicas alike. A replica whose start fails gets one more start. Each
failure while running lowers the arguments further, down to a floor; at the floor, it counts as a death like any other.
Changes of arguments that decide the output are only advised. Each manifest snapshot keeps the last `oom_step_down`; a
resume starts from it unless the spec has another value by then. A test searches the installed vLLM for the error texts
below.
"""

import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from batchinf.base.text import one_line
from batchinf.model.memory import DEFAULT_GPU_MEMORY_UTILIZATION, GIB, RESERVE_BYTES, Fit, Needs, default_limits, gib
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

Kind = Literal["free", "cache", "length", "load", "start", "step", "host"]

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"

# vLLM asks for a share of the device, but less is free.
_FREE = re.compile(
    r"(?:Free|Available) memory on (?:device|node) (?P<device>\S+) \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) "
    r"on startup is less than desired (?:GPU|CPU) memory utilization \((?P<share>[\d.]+), (?P<asked>[\d.]+) GiB\)"
)
# Weights and activations leave nothing for the KV cache.
_CACHE = re.compile(
    r"No available memory for the cache blocks|Cannot auto-fit max_model_len: not enough GPU memory|"
    r"on kv cache allocation is less than requested memory for kv"
)
# Too little is left for one sequence; the second text is from older versions.
_LENGTH = re.compile(
    r"model'?s'?s? max seq len \((?P<length>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed, which is larger than "
    r"the available KV cache memory \((?P<available>[\d.]+) GiB\)"
    r"(?:\. Based on the available memory, the estimated maximum model length is (?P<most>\d+))?|"
    r"max seq len \((?P<length_>\d+)\) is larger than the maximum number of tokens that can be stored in KV cache "
    r"\((?P<most_>\d+)\)"
)
_LOAD = re.compile(r"Failed to load model - not enough GPU memory")
_WARM_UP = re.compile(r"out of memory occurred when warming up (?:sampler|pooler)")
# torch's allocator, then the libraries that allocate by themselves.
_DEVICE = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory|OutOfMemoryError|CUDA error: out of memory|cudaErrorMemoryAllocation|"
    r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY|"
    r"Cuda failure(?: \d+)? 'out of memory'"
)
_TRIED = re.compile(rf"Tried to allocate {_SIZE}\. GPU \S+ has a total capacity of {_SIZE} of which {_SIZE} is free")
_HOST = re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|\bMemoryError\b|Cannot allocate memory")

# Below these, a smaller batch saves almost nothing. Hybrid caches need a batch of at least one of their large blocks.
_LEAST_SEQS = 16
_LEAST_BATCHED_TOKENS = 2048
_LEAST_ROWS = 512
_SHARE_STEP = 0.05
_MOST_SHARE_STEP = 0.3
# If the model's needs are unknown.
_LEAST_SHARE = 0.3
_MOST_DEGREE = 16
# Shorter sequences are not advised.
_LEAST_LENGTH = 256


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One failure. Sizes are None if the error text does not say."""

    kind: Kind
    """`free` less memory is free than asked for; `cache` nothing is left for the KV cache; `length` too little for one
    sequence; `load` while the weights were loaded; `start` later in the start; `step` while running; `host` the host's
    memory."""
    words: str
    asked_bytes: int | None = None
    """By vLLM or torch."""
    free_bytes: int | None = None
    total_bytes: int | None = None
    needed_bytes: int | None = None
    """KV cache of one sequence."""
    available_bytes: int | None = None
    """For the KV cache of one sequence."""
    most_tokens: int | None = None
    """The longest sequence that fits."""


def recognise(text: str, *, was_up: bool) -> OutOfMemory | None:
    """The failure in a replica's error message or its log's errors; None if memory did not run out.

    was_up: whether the engine had started.
    """
    text = one_line(text)
    if not was_up and (failure := _at_check(text)) is not None:
        return failure
    if match := _WARM_UP.search(text) or _DEVICE.search(text):
        kind: Kind = "step" if was_up else "load" if _LOAD.search(text) else "start"
        return _with_sizes(OutOfMemory(kind, match[0]), text)
    if match := _HOST.search(text):
        return OutOfMemory("host", match[0])
    return None


def _at_check(text: str) -> OutOfMemory | None:
    """A failure that vLLM's own checks of a start found."""
    if match := _FREE.search(text):
        return OutOfMemory(
            "free",
            match[0],
            asked_bytes=_of_gib(match["asked"]),
            free_bytes=_of_gib(match["free"]),
            total_bytes=_of_gib(match["total"]),
        )
    if match := _LENGTH.search(text):
        most = match["most"] or match["most_"]
        return OutOfMemory(
            "length",
            match[0],
            needed_bytes=_of_gib(match["needed"]),
            available_bytes=_of_gib(match["available"]),
            most_tokens=int(most) if most else None,
        )
    if match := _CACHE.search(text):
        return OutOfMemory("cache", match[0])
    return None


def _of_gib(size: str | None) -> int | None:
    return None if size is None else int(float(size) * GIB)


def _with_sizes(failure: OutOfMemory, text: str) -> OutOfMemory:
    match = _TRIED.search(text)
    if match is None:
        return failure
    asked, total, free = (int(float(match[i]) * _UNITS[match[i + 1]]) for i in (1, 3, 5))
    return replace(failure, words=match[0], asked_bytes=asked, free_bytes=free, total_bytes=total)


def effective(engine: Mapping[str, Any], fit: Fit) -> dict[str, Any]:
    """The settings that a step lowers: of the spec, else of the task, else vLLM's offline defaults."""
    defaults = {
        **default_limits(fit.device_bytes, fit.device_name),
        "gpu_memory_utilization": DEFAULT_GPU_MEMORY_UTILIZATION,
    }
    names = (*defaults, "kv_cache_memory_bytes", "num_gpu_blocks_override")
    return {**defaults, **fit.batch_limits, **{name: engine[name] for name in names if engine.get(name) is not None}}


def step_down(engine: Mapping[str, Any], cause: OutOfMemory, fit: Fit) -> dict[str, Any] | None:
    """The runtime engine arguments to change, with their new values; None at the floor, or if nothing would help.

    It never changes arguments that decide the output, such as `max_model_len`. By kind:

    - `free`: another program holds memory. Ask for no more than is free, if weights and one sequence fit into that.
    - `cache`, `length`: vLLM measures activations with a full batch, so smaller batches leave more for the KV cache.
      They do not help if the weights alone leave too little.
    - `load`: only weights were loaded yet, so there is nothing to lower.
    - `start`: a full batch, or a step after the KV cache (CUDA graphs, the sampler's warm-up), did not fit. Lower
      batches and share together, because there is one try.
    - `step`: vLLM did not measure enough outside of its share. Lower the share by what was missing; at its floor, lower
      the batches.
    - `host`: lower the batches.
    """
    now = effective(engine, fit)
    share = now["gpu_memory_utilization"]
    match cause.kind:
        case "free":
            return _to_what_is_free(now, cause, fit)
        case "cache" | "length":
            # A cache of a given size (always so on a CPU) does not grow when something else shrinks.
            is_given = fit.device_bytes is None or now.keys() & {"kv_cache_memory_bytes", "num_gpu_blocks_override"}
            return None if is_given or fit.fits(share) is False else _smaller_batches(engine, now, fit)
        case "start":
            smaller = (_smaller_batches(engine, now, fit) or {}) | (_smaller_pool(now, cause, fit) or {})
            return smaller or None
        case "step":
            return _smaller_pool(now, cause, fit) or _smaller_batches(engine, now, fit)
        case "host":
            return _smaller_batches(engine, now, fit)
    return None


def _to_what_is_free(now: Mapping[str, Any], cause: OutOfMemory, fit: Fit) -> dict[str, Any] | None:
    if not cause.total_bytes or cause.free_bytes is None:
        return None
    # One hundredth less, because the figures are rounded.
    share = int(cause.free_bytes / cause.total_bytes * 100 - 1) / 100
    least = replace(fit, device_bytes=cause.total_bytes).least_utilization()
    is_enough = share >= (_LEAST_SHARE if least is None else least)
    return {"gpu_memory_utilization": share} if is_enough and share < now["gpu_memory_utilization"] else None


def _smaller_batches(engine: Mapping[str, Any], now: Mapping[str, Any], fit: Fit) -> dict[str, Any] | None:
    smaller = {}
    num_seqs = now["max_num_seqs"]
    if isinstance(num_seqs, int) and num_seqs > _LEAST_SEQS:
        smaller["max_num_seqs"] = num_seqs = max(_LEAST_SEQS, num_seqs // 2)
    tokens = now["max_num_batched_tokens"]
    if _has_chunks(engine, fit) and isinstance(tokens, int):
        least = _least_tokens(tokens, num_seqs, fit)
        if tokens > least:
            smaller["max_num_batched_tokens"] = max(least, tokens // 2)
    return smaller or None


def _has_chunks(engine: Mapping[str, Any], fit: Fit) -> bool:
    """Whether vLLM cuts long prompts. Otherwise a step must hold the longest prompt."""
    is_named = engine.get("max_num_batched_tokens") is not None
    # On a CPU, chunks are off unless a size is given.
    return engine.get("enable_chunked_prefill") is not False and (is_named or fit.device_bytes is not None)


def _least_tokens(tokens: int, num_seqs: int, fit: Fit) -> int:
    """The floor of `max_num_batched_tokens`, which is `tokens` now."""
    # A task with its own limit holds a row of the vocabulary for each token, so a few tokens matter.
    floor = _LEAST_ROWS if "max_num_batched_tokens" in fit.batch_limits else _LEAST_BATCHED_TOKENS
    least = max(floor, num_seqs)
    if fit.device_bytes is None:  # smaller steps would cut prompts: see `check_processor`
        least = max(least, fit.max_model_len or tokens)
    return least


def _smaller_pool(now: Mapping[str, Any], cause: OutOfMemory, fit: Fit) -> dict[str, Any] | None:
    """A smaller share for vLLM, or the setting that replaces the share; one sequence must still fit."""
    if isinstance(blocks := now.get("num_gpu_blocks_override"), int):
        return {"num_gpu_blocks_override": int(blocks * 0.9)} if blocks * 0.9 * 16 >= (fit.max_model_len or 0) else None
    if isinstance(size := now.get("kv_cache_memory_bytes"), int):
        least = fit.sequence_bytes or size // 2
        return {"kv_cache_memory_bytes": int(size * 0.9)} if size * 0.9 >= least else None
    return _smaller_share(now["gpu_memory_utilization"], cause, fit)


def _smaller_share(now: float, cause: OutOfMemory, fit: Fit) -> dict[str, Any] | None:
    """A smaller `gpu_memory_utilization`: by what was missing, or by the usual step if that is too much."""
    steps = [_SHARE_STEP]
    if cause.asked_bytes and cause.total_bytes:
        missing = (cause.asked_bytes - (cause.free_bytes or 0)) / cause.total_bytes
        steps.insert(0, max(_SHARE_STEP, min(_MOST_SHARE_STEP, missing + 0.01)))
    least = fit.least_utilization()
    shares = (round(now - step, 2) for step in steps)
    share = next((share for share in shares if share >= (_LEAST_SHARE if least is None else least)), None)
    return None if share is None else {"gpu_memory_utilization": share}


def explain(cause: OutOfMemory, engine: Mapping[str, Any], fit: Fit, model: str) -> str:
    """One message: what was needed, what there was, and the changes that would help by calculation."""
    changes = _changes(cause, engine, fit)
    can = f"; to go on, {'; or '.join(changes)}" if changes else ""
    return f"{_WHAT[cause.kind]}: {', '.join(_figures(cause, engine, fit, model))}{can}"


_WHAT: dict[Kind, str] = {
    "free": "not enough memory is free on the device",
    "cache": "out of memory at the start, nothing is left for the KV cache",
    "length": "out of memory at the start, the KV cache would not hold one sequence of max_model_len",
    "load": "out of memory while the weights were loaded",
    "start": "out of memory at the start",
    "step": "out of memory while running",
    "host": "out of the host's memory",
}


def _figures(cause: OutOfMemory, engine: Mapping[str, Any], fit: Fit, model: str) -> list[str]:
    degree = fit.tensor_parallel_size * fit.pipeline_parallel_size
    each = f" on each of {degree} devices" if degree > 1 else ""
    length = "" if fit.max_model_len is None else f" {fit.max_model_len:,}"
    asker = "vLLM asked for" if cause.kind == "free" else "the allocation that failed was of"
    share = effective(engine, fit)["gpu_memory_utilization"]
    device_bytes = cause.total_bytes or fit.device_bytes
    figures: list[tuple[float | None, Callable[[float], str]]] = [
        (fit.weight_bytes, lambda size: f"{model} takes {gib(size)} for its weights{each}"),
        (
            cause.needed_bytes or fit.sequence_bytes,
            lambda size: f"the KV cache of one sequence of max_model_len{length} takes {gib(size)}",
        ),
        (cause.available_bytes, lambda size: f"{gib(size)} were left for it"),
        (cause.asked_bytes, lambda size: f"{asker} {gib(size)}"),
        (cause.free_bytes, lambda size: f"{gib(size)} were free"),
        (
            device_bytes or None,
            lambda size: (
                f"the device has {gib(size)}, of which gpu_memory_utilization {share:g} is {gib(size * share)}"
            ),
        ),
    ]
    return [text(size) for size, text in figures if size is not None] or [cause.words]


def _changes(cause: OutOfMemory, engine: Mapping[str, Any], fit: Fit) -> list[str]:
    """Advice, runtime settings first: with these the same command resumes the job."""
    now = effective(engine, fit)
    step = step_down(engine, cause, fit)
    if step is not None and cause.kind in ("free", "start", "step", "host"):
        changes = [f"set {' and '.join(f'engine.{name} to {value}' for name, value in step.items())}"]
    else:
        changes = []
    if cause.kind == "free":
        return [*changes, "end what else runs on the device, or choose another with parallel.devices"]
    if cause.kind in ("cache", "length", "load"):
        changes += _more_room(cause, now, fit)
    changes += _new_job(cause, engine, now, fit)
    return changes


def _more_room(cause: OutOfMemory, now: Mapping[str, Any], fit: Fit) -> list[str]:
    """More of the device, or more devices; both may change on a resume."""
    changes: list[str] = []
    if fit.device_bytes is None and cause.needed_bytes is not None:
        space = math.ceil(cause.needed_bytes / GIB)
        return [f"set the environment variable VLLM_CPU_KVCACHE_SPACE to {space} (GiB), which sizes the cache on a CPU"]
    share = now["gpu_memory_utilization"]
    least = _least_share(cause, share, fit)
    if cause.kind != "load" and least is not None and share < least <= 0.97:
        changes.append(f"raise engine.gpu_memory_utilization to {least:g}")
    if degree := _least_degree(cause, now, fit):
        changes.append(f"set parallel.tensor_parallel_size to {degree}")
    return changes


def _least_share(cause: OutOfMemory, share: float, fit: Fit) -> float | None:
    """The `gpu_memory_utilization` at which the job would fit; None if that is not known. share: now."""
    least = fit.least_utilization(RESERVE_BYTES)
    if cause.kind != "length" or not fit.device_bytes or not cause.needed_bytes or cause.available_bytes is None:
        return least
    # vLLM's own figures include activations.
    missing = (cause.needed_bytes - cause.available_bytes) / fit.device_bytes
    return max(least or 0.0, int((share + missing) * 100 + 2) / 100)


def _would_fit(changed: Fit, fit: Fit, cause: OutOfMemory, now: Mapping[str, Any]) -> bool:
    """Whether the weights and one sequence would fit; by vLLM's figure of what was left, if it gave one."""
    before = fit.weight_bytes
    after = changed.weight_bytes
    sequence = changed.sequence_bytes
    if cause.available_bytes is None or before is None or after is None or sequence is None:
        return bool(changed.fits(now["gpu_memory_utilization"], RESERVE_BYTES))
    return sequence <= cause.available_bytes + before - after


def _least_degree(cause: OutOfMemory, now: Mapping[str, Any], fit: Fit) -> int | None:
    """The next tensor-parallel size, doubling, at which weights and one sequence fit; None if none does."""
    degree = fit.tensor_parallel_size * 2
    while degree <= _MOST_DEGREE:
        if _would_fit(replace(fit, tensor_parallel_size=degree), fit, cause, now):
            return degree
        degree *= 2
    return None


def _new_job(cause: OutOfMemory, engine: Mapping[str, Any], now: Mapping[str, Any], fit: Fit) -> list[str]:
    """Advice that changes the output, and so needs a new job."""
    if cause.kind not in ("cache", "length", "load"):
        return []
    choices = []
    most = cause.most_tokens
    if not most and cause.kind != "length":
        most = fit.most_tokens(now["gpu_memory_utilization"], RESERVE_BYTES)
    if most and most >= _LEAST_LENGTH and (fit.max_model_len is None or most < fit.max_model_len):
        choices.append(f"engine.max_model_len {most} or less")
    if not _would_fit(fit, fit, cause, now):
        smaller = _smaller_needs(engine, fit.needs)
        choices += [name for name, needs in smaller if _would_fit(replace(fit, needs=needs), fit, cause, now)]
    return [f"begin a new job, with another output.path, with {' or '.join(choices)}"] if choices else []


def _smaller_needs(engine: Mapping[str, Any], needs: Needs) -> Iterator[tuple[str, Needs]]:
    """What the model would need with another type of the cache or of the weights, by the field to change."""
    cache = needs.kv_cache
    if cache is not None and cache.item_bytes == 2 and not engine.get("kv_cache_dtype"):
        yield "engine.kv_cache_dtype fp8", replace(needs, kv_cache=cache.in_fp8())
    if needs.weights is not None and cache is not None:
        name = "model.quantization fp8, where the weights are not quantized yet"
        yield name, replace(needs, weights=needs.weights.halved())


# A replica is given up after this many starts without enough memory: the first, and one with lower settings.
_MOST_STARTS = 2


@dataclass(frozen=True, slots=True)
class Lowered:
    """One step down: the fields of the event `oom_step_down`."""

    cause: str
    before: dict[str, Any]
    after: dict[str, Any]
    lowered: dict[str, Any]
    """All settings that are lower than the spec's by now."""
    applies_to: dict[str, Any]
    """The spec's values then, by dotted name; None if it had none. If the spec has another value later, that value
    counts instead of the lowered one."""

    def fields(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "cause": self.cause,
            "from": self.before,
            "to": self.after,
            "lowered": self.lowered,
            "applies_to": self.applies_to,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to a replica that ran out of memory."""

    action: Literal["again", "given up", "died"]
    """`again`: it starts with the latest settings, lowered by `step` or by another replica before. `given up`: nothing
    is left to try. `died`: nothing is left to lower, so it counts as any other death."""
    words: str
    """For people."""
    step: Lowered | None = None


class EngineSettings:
    """The current engine arguments, and those with which each incarnation was started."""

    def __init__(
        self, spec: JobSpec, fit: Fit, lowered: Mapping[str, Any] | None = None, chosen: Mapping[str, Any] | None = None
    ) -> None:
        """lowered: by an earlier epoch; see `kept`. chosen: where the spec is silent."""
        self._spec = spec
        self._chosen = dict(chosen or {})
        self._fit = fit
        self._lowered = dict(lowered or {})
        self._generation = 0
        self._launched: dict[str, tuple[int, dict[str, Any]]] = {}
        self._failed_starts: dict[int, int] = {}

    @property
    def fit(self) -> Fit:
        """The model on the devices."""
        return self._fit

    @property
    def engine(self) -> dict[str, Any]:
        """Engine arguments for the next start."""
        engine = {**self._chosen, **self._spec.engine, **self._lowered}
        limit = "max_num_seqs" if task_of(self._spec).draws_tokens else "max_num_batched_tokens"
        if "compilation_config" in self._chosen and limit in self._lowered:
            # Graphs for batches that do not occur any more would only take memory.
            graphs = self._chosen["compilation_config"]
            sizes = graphs["cudagraph_capture_sizes"]
            # A full batch or step has a graph of its own.
            smaller = sorted({self._lowered[limit], *(size for size in sizes if size <= self._lowered[limit])})
            engine["compilation_config"] = {**graphs, "cudagraph_capture_sizes": smaller}
        return engine

    def launch_spec(self, incarnation: str, spec: JobSpec | None = None) -> str:
        """The spec as JSON for this incarnation, with lowered arguments. spec: of a retry, which has other sampling."""
        self._launched[incarnation] = self._generation, self.engine
        spec = spec or self._spec
        return spec.model_copy(update={"engine": {**spec.engine, **self.engine}}).model_dump_json()

    def judge(self, replica: int, incarnation: str, cause: OutOfMemory, *, was_up: bool) -> Verdict:
        """Lower the settings if that can help; once for each incarnation, after its end. was_up: it had started."""
        generation, engine = self._launched.pop(incarnation, (self._generation, self.engine))
        words = explain(cause, engine, self._fit, pathlib.Path(self._spec.model.name).name)
        self._failed_starts[replica] = 0 if was_up else self._failed_starts.get(replica, 0) + 1
        if self._spec.on_oom == "fail":
            return Verdict("given up", f"{words} (on_oom is fail)")
        if self._failed_starts[replica] >= _MOST_STARTS:
            return Verdict("given up", f"{words}{self._tried()}")
        if generation < self._generation:
            return Verdict("again", f"{_head(words)}; starting again with the lowered {_show(self._lowered)}")
        step = step_down(self.engine, cause, self._fit)
        if step is None:
            return Verdict("died" if was_up else "given up", f"{words}{self._tried()}")
        return self._take(step, cause, words)

    def _take(self, step: dict[str, Any], cause: OutOfMemory, words: str) -> Verdict:
        now = effective(self.engine, self._fit)
        before = {name: now[name] for name in step}
        self._lowered = self._lowered | step
        self._generation += 1
        line = Lowered(
            cause=cause.words,
            before=before,
            after=step,
            lowered=dict(self._lowered),
            applies_to=applies_to(self._spec, self._lowered),
        )
        changes = ", ".join(f"{name} {before[name]} -> {value}" for name, value in step.items())
        return Verdict("again", f"{_head(words)}; starting again with {changes}", line)

    def _tried(self) -> str:
        return f" (tried with {_show(self._lowered)} already)" if self._lowered else ""


def _head(words: str) -> str:
    # Advice follows only when nothing is left to try.
    return words.partition("; to go on, ")[0]


def _show(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def applies_to(spec: JobSpec, lowered: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec that decide whether lowered settings still apply."""
    degrees = ("tensor_parallel_size", "pipeline_parallel_size", "replicas_per_device")
    settings = {f"engine.{name}": spec.engine.get(name) for name in lowered}
    return settings | {f"parallel.{name}": getattr(spec.parallel, name) for name in degrees}


def kept(spec: JobSpec, event: Mapping[str, Any]) -> dict[str, Any]:
    """The lowered settings of the last `oom_step_down` event that still apply on a resume. event: empty without one.

    A setting is dropped if the spec has another value now; all are dropped if the parallel degrees changed.
    """
    lowered = dict(event.get("lowered", {}))
    before = event.get("applies_to", {})
    now = applies_to(spec, lowered)
    if any(now[name] != before.get(name) for name in now if name.startswith("parallel.")):
        return {}
    return {name: value for name, value in lowered.items() if now[f"engine.{name}"] == before.get(f"engine.{name}")}

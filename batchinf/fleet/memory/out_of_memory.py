"""Recognises the errors of vLLM and torch that say that memory ran out.

A test searches the installed vLLM for the error texts below.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from batchinf.base.text import one_line
from batchinf.model.memory import GIB

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
_AT_CHECK: dict[Kind, re.Pattern[str]] = {"free": _FREE, "length": _LENGTH, "cache": _CACHE}
_GIB_GROUPS = frozenset({"asked", "free", "total", "needed", "available"})  # groups of these patterns, in GiB
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
    """The failure in a replica's error or its log; None if memory did not run out. was_up: the engine had started."""
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
    for kind, pattern in _AT_CHECK.items():
        if match := pattern.search(text):
            groups = match.groupdict()
            sizes = {f"{name}_bytes": int(float(groups[name]) * GIB) for name in _GIB_GROUPS if groups.get(name)}
            most = groups.get("most") or groups.get("most_")
            return OutOfMemory(kind, match[0], **sizes, most_tokens=int(most) if most else None)
    return None


def _with_sizes(failure: OutOfMemory, text: str) -> OutOfMemory:
    match = _TRIED.search(text)
    if match is None:
        return failure
    asked, total, free = (int(float(match[i]) * _UNITS[match[i + 1]]) for i in (1, 3, 5))
    return replace(failure, words=match[0], asked_bytes=asked, free_bytes=free, total_bytes=total)

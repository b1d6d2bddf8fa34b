"""Recognises the errors of vLLM and torch that say that memory ran out.

A test searches the installed vLLM for the error texts below.
"""

import re
from dataclasses import dataclass
from typing import Literal

from batchinf.base.text import one_line

Kind = Literal["free", "cache", "load", "batch"]

# vLLM asks for a share of the device, but less is free.
_FREE = re.compile(
    r"(?:Free|Available) memory on (?:device|node) \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) "
    r"on startup is less than desired (?:GPU|CPU) memory utilization"
)
# Weights and activations leave nothing for the KV cache, or too little for one sequence.
_CACHE = re.compile(
    r"No available memory for the cache blocks|Cannot auto-fit max_model_len: not enough GPU memory|"
    r"on kv cache allocation is less than requested memory for kv|"
    r"(?:To serve at least one request with the |The )?model'?s'?s? max seq len \(\d+\)"
    r"(?:, \([\d.]+ GiB KV cache is needed| is larger than the maximum number of tokens that can be stored in KV cache)"
)
_LOAD = re.compile(r"Failed to load model - not enough GPU memory")
# vLLM's warm-up, torch's allocators, then the libraries that allocate by themselves, and the host's memory.
_BATCH = re.compile(
    r"out of memory occurred when warming up (?:sampler|pooler)|"
    r"(?:CUDA|HIP|XPU) out of memory|OutOfMemoryError|CUDA error: out of memory|cudaErrorMemoryAllocation|"
    r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY|"
    r"Cuda failure(?: \d+)? 'out of memory'|"
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|\bMemoryError\b|Cannot allocate memory"
)
_AT_START: dict[Kind, re.Pattern[str]] = {"free": _FREE, "cache": _CACHE, "load": _LOAD}
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One failure."""

    kind: Kind
    """`free`: less memory is free than vLLM asks for. `cache`: too little is left for the KV cache. `load`: the weights
    do not fit. `batch`: any other, at the start or later."""
    words: str
    """Of vLLM or torch."""
    free_share: float | None = None
    """Of the device's memory; for the kind `free`."""


def recognise(text: str, *, was_up: bool) -> OutOfMemory | None:
    """The failure in a replica's error or its log; None if memory did not run out. was_up: the engine had started."""
    text = one_line(text)
    for kind, pattern in {} if was_up else _AT_START.items():
        if match := pattern.search(text):
            groups = match.groupdict()
            share = float(groups["free"]) / float(groups["total"]) if groups else None
            return OutOfMemory(kind, _sentences(text, match.start()), share)
    match = _BATCH.search(text)
    return None if match is None else OutOfMemory("batch", _sentences(text, match.start()))


def _sentences(text: str, start: int) -> str:
    """The words from a place on; whole sentences, if they are long."""
    words = text[start : start + _LONGEST]
    return words if len(words) < _LONGEST else words.rpartition(". ")[0] or words

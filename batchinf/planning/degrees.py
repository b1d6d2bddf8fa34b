"""Finds the degrees at which a model fits a number of GPUs, and the memory missing at others. Pure arithmetic."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from batchinf.model.memory import Fit

MOST_DEVICES = 64


@dataclass(frozen=True, slots=True)
class Degrees:
    """One way to split a replica, and what it leaves on each GPU."""

    tensor: int
    pipeline: int
    weight_bytes: int
    """Weights on one GPU."""
    step_bytes: int
    """Memory of a step on one GPU, beside weights and cache."""
    cache_tokens: int
    """Tokens that a replica's cache holds."""
    sequences: float
    """Sequences of the context's length that fit at the same time."""
    missing_bytes: int
    """What each GPU lacks; 0 if the model fits."""

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    @property
    def fits(self) -> bool:
        """Whether the weights and one sequence of the context fit."""
        return self.missing_bytes == 0


def degrees_of(fit: Fit, tensor: int, pipeline: int, *, context: int, share: float) -> Degrees:
    """The model at these degrees. context: tokens of the sequence that must fit. share: gpu_memory_utilization.

    `fit.needs` must be known.
    """
    at = dataclasses.replace(fit, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, max_model_len=context)
    weights = at.weight_bytes
    sequence = at.sequence_bytes
    step = at.step_bytes
    assert weights is not None and sequence is not None and fit.device_bytes is not None
    room = at.cache_bytes(share, step)
    assert room is not None
    sequences = at.sequences(context, share, step) or 0.0
    missing = 0 if sequences >= 1 else max(1, sequence - room)
    if isinstance(cache_bytes := fit.engine.get("kv_cache_memory_bytes"), int):
        # vLLM then takes what it needs, up to the whole device.
        missing = max(missing, weights + step + cache_bytes - fit.device_bytes)
    return Degrees(
        tensor=tensor,
        pipeline=pipeline,
        weight_bytes=weights,
        step_bytes=step,
        cache_tokens=at.most_tokens(share, step) or 0,
        sequences=sequences,
        missing_bytes=missing,
    )


def _legal(fit: Fit, most: int, devices_per_node: int, *, has_pipelines: bool) -> Iterator[tuple[int, int]]:
    """Pairs (tensor, pipeline), by number of devices, then the largest tensor-parallel size, which stays within a node.

    A replica larger than a node takes whole nodes. has_pipelines: also give pipelines within a node, for models whose
    heads no larger tensor-parallel size divides. Tensor parallelism is faster there.
    """
    for number in range(1, most + 1):
        if number > devices_per_node and number % devices_per_node:
            continue
        for tensor in reversed(fit.needs.tensor_degrees(min(number, devices_per_node))):
            pipeline, rest = divmod(number, tensor)
            is_for_nodes = pipeline == 1 or number > devices_per_node
            if rest == 0 and pipeline <= fit.needs.num_layers and (is_for_nodes or has_pipelines):
                yield tensor, pipeline


def that_fit(fit: Fit, context: int, share: float, devices_per_node: int, *, most: int) -> Iterator[Degrees]:
    """The legal degrees with at most `most` devices that hold weights and one sequence, the fewest devices first.

    Pipelines within a node come only if nothing else fits.
    """
    is_found = False
    for has_pipelines in (False, True):
        for tensor, pipeline in _legal(fit, most, devices_per_node, has_pipelines=has_pipelines):
            degrees = degrees_of(fit, tensor, pipeline, context=context, share=share)
            if degrees.fits:
                is_found = True
                yield degrees
        if is_found:
            return


def replicas(degrees: Degrees, gpus_per_node: int, num_nodes: int) -> int:
    """Replicas of these degrees on the nodes. A replica that fits a node does not cross nodes."""
    if degrees.num_devices <= gpus_per_node:
        return gpus_per_node // degrees.num_devices * num_nodes
    nodes_each = math.ceil(degrees.num_devices / gpus_per_node)
    return num_nodes // nodes_each

"""Finds the degrees at which a model fits a number of GPUs, and chooses the best of them. Pure arithmetic."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from batchinf.model.memory import Fit
from batchinf.model.splits import why_not_split
from batchinf.planning.gpus import Gpu
from batchinf.planning.throughput import Prediction, Workload, prediction_of, shape_of

_MOST_DEVICES = 64
# A larger degree has to be better by this share, as the prediction is not exact.
_CLEARLY = 0.05


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
    """Sequences of the context's length that fit at the same time, in vLLM's worst case."""
    decoding: float
    """The same while they generate; more if layers have a sliding window."""
    missing_bytes: int
    """What each GPU lacks; 0 if the model fits."""

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    @property
    def fits(self) -> bool:
        """Whether the weights and one sequence of the context fit."""
        return self.missing_bytes == 0


def at_degrees(fit: Fit, tensor: int, pipeline: int) -> Fit:
    return dataclasses.replace(fit, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)


def degrees_of(fit: Fit, tensor: int, pipeline: int, *, context: int, share: float) -> Degrees:
    """The model, whose needs are known, at these degrees. context: tokens that must fit. share: of the GPU's memory."""
    at = dataclasses.replace(at_degrees(fit, tensor, pipeline), max_model_len=context)
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
        decoding=at.sequences(context, share, step, is_decoding=True) or 0.0,
        missing_bytes=missing,
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs of one kind, and the degrees that a spec gives as numbers; None: open."""

    gpu: Gpu | None
    """None if it is not in the table: then its speed is not predicted."""
    gpus_per_node: int
    num_nodes: int
    share: float
    """gpu_memory_utilization, lower where other programs use a part of the memory."""
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_node * self.num_nodes


def _legal(fit: Fit, machine: Machine, *, has_pipelines: bool) -> Iterator[tuple[int, int]]:
    """Pairs (tensor, pipeline), by number of devices, then the largest tensor-parallel size, which stays within a node.

    has_pipelines: also give pipelines within a node, for models whose heads no larger tensor-parallel size divides.
    Tensor parallelism is faster there.
    """
    tensors = fit.tensor_degrees(machine.gpus_per_node)
    if machine.tensor is not None:
        tensors = [machine.tensor] if machine.tensor <= machine.gpus_per_node else []
    nodes = range(2 * machine.gpus_per_node, machine.num_gpus + 1, machine.gpus_per_node)
    for number in (*range(1, machine.gpus_per_node + 1), *nodes):  # a replica larger than a node takes whole nodes
        may_be_any = has_pipelines or number > machine.gpus_per_node
        for tensor in reversed(tensors):
            pipeline, rest = divmod(number, tensor)
            is_open = pipeline == 1 or may_be_any
            is_legal = is_open if machine.pipeline is None else pipeline == machine.pipeline
            if rest == 0 and pipeline <= fit.num_layers and is_legal:
                yield tensor, pipeline


def that_fit(fit: Fit, machine: Machine, context: int) -> Iterator[Degrees]:
    """The legal degrees that hold weights and one sequence of `context` tokens, the fewest devices first.

    Pipelines within a node come only if nothing else fits, or if the spec gives them.
    """
    is_found = False
    for has_pipelines in (False, True):
        for tensor, pipeline in _legal(fit, machine, has_pipelines=has_pipelines):
            degrees = degrees_of(fit, tensor, pipeline, context=context, share=machine.share)
            if degrees.fits:
                is_found = True
                yield degrees
        if is_found:
            return


def least_that_fits(fit: Fit, machine: Machine, context: int) -> Degrees | None:
    """The fewest devices that hold the model, on nodes of at least eight GPUs like those of the machine; or None."""
    gpus_per_node = max(8, machine.gpus_per_node)
    larger = dataclasses.replace(machine, gpus_per_node=gpus_per_node, num_nodes=max(1, _MOST_DEVICES // gpus_per_node))
    return next(that_fit(fit, larger, context), None)


def split_notes(base: Fit, tensor: int | None, largest: int) -> Iterator[str]:
    """Tensor-parallel sizes that the model does not allow: the spec's own, else those up to the largest.

    The latter divide the heads and all else, but not into whole blocks.
    """
    if tensor is not None:
        if (why := why_not_split(base.splits, tensor)) is not None:
            yield f"warning: tensor {tensor}: {why}: vLLM may refuse it, or be slower"
        return
    plain = tuple(dataclasses.replace(split, block=1) for split in base.splits)
    for size in range(2, largest + 1):
        why = why_not_split(base.splits, size)
        if why is not None and why_not_split(plain, size) is None:
            with_whole = "; engine.enable_expert_parallel: true leaves experts whole" if "experts" in why else ""
            yield f"tensor {size} is left out: {why}{with_whole}"


def replicas(degrees: Degrees, gpus_per_node: int, num_nodes: int) -> int:
    """Replicas of these degrees on the nodes. A replica that fits a node does not cross nodes."""
    if degrees.num_devices <= gpus_per_node:
        return gpus_per_node // degrees.num_devices * num_nodes
    nodes_each = math.ceil(degrees.num_devices / gpus_per_node)
    return num_nodes // nodes_each


# -- the best of them --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """Degrees with the number of replicas."""

    degrees: Degrees
    data: int
    """Number of replicas."""
    prediction: Prediction | None
    """The time of one replica; None without a job."""

    @property
    def tokens_per_s(self) -> float:
        """Of all replicas, prompts and outputs together."""
        return 0.0 if self.prediction is None else self.prediction.tokens_per_s * self.data


def options(fit: Fit, machine: Machine, context: int, work: Workload | None = None) -> list[Option]:
    """All degrees that fit the machine, the fewest devices of a replica first."""
    shape = shape_of(fit)
    fitting = []
    for degrees in that_fit(fit, machine, context):
        most = replicas(degrees, machine.gpus_per_node, machine.num_nodes)
        data = most if machine.data is None else machine.data
        if not 0 < data <= most:
            continue
        prediction = None
        if shape is not None and work is not None and machine.gpu is not None:
            part = dataclasses.replace(work, num_requests=max(1, -(-work.num_requests // data)))
            at = at_degrees(fit, degrees.tensor, degrees.pipeline)
            prediction = prediction_of(at, shape, gpu=machine.gpu, work=part, share=machine.share)
        fitting.append(Option(degrees, data, prediction))
    return fitting


def best(fitting: list[Option]) -> Option | None:
    """The smallest degree, or a larger one with clearly more predicted tokens a second on the same GPUs."""
    chosen: Option | None = None
    for option in fitting:
        if option.degrees.pipeline > 1 and chosen is not None and chosen.degrees.pipeline == 1:
            continue  # a pipeline is for what does not fit otherwise
        if chosen is None or option.tokens_per_s > chosen.tokens_per_s * (1 + _CLEARLY):
            chosen = option
    return chosen


def reason_for(chosen: Option, fitting: list[Option], work: Workload | None, machine: Machine) -> str:
    """Why it is the best of these options, in one sentence. work: what it was chosen for."""
    least = fitting[0]
    why = _why_least(chosen, machine)
    if chosen.prediction is None or work is None:
        return why if chosen.degrees.pipeline > 1 else f"{why}, and replicas scale better than larger degrees"
    lengths = f"(for {work.text})"
    if chosen.degrees.num_devices == least.degrees.num_devices:
        is_slower = any(option.tokens_per_s > chosen.tokens_per_s * (1 + _CLEARLY) for option in fitting)
        degree = "tensor-parallel size" if is_slower else "degree"  # only pipelines are passed over
        more = f", and no larger {degree} predicts clearly more tokens a second" if len(fitting) > 1 else ""
        return f"{why}{more}; limited by {chosen.prediction.limited_by} {lengths}"
    assert least.prediction is not None
    return (
        f"{chosen.tokens_per_s / least.tokens_per_s:.2f} times the tokens a second of "
        f"{shape_text(least.degrees, least.data)}, which is limited by {least.prediction.limited_by} {lengths}"
    )


def _why_least(chosen: Option, machine: Machine) -> str:
    if machine.tensor is not None and machine.pipeline is not None:
        return "the degrees that the spec gives"
    if chosen.degrees.pipeline > 1 and machine.pipeline is None:
        return "the model fits no single node's tensor-parallel degree, so its layers are in a pipeline"
    return "the model fits one GPU" if chosen.degrees.num_devices == 1 else "the fewest GPUs that hold the model"


def shape_text(degrees: Degrees, data: int) -> str:
    """`tensor 2 × data 4`."""
    parts = [f"tensor {degrees.tensor}", *([f"pipeline {degrees.pipeline}"] if degrees.pipeline > 1 else [])]
    return " × ".join([*parts, f"data {data}"])

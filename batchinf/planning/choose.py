"""Chooses the degrees of a job on a number of GPUs, and gives the reason in one sentence. Pure arithmetic.

`plan` shows the choice, and `auto` degrees use it. The choice depends only on spec, model, devices and input.
"""

import dataclasses
from dataclasses import dataclass

from batchinf.model.memory import Fit
from batchinf.planning.degrees import Degrees, replicas, that_fit
from batchinf.planning.gpus import Gpu
from batchinf.planning.throughput import Prediction, Shape, Workload, prediction_of

# A larger degree has to be better by this share, as the prediction is not exact.
_CLEARLY = 0.05


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


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs of one kind."""

    gpu: Gpu
    gpus_per_node: int
    num_nodes: int
    share: float
    """gpu_memory_utilization, lower where other programs use a part of the memory."""

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_node * self.num_nodes


def options(
    fit: Fit, machine: Machine, context: int, *, shape: Shape | None = None, work: Workload | None = None
) -> list[Option]:
    """All degrees that fit the machine, the fewest devices of a replica first."""
    fitting = []
    for degrees in that_fit(fit, context, machine.share, machine.gpus_per_node, most=machine.num_gpus):
        data = replicas(degrees, machine.gpus_per_node, machine.num_nodes)
        if data == 0:
            continue
        prediction = None
        if shape is not None and work is not None:
            part = dataclasses.replace(work, num_requests=max(1, -(-work.num_requests // data)))
            prediction = prediction_of(fit, degrees, shape, gpu=machine.gpu, work=part, share=machine.share)
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


def reason_for(chosen: Option, fitting: list[Option]) -> str:
    """Why it is the best of these options, in one sentence."""
    least = fitting[0]
    degrees = chosen.degrees
    shape = shape_text(degrees, chosen.data)
    if degrees.num_devices == least.degrees.num_devices:
        if degrees.pipeline > 1:
            return f"{shape}: the model fits no single node's tensor-parallel degree, so its layers are in a pipeline"
        why = "the model fits one GPU" if degrees.num_devices == 1 else "the fewest GPUs that hold the model"
        if chosen.prediction is None:
            return f"{shape}: {why}, and replicas scale better than larger degrees"
        limited_by = chosen.prediction.limited_by
        return f"{shape}: {why}, and no larger degree predicts clearly more tokens a second; limited by {limited_by}"
    more = chosen.tokens_per_s / least.tokens_per_s if least.tokens_per_s else 0.0
    assert chosen.prediction is not None and least.prediction is not None
    return (
        f"{shape}: {more:.2f} times the tokens a second of {shape_text(least.degrees, least.data)}, which is limited "
        f"by {least.prediction.limited_by}"
    )


def shape_text(degrees: Degrees, data: int) -> str:
    """`tensor 2 × data 4`."""
    parts = [f"tensor {degrees.tensor}", *([f"pipeline {degrees.pipeline}"] if degrees.pipeline > 1 else [])]
    return " × ".join([*parts, f"data {data}"])

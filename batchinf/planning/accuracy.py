"""How far jobs were from their predictions, by kind of model. `plan` shows it as a range of tokens a second."""

from dataclasses import dataclass

from batchinf.model.memory import GIB, Fit
from batchinf.planning.throughput import Workload, shape_of

_SMALL_BYTES = 4 * GIB  # of weights, below which the engine's Python limits the speed


@dataclass(frozen=True, slots=True)
class SpeedRange:
    """Measured speeds of one kind of jobs, divided by the predicted ones."""

    kind: str
    low: float
    high: float


# The lowest and the highest, rounded outwards, of the jobs on H100s and H200s in benchmarks/RESULTS.md, "Predictions
# beside measurements".
_RECURRENT = SpeedRange("models with recurrent layers", 0.42, 0.92)
_EXPERTS = SpeedRange("models with experts", 0.91, 1.14)
_PIPELINE = SpeedRange("pipelines", 0.99, 1.09)
_PROMPTS = SpeedRange("jobs that only read prompts", 0.81, 1.03)
_SMALL = SpeedRange("models below 4 GiB", 0.72, 1.01)
_OTHERS = SpeedRange("dense models", 0.99, 1.09)


def accuracy_of(fit: Fit, work: Workload) -> SpeedRange:
    """Of the kind of this model, at its degrees, and of this work."""
    shape = shape_of(fit)
    if fit.kv_cache is not None and fit.kv_cache.has_states:
        return _RECURRENT
    if shape is not None and shape.expert_parameters:
        return _EXPERTS
    if fit.pipeline_parallel_size > 1:
        return _PIPELINE
    if work.output_tokens <= 1:
        return _PROMPTS
    return _SMALL if (fit.total_weight_bytes or 0) < _SMALL_BYTES else _OTHERS

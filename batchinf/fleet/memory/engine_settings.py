"""The engine arguments of the next start, and what happens to a replica that ran out of memory.

Only runtime engine arguments are lowered, for all replicas alike. A replica whose start fails gets one more start. Each
failure while running lowers the arguments further, down to a floor; at the floor, it counts as a death like any other.
Changes of arguments that decide the output are only advised. The manifest has the lowered arguments; a resume starts
from them unless the spec has another value by then.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchinf.fleet.engine_defaults import WithReason, values
from batchinf.fleet.memory.out_of_memory import Kind, OutOfMemory
from batchinf.fleet.memory.step_down import effective, step_down
from batchinf.manifest.commit_log import Fields
from batchinf.manifest.lines import Lowered
from batchinf.model.memory import Fit
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

# A replica is given up after this many starts without enough memory: the first, and one with lower settings.
_MOST_STARTS = 2
_ADVICE: dict[Kind, str] = {
    "free": "end what else runs on the device, choose another with parallel.devices, or lower "
    "engine.gpu_memory_utilization",
    "cache": "raise engine.gpu_memory_utilization (on a CPU, the environment variable VLLM_CPU_KVCACHE_SPACE) or "
    "parallel.tensor_parallel_size, or begin a new job, with another output.path, with a lower engine.max_model_len",
    "load": "raise parallel.tensor_parallel_size, or begin a new job, with another output.path, with quantized weights",
    "batch": "lower engine.max_num_seqs, engine.max_num_batched_tokens or engine.gpu_memory_utilization",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to a replica that ran out of memory."""

    action: Literal["again", "given up", "died"]
    """`again`: it starts with the latest settings, lowered by `step_down` or by another replica before. `given up`:
    nothing is left to try. `died`: nothing is left to lower, so it counts as any other death."""
    words: str
    """For people."""
    step_down: Fields | None = None
    """If the settings were lowered: the fields of the event `oom_step_down`, with those of `Lowered`."""


class EngineSettings:
    """The current engine arguments, and how often they had been lowered when each incarnation was started."""

    def __init__(
        self,
        spec: JobSpec,
        fit: Fit,
        lowered: Mapping[str, Any] | None = None,
        chosen: Mapping[str, WithReason] | None = None,
    ) -> None:
        """lowered: by an earlier epoch; see `kept`. chosen: where the spec is silent, see `chosen_arguments`."""
        self._spec = spec
        self.chosen = chosen or {}
        """Engine arguments that the spec leaves open."""
        self._chosen = values(self.chosen)
        self.fit = fit
        """The model on the devices."""
        self._lowered = dict(lowered or {})
        self._generation = 0
        self._launched: dict[str, tuple[int, object]] = {}  # with what the sampling of its spec needs of an engine
        self._failed_starts: dict[int, int] = {}

    @property
    def engine(self) -> dict[str, Any]:
        """Engine arguments for the next start."""
        engine = {**self._chosen, **self._spec.engine, **self._lowered}
        if "compilation_config" not in self._chosen:
            return engine
        limit = "max_num_seqs" if task_of(self._spec).draws_tokens else "max_num_batched_tokens"
        if limit in self._lowered:
            # Graphs for batches that do not occur any more would only take memory.
            graphs = self._chosen["compilation_config"]
            sizes = graphs["cudagraph_capture_sizes"]
            # A full batch or step has a graph of its own.
            smaller = sorted({self._lowered[limit], *(size for size in sizes if size <= self._lowered[limit])})
            engine["compilation_config"] = {**graphs, "cudagraph_capture_sizes": smaller}
        return engine

    def launch_spec(self, incarnation: str, spec: JobSpec | None = None) -> str:
        """The spec as JSON for this incarnation, with lowered arguments. spec: of a retry, which has other sampling."""
        spec = spec or self._spec
        self._launched[incarnation] = self._generation, spec.engine_needs
        return spec.model_copy(update={"engine": {**spec.engine, **self.engine}}).model_dump_json()

    def fits(self, incarnation: str, spec: JobSpec) -> bool:
        """Whether the engine of an incarnation has the arguments that sampling of this spec needs."""
        return incarnation in self._launched and self._launched[incarnation][1] == spec.engine_needs

    def rename(self, before: str, incarnation: str) -> None:
        """The engine of an incarnation goes on under another name."""
        self._launched[incarnation] = self._launched.pop(before)

    def judge(self, replica: int, incarnation: str, cause: OutOfMemory, *, was_up: bool) -> Verdict:
        """Lower the settings if that can help; once for each incarnation, after its end. was_up: it had started."""
        generation, _ = self._launched.pop(incarnation, (self._generation, None))
        words = f"out of memory: {cause.words}"
        advised = f"{words}; {_ADVICE[cause.kind]}"
        self._failed_starts[replica] = 0 if was_up else self._failed_starts.get(replica, 0) + 1
        if self._spec.on_oom == "fail":
            return Verdict("given up", f"{advised} (on_oom is fail)")
        if self._failed_starts[replica] >= _MOST_STARTS:
            return Verdict("given up", f"{advised}{self._tried()}")
        if generation < self._generation:
            return Verdict("again", f"{words}; starting again with the lowered {_show(self._lowered)}")
        step = step_down(self.engine, cause, self.fit)
        if step is None:
            return Verdict("died" if was_up else "given up", f"{advised}{self._tried()}")
        return self._take(step, cause, words)

    def _take(self, step: dict[str, Any], cause: OutOfMemory, words: str) -> Verdict:
        now = effective(self.engine, self.fit)
        before = {name: now[name] for name in step}
        self._lowered = self._lowered | step
        self._generation += 1
        fields = {
            "cause": cause.words,
            "from": before,
            "to": step,
            "lowered": self._lowered,  # all settings that are lower than the spec's by now
            "applies_to": applies_to(self._spec, self._lowered),
        }
        changes = ", ".join(f"{name} {before[name]} -> {value}" for name, value in step.items())
        return Verdict("again", f"{words}; starting again with {changes}", fields)

    def _tried(self) -> str:
        return f" (tried with {_show(self._lowered)} already)" if self._lowered else ""


def _show(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def applies_to(spec: JobSpec, lowered: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec that decide whether lowered settings still apply, with their values now; None if not given.

    If the spec has another value later, that value counts instead of the lowered one.
    """
    degrees = ("tensor_parallel_size", "pipeline_parallel_size", "replicas_per_device")
    settings = {f"engine.{name}": spec.engine.get(name) for name in lowered}
    return settings | {f"parallel.{name}": getattr(spec.parallel, name) for name in degrees}


def kept(spec: JobSpec, record: Lowered) -> dict[str, Any]:
    """The lowered settings of a record that still apply: not if the spec's value or the degrees have changed."""
    lowered = record.lowered
    before = record.applies_to
    now = applies_to(spec, lowered)
    if any(now[name] != before.get(name) for name in now if name.startswith("parallel.")):
        return {}
    return {name: value for name, value in lowered.items() if now[f"engine.{name}"] == before.get(f"engine.{name}")}

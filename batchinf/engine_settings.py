"""The engine arguments that replicas are started with: the spec's, lowered where memory ran out.

They are the job's, not a replica's: a replica that starts later takes the lowered ones too.
"""

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchinf.memory import Fit
from batchinf.out_of_memory import OutOfMemory, effective, explain, step_down
from batchinf.spec import JobSpec

# Starts that may fail for want of memory, for each replica, before it is given up: the first, and one lower.
_MOST_STARTS = 2


@dataclass(frozen=True, slots=True)
class Lowered:
    """One step down: the fields of the event `oom_step_down`.

    lowered: all that is lower than the spec says by now; applies_to: what the spec said then, by dotted name, None
    where it was silent: with another value there, that value counts and not the lowered one.
    """

    cause: str
    before: dict[str, Any]
    after: dict[str, Any]
    lowered: dict[str, Any]
    applies_to: dict[str, Any]

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
    """What becomes of a replica that ran out of memory.

    again: it starts with the latest settings, which `step` has just lowered unless another replica had before.
    given up: nothing is left to try. died: like any other death, since nothing is left to lower. words: for people.
    """

    action: Literal["again", "given up", "died"]
    words: str
    step: Lowered | None = None


class EngineSettings:
    """Current settings, and with which each incarnation was started."""

    def __init__(self, spec: JobSpec, fit: Fit, lowered: Mapping[str, Any] | None = None) -> None:
        """lowered: what an earlier epoch came to; see `kept`."""
        self._spec = spec
        self._fit = fit
        self._lowered = dict(lowered or {})
        self._generation = 0
        self._launched: dict[str, tuple[int, dict[str, Any]]] = {}
        self._failed_starts: dict[int, int] = {}

    @property
    def engine(self) -> dict[str, Any]:
        """Engine arguments for the next start."""
        return {**self._spec.engine, **self._lowered}

    def launch_spec(self, incarnation: str, spec: JobSpec | None = None) -> str:
        """The job's spec as JSON, as this incarnation is to have it; `spec`: a retry's, whose sampling is another."""
        self._launched[incarnation] = self._generation, self.engine
        return (spec or self._spec).model_copy(update={"engine": self.engine}).model_dump_json()

    def judge(self, replica: int, incarnation: str, cause: OutOfMemory, *, was_up: bool) -> Verdict:
        """Lower the settings, if that can help; each incarnation once, after its end. was_up: it had started."""
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
        # The task's own limits are reckoned from what is free outside of vLLM's share: with a smaller share they would
        # grow, and take up what was just let go of.
        self._lowered = {name: now[name] for name in self._fit.batch_limits} | self._lowered | step
        self._generation += 1
        line = Lowered(cause.words, before, step, dict(self._lowered), applies_to(self._spec, self._lowered))
        changes = ", ".join(f"{name} {before[name]} -> {value}" for name, value in step.items())
        return Verdict("again", f"{_head(words)}; starting again with {changes}", line)

    def _tried(self) -> str:
        return f" (tried with {_show(self._lowered)} already)" if self._lowered else ""


def _head(words: str) -> str:
    # What the user could change is said once nothing else is left to try.
    return words.partition("; to go on, ")[0]


def _show(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def applies_to(spec: JobSpec, lowered: Mapping[str, Any]) -> dict[str, Any]:
    """What in a spec decides whether settings that were lowered still count."""
    degrees = ("tensor_parallel_size", "pipeline_parallel_size")
    settings = {f"engine.{name}": spec.engine.get(name) for name in lowered}
    return settings | {f"parallel.{name}": getattr(spec.parallel, name) for name in degrees}


def kept(spec: JobSpec, event: Mapping[str, Any]) -> dict[str, Any]:
    """Settings to go on with after a resume, by the last `oom_step_down` of the job (empty where there was none).

    Those whose value in the spec the user has changed since are dropped; with other degrees, all of them.
    """
    lowered, before = dict(event.get("lowered", {})), event.get("applies_to", {})
    now = applies_to(spec, lowered)
    if any(now[name] != before.get(name) for name in now if name.startswith("parallel.")):
        return {}
    return {name: value for name, value in lowered.items() if now[f"engine.{name}"] == before.get(f"engine.{name}")}

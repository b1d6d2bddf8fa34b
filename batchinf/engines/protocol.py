"""The engine that a worker drives: one protocol for vLLM's adapters and for the scripted engine."""

from typing import Protocol

from batchinf.records import Completion, EngineInfo, EngineStats, Request


class Engine(Protocol):
    """Continuous batching: requests are added at any time, finished ones come out of any step. One thread only."""

    info: EngineInfo

    def warm_up(self, request: Request) -> None:
        """Compile what the job's own shapes need, by running requests like this one through."""

    def add(self, request: Request) -> None:
        """Take a request. Raises RequestRefused, with the engine unharmed, or EngineDeadError."""

    def step(self) -> list[Completion]:
        """Run one step and return what finished in it, in any order. Raises EngineDeadError.

        Requests that were cut short (aborted) never come out: see `num_unfinished`.
        """

    def begun(self) -> list[Request]:
        """Requests whose first token came in the last step: their prompts did the engine no harm."""

    def num_unfinished(self) -> int:
        """Requests that were added and have not come out."""

    def stats(self) -> EngineStats:
        """A look at the engine's queues; cheap."""

    def close(self) -> None:
        """Free the devices."""

"""The engine that a worker drives: one protocol for vLLM's adapters and for the scripted engine."""

from collections.abc import Sequence
from typing import Any, Protocol

from batchinf.records import Completion, EngineInfo, EngineStats, RenderedPrompt, Request

# The environment variable that names the file which engines of a shared device lock while they start.
DEVICE_LOCK = "BATCHINF_DEVICE_LOCK"


class Engine(Protocol):
    """Continuous batching: requests are added at any time, and any step may return finished ones. For one thread."""

    info: EngineInfo

    def warm_up(self, request: Request) -> None:
        """Compile kernels for the job's shapes by running requests like this one."""

    def add(self, request: Request) -> None:
        """Add a request. Raises RowFailed, after which the engine runs on, or EngineDeadError."""

    def render(self, token_ids: list[int], images: Sequence[Any]) -> RenderedPrompt:
        """Make a prompt with images ready for `add`. Raises RowFailed. Called on other threads, beside `step`.

        token_ids: with one placeholder for each of `images`, which are Pillow's.
        """

    def step(self) -> list[Completion]:
        """Run one step and return its finished requests, in any order. Raises EngineDeadError.

        Aborted requests are never returned; they stay in `num_unfinished`.
        """

    def begun(self) -> list[Request]:
        """Requests whose first token came in the last step, so their prompts did not kill the engine."""

    def num_unfinished(self) -> int:
        """Requests that were added and not returned yet."""

    def stats(self) -> EngineStats:
        """The engine's load; cheap."""

    def close(self) -> None:
        """Free the devices."""

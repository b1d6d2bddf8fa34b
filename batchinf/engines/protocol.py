"""The engine that a worker drives: one protocol for vLLM's adapters and for the scripted engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batchinf.prompts.images import RenderedPrompt
from batchinf.records import Completion, Request, ToolCall

# The environment variable that names the file which engines of a shared device lock while they start.
DEVICE_LOCK = "BATCHINF_DEVICE_LOCK"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine reports. The manifest and each part's metadata store it."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    device: str
    versions: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_tokens(self) -> int | None:
        """Tokens for which its cache has room; None if it does not say."""
        number: int | None = self.settings.get("kv_cache_size_tokens")
        return number

    @property
    def tensor_parallel_size(self) -> int:
        return int(self.settings.get("tensor_parallel_size") or 1)

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel_size * int(self.settings.get("pipeline_parallel_size") or 1)

    @property
    def arguments(self) -> dict[str, Any]:
        """The engine arguments that the spec or batchinf gave."""
        return dict(self.settings.get("engine_arguments") or {})


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The load of a running engine at one moment."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A text as a parser of tool calls splits it."""

    reasoning: str | None
    text: str | None
    """Beside the calls."""
    calls: tuple[ToolCall, ...]
    """Their ids are empty, or made up by the parser, unless the model has written them."""
    whole: str | None
    """All that comes after the reasoning, with the calls."""
    problem: str | None = None
    """Why a call in the text could not be parsed."""


@dataclass(frozen=True, slots=True)
class RayGroup:
    """A placement group of Ray whose bundles hold one engine on several hosts, one device each."""

    address: str
    """Of the cluster."""
    group_id: str
    """In hexadecimal digits."""
    bundles: tuple[dict[str, float], ...]
    """What each asks for, by Ray's names."""


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

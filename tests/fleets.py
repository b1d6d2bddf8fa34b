"""Fleets for tests of the pieces around them."""

import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from batchinf.fleet.backend import Backend
from batchinf.fleet.devices import Slot
from batchinf.fleet.fleet import Fleet
from batchinf.fleet.local.backend import LocalBackend
from batchinf.fleet.memory.engine_settings import EngineSettings
from batchinf.model.memory import Fit
from batchinf.planning.gpus import gpu_named
from batchinf.replica.messages import Launch
from batchinf.spec.job import JobSpec


class Devices(LocalBackend):
    """Devices of one kind, which only this class sees."""

    def __init__(self, number: int, gpu: str) -> None:
        super().__init__()
        self._number, self._gpu = number, gpu_named(gpu)

    def devices(self) -> tuple[str, ...]:
        return tuple(map(str, range(self._number)))

    def device_size(self, device: str) -> tuple[int | None, str]:
        return self._gpu.memory_bytes, f"NVIDIA {self._gpu.title}"


def fleet_of(
    backend: Backend, slots: Iterable[Slot], launch: Callable[[Slot, str], Launch], folder: pathlib.Path, **changes: Any
) -> Fleet:
    """A fleet with one restart for each replica, and its logs in `folder`."""
    spec = JobSpec.model_validate({"model": "m", "input": {"path": "in"}, "output": {"path": "out"}})
    settings: dict[str, Any] = {
        "requests_per_row": 1,
        "epoch": 1,
        "logs": folder,
        "max_restarts": 1,
        "stall_timeout_s": 60.0,
        "start_timeout_s": 600.0,
        "settings": EngineSettings(spec, Fit(None, None)),
        "is_cache_warm": True,
    }
    return Fleet(backend, slots, launch, **{**settings, **changes})

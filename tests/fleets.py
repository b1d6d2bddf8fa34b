"""Fleets for tests of the pieces around them."""

import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from batchinf.fleet.backend import Backend
from batchinf.fleet.devices import Slot
from batchinf.fleet.fleet import Fleet
from batchinf.replica.messages import Launch


def fleet_of(
    backend: Backend, slots: Iterable[Slot], launch: Callable[[Slot, str], Launch], folder: pathlib.Path, **changes: Any
) -> Fleet:
    """A fleet with one restart for each replica, and its logs in `folder`."""
    settings: dict[str, Any] = {
        "requests_per_row": 1,
        "epoch": 1,
        "logs": folder,
        "max_restarts": 1,
        "stall_timeout_s": 60.0,
        "is_cache_warm": True,
    }
    return Fleet(backend, slots, launch, **{**settings, **changes})

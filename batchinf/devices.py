"""What a device is doing, through NVML: its memory, its load and its power, a look at a time."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceLook:
    """One look at a device; None is what it does not say.

    utilization: share of the time in which a kernel ran, in percent. power_w: in watts.
    """

    device: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization: int | None
    power_w: float | None


class DeviceWatch:
    """Looks at devices on a thread of its own, as a driver may take its time: `looks` gives the latest."""

    def __init__(self, devices: Sequence[str], every_s: float = 1.0) -> None:
        self._devices = devices
        self._every_s = every_s
        self._latest: tuple[DeviceLook, ...] = ()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devices", daemon=True)
        if devices:
            self._thread.start()

    def looks(self) -> tuple[DeviceLook, ...]:
        """The latest look at each device; none yet, or where NVML is not there."""
        return self._latest

    def close(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _run(self) -> None:
        with open_nvml() as nvml:
            if nvml is None:
                return
            try:
                handles = {device: handle_of(nvml, device) for device in self._devices}
                while True:
                    self._latest = tuple(_look(nvml, device, handle) for device, handle in handles.items())
                    if self._stopped.wait(self._every_s):
                        return
            except nvml.NVMLError:
                self._latest = ()


@contextlib.contextmanager
def open_nvml() -> Iterator[Any]:
    """NVML's module, initialised; None where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def handle_of(nvml: Any, device: str) -> Any:
    """NVML's handle of a device, by its number or its UUID, as CUDA_VISIBLE_DEVICES has it. Raises NVMLError."""
    return nvml.nvmlDeviceGetHandleByIndex(int(device)) if device.isdigit() else nvml.nvmlDeviceGetHandleByUUID(device)


def _look(nvml: Any, device: str, handle: Any) -> DeviceLook:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    power_mw = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return DeviceLook(
        device,
        None if memory is None else int(memory.used),
        None if memory is None else int(memory.total),
        None if rates is None else int(rates.gpu),
        None if power_mw is None else round(power_mw / 1000, 1),
    )


def _ask(nvml: Any, question: Any, handle: Any) -> Any:
    # Parts of a device, as MIG's, do not say all of it.
    try:
        return question(handle)
    except nvml.NVMLError:
        return None

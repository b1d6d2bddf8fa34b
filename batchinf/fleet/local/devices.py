"""Devices of this host: which devices and processor cores each replica gets, and data about devices from NVML."""

import contextlib
import itertools
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

from batchinf.base.errors import SpecError, UserError
from batchinf.fleet.devices import DeviceLook, Slot
from batchinf.model.memory import share_of
from batchinf.spec.job import ParallelSpec


class NvmlWatch:
    """Looks at devices once a second on its own thread, because a driver may answer slowly."""

    def __init__(self, devices: Sequence[str], every_s: float = 1.0) -> None:
        self._devices = devices
        self._every_s = every_s
        self._latest: tuple[DeviceLook, ...] = ()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devices", daemon=True)
        if devices:
            self._thread.start()

    def looks(self) -> tuple[DeviceLook, ...]:
        """The latest look at each device; empty before the first one, or without a driver."""
        return self._latest

    def close(self) -> None:
        """Stop looking."""
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
    """NVML's module, initialised; None without a driver."""
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
    """NVML's handle of a device, by its number or UUID as in CUDA_VISIBLE_DEVICES. Raises NVMLError."""
    return nvml.nvmlDeviceGetHandleByIndex(int(device)) if device.isdigit() else nvml.nvmlDeviceGetHandleByUUID(device)


def _look(nvml: Any, device: str, handle: Any) -> DeviceLook:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    power_mw = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return DeviceLook(
        device=device,
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        utilization=None if rates is None else int(rates.gpu),
        power_w=None if power_mw is None else round(power_mw / 1000, 1),
    )


def _ask(nvml: Any, question: Any, *arguments: Any) -> Any:
    # Parts of a device, such as MIG instances, do not answer everything.
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


CPU_REPLICAS = 2
_FEW_CORES = 4  # with which one engine of vLLM is enough


def visible_devices() -> tuple[str, ...]:
    """The CUDA devices that this process may use, named as in CUDA_VISIBLE_DEVICES; empty if there are none."""
    with open_nvml() as nvml:
        if nvml is None:
            return ()
        every = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return tuple(every)
    names = [part.strip() for part in allowed.split(",")]
    # As in CUDA, the first name that is no device hides all that follow.
    return tuple(itertools.takewhile(lambda name: name in every or name[:4] in ("GPU-", "MIG-"), names))


def _chosen_devices(parallel: ParallelSpec, visible: Sequence[str]) -> Sequence[str]:
    """The devices of `parallel.devices`, or all visible ones. Raises SpecError for one that is not visible."""
    if parallel.devices is None:
        return visible
    names = [str(device) for device in parallel.devices]
    if absent := [name for name in names if name not in visible]:
        there = f"only {', '.join(visible)} can be seen" if visible else "no CUDA device can be seen"
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if allowed is None else f" (CUDA_VISIBLE_DEVICES is '{allowed}')"
        raise SpecError(f"parallel.devices: got {', '.join(absent)}, but {there}{why}; name devices that can be seen")
    return names


def slots_on(parallel: ParallelSpec, visible: Sequence[str], cpus: Sequence[int]) -> list[Slot]:
    """One slot for each replica; the devices of one are neighbours. Raises SpecError if the degrees do not fit."""
    devices = _chosen_devices(parallel, visible)
    if not devices:
        if parallel.sizes[1] > 1:
            # On a CPU, later stages of vLLM 0.32 have no buffers for earlier stages' output: they die at once.
            raise SpecError(
                f"parallel.pipeline_parallel_size: got {parallel.pipeline_parallel_size}, but no CUDA device is "
                "visible, and on a processor vLLM runs no pipeline; use tensor_parallel_size"
            )
        return slots_on_processor(parallel, cpus, 1 if len(cpus) <= _FEW_CORES else CPU_REPLICAS)
    degree = math.prod(parallel.sizes)
    groups = [tuple(devices[i : i + degree]) for i in range(0, len(devices) - degree + 1, degree)]
    sharers = 1 if parallel.replicas_per_device == "auto" else parallel.replicas_per_device
    most = len(groups) * sharers
    num_replicas = most if parallel.data_parallel_size == "auto" else parallel.data_parallel_size
    if num_replicas > most or num_replicas == 0:
        raise _too_few_devices(parallel, devices, num_replicas)
    # The first replicas are on devices of their own, and start at the same time.
    placed = list(itertools.islice(itertools.cycle(groups), num_replicas))
    numbers = Counter(placed)
    shares = share_cpus(cpus, num_replicas)
    return [Slot(i, group, shares[i], numbers[group]) for i, group in enumerate(placed)]


def slots_on_processor(parallel: ParallelSpec, cpus: Sequence[int], default: int = CPU_REPLICAS) -> list[Slot]:
    """One slot for each replica, without devices. default: the number of replicas for `auto`."""
    number = parallel.data_parallel_size
    num_replicas = default if number == "auto" else number
    return [Slot(i, (), share) for i, share in enumerate(share_cpus(cpus, num_replicas))]


def _too_few_devices(parallel: ParallelSpec, devices: Sequence[str], num_replicas: int) -> SpecError:
    """The error for devices that cannot hold the replicas. num_replicas: 0 if not even one fits."""
    degree = math.prod(parallel.sizes)
    is_all = parallel.devices is None
    which, remedy = ("visible", "widen CUDA_VISIBLE_DEVICES") if is_all else ("in parallel.devices", "add devices")
    field = "data_parallel_size"
    if degree > len(devices):
        field = "tensor_parallel_size" if parallel.sizes[0] > 1 else "pipeline_parallel_size"
    return SpecError(
        f"parallel.{field}: got {getattr(parallel, field)}; {num_replicas or 1} replica(s) of tensor_parallel_size "
        f"{parallel.tensor_parallel_size} x pipeline_parallel_size {parallel.pipeline_parallel_size} need "
        f"{max(1, num_replicas) * degree} devices, but {len(devices)} are {which} ({', '.join(devices)}); lower a "
        f"degree, or {remedy}"
    )


def share_cpus(cpus: Sequence[int], num_replicas: int) -> list[tuple[int, ...]]:
    """Split cores into equal runs of neighbours. If there are too few, all replicas share all cores."""
    each = len(cpus) // num_replicas
    if each == 0:
        return [tuple(cpus)] * num_replicas
    return [tuple(cpus[i * each : (i + 1) * each]) for i in range(num_replicas)]


def own_cpus() -> tuple[int, ...]:
    """The cores that this process may run on: its affinity, not the host's core count."""
    return tuple(sorted(os.sched_getaffinity(0)))


def check_free(engine: Mapping[str, Any], slots: Sequence[Slot]) -> None:
    """Raise UserError if another program holds memory that a replica will ask for. engine: the section of the spec."""
    share = share_of(engine)
    users = Counter(device for slot in slots for device in slot.devices)
    for device, num_replicas in users.items():
        free, total, holders = _device_memory(device)
        if free < num_replicas * share * total:
            held_by = "; ".join(holders) or "a program that cannot be seen from here"
            raise UserError(
                f"device {device} is held by {held_by}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free, "
                f"gpu_memory_utilization {share} needs {num_replicas * share * total / 2**30:.1f} for "
                f"{num_replicas} replica(s); end that program, choose other "
                f"devices with parallel.devices, or lower engine.gpu_memory_utilization"
            )


# The first driver of each major version of CUDA, which runs all builds of that version (NVIDIA, "CUDA Compatibility",
# minor version compatibility).
_FIRST_DRIVER = {12: "525", 13: "580"}


def check_driver(build: tuple[int, int] | None) -> None:
    """Raise UserError if the driver, or CUDA's compatibility package, is too old for this build of PyTorch."""
    with open_nvml() as nvml:
        if nvml is None or build is None:
            return
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        major = number // 1000
        minor = number % 1000 // 10
        if major >= build[0]:
            return
        driver = nvml.nvmlSystemGetDriverVersion()
    first = _FIRST_DRIVER.get(build[0])
    needed = "a newer one" if first is None else f"{first} or newer"
    raise UserError(
        f"the NVIDIA driver {driver} runs programs up to CUDA {major}.{minor}, but the installed PyTorch is built for "
        f"CUDA {build[0]}.{build[1]}; install driver {needed}, or a build of vLLM for CUDA {major} (docs/install.md)"
    )


def _usable_bytes(nvml: Any, handle: Any) -> int:
    """The memory that CUDA programs can have: all of it, less what the driver keeps. vLLM takes its share of that."""
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    if memory is None:  # the second version of the function is not there
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return int(memory.total - memory.reserved)


def device_size(device: str) -> tuple[int | None, str]:
    """A device's memory in bytes, as PyTorch gives it (None if NVML does not say), and its name."""
    with open_nvml() as nvml:
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                handle = handle_of(nvml, device)
                return _usable_bytes(nvml, handle), str(nvml.nvmlDeviceGetName(handle))
    return None, ""


def _device_memory(device: str) -> tuple[int, int, list[str]]:
    """The free and the whole memory in bytes, and the processes that occupy some of it, for people."""
    with open_nvml() as nvml:
        if nvml is None:
            return 0, 0, []
        try:
            handle = handle_of(nvml, device)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:
            return 0, 0, []
        holders = [f"pid {use.pid} of {_user(use.pid)} ({(use.usedGpuMemory or 0) / 2**30:.1f} GiB)" for use in running]
        return int(memory.free), _usable_bytes(nvml, handle), holders


def _user(pid: int) -> str:
    try:
        return str(psutil.Process(pid).username())
    except psutil.Error:
        return "another container or user"

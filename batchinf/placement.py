"""Degrees and devices: how many replicas, and which devices and processor cores each of them gets.

Nothing here touches CUDA: devices are counted through NVML, so that each replica can still choose its own.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from batchinf.devices import handle_of, open_nvml
from batchinf.errors import SpecError, UserError
from batchinf.memory import DEFAULT_GPU_MEMORY_UTILIZATION
from batchinf.spec import JobSpec

CPU_REPLICAS = 2


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one replica runs. `devices` is what its CUDA_VISIBLE_DEVICES will say; empty on a CPU."""

    replica: int
    devices: tuple[str, ...]
    cpus: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Devices to account for: on a CPU, the replica itself counts as one."""
        return max(1, len(self.devices))


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Another program's hold on a device."""

    device: str
    pid: int
    user: str
    used_bytes: int


def visible_devices() -> tuple[str, ...]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them; empty where there are none."""
    with open_nvml() as nvml:
        if nvml is None:
            return ()
        every = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return tuple(every)
    names = [part.strip() for part in allowed.split(",")]
    # As CUDA has it: the first name that is no device hides all that come after it.
    return tuple(itertools.takewhile(lambda name: name in every or name[:4] in ("GPU-", "MIG-"), names))


def place(spec: JobSpec, devices: Sequence[str], cpus: Sequence[int]) -> list[Slot]:
    """One slot for each replica. Raises SpecError where the degrees do not fit the devices.

    Devices are dealt out in order, so that a replica's tensor-parallel ranks are neighbours.
    """
    degree = spec.parallel.tensor_parallel_size * spec.parallel.pipeline_parallel_size
    wanted = spec.parallel.data_parallel_size
    if not devices and spec.scripted is None and spec.parallel.pipeline_parallel_size > 1:
        # In 0.32 its later stages have no place for what comes from the earlier ones, and die at the first request.
        raise SpecError(
            f"parallel.pipeline_parallel_size: got {spec.parallel.pipeline_parallel_size}, but no CUDA device is "
            "visible, and on a processor vLLM runs no pipeline; use tensor_parallel_size"
        )
    if not devices or spec.scripted is not None:
        num_replicas = CPU_REPLICAS if wanted == "auto" else wanted
        return [Slot(i, (), share) for i, share in enumerate(share_cpus(cpus, num_replicas))]
    num_replicas = len(devices) // degree if wanted == "auto" else wanted
    if num_replicas * degree > len(devices) or num_replicas == 0:
        raise SpecError(
            f"parallel: {num_replicas or 1} replica(s) of tensor_parallel_size "
            f"{spec.parallel.tensor_parallel_size} x pipeline_parallel_size {spec.parallel.pipeline_parallel_size} "
            f"need {max(1, num_replicas) * degree} devices, but {len(devices)} are visible "
            f"({', '.join(devices)}); lower a degree, or widen CUDA_VISIBLE_DEVICES"
        )
    shares = share_cpus(cpus, num_replicas)
    return [Slot(i, tuple(devices[i * degree : (i + 1) * degree]), shares[i]) for i in range(num_replicas)]


def share_cpus(cpus: Sequence[int], num_replicas: int) -> list[tuple[int, ...]]:
    """Split cores into equal runs of neighbours; where there are too few, all replicas share all."""
    each = len(cpus) // num_replicas
    if each == 0:
        return [tuple(cpus)] * num_replicas
    return [tuple(cpus[i * each : (i + 1) * each]) for i in range(num_replicas)]


def own_cpus() -> tuple[int, ...]:
    """The cores that this process may run on: its affinity, not the host's core count."""
    return tuple(sorted(os.sched_getaffinity(0)))


def check_free(spec: JobSpec, slots: Sequence[Slot]) -> None:
    """Raise UserError where another program holds the memory that a replica is going to ask for."""
    share = float(spec.engine.get("gpu_memory_utilization", DEFAULT_GPU_MEMORY_UTILIZATION))
    for device in (device for slot in slots for device in slot.devices):
        free, total, uses = _device_memory(device)
        if free < share * total:
            holders = "; ".join(f"pid {use.pid} of {use.user} ({use.used_bytes / 2**30:.1f} GiB)" for use in uses)
            holders = holders or "a program that cannot be seen from here"
            raise UserError(
                f"device {device} is held by {holders}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free, "
                f"gpu_memory_utilization {share} needs {share * total / 2**30:.1f}; end that program, choose other "
                f"devices with CUDA_VISIBLE_DEVICES, or lower engine.gpu_memory_utilization"
            )


def device_size(device: str) -> tuple[int | None, str]:
    """A device's memory in bytes, None where NVML does not say, and its name."""
    with open_nvml() as nvml:
        if nvml is None:
            return None, ""
        try:
            handle = handle_of(nvml, device)
            return int(nvml.nvmlDeviceGetMemoryInfo(handle).total), str(nvml.nvmlDeviceGetName(handle))
        except nvml.NVMLError:
            return None, ""


def _device_memory(device: str) -> tuple[int, int, list[DeviceUse]]:
    with open_nvml() as nvml:
        if nvml is None:
            return 0, 0, []
        try:
            handle = handle_of(nvml, device)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:
            return 0, 0, []
        uses = [DeviceUse(device, p.pid, _user(p.pid), p.usedGpuMemory or 0) for p in running]
        return int(memory.free), int(memory.total), uses


def _user(pid: int) -> str:
    try:
        return str(psutil.Process(pid).username())
    except psutil.Error:
        return "another container or user"

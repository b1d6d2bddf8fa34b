"""Devices of replicas, on any backend: the slot of each replica, their load and memory, and other platforms.

A platform is a device with software versions. The manifest has each platform once, and each part has its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from batchinf.base.errors import DriftError
from batchinf.manifest.lines import Platform


@dataclass(frozen=True, slots=True)
class Slot:
    """Where all incarnations of one replica run; a backend makes it."""

    replica: int
    devices: tuple[str, ...]
    """Names as the user sees them, such as those in CUDA_VISIBLE_DEVICES; empty on a processor."""
    cpus: tuple[int, ...]
    """The processor cores that it may use."""
    sharers: int = 1
    """The replicas on each of its devices, itself included."""

    @property
    def num_devices(self) -> float:
        """Devices for the accounting of device time; a replica on a processor counts as one."""
        return max(1, len(self.devices)) / self.sharers


def devices_of(slots: Iterable[Slot]) -> list[str]:
    """The devices of these slots, each once; empty on processors."""
    return list(dict.fromkeys(device for slot in slots for device in slot.devices))


@dataclass(frozen=True, slots=True)
class DeviceLook:
    """One look at a device; None if it does not give the value."""

    device: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization: int | None
    """Share of the time in which a kernel ran, in percent."""
    power_w: float | None


# These can change output values. `same_device: true` refuses a mix of them; other differences give a warning.
_DECIDING = frozenset({"device", "engine", "vllm", "torch", "transformers", "cuda"})


def platform_warning(
    replica: int, platform: Platform, earlier: Mapping[object, Platform], *, same_device: bool
) -> str | None:
    """A warning if a started replica has a platform that the job's earlier replicas did not have.

    earlier: by their keys. same_device: of the spec. Raises DriftError if it refuses the difference. The replica has no
    row yet.
    """
    now = platform.values
    is_known = platform.key in earlier
    for before in (other.values for other in earlier.values()):
        changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        deciding = [name for name in changed if name in _DECIDING]
        if same_device and deciding:
            raise DriftError(
                f"same_device is true, but replica {replica} is on another device or version than earlier rows of "
                f"this job: {_show(before, now, deciding)}; run the job where it began, or set same_device to false"
            )
        if changed and not is_known:
            hint = "; `same_device: true` would refuse that" if deciding else ""
            return (
                f"warning: replica {replica} runs on another device or with other versions than earlier rows of "
                f"this job: {_show(before, now, changed)}{hint}"
            )
    return None


def _show(before: dict[str, str], now: dict[str, str], names: list[str]) -> str:
    # The device first: people know it.
    names = sorted(names, key=lambda name: name != "device")
    return ", ".join(f"{name} {before.get(name, 'absent')} -> {now.get(name, 'absent')}" for name in names)

"""Devices of replicas, on any backend: the slot of each replica, looks at devices, and a job's platforms.

A platform is a device with software versions. The manifest has each platform once, and each part has its own.
"""

from dataclasses import dataclass

from batchinf.base.errors import DriftError
from batchinf.manifest.lines import Platform
from batchinf.manifest.state import State


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


class Platforms:
    """The platforms of a job's replicas so far, over all epochs."""

    def __init__(self, state: State, same_device: bool) -> None:
        """same_device: refuse a second platform."""
        self._known = [platform.values for platform in state.of(Platform)]
        self._same_device = same_device
        self._told: list[dict[str, str]] = []

    def admit(self, replica: int, platform: Platform) -> str | None:
        """Add the platform of a started replica. Returns a warning the first time that it differs from earlier ones.

        Raises DriftError if `same_device: true` refuses the difference. The replica has no row yet.
        """
        now = platform.values
        for before in self._known:
            if (warning := self._compare(replica, before, now)) is not None:
                return warning
        if now not in self._known:
            self._known.append(now)
        return None

    def _compare(self, replica: int, before: dict[str, str], now: dict[str, str]) -> str | None:
        changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        deciding = [name for name in changed if name in _DECIDING]
        if self._same_device and deciding:
            raise DriftError(
                f"same_device is true, but replica {replica} is on another device or version than earlier rows of "
                f"this job: {_show(before, now, deciding)}; run the job where it began, or set same_device to false"
            )
        if changed and now not in self._told:
            self._told.append(now)
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

"""Process groups of replicas: how the manifest names one, and how one is ended with all of its processes."""

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Annotated, Any

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchinf.manifest.lock import Holder, process_start

_ALL_END_S = 10.0
# On a busy host a tracker may still be starting.
_TRACKERS_END_S = 5.0


class StoredGroup(BaseModel):
    """A replica's process group, as the manifest stores it."""

    model_config = ConfigDict(strict=True, frozen=True)

    host: str
    boot_id: str
    """Of the host; a reboot changes it."""
    # 0 is the caller's own group, 1 is init's.
    pgid: Annotated[int, Field(gt=1, lt=1 << 31)]
    pid_start_time: int
    """Of the group's leader, in clock ticks since boot. No other process of this boot has the same id and time."""

    @classmethod
    def of(cls, group: int) -> "StoredGroup":
        """A group of this host."""
        me = Holder.this_process()
        return cls(host=me.host, boot_id=me.boot_id, pgid=group, pid_start_time=process_start(group) or 0)


def end_leftover(reference: dict[str, Any]) -> None:
    """End a process group of an earlier coordinator, unless it may be another program's."""
    try:
        group = StoredGroup.model_validate(reference)
    except ValidationError:
        return
    me = Holder.this_process()
    if (group.host, group.boot_id) != (me.host, me.boot_id):
        return
    # A process id is not reused while a group of that number has members. A leader with another start time is another
    # program's.
    started = process_start(group.pgid)
    if started is None or started == group.pid_start_time:
        # This waits, because a device is free only when its processes are gone.
        end_process_group(group.pgid)


def end_process_group(group: int) -> None:
    """Send SIGKILL to a process group until it has no live process.

    Python's resource trackers come last: once all others have ended, they delete the shared memory of the ranks of an
    engine, and end by themselves. Killed with them, each engine would leave some of it until the host reboots.
    """
    began = time.monotonic()
    others_seen_s = 0.0
    with contextlib.suppress(psutil.AccessDenied):
        while (passed_s := time.monotonic() - began) < _ALL_END_S and (processes := members(group)):
            if kill_all_but_trackers(processes):
                others_seen_s = passed_s
            if passed_s - others_seen_s > _TRACKERS_END_S:
                _kill(processes)
            time.sleep(0.02)


def kill_all_but_trackers(processes: Sequence[psutil.Process]) -> bool:
    """Send SIGKILL to all processes but resource trackers; False if there are no others. Raises psutil.AccessDenied."""
    others = [process for process in processes if not _is_tracker(process)]
    _kill(others)
    return bool(others)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def members(group: int) -> list[psutil.Process]:
    """The live members of a process group; zombies do not count."""
    processes = []
    for pid in psutil.pids():
        # The group first, for one call of the kernel tells it, and most processes of the host are in others.
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(pid) == group and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def bytes_read(group: int) -> int:
    """Bytes that the live members of a process group have read, also those of mapped files that came from a disk."""
    total = 0
    for process in members(group):
        with contextlib.suppress(psutil.Error):
            counters = process.io_counters()
            total += counters.read_chars + counters.read_bytes
    return total


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False

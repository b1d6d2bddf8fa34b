"""Process groups of this host: ends them, also those that an earlier coordinator left behind, and no others."""

import contextlib
import os
import signal
import time
from typing import Annotated, Any

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchinf.manifest.lock import Holder, process_start


class GroupIdentity(BaseModel):
    """A replica's process group, as the manifest keeps it.

    boot_id: of the host, until it is booted again. pid_start_time: of the group's leader, in clock ticks since boot;
    with the process id it names one process for ever.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    host: str
    boot_id: str
    # 0 would be the caller's own group, 1 is init's.
    pgid: Annotated[int, Field(gt=1, lt=1 << 31)]
    pid_start_time: int

    @classmethod
    def of(cls, group: int) -> "GroupIdentity":
        """That of a group of this host."""
        me = Holder.this_process()
        return cls(host=me.host, boot_id=me.boot_id, pgid=group, pid_start_time=process_start(group) or 0)


def end_leftover(identity: dict[str, Any]) -> bool:
    """End a process group of an earlier coordinator; whether it was still there. One that may be another's is kept."""
    try:
        group = GroupIdentity.model_validate(identity)
    except ValidationError:
        return False
    me = Holder.this_process()
    if (group.host, group.boot_id) != (me.host, me.boot_id):
        return False
    # A process id is not used again while a group of that number has members; a leader that started at another time
    # is a stranger.
    started = process_start(group.pgid)
    if started is not None and started != group.pid_start_time:
        return False
    # Waited for: a device is free only when those that held it are gone.
    return end_process_group(group.pgid)


def end_process_group(group: int, wait_s: float = 10.0) -> bool:
    """Send SIGKILL to a process group until no live process is left in it; whether there was one."""
    deadline = time.monotonic() + wait_s
    was_there = False
    while time.monotonic() < deadline and members(group):
        was_there = True
        try:
            os.killpg(group, signal.SIGKILL)
        except PermissionError:
            return False
        except ProcessLookupError:
            pass
        time.sleep(0.02)
    return was_there


def members(group: int) -> list[int]:
    """Process ids of the live members of a process group; zombies do not count."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                found.append(process.pid)
    return found

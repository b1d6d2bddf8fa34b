"""The job's lock: the file `lock` in the output folder says which process runs the job, and that it is alive.

A holder that died on this host is known at once, by boot id, pid and start time; one on another host by its heartbeat
standing still on the reader's own clock. No process ends another: it is refused, or finds the lock free.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from batchinf.base import faults
from batchinf.base.errors import OutputError
from batchinf.base.stop_signals import shielded
from batchinf.base.storage import Folder, disk_error, naming

LOCK = "lock"
_STALE = "lock.stale-"
# Every state of one holder's file has this length: a heartbeat overwrites it in place, in one write.
_FILE_BYTES = 1024


class LockLost(OutputError):
    """This process no longer holds the job: it must write nothing more."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the job: the lock file's content.

    start_time: of the process, in clock ticks since boot; with the pid it names a process for ever. token: random, of
    this one acquisition. heartbeat: counts up while the holder lives. since: UTC.
    """

    host: str
    machine: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: int
    since: str
    token: str
    epoch: int = 0
    heartbeat: int = 0

    @classmethod
    def this_process(cls) -> "Holder":
        """This process, with a token of its own."""
        return cls(
            host=os.uname().nodename,
            machine=_first_line("/etc/machine-id"),
            boot_id=boot_id(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            start_time=process_start(os.getpid()) or 0,
            since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            token=uuid.uuid4().hex,
        )

    def encode(self) -> bytes:
        """The lock file's bytes."""
        return json.dumps(dataclasses.asdict(self)).encode().ljust(_FILE_BYTES - 1) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> "Holder | None":
        """Who wrote these bytes; None if they are not whole."""
        try:
            fields: dict[str, Any] = json.loads(data)
            holder = cls(**fields)
        except (ValueError, TypeError, RecursionError):
            return None
        values = [(getattr(holder, field.name), field.type) for field in dataclasses.fields(cls)]
        is_ours = all(type(value) is kind for value, kind in values)
        return holder if is_ours and all(value.isprintable() for value, kind in values if kind is str) else None

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


def boot_id() -> str:
    """What names this boot of this host; '' where the system does not say."""
    return _first_line("/proc/sys/kernel/random/boot_id")


def process_start(pid: int) -> int | None:
    """When a process of this host started, in clock ticks since boot; None if it is gone, or dead and not yet reaped.

    Field 22 of /proc/PID/stat (proc(5)): unlike a wall-clock time it does not move when the clock is set.
    """
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _first_line(path: str) -> str:
    try:
        return pathlib.Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def judge(holder: Holder | None) -> Literal["dead", "alive", "unknown"]:
    """What this process can tell of a holder without waiting."""
    me = Holder.this_process()
    # Many machines are called localhost, and containers of one host do not see each other's processes.
    if holder is None or (holder.host, holder.machine) != (me.host, me.machine):
        return "unknown"
    if holder.boot_id and me.boot_id and holder.boot_id != me.boot_id:
        return "dead"
    if holder.pid_namespace != me.pid_namespace:
        return "unknown"
    return "alive" if process_start(holder.pid) == holder.start_time else "dead"


def live_holder(folder: Folder) -> Holder | None:
    """Who holds a job's lock, unless that process is known to be dead. Takes no lock."""
    try:
        holder = Holder.decode(folder.read(LOCK))
    except OSError:
        return None
    return holder if holder is not None and judge(holder) != "dead" else None


# A lock of another host is taken over when its file has stood still for so long.
TAKEOVER_AFTER_S = 60.0


class JobLock:
    """The lock of one job. Between `acquire` and `release` a thread keeps its heartbeat."""

    def __init__(self, folder: Folder, heartbeat_s: float = 10.0) -> None:
        self._folder = folder
        self._heartbeat_s = heartbeat_s
        self._me: Holder | None = None
        # When a dead holder, whose lock this one took over, last beat, in seconds since 1970; 0.0 if there was none.
        self.predecessor_seen_at = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(
        self,
        last_epoch: Callable[[], int],
        *,
        takeover_after_s: float = TAKEOVER_AFTER_S,
        on_wait: Callable[[str], None] | None = None,
    ) -> int:
        """Take the lock; returns this process's epoch, greater by one than the greatest so far.

        last_epoch: asked once the lock is held, as the last holder may have opened an epoch until then. A holder of
        another host counts as dead if its file stands still for `takeover_after_s`, several times its heartbeat;
        meanwhile `on_wait` gets a line about once a second. Raises OutputError if another process holds the job.
        """
        self._me = me = Holder.this_process()
        greatest = 0
        try:
            while not self._create(me):
                data = self._read()
                if data is None:
                    continue
                holder = Holder.decode(data)
                self._await_death(data, takeover_after_s, on_wait)
                if self._take_away(data) and holder is not None:
                    greatest = max(greatest, holder.epoch)
            self._me = dataclasses.replace(me, epoch=1 + max(last_epoch(), greatest))
            self._beat()
            self._start()
        except BaseException:
            self.release()
            raise
        return self._me.epoch

    @contextlib.contextmanager
    def held(self, last_epoch: Callable[[], int], on_wait: Callable[[str], None] | None = None) -> Iterator[int]:
        """Hold the job; gives this process's epoch. See `acquire`; an interruption at any moment frees it too."""
        try:
            try:
                yield self.acquire(last_epoch, on_wait=on_wait)
            finally:
                self.release()
        finally:
            # Where the first time was itself interrupted.
            self.release()

    def check(self) -> None:
        """Raise LockLost unless this process still holds the job. About 20 µs on a local disk."""
        try:
            data = self._read()
        except OSError as error:
            words = disk_error(error, self._folder.path(LOCK))
            raise LockLost(f"cannot tell whether this process still holds the job: {words}") from error
        self._check_mine(data)

    def watch(self) -> None:
        """Like `check`, for a look in between: a lock file that cannot be read at the moment is passed over."""
        with contextlib.suppress(OSError):
            self._check_mine(self._read())

    def _check_mine(self, data: bytes | None) -> None:
        if not self._is_mine(data):
            holder = Holder.decode(data) if data else None
            raise self._lost(f"{holder} runs it now" if holder else "its lock file is gone")

    def release(self) -> None:
        """Free the job; nothing happens if it is held by another by now."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self._thread = None
        # Whoever deleted the whole folder has freed it too; and what stays on a disk that fails is known to be dead.
        with contextlib.suppress(OSError), _alone(self._folder):
            if self._is_mine(self._read()):
                self._folder.delete(LOCK)
        self._me = None

    def _create(self, me: Holder) -> bool:
        try:
            # The file's own word counts: over a network file system the answer to a creation can get lost.
            self._folder.create_exclusive(LOCK, me.encode())
            data = self._read()
        except OSError as error:
            raise OutputError(f"cannot lock the output folder {disk_error(error, self._folder.root)}") from error
        holder = Holder.decode(data) if data else None
        return holder is not None and holder.token == me.token

    def _read(self) -> bytes | None:
        try:
            return self._folder.read(LOCK)
        except FileNotFoundError:
            return None

    def _is_mine(self, data: bytes | None) -> bool:
        # The token is random: to find it is to find this holder.
        return data is not None and self._me is not None and self._me.token.encode() in data

    def _await_death(self, data: bytes, watch_s: float, on_wait: Callable[[str], None] | None) -> None:
        """Return once the holder that wrote `data` is known to be gone; raise if it lives."""
        holder = Holder.decode(data)
        state = judge(holder)
        if state == "dead":
            return
        if state == "alive":
            raise self._held(holder)
        deadline = time.monotonic() + watch_s
        while (left := deadline - time.monotonic()) > 0:
            if on_wait is not None:
                who = f"{holder}, which holds {self._folder.root}," if holder else f"the holder of {self._folder.root}"
                on_wait(f"waiting {left:.0f} s for a sign of life of {who} before taking over")
            time.sleep(min(left, 1.0, watch_s / 20))
            seen = self._read()
            if seen is None:
                return
            if seen != data:
                raise self._held(Holder.decode(seen) or holder)

    def _held(self, holder: Holder | None) -> OutputError:
        who = f"{holder} since {holder.since}" if holder else "a process whose lock file cannot be read"
        return OutputError(f"{self._folder.root} is being run by {who}; stop that one first, or wait for its end")

    def _lost(self, cause: str) -> LockLost:
        return LockLost(f"{self._folder.root} is no longer held by this process: {cause}; nothing more is written")

    def _take_away(self, stale: bytes) -> bool:
        """Remove the lock file if it still is the stale one; says whether it was this call that did so."""
        with _alone(self._folder):
            if self._read() != stale:
                return False
            # Where `_alone` cannot exclude others, another may have taken over since: see what was really renamed.
            name = f"{_STALE}{uuid.uuid4().hex[:12]}"
            try:
                seen_at = self._folder.path(LOCK).stat().st_mtime
                self._folder.publish(LOCK, name)
                renamed = self._folder.read(name)
            except FileNotFoundError:
                return False
            if renamed != stale:
                self._folder.create_exclusive(LOCK, renamed)
            for leftover in self._folder.list("", _STALE):
                self._folder.delete(leftover)
            self.predecessor_seen_at = seen_at
            return renamed == stale

    def _start(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="lock-heartbeat", daemon=True)
        self._thread.start()

    def _keep_beating(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            # A disk that fails for a moment is no reason to give up; whether the lock is lost is for `check` to say.
            with contextlib.suppress(OSError):
                self._beat()

    def _beat(self) -> None:
        """Count the heartbeat up, in place: an open file is the same file even when it has been renamed since.

        A rewrite by rename could put this holder's file over that of one that took over a moment before.
        """
        assert self._me is not None
        with contextlib.suppress(FileNotFoundError), self._folder.path(LOCK).open("r+b", buffering=0) as file:
            if self._is_mine(file.read()):
                self._me = dataclasses.replace(self._me, heartbeat=self._me.heartbeat + 1)
                with naming(self._folder.path(LOCK)):
                    faults.point("lock.beat")
                    os.pwrite(file.fileno(), self._me.encode(), 0)


@contextlib.contextmanager
def _alone(folder: Folder) -> Iterator[None]:
    """Keep other processes out of the same block, as far as the file system can; the kernel lets go of the dead."""
    # Interrupted just before the close, this process would keep itself out.
    with shielded():
        descriptor = os.open(folder.root, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

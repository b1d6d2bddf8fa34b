"""The job's lock: the file `lock` in the output folder says which process runs the job, and that it is alive.

A dead holder on this host is noticed at once, by boot id, pid and start time. A holder on another host counts as dead
after 60 s without a change of its heartbeat, on the reader's own clock. No process ends another one: it is refused, or
finds the lock free. A holder reads the lock every second and before each commit, so a process that was suspended while
another took over notices that before it changes anything.
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
from typing import Literal

from batchinf.base import faults
from batchinf.base.errors import OutputError
from batchinf.base.slices import no_job_message
from batchinf.base.stop_signals import shielded
from batchinf.base.storage import Folder, adapter, disk_error, naming

LOCK = "lock"
_STALE = "lock.stale-"
# The file always has this length, so that a heartbeat overwrites it in place with one write.
_FILE_BYTES = 1024


class LockLost(OutputError):
    """This process no longer holds the job: it must write nothing more."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds the job: the lock file's content."""

    host: str
    machine: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: int
    """Of the process, in clock ticks since boot; no other process has the same pid and start time."""
    since: str
    """UTC."""
    token: str
    """Random, new for each acquisition."""
    epoch: int = 0
    heartbeat: int = 0
    """Counts up while the holder lives."""

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
        return json.dumps(dataclasses.asdict(self)).encode().ljust(_FILE_BYTES - 1) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> "Holder | None":
        """The holder that wrote these bytes; None if they are damaged."""
        try:
            holder = adapter(Holder).validate_json(data, strict=True)
        except ValueError:
            return None
        texts = (value for value in dataclasses.astuple(holder) if isinstance(value, str))
        return holder if all(map(str.isprintable, texts)) else None

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


def boot_id() -> str:
    """The id of this boot of this host; '' if the system has none."""
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
    """Whether a holder lives, as far as this process can tell without waiting."""
    me = Holder.this_process()
    # Many machines are called localhost, and containers of one host do not see each other's processes.
    if holder is None or (holder.host, holder.machine) != (me.host, me.machine):
        return "unknown"
    if holder.boot_id and me.boot_id and holder.boot_id != me.boot_id:
        return "dead"
    if holder.pid_namespace != me.pid_namespace:
        return "unknown"
    if process_start(holder.pid) == holder.start_time:
        return "alive"
    return "unknown" if _is_hidden(holder.pid) else "dead"


def _is_hidden(pid: int) -> bool:
    """Whether a process of another user exists that this one cannot see: /proc may be mounted with `hidepid`."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not os.access(f"/proc/{pid}/stat", os.R_OK)
    except (OSError, OverflowError):
        return False
    return False


def live_holder(folder: Folder) -> Holder | None:
    """The holder of a job's lock, unless it is known to be dead. Takes no lock."""
    try:
        holder = Holder.decode(folder.read(LOCK))
    except OSError:
        return None
    return holder if holder is not None and judge(holder) != "dead" else None


def not_begun_message(out: str) -> str:
    """The error message for an output folder whose job has not begun, or that holds none."""
    if (holder := live_holder(Folder(out))) is not None:
        return f"{out} holds no job yet: {holder} reads its input, since {holder.since}"
    return no_job_message(out)


def is_free(folder: Folder) -> bool:
    """Whether surely no process holds the job: there is no lock, or a killed process left it. Takes no lock."""
    try:
        holder = Holder.decode(folder.read(LOCK))
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return holder is not None and judge(holder) == "dead"


# A lock of another host is taken over after this time without a heartbeat.
TAKEOVER_AFTER_S = 60.0


class JobLock:
    """The lock of one job. Between `acquire` and `release` a thread keeps its heartbeat."""

    def __init__(self, folder: Folder | None = None, heartbeat_s: float = 10.0, *, where: str = "") -> None:
        """where: the folder's name in messages, for a lock that is in no folder."""
        self._where = str(folder.root) if folder is not None else where
        self._in_folder = folder
        self._heartbeat_s = heartbeat_s
        self._me: Holder | None = None
        # The last heartbeat of the dead holder whose lock was taken over, in seconds since 1970; 0.0 without one.
        self.predecessor_seen_at = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def _folder(self) -> Folder:
        assert self._in_folder is not None
        return self._in_folder

    def acquire(
        self,
        last_epoch: Callable[[], int],
        *,
        takeover_after_s: float = TAKEOVER_AFTER_S,
        on_wait: Callable[[str], None] | None = None,
    ) -> int:
        """Take the lock; returns this process's epoch, greater by one than the greatest so far.

        last_epoch: called once the lock is held, because the last holder may have begun an epoch until then. It may
        take minutes, for a job in a bucket, so the heartbeat is kept meanwhile. A holder on another host counts as dead
        after `takeover_after_s` without a heartbeat; that is several heartbeats. During the wait `on_wait` gets a line
        about once a second. Raises OutputError if another process holds the job.
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
            self._begin_beats(self._heartbeat_s)
            epoch = 1 + max(last_epoch(), greatest)
            self._end_beats()
            self._me = dataclasses.replace(self._me, epoch=epoch)
            self._note_epoch()
            self._begin_beats(self._heartbeat_with_epoch_s)
        except BaseException:
            self.release()
            raise
        return self._me.epoch

    @contextlib.contextmanager
    def held(self, last_epoch: Callable[[], int], on_wait: Callable[[str], None] | None = None) -> Iterator[int]:
        """Hold the job in the block and yield the epoch; see `acquire`. An interruption at any moment frees it too."""
        try:
            try:
                yield self.acquire(last_epoch, on_wait=on_wait)
            finally:
                self.release()
        finally:
            # The first release may have been interrupted.
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
        """Like `check`, but passes if the lock file cannot be read at the moment."""
        with contextlib.suppress(OSError):
            self._check_mine(self._read())

    def _check_mine(self, data: bytes | None) -> None:
        if not self._is_mine(data):
            holder = Holder.decode(data) if data else None
            cause = f"{holder} runs it now" if holder else "its lock file is gone"
            raise LockLost(
                f"{self._where} is no longer held by this process: {cause}; this process writes nothing more"
            )

    def release(self) -> None:
        """Free the job, unless another process holds it by now."""
        self._end_beats()
        # A deleted folder is free too. A lock that stays on a failing disk names a dead process.
        with contextlib.suppress(OSError), _alone(self._folder):
            if self._is_mine(self._read()):
                # A disk error may have left a lock that was taken over: see `_take_away`.
                for leftover in self._folder.list("", _STALE):
                    self._folder.delete(leftover)
                self._folder.delete(LOCK)
        self._me = None

    def _note_epoch(self) -> None:
        self._beat()

    @property
    def _heartbeat_with_epoch_s(self) -> float:
        """How long after `_note_epoch` the next heartbeat comes."""
        return self._heartbeat_s

    def _begin_beats(self, first_s: float) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, args=[first_s], name="lock-heartbeat", daemon=True)
        self._thread.start()

    def _end_beats(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self._thread = None

    def _create(self, me: Holder) -> bool:
        try:
            # Only the file's content counts: a network file system can lose the answer to a creation.
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
        # The token is random, so no other holder's file has it.
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
                who = f"{holder}, which holds {self._where}," if holder else f"the holder of {self._where}"
                on_wait(f"waiting {left:.0f} s for a sign of life of {who} before taking over")
            time.sleep(min(left, 1.0, watch_s / 20))
            seen = self._read()
            if seen is None:
                return
            if seen != data:
                raise self._held(Holder.decode(seen) or holder)

    def _held(self, holder: Holder | None) -> OutputError:
        who = f"{holder} since {holder.since}" if holder else "a process whose lock file cannot be read"
        return OutputError(f"{self._where} is being run by {who}; stop it first, or wait until it ends")

    def _take_away(self, stale: bytes) -> bool:
        """Remove the lock file if it still is the stale one. True if this call removed it."""
        with _alone(self._folder):
            if self._read() != stale:
                return False
            # If `_alone` cannot exclude others, another process may have taken over since: check what was renamed.
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

    def _keep_beating(self, first_s: float) -> None:
        wait_s = first_s
        while not self._stop.wait(wait_s):
            # A short disk error is no reason to give up; `check` decides whether the lock is lost.
            with contextlib.suppress(OSError):
                self._beat()
            wait_s = self._heartbeat_s

    def _beat(self) -> None:
        """Increase the heartbeat in place: an open file stays the same file even after another process renames it.

        A rewrite by rename could replace the file of a process that has just taken over.
        """
        assert self._me is not None
        with contextlib.suppress(FileNotFoundError), self._folder.path(LOCK).open("r+b", buffering=0) as file:
            if self._is_mine(file.read()):
                self._me = dataclasses.replace(self._me, heartbeat=self._me.heartbeat + 1)
                with naming(self._folder.path(LOCK)):
                    faults.point("lock.beat")
                    os.pwrite(file.fileno(), self._me.encode(), 0)


def await_free(folder: Folder, on_wait: Callable[[str], None]) -> None:
    """Raise OutputError if a process holds a job. Waits until it is known whether a holder on another host lives."""
    if live_holder(folder) is not None:
        with JobLock(folder).held(lambda: 0, on_wait):
            pass


@contextlib.contextmanager
def _alone(folder: Folder) -> Iterator[None]:
    """Exclude other processes from this block, if the file system can. The kernel frees the lock of a dead process."""
    # After an interruption just before the close, this process would lock itself out.
    with shielded():
        descriptor = os.open(folder.root, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

import contextlib
import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.synchronize import Barrier

import pytest
from users import ONE, OTHER, as_user, needs_users

import jobs
from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.manifest.lock import LOCK, Holder, JobLock, LockLost, boot_id, judge, process_start

HOLD = """
import sys, time
from batchinf.manifest.lock import JobLock
from batchinf.base.storage import Folder
lock = JobLock(Folder(sys.argv[1]))
print(lock.acquire(lambda: 6), flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    return Folder(tmp_path)


@contextlib.contextmanager
def holder_process(folder: Folder, prefix: Sequence[str] = ()) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the lock, in epoch 7."""
    command = [*prefix, sys.executable, "-c", HOLD, str(folder.root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "7\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def stranger(**changes: object) -> Holder:
    """Someone on another host."""
    fields = dataclasses.asdict(Holder.this_process()) | {"host": "elsewhere", "pid": 4321, "epoch": 4}
    return Holder(**(fields | changes))  # type: ignore[arg-type]


def held_by(folder: Folder) -> Holder:
    holder = Holder.decode(folder.read(LOCK))
    assert holder is not None
    return holder


def no_epoch() -> int:
    return 0


def test_acquire_check_release(folder: Folder) -> None:
    lock = JobLock(folder)
    assert lock.acquire(lambda: 41) == 42
    lock.check()
    assert dataclasses.replace(held_by(folder), token="", since="", heartbeat=0) == dataclasses.replace(
        Holder.this_process(), token="", since="", epoch=42
    )
    lock.release()
    assert folder.list("") == []
    with pytest.raises(LockLost, match="its lock file is gone"):
        lock.check()
    assert lock.acquire(no_epoch) == 1
    lock.release()


def test_the_last_epoch_is_asked_for_under_the_lock(folder: Folder) -> None:
    lock = JobLock(folder)

    def ask() -> int:
        assert folder.exists(LOCK)
        raise OutputError("the manifest is damaged")

    with pytest.raises(OutputError, match="the manifest is damaged"):
        lock.acquire(ask)
    assert folder.list("") == []


INTERRUPTED = """
import itertools, signal, sys, threading
from batchinf.base import stop_signals, storage
from batchinf.manifest import lock
from batchinf.base.errors import Interrupted

folder = storage.Folder(sys.argv[1])
files = {module.__file__ for module in (lock, stop_signals, storage)}

def trace(frame, event, _):
    if frame.f_code.co_filename not in files or threading.current_thread() is not threading.main_thread():
        return None
    if event == "line" and next(lines) == place:
        sys.settrace(None)
        signal.raise_signal(signal.SIGTERM)
    return trace

def is_interrupted():
    with stop_signals.interruptible():
        sys.settrace(trace)
        try:
            with lock.JobLock(folder).held(lambda: 0):
                pass
        finally:
            sys.settrace(None)

for place in itertools.count():
    lines, is_stopped = itertools.count(), False
    try:
        is_interrupted()
    except Interrupted:
        is_stopped = True
    assert folder.list("") == [], place
    assert threading.active_count() == 1, place
    if not is_stopped:
        assert next(lines) <= place, f"the signal before line {place} is forgotten"
        break
print(place)
"""


def test_a_signal_at_any_moment_frees_the_job(folder: Folder) -> None:
    """Before each line that is run from the attempt to hold the job until it is free again."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, folder.root], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_a_living_holder_is_not_disturbed(folder: Folder) -> None:
    with holder_process(folder) as process:
        words = f"is being run by pid {process.pid} on host {os.uname().nodename} since 20.*; stop it first, or"
        started = time.monotonic()
        with pytest.raises(OutputError, match=words) as caught:
            JobLock(folder).acquire(no_epoch)
        assert time.monotonic() - started < 30
        assert "\n" not in str(caught.value)
        assert held_by(folder).pid == process.pid
        # A process that is only stopped is alive.
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(OutputError, match="is being run by"):
            JobLock(folder).acquire(no_epoch)


def test_a_killed_holder_is_followed_at_once(folder: Folder) -> None:
    with holder_process(folder) as process:
        # Not waited for: it is a zombie, whose process id is taken.
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        lock = JobLock(folder)
        started = time.monotonic()
        assert lock.acquire(no_epoch) == 8
        assert time.monotonic() - started < 30  # another host's lock is watched for 60 s
        lock.check()
        assert folder.list("") == [LOCK]
        lock.release()


def test_a_disk_that_fails_while_the_lock_of_a_killed_holder_is_taken(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = Holder.this_process()
    folder.write_atomic(LOCK, dataclasses.replace(me, pid=2**22 + 1).encode())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_after_a_rename(folder))
        with pytest.raises(OSError, match="Input/output error"):
            JobLock(folder).acquire(no_epoch)
    with JobLock(folder).held(no_epoch):
        pass
    assert folder.list("") == []


def fails_after_a_rename(folder: Folder) -> Callable[[int], None]:
    """An fsync that fails once the old lock has been renamed."""

    def fsync(descriptor: int) -> None:
        if folder.list("", "lock.stale-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    return fsync


@pytest.mark.parametrize("change", [{"start_time": 1}, {"boot_id": "an earlier boot"}, {"pid": 2**22 + 1}])
def test_dead_on_this_host(folder: Folder, change: dict[str, object]) -> None:
    holder = dataclasses.replace(Holder.this_process(), epoch=4, **change)  # type: ignore[arg-type]
    folder.write_atomic(LOCK, holder.encode())
    lock = JobLock(folder)
    assert lock.acquire(lambda: 2, takeover_after_s=60) == 5
    lock.release()


@pytest.mark.parametrize(
    "change", [{"host": "x"}, {"machine": "x", "boot_id": "x"}, {"pid_namespace": "x", "start_time": 1}]
)
def test_what_cannot_be_seen_from_here_is_not_judged(change: dict[str, object]) -> None:
    assert judge(dataclasses.replace(Holder.this_process(), **change)) == "unknown"  # type: ignore[arg-type]


def test_a_frozen_lock_of_another_host_is_taken_over_in_time(folder: Folder) -> None:
    folder.write_atomic(LOCK, stranger().encode())
    lines: list[str] = []
    lock = JobLock(folder)
    started = time.monotonic()
    assert lock.acquire(no_epoch, takeover_after_s=0.4, on_wait=lines.append) == 5
    assert 0.4 <= time.monotonic() - started < 30
    assert lines
    assert all("pid 4321 on host elsewhere" in line for line in lines)
    lock.check()
    lock.release()


def test_a_moving_heartbeat_of_another_host_is_respected(folder: Folder) -> None:
    holder = stranger()
    folder.write_atomic(LOCK, holder.encode())
    beat = dataclasses.replace(holder, heartbeat=1).encode()
    timer = threading.Timer(0.2, lambda: folder.write_atomic(LOCK, beat))
    timer.start()
    with pytest.raises(OutputError, match="is being run by pid 4321 on host elsewhere"):
        JobLock(folder).acquire(no_epoch, takeover_after_s=1.5)
    timer.join()
    assert folder.read(LOCK) == beat


class LateFolder(Folder):
    """Just before a stale lock is renamed away, a third process, alive, has taken over."""

    def publish(self, source: str, target: str) -> None:
        self.write_atomic(source, Holder.this_process().encode())
        super().publish(source, target)


def test_a_living_lock_that_was_taken_away_is_put_back(folder: Folder) -> None:
    folder.write_atomic(LOCK, dataclasses.replace(Holder.this_process(), start_time=1).encode())
    with pytest.raises(OutputError, match=f"is being run by pid {os.getpid()}"):
        JobLock(LateFolder(folder.root)).acquire(no_epoch)
    assert held_by(folder).start_time == process_start(os.getpid())
    assert folder.list("") == [LOCK]


def test_a_lock_that_is_freed_meanwhile_is_taken(folder: Folder) -> None:
    folder.write_atomic(LOCK, stranger().encode())
    timer = threading.Timer(0.2, lambda: folder.delete(LOCK))
    timer.start()
    lock = JobLock(folder)
    assert lock.acquire(lambda: 8, takeover_after_s=30) == 9
    lock.release()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"host": "x"}', b"\x00" * 64, b"\xff"])
def test_an_unreadable_lock_lapses_too(folder: Folder, data: bytes) -> None:
    folder.write_atomic(LOCK, data)
    timer = threading.Timer(0.1, lambda: folder.write_atomic(LOCK, data + b" "))
    timer.start()
    with pytest.raises(OutputError, match="is being run by a process whose lock file cannot be read"):
        JobLock(folder).acquire(no_epoch, takeover_after_s=5)
    timer.join()
    lock = JobLock(folder)
    assert lock.acquire(no_epoch, takeover_after_s=0.1) == 1
    lock.release()


def test_the_heartbeat_moves(folder: Folder) -> None:
    lock = JobLock(folder, heartbeat_s=0.02)
    lock.acquire(no_epoch)
    before = held_by(folder)
    jobs.wait_until(lambda: held_by(folder).heartbeat > before.heartbeat)
    after = held_by(folder)
    assert dataclasses.replace(after, heartbeat=before.heartbeat) == before
    lock.release()


@pytest.mark.parametrize("replacement", [None, stranger().encode(), b""])
def test_a_lost_lock_is_noticed_and_left_alone(folder: Folder, replacement: bytes | None) -> None:
    lock = JobLock(folder, heartbeat_s=0.01)
    lock.acquire(no_epoch)
    folder.delete(LOCK)
    if replacement is not None:
        folder.write_atomic(LOCK, replacement)
    words = "runs it now" if replacement else "its lock file is gone"
    with pytest.raises(LockLost, match=words):
        lock.check()
    time.sleep(0.1)
    lock.release()
    assert (folder.read(LOCK) if folder.exists(LOCK) else None) == replacement


def test_a_heartbeat_never_lands_in_a_successors_file(folder: Folder) -> None:
    lock = JobLock(folder)
    lock.acquire(no_epoch)
    # The file is opened, then another takes over: what is written goes to the file that was opened.
    with folder.path(LOCK).open("r+b", buffering=0) as file:
        folder.publish(LOCK, "lock.stale-test")
        folder.create_exclusive(LOCK, stranger().encode())
        os.pwrite(file.fileno(), b"x" * 10, 0)
    lock._beat()
    assert folder.read(LOCK) == stranger(token=held_by(folder).token).encode()
    lock.release()
    assert held_by(folder).host == "elsewhere"


def test_a_folder_that_cannot_be_locked(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OutputError, match=r"cannot lock the output folder .*: no such file or directory"):
        JobLock(Folder(tmp_path / "missing")).acquire(no_epoch)


def test_a_folder_deleted_under_the_holder(tmp_path: pathlib.Path) -> None:
    folder = Folder(tmp_path / "out")
    folder.make()
    lock = JobLock(folder)
    lock.acquire(no_epoch)
    folder.delete(LOCK)
    folder.root.rmdir()
    with pytest.raises(LockLost):
        lock.check()
    lock.release()


def test_process_start() -> None:
    mine = process_start(os.getpid())
    assert mine is not None
    assert mine > 0
    assert process_start(2**22 + 1) is None
    assert boot_id() == boot_id()
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(process.pid) is None
    process.wait()


def test_the_file_is_json_of_one_length() -> None:
    holder = Holder.this_process()
    later = dataclasses.replace(holder, epoch=10**9, heartbeat=10**12, host="h" * 64)
    assert len(holder.encode()) == len(later.encode()) == 1024
    assert json.loads(later.encode())["heartbeat"] == 10**12


# -- processes that race -----------------------------------------------------------------------------------------------

NUM_RACERS = 8
NUM_ROUNDS = 16
WAIT_S = 240
Rounds = "multiprocessing.SimpleQueue[tuple[int, bool, bool]]"


def refuse_flock(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "no locks available")


def race(root: str, barrier: Barrier, results: Rounds) -> None:
    """In each round: all try at once; says who got an epoch, and who still held the lock when all were through.

    In the second half of the rounds, `flock` is refused.
    """
    for number in range(2 * NUM_ROUNDS):
        if number == NUM_ROUNDS:
            fcntl.flock = refuse_flock  # type: ignore[assignment]
        lock = JobLock(Folder(pathlib.Path(root, str(number))))
        barrier.wait(WAIT_S)
        try:
            lock.acquire(no_epoch)
        except OutputError:
            won = False
        else:
            won = True
        barrier.wait(WAIT_S)
        try:
            lock.check()
        except LockLost:
            holds = False
        else:
            holds = True
        results.put((number, won, holds))
        barrier.wait(WAIT_S)
        lock.release()


def test_one_of_eight_wins(tmp_path: pathlib.Path) -> None:
    dead = dataclasses.replace(Holder.this_process(), start_time=1)
    for number in range(2 * NUM_ROUNDS):
        folder = Folder(tmp_path / str(number))
        folder.make()
        if number % 4:
            folder.write_atomic(LOCK, dead.encode())
    # One process imports what the racers need, and forks them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["batchinf.manifest.state", "psutil", "pyarrow.parquet", "pytest"])
    results, barrier = context.SimpleQueue(), context.Barrier(NUM_RACERS)
    arguments = (os.fspath(tmp_path), barrier, results)
    racers = [context.Process(target=race, args=arguments) for _ in range(NUM_RACERS)]
    for racer in racers:
        racer.start()
    seen = [results.get() for _ in range(NUM_RACERS * 2 * NUM_ROUNDS)]
    for racer in racers:
        racer.join(WAIT_S)
        assert racer.exitcode == 0
    for number in range(2 * NUM_ROUNDS):
        has_flock = number < NUM_ROUNDS
        holders = sum(holds for round_, _, holds in seen if round_ == number)
        winners = sum(won for round_, won, _ in seen if round_ == number)
        # Without flock a taker may find out only by `check` that it has lost; never do two hold the job.
        assert holders == 1 if has_flock else holders <= 1
        assert winners == 1 or not has_flock
        assert Folder(tmp_path / str(number)).list("") == []


LOOK = """
import sys
from batchinf.base.storage import Folder
from batchinf.manifest.lock import LOCK, Holder, judge
print(judge(Holder.decode(Folder(sys.argv[1]).read(LOCK))))
"""
HIDES = (
    "unshare",
    "-m",
    "--propagation",
    "private",
    "sh",
    "-c",
    'mount -t proc -o hidepid=2 proc /proc; exec "$@"',
    "sh",
)


@needs_users()
@pytest.mark.parametrize("hides", [False, True], ids=["seen", "hidden"])
def test_the_holder_is_another_user(hides: bool, folder: Folder) -> None:
    os.chown(folder.root, ONE, -1)
    look = [*(HIDES if hides else ()), *as_user(OTHER), sys.executable, "-c", LOOK, str(folder.root)]
    with holder_process(folder, as_user(ONE)) as process:
        seen = subprocess.run(look, capture_output=True, text=True, check=False)
        if hides and "mount:" in seen.stderr:
            pytest.skip(f"needs a mount of its own: {seen.stderr}")
        # A /proc that hides other users' processes does not make their locks free.
        assert seen.stdout == ("unknown\n" if hides else "alive\n"), seen.stderr
        process.kill()
        process.wait()
        assert subprocess.run(look, capture_output=True, text=True, check=False).stdout == "dead\n"

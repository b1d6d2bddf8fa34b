"""The lock of a job in a bucket: one object, changed only by compare-and-swap, with a heartbeat.

It keeps two starts apart. What a process may write is decided by the numbered commits (see `chain`): a process that was
paused while another took over learns it at its next commit or heartbeat, and never changes what the other has written.
"""

import contextlib
import dataclasses
import time

from batchinf.base.bucket import Bucket, StoreError
from batchinf.manifest.lock import LOCK, Holder, JobLock, LockLost, judge

_FREE = b"free"
_BEAT_PATIENCE_S = 5.0
_FREE_S = 1.0  # for freeing the job, also when a stop waits for the store no longer


class BucketLock(JobLock):
    """The lock of one job. Its holder may run without an answer of the store for some time."""

    def __init__(self, bucket: Bucket, heartbeat_s: float = 10.0) -> None:
        super().__init__(where=bucket.url, heartbeat_s=heartbeat_s)
        self._bucket = bucket
        self._etag = ""
        self._is_taken = False
        """Whether this process has taken the lock, and the ETag is that of its own object."""
        self._lost_to: bytes | None = None

    def check(self) -> None:
        """Raise LockLost if another process is known to hold the job. Costs nothing."""
        if self._lost_to is not None:
            self._check_mine(self._lost_to)

    watch = check

    def is_left(self) -> bool | None:
        """Whether a process of this host that was killed left the lock; None while a process may hold it."""
        if (data := self._read()) is None:
            return False
        holder = Holder.decode(data)
        return True if holder is not None and judge(holder) == "dead" else None

    def release(self) -> None:
        """Free the job, unless another process holds it by now, or the store does not answer."""
        self._end_beats()
        if self._me is not None and self._lost_to is None:
            is_stopped = self._bucket.is_stopped
            end_by = time.monotonic() + _FREE_S
            self._bucket.is_stopped = lambda: time.monotonic() > end_by and is_stopped()
            with contextlib.suppress(StoreError, LockLost):
                # An interruption may have come between the request for the lock and its answer.
                if self._is_taken or self._is_mine(self._read()):
                    self._swap(_FREE)
        self._is_taken = False
        self._me = None

    def _create(self, me: Holder) -> bool:
        there = self._bucket.put_new(LOCK, me.encode())
        etag: str | None = there.etag
        if there.data == _FREE:
            etag = self._bucket.put_if(LOCK, me.encode(), there.etag)
        elif not self._is_mine(there.data):
            etag = None
        if etag is not None:
            self._etag = etag
            self._is_taken = True
        return etag is not None

    def _note_epoch(self) -> None:
        """The next heartbeat has it. Nobody waits for that: the commits have the epochs, too."""
        self.check()  # the heartbeat of the restore may have found another holder

    @property
    def _heartbeat_with_epoch_s(self) -> float:
        return 0.0

    def _read(self) -> bytes | None:
        there = self._bucket.get(LOCK)
        self._etag = "" if there is None else there.etag
        return None if there is None or there.data == _FREE else there.data

    def _take_away(self, stale: bytes) -> bool:
        return self._read() == stale and self._bucket.put_if(LOCK, _FREE, self._etag) is not None

    def _keep_beating(self, first_s: float) -> None:
        wait_s = first_s
        while not self._stop.wait(wait_s):
            # A store that does not answer is no reason to give up: the next commit decides.
            with contextlib.suppress(StoreError):
                try:
                    self._beat()
                except LockLost:
                    return
            wait_s = self._heartbeat_s

    def _beat(self) -> None:
        assert self._me is not None
        me = dataclasses.replace(self._me, heartbeat=self._me.heartbeat + 1)
        self._swap(me.encode())
        self._me = me

    def _swap(self, data: bytes) -> None:
        """Replace the object while it is this process's own. Raises LockLost."""
        for _ in range(3):
            etag = self._bucket.put_if(LOCK, data, self._etag, _BEAT_PATIENCE_S)
            if etag is not None:
                self._etag = etag
                return
            # An earlier request, given up for lost, may have come through later.
            there = self._read()
            if not self._is_mine(there):
                self._lost_to = there or _FREE
                self.check()

"""Numbered commits and the lock of a job in a bucket: one process wins, the other learns it and writes nothing more."""

import itertools
import pathlib
import threading
import time
import uuid

import pytest
import stores

import jobs
from batchinf.base.bucket import Bucket
from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.manifest.bucket_lock import BucketLock
from batchinf.manifest.chain import Chain
from batchinf.manifest.lock import Holder, LockLost

pytestmark = pytest.mark.usefixtures("store_of_this_process")


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_zombie_loses_at_its_next_commit(share: float, url: str, store: stores.Proxy) -> None:
    store.fault = stores.often(share, seed=3)
    zombie = Chain(Bucket(url))
    for number in range(3):
        zombie.commit(1, b"a%d\n" % number)
    heir = Chain(Bucket(url))
    heir.read()
    heir.commit(2, b"")
    for number in range(3):
        heir.commit(2, b"b%d\n" % number)
    store.seen.clear()
    with pytest.raises(LockLost, match="another one runs it now"):
        zombie.commit(1, b"a3\n")
    assert zombie.is_lost
    store.seen.clear()
    with pytest.raises(LockLost):
        zombie.commit(1, b"a3\n")
    assert not store.seen
    found = Chain(Bucket(url))
    found.read()
    assert [(commit.number, commit.epoch, commit.data) for commit in found.commits] == [
        *((number + 1, 1, b"a%d\n" % number) for number in range(3)),
        (4, 2, b""),
        *((number + 5, 2, b"b%d\n" % number) for number in range(3)),
    ]


def test_two_that_commit_at_once(url: str, store: stores.Proxy) -> None:
    store.fault = stores.often(0.25, seed=4)
    won: dict[int, int] = {}

    def run(epoch: int) -> None:
        chain = Chain(Bucket(url))
        chain.read()
        try:
            for number in range(10):
                chain.commit(epoch, b"%d %d\n" % (epoch, number))
                won[epoch] = number + 1
        except LockLost:
            pass

    both = [threading.Thread(target=run, args=[epoch]) for epoch in (1, 2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    found = Chain(Bucket(url))
    found.read()
    for epoch in (1, 2):
        data = [commit.data for commit in found.commits if commit.epoch == epoch]
        assert data == [b"%d %d\n" % (epoch, number) for number in range(won.get(epoch, 0))]
    assert 10 in won.values()


def test_logs_are_restored_from_the_last_snapshot_on(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    chain = Chain(Bucket(url))
    chain.commit(1, b"one\n")
    chain.commit(1, b"two\n")
    chain.commit(2, b"snapshot\n", is_snapshot=True)
    chain.commit(2, b"three\n")
    folder = Folder(tmp_path / "work")
    folder.make("manifest")
    folder.write_atomic("manifest/000001.jsonl", b"one\nzombie\n")
    folder.write_atomic("manifest/000007.jsonl", b"of another job\n")
    found = Chain(Bucket(url))
    store.seen.clear()
    assert found.read() and found.last_epoch == 2
    assert sum(method == "GET" and "/commits/0" in path for method, path in store.seen) == 4  # 1, 3, 4, and 5
    found.restore(folder)
    assert folder.list("manifest") == ["000002.jsonl"]
    assert folder.read("manifest/000002.jsonl") == b"snapshot\nthree\n"
    assert not found.read()


@pytest.mark.parametrize("damage", ["missing", "altered", "newer"])
def test_a_damaged_commit_is_named(damage: str, url: str, store: stores.Proxy) -> None:
    chain = Chain(Bucket(url))
    for number in range(4):
        chain.commit(1, b"%d\n" % number)
    bucket = Bucket(url)
    if damage == "missing":
        bucket.delete(["commits/000000002"])
    else:
        line = stores.read(url, "commits/000000002")
        bucket.put(
            "commits/000000002",
            line.replace(b"1\n", b"x\n") if damage == "altered" else line.replace(b'version": 1', b'version": 9'),
        )
    with pytest.raises(OutputError, match="newer batchinf" if damage == "newer" else "is damaged"):
        Chain(Bucket(url)).read()


def test_a_lock_is_taken_over_after_its_heartbeat_stops(
    url: str, store: stores.Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The wall clock jumps by an hour each time that it is read: no decision depends on it.
    real_time = time.time
    shifts = itertools.cycle([0, 3600, -3600])
    monkeypatch.setattr(time, "time", lambda: real_time() + next(shifts))
    one = BucketLock(Bucket(url), heartbeat_s=0.1)
    two = BucketLock(Bucket(url), heartbeat_s=0.1)
    assert one.acquire(lambda: 0) == 1
    with pytest.raises(OutputError, match="is being run by pid"):
        two.acquire(lambda: 0)
    assert stores.read(url, "lock") != b"free"  # the refused one has freed nothing
    # From now on they are on two hosts.
    elsewhere = Holder.this_process()
    monkeypatch.setattr(
        "batchinf.manifest.lock.Holder.this_process",
        classmethod(
            lambda cls: Holder(
                **{
                    **{f: getattr(elsewhere, f) for f in elsewhere.__slots__},
                    "host": "other",
                    "token": uuid.uuid4().hex,
                }
            )
        ),
    )
    with pytest.raises(OutputError, match="is being run by"):
        two.acquire(lambda: 0, takeover_after_s=5.0)
    one._stop.set()  # it is paused
    time.sleep(0.3)
    assert two.acquire(lambda: 4, takeover_after_s=0.5) == 5
    one.check()  # it cannot know yet
    with pytest.raises(LockLost):
        one._beat()
    with pytest.raises(LockLost, match="writes nothing more"):
        one.check()
    one.release()
    two.check()
    assert b'"host": "other"' in stores.read(url, "lock")
    two.release()
    assert stores.read(url, "lock") == b"free"


def test_a_lock_is_kept_while_the_store_is_absent(url: str, store: stores.Proxy) -> None:
    lock = BucketLock(Bucket(url), heartbeat_s=0.05)
    with lock.held(lambda: 0):
        before = stores.read(url, "lock")
        store.fault = lambda method, path: "drop"
        time.sleep(0.5)
        lock.check()
        store.fault = lambda method, path: ""
        time.sleep(0.5)
        lock.check()
        assert stores.read(url, "lock") != before
    assert stores.read(url, "lock") == b"free"


def test_a_lock_is_kept_while_the_job_is_restored(url: str, store: stores.Proxy) -> None:
    one = BucketLock(Bucket(url), heartbeat_s=0.05)
    beats: list[int] = []

    def restore() -> int:
        """As long as it takes until others have seen two heartbeats."""
        jobs.wait_until(lambda: _beat_of(url) >= 2, 30)
        beats.append(_beat_of(url))
        return 6

    with one.held(restore) as epoch:
        assert epoch == 7 and beats
        jobs.wait_until(lambda: b'"epoch": 7' in stores.read(url, "lock"), 30)
        assert _beat_of(url) > beats[0]  # no heartbeat twice: a reader looks for a change
    assert stores.read(url, "lock") == b"free"


def test_a_lock_that_is_lost_during_the_restore_begins_no_epoch(url: str, store: stores.Proxy) -> None:
    one = BucketLock(Bucket(url), heartbeat_s=0.05)
    other = b'{"token": "of another process"}'

    def restore() -> int:
        Bucket(url).put("lock", other)
        jobs.wait_until(lambda: one._lost_to is not None, 30)
        return 0

    with pytest.raises(LockLost, match="writes nothing more"):
        one.acquire(restore)
    assert stores.read(url, "lock") == other


def _beat_of(url: str) -> int:
    holder = Holder.decode(stores.read(url, "lock"))
    return -1 if holder is None else holder.heartbeat

"""A store that is slow or absent holds new rows back before the disk is full, and says so."""

import contextlib
import io
import itertools
import pathlib
import random
import threading
import time

import pyarrow.parquet as pq
import pytest
import stores

import jobs
from batchinf import api
from batchinf.base.bucket import Bucket, StoreError
from batchinf.base.storage import Folder
from batchinf.coordinator.display import ProgressDisplay
from batchinf.manifest.events import EVENTS_FILE
from batchinf.manifest.state import State
from batchinf.output import mirror as mirrors
from batchinf.output.mirror import Mirror
from batchinf.records import Part

pytestmark = [pytest.mark.fewer_rows, pytest.mark.usefixtures("store_of_this_process", "quick_replicas")]


def part_of(num_bytes: int, shard: int = 3) -> Part:
    zeros = dict.fromkeys(("num_rows", "num_errors", "num_prompt_tokens", "num_output_tokens"), 0)
    return Part(shard=shard, num_bytes=num_bytes, digest="d", **zeros)


def test_what_holds_new_rows_back(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    folder = Folder(tmp_path / "work")
    bucket = Bucket(url, patience_s=0.0)
    mirror = Mirror(bucket, folder, Folder(tmp_path / "source"), interval_s=10.0, say=said.append)
    assert not mirror.held_back(said.append) and not said
    # Finished parts wait on the disk of the node: more than a gibibyte.
    mirror.exchange([part_of((1 << 30) + 1)])
    assert mirror.held_back(said.append) and mirror.held_back(said.append)
    assert "1 finished part" in mirror.kept_line(State())
    mirror.note_committed([part_of(1)])
    assert not mirror.held_back(said.append)
    assert [line.partition(url)[2].partition(":")[0].partition(" (")[0] for line in said] == [
        " is slower than the engines",
        " answers again",
    ]
    # The store does not answer.
    monkeypatch.setattr(mirrors, "_ABSENT_S", 0.0)
    store.fault = lambda method, path: "503"
    with pytest.raises(StoreError):
        bucket.put("status.json", b"")
    assert mirror.held_back(said.append)
    assert "has not answered for" in said[-1] and "no new rows begin" in said[-1]
    store.fault = lambda method, path: ""
    bucket.put("status.json", b"")
    assert not mirror.held_back(said.append)


def mirror_of(url: str, folder: pathlib.Path) -> tuple[Mirror, Bucket, Folder]:
    """A mirror with an empty work folder, its bucket and the folder."""
    work = Folder(folder / "work")
    bucket = Bucket(url)
    mirror = Mirror(bucket, work, Folder(folder / "source"), interval_s=0.2, say=print)
    mirror.take_over()
    return mirror, bucket, work


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_slow_link_gets_segments_in_pieces(
    share: float, url: str, store: stores.Proxy, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(4)
    segments = {f"00000{shard}-a-00001": chance.randbytes(size) for shard, size in enumerate((90_000, 300, 1, 70_000))}
    mirror, bucket, work = mirror_of(url, tmp_path)
    for name, data in segments.items():
        work.write_atomic(f"journal/{name}", data)
    store.fault = stores.often(share, seed=3)
    # Too small to be measured, so each piece is cut by the speed that is set here; it changes meanwhile.
    speeds = itertools.cycle([2_000.0, 5_000.0, 1_000.0])
    bucket.patience_s = 0.0
    monkeypatch.setattr(bucket, "bytes_in", lambda seconds: int(next(speeds) * seconds))
    for _ in range(200):
        with contextlib.suppress(StoreError):
            if not mirror._send_some():
                break
    store.fault = lambda method, path: ""
    sizes = [*stores.names(url, "journal").values()]
    assert len(sizes) >= 10 and max(sizes) < 26_000
    for name in segments:
        work.delete(f"journal/{name}")
    for _ in range(2):  # the second time, the segments are there
        again, _, _ = mirror_of(url, tmp_path)
        assert {name: work.read(f"journal/{name}") for name in work.list("journal")} == segments
    again.note_committed([part_of(1, shard) for shard in range(4)])
    again.finish()
    assert not stores.names(url, "journal")


def test_a_segment_without_all_of_its_pieces_is_left_out(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, bucket, work = mirror_of(url, tmp_path)
    monkeypatch.setattr(bucket, "bytes_in", lambda seconds: 100)
    work.write_atomic("journal/000001-a-00001", b"x" * 250)
    assert mirror._send_some() and mirror._send_some()
    work.delete("journal/000001-a-00001")
    again, _, _ = mirror_of(url, tmp_path)
    assert not work.list("journal")
    # The same host has the segment, and sends it whole.
    work.write_atomic("journal/000001-a-00001", b"x" * 250)
    assert not again._send_some()
    work.delete("journal/000001-a-00001")
    mirror_of(url, tmp_path)
    assert work.read("journal/000001-a-00001") == b"x" * 250


def test_what_waits_for_a_slow_link_is_bounded(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    mirror, bucket, work = mirror_of(url, tmp_path)
    work.write_atomic("journal/000001-a-00001", b"x" * 700_000)
    bucket.bytes_per_s = 5_000.0  # two minutes of the link are 600,000 bytes
    store.fault = lambda method, path: "503" if "/journal/" in path else ""
    bucket.patience_s = 0.0
    with pytest.raises(StoreError):
        mirror._send_some()
    assert mirror.held_back(said.append) and "700.0 kB" in said[0] and "is slower than the engines" in said[0]
    store.fault = lambda method, path: ""
    for _ in range(3):  # of 25,000 bytes each
        mirror._send_some()
    assert mirror.held_back(said.append)
    bucket.bytes_per_s = 100_000.0
    mirror.flush()
    assert not mirror.held_back(said.append) and not mirror._send_some()
    # A part that is on its way replaces the segments of its shard, which would take the link for nothing.
    work.write_atomic("journal/000003-a-00001", b"x" * 700_000)
    mirror.exchange([part_of(100, 3)])
    num_bundles = len(stores.names(url, "journal"))
    mirror.flush()
    assert len(stores.names(url, "journal")) == num_bundles
    # The same again is said after ten minutes.
    mirror.waiting[3] = part_of((1 << 30) + 1, 3)
    assert mirror.held_back(said.append)
    mirror.note_committed([part_of(100, 3)])
    assert not mirror.held_back(said.append)
    assert len(said) == 2


def test_a_bundle_that_is_no_longer_needed_is_not_sent_again(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    mirror, _, work = mirror_of(url, tmp_path)
    work.write_atomic("journal/000003-a-00001", b"x" * 700)
    store.fault = lambda method, path: "503" if "/journal/" in path and method == "PUT" else ""
    mirror.start()
    try:
        jobs.wait_until(lambda: any("/journal/" in path for _, path in store.seen))
        mirror.note_committed([part_of(1, 3)])
        began = time.monotonic()
        mirror.finish()
        assert time.monotonic() - began < 15
    finally:
        mirror.close()
    assert not stores.names(url, "journal")


def test_a_commit_that_waits_for_the_store_says_so(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    folder = Folder(tmp_path / "work")
    bucket = Bucket(url)
    mirror = Mirror(bucket, folder, Folder(tmp_path / "source"), interval_s=10.0, say=said.append)
    mirror.restore()
    monkeypatch.setattr(mirrors, "_ABSENT_S", 0.0)
    (tmp_path / "part").write_bytes(b"part")
    mirror.start()

    def fault(method: str, path: str) -> str:
        # The store takes parts all the time, and the commit after the warning.
        return "" if said or "/parts/" in path else "503"

    store.fault = fault
    try:
        assert bucket.upload("parts/a", tmp_path / "part") is None
        mirror.chain.commit(1, b"{}\n")
        assert len(said) == 1 and "has not answered for" in said[0]
        assert not mirror.held_back(said.append) and "answers again" in said[1]
    finally:
        mirror.close()


@pytest.mark.slow
def test_a_job_waits_for_a_slow_store(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "_MOST_WAITING_BYTES", 0)
    released = threading.Event()
    store.fault = lambda method, path: "503" if ".parquet" in path and not released.is_set() else ""
    shown = io.StringIO()
    counts: list[int] = []

    def release() -> None:
        jobs.wait_until(lambda: "is slower than the engines" in shown.getvalue())
        # Rows that replicas have may finish. Many others would finish in this time, too.
        time.sleep(3)
        counts.append(num_done(tmp_path / "work"))
        released.set()

    sections = {"input": {"limit": 120}, "output": {"rows_per_shard": 4}}
    spec = stores.spec_of(tmp_path, url, scripted={"step_s": 0.01, "max_num_seqs": 2}, **sections)
    waiting = threading.Thread(target=release)
    waiting.start()
    try:
        api.run(spec, display=ProgressDisplay(shown))
    finally:
        released.set()
        waiting.join()
    assert counts[0] < 120
    assert "answers again: new rows begin" in shown.getvalue()
    assert stores.rows(url) == list(jobs.unhurt()[:120])


def test_requests_that_do_not_depend_on_each_other_run_together(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    folder = Folder(tmp_path / "work")
    folder.make()
    mirror = Mirror(Bucket(url), folder, Folder(tmp_path / "source"), interval_s=10.0, say=print)

    def meet(*words: str) -> threading.Barrier:
        """Let each request for one of these wait for the others."""
        meeting = threading.Barrier(len(words))

        def fault(method: str, path: str) -> str:
            if any(word in path for word in words):
                try:
                    meeting.wait(20)
                except threading.BrokenBarrierError:
                    return "403"
            return ""

        store.fault = fault
        return meeting

    meet("parts", "commits%2F", "commits/000000001", "commits/snapshot")
    mirror.restore()
    meet("parts", "journal", "commits%2F", "commits/000000001", "commits/snapshot")
    assert mirror.take_over() == 0
    store.fault = lambda method, path: ""
    mirror.chain.commit(1, b"{}\n")
    for name in ("journal/000001-1-a", "journal/000002-1-a"):
        Bucket(url).put(name, b"")
        mirror._bundles[name.partition("/")[2]] = set()
    for name in ("status.json", "job.yaml", "telemetry/000001.jsonl", EVENTS_FILE):
        folder.make("telemetry")
        folder.write_atomic(name, b"{}\n")
    meet("status.json", "job.yaml", "telemetry", EVENTS_FILE, "?delete", "?delete")
    mirror.finish()
    assert not stores.names(url, "journal") and stores.names(url, "telemetry")
    assert stores.read(url, EVENTS_FILE) == b"{}\n"
    # What has not changed since is not sent again.
    store.fault = lambda method, path: "403"
    store.seen.clear()
    mirror.close()
    assert not store.seen


def num_done(work: pathlib.Path) -> int:
    """Rows in parts that are staged; the bucket has none."""
    return sum(pq.read_metadata(path).num_rows for path in (work / "staging").glob("[!.]*.parquet"))

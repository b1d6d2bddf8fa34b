"""A store that is slow or absent holds new rows back before the disk is full, and says so."""

import io
import pathlib
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
from batchinf.output import mirror as mirrors
from batchinf.output.mirror import Mirror
from batchinf.records import Part

pytestmark = [pytest.mark.fewer_rows, pytest.mark.usefixtures("store_of_this_process", "quick_replicas")]


def part_of(num_bytes: int) -> Part:
    zeros = dict.fromkeys(("num_rows", "num_errors", "num_prompt_tokens", "num_output_tokens"), 0)
    return Part(shard=3, file="000003-x.parquet", num_bytes=num_bytes, digest="d", **zeros)


def test_what_holds_new_rows_back(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    folder = Folder(tmp_path / "work")
    bucket = Bucket(url, patience_s=0.0)
    mirror = Mirror(bucket, folder, Folder(tmp_path / "source"), interval_s=10.0, say=said.append)
    assert not mirror.held_back(said.append) and not said
    # Finished parts wait on the disk of the node: more than a gibibyte.
    mirror.exchange([("item", part_of((1 << 30) + 1))])
    assert mirror.held_back(said.append) and mirror.held_back(said.append)
    assert "1 finished part" in mirror.left_line()
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
    for name in ("status.json", "job.yaml", "telemetry/000001.jsonl"):
        folder.make("telemetry")
        folder.write_atomic(name, b"{}\n")
    meet("status.json", "job.yaml", "telemetry", "?delete", "?delete")
    mirror.finish()
    assert not stores.names(url, "journal") and stores.names(url, "telemetry")
    # What has not changed since is not sent again.
    store.fault = lambda method, path: "403"
    store.seen.clear()
    mirror.close()
    assert not store.seen


def num_done(work: pathlib.Path) -> int:
    """Rows in parts that are staged; the bucket has none."""
    return sum(pq.read_metadata(path).num_rows for path in (work / "staging").glob("[!.]*.parquet"))

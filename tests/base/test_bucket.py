"""Requests to a store: conditions under faults, errors in one line, memory."""

import os
import pathlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import stores

import jobs
from batchinf.base import bucket as buckets
from batchinf.base.bucket import Bucket, StoreError
from batchinf.base.paths import bucket_and_prefix, bucket_problem, is_bucket
from batchinf.base.storage import disk_error

pytestmark = pytest.mark.usefixtures("store_of_this_process")


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_one_of_two_writers_creates_each_object(share: float, url: str, store: stores.Proxy) -> None:
    store.fault = stores.often(share, seed=7)
    num_names = 40
    claims: dict[str, list[int]] = {"a": [], "b": []}

    def write(who: str) -> None:
        bucket = Bucket(url)
        for number in random.Random(who).sample(range(num_names), num_names):
            there = bucket.put_new(f"n/{number}", who.encode())
            assert there.etag == bucket.get(f"n/{number}").etag  # type: ignore[union-attr]
            if there.data == who.encode():
                claims[who].append(number)

    writers = [threading.Thread(target=write, args=[who]) for who in claims]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stored = {number: stores.read(url, f"n/{number}").decode() for number in range(num_names)}
    assert {who: sorted(found) for who, found in claims.items()} == {
        who: [number for number in range(num_names) if stored[number] == who] for who in claims
    }


def local_trouble(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
    """Files that this host cannot make, and the system's words for the reason."""
    (folder / "file").write_bytes(b"")
    yield folder / "gone/object", "no such file or directory"
    yield folder / "file/object", "not a directory"
    yield folder / ("x" * 300), "file name too long"


def test_the_trouble_of_the_local_disk_is_no_trouble_of_the_store(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    bucket = Bucket(url, patience_s=600)
    bucket.put("object", b"bytes")
    for path, words in local_trouble(tmp_path):
        store.seen.clear()
        with pytest.raises(OSError, match=f"(?i){words}") as raised:
            bucket.download("object", path)
        assert disk_error(raised.value).startswith(f"{path}: {words}")
        assert len(store.seen) <= 1
        assert bucket.failing_since is None
    with pytest.raises(FileNotFoundError) as raised:
        bucket.upload("other", tmp_path / "gone")
    assert disk_error(raised.value) == f"{tmp_path}/gone: no such file or directory"


def test_an_object_is_absent_only_if_the_store_says_so(url: str, store: stores.Proxy) -> None:
    bucket = Bucket(url)
    bucket.put("object", b"bytes")
    # A store answers so if a cut answer is asked for again from its very end.
    answers = ["416 InvalidRange"]
    store.fault = lambda method, path: answers.pop() if method == "GET" and answers else ""
    found = bucket.get("object")
    assert found is not None and found.data == b"bytes"
    assert not answers
    assert bucket.get("other") is None
    assert bucket.get_range("object", 5, 9) is None


def test_a_counter_by_compare_and_swap(url: str, store: stores.Proxy) -> None:
    # After a lost answer, a writer cannot know whether its count was there before another's. The cut answer of a PUT,
    # which has no content, is lost as a whole.
    lost = ("drop", "cut", "500 after")
    store.fault = stores.often(0.25, seed=8, faults=[fault for fault in stores.FAULTS if fault not in lost])
    Bucket(url).put("counter", b"0 -")

    def count(who: str) -> None:
        bucket = Bucket(url)
        left = 15
        while left:
            there = bucket.get("counter")
            assert there is not None
            value = int(there.data.split()[0])
            # The bytes say whose they are, as those of a lock do: equal bytes are this writer's own.
            left -= bucket.put_if("counter", f"{value + 1} {who} {left}".encode(), there.etag) is not None

    counters = [threading.Thread(target=count, args=[str(who)]) for who in range(3)]
    for counter in counters:
        counter.start()
    for counter in counters:
        counter.join()
    assert stores.read(url, "counter").split()[0] == b"45"


def test_a_file_is_created_once_and_replaced_only_with_its_etag(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    store.fault = stores.often(0.25, seed=9)
    bucket = Bucket(url)
    for number in range(10):
        one, two = tmp_path / "one", tmp_path / "two"
        one.write_bytes(b"1" * (number + 1))
        two.write_bytes(b"2" * (number + 1))
        name = f"parts/{number}"
        assert bucket.upload(name, one) is None
        assert bucket.upload(name, one) is None
        etag = bucket.upload(name, two)
        assert etag is not None and stores.read(url, name) == one.read_bytes()
        assert bucket.upload(name, two, '"0"') == etag
        assert bucket.upload(name, two, etag) is None
        assert stores.read(url, name) == two.read_bytes()
        assert bucket.download(name, tmp_path / "back") and (tmp_path / "back").read_bytes() == two.read_bytes()
    assert [*bucket.sizes("parts", after="7")] == ["8", "9"]


def test_a_store_without_conditions_is_refused(url: str, store: stores.Proxy) -> None:
    Bucket(url).probe().result()
    num_requests = len(store.seen)
    assert num_requests == 4
    store.fault = lambda method, path: "unconditional"
    with pytest.raises(StoreError, match="ignores the conditions of requests"):
        Bucket(url).probe()
    assert not stores.names(url)


def test_a_job_is_refused_on_a_server_that_ignores_conditions(tmp_path: pathlib.Path) -> None:
    port = stores.free_port()
    command = [pathlib.Path(sys.executable).with_name("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}"]
    keys = f"{stores.KEYS['AWS_ACCESS_KEY_ID']},{stores.KEYS['AWS_SECRET_ACCESS_KEY']}"
    (tmp_path / "served" / "jobs").mkdir(parents=True)
    with subprocess.Popen([*command, "--auth-key", keys, tmp_path / "served"], stderr=subprocess.PIPE) as server:
        try:
            jobs.wait_until(lambda: _answers(port), 60)
            environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", **stores.KEYS}
            run = jobs.run("run", stores.spec_of(tmp_path, "s3://jobs/a"), **environment)
        finally:
            server.kill()
    assert run.returncode == 2
    assert "this store ignores the conditions of requests" in run.stderr
    assert not [path for path in (tmp_path / "served").rglob("*") if path.is_file()]


def _answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_errors_are_one_line_without_secrets(url: str, store: stores.Proxy) -> None:
    with pytest.raises(StoreError, match="make the bucket first") as missing:
        Bucket("s3://no-such-bucket/job").probe()
    store.fault = lambda method, path: "403"
    with pytest.raises(StoreError, match="check that the key is right") as denied:
        Bucket(url).probe()
    store.fault = lambda method, path: "503"
    with pytest.raises(StoreError, match="has not taken a request for") as busy:
        Bucket(url, patience_s=0.3).probe()
    for raised in (missing, denied, busy):
        assert "\n" not in str(raised.value) and "secret" not in str(raised.value)
        assert len(str(raised.value)) < 700


def test_the_last_attempt_is_not_before_the_patience_is_over(url: str, store: stores.Proxy) -> None:
    bucket = Bucket(url, patience_s=1.0)
    attempts: list[float] = []

    def fault(method: str, path: str) -> str:
        attempts.append(time.monotonic())
        return "503"

    store.fault = fault
    began = time.monotonic()
    with pytest.raises(StoreError, match="has not taken a request for"):
        bucket.put("status.json", b"")
    assert len(attempts) > 2 and attempts[-1] >= began + 1.0


def test_a_slow_link_is_no_failure(url: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_SILENCE_S", 2)
    data = random.Random(1).randbytes(800_000)
    with stores.proxy(bytes_per_s=200_000) as link:
        for name, value in link.environment.items():
            monkeypatch.setenv(name, value)
        Bucket(url).put("first", b"1")
        Bucket(url).get("first")  # it takes the server long
        link.seen.clear()
        bucket = Bucket(url, patience_s=0.0)
        assert bucket.put_new("journal/a", data).data == data
        assert bucket.bytes_per_s is not None and 100_000 < bucket.bytes_per_s < 250_000
        found = bucket.get("journal/a")
        assert found is not None and found.data == data
        (tmp_path / "part").write_bytes(data)
        assert bucket.upload("parts/a", tmp_path / "part") is None
        assert bucket.download("parts/a", tmp_path / "back") and (tmp_path / "back").read_bytes() == data
        assert sum(method == "PUT" for method, _ in link.seen) == 2
        # One that takes too long for the speed that was measured is given up. The next one may take longer.
        bucket.bytes_per_s = 100e6
        link.bytes_per_s = 10_000
        with pytest.raises(StoreError, match="bytes were not sent in 2 s"):
            bucket.put("status.json", data)
        assert bucket.bytes_per_s < 400_000
        # A stop does not wait for it.
        began = time.monotonic()
        bucket.is_stopped = lambda: time.monotonic() > began + 1
        with pytest.raises(StoreError):
            bucket.upload("parts/b", tmp_path / "part")
        assert time.monotonic() - began < 3


def test_urls() -> None:
    good = {
        "s3://b/job": ("s3", "b", "job"),
        "gs://b/a/job": ("gs", "b", "a/job"),
        "az://c/job": ("az", "c", "job"),
        "hf://buckets/me/b/job": ("hub", "me/b", "job"),
    }
    for url, pieces in good.items():
        assert is_bucket(url) and bucket_problem(url) is None and bucket_problem(f"{url}/") is None
        assert bucket_and_prefix(url) == pieces
    for path in ("s3:/b/x", "out/job", "s3a://b/x", "s3", "/s3://b/x"):
        assert not is_bucket(path)
    for url in (
        "s3://b",
        "s3://b//x",
        "s3://b/./x",
        "hf://datasets/a/b",
        "hf://buckets/me/b",
        "s3://b/x\n",
        "s3://b/*",
    ):
        assert bucket_problem(url) is not None


@pytest.mark.slow
def test_memory_of_an_upload(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(400 << 20)
    code = """
import pathlib, resource, sys
from batchinf.base.bucket import Bucket
bucket = Bucket(sys.argv[1])
bucket.put("small", b"1")
def private():
    text = open("/proc/self/smaps_rollup").read()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_Dirty"))
before = private()
peak = 0
import threading
done = threading.Event()
def watch():
    global peak
    while not done.wait(0.01):
        peak = max(peak, private())
thread = threading.Thread(target=watch)
thread.start()
bucket.upload("large", pathlib.Path(sys.argv[2]))
done.set()
thread.join()
print(peak - before)
"""
    environment = {**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{stores.server()}"}
    run = subprocess.run([sys.executable, "-c", code, url, large], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 20 << 10

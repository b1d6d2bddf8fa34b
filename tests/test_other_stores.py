"""Jobs in stores other than S3: on Azurite, if it is installed, and on a stub of Google Cloud Storage."""

import io
import json
import pathlib
import random
import threading
import uuid
from typing import Any

import other_stores
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import stores

import jobs
from batchinf.base.bucket import Bucket
from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source

pytestmark = [pytest.mark.fewer_rows]
needs_azurite = pytest.mark.skipif(
    other_stores.azurite_command() is None,
    reason="needs Azurite: `npm i -g azurite`, or `npm i azurite` in a folder that AZURITE names",
)
STORES = [pytest.param("az", marks=needs_azurite), "gs"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environment = other_stores.azurite() if request.param == "az" else other_stores.google_stub()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return {**environment, "SCHEME": request.param}


@pytest.fixture
def url(store: dict[str, str]) -> str:
    return f"{store['SCHEME']}://{other_stores.CONTAINER}/{uuid.uuid4().hex[:12]}"


def rows(url: str) -> list[dict[str, Any]]:
    """What a reader finds, which must be what the commits name."""
    bucket = Bucket(url)
    names = [*bucket.sizes("parts")]
    commits = [bucket.get(f"commits/{name}") for name in bucket.sizes("commits") if name.isdecimal()]
    lines = [json.loads(line) for found in commits if found is not None for line in found.data.splitlines()]
    assert {*names} == {f"part-{line['shard']:06d}.parquet" for line in lines if line["kind"] == "part"}
    tables = []
    for name in names:
        found = bucket.get(f"parts/{name}")
        assert found is not None
        tables.append(pq.read_table(io.BytesIO(found.data)))
    return pa.concat_tables(tables).sort_by("row_index").drop_columns(["attempts"]).to_pylist()


def test_conditions_of_one_object(url: str, store: dict[str, str], tmp_path: pathlib.Path) -> None:
    bucket = Bucket(url)
    bucket.probe().result()
    assert bucket.get("a") is None
    there = bucket.put_new("a", b"1")
    assert there == bucket.put_new("a", b"1") == bucket.put_new("a", b"2") == bucket.get("a") and there.data == b"1"
    etag = bucket.put_if("a", b"3", there.etag)
    assert etag not in (None, there.etag)
    assert bucket.put_if("a", b"4", there.etag) is None
    (tmp_path / "file").write_bytes(b"content")
    other = bucket.upload("a", tmp_path / "file")
    assert other == etag
    assert bucket.upload("a", tmp_path / "file", other) is None
    assert bucket.download("a", tmp_path / "copy") and (tmp_path / "copy").read_bytes() == b"content"
    bucket.put("b/2", b"22")
    bucket.put("b/1", b"1")
    assert [*bucket.sizes("b").items()] == [("1", 1), ("2", 2)]
    assert [*bucket.sizes("b", after="1")] == ["2"]
    bucket.delete(["a", "b/1", "b/1"])
    assert bucket.get("a") is None and [*bucket.sizes("b")] == ["2"]


def test_a_counter_of_eight_threads(url: str, store: dict[str, str]) -> None:
    Bucket(url).put("count", b"0")

    def add(who: int) -> None:
        bucket = Bucket(url)
        for _ in range(5):
            while True:
                there = bucket.get("count")
                assert there is not None
                # Each writer's bytes are its own: equal ones would be taken for its own.
                more = b"%d by %d" % (int(there.data.split()[0]) + 1, who)
                if bucket.put_if("count", more, there.etag) is not None:
                    break

    threads = [threading.Thread(target=add, args=[who]) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = Bucket(url).get("count")
    assert found is not None and found.data.startswith(b"40 ")


@pytest.mark.slow
def test_a_job_is_killed_and_goes_on_on_an_empty_machine(
    url: str, store: dict[str, str], tmp_path: pathlib.Path
) -> None:
    spec = stores.spec_of(tmp_path, url)
    assert jobs.run("run", spec, faults="mirror.after_bundle:2=kill", **store).returncode == -9
    stores.lose_host(tmp_path)
    jobs.finish(spec, **store)
    assert rows(url) == list(jobs.unhurt())
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert jobs.run("check", url, "--deep", **store, **cache).returncode == 0
    # A retry replaces a part by compare-and-swap, and the lock is free again.
    stores.lose_host(tmp_path)
    jobs.finish(spec, "--retry", "row_index = 3", **store)
    assert rows(url) == list(jobs.unhurt())
    assert jobs.run("check", url, "--deep", **store, **cache).returncode == 0
    lock = Bucket(url).get("lock")
    assert lock is not None and lock.data == b"free"


def test_an_input_is_read(url: str, store: dict[str, str], tmp_path: pathlib.Path) -> None:
    Bucket(url).put("in/a.jsonl", jobs.prompts().read_bytes())
    spec = stores.spec_of(tmp_path, f"{url}/out", input={"path": f"{url}/in/*.jsonl"})
    jobs.finish(spec, **store)
    assert rows(f"{url}/out") == list(jobs.unhurt())


def test_parquet_is_read_by_ranges(url: str, store: dict[str, str], tmp_path: pathlib.Path) -> None:
    table = pa.table({"x": range(1000), "text": [f"row {row}" for row in range(1000)]})
    pictures = pa.array([random.Random(row).randbytes(2000) for row in range(1000)])
    pq.write_table(table.append_column("picture", pictures), tmp_path / "a.parquet", row_group_size=100)
    Bucket(url).write("in/a.parquet", tmp_path / "a.parquet")
    source = open_source(InputLocation(f"{url}/in/a.parquet"), tmp_path / "cache")
    assert [row.values for row in source.read(150, 400, ["x", "text"])] == table.slice(150, 250).to_pylist()
    num_kept = sum(path.stat().st_size for path in (tmp_path / "cache" / "ranges").rglob("*") if path.is_file())
    assert 0 < num_kept < 20_000
    source.close()


@pytest.mark.slow
def test_a_job_in_a_bucket_of_hugging_face(tmp_path: pathlib.Path) -> None:
    """On a stand-in for the hub's gateway: an S3 server below a folder, which answers GET with another place."""
    name = uuid.uuid4().hex[:12]
    url = f"hf://buckets/{stores.NAMESPACE}/{stores.BUCKET}/{name}"
    with stores.proxy() as gateway:
        environment = {**stores.KEYS, "BATCHINF_HF_GATEWAY": gateway.url, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        spec = stores.spec_of(tmp_path, url)
        assert jobs.run("run", spec, faults="mirror.after_bundle:2=kill", **environment).returncode == -9
        stores.lose_host(tmp_path)
        jobs.finish(spec, **environment)
        assert stores.rows(f"s3://{stores.BUCKET}/{name}") == list(jobs.unhurt())
        jobs.finish(spec, "--retry", "row_index = 3", **environment)
        assert jobs.run("check", url, "--deep", **environment).returncode == 0
    assert stores.rows(f"s3://{stores.BUCKET}/{name}") == list(jobs.unhurt())


def test_a_container_that_is_missing(store: dict[str, str], tmp_path: pathlib.Path) -> None:
    if store["SCHEME"] == "gs":
        pytest.skip("the stub knows no buckets")
    refused = jobs.run("run", stores.spec_of(tmp_path, "az://nothing/job"), **store)
    assert refused.returncode == 2
    assert "make the bucket first" in refused.stderr and refused.stderr.count("\n") <= 2

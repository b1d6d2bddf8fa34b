"""Inputs in the stores that also hold outputs: read with the same package and the same key, versions by ETag."""

import dataclasses
import gzip
import io
import json
import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import stores

import jobs
from batchinf.base.errors import DriftError, InputError
from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source

pytestmark = [pytest.mark.fewer_rows, pytest.mark.usefixtures("store_of_this_process")]
ROWS = [{"x": number, "text": f"row {number} ä"} for number in range(50)]


def content(ending: str) -> bytes:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    table = pa.Table.from_pylist(ROWS)
    buffer = io.BytesIO()
    if ending == "parquet":
        pq.write_table(table, buffer)
    elif ending == "csv":
        pyarrow.csv.write_csv(table, buffer)
    return {"jsonl": lines, "jsonl.gz": gzip.compress(lines)}.get(ending, buffer.getvalue())


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "csv", "parquet"])
@pytest.mark.parametrize("glob", ["/in/*", "/in", "/in/b.{}"])
def test_each_format_is_read(ending: str, glob: str, url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        stores.put(f"{url}/in/{name}.{ending}", content(ending))
    source = open_source(InputLocation(url + glob.format(ending)), tmp_path)
    expected = ROWS if "b." in glob else ROWS * 2
    assert [dict(row.values) for row in source.read(0, source.num_rows)] == expected
    source.close()
    # Each object is fetched once. Later starts ask only for versions.
    fetched = [path for method, path in store.seen if method == "GET" and "/in/" in path]
    num_objects = len({path.partition("?")[0] for path in fetched})
    assert num_objects == len(expected) // len(ROWS)
    store.seen.clear()
    again = open_source(InputLocation(url + glob.format(ending)), tmp_path, [source.fingerprint])
    assert again.fingerprints == source.fingerprints
    again.close()
    assert not [path for method, path in store.seen if method == "GET" and "/in/" in path]


def test_a_large_copy_is_said_first(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    num_bytes = len(content("jsonl"))
    location = InputLocation(f"{url}/in/*", say=lambda line: said.append(f"{line}; {len(store.seen)} requests"))
    for name in ("a", "b"):
        stores.put(f"{url}/in/{name}.jsonl", content("jsonl"))
    open_source(location, tmp_path / "small").close()
    assert not said
    monkeypatch.setattr("batchinf.source.scan.LARGE_BYTES", 2 * num_bytes)
    store.seen.clear()
    open_source(location, tmp_path / "large").close()
    assert not [path for _, path in store.seen[: int(said[0].split()[-2])] if ".jsonl" in path]  # said before the copy
    assert len(said) == 1 and said[0].startswith(
        f"copying 2 files of the input, {2 * num_bytes / 1000:.1f} kB, from {url}/in/"
    )
    # Nothing is said about what is there, nor about Parquet of which only ranges are read.
    open_source(location, tmp_path / "large").close()
    stores.put(f"{url}/in/a.parquet", stores.prompts_with_pictures())
    open_source(dataclasses.replace(location, path=f"{url}/in/a.parquet"), tmp_path / "ranges").close()
    assert len(said) == 1


@pytest.mark.parametrize(
    ("fault", "path", "words"),
    [
        ("", "/none/a.jsonl", "does not exist"),
        ("", "/none/*.jsonl", "no file matches"),
        ("403", "/a.jsonl", "no permission"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    fault: str, path: str, words: str, url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    store.fault = lambda method, asked: fault
    with pytest.raises(InputError, match=words) as raised:
        open_source(InputLocation(url + path), tmp_path)
    assert "\n" not in str(raised.value) and "secret" not in str(raised.value)


def num_bytes_read(store: stores.Proxy, url: str) -> int:
    return sum(size for path, size in store.num_bytes.items() if f"{url.rpartition('/')[2]}/in/" in path)


@pytest.mark.slow
def test_of_parquet_only_the_columns_and_rows_of_the_job_are_read(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    data = stores.prompts_with_pictures()
    stores.put(f"{url}/in/a.parquet", data)
    spec = stores.spec_of(tmp_path, f"{url}/out", input={"path": f"{url}/in/*.parquet"})
    done = jobs.finish(spec, "--slice", "0/2", **store.environment)
    assert "of the input: the columns and rows that run" in done.stderr
    half = num_bytes_read(store, url)
    jobs.finish(spec, "--slice", "1/2", **store.environment)
    both = num_bytes_read(store, url)
    assert [*stores.rows(f"{url}/out/slice-0"), *stores.rows(f"{url}/out/slice-1")] == list(jobs.unhurt())
    # Footers have up to 64 KiB; the second slice finds this one in the folder that slices share.
    assert 0 < half < 0.06 * len(data) and both < 0.09 * len(data)
    # Replicas read only what the coordinator has fetched: there is one request for each column and row group.
    store.seen.clear()
    jobs.finish(spec, "--slice", "0/2", "--retry", "row_index < 30", **store.environment)
    assert num_bytes_read(store, url) == both


@pytest.mark.slow
def test_a_changed_object_with_the_same_footer_is_noticed_on_another_machine(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    data = stores.prompts_with_pictures()
    swapped = stores.prompts_with_pictures(is_swapped=True)
    assert len(swapped) == len(data) and swapped[-10_000:] == data[-10_000:] and swapped != data
    stores.put(f"{url}/in/a.parquet", data)
    spec = stores.spec_of(tmp_path, f"{url}/out", input={"path": f"{url}/in/*.parquet"})
    assert jobs.run("run", spec, faults="chain.after_commit:6=kill", **store.environment).returncode == -9
    shutil.rmtree(tmp_path / "work")
    stores.put(f"{url}/in/a.parquet", swapped)
    refused = jobs.run("run", spec, **store.environment)
    assert refused.returncode == 2 and "1 file is changed: a.parquet" in refused.stderr, refused.stderr
    stores.put(f"{url}/in/a.parquet", data)
    jobs.finish(spec, **store.environment)
    assert stores.rows(f"{url}/out") == list(jobs.unhurt())


def test_ranges_of_a_changed_object_are_not_mixed(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    stores.put(f"{url}/in/a.parquet", stores.prompts_with_pictures())
    source = open_source(InputLocation(f"{url}/in/a.parquet"), tmp_path)
    before = source.read(0, 5, ["prompt"])
    # A range that is damaged in the cache is read again.
    [kept] = [path for path in (tmp_path / "ranges").glob("*/*") if path.is_file()]
    kept.write_bytes(kept.read_bytes()[:-9] + bytes(9))
    source.close()
    again = open_source(InputLocation(f"{url}/in/a.parquet"), tmp_path, [source.fingerprint])
    assert again.read(0, 5, ["prompt"]) == before
    # What was fetched is not asked for again, and what a retry of other rows needs is known.
    for file, spans in again.unfetched([np.arange(100)], ["prompt"]):
        file.fetch(spans)
    assert not again.unfetched([np.arange(100)], ["prompt"]) and again.unfetched([np.arange(100, 101)], ["prompt"])
    store.seen.clear()
    assert len(again.read(0, 100, ["prompt"])) == 100 and not store.seen
    store.fault = lambda method, path: "400 ExpiredToken"
    with pytest.raises(InputError, match="check that the key is right, has not expired") as raised:
        again.read(100, 105, ["prompt"])
    assert "\n" not in str(raised.value) and "secret" not in str(raised.value)
    store.fault = lambda method, path: ""
    stores.put(f"{url}/in/a.parquet", stores.prompts_with_pictures(is_swapped=True))
    with pytest.raises(DriftError, match="has changed since the job first read it"):
        again.read(100, 105, ["prompt"])
    again.close()


@pytest.mark.slow
def test_a_job_from_a_bucket_into_a_bucket(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    lines = jobs.prompts().read_bytes().splitlines(keepends=True)
    stores.put(f"{url}/in/a.jsonl", b"".join(lines[:100]))
    stores.put(f"{url}/in/b.jsonl", b"".join(lines[100:]))
    spec = stores.spec_of(tmp_path, f"{url}/out", input={"path": f"{url}/in/*.jsonl"})
    assert jobs.run("run", spec, faults="chain.after_commit:9=kill", **store.environment).returncode == -9
    shutil.rmtree(tmp_path / "work")
    # An object that has changed is noticed on another machine, which has no copy of it.
    stores.put(f"{url}/in/b.jsonl", b"".join(lines[101:]))
    refused = jobs.run("run", spec, **store.environment)
    assert refused.returncode == 2 and "input" in refused.stderr, refused.stderr
    stores.put(f"{url}/in/b.jsonl", b"".join(lines[100:]))
    jobs.finish(spec, **store.environment)
    assert stores.rows(f"{url}/out") == list(jobs.unhurt())

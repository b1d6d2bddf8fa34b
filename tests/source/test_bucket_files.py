"""Inputs in the stores that also hold outputs: read with the same package and the same key, versions by ETag."""

import gzip
import io
import json
import pathlib
import shutil

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import stores

import jobs
from batchinf.base.errors import InputError
from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source

pytestmark = [pytest.mark.fewer_rows, pytest.mark.usefixtures("store_of_this_process")]
ROWS = [{"x": number, "text": f"row {number} ä"} for number in range(50)]


def put(url: str, data: bytes) -> None:
    with stores.file_system().open_output_stream(url.removeprefix("s3://"), compression=None) as file:
        file.write(data)


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
        put(f"{url}/in/{name}.{ending}", content(ending))
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


def test_a_job_from_a_bucket_into_a_bucket(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    lines = jobs.prompts().read_bytes().splitlines(keepends=True)
    put(f"{url}/in/a.jsonl", b"".join(lines[:100]))
    put(f"{url}/in/b.jsonl", b"".join(lines[100:]))
    spec = stores.spec_of(tmp_path, f"{url}/out", input={"path": f"{url}/in/*.jsonl"})
    assert jobs.run("run", spec, faults="chain.after_commit:9=kill", **store.environment).returncode == -9
    shutil.rmtree(tmp_path / "work")
    # An object that has changed is noticed on another machine, which has no copy of it.
    put(f"{url}/in/b.jsonl", b"".join(lines[101:]))
    refused = jobs.run("run", spec, **store.environment)
    assert refused.returncode == 2 and "input" in refused.stderr, refused.stderr
    put(f"{url}/in/b.jsonl", b"".join(lines[100:]))
    jobs.finish(spec, **store.environment)
    assert stores.rows(f"{url}/out") == list(jobs.unhurt())

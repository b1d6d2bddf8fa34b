"""Time and peak memory of choosing rows by `where`, `sample` and `exclude`, each in its own process.

    python benchmarks/selection.py --rows 1000000 10000000

The input is Parquet. The earlier job has done every other row. `CPU` is processor time of all threads. RSS is the
kernel's own peak and includes pages of mapped files. `anonymous` excludes those and is sampled ten times a second.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE.parent / "sample_data" / "tiny-llama"
_CHUNK_ROWS = 100_000
_PART_ROWS = 50_000
CASES: dict[str, dict[str, Any]] = {
    "no choice": {"limit": 1 << 30},
    "where": {"where": "language = 'de' and quality > 0.5"},
    "sample": {"sample": 0.01},
    "exclude, id integer": {"exclude": {"job": "earlier", "on": "id"}},
    "exclude, id text": {"id_column": "name", "exclude": {"job": "earlier-text", "on": "id"}},
    "all three": {
        "where": "quality > 0.5", "sample": 0.5, "exclude": {"job": "earlier", "on": "id"}
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        choose_once(pathlib.Path(arguments.one[0]), arguments.one[1])
        return
    print("| rows | chosen by | chosen rows | seconds | CPU | peak RSS | anonymous |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for num_rows in arguments.rows:
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            write_input(folder, num_rows)
            write_earlier(folder / "earlier", num_rows, is_text=False)
            write_earlier(folder / "earlier-text", num_rows, is_text=True)
            for case in CASES:
                command = [sys.executable, __file__, "--one", str(folder), case]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                print(
                    f"| {num_rows:,} | {case} | {found['num_chosen']:,} | {found['seconds']:.1f} | "
                    f"{found['cpu']:.2f} | {found['rss']:.0f} MiB | {found['anonymous']:.0f} MiB |",
                    flush=True,
                )


def write_input(folder: pathlib.Path, num_rows: int) -> None:
    """Write five columns, one of them a prompt of about 100 characters."""
    rng = np.random.default_rng(0)
    schema = pa.schema(
        [("id", "int64"), ("name", "string"), ("prompt", "string"), ("language", "string"), ("quality", "float64")]
    )
    with pq.ParquetWriter(folder / "input.parquet", schema, compression="zstd") as writer:
        for start in range(0, num_rows, _CHUNK_ROWS):
            ids = range(start, min(start + _CHUNK_ROWS, num_rows))
            columns = [
                list(ids),
                [f"document-{number:012d}" for number in ids],
                [f"Say in one sentence what document {number} is about. " + "lorem ipsum " * 4 for number in ids],
                [("de", "en", "fr", "ja")[number % 4] for number in ids],
                rng.random(len(ids)),
            ]
            writer.write_table(pa.table(columns, schema=schema))


def write_earlier(out: pathlib.Path, num_rows: int, *, is_text: bool) -> None:
    """Write the output of a job that has done every other row, as far as `exclude` reads it."""
    from batchinf.base.storage import Folder
    from batchinf.manifest.columns import Columns
    from batchinf.manifest.lines import Header
    from batchinf.manifest.log import Manifest
    from batchinf.manifest.names import part_name
    from batchinf.manifest.versions import FORMAT_VERSION
    from batchinf.records import Extent, Part
    from batchinf.source.cache import schema_text
    from batchinf.version import __version__

    folder = Folder(out)
    folder.make("manifest", "parts")
    manifest = Manifest(folder, 1)
    no_columns = schema_text(pa.schema([]))
    header = Header(
        format_version=FORMAT_VERSION,
        batchinf_version=__version__,
        job_id="0" * 32,
        created_at="2026-01-01T00:00:00+00:00",
        identity={},
        fingerprint="0" * 32,
        layout={},
        spec={},
        columns=Columns(journal=no_columns, part=no_columns),
    )
    manifest.header(header)
    manifest.extent(Extent(0, num_rows // 2, _PART_ROWS, 0, 0, num_rows // 2), "input")
    for shard, start in enumerate(range(0, num_rows, 2 * _PART_ROWS)):
        ids = range(start, min(start + 2 * _PART_ROWS, num_rows), 2)
        values = pa.array([f"document-{number:012d}" for number in ids]) if is_text else pa.array(ids, "int64")
        table = pa.table({"id": values, "text": ["some answer"] * len(ids), "error_type": pa.nulls(len(ids), "string")})
        pq.write_table(table, out / "parts" / part_name(shard), compression="zstd", write_page_checksum=True)
        manifest.part(Part(shard=shard, file=part_name(shard), num_rows=len(ids), num_bytes=0, digest=""))
    manifest.commit()
    manifest.close()


def choose_once(folder: pathlib.Path, case: str) -> None:
    """Choose rows, and print time and memory as JSON."""
    from batchinf.job.choose import choose
    from batchinf.job.open import open_job
    from batchinf.spec.file import read_spec

    path = {"path": str(folder / "input.parquet"), "id_column": "id", "prompt_column": "prompt"}
    given = dict(CASES[case])
    if "exclude" in given:
        given["exclude"] = {**given["exclude"], "job": str(folder / given["exclude"]["job"])}
    spec = {
        "model": str(MODEL), "input": {**path, **given}, "output": {"path": str(folder / "out")}, "scripted": {}
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(spec))
    file = read_spec(folder / "job.yaml")
    job = open_job(file, folder / "cache")
    anonymous = [0]
    threading.Thread(target=_watch, args=(anonymous,), daemon=True).start()
    began, began_cpu = time.monotonic(), time.process_time()
    job.folder.make()
    chosen = choose(job, range(job.source.num_rows), job.folder, limit=job.spec.input.limit)
    found = {
        "num_chosen": chosen.num_rows,
        "seconds": time.monotonic() - began,
        "cpu": time.process_time() - began_cpu,
        "rss": _kilobytes("status", "VmHWM:") / 1024,
        "anonymous": max(anonymous[0], _kilobytes("smaps_rollup", "Anonymous:")) / 1024,
    }
    print(json.dumps(found))


def _watch(anonymous: list[int]) -> None:
    while True:
        anonymous[0] = max(anonymous[0], _kilobytes("smaps_rollup", "Anonymous:"))
        time.sleep(0.1)


def _kilobytes(name: str, key: str) -> int:
    for line in pathlib.Path("/proc/self", name).read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    main()

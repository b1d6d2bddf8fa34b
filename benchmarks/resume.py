"""Seconds to open and resume a large job that is nearly done, and to show its status.

    python benchmarks/resume.py --rows 100000000 --parts 100000

The package's own classes make the job without an engine: a Parquet input (a number and the same prompt in each row), a
manifest, and parts of no rows whose footers are as the manifest says. Only the last shards are missing. The time of
`batchinf run` counts until the first replica has started, and the job is opened and recovered beside it.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.base.storage import Folder
from batchinf.coordinator.begin import new_header
from batchinf.coordinator.run import FOLDERS
from batchinf.job.job import Job
from batchinf.job.open import open_job
from batchinf.manifest.events import read_events
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import part_name
from batchinf.output.proof import expected_entries
from batchinf.records import Part, PartCounts, Shard
from batchinf.schedule.shards import shard_at, total_shards, uncut
from batchinf.spec.file import dump_spec, read_spec

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE.parent / "sample_data" / "tiny-llama"
_GROUP_ROWS = 20_000
_COMMIT_PARTS = 100
_EVENTS = {"replica_started", "epoch"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--parts", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/resume"))
    args = parser.parse_args()
    path = args.out / "job.yaml"
    if not path.exists():
        make(args.out, path, args.rows, args.parts)
    for _ in range(args.repeat):
        report("batchinf run, to the first replica's start", resume(path, args.out / "job"))
    for _ in range(args.repeat):
        report("batchinf status", status(args.out / "job"))


def make(out: pathlib.Path, path: pathlib.Path, num_rows: int, num_parts: int) -> None:
    """Write input, spec, manifest and parts."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_rows(out / "rows.parquet", num_rows)
    spec = {
        "model": str(MODEL),
        "input": {"path": str(out / "rows.parquet"), "prompt_column": "prompt", "id_column": "id"},
        "sampling": {"temperature": 0.0, "max_tokens": 4},
        # The last eighth has shards of a quarter of the size, so there are 7/8 n + 4 * 1/8 n shards.
        "output": {"path": str(out / "job"), "rows_per_shard": max(4, num_rows * 11 // 8 // (num_parts + 8))},
        "scripted": {"start_s": 60},
    }
    unfinished = out / "unfinished.yaml"
    unfinished.write_text(json.dumps(spec))
    job = open_job(read_spec(str(unfinished), ()))
    make_job(job, num_parts)
    unfinished.rename(path)


def write_rows(path: pathlib.Path, num_rows: int) -> None:
    """Write Parquet with `id` and `prompt`, in row groups small enough to be read without a spool."""
    with pq.ParquetWriter(path, pa.schema({"id": pa.int64(), "prompt": pa.string()})) as writer:
        for start in range(0, num_rows, _GROUP_ROWS):
            ids = pa.array(np.arange(start, min(start + _GROUP_ROWS, num_rows)))
            writer.write_table(pa.table({"id": ids, "prompt": pa.repeat("Say something.", len(ids))}))


def make_job(job: Job, num_parts: int) -> None:
    """Write the output folder of a coordinator that has committed `num_parts` parts."""
    job.folder.make(*FOLDERS)
    header, extent = new_header(job, 1, uncut(job.rows), uuid.uuid4().hex)
    num_shards = total_shards((extent,))
    if num_shards < num_parts:
        sys.exit(f"got {num_shards:,} shards for {num_parts:,} parts; give more rows for each part")
    print(f"{extent.num_rows:,} rows in {num_shards:,} shards, {num_parts:,} of them done", flush=True)
    job.folder.write_atomic("job.yaml", dump_spec(job.spec).encode())
    manifest = Manifest(job.folder, 1)
    manifest.record(header)
    manifest.extent(extent, job.source.fingerprint)
    for index in range(num_parts):
        manifest.part(
            make_part(job.folder, header.job_id, shard_at((extent,), index), f"parts/{part_name(index)}"),
            0,
            "000001.0001",
        )
        if index % _COMMIT_PARTS == _COMMIT_PARTS - 1:
            manifest.commit()
    manifest.commit()
    manifest.close()


def make_part(folder: Folder, job_id: str, shard: Shard, name: str) -> Part:
    """Write a part without rows at `name`, and return its record for the manifest."""
    tokens = 4 * shard.num_rows
    counts = PartCounts(num_rows=shard.num_rows, num_prompt_tokens=tokens, num_output_tokens=tokens)
    part = Part(
        shard=shard.index,
        num_bytes=0,
        digest=f"{shard.index:032x}",
        **dataclasses.asdict(counts),
    )
    entries = {name: value for name, value in expected_entries(job_id, shard, shard.start, part).items() if value}
    schema = pa.schema([], metadata=entries)
    path = folder.path(name)
    pq.write_table(schema.empty_table(), path)
    return dataclasses.replace(part, num_bytes=path.stat().st_size)


def resume(spec: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Start the job, wait for its first replica and for the end of its recovery, and end both."""
    before = len(read_events(Folder(out)))
    started, at = time.monotonic(), time.time()
    with (out / "logs" / "run.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "batchinf", "run", str(spec)], stdout=log, stderr=log)
        while not (events := {event.name: event for event in read_events(Folder(out))[before:]}).keys() >= _EVENTS:
            if process.poll() is not None:
                sys.exit((out / "logs" / "run.log").read_text()[-2000:])
            time.sleep(0.01)
        noticed_s = time.monotonic() - started
        cpu_s = cpu_seconds(process.pid)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(events["replica_started"].fields["identity"]["pgid"], signal.SIGKILL)
    if events["epoch"].fields["lost"]:
        sys.exit(f"the run did not accept the parts; see {out / 'logs' / 'run.log'}")
    wall_s = max(events[name].time for name in _EVENTS) - at
    return {"wall_s": min(wall_s, noticed_s), "cpu_s": cpu_s}


def cpu_seconds(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status(out: pathlib.Path) -> dict[str, Any]:
    started, before = time.monotonic(), os.times()
    subprocess.run([sys.executable, "-m", "batchinf", "status", str(out)], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall_s": time.monotonic() - started, "cpu_s": cpu_s}


def report(what: str, figures: dict[str, Any]) -> None:
    print(f"{what}: {figures['wall_s']:.2f} s, {figures['cpu_s']:.2f} s of processor time", flush=True)


if __name__ == "__main__":
    main()

"""Peak memory of the coordinator and of the replicas while a job runs on the scripted engine.

    python benchmarks/memory.py --rows 10000 10000000
    python benchmarks/memory.py --rows 32 320 --output-tokens 32000 --logprobs 20 --max-num-seqs 8

RSS is the kernel's own peak. It includes pages of mapped files (the spool, the journal's segments), which the kernel
takes back when it needs memory. `anonymous` excludes those and is sampled ten times a second. The scripted engine holds
a whole completion for each request that it has: 5.4 MB at 32,000 tokens with their top 20. To compare runs, the engine
must be full in the smallest one, too; a low `--max-num-seqs` does that.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE.parent / "sample_data" / "tiny-llama"
_SAMPLE_S = 0.1
_CHUNK_ROWS = 100_000
_MIB = 2**20


@dataclass(slots=True)
class Peak:
    """Peak memory of one process, or of the largest of several, in bytes."""

    rss: int = 0
    anonymous: int = 0

    def look(self, pid: int) -> None:
        """Note the current and the peak memory of a process."""
        self.rss = max(self.rss, _kilobytes(f"/proc/{pid}/status", "VmHWM:"))
        self.anonymous = max(self.anonymous, _kilobytes(f"/proc/{pid}/smaps_rollup", "Anonymous:"))


@dataclass(slots=True)
class Figures:
    num_rows: int
    seconds: float = 0.0
    num_parts: int = 0
    coordinator: Peak = field(default_factory=Peak)
    replica: Peak = field(default_factory=Peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--output-tokens", type=int, default=4)
    parser.add_argument("--logprobs", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/memory"))
    args = parser.parse_args()
    found = []
    for num_rows in args.rows:
        folder = args.out / f"{num_rows}-{args.output_tokens}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_rows(folder / "rows.parquet", num_rows)
        spec = write_spec(folder, args.output_tokens, args.logprobs, args.max_num_seqs, args.replicas)
        found.append(run(spec, folder, num_rows))
        print(table(found), flush=True)


def write_rows(path: pathlib.Path, num_rows: int) -> None:
    """Write Parquet rows `id` and `prompt`, with different prompts of about 10 tokens."""
    with pq.ParquetWriter(path, _rows(0, 1).schema) as writer:
        for start in range(0, num_rows, _CHUNK_ROWS):
            writer.write_table(_rows(start, min(start + _CHUNK_ROWS, num_rows)))


def _rows(start: int, stop: int) -> pa.Table:
    ids = pa.array(range(start, stop), pa.int64())
    numbers = ids.cast(pa.string())
    return pa.table({"id": ids, "prompt": pc.binary_join_element_wise("Say this number:", numbers, " ")})


def write_spec(
    folder: pathlib.Path, output_tokens: int, logprobs: int | None, max_num_seqs: int, num_replicas: int
) -> pathlib.Path:
    """Write the job's spec as JSON, which is valid YAML."""
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": output_tokens}
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    spec = {
        "model": str(MODEL),
        "input": {"path": str(folder / "rows.parquet"), "prompt_column": "prompt", "id_column": "id"},
        "sampling": sampling,
        "parallel": {"data_parallel_size": num_replicas},
        "output": {"path": str(folder / "job")},
        "scripted": {
            "max_model_len": output_tokens + 256,
            "max_num_seqs": max_num_seqs,
            "vary_lengths": False,
        },
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(spec))
    return path


def run(spec: pathlib.Path, folder: pathlib.Path, num_rows: int) -> Figures:
    """Run the job to its end and watch its processes."""
    figures, started = Figures(num_rows), time.monotonic()
    with (folder / "job.log").open("wb") as log:
        command = [sys.executable, "-m", "batchinf", "run", str(spec)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            figures.coordinator.look(process.pid)
            for pid in _replicas(process.pid):
                figures.replica.look(pid)
            time.sleep(_SAMPLE_S)
    if process.returncode != 0:
        sys.exit((folder / "job.log").read_text()[-4000:])
    figures.seconds = time.monotonic() - started
    figures.num_parts = sum(1 for _ in (folder / "job" / "parts").iterdir())
    return figures


def _replicas(coordinator: int) -> Iterator[int]:
    try:
        for child in psutil.Process(coordinator).children():
            if "batchinf.fleet.local.process" in child.cmdline():
                yield child.pid
    except psutil.Error:
        return


def _kilobytes(path: str, name: str) -> int:
    """A value in a file of /proc, in bytes; 0 if the process has ended."""
    try:
        with open(path) as lines:
            return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)
    except OSError:
        return 0


def table(found: list[Figures]) -> str:
    """The peaks, and how much each is above the first one."""
    lines = [
        "| rows | seconds | parts | coordinator RSS | anonymous | replica RSS | anonymous | most above the first |",
        "|" + " ---: |" * 8,
    ]
    for figures in found:
        peaks, first = (
            [one.coordinator.rss, one.coordinator.anonymous, one.replica.rss, one.replica.anonymous]
            for one in (figures, found[0])
        )
        above = max(peak - least for peak, least in zip(peaks, first, strict=True))
        cells = [f"{figures.num_rows:,}", f"{figures.seconds:,.0f}", f"{figures.num_parts:,}"]
        cells += [f"{peak / _MIB:,.0f} MiB" for peak in [*peaks, above]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

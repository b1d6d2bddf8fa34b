"""Measure `batchinf export`: rows a second and peak memory, in each format.

    python benchmarks/export.py --rows 10000000
    python benchmarks/export.py --rows 1000000 --shuffled --formats jsonl

A job on the scripted engine makes 50,000 rows of text, which are then repeated with other positions, as a job of this
size would take an hour. Each export is a process of its own and writes to a file, which is deleted.

--shuffled: as with `input.order`, each part has rows from all over the input, so the export sorts them.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.commands import export
from batchinf.results import Results

JOB_ROWS = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--formats", default="jsonl,csv,parquet,openai-batch")
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--measure", metavar="FORMAT", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        measure(pathlib.Path(args.out), args.measure, is_shuffled=args.shuffled)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = make_job(pathlib.Path(folder), args.rows // JOB_ROWS, is_shuffled=args.shuffled)
        for name in args.formats.split(","):
            command = [sys.executable, __file__, "--measure", name, "--out", str(out)]
            subprocess.run([*command, *(["--shuffled"] if args.shuffled else [])], check=True)


def make_job(folder: pathlib.Path, num_copies: int, *, is_shuffled: bool) -> pathlib.Path:
    """A job's folder, whose parts lie beside it in `copies`, repeated."""
    rows = (json.dumps({"id": str(index), "prompt": f"Say the number {index}."}) for index in range(JOB_ROWS))
    (folder / "in.jsonl").write_text("\n".join(rows))
    spec = {
        "model": "sample_data/tiny-llama",
        "input": {"path": str(folder / "in.jsonl"), "id_column": "id"},
        "sampling": {"max_tokens": 32},
        "output": {"path": str(folder / "out"), "include_token_ids": False},
        "scripted": {"step_s": 0.0, "max_num_seqs": 512},
    }
    (folder / "job.yaml").write_text(json.dumps(spec))
    subprocess.run([sys.executable, "-m", "batchinf", "run", "-q", str(folder / "job.yaml")], check=True)
    (folder / "copies").mkdir()
    for copy in range(num_copies):
        for part in Results(folder / "out").parts:
            table = pq.read_table(part)
            index = table.column("row_index").to_numpy()
            index = index * num_copies + copy if is_shuffled else index + copy * JOB_ROWS
            place = table.schema.get_field_index("row_index")
            table = table.set_column(place, "row_index", pa.array(index))
            pq.write_table(table, folder / "copies" / f"{copy:06}-{part.name}", compression="zstd")
    return folder / "out"


class Repeated(Results):
    """The job with the repeated parts."""

    is_shuffled = False

    def __init__(self, out: str) -> None:
        super().__init__(out)
        self.parts = sorted(pathlib.Path(out).parent.joinpath("copies").iterdir())
        self.num_rows = sum(pq.read_metadata(part).num_rows for part in self.parts)
        self.num_input_rows = self.num_rows
        self.is_in_order = not self.is_shuffled


def measure(out: pathlib.Path, name: str, *, is_shuffled: bool) -> None:
    Repeated.is_shuffled = is_shuffled
    setattr(export, "Results", Repeated)  # noqa: B010  # mypy takes it for a change of a type
    begun = time.monotonic()
    path = out.parent / "exported"
    done = export.export_job(str(out), export.ExportRequest(path=str(path), to=name))
    seconds = time.monotonic() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    size = path.stat().st_size
    path.unlink()
    rate = done.num_rows / seconds
    print(f"{name:14} {done.num_rows:>12,} rows {rate:>10,.0f} rows/s {peak:>8,.0f} MiB {size:>14,} bytes", flush=True)


if __name__ == "__main__":
    main()

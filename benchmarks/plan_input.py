"""Time and peak memory of `batchinf plan` for a large Parquet input, and whether it imports PyTorch or vLLM.

    python benchmarks/plan_input.py --rows 10000000

Prompts have log-normal lengths, 300 characters on average. The file is made in a temporary folder and deleted. CPU is
processor time of all processes. RSS is the kernel's own peak of the largest process.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE.parent / "sample_data" / "tiny-llama"
_CHUNK_ROWS = 100_000
PLAN = """
import sys
from batchinf.cli import main
try:
    main()
finally:
    print("imported:", *sorted({"torch", "vllm"} & sys.modules.keys()), file=sys.stderr)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--characters", type=int, default=300, help="of a prompt, on average")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        size = write_rows(root / "rows.parquet", args.rows, args.characters)
        spec = {
            "model": str(MODEL),
            "input": {"path": str(root / "rows.parquet"), "prompt_column": "prompt"},
            "sampling": {"temperature": 0.0, "max_tokens": 128},
            "engine": {"max_model_len": "auto"},
            "output": {"path": str(root / "out")},
        }
        (root / "job.yaml").write_text(json.dumps(spec))
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", PLAN, "plan", str(root / "job.yaml"), "--gpu", "h200", "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        wall_s = time.monotonic() - began
    if done.returncode:
        raise SystemExit(done.stderr)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads(done.stdout)
    print(
        f"{args.rows:,} rows, {size / 1e9:.2f} GB: {wall_s:.1f} s, {used.ru_utime + used.ru_stime:.1f} s CPU, "
        f"RSS {used.ru_maxrss / 2**20:.2f} GiB; {report['job']['num_rows']:,} rows found, "
        f"prompts of {report['job']['prompt']:.0f} tokens; {done.stderr.strip().splitlines()[-1]}"
    )


def write_rows(path: pathlib.Path, num_rows: int, characters: int) -> int:
    """Write the input; returns its bytes."""
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, size))) for size in rng.integers(2, 9, 5000)]
    text = " ".join(rng.choice(words, 20_000))
    lengths = np.clip(rng.lognormal(np.log(characters) - 0.32, 0.8, num_rows), 8, 8000).astype(int)
    starts = rng.integers(0, len(text) - 8000, num_rows)
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, num_rows, _CHUNK_ROWS):
            rows = range(first, min(first + _CHUNK_ROWS, num_rows))
            prompts = [text[starts[row] : starts[row] + lengths[row]] for row in rows]
            writer.write_table(pa.table({"id": list(rows), "prompt": prompts}, schema))
    return path.stat().st_size


if __name__ == "__main__":
    main()

"""What comparing two jobs of wide rows takes of memory: a few rows of each at a time, however many there are."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from test_diff_numbers import job

import jobs

NUM_ROWS, WIDTH = 160, 128_256  # 40 MB of each job

# As much as the processes that do it have for themselves at their most: what they map of files is not counted.
DIFF = """
import pathlib, sys, threading
from batchinf.commands.diff import diff_jobs

def anonymous():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) >> 10

def watch():
    while not is_done.wait(0.01):
        seen.append(anonymous())

is_done, seen = threading.Event(), [0]
watcher = threading.Thread(target=watch)
watcher.start()
lines = list(diff_jobs(sys.argv[1], sys.argv[2], num_examples=1).lines())
is_done.set()
watcher.join()
print(next(line for line in lines if line.startswith("rows: ")))
print(max(seen))
"""


def logits(seed: int) -> pa.Table:
    """Rows of one position each; the second job's are other ones."""
    row = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float16)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.tile(row, NUM_ROWS)), WIDTH)
    indices = pa.array(range(NUM_ROWS), pa.int64())
    columns = {
        "row_index": indices,
        "prompt_hash": indices,
        "logits": pa.ListArray.from_arrays(pa.array(range(NUM_ROWS + 1), pa.int32()), rows),
        "error_type": pa.nulls(NUM_ROWS, pa.string()),
    }
    return pa.table(columns)


@pytest.mark.slow
def test_wide_rows_are_compared_a_few_at_a_time(tmp_path: pathlib.Path) -> None:
    as_stored = {"row_group_size": 64, "use_dictionary": False, "compression": "none"}
    a, b = (job(tmp_path / name, logits(seed), "logits", cuts=(), **as_stored) for seed, name in enumerate("ab"))
    environment = {**os.environ, **jobs.quick_start()}
    done = subprocess.run(
        [sys.executable, "-c", DIFF, a, b], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    compared, most_mib = done.stdout.splitlines()[-2:]  # DuckDB's progress before, as to a person who typed it
    assert compared == f"rows: {NUM_ROWS} in both, by row_index"
    # Measured: 135 MiB, of which 40 before the first row; 310 with 32 MiB of each job at once.
    assert int(most_mib) < 220

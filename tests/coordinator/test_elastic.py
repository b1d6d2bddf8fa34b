"""A job goes on with more replicas, other limits, on other paths: what comes out is what an unhurt run gives."""

import json
import pathlib
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs

# Named wherever free fields are listed: nothing here makes another job of it.
OTHER = {
    "parallel": {"data_parallel_size": 3, "tensor_parallel_size": 2},
    "engine": {"max_num_seqs": 7, "gpu_memory_utilization": 0.5},
    "scripted": {"step_s": 0.0, "max_num_seqs": 5},
    "checkpoint_interval_s": 3.0,
    "drain_timeout_s": 1.0,
    "max_restarts": 1,
}
SLOW = {"step_s": 0.02, "max_num_seqs": 4}


def as_jsonl(path: pathlib.Path) -> pathlib.Path:
    return shutil.copy(jobs.prompts(), path.with_suffix(".jsonl"))


def as_parquet(path: pathlib.Path) -> pathlib.Path:
    lines = jobs.prompts().read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"), row_group_size=50)
    return path.with_suffix(".parquet")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write_input", "number"),
    [(as_parquet, signal.SIGKILL), (as_jsonl, signal.SIGTERM)],
)
def test_more_replicas_other_limits_other_places(
    write_input: Callable[[pathlib.Path], pathlib.Path], number: signal.Signals, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "out"
    model = shutil.copytree(jobs.MODEL, tmp_path / "model")
    prompts = write_input(tmp_path / "prompts")
    first: dict[str, Any] = {
        "model": str(model),
        "input": {"path": str(prompts)},
        "output": {"rows_per_shard": 60},
        "parallel": {"data_parallel_size": 1},
        "drain_timeout_s": 0.0,
        "scripted": SLOW,
    }
    process = jobs.start("run", jobs.spec_of(tmp_path, **first))
    jobs.wait_until(lambda: journalled(out) or process.poll() is not None)
    everyone = jobs.family(process.pid)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (75 if number == signal.SIGTERM else -9)
    assert jobs.are_gone(everyone)
    # Model, input and output lie elsewhere from now on.
    (tmp_path / "there").mkdir()
    for path in (model, prompts, out):
        path.rename(tmp_path / "there" / path.name)
    moved = {
        **OTHER,
        "model": str(tmp_path / "there" / "model"),
        "input": {"path": str(tmp_path / "there" / prompts.name)},
    }
    jobs.finish(jobs.spec_of(tmp_path / "there", **moved, output={"rows_per_shard": "auto"}))
    out = tmp_path / "there" / "out"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert sum(event["num_requests"] for event in jobs.events_of(out, "recovered")) > 0
    assert {event["replica"] for event in jobs.events_of(out, "replica_started")} == {0, 1, 2}


def journalled(out: pathlib.Path) -> list[pathlib.Path]:
    """Segments, once the first part is there too."""
    return list((out / "journal").glob("0*")) if list((out / "parts").glob("*")) else []

"""Replicas share the rows of a job: real processes, the scripted engine, rows by replica. Times are in benchmarks/."""

import contextlib
import json
import pathlib
import signal
import time
from typing import Any

import psutil
import pytest

import jobs
from batchinf.base.storage import Folder
from batchinf.fleet.status import read_status
from batchinf.replica.messages import STARTING_ENGINE

# Engines that hold all rows of these jobs at once, and need some seconds for them.
ENGINE = {"max_num_seqs": 1024, "step_s": 0.05, "vary_lengths": False}


def spec_of(folder: pathlib.Path, num_rows: int, replicas: int, **sections: Any) -> pathlib.Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {row} of many"}) + "\n" for row in range(num_rows)))
    sampling = {"max_tokens": 60, **sections.pop("sampling", {})}
    return jobs.spec_of(
        folder,
        input={"path": str(path), "id_column": None},
        sampling=sampling,
        parallel={"data_parallel_size": replicas},
        output={"keep_columns": [], "rows_per_shard": "auto"},
        **{"scripted": ENGINE, **sections},
    )


def finish_together(spec: pathlib.Path, folder: pathlib.Path) -> str:
    """Run a job whose engines come up at one time. Returns its closing lines."""
    marker, out = folder / "held", folder / "out"

    def are_starting() -> bool:
        status = read_status(Folder(out)) if out.exists() else None
        return status is not None and all(one.state == STARTING_ENGINE for one in status.replicas)

    process = jobs.start("run", spec, faults=f"engine.start=hold {marker}")
    jobs.wait_until(lambda: marker.exists() and are_starting())
    # The coordinator hears of all of them at once, however late one is on a busy machine.
    process.send_signal(signal.SIGSTOP)
    marker.unlink()
    replicas = jobs.replicas_of(process.pid)
    jobs.wait_until(lambda: all(are_idle(replicas) for _ in range(20)))
    process.send_signal(signal.SIGCONT)
    code, said, errors = jobs.end(process)
    assert code == 0, errors
    return said


def are_idle(processes: list[psutil.Process]) -> bool:
    """Whether no thread of them runs or waits for a processor or a disk."""
    time.sleep(0.005)
    for path in (path for one in processes for path in pathlib.Path(f"/proc/{one.pid}/task").glob("*/stat")):
        with contextlib.suppress(OSError):  # a thread may have ended
            if path.read_text().rpartition(") ")[2][0] in "RD":
                return False
    return True


def rows_by_replica(out: pathlib.Path) -> list[int]:
    """The rows that each replica's engine answered, as the closing lines say."""
    speed = jobs.state_of(out).speed
    assert speed is not None
    return [share.num_rows for share in speed.replicas]


def test_rows_that_one_engine_could_hold_are_shared_evenly(tmp_path: pathlib.Path) -> None:
    finish_together(spec_of(tmp_path, 300, 3), tmp_path)
    shares = rows_by_replica(tmp_path / "out")
    assert sum(shares) == 300
    assert min(shares) >= 70
    # The files are those of a job in which each replica runs whole shards.
    assert len(jobs.state_of(tmp_path / "out").parts) == 5
    assert [row["row_index"] for row in jobs.rows_of(tmp_path / "out")] == list(range(300))


def test_five_rows_keep_two_replicas_busy(tmp_path: pathlib.Path) -> None:
    finish_together(spec_of(tmp_path, 5, 2), tmp_path)
    assert sorted(rows_by_replica(tmp_path / "out")) == [2, 3]


def test_the_closing_lines_say_that_replicas_had_no_rows(tmp_path: pathlib.Path) -> None:
    said = finish_together(spec_of(tmp_path, 1, 2), tmp_path)
    assert "1 of 2 replicas had no rows: 1 row ran in all" in said
    assert sorted(rows_by_replica(tmp_path / "out")) == [0, 1]


def test_rows_whose_answers_are_errors_count_as_run(tmp_path: pathlib.Path) -> None:
    """The scripted engine's texts are no JSON."""
    sampling = {"structured_outputs": {"json": {"type": "object"}}}
    said = finish_together(spec_of(tmp_path, 5, 2, sampling=sampling, max_error_rate=1.0), tmp_path)
    assert "5 × invalid_json" in said
    assert sorted(rows_by_replica(tmp_path / "out")) == [2, 3]


@pytest.mark.parametrize("fault", ["writer.store_lease=kill", "writer.stored_lease=kill", "writer.close=kill"])
def test_a_replica_that_is_killed_while_it_stores_a_lease(fault: str, tmp_path: pathlib.Path) -> None:
    """Each lease has one to five rows, and most shards are cut over three replicas."""
    (tmp_path / "once").mkdir()
    sections = {"scripted": {"max_num_seqs": 4, "step_s": 0.005}, "output": {"rows_per_shard": 12}}
    spec = jobs.spec_of(tmp_path, parallel={"data_parallel_size": 3}, input={"limit": 48}, **sections)
    jobs.finish(spec, faults=fault, BATCHINF_FAULTS_ONCE=str(tmp_path / "once"))
    rows = [
        {name: value for name, value in row.items() if name != "attempts"} for row in jobs.rows_of(tmp_path / "out")
    ]
    unhurt = [{name: value for name, value in row.items() if name != "attempts"} for row in jobs.unhurt()]
    assert rows == unhurt[:48]
    assert list((tmp_path / "once").iterdir()), "no replica was killed"
    assert not list((tmp_path / "out" / "journal").iterdir())


def test_a_job_that_is_killed_between_the_leases_of_a_shard_resumes(tmp_path: pathlib.Path) -> None:
    """The coordinator dies when it is about to hand out the shard whose leases are all stored."""
    sections = {"scripted": {"max_num_seqs": 4, "step_s": 0.005}, "output": {"rows_per_shard": 12}}
    spec = jobs.spec_of(tmp_path, parallel={"data_parallel_size": 3}, input={"limit": 48}, **sections)
    for place in (8, 14, 3):
        process = jobs.start("run", spec, faults=f"coordinator.before_assign:{place}=kill")
        jobs.end(process)
    jobs.finish(spec)
    assert [row["text"] for row in jobs.rows_of(tmp_path / "out")] == [row["text"] for row in jobs.unhurt()][:48]
    assert not jobs.events_of(tmp_path / "out", "journal_damaged")

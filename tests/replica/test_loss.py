"""What a crash costs: no finished request that is older than a checkpoint interval."""

import pathlib
import time

import pytest

import jobs
from batchinf.base.storage import Folder
from batchinf.output.journal import Journal
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of


def num_journalled(out: pathlib.Path, shard: int) -> int:
    """Distinct requests of a shard in whole segments."""
    schema = task_of(JobSpec.model_validate(jobs.state_of(out).header.spec)).result_schema
    keys: set[tuple[int, int]] = set()
    for segment in Journal(Folder(out), "look", schema).recover(shard)[0]:
        rows, requests, _ = segment.keys()
        keys |= set(zip(rows.tolist(), requests.tolist(), strict=True))
        segment.close()
    return len(keys)


@pytest.mark.slow
def test_a_part_that_is_long_in_writing_is_journalled_meanwhile(tmp_path: pathlib.Path) -> None:
    marker, out = tmp_path / "held", tmp_path / "out"
    # The shard is whole long before the first checkpoint: nothing of it has been journalled when its part is begun.
    spec = jobs.spec_of(
        tmp_path, output={"rows_per_shard": 60}, parallel={"data_parallel_size": 1}, checkpoint_interval_s=3.0
    )
    process = jobs.start("run", spec, "--set", "scripted.step_s=0", faults=f"parts.before_fsync=hold {marker}")
    jobs.wait_until(lambda: marker.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    time.sleep(3.0)
    jobs.wait_until(lambda: num_journalled(out, 0) == 60)
    everyone = jobs.family(process.pid)
    jobs.kill(everyone)
    process.communicate()
    assert jobs.are_gone(everyone)
    marker.unlink()
    assert not jobs.state_of(out).parts
    jobs.finish(spec)
    recovered = {event["shard"]: event["num_requests"] for event in jobs.events_of(out, "recovered")}
    assert recovered[0] == 60
    assert jobs.rows_of(out) == list(jobs.unhurt())

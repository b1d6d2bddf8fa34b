"""kill -9 at named steps and at random moments: the same command again gives the rows of an unhurt run.

None is lost, none comes twice, no process is left behind.
"""

import itertools
import pathlib
import random
import subprocess
import time

import psutil
import pytest

import jobs

pytestmark = pytest.mark.fewer_rows

# Where one process stands still while the victims are killed.
STEPS = {
    "mid-generation": "engine.step:40",
    "while a segment is written": "journal.before_fsync",
    "before a staging file's rename": "parts.before_rename",
    "after a staging file's rename": "parts.after_rename",
    "between publish and manifest line": "coordinator.after_publish:2",
    "mid manifest line": "manifest.mid_line:4",
}
VICTIMS = ("coordinator", "replica", "everything")
# At each step all at once, and one of the two alone in turn; the random kills below meet them all. Slow tests and the
# first start new processes of Python. The others fork them, in a third of the time.
STRIKES = [
    *(
        pytest.param(step, "everything", marks=[pytest.mark.real_starts] if place == 0 else [])
        for place, step in enumerate(STEPS)
    ),
    *(
        pytest.param(step, victim, marks=[pytest.mark.slow, pytest.mark.real_starts])
        for step, victim in zip(STEPS, itertools.cycle(("coordinator", "replica")), strict=False)
    ),
]
# The threads of a replica, and the steps of a coordinator, which must be three.
POINTS = (
    "feeder.begin:2",
    "feeder.read:3",
    "worker.store:3",
    "writer.store:1",  # how many more there are in one process depends on the time
    "writer.tick:2",
    "writer.close:1",
    "writer.closed:1",
    "coordinator.before_assign:4",
    "coordinator.before_drop:2",
    "storage.publish.before_link:2",
)
NUM_RANDOM_KILLS = 12
LARGE_SHARDS = {"rows_per_shard": 24}


def strike(process: "subprocess.Popen[str]", victim: str, holder: int | None = None) -> list[psutil.Process]:
    """Kill the victims, of several replicas the one that stands still; all processes that there were."""
    everyone, replicas = jobs.family(process.pid), jobs.replicas_of(process.pid)
    held = [p for p in replicas if p.pid == holder]
    chosen = {"coordinator": everyone[-1:], "replica": held or replicas[:1], "everything": everyone}
    jobs.kill(chosen[victim])
    return everyone


@pytest.mark.parametrize(("step", "victim"), STRIKES)
def test_killed_at_a_step(step: str, victim: str, tmp_path: pathlib.Path) -> None:
    spec, marker, once = jobs.spec_of(tmp_path, output=LARGE_SHARDS), tmp_path / "held", tmp_path / "once"
    once.mkdir()
    process = jobs.start("run", spec, faults=f"{STEPS[step]}=hold {marker}", BATCHINF_FAULTS_ONCE=str(once))
    jobs.wait_until(lambda: (marker.exists() and marker.read_text()) or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    everyone = strike(process, victim, int(marker.read_text()))
    marker.unlink()
    _, errors = process.communicate(timeout=120)
    assert jobs.are_gone(everyone)
    if victim == "replica":
        assert process.returncode == 0, errors
    else:
        assert process.returncode == -9
        assert not jobs.state_of(tmp_path / "out").is_done
        jobs.finish(spec)
    assert jobs.rows_of(tmp_path / "out") == list(jobs.unhurt())


@pytest.mark.slow
@pytest.mark.real_starts
def test_killed_while_compacting(tmp_path: pathlib.Path) -> None:
    # Two logs are there before the third start folds them into one.
    spec = jobs.spec_of(tmp_path, output=LARGE_SHARDS)
    for faults in ("coordinator.after_publish:2=kill", "coordinator.after_publish=kill"):
        assert jobs.run("run", spec, faults=faults).returncode == -9
    before = jobs.state_of(tmp_path / "out")
    for where in ("manifest.compact.before_rename", "manifest.compact.before_delete"):
        assert jobs.run("run", spec, faults=f"{where}=kill").returncode == -9
        after = jobs.state_of(tmp_path / "out")
        assert (after.parts, after.device_s) == (before.parts, before.device_s)
    jobs.finish(spec)
    assert jobs.rows_of(tmp_path / "out") == list(jobs.unhurt())


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_part_that_no_line_names_is_adopted_if_it_is_whole(is_whole: bool, tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, output=LARGE_SHARDS), tmp_path / "out"
    assert jobs.run("run", spec, faults="coordinator.after_publish:3=kill").returncode == -9
    named = {f"part-{shard:06d}.parquet" for shard in jobs.state_of(out).parts}
    [part] = [path for path in (out / "parts").iterdir() if path.name not in named]
    if not is_whole:
        data = bytearray(part.read_bytes())
        data[100] ^= 1
        part.write_bytes(data)
    before = part.stat()
    (out / "parts" / "notes.txt").write_text("not ours")
    jobs.finish(spec)
    after = part.stat()
    assert ((before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)) == is_whole
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert (out / "parts" / "notes.txt").exists()


def test_parts_that_are_gone_are_made_again(tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, output=LARGE_SHARDS), tmp_path / "out"
    assert jobs.run("run", spec, faults="coordinator.after_publish:4=kill").returncode == -9
    lost, cut, *_ = sorted(jobs.state_of(out).parts)
    (out / "parts" / f"part-{lost:06d}.parquet").unlink()
    with (out / "parts" / f"part-{cut:06d}.parquet").open("r+b") as file:
        file.truncate(1000)
    finished = jobs.finish(spec)
    assert f"part {lost} is gone or altered" in finished.stderr
    assert f"part {cut} is gone or altered" in finished.stderr
    assert jobs.rows_of(out) == list(jobs.unhurt())


@pytest.mark.slow
@pytest.mark.real_starts
def test_killed_at_each_point_once(tmp_path: pathlib.Path) -> None:
    spec, once = jobs.spec_of(tmp_path, output=LARGE_SHARDS, max_restarts=len(POINTS)), tmp_path / "once"
    once.mkdir()
    faults = ",".join(f"{point}=kill" for point in POINTS)
    for _ in range(3):
        done = jobs.run("run", spec, faults=faults, BATCHINF_FAULTS_ONCE=str(once))
        assert done.returncode == -9, done.stderr
    jobs.finish(spec, faults=faults, BATCHINF_FAULTS_ONCE=str(once))
    assert jobs.rows_of(tmp_path / "out") == list(jobs.unhurt())
    assert sorted(path.name for path in once.iterdir()) == sorted(point.replace(":", "-") for point in POINTS)


@pytest.mark.slow
@pytest.mark.real_starts
def test_killed_at_random_moments(tmp_path: pathlib.Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    # A start costs more than the work of a few rows: so slow that twelve lives cannot finish it.
    spec = jobs.spec_of(tmp_path, output=LARGE_SHARDS, max_restarts=NUM_RANDOM_KILLS)
    slow = ("--set", "scripted.step_s=0.2", "--set", "scripted.max_num_seqs=4")
    everyone: list[psutil.Process] = []
    process, num_kills = None, 0
    while num_kills < NUM_RANDOM_KILLS:
        if process is None:
            process = jobs.start("run", spec, *slow)
        victim = chance.choice(VICTIMS)
        moment = chance.choice(("opening", "starting", "working"))
        jobs.wait_until(lambda run=process, until=moment: has_come_to(until, run, tmp_path / "out"))
        time.sleep(chance.uniform(0.0, 0.6))
        assert process.poll() is None, f"seed {seed}: {process.communicate()}"
        if victim == "replica" and not jobs.replicas_of(process.pid):
            victim = "coordinator"
        everyone += strike(process, victim)
        num_kills += 1
        if victim != "replica":
            process.communicate(timeout=60)
            assert process.returncode == -9
            process = None
    if process is not None:
        everyone += strike(process, "everything")
        process.communicate(timeout=60)
    assert jobs.are_gone(everyone), f"seed {seed}"
    assert num_kills == NUM_RANDOM_KILLS
    jobs.finish(spec)
    assert jobs.rows_of(tmp_path / "out") == list(jobs.unhurt()), f"seed {seed}"
    assert not list((tmp_path / "out").rglob(".tmp-*"))


def has_come_to(moment: str, process: "subprocess.Popen[str]", out: pathlib.Path) -> bool:
    """Whether a life of the job is opened, starts its replicas, or works; or is over."""
    if moment == "opening" or process.poll() is not None:
        return True
    snapshot = jobs.snapshot_of(out)
    is_at_work = snapshot.get("state") == "running" and any(replica["in_flight"] for replica in snapshot["replicas"])
    is_own = snapshot.get("updated_at", 0.0) > psutil.Process(process.pid).create_time()
    return is_at_work and is_own if moment == "working" else bool(jobs.replicas_of(process.pid))

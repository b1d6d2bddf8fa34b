"""kill -9 at named steps and at random moments: the same command again gives the rows of an unhurt run.

None is lost, none comes twice, no process is left behind.
"""

import itertools
import pathlib
import random
import re
import shutil
import subprocess
import time

import psutil
import pytest

import batchinf
import jobs
from batchinf.commands.check import check_job
from batchinf.manifest.events import EVENTS_FILE
from batchinf.manifest.names import parse_staging_name

pytestmark = pytest.mark.fewer_rows

# Where one process stands still while the victims are killed.
STEPS = {
    "mid-generation": "engine.step:40",
    "while a segment is written": "journal.before_fsync",
    "before a staging file's rename": "parts.before_rename",
    "after a staging file's rename": "parts.after_rename",
    "between manifest line and rename": "coordinator.before_publish:2",
    "mid manifest line": "manifest.mid_line:4",
}
VICTIMS = ("coordinator", "replica", "everything")
# At each step all at once, and one of the two alone in turn; the random kills below meet them all. Those and the first
# slow one start new processes of Python. The others fork them, in a third of the time.
STRIKES = [
    *((step, "everything") for step in STEPS),
    *(
        pytest.param(step, victim, marks=[pytest.mark.slow, *([pytest.mark.real_starts] if place == 0 else [])])
        for place, (step, victim) in enumerate(zip(STEPS, itertools.cycle(("coordinator", "replica")), strict=False))
    ),
]
# The threads of a replica, and the steps of a coordinator, which must be three.
POINTS = (
    "feeder.begin:2",
    "feeder.read:3",
    "worker.store:3",
    "writer.store:1",  # how many more there are in one process depends on the time
    "writer.checkpoint:2",
    "writer.close:1",
    "writer.closed:1",
    "coordinator.before_assign:4",
    "coordinator.before_drop:2",
    "storage.publish.before_rename:2",
)
NUM_RANDOM_KILLS = 9
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "hurt",
    [*jobs.slowly(None, b"", b'{"at": "2026'), b"[]\n\xff\n{}\n" * 1000],
    ids=["gone", "empty", "torn", "other"],
)
def test_no_run_reads_the_events(hurt: bytes | None, tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, output=LARGE_SHARDS, parallel={"data_parallel_size": 1}), tmp_path / "out"
    # A row kills the engine once, and the coordinator is killed while the search for it is open.
    faults = "engine.prompt.137:*=die,coordinator.after_publish=kill"
    assert jobs.run("run", spec, faults=faults).returncode == -9
    before = jobs.state_of(out)
    assert jobs.events_of(out, "replica_started")
    (out / EVENTS_FILE).unlink()
    if hurt is not None:
        (out / EVENTS_FILE).write_bytes(hurt)
    after = jobs.state_of(out)
    assert (after.parts, after.kept, after.device_s) == (before.parts, before.kept, before.device_s)
    done = jobs.run("run", spec, faults="engine.prompt.137:*=die")
    rows = jobs.rows_of(out)
    assert [row["row_index"] for row, good in zip(rows, jobs.unhurt(), strict=True) if row != good] == [137]
    assert rows[137]["error_type"] == "engine_death", done.stderr
    assert len(jobs.events_of(out, "epoch")) == 1  # that of the second run, whole
    assert jobs.run("report", out).returncode == 0
    assert jobs.run("status", out).returncode == 0


def test_staged_parts_that_no_line_names_are_taken_in(tmp_path: pathlib.Path) -> None:
    """Also those that are younger than the journal's last checkpoint, however long the coordinator stood still."""
    spec, out = jobs.spec_of(tmp_path, output={"rows_per_shard": 6}, checkpoint_interval_s=600), tmp_path / "out"
    marker = tmp_path / "held"
    process = jobs.start("run", spec, faults=f"coordinator.before_assign:4=hold {marker}")

    def num_unnamed() -> int:
        named = {(part.shard, part.digest) for part in jobs.state_of(out).parts.values()}
        return len({parse_staging_name(path.name) for path in (out / "staging").glob("0*")} - named)

    jobs.wait_until(lambda: marker.exists() and num_unnamed() >= 2)
    strike(process, "everything")
    process.communicate(timeout=60)
    staged = {path.name: path.stat().st_ino for path in (out / "staging").glob("0*")}
    jobs.finish(spec)
    published = {path.stat().st_ino for path in (out / "parts").iterdir()}
    assert published >= {*staged.values()}, "each staged part is renamed, and none is made again"
    assert jobs.rows_of(out) == list(jobs.unhurt())


@pytest.mark.parametrize("is_killed", [False, *jobs.slowly(True)])
def test_a_coordinator_that_stands_still_loses_no_staged_part(is_killed: bool, tmp_path: pathlib.Path) -> None:
    """Its replicas go on, and none of their parts has a line. It goes on itself, or the next start takes them in."""
    busy = {"scripted": {"max_num_seqs": 64, "step_s": 0.01}, "output": {"rows_per_shard": 2}}
    spec, out = jobs.spec_of(tmp_path, **busy, checkpoint_interval_s=600), tmp_path / "out"
    process = jobs.start("run", spec)
    jobs.wait_until(lambda: list((out / "staging").glob("0*")))
    coordinator = jobs.family(process.pid)[-1]
    coordinator.suspend()
    jobs.wait_until(lambda: len(list((out / "staging").glob("0*"))) >= 20)
    time.sleep(1.0)
    staged = {path.stat().st_ino for path in (out / "staging").glob("0*")}
    if is_killed:
        strike(process, "everything")
        process.communicate(timeout=60)
        jobs.finish(spec)
    else:
        coordinator.resume()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert {path.stat().st_ino for path in (out / "parts").iterdir()} >= staged, "none is made again"
    assert jobs.rows_of(out) == list(jobs.unhurt())


def test_a_staged_part_that_is_altered_is_made_again(tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, output=LARGE_SHARDS), tmp_path / "out"
    assert jobs.run("run", spec, faults="coordinator.before_publish:3=kill").returncode == -9
    named = {(part.shard, part.digest) for part in jobs.state_of(out).parts.values()}
    part, *_ = [path for path in (out / "staging").glob("0*") if parse_staging_name(path.name) in named]
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    (out / "parts" / "notes.txt").write_text("not ours")
    jobs.finish(spec)
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert (out / "parts" / "notes.txt").exists()


def test_readers_find_a_part_that_is_named_and_not_yet_renamed(tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, output=LARGE_SHARDS), tmp_path / "out"
    assert jobs.run("run", spec, faults="coordinator.before_publish:2=kill").returncode == -9
    state = jobs.state_of(out)
    assert len(state.parts) == len(list((out / "parts").iterdir())) + 1
    assert batchinf.open(out).table().num_rows == state.counts.num_rows
    assert check_job(str(out), is_deep=True, repair=True).is_whole
    jobs.finish(spec)
    assert jobs.rows_of(out) == list(jobs.unhurt())


@pytest.mark.parametrize("is_retried", [False, True])
def test_a_manifest_that_is_older_than_its_parts_stops_a_run(is_retried: bool, tmp_path: pathlib.Path) -> None:
    """As that of a backup, or of a copy of the folder of a job at work. No part is lost by a repair."""
    spec, out = jobs.spec_of(tmp_path, output=LARGE_SHARDS), tmp_path / "out"
    if is_retried:
        jobs.finish(spec)
    else:
        assert jobs.run("run", spec, faults="coordinator.after_publish:1=kill").returncode == -9
    shutil.copytree(out / "manifest", tmp_path / "backup")
    jobs.finish(spec, *(("--retry", "row_index < 3") if is_retried else ()))
    before = {path.name: path.read_bytes() for path in (out / "parts").iterdir()}
    shutil.rmtree(out / "manifest")
    shutil.copytree(tmp_path / "backup", out / "manifest")
    stopped = jobs.run("run", spec)
    assert stopped.returncode == 2
    assert "part-0" in stopped.stderr and "--repair` takes such parts in" in stopped.stderr
    assert {path.name: path.read_bytes() for path in (out / "parts").iterdir()} == before
    assert not check_job(str(out), is_deep=False, repair=False).is_whole
    assert check_job(str(out), is_deep=False, repair=True).is_whole
    jobs.finish(spec)
    assert {path.name: path.read_bytes() for path in (out / "parts").iterdir()} == before


def test_a_manifest_that_is_older_than_an_extension_costs_no_part(tmp_path: pathlib.Path) -> None:
    """As that of a backup, or one whose end is torn off. A run, a check and a repair say the way, and it goes on."""
    rows = tmp_path / "rows.jsonl"
    lines = jobs.PROMPTS.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join(lines[:40]))
    spec, out = jobs.spec_of(tmp_path, input={"path": str(rows)}), tmp_path / "out"
    # Not finished, as the manifest of a finished job says that the input has grown.
    assert jobs.run("run", spec, faults="coordinator.after_publish:1=kill").returncode == -9
    shutil.copytree(out / "manifest", tmp_path / "backup")
    jobs.finish(spec)
    rows.write_bytes(b"".join(lines[:60]))
    jobs.finish(spec, "--extend")
    before = {path.name: path.read_bytes() for path in (out / "parts").iterdir()}
    shutil.rmtree(out / "manifest")
    shutil.copytree(tmp_path / "backup", out / "manifest")
    [job] = check_job(str(out), is_deep=False, repair=True).jobs
    assert {finding.problem for finding in job.findings} == {"part_taken_in", "extension_unnamed"}
    stopped = jobs.run("run", spec, "--extend")
    assert stopped.returncode == 2 and "--repair` takes such parts in" in stopped.stderr
    assert check_job(str(out), is_deep=False, repair=True).is_whole
    jobs.finish(spec)
    assert {path.name: path.read_bytes() for path in (out / "parts").iterdir()} == before


def test_a_flipped_bit_anywhere_in_a_manifest_costs_no_part(tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, output={"rows_per_shard": 6}), tmp_path / "out"
    jobs.finish(spec)
    before = {path.name: path.read_bytes() for path in (out / "parts").iterdir()}
    [log] = (out / "manifest").iterdir()
    data = log.read_bytes()
    lines = data.splitlines(keepends=True)
    parts = [number for number, line in enumerate(lines) if b'"kind":"part"' in line]
    for number in (parts[0], parts[len(parts) // 2], parts[-1], len(lines) - 1):
        place = sum(map(len, lines[:number])) + 20
        shutil.rmtree(out / "manifest")
        (out / "manifest").mkdir()
        log.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        check_job(str(out), is_deep=False, repair=True)
        assert len(jobs.state_of(out).parts) == len(before)
        jobs.finish(spec)
        assert {path.name: path.read_bytes() for path in (out / "parts").iterdir()} == before


def test_parts_that_are_gone_are_made_again(tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, output=LARGE_SHARDS), tmp_path / "out"
    assert jobs.run("run", spec, faults="coordinator.after_publish:4=kill").returncode == -9
    lost, cut, *_ = sorted(jobs.state_of(out).parts)
    (out / "parts" / f"part-{lost:06d}.parquet").unlink()
    with (out / "parts" / f"part-{cut:06d}.parquet").open("r+b") as file:
        file.truncate(1000)
    finished = jobs.finish(spec)
    assert re.search(rf"part {lost} is gone or altered: \d+ input rows run again", finished.stderr)
    assert f"part {cut} is gone or altered" in finished.stderr
    assert [path.name for path in (out / "damaged").iterdir()] == [f"part-{cut:06d}.parquet"]
    assert jobs.rows_of(out) == list(jobs.unhurt())


@pytest.mark.slow
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
    # A start costs more than the work of a few rows: so slow that nine lives cannot finish it.
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

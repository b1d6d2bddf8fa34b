"""kill -9 at named steps and at random moments: the same command again gives the rows of an unhurt run."""

import pathlib
import random
import subprocess
import time

import jobs
import pytest

STEPS = {
    "mid-generation": "engine.step:40",
    "while a segment is written": "journal.before_fsync",
    "before a staging file's rename": "parts.before_rename",
    "after a staging file's rename": "parts.after_rename",
    "between publish and manifest line": "coordinator.after_publish",
    "mid manifest line": "manifest.mid_line:3",
}
VICTIMS = ("coordinator", "replica", "everything")


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("unhurt")
    jobs.finish(jobs.spec_of(folder))
    rows = jobs.rows_of(folder / "out")
    assert [row["row_index"] for row in rows] == list(range(len(rows))) and len(rows) >= 500
    return rows


def strike(process: "subprocess.Popen[str]", victim: str, holder: int | None = None) -> list:
    everyone = jobs.family(process.pid)
    replicas = jobs.replicas_of(process.pid)
    held = [p for p in replicas if p.pid == holder]
    chosen = {
        "coordinator": everyone[-1:],
        "replica": held or replicas[:1],
        "everything": everyone,
    }[victim]
    jobs.kill(chosen)
    return everyone


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step(step: str, victim: str, tmp_path: pathlib.Path, unhurt: list[dict]) -> None:
    spec, marker = jobs.spec_of(tmp_path), tmp_path / "held"
    once = tmp_path / "once"
    once.mkdir()
    process = jobs.start("run", spec, faults=f"{STEPS[step]}=hold {marker}", BATCHINF_FAULTS_ONCE=str(once))
    jobs.wait_until(lambda: marker.exists() and marker.read_text())
    everyone = strike(process, victim, int(marker.read_text()))
    marker.unlink()
    _, errors = process.communicate(timeout=120)
    assert jobs.are_gone(everyone)
    if victim == "replica":
        assert process.returncode == 0, errors
    else:
        assert process.returncode == -9
        jobs.finish(spec)
    assert jobs.rows_of(tmp_path / "out") == unhurt


@pytest.mark.parametrize("where", ["manifest.compact.before_rename", "manifest.compact.before_delete"])
def test_killed_while_compacting(where: str, tmp_path: pathlib.Path, unhurt: list[dict]) -> None:
    spec = jobs.spec_of(tmp_path)
    for _ in range(2):
        process = jobs.start("run", spec, faults="coordinator.after_publish=kill")
        process.communicate(timeout=120)
    process = jobs.start("run", spec, faults=f"{where}=kill")
    process.communicate(timeout=120)
    assert process.returncode == -9
    jobs.finish(spec)
    assert jobs.rows_of(tmp_path / "out") == unhurt


def test_killed_at_random_moments(tmp_path: pathlib.Path, unhurt: list[dict]) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    spec = jobs.spec_of(tmp_path, scripted={"max_num_seqs": 4, "step_s": 0.004})
    num_kills = 0
    while num_kills < 20:
        process = jobs.start("run", spec)
        jobs.wait_until(lambda pid=process.pid: jobs.replicas_of(pid) or process.poll() is not None)
        while process.poll() is None and num_kills < 20:
            time.sleep(chance.uniform(0.3, 2.5))
            victim = chance.choice(VICTIMS)
            everyone = strike(process, victim)
            num_kills += 1
            if victim != "replica":
                break
        process.communicate(timeout=120)
        assert jobs.are_gone(everyone)
        if process.returncode == 0:
            break
    jobs.finish(spec)
    assert jobs.rows_of(tmp_path / "out") == unhurt, f"seed {seed}"

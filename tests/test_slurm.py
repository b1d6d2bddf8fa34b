"""The batch scripts of `docs/slurm.md`, run by bash with stand-ins for Slurm's commands; and its reading example."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

import jobs

PAGE = (jobs.ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")

# Says what it was called with; srun takes its own options away and runs the rest, as Slurm's does.
STAND_INS = {
    "srun": 'while [[ "$1" == -* ]]; do shift; done\nexec "$@"\n',
    "scontrol": 'echo "scontrol $*" >>"$CALLS"\n',
}
BATCHINF = 'echo "batchinf $*" >>"$CALLS"\nexit "$CODE"\n'
# In place of a run that is being stopped: it ends with 75 after the signal that its shell gets too.
SIGNALLED = """
trap 'echo "batchinf was told" >>"$CALLS"; exit 75' TERM USR1
echo "batchinf $*" >>"$CALLS"
while :; do sleep 0.05; done
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


ONE_NODE, ARRAY = blocks("bash")
WAYS = [
    (ONE_NODE, "batchinf run job.yaml", "scontrol requeue 71"),
    (ARRAY, "batchinf run job.yaml --slice 5/8", "scontrol requeue 70_5"),
]


def place(folder: pathlib.Path, script: str, batchinf: str) -> dict[str, str]:
    """Put script and stand-ins into a folder; the environment to run it with."""
    (folder / "bin").mkdir()
    for name, text in {**STAND_INS, "batchinf": batchinf}.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
    (folder / "script").write_text(script)
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "SLURM_JOB_ID": "71",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_ARRAY_JOB_ID": "70",
        "SLURM_ARRAY_TASK_ID": "5",
    }


@pytest.mark.parametrize("script", [ONE_NODE, ARRAY], ids=["one node", "array"])
def test_a_script_is_bash_and_asks_for_what_it_needs(script: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    options = re.findall(r"^#SBATCH (--[a-z-]+)", script, re.MULTILINE)
    assert {"--requeue", "--signal", "--time", "--open-mode"} <= set(options)
    # Slurm reads options up to the first line that is none.
    assert script[: script.rindex("#SBATCH")].count("\n") == len(options)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75, 137, 143])
@pytest.mark.parametrize(("script", "ran", "requeued"), WAYS, ids=["one node", "array"])
def test_only_75_goes_back_into_the_queue(
    script: str, ran: str, requeued: str, code: int, tmp_path: pathlib.Path
) -> None:
    environment = {**place(tmp_path, script, BATCHINF), "CODE": str(code)}
    done = subprocess.run(["bash", "script"], cwd=tmp_path, env=environment, check=False, timeout=60)
    assert done.returncode == code
    assert (tmp_path / "calls").read_text().splitlines() == ([ran, requeued] if code == 75 else [ran])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(("script", "ran", "requeued"), WAYS, ids=["one node", "array"])
def test_the_shell_outlives_a_signal_to_all(
    script: str, ran: str, requeued: str, number: signal.Signals, tmp_path: pathlib.Path
) -> None:
    environment = place(tmp_path, script, SIGNALLED)
    process = subprocess.Popen(["bash", "script"], cwd=tmp_path, env=environment, start_new_session=True)
    calls = tmp_path / "calls"
    jobs.wait_until(lambda: calls.exists() and ran in calls.read_text())
    os.killpg(process.pid, number)
    assert process.wait(60) == 75
    assert calls.read_text().splitlines() == [ran, "batchinf was told", requeued]


def test_readers_read_all_slices(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out/my-job"
    spec = jobs.spec_of(
        tmp_path, output={"path": str(out)}, parallel={"data_parallel_size": 1}, scripted={"step_s": 0.0}
    )
    for index in (1, 0):
        jobs.finish(spec, "--slice", f"{index}/2")
    [example] = blocks("python")
    lines = example.strip().split("\n")
    checks = ["print(rows['row_index'] == sorted(rows['row_index']), len(rows))", f"print({lines[-1]}.fetchall())"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", "\n".join([*lines[:-1], *checks])]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    num_rows = len(jobs.rows_of(out / "slice-0")) + len(jobs.rows_of(out / "slice-1"))
    assert done.stdout.splitlines()[0] == f"True {num_rows}"
    assert num_rows == len(jobs.unhurt())

"""`batchinf slurm`: its scripts, run by bash with stand-ins for Slurm's commands; its refusals.

`slurm/test_on_slurm.py` runs the scripts on a real Slurm.
"""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest

import jobs
from batchinf.base.errors import UserError
from batchinf.base.slices import claim_whole
from batchinf.cli import app
from batchinf.commands.slurm import SlurmOptions, script_of
from batchinf.spec.file import SpecFile, read_spec

FILES = sorted((jobs.ROOT / "jobs" / "slurm").glob("*.sbatch"))
ONE_NODE, ARRAY, BUCKET = (
    (jobs.ROOT / "jobs" / "slurm" / f"{name}.sbatch").read_text() for name in ("one_node", "array", "bucket")
)
WAYS = [
    (
        ONE_NODE,
        "batchinf run jobs/quickstart.yaml",
        ["batchinf status out/quickstart --json", "scontrol requeue 71"],
    ),
    (
        ARRAY,
        "batchinf run jobs/quickstart.yaml --slice 2/3",
        # Not SLURM_JOB_ID: in one of the tasks it is the id of the whole array.
        ["batchinf status out/quickstart/slice-2 --json", "scontrol requeue 70_2"],
    ),
    (
        BUCKET,
        "batchinf run jobs/quickstart.yaml --set output.path=s3://my-bucket/answers --slice 2/8",
        ["batchinf status s3://my-bucket/answers/slice-2 --json", "scontrol requeue 70_2"],
    ),
]

# Says what it was called with; srun takes its own options away and runs the rest, as Slurm's does.
STAND_INS = {
    "srun": 'while [[ "$1" == -* ]]; do shift; done\nexec "$@"\n',
    "scontrol": 'echo "scontrol $*" >>"$CALLS"\n',
    "sbatch": 'echo "sbatch $*" >>"$CALLS"\n'
    'if [ "$1" = "$REFUSED" ]; then echo "sbatch: error: no such partition" >&2; exit 1; fi\necho "12;far"\n',
}
# As `batchinf status --json`; the number of finished rows is in a file.
STATUS = """
if [ "$1" = status ]; then
    echo "batchinf $*" >>"$CALLS"
    printf '{\n  "num_rows_committed": %s\n}\n' "$(cat "$CALLS-finished" 2>/dev/null || echo 0)"
    exit
fi
"""
BATCHINF = STATUS + 'echo "batchinf $*" >>"$CALLS"\nexit "$CODE"\n'
# In place of a run that is being stopped: it ends with 75 after the signal that its shell gets too.
SIGNALLED = (
    STATUS
    + """
trap 'echo "batchinf was told" >>"$CALLS"; exit 75' TERM USR1
echo "batchinf $*" >>"$CALLS"
while :; do sleep 0.05; done
"""
)


def place(folder: pathlib.Path, script: str, batchinf: str) -> dict[str, str]:
    """Put script and stand-ins into a folder; the environment to run it with."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, text in {**STAND_INS, "batchinf": batchinf}.items():
        path = folder / ".venv" / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
    (folder / "script").write_text(script)
    for logs in re.findall("^#SBATCH --output=(.*)/", script, re.MULTILINE):
        (folder / logs).mkdir(parents=True)
    return {
        **os.environ,
        "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "SLURM_JOB_ID": "71",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_ARRAY_JOB_ID": "70",
        "SLURM_ARRAY_TASK_ID": "2",
    }


def command(line: str, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
    """Run a command of batchinf in a folder that has `jobs` and `sample_data`."""
    for name in ("jobs", "sample_data"):
        if not (folder / name).exists():
            (folder / name).mkdir()
            for path in (jobs.ROOT / name).iterdir():
                if path.name != "slurm":
                    (folder / name / path.name).symlink_to(path)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    app(sys.argv[1:], standalone_mode=False)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_each_file_is_what_its_command_writes(
    file: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = file.read_text()
    command(written.split("\n")[1].removeprefix("# "), monkeypatch, tmp_path)
    logs = "answers.slurm" if file.stem == "bucket" else "out/quickstart.slurm"
    assert (tmp_path / logs / "job.sbatch").read_text() == written
    assert str(file.relative_to(jobs.ROOT)) in (jobs.ROOT / "docs" / "slurm.md").read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_script_is_bash_and_asks_for_what_it_needs(file: pathlib.Path) -> None:
    script = file.read_text()
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    options = re.findall(r"^#SBATCH (--[a-z-]+)", script, re.MULTILINE)
    assert {"--requeue", "--signal", "--time", "--open-mode", "--gres"} <= set(options)
    # Slurm reads options up to the first line that is none.
    assert script[: script.rindex("#SBATCH")].count("\n") == len(options) + 1


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75, 137, 143])
@pytest.mark.parametrize(("script", "ran", "requeued"), WAYS, ids=["one node", "array", "bucket"])
def test_only_75_goes_back_into_the_queue(
    script: str, ran: str, requeued: list[str], code: int, tmp_path: pathlib.Path
) -> None:
    environment = {**place(tmp_path, script, BATCHINF), "CODE": str(code)}
    done = subprocess.run(["bash", "script"], cwd=tmp_path, env=environment, check=False, timeout=60)
    assert done.returncode == code
    assert (tmp_path / "calls").read_text().splitlines() == [ran, *(requeued if code == 75 else [])]


def test_requeues_without_a_finished_row_are_capped(tmp_path: pathlib.Path) -> None:
    script = script_of(spec_in(tmp_path, output={"path": "out"}), SlurmOptions(array="12", max_requeues=2))
    environment = place(tmp_path, script, BATCHINF)

    def runs(num_finished: int) -> str:
        (tmp_path / "calls-finished").write_text(str(num_finished))
        done = subprocess.run(
            ["bash", "script"], cwd=tmp_path, env={**environment, "CODE": "75"}, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (75, "")
        return done.stdout

    def num_requeues() -> int:
        return (tmp_path / "calls").read_text().count("scontrol requeue 70_2\n")

    assert [runs(0), runs(0)] == [
        f"queued again: requeue {number} of at most 2 without a new finished row\n" for number in (1, 2)
    ]
    assert num_requeues() == 2
    assert "not queued again: 2 requeue(s) in a row brought no new finished row (--max-requeues 2); " in runs(0)
    assert num_requeues() == 2
    # Submitted anew, or queued again by hand. A new row starts the count again.
    assert [runs(rows)[:23] for rows in (0, 0, 7, 7)] == [f"queued again: requeue {n}" for n in (1, 2, 1, 2)]
    assert "not queued again" in runs(7)
    assert num_requeues() == 6
    assert "batchinf status out/slice-02 --json\n" in (tmp_path / "calls").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(("script", "ran", "requeued"), WAYS, ids=["one node", "array", "bucket"])
def test_the_shell_outlives_a_signal_to_all(
    script: str, ran: str, requeued: list[str], number: signal.Signals, tmp_path: pathlib.Path
) -> None:
    """SIGTERM is from `scancel`: `scontrol requeue` would revive the job."""
    environment = place(tmp_path, script, SIGNALLED)
    process = subprocess.Popen(["bash", "script"], cwd=tmp_path, env=environment, start_new_session=True)
    calls = tmp_path / "calls"
    jobs.wait_until(lambda: calls.exists() and ran in calls.read_text())
    os.killpg(process.pid, number)
    assert process.wait(60) == 75
    again = requeued if number == signal.SIGUSR1 else []
    assert calls.read_text().splitlines() == [ran, "batchinf was told", *again]


def spec_in(folder: pathlib.Path, **fields: object) -> SpecFile:
    return read_spec(jobs.spec_of(folder, **fields))


def test_options_become_directives(tmp_path: pathlib.Path) -> None:
    file = spec_in(tmp_path, output={"path": "out/50% of it/"}, stop_before_s=90.5)
    script = script_of(
        file,
        SlurmOptions(
            gpus="a100:4", time="1-12", sbatch=("mem=200G", "constraint=a100&ib", "exclusive", "comment=it's ours"),
            overrides=("sampling.max_tokens=5",),
        ),
    )  # fmt: skip
    directives = re.findall("^#SBATCH (.*)$", script, re.MULTILINE)
    assert directives == [
        "--job-name='50% of it'", "--output='out/50%% of it.slurm/%j.log'", "--open-mode=append", "--requeue",
        "--signal=USR1@91", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=32", "--gres=gpu:a100:4",
        "--time=1-12", "--mem=200G", "--constraint='a100&ib'", "--exclusive", """--comment='it'"'"'s ours'""",
    ]  # fmt: skip
    run = f'"${{within[@]}}" batchinf run {file.path} --set sampling.max_tokens=5\n'
    assert f'\nsrun --cpus-per-task="$SLURM_CPUS_PER_TASK" {run}' in script
    assert "--gres" not in script_of(file, SlurmOptions())


def test_an_option_of_sbatch_replaces_that_of_the_script(tmp_path: pathlib.Path) -> None:
    script = script_of(spec_in(tmp_path), SlurmOptions(gpus="2", sbatch=("cpus-per-task=48", "job-name=mine")))
    directives = re.findall("^#SBATCH (.*)$", script, re.MULTILINE)
    assert {"--cpus-per-task=48", "--job-name=mine"} <= set(directives)
    assert len({directive.partition("=")[0] for directive in directives}) == len(directives)


def test_options_of_pyxis_are_those_of_srun(tmp_path: pathlib.Path) -> None:
    """As directives they would run the whole script in the container, in which there is no srun and no scontrol."""
    wishes = ("container-image=./it's.sqsh", "container-mounts=/shared", "no-container-mount-home", "mem=9G")
    script = script_of(spec_in(tmp_path, output={"path": "out"}), SlurmOptions(sbatch=wishes))
    assert "--mem=9G" in script and not re.search(r"^#SBATCH .*container", script, re.MULTILINE)
    container = ["--container-image=./it's.sqsh", "--container-mounts=/shared", "--no-container-mount-home"]
    environment = {**place(tmp_path, script, BATCHINF), "CODE": "75"}
    srun = tmp_path / ".venv" / "bin" / "srun"
    srun.write_text(srun.read_text().replace("while", 'printf "%s\n" "$@" >>"$CALLS-srun"\nwhile', 1))
    done = subprocess.run(["bash", "script"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (75, "")
    words = (tmp_path / "calls-srun").read_text().splitlines()
    assert words[:7] == ["--cpus-per-task=4", *container, "batchinf", "run", str(tmp_path / "job.yaml")]
    assert words[7:] == ["--overlap", "--ntasks=1", *container, "batchinf", "status", "out", "--json"]
    assert "scontrol requeue 71" in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    ("wishes", "fields", "message"),
    [
        ({"gpus": "a100"}, {}, "--gpus: got 'a100'; must be a number or type:number"),
        ({"gpus": "0"}, {}, "--gpus: got '0'; must be a number or type:number"),
        ({"num_nodes": 2, "array": "2"}, {}, "got --array with --nodes"),
        ({"array": "1000000"}, {}, "--array: got 1000000; must be at most 999999"),
        ({"array": "8"}, {"output": {"push_to_hub": "a/b"}}, "got it with --array, whose slices push nothing"),
        ({"array": "8%0"}, {}, "--array: got '8%0'; must be a number of slices, such as 8, or 8%2 to run at most 2"),
        ({"array": "0-7"}, {}, "--array: got '0-7'; must be a number of slices"),
        ({"sbatch": ("array=0-7",)}, {}, "--sbatch: got 'array=0-7'; each task would run the whole job"),
        ({"sbatch": ("signal=USR1@60",)}, {}, "got 'signal=USR1@60'; the script stops the job by this signal"),
        ({"sbatch": ("sig=USR1@60",), "array": "2"}, {}, "--sbatch: got 'sig=USR1@60'; the script stops"),
        ({"sbatch": ("nodes=2",)}, {}, "--sbatch: got 'nodes=2'; write --nodes without --sbatch"),
        ({"sbatch": ("container-image=a",), "num_nodes": 2}, {}, "--sbatch: got container-image=a with --nodes; Pyxis"),
        ({"sbatch": ("--qos=high",)}, {}, "--sbatch: got '--qos=high'; must be an option of sbatch by its long name"),
        ({"sbatch": ("-N2",)}, {}, "--sbatch: got '-N2'; must be an option of sbatch by its long name"),
        ({"sbatch": ("qos=high --exclusive\n",)}, {}, "--sbatch: got 'qos=high --exclusive\\\\n'; must be an option"),
        ({"command": "batchinf slurm 'a\nb'"}, {}, "an sbatch script cannot hold its control characters"),
        ({}, {"output": {"path": "out\\job"}}, "output.path: got out\\job; Slurm's logs allow no backslash"),
        ({}, {"stop_before_s": 0}, "stop_before_s: got 0; under Slurm it must be at least 1"),
        ({}, {"drain_timeout_s": 200}, "drain_timeout_s: got 200, but Slurm kills the job stop_before_s = 120 s"),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_met_are_refused(
    wishes: dict[str, object], fields: dict[str, object], message: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        script_of(spec_in(tmp_path, **fields), SlurmOptions(**wishes))  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_an_array_may_run_some_slices_at_a_time(tmp_path: pathlib.Path) -> None:
    script = script_of(spec_in(tmp_path), SlurmOptions(array="8%2", sbatch=("array=3,5",)))
    assert re.findall("--array=.*", script) == ["--array=3,5"]  # some slices of the eight
    assert '--slice "$SLURM_ARRAY_TASK_ID/8"\n' in script


def test_a_spec_that_ray_cannot_run_gets_no_script(tmp_path: pathlib.Path) -> None:
    refused = jobs.run("slurm", jobs.spec_of(tmp_path, parallel={"devices": [0, 1]}), "--nodes", "2")
    assert refused.returncode == 2
    assert "parallel.devices: got a list with backend: ray; Ray chooses the devices" in refused.stderr


def test_commands_in_messages_can_be_pasted(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command("batchinf slurm jobs/quickstart.yaml --set output.path='out/my job'", monkeypatch, tmp_path)
    assert "submit it with `sbatch 'out/my job.slurm/job.sbatch'`" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"run `sbatch 'out/my job\.slurm/job\.sbatch'` on"):
        command("batchinf slurm jobs/quickstart.yaml --set output.path='out/my job' --submit", monkeypatch, tmp_path)


def test_a_script_replaces_only_its_own_kind(tmp_path: pathlib.Path) -> None:
    spec, script = jobs.spec_of(tmp_path), tmp_path / "out.slurm" / "job.sbatch"
    for gpus in ("1", "2"):
        assert jobs.run("slurm", spec, "--gpus", gpus).returncode == 0
        assert f"--gres=gpu:{gpus}" in script.read_text()
    script.write_text("#!/bin/bash\n# mine: batchinf slurm writes another one\n")
    before = script.read_text()
    done = jobs.run("slurm", spec)
    assert (done.returncode, script.read_text()) == (2, before)
    assert done.stderr == f"error: cannot write {script}: a file is there that this command has not written\n"


# Ray writes the head's address into its folder, and goes on as long as the job does. The client port is asked for with
# real Python; the program that waits for the nodes needs a Ray.
RAY_STAND_INS = {
    "scontrol": """
case "$*" in
    "show hostnames"*) printf 'n1\\nn2\\n' ;;
    *"show node n2") echo "NodeName=n2 NodeAddr=127.0.0.1 Port=1" ;;
esac
""",
    "scancel": "",
    "apptainer": """
[ "$1 $2" = "exec --nv" ] || exit 9
echo "container $3" >>"$CALLS"
shift 3
exec "$@"
""",
    "ray": """
echo "ray $*" >>"$CALLS"
[ "$2" != --head ] || { mkdir -p "$ray_folder" && echo 10.0.0.1:7 >"$ray_folder/ray_current_cluster"; }
until grep -q ^batchinf "$CALLS"; do sleep 0.05; done
""",
    "python3": f"""
if [ "$2" = 127.0.0.1 ]; then exec {shlex.quote(sys.executable)} "$@"; fi
cat >/dev/null
""",
}


def test_names_with_quotes_and_dollars_are_not_run(tmp_path: pathlib.Path) -> None:
    name = """it's "my" $(touch SPOILT) `touch SPOILT`"""
    file = spec_in(tmp_path, output={"path": f"out/{name}"})
    renamed = tmp_path / f"{name}.yaml"
    pathlib.Path(file.path).rename(renamed)
    settings = (f"output.path=out/{name}",)
    image, file = f"{name}.sif", read_spec(renamed, settings)
    script = script_of(file, SlurmOptions(num_nodes=2, gpus="1", overrides=settings))
    filled_in = f"\nwithin=(apptainer exec --nv {shlex.quote(image)})\n"
    assert script.count("\nwithin=()\n") == 1
    place(tmp_path, script.replace("\nwithin=()\n", filled_in), BATCHINF)
    for stand_in, text in RAY_STAND_INS.items():
        path = tmp_path / ".venv" / "bin" / stand_in
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}/.venv/bin:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "CODE": "3",
        "SLURM_JOB_ID": f"test-{os.getpid()}",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_CPUS_ON_NODE": "4",
    }
    done = subprocess.run(
        ["bash", "script"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (3, "")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert {line for line in calls if line.startswith("container")} == {f"container {image}"}
    assert [line for line in calls if line.startswith("ray start --head --port=0 --node-ip-address=127.0.0.1 ")]
    assert [line for line in calls if line.startswith("ray start --address=10.0.0.1:7 --block --num-cpus=4 ")]
    assert [line for line in calls if line.startswith("batchinf")] == [
        f"batchinf run {renamed} --set {settings[0]} --set backend=ray --set ray.address=10.0.0.1:7"
    ]
    assert not list(tmp_path.rglob("SPOILT"))


@pytest.mark.parametrize("refused", ["", "--parsable"])
def test_a_script_is_submitted_if_slurm_accepts_it(
    refused: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**place(tmp_path, "", ""), "REFUSED": refused}.items():
        monkeypatch.setenv(name, value)
    line, script = "batchinf slurm jobs/quickstart.yaml --array 2 --submit", "out/quickstart.slurm/job.sbatch"
    if refused:
        with pytest.raises(UserError, match=f"^sbatch refuses {script}: no such partition$"):
            command(line, monkeypatch, tmp_path)
    else:
        command(line, monkeypatch, tmp_path)
        assert "submitted job 12; its log: out/quickstart.slurm/12_%a.log" in capsys.readouterr().out
    assert (tmp_path / "calls").read_text().splitlines() == [f"sbatch --parsable {script}"]


def test_without_slurm_nothing_is_submitted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no sbatch here; run `sbatch out/quickstart\.slurm/job\.sbatch` on"):
        command("batchinf slurm jobs/quickstart.yaml --submit", monkeypatch, tmp_path)


def test_slices_are_not_submitted_over_a_whole_job(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in place(tmp_path, "", "").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "out/quickstart").mkdir(parents=True)
    claim_whole(str(tmp_path / "out/quickstart"))
    command("batchinf slurm jobs/quickstart.yaml --array 2", monkeypatch, tmp_path)
    said = capsys.readouterr().out
    words = "--array 2 runs slices. --slice 0/2: out/quickstart holds a job that is not cut into slices: "
    assert f"\nwarning: {words}" in said
    with pytest.raises(UserError, match=re.escape(words)):
        command("batchinf slurm jobs/quickstart.yaml --array 2 --submit", monkeypatch, tmp_path)
    assert not (tmp_path / "calls").exists()
    command("batchinf slurm jobs/quickstart.yaml", monkeypatch, tmp_path)
    assert "warning" not in capsys.readouterr().out

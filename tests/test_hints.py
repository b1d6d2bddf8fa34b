"""Options and commands that people try are told what to write instead."""

import re

import pytest
from typer.testing import CliRunner

from batchinf import cli
from batchinf.cli.hints import command_hint, option_hint
from batchinf.spec.file import read_spec

SPEC = {"model": "a/b", "input": {"path": "x"}, "output": {"path": "y"}}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "job.yaml", "--limit", "5"], "--set input.limit=N"),
        (["validate", "job.yaml", "--limit=5"], "--set input.limit=N"),
        (["run", "job.yaml", "-o", "out"], "--set output.path=FOLDER"),
        (["run", "job.yaml", "--resume"], "`batchinf run JOB.yaml` resumes the job"),
        (["head", "out", "--limit", "5"], "`-n N` shows N rows"),
        (["slurm", "job.yaml", "--mem", "200G"], "`--sbatch mem=VALUE` sets it"),
        (["slurm", "job.yaml", "--venv", ".venv"], "the environment of the shell that submits it"),
        (["resume", "out"], "`batchinf run JOB.yaml` resumes the job"),
    ],
)
def test_a_wrong_option_or_command_is_told_the_right_one(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(cli.app, arguments, env={"TERMINAL_WIDTH": "300", "COLUMNS": "300"})
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.parametrize("arguments", [["status", "out", "--limit", "5"], ["run", "job.yaml", "--zzz"], ["zzz"]])
def test_without_a_hint_the_error_is_typers(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli.app, arguments, env={"TERMINAL_WIDTH": "300"})
    assert done.exit_code == 2
    assert re.search(r"No such (option: --\w+|command 'zzz'\.)", done.output)
    assert "`" not in done.output


@pytest.mark.parametrize(
    "option", ["--limit", "--sample", "--gpus", "--tensor-parallel-size", "-o", "--input", "--model"]
)
def test_the_fields_of_hints_are_in_the_spec(option: str) -> None:
    [(field, value)] = re.findall(r"--set ([a-z_.]+)=([\w.]+)", option_hint("run", option, takes_fields=True))
    read_spec(SPEC, [f"{field}={'2' if value == 'N' else value}"])


def test_the_commands_of_hints_are_there() -> None:
    words = " ".join(map(command_hint, ("resume", "start", "retry", "show", "convert", "new", "progress")))
    named = set(re.findall(r"batchinf (\w+)", words))
    assert named == {"run", "head", "export", "init", "status"}
    assert named <= {command.name for command in cli.app.registered_commands}

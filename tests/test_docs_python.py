"""The snippets of docs/python.md and the commands of docs/commands.md, run as they stand."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import jobs


def blocks(document: str, language: str = "") -> list[str]:
    text = (jobs.ROOT / "docs" / document).read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A working folder with the sample data and the sample jobs, all of which run the scripted engine."""
    (tmp_path / "sample_data").symlink_to(jobs.ROOT / "sample_data")
    shutil.copytree(jobs.ROOT / "jobs", tmp_path / "jobs")
    for path in (tmp_path / "jobs").glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        if "\nscripted:" not in text:
            path.write_text(text + "\nscripted: {}\n", encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_the_snippets_run_one_after_the_other(folder: pathlib.Path) -> None:
    script = "\n".join(blocks("python.md", "python")).replace(
        '"output": {"path": "out/python"},', '"output": {"path": "out/python"}, "scripted": {},'
    )
    script += """
assert len(frame) == len(results) == 40 and typed.task == "generate"
assert report.rows[0].id == "en-0041" and len(words[0]) == len(logprobs[0])
assert all(batchinf.open(f"out/{name}").is_done for name in ("short", "watched", "thread"))
"""
    environment = {**os.environ, "PYTHONPATH": str(jobs.ROOT)}  # the quick start has no pandas
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "done: 40 output rows, 0 of them errors" in done.stdout
    assert "sampling.max_tokens: the job has 16, now it is 99" in done.stdout
    assert "done 40 of 40" in done.stdout


@pytest.mark.slow
def test_the_commands_run_one_after_the_other(folder: pathlib.Path) -> None:
    environment = {**os.environ, **jobs.quick_start()}
    (folder / "out").mkdir()
    for line in ["batchinf run jobs/quickstart.yaml", *"".join(blocks("commands.md")).splitlines()]:
        # vLLM would compile the structure of labels, which takes 10 s of processor time.
        more = ["--set", "sampling.structured_outputs=null"] if "labels.yaml" in line and "validate" in line else []
        command = [sys.executable, "-m", *shlex.split(line), *more]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        assert done.stdout
    assert (folder / "out" / "row.html").is_file()

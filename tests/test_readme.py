"""What the README says can be typed: its reading examples and its quickstart spec."""

import os
import pathlib
import re
import subprocess
import sys

import yaml

import jobs

README = (jobs.ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    """One of the README's fenced blocks in a language."""
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return found[number]


def test_the_spec_shown_is_the_quickstart() -> None:
    shown = block("yaml")
    assert yaml.safe_load(shown) == yaml.safe_load((jobs.ROOT / "jobs/quickstart.yaml").read_text(encoding="utf-8"))


def test_every_reader_reads_the_parts(tmp_path: pathlib.Path) -> None:
    jobs.finish(jobs.spec_of(tmp_path, output={"path": str(tmp_path / "out/quickstart")}))
    count = jobs.table_of(tmp_path / "out/quickstart").num_rows
    # Each example as it stands, then how many rows it has found.
    lines = block("python").strip().split("\n")
    counts = []
    for line in lines[2:]:
        counts.append(line)
        if line.startswith("rows"):
            counts.append("print(len(rows))")
        elif line.startswith("frame"):
            counts.append("print(len(frame))")
        else:
            counts[-1] = f"print(sum(row[1] for row in {line}.fetchall()))"
    script = "\n".join([*lines[:2], *counts])
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    assert printed(script, tmp_path, environment) == [count] * 4
    environment |= {"PYTHONPATH": str(jobs.ROOT)}
    arrays = block("python", 1) + "print(len(results), len(logprobs), len(surprise), len(dataset))"
    assert printed(arrays, tmp_path, environment) == [count] * 4


def printed(script: str, folder: pathlib.Path, environment: dict[str, str]) -> list[int]:
    """The numbers that a script prints."""
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]

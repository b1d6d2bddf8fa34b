"""What the README says can be typed: its reading examples and its quickstart spec."""

import os
import pathlib
import re
import subprocess
import sys

import yaml

import jobs

README = (jobs.ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The README's first fenced block in a language."""
    found = re.search(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


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
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == [count] * 4

"""The examples of `docs/examples/`, run as their first lines say, over small jobs."""

import os
import pathlib
import re
import subprocess
import sys

import jobs

EXAMPLES = jobs.ROOT / "docs" / "examples"


def run(name: str, *arguments: str | pathlib.Path) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=jobs.ROOT,
        check=False,
        timeout=120,
        env={**os.environ, **jobs.quick_start()},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_entropy_over_positions(tmp_path: pathlib.Path) -> None:
    jobs.finish(jobs.spec_of(tmp_path, sampling={"logprobs": 20}, input={"limit": 40}, scripted={"step_s": 0.0}))
    said = run("topk_entropy.py", tmp_path / "out")
    lines = [line.split() for line in said.splitlines()[2:]]
    num_tokens = sum(len(row["token_ids"]) for row in jobs.rows_of(tmp_path / "out"))
    assert sum(int(line[1].replace(",", "")) for line in lines) == num_tokens
    for _, _, _, lower, _, upper in lines:
        assert 0 <= float(lower) <= float(upper) <= 17 * 0.6932


def test_each_example_says_how_it_is_run() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert re.search(rf"^#     python docs/examples/{path.name} out/", path.read_text(), re.M), path.name

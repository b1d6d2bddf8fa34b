"""The commands of docs/watching.md, as they stand there, on a job in the place of the quickstart."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jobs

TEXT = (jobs.ROOT / "docs" / "watching.md").read_text(encoding="utf-8")


def test_every_command_runs(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, output={"path": "out/quickstart"}, input={"limit": 50}, scripted={"step_s": 0.0})
    (tmp_path / "jobs").mkdir()
    shutil.move(spec, tmp_path / "jobs" / "quickstart.yaml")
    blocks = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    lines = [line.split() for block in blocks for line in block.splitlines()]
    assert len(lines) == 7
    environment = {**os.environ, **jobs.quick_start()}
    for words in lines:
        assert words[0] == "batchinf"
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, (words, done.stderr)
    for path in (tmp_path / "quickstart.html", tmp_path / "out" / "quickstart" / "report.html"):
        assert "50" in path.read_text(encoding="utf-8")

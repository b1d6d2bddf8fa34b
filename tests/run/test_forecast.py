"""What a job over a sample says of all rows."""

import json
import pathlib
import re

import pytest

import jobs


@pytest.mark.slow
def test_time_in_which_engines_wait_for_the_input_is_not_that_of_rows(tmp_path: pathlib.Path) -> None:
    rows = [json.loads(line) for line in jobs.PROMPTS.read_text(encoding="utf-8").strip().split("\n")[:80]]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({**row, "padding": "x" * (1 << 17)}) + "\n" for row in rows))
    spec = jobs.spec_of(tmp_path, input={"path": str(path), "sample": 0.25}, parallel={"data_parallel_size": 1})
    # The engine is up long before there are rows.
    done = jobs.finish(spec, faults="head_start.started=sleep 8")
    assert "while the input is read" in done.stderr
    [hours] = re.findall(r"all 80 rows take (\S+) device-hours", done.stdout)
    state = jobs.state_of(tmp_path / "out")
    assert state.device_s > 8
    run_s = float(hours) * 3600 * state.counts.num_rows / 80
    assert run_s < (state.device_s - 8) * 1.01

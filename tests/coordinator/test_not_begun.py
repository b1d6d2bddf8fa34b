"""What is said of a job whose input is still being read, or was when its run ended."""

import json
import pathlib
from typing import Any

import pytest

import batchinf
import jobs


def spec_of(folder: pathlib.Path, **sections: Any) -> pathlib.Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": n, "prompt": "one two"}) + "\n" for n in range(40)))
    where = {"path": str(path), "where": "id > 1"}
    return jobs.spec_of(folder, input=where, output={"keep_columns": []}, **sections)


def test_nothing_is_wrong_with_it(tmp_path: pathlib.Path) -> None:
    spec, out = spec_of(tmp_path), tmp_path / "out"
    marker = tmp_path / "held"
    process = jobs.start("run", spec, faults=f"job.input_open=hold {marker}")
    jobs.wait_until(marker.exists)
    assert f"holds no job yet: pid {process.pid}" in jobs.run("status", out).stderr
    with pytest.raises(batchinf.OutputError, match=f"holds no job yet: pid {process.pid} .* reads its input"):
        batchinf.open(out)
    _check_says_that_there_is_none(out)
    process.kill()
    process.communicate()
    # Even where it came as far as the spec, which is written before the header.
    assert jobs.run("run", spec, faults="manifest.mid_line:2=kill").returncode == -9
    assert (out / "job.yaml").exists()
    assert "holds no job yet: its first run ended" in jobs.run("status", out).stderr
    _check_says_that_there_is_none(out)
    _check_says_that_there_is_none(out, "--repair")
    jobs.finish(spec)
    assert jobs.run("check", out).returncode == 0


@pytest.mark.slow
def test_it_may_be_cut_into_slices_yet(tmp_path: pathlib.Path) -> None:
    spec, out = spec_of(tmp_path, parallel={"data_parallel_size": 1}), tmp_path / "out"
    done = jobs.run("run", spec, "--set", "input.where=id < 0")
    assert (done.returncode, "while the input is read" in done.stderr) == (2, True)
    assert any((out / "manifest").iterdir())
    for index in range(2):
        jobs.finish(spec, "--slice", f"{index}/2")
    assert jobs.run("check", out).returncode == 0
    assert "holds a job in 2 slices" in jobs.run("run", spec).stderr


def _check_says_that_there_is_none(out: pathlib.Path, *arguments: str) -> None:
    done = jobs.run("check", out, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "holds no job yet: its input has not been read to the end" in done.stderr

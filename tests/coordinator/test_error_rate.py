"""Error rows: a job half of whose first rows fail ends early and says why; any other runs to its end."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

import jobs
from batchinf.base.storage import Folder
from batchinf.coordinator.coordinator import is_hopeless
from batchinf.coordinator.ending import commonest, failure_lines
from batchinf.manifest.state import read_state

WORD = "word "


def job_of(folder: pathlib.Path, prompt: Callable[[int], Any], num_rows: int, **script: Any) -> pathlib.Path:
    """A spec over rows of these prompts. Good rows take so long that no look at the job can come too late."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": prompt(i)}) + "\n" for i in range(num_rows)))
    scripted = {"max_model_len": 256, "max_num_seqs": 64, "step_s": 0.02, **script}
    return jobs.spec_of(
        folder,
        input={"path": str(path)},
        output={"keep_columns": [], "rows_per_shard": 300},
        scripted=scripted,
        max_error_rate=0.01,
    )


def most_bad(index: int) -> str | None:
    """Three prompts in five are bad, two of those null and one too long. (Half is where a few rows decide.)"""
    if index % 5 > 2:
        return f"Say {index}."
    return WORD * (500 + index % 100) if index % 5 == 0 else None


def error_of(errors: str) -> str:
    """All that is said from the line of the error on."""
    assert "Traceback" not in errors
    return errors[errors.index("error: ") :]


def test_validate_says_that_the_job_will_exit_with_3(tmp_path: pathlib.Path) -> None:
    spec = job_of(tmp_path, lambda index: None if index in (3, 40) else f"Say {index}.", 60)
    said = (
        "warning: 3.3% errors are more than max_error_rate 1.0%, so that `run` stores all rows and then exits with 3; "
        "a higher max_error_rate allows this"
    )
    assert said in jobs.run("validate", spec).stdout.splitlines()
    assert "max_error_rate" not in jobs.run("validate", spec, "--set", "max_error_rate=0.05").stdout
    assert jobs.run("run", spec).returncode == 3


@pytest.mark.slow
def test_most_of_the_first_rows_failing_ends_a_job_early(tmp_path: pathlib.Path) -> None:
    spec, out, num_rows = job_of(tmp_path, most_bad, 6000), tmp_path / "out", 6000
    first = jobs.run("run", spec)
    assert first.returncode == 2, first.stderr
    said = error_of(first.stderr)
    state = jobs.state_of(out)
    assert not state.is_done
    assert not any(jobs.snapshot_of(out)["replicas"][i]["state"] == "running" for i in range(2))
    # The commonest first, each with a row's own prompt, special tokens and all.
    null, long = said.index("× null_prompt: column 'prompt' is null"), said.index("× prompt_too_long: got ")
    assert null < said.index("no prompt can be made of {'prompt': None}") < long
    assert long < said.index("prompt '<|begin_of_text|>word word")
    assert f"kept: {state.counts.num_rows:,} output rows in {len(state.parts)} parts" in said
    assert "--set max_error_rate=1" in said
    assert max(map(len, said.splitlines())) < 500

    # What was finished is judged again, now out of parts and journal.
    again = jobs.run("run", spec)
    assert again.returncode == 2, again.stderr
    assert "output rows have failed; the job was ended early" in error_of(again.stderr)

    finished = jobs.finish(spec, "--set", "max_error_rate=1", "--set", "scripted.step_s=0")
    assert f"{num_rows:,} output rows, {num_rows * 3 // 5:,} of them errors" in finished.stdout
    rows = jobs.table_of(out).select(["row_index", "error_type", "text"]).to_pylist()
    assert [row["row_index"] for row in rows] == list(range(num_rows))
    assert [row["error_type"] is None for row in rows] == [index % 5 > 2 for index in range(num_rows)]
    assert all((row["text"] is None) == (row["error_type"] is not None) for row in rows)

    # A job that is done is not ended early any more.
    done = jobs.run("run", spec)
    assert done.returncode == 3
    assert "2,400 × null_prompt: column 'prompt' is null" in error_of(done.stderr)
    assert "1,200 × prompt_too_long" in done.stderr


def test_just_below_half_runs_to_its_end(tmp_path: pathlib.Path) -> None:
    # Bad rows never wait for the engine: of the first 1,000 finished nearly all are errors, of those begun 4 in 9.
    spec = job_of(tmp_path, lambda index: "" if index % 9 < 4 else f"Say {index}.", 4500, max_num_seqs=256)
    done = jobs.run("run", spec)
    assert done.returncode == 3, done.stderr
    assert "44.4% of the output rows are errors, more than max_error_rate 1.0%" in error_of(done.stderr)
    assert "2,000 × empty_prompt: the prompt is an empty string" in done.stderr
    assert jobs.state_of(tmp_path / "out").is_done
    assert jobs.table_of(tmp_path / "out").column("row_index").to_pylist() == list(range(4500))


def test_nobody_is_judged_by_fewer_than_1000_rows(tmp_path: pathlib.Path) -> None:
    done = jobs.run("run", job_of(tmp_path, lambda index: "fine" if index == 899 else None, 900))
    assert done.returncode == 3, done.stderr
    assert jobs.state_of(tmp_path / "out").counts.num_errors == 899


@pytest.mark.parametrize(("num_rows", "which"), [(30, "all 30 rows"), (3000, "all 1,000 rows of the sample")])
def test_run_ends_where_validate_ends_if_no_row_has_a_prompt(num_rows: int, which: str, tmp_path: pathlib.Path) -> None:
    spec = job_of(tmp_path, lambda index: "" if index % 5 == 0 else None, num_rows)
    said = "would be error rows; correct the spec or the input, or set max_error_rate 1 to store them. Row"
    checked, done = jobs.run("validate", spec), jobs.run("run", spec)
    assert (checked.returncode, done.returncode) == (2, 2)
    assert f"error: {which} {said}" in done.stderr
    assert "null_prompt: column 'prompt' is null" in done.stderr
    assert checked.stderr.splitlines()[-1] == done.stderr.splitlines()[-1]
    assert read_state(Folder(tmp_path / "out")) is None
    if num_rows > 1000:
        return
    accepted = ("--set", "max_error_rate=1", "--set", "scripted.step_s=0")
    assert jobs.run("validate", spec, *accepted).returncode == 0
    jobs.finish(spec, *accepted)
    assert jobs.state_of(tmp_path / "out").counts.num_errors == 30
    # The finished job stays where the new one cannot begin.
    assert jobs.run("run", spec, "--fresh").returncode == 2
    assert jobs.state_of(tmp_path / "out").is_done


def test_a_slice_whose_own_rows_are_bad_runs(tmp_path: pathlib.Path) -> None:
    spec = job_of(tmp_path, lambda index: None if index < 20 else "fine", 40, step_s=0.0)
    done = jobs.run("run", spec, "--slice", "0/2")
    assert done.returncode == 3, done.stderr
    assert jobs.state_of(tmp_path / "out" / "slice-0").counts.num_errors == 20


def test_errors_are_counted_by_what_they_say_but_for_numbers(tmp_path: pathlib.Path) -> None:
    prompts = ["", None, WORD * 300, WORD * 400, WORD * 500, "fine"]
    jobs.run("run", job_of(tmp_path, lambda index: prompts[index % 6], 240, step_s=0.0))
    out = tmp_path / "out"
    folder, state = Folder(out), jobs.state_of(out)
    found = commonest(folder, state)
    assert [(failure.error_type, failure.num_rows) for failure in found] == [
        ("prompt_too_long", 120),
        ("empty_prompt", 40),
        ("null_prompt", 40),
    ]
    assert found[0].first_row == 2
    # A part that is gone must not hide the rest.
    part = min((out / "parts").iterdir())
    lost = state.parts[0].num_errors
    part.unlink()
    assert sum(failure.num_rows for failure in commonest(folder, state)) == 200 - lost


def test_nothing_of_a_row_moves_the_cursor(tmp_path: pathlib.Path) -> None:
    template = "{{ prompt.boom }}"
    spec = job_of(tmp_path, lambda index: "x", 10)
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "input": {
        "path": str(tmp_path / "rows.jsonl"), "prompt_template": template}}))  # fmt: skip
    jobs.finish(spec, "--set", "max_error_rate=1")
    out = tmp_path / "out"
    [failure] = commonest(Folder(out), jobs.state_of(out))
    [_, line, row] = failure_lines([failure], ["prompt"])
    assert line.startswith("  10 × template_error: ") and row == "      row 0: prompt"
    hostile = failure.__class__("t", 1, 7, "a\x1b[2J\nb\u202ec\ud800" + "d" * 1000)
    [_, line] = failure_lines([hostile], [])
    assert line.startswith("  1 × t: a\\x1b[2J\\nb\\u202ec\\ud800ddd")
    assert line.isprintable() and len(line) < 400


@pytest.mark.parametrize(
    ("num_errors", "num_begun", "expected"), [(500, 1000, True), (499, 1000, False), (1000, 1000, True), (0, 0, False)]
)
def test_half_is_hopeless(num_errors: int, num_begun: int, expected: bool) -> None:
    assert is_hopeless(num_errors, num_begun) == expected


@pytest.mark.parametrize("num_bad", [0, 1])
def test_a_rate_of_zero(num_bad: int, tmp_path: pathlib.Path) -> None:
    """One error row is too many; none is not. The job runs to its end."""
    spec = job_of(tmp_path, lambda index: None if index < num_bad else f"Say {index}.", 40, step_s=0.0)
    done = jobs.run("run", spec, "--set", "max_error_rate=0")
    assert done.returncode == (3 if num_bad else 0), done.stderr
    assert jobs.table_of(tmp_path / "out").num_rows == 40
    assert jobs.state_of(tmp_path / "out").is_done
    assert f"40 output rows, {num_bad} of them errors" in done.stdout + done.stderr
    if num_bad:
        assert (
            "error: 2.5% of the output rows are errors, more than max_error_rate 0.0%; all rows are stored"
            in done.stderr
        )

"""`engine.max_model_len: auto`: the number, and what happens to it in a resume, a slice, an extension and `plan`."""

import json
import pathlib
import shutil
from typing import Any

import pytest

import batchinf
import jobs
from batchinf.job.job import max_model_len
from batchinf.job.model_len import with_known_length
from batchinf.job.open import open_input, prepare_job
from batchinf.prompts.encoder import load_tokenizer
from batchinf.spec.file import read_spec

AUTO = {"engine": {"max_model_len": "auto"}}
QUICK = {"parallel": {"data_parallel_size": 1}, "scripted": {"step_s": 0.0}, "output": {"keep_columns": []}}


def words(number: int) -> str:
    return " ".join(["fox"] * number)


def num_tokens(text: str) -> int:
    return len(load_tokenizer(str(jobs.MODEL), False)(text).input_ids)


def spec_over(folder: pathlib.Path, prompts: list[str], **sections: Any) -> pathlib.Path:
    rows = [{"id": str(number), "prompt": prompt} for number, prompt in enumerate(prompts)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = {"path": str(folder / "rows.jsonl"), **sections.pop("input", {})}
    return jobs.spec_of(folder, input=where, **{**AUTO, **QUICK, **sections})


def length_of(path: pathlib.Path) -> int:
    said: list[str] = []
    prepared = with_known_length(prepare_job(read_spec(path)), said.append, path.parent / "scan")
    assert len(said) == 2
    found = prepared.spec.engine["max_model_len"]
    assert prepared.file.spec.engine["max_model_len"] == found
    assert isinstance(found, int)
    return found


def test_it_is_the_longest_row_with_its_output_rounded_up(tmp_path: pathlib.Path) -> None:
    long = words(300)
    prompts = [words(3), "é" * 40, long, words(4)]
    wanted = num_tokens(long) + 32
    found = length_of(spec_over(tmp_path, prompts))
    assert wanted < found <= wanted + 256
    assert found % 256 == 0
    # One more token of output than the multiple of 256 holds.
    more = length_of(spec_over(tmp_path, prompts, sampling={"max_tokens": found - num_tokens(long)}))
    assert more == found + 256


def test_validate_checks_the_weights_first_and_says_how_far_it_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("batchinf.job.model_len._LINE_EVERY_S", 0.0)
    path = spec_over(tmp_path, [words(3)] * 300)
    batchinf.validate(path)
    assert "engine.max_model_len auto: 256 rows read, of 300 rows of the input at most" in capsys.readouterr().err
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(jobs.MODEL / "config.json", bare)
    with pytest.raises(batchinf.UserError, match=r"the weights of .* are not whole"):
        batchinf.validate(path, overrides={"model.name": str(bare), "model.tokenizer": str(jobs.MODEL)})
    assert "reading all rows" not in capsys.readouterr().err


def test_it_is_at_most_what_the_model_takes(tmp_path: pathlib.Path) -> None:
    own = {"max_model_len": 512, "step_s": 0.0}
    assert length_of(spec_over(tmp_path, [words(3), words(2000)], scripted=own)) == 256
    assert length_of(spec_over(tmp_path, [words(470)], scripted=own)) == 512
    # Without max_tokens, an output may be as long as the model allows.
    assert length_of(spec_over(tmp_path, [words(3)], scripted=own, sampling={"max_tokens": None})) == 512


def test_only_rows_that_run_count(tmp_path: pathlib.Path) -> None:
    prompts = [words(3), words(5), words(300)]
    assert length_of(spec_over(tmp_path, prompts, input={"limit": 2})) == 256
    assert length_of(spec_over(tmp_path, prompts, input={"where": "id = '1'"})) == 256
    assert length_of(spec_over(tmp_path, prompts)) > 256


def test_rows_have_their_own_max_tokens(tmp_path: pathlib.Path) -> None:
    rows = [{"id": "a", "prompt": words(3), "most": 5}, {"id": "b", "prompt": words(3), "most": 900}]
    path = spec_over(tmp_path, [], sampling={"max_tokens": {"column": "most"}})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert length_of(path) == 1024


def test_scored_rows_fit_as_without_it(tmp_path: pathlib.Path) -> None:
    for number in (100, 250, 255, 256):  # around the edge
        score = {"task": "score", "sampling": None, "input": {"text_column": "prompt"}}
        text = " ".join(["the"] * number)
        assert num_tokens(text) < length_of(spec_over(tmp_path, [text], **score))
    overlap = {"task": "score", "sampling": None, "input": {"text_column": "prompt"}, "score": {"window_overlap": 300}}
    assert length_of(spec_over(tmp_path, [words(3)], **overlap)) == 303


def test_a_job_keeps_its_number_and_later_rows_that_are_longer_are_errors(tmp_path: pathlib.Path) -> None:
    path = spec_over(tmp_path, [words(20)] * 5)
    done = jobs.finish(path)
    assert "engine.max_model_len 256: the longest row takes" in done.stderr
    assert jobs.state_of(tmp_path / "out").header.identity["engine.max_model_len"] == 256
    with (tmp_path / "rows.jsonl").open("a") as file:
        for number, prompt in enumerate((words(400), words(30))):
            file.write(json.dumps({"id": f"new {number}", "prompt": prompt}) + "\n")
    again = jobs.run("run", path, "--extend", "--set", "max_error_rate=1")
    assert again.returncode == 0, again.stderr
    assert "reading all rows" not in again.stderr
    kinds = {row["id"]: row["error_type"] for row in jobs.rows_of(tmp_path / "out")}
    assert len(kinds) == 7
    assert {name for name, kind in kinds.items() if kind is not None} == {"new 0"}
    assert kinds["new 0"] == "prompt_too_long"
    # The number itself is the same job, another one is not.
    jobs.finish(path, "--extend", "--set", "engine.max_model_len=256", "--set", "max_error_rate=1")
    other = jobs.run("run", path, "--extend", "--set", "engine.max_model_len=512")
    assert other.returncode == 2
    assert "engine.max_model_len: the job has 256, now it is 512" in other.stderr


@pytest.mark.slow
def test_slices_have_one_number_and_a_killed_job_keeps_it(tmp_path: pathlib.Path) -> None:
    path = spec_over(tmp_path, [words(3)] * 9 + [words(300)])
    for number in (0, 1):
        jobs.finish(path, "--slice", f"{number}/2")
    found = {
        jobs.state_of(tmp_path / "out" / f"slice-{number}").header.identity["engine.max_model_len"] for number in (0, 1)
    }
    assert len(found) == 1 and min(found) > 300
    folder = tmp_path / "killed"
    folder.mkdir()
    path = spec_over(folder, [words(3)] * 9)
    assert jobs.run("run", path, faults="coordinator.after_publish:1:kill").returncode != 0
    jobs.finish(path)
    assert len(jobs.rows_of(folder / "out")) == 9
    assert jobs.state_of(folder / "out").header.identity["engine.max_model_len"] == 256


def test_plan_and_validate_say_it(tmp_path: pathlib.Path) -> None:
    path = spec_over(tmp_path, [words(3)] * 4)
    report = json.loads(jobs.run("plan", path, "--gpu", "h200", "--json").stdout)
    assert report["model"]["context"] == report["job"]["max_model_len"] == 256
    validated = json.loads(jobs.run("validate", path, "--json").stdout)
    assert "engine.max_model_len 256" in json.dumps(validated["remarks"])


def test_other_words_are_refused(tmp_path: pathlib.Path) -> None:
    done = jobs.run("validate", spec_over(tmp_path, ["a"], engine={"max_model_len": "8k"}))
    assert done.returncode == 2
    assert "engine.max_model_len: got '8k'; must be a whole number, or auto" in done.stderr


def test_the_scripted_engine_takes_the_number(tmp_path: pathlib.Path) -> None:
    prepared = prepare_job(read_spec(spec_over(tmp_path, ["a"], engine={"max_model_len": 64})))
    job = open_input(prepared, tmp_path / "scan")
    assert max_model_len(job) == 64
    job.source.close()

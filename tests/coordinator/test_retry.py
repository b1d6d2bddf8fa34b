"""Rows of a finished job run again and take their own places: whatever is killed, and whoever reads meanwhile."""

import json
import pathlib
import shutil
import signal
import subprocess
import time
from typing import Any

import pyarrow.parquet as pq
import pytest

import batchinf
import jobs
from batchinf.commands.check import check_job
from batchinf.manifest.lock import JobLock

# Prompts of 128 tokens and more are too long; of those from 89 on, min_tokens does not fit behind them.
BASE: dict[str, Any] = {
    "sampling": {"max_tokens": None, "min_tokens": 40, "logprobs": 1},
    "parallel": {"data_parallel_size": 1},
    "output": {"rows_per_shard": 60},
    "scripted": {"step_s": 0.0, "max_model_len": 128},
    "max_error_rate": 1.0,
}
ERRORS = ("--retry", "errors", "--set", "sampling.min_tokens=0")
# So slow that shards become whole one after the other.
SLOW = ("--set", "scripted.step_s=0.004", "--set", "scripted.max_num_seqs=2")
Rows = dict[int, dict[str, Any]]


def rows_by_index(out: pathlib.Path) -> Rows:
    """All rows, each found once and in order."""
    rows = jobs.table_of(out).to_pylist()
    assert [row["row_index"] for row in rows] == list(range(len(jobs.unhurt())))
    return dict(enumerate(rows))


def without_attempts(rows: Rows) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "attempts"} for row in rows.values()]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Rows]:
    """A finished job, and its rows."""
    folder = tmp_path_factory.mktemp("first")
    jobs.finish(jobs.spec_of(folder, **BASE))
    return folder / "out", rows_by_index(folder / "out")


@pytest.fixture(scope="module")
def retried(first: tuple[pathlib.Path, Rows], tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Rows]:
    """The same job after an unhurt retry of its errors, read by others all the while; and its rows."""
    folder = tmp_path_factory.mktemp("retried")
    spec = copy_of(first[0], folder)
    process = jobs.start("run", spec, *ERRORS)
    looks = read_all_the_while(process, folder / "out", first[1])
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    after = rows_by_index(folder / "out")
    chosen = {index for index, row in first[1].items() if row["error_type"] is not None}
    for rows in looks:
        for index, row in rows.items():
            assert row in (first[1][index], after[index]) if index in chosen else row == first[1][index]
    return folder / "out", after


def copy_of(out: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A copy of a job's folder in `folder`, and its spec."""
    shutil.copytree(out, folder / "out")
    return jobs.spec_of(folder, **BASE)


def read_all_the_while(process: "subprocess.Popen[str]", out: pathlib.Path, before: Rows) -> list[Rows]:
    """What a reader of all parts sees until a process ends, each time that it is something new."""
    looks = [before]
    while process.poll() is None:
        rows = rows_by_index(out)
        if rows != looks[-1]:
            looks.append(rows)
        time.sleep(0.01)
    return looks


def test_errors_are_retried_once_their_cause_is_gone(
    first: tuple[pathlib.Path, Rows], retried: tuple[pathlib.Path, Rows]
) -> None:
    (_, before), (out, after) = first, retried
    kinds = {"prompt_too_long": 0, "invalid_sampling": 0}
    for index, row in before.items():
        if row["error_type"] is None:
            # The others are as they were, `attempts` and all.
            assert after[index] == row
            continue
        kinds[row["error_type"]] += 1
        assert after[index]["attempts"] == 2
        is_cured = row["error_type"] == "invalid_sampling"
        assert (after[index]["error_type"] is None) == is_cured
        assert (after[index]["text"] is not None) == is_cured
    assert min(kinds.values()) >= 2
    state = jobs.state_of(out)
    assert state.is_done
    assert (state.counts.num_rows, state.counts.num_errors) == (len(before), kinds["prompt_too_long"])
    retry = state.retries[1]
    assert (retry.predicate, retry.overrides) == ("errors", {"sampling.min_tokens": 0})
    assert retry.num_rows == sum(kinds.values())
    shards = {shard for shard, part in state.parts.items() if part.retry == 1}
    assert len(shards) == retry.num_shards
    for shard in state.parts:
        stored = pq.read_metadata(out / "parts" / f"part-{shard:06d}.parquet").metadata
        assert (stored.get(b"batchinf.retry") == b"1") == (shard in shards)
        if shard in shards:
            said = json.loads(stored[b"batchinf.retry.1"])
            assert said == {
                "predicate": "errors",
                "set": {"sampling.min_tokens": 0},
                "num_rows": retry.num_rows,
                "attempt": 1,
            }
    said = jobs.run("status", out).stdout
    assert f"retry 1 (errors, sampling.min_tokens 0): {len(shards)} of {len(shards)} parts replaced" in said
    assert not list((out / "staging").iterdir())
    assert not list((out / "journal").iterdir())


def test_the_sampling_that_is_shown_is_the_retrys(tmp_path: pathlib.Path) -> None:
    few = {"parallel": {"data_parallel_size": 1}, "input": {"limit": 5}, "sampling": {"max_tokens": 4}}
    path = jobs.spec_of(tmp_path, **few)
    assert "max_tokens 4" in jobs.finish(path).stderr
    again = jobs.finish(path, "--retry", "finish_reason = 'length'", "--set", "sampling.max_tokens=8").stderr
    [line] = [line for line in again.splitlines() if line.startswith("sampling: ")]
    assert line.endswith("; in this retry max_tokens 8")


def test_a_retried_job_is_no_other_job(retried: tuple[pathlib.Path, Rows], tmp_path: pathlib.Path) -> None:
    spec = copy_of(retried[0], tmp_path)
    assert "was already done" in jobs.finish(spec).stdout
    # As its own spec has it, not as the last retry had it.
    drifted = jobs.run("run", spec, "--set", "sampling.min_tokens=0")
    assert drifted.returncode == 2
    assert "sampling.min_tokens" in drifted.stderr
    assert "with this sampling, in the same folder, add --retry" in drifted.stderr
    # A retry cannot change these, so it is not offered.
    assert "add --retry" not in jobs.run("run", spec, "--set", "sampling.logprobs=3").stderr


def test_longer_outputs_and_a_second_retry(retried: tuple[pathlib.Path, Rows], tmp_path: pathlib.Path) -> None:
    spec, before = copy_of(retried[0], tmp_path), retried[1]
    predicate, limits = "finish_reason = 'length'", ("--set", "sampling.max_tokens=900")
    assert "no row matches" in jobs.finish(spec, "--retry", f"{predicate} and row_index < 0", *limits).stderr
    assert rows_by_index(tmp_path / "out") == before
    jobs.finish(spec, "--retry", predicate, *limits)
    after = rows_by_index(tmp_path / "out")
    cut = [index for index, row in before.items() if row["finish_reason"] == "length"]
    assert len(cut) >= 2
    for index, row in before.items():
        if index not in cut:
            assert after[index] == row
        else:
            assert after[index]["attempts"] == row["attempts"] + 1
            assert after[index]["prompt_hash"] == row["prompt_hash"]
    assert max(after[index]["num_output_tokens"] for index in cut) > 128
    twice = [part for part in (tmp_path / "out" / "parts").iterdir() if {b"batchinf.retry.1", b"batchinf.retry.2"}
             <= pq.read_metadata(part).metadata.keys()]  # fmt: skip
    assert twice


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--retry", "finish_reson = 'length'"], ["finish_reson", "; columns: finish_reason, stop_reason, id, "]),
        (
            ["--retry", "errors", "--set", "sampling.logprobs=2"],
            [
                "sampling.logprobs",
                "except n and those of logprobs; any other change needs a new job with another output",
            ],
        ),
        (["--retry", "errors", "--set", "output.include_prompt=true"], ["output.include_prompt"]),
        (["--retry", "errors", "--set", "scripted.max_model_len=512"], ["scripted.max_model_len"]),
        (["--retry", "errors", "--fresh"], ["--fresh", "--retry"]),
    ],
)
def test_what_cannot_be_retried_is_one_clear_line(
    arguments: list[str], words: list[str], first: tuple[pathlib.Path, Rows], tmp_path: pathlib.Path
) -> None:
    spec = copy_of(first[0], tmp_path)
    refused = jobs.run("run", spec, *arguments)
    assert refused.returncode == 2
    assert refused.stderr.count("error: ") == 1
    assert "Traceback" not in refused.stderr
    for word in words:
        assert word in refused.stderr
    assert rows_by_index(tmp_path / "out") == first[1]
    assert jobs.state_of(tmp_path / "out").is_done


def test_there_must_be_a_job(tmp_path: pathlib.Path) -> None:
    refused = jobs.run("run", jobs.spec_of(tmp_path, **BASE), "--retry", "errors")
    assert refused.returncode == 2
    assert "holds no job" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_the_job_is_moved_before_the_lock_is_held(
    first: tuple[pathlib.Path, Rows], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `--fresh` that comes between the first checks and the lock leaves no job to retry rows of."""
    spec, out = copy_of(first[0], tmp_path), tmp_path / "out"
    acquire = JobLock.acquire

    def moved(lock: JobLock, *given: Any, **options: Any) -> int:
        out.rename(tmp_path / "out.1")
        out.mkdir()
        return acquire(lock, *given, **options)

    monkeypatch.setattr(JobLock, "acquire", moved)
    with pytest.raises(batchinf.UserError, match="holds no job whose rows could run again"):
        batchinf.run(spec, retry="errors", overrides=["sampling.min_tokens=0"], quiet=True)
    assert not (out / "parts").exists() and not (out / "manifest").exists()


@pytest.mark.slow
def test_killed_at_every_step(
    first: tuple[pathlib.Path, Rows], retried: tuple[pathlib.Path, Rows], tmp_path: pathlib.Path
) -> None:
    spec, out = copy_of(first[0], tmp_path), tmp_path / "out"

    def killed(where: str, *arguments: str) -> None:
        died = jobs.run("run", spec, *arguments, faults=f"{where}=kill")
        assert died.returncode == -9, died.stderr
        # At any moment readers find each row once, as it was or as it will be.
        for index, row in rows_by_index(out).items():
            assert row in (first[1][index], retried[1][index])

    killed("retry.before_line", *ERRORS, *SLOW)
    assert not jobs.state_of(out).retries
    killed("retry.after_line", *ERRORS, *SLOW)
    assert not jobs.state_of(out).is_done
    refused = jobs.run("run", spec, "--retry", "finish_reason = 'length'")
    assert refused.returncode == 2
    assert "unfinished retry 1 (errors, sampling.min_tokens 0)" in refused.stderr
    # The manifest names a new part, and the old one is still in its place: no damage, so a repair must leave both.
    killed("coordinator.before_publish", *ERRORS, *SLOW)
    before = rows_by_index(out)
    assert check_job(str(out), is_deep=True, repair=True).is_whole
    assert rows_by_index(out) == before
    killed("coordinator.after_publish:2", *ERRORS, *SLOW)
    before = rows_by_index(out)
    assert check_job(str(out), is_deep=True, repair=True).is_whole
    assert rows_by_index(out) == before
    (out / "retry" / "000001.positions").unlink()
    killed("manifest.mid_line:6", *SLOW)  # without --retry the retry goes on all the same
    # Parts that are lost are made anew, and go through the retry too.
    state = jobs.state_of(out)
    assert not state.is_done
    for level in (0, 1):
        shard = max(shard for shard, part in state.parts.items() if part.retry == level)
        (out / "parts" / f"part-{shard:06d}.parquet").unlink()
    jobs.finish(spec, *ERRORS)
    after = rows_by_index(out)
    assert without_attempts(after) == without_attempts(retried[1])
    assert list(jobs.state_of(out).retries) == [1]
    assert jobs.state_of(out).is_done


def test_stopped_and_a_replica_killed(
    first: tuple[pathlib.Path, Rows], retried: tuple[pathlib.Path, Rows], tmp_path: pathlib.Path
) -> None:
    spec, out, once = copy_of(first[0], tmp_path), tmp_path / "out", tmp_path / "once"
    once.mkdir()
    process = jobs.start(
        "run", spec, *ERRORS, *SLOW, "--set", "scripted.step_s=0.05", "--set", "checkpoint_interval_s=0.05",
        "--set", "drain_timeout_s=0",
    )  # fmt: skip
    jobs.wait_until(lambda: list((out / "journal").iterdir()) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    code, _, errors = jobs.end(process)
    assert code == 75, errors
    assert list((out / "journal").iterdir())
    # What it had finished is not run again; nor does the replica's end take more than the file at hand.
    jobs.finish(spec, *ERRORS, faults="parts.before_rename=kill", BATCHINF_FAULTS_ONCE=str(once))
    assert list(once.iterdir())
    assert sum(event["num_requests"] for event in jobs.events_of(out, "recovered")) > 0
    assert without_attempts(rows_by_index(out)) == without_attempts(retried[1])


def test_a_job_that_is_not_done_is_finished_first(
    first: tuple[pathlib.Path, Rows], retried: tuple[pathlib.Path, Rows], tmp_path: pathlib.Path
) -> None:
    spec = copy_of(first[0], tmp_path)
    shutil.rmtree(tmp_path / "out")
    assert jobs.run("run", spec, faults="coordinator.after_publish:3=kill").returncode == -9
    jobs.finish(spec, *ERRORS)
    assert without_attempts(rows_by_index(tmp_path / "out")) == without_attempts(retried[1])


def test_rows_are_retried_with_all_of_their_samples(tmp_path: pathlib.Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "Once {number}"}}\n' for number in range(40)))
    sampling = {"n": 3, "temperature": 1.0, "max_tokens": 6}
    spec = jobs.spec_of(tmp_path, **{**BASE, "sampling": sampling}, input={"path": str(prompts), "id_column": None})
    spec.write_text(spec.read_text().replace('["language"]', "[]"))
    jobs.finish(spec)
    before = jobs.table_of(tmp_path / "out").to_pylist()
    jobs.finish(spec, "--retry", "finish_reason = 'length' and sample_index = 1", "--set", "sampling.max_tokens=50")
    after = jobs.table_of(tmp_path / "out").to_pylist()
    assert [(row["row_index"], row["sample_index"]) for row in after] == [(i // 3, i % 3) for i in range(120)]
    cut = {row["row_index"] for row in before if row["finish_reason"] == "length" and row["sample_index"] == 1}
    assert 0 < len(cut) < 40
    for old, new in zip(before, after, strict=True):
        assert new["attempts"] == (2 if old["row_index"] in cut else 1)
        assert (new == old) == (old["row_index"] not in cut)


def test_samples_of_which_some_fail(tmp_path: pathlib.Path) -> None:
    """A sample that is cut short is an error row beside the other samples of its row. All of them run again."""
    structure = {"regex": "a+"}  # the scripted engine ignores it: an output fails if it reaches `max_tokens`
    sampling = {"n": 4, "temperature": 1.0, "max_tokens": 3, "structured_outputs": structure}
    spec = jobs.spec_of(tmp_path, sampling=sampling, input={"limit": 40}, output={"rows_per_shard": 10})
    assert jobs.run("run", spec, faults="coordinator.after_publish:2=kill").returncode == -9
    done = jobs.run("run", spec)
    assert done.returncode == 3, done.stderr
    rows = jobs.table_of(tmp_path / "out").to_pylist()
    keys = [(row["row_index"], row["sample_index"]) for row in rows]
    assert keys == [(i, k) for i in range(40) for k in range(4)]
    failed = {key for key, row in zip(keys, rows, strict=True) if row["error_type"] is not None}
    assert {row["error_type"] for row in rows} == {None, "invalid_structure"}
    assert [row["finish_reason"] for row in rows] == ["length" if key in failed else "stop" for key in keys]
    assert all(row["text"] is not None for row in rows)
    assert jobs.state_of(tmp_path / "out").counts.num_errors == len(failed)
    chosen = {index for index, _ in failed}
    partly = {index for index in chosen if sum((index, k) in failed for k in range(4)) < 4}
    assert partly and len(chosen) < 40

    again = jobs.run("run", spec, "--retry", "errors", "--set", "sampling.max_tokens=300")
    assert again.returncode in (0, 3), again.stderr
    after = jobs.table_of(tmp_path / "out").to_pylist()
    assert [(row["row_index"], row["sample_index"]) for row in after] == keys
    assert [row["attempts"] for row in after] == [2 if index in chosen else 1 for index, _ in keys]
    for before, row in zip(rows, after, strict=True):
        assert row["row_index"] in chosen or row == before
    assert jobs.run("check", tmp_path / "out", "--deep").returncode == 0


def test_a_retry_whose_file_is_lost_leaves_later_rows_alone(tmp_path: pathlib.Path) -> None:
    lines = jobs.PROMPTS.read_text(encoding="utf-8").splitlines(keepends=True)
    folder = tmp_path / "input"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(lines[:6]), encoding="utf-8")
    sections = {
        "input": {"path": str(folder)},
        "sampling": {"min_tokens": 4, "max_tokens": 4},
        "parallel": {"data_parallel_size": 1},
    }
    spec, out = jobs.spec_of(tmp_path, **sections), tmp_path / "out"
    jobs.finish(spec)
    jobs.finish(spec, "--retry", "row_index % 3 = 0", "--set=sampling.max_tokens=7", "--set=sampling.min_tokens=7")
    shutil.rmtree(out / "retry")
    (folder / "b.jsonl").write_text("".join(lines[6:12]), encoding="utf-8")
    jobs.finish(spec, "--extend")
    counts = {row["row_index"]: row["num_output_tokens"] for row in jobs.table_of(out).to_pylist()}
    assert counts == {row: 7 if row in (0, 3) else 4 for row in range(12)}

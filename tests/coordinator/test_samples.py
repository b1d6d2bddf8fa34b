"""Jobs whose rows have their own number of samples, from a column or as several prompts in a line, scripted."""

import json
import pathlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.output import proof
from batchinf.schedule.positions import ShardRows

NUM_ROWS = 60


def samples_of(n: int) -> int | None:
    """The value of the column: a null is the job's own."""
    return (1, 4, None, 2, 9)[n % 5]


def write_rows(path: pathlib.Path, num_rows: int = NUM_ROWS) -> None:
    rows = [
        {"id": f"row-{n}", "prompt": "" if n % 17 == 3 else f"Say {n}.", "samples": samples_of(n)}
        for n in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec_of(folder: pathlib.Path, **sections: Any) -> pathlib.Path:
    path = folder / "rows.jsonl"
    if not path.exists():
        write_rows(path)
    sampling = {"temperature": 0.8, "max_tokens": 6, "logprobs": None, "n": 3, "columns": {"n": "samples"}}
    return jobs.spec_of(
        folder,
        input={"path": str(path)},
        sampling=sampling,
        output={"keep_columns": ["samples"], "rows_per_shard": 8},
        **{"max_error_rate": 1.0, **sections},
    )


def keys_of(out: pathlib.Path) -> list[tuple[int, int]]:
    return [(row["row_index"], row["sample_index"]) for row in jobs.table_of(out).to_pylist()]


EXPECTED = [(n, sample) for n in range(NUM_ROWS) for sample in range(samples_of(n) or 3)]


def test_each_row_has_its_own_number_of_samples(tmp_path: pathlib.Path) -> None:
    done = jobs.finish(spec_of(tmp_path))
    rows = jobs.table_of(tmp_path / "out").to_pylist()
    assert keys_of(tmp_path / "out") == EXPECTED
    # Error rows are as many, and samples of a row differ.
    assert {row["row_index"] for row in rows if row["error_type"]} == {3, 20, 37, 54}
    texts = [row["text"] for row in rows if row["row_index"] == 4]
    assert len(set(texts)) > 1
    assert "60 input rows with the samples of column 'samples' in " in done.stderr
    assert f"done: {len(EXPECTED):,} output rows" in done.stdout
    found = json.loads(jobs.run("status", tmp_path / "out", "--json").stdout)["totals"]
    assert (found["num_rows"], found["num_rows_committed"], found["is_estimate"]) == (len(EXPECTED),) * 2 + (False,)
    checked = jobs.run("check", tmp_path / "out", "--deep")
    assert checked.returncode == 0
    assert f"{len(EXPECTED):,} of {len(EXPECTED):,} output rows" in checked.stdout


def test_a_killed_job_says_about_how_many_rows_it_has_and_ends_with_the_same(tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path)
    assert jobs.run("run", spec, faults="coordinator.after_publish:3=kill").returncode == -9
    status = jobs.run("status", tmp_path / "out").stdout
    [line] = [line for line in status.splitlines() if "committed: " in line]
    state = jobs.state_of(tmp_path / "out")
    about = round(NUM_ROWS * state.counts.num_rows / state.num_inputs_committed)
    assert f"{state.counts.num_rows:,} of about {about:,} output rows" in line
    jobs.finish(spec)
    other = tmp_path / "other"
    other.mkdir()
    jobs.finish(spec_of(other))
    unhurt, resumed = (jobs.table_of(out / "out").drop_columns(["attempts"]) for out in (other, tmp_path))
    assert resumed.equals(unhurt)


def test_a_retry_runs_rows_again_with_as_many_samples(tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path)
    jobs.finish(spec)
    before = {(row["row_index"], row["sample_index"]): row for row in jobs.table_of(tmp_path / "out").to_pylist()}
    # One sample of a row is enough for the whole row to run again.
    jobs.finish(spec, "--retry", "row_index < 20 and sample_index = 8", "--set", "sampling.max_tokens=3")
    after = jobs.table_of(tmp_path / "out").to_pylist()
    assert [(row["row_index"], row["sample_index"]) for row in after] == EXPECTED
    changed = {row["row_index"] for row in after if row != before[row["row_index"], row["sample_index"]]}
    assert changed == {4, 9, 14, 19}
    for overrides in (["sampling.n=2"], ["sampling.columns={temperature: samples}"], ["sampling.columns={}"]):
        refused = jobs.run("run", spec, "--retry", "true", "--set", *overrides)
        assert refused.returncode != 0, overrides
        assert "except n and those of logprobs" in refused.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("drop the first sample", "has row 1, sample 1 in the place of row 0, sample 1"),
        ("drop a row", "has row 2, sample 0 in the place of row 1, sample 0"),
        ("double", "has row 0, sample 0 in the place of row 1, sample 0"),
        ("drop the last row", "must have all"),
    ],
)
def test_a_part_with_other_keys_is_found(change: str, words: str, tmp_path: pathlib.Path) -> None:
    """By its keys, if its digests were right."""
    keys = [(n, sample) for n in range(8) for sample in range(samples_of(n) or 3)]
    hurt = {
        "drop the first sample": [key for key in keys if key != (1, 0)],
        "drop a row": [key for key in keys if key[0] != 1],
        "double": [keys[0], *keys],
        "drop the last row": [key for key in keys if key[0] != 7],
    }[change]
    path = tmp_path / "part.parquet"

    def flaw(keys: list[tuple[int, int]], batch: int) -> str | None:
        rows, samples = (list(column) for column in zip(*keys, strict=True))
        table = pa.table({"row_index": pa.array(rows, pa.int64()), "sample_index": pa.array(samples, pa.int32())})
        pq.write_table(table, path, row_group_size=batch)
        return proof._key_flaw(path, ShardRows(0, 8), None)

    for batch in (1, 3, 1000):
        assert flaw(keys, batch) is None
        assert words in str(flaw(hurt, batch))


def lines(bodies: list[dict[str, Any]]) -> str:
    return "".join(
        json.dumps({"custom_id": f"line-{n}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
        for n, body in enumerate(bodies)
    )


BODIES: list[dict[str, Any]] = [
    {"prompt": "One", "max_tokens": 3},
    {"prompt": ["Two", "", "Three and more"], "n": 2, "temperature": 1.0},
    {"prompt": [[5, 6], [7, 8, 9]], "temperature": 0},
    {"prompt": "Four", "n": 4, "temperature": 0.5},
    {"prompt": "Five", "n": 2, "temperature": 0},
    {"prompt": ["", ""], "max_tokens": 2},
]
NUM_ANSWERS = [1, 6, 2, 4, 1, 2]


def batch_of(folder: pathlib.Path, **sections: Any) -> pathlib.Path:
    path = folder / "lines.jsonl"
    path.write_text(lines(BODIES))
    return jobs.spec_of(
        folder,
        input={"path": str(path), "id_column": None},
        output={"keep_columns": [], "include_prompt": True, "rows_per_shard": 2},
        sampling={"max_tokens": 5, "temperature": 1.0, "logprobs": 1},
        parallel={"data_parallel_size": 1},
        max_error_rate=1.0,
        **sections,
    )


def test_several_prompts_of_a_line_are_rows_of_their_own_and_one_answer(tmp_path: pathlib.Path) -> None:
    spec = batch_of(tmp_path)
    assert jobs.run("run", spec, faults="coordinator.after_publish:1=kill").returncode == -9
    jobs.finish(spec)
    rows = jobs.table_of(tmp_path / "out").to_pylist()
    assert [(row["row_index"], row["sample_index"]) for row in rows] == [
        (n, sample) for n, number in enumerate(NUM_ANSWERS) for sample in range(number)
    ]
    # vLLM's index: that of the prompt, times n, plus that of the sample.
    assert [row["prompt"] for row in rows[1:7]] == ["Two", "Two", None, None, *["Three and more"] * 2]
    assert [row["error_type"] for row in rows[1:7]] == [None, None, "empty_prompt", "empty_prompt", None, None]
    assert [row["prompt_token_ids"] for row in rows[7:9]] == [[5, 6], [7, 8, 9]]
    assert len({row["prompt_hash"] for row in rows[7:9]}) == 2
    [greedy] = [row for row in rows if row["row_index"] == 4]
    assert greedy["error_type"] == "invalid_sampling"
    assert greedy["error_message"].startswith("sampling.n: got 2 with temperature 0")
    target = tmp_path / "answers.jsonl"
    exported = jobs.run("export", tmp_path / "out", "--to", "openai-batch", "-o", target)
    assert exported.returncode == 0, exported.stderr
    files = [path for path in tmp_path.glob("answers*") if path.is_file()]
    answers = {
        answer["custom_id"]: answer for path in files for answer in map(json.loads, path.read_text().splitlines())
    }
    assert sorted(answers) == [f"line-{n}" for n in range(len(BODIES))]
    of_list = answers["line-1"]
    assert [choice["index"] for choice in of_list["response"]["body"]["choices"]] == [0, 1, 4, 5]
    assert "2 of 6 samples failed" in of_list["error"]["message"]
    tokens = [row["num_prompt_tokens"] for row in rows[1:7]]
    assert of_list["response"]["body"]["usage"]["prompt_tokens"] == tokens[0] + tokens[4]
    assert answers["line-2"]["response"]["body"]["usage"]["prompt_tokens"] == 5
    assert [choice["index"] for choice in answers["line-3"]["response"]["body"]["choices"]] == [0, 1, 2, 3]
    assert answers["line-5"]["response"] is None


def test_plan_and_validate_count_the_samples_of_each_row(tmp_path: pathlib.Path) -> None:
    planned = json.loads(jobs.run("plan", spec_of(tmp_path), "--json").stdout)["job"]
    assert planned["num_requests"] == pytest.approx(sum(samples_of(n) or 3 for n in range(NUM_ROWS)), rel=0.1)
    shown = jobs.run("validate", tmp_path / "job.yaml", "-n", "3")
    assert shown.returncode == 0, shown.stderr


def test_a_wrong_number_of_samples_does_not_count_for_the_size_of_the_output(tmp_path: pathlib.Path) -> None:
    rows = [{"id": f"row-{n}", "prompt": f"Say {n}.", "samples": 10**9 if n == 3 else 1} for n in range(NUM_ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = jobs.run("run", spec_of(tmp_path), "--set", "output.max_output_bytes=1000000")
    assert done.returncode == 0, done.stderr
    assert "× invalid_sampling: sampling.n (column 'samples'): got 1000000000" in done.stdout


def test_what_a_column_of_samples_cannot_be(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    wrong = [0, 2.5, 20_000, 1, 2.0]
    path.write_text("".join(json.dumps({"id": str(n), "prompt": "a", "samples": n}) + "\n" for n in wrong))
    jobs.finish(spec_of(tmp_path, parallel={"data_parallel_size": 1}))
    rows = jobs.table_of(tmp_path / "out").to_pylist()
    errors = {row["id"]: row["error_message"] for row in rows if row["error_type"]}
    assert errors == {
        str(n): f"sampling.n (column 'samples'): got {n}; must be a whole number, at least 1 and at most 16384"
        for n in wrong[:3]
    }
    assert [row["id"] for row in rows if not row["error_type"]] == ["1", "2.0", "2.0"]


def test_tasks_with_one_row_for_each_have_no_such_column(tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path, task="logits", logits={"positions": "generated", "token_ids": [1, 2]})
    refused = jobs.run("run", spec, is_refused=True)
    assert refused.returncode == 2
    assert "must be 1 with task logits" in refused.stderr

"""`--json`: one object on stdout for each report, with the exit code and the error line of the command without it."""

import json
import pathlib
import shutil
from typing import Any

import pytest

import jobs
from batchinf.base.text import to_json

NUM_ROWS = 24
KEYS = {
    "status": "folder num_slices totals load jobs cost",
    "check": "folder is_deep is_repair is_whole jobs",
    "diff": "a b identity_changes task key num_only_a num_only_b changes written_to has_same_files",
    "validate": "spec model input chosen task remarks prompt_lengths seed rows output",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The spec of a finished job over 24 rows, one of them an error; its output folder lies beside it."""
    folder = tmp_path_factory.mktemp("json")
    prompts = [None, *(f"Say {number} \U0001f44b." for number in range(1, NUM_ROWS))]
    rows = [{"id": f"row-{number}", "prompt": prompt} for number, prompt in enumerate(prompts)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = jobs.spec_of(
        folder,
        input={"path": str(folder / "rows.jsonl")},
        output={"keep_columns": [], "rows_per_shard": 8},
        parallel={"data_parallel_size": 1},
        scripted={"step_s": 0.0},
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    return spec


def asked(command: str, *arguments: Any, code: int = 0, error: str = "") -> dict[str, Any]:
    """The object that a command prints."""
    shown = jobs.run(command, *arguments, "--json")
    assert (shown.returncode, shown.stderr) == (code, error)
    assert shown.stdout.count("\n") == 1
    assert shown.stdout.isascii()  # whatever the terminal takes
    found: dict[str, Any] = json.loads(shown.stdout, parse_constant=lambda text: pytest.fail(text))
    assert [*found] == KEYS[command].split()
    return found


def test_status(done: pathlib.Path) -> None:
    found = asked("status", done.parent / "out")
    [job] = found["jobs"]
    assert (job["activity"], job["slice"], job["process"], job["extents"]) == ("done", None, None, [NUM_ROWS])
    totals = found["totals"]
    assert totals == job["totals"]
    counts = [totals[f"num_{name}"] for name in ("rows", "rows_committed", "parts", "parts_committed", "errors")]
    num_parts = len([*(done.parent / "out" / "parts").iterdir()])
    assert counts == [NUM_ROWS, NUM_ROWS, num_parts, num_parts, 1]
    assert (totals["task"], totals["model"], totals["task_counts"]) == ("generate", str(jobs.MODEL), {})
    rows = jobs.rows_of(done.parent / "out")
    assert totals["num_output_tokens"] == sum(row["num_output_tokens"] or 0 for row in rows)


def test_check_of_a_whole_job_and_of_a_damaged_one(done: pathlib.Path, tmp_path: pathlib.Path) -> None:
    whole = asked("check", done.parent / "out", "--deep")
    assert (whole["is_whole"], whole["is_deep"], whole["jobs"][0]["findings"]) == (True, True, [])
    out = tmp_path / "out"
    shutil.copytree(done.parent / "out", out)
    path = min((out / "parts").iterdir())
    path.write_bytes(path.read_bytes()[:-10])
    (out / "job.yaml").unlink()
    [job] = asked("check", out, code=2, error=f"error: {out}: 2 things are wrong, see above\n")["jobs"]
    assert [(it["problem"], it["file"], it["shard"]) for it in job["findings"]] == [
        ("part_damaged", f"parts/{path.name}", 0),
        ("spec_missing", "job.yaml", None),
    ]
    moved = f"error: {out}: 1 thing is wrong, see above, 1 moved aside: run the job again\n"
    [job] = asked("check", out, "--repair", code=2, error=moved)["jobs"]
    assert [(it["problem"], it["moved_to"]) for it in job["findings"]] == [
        ("part_damaged", f"damaged/{path.name}"),
        ("spec_restored", None),
    ]


def test_check_of_a_damaged_manifest(done: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(done.parent / "out", out)
    log = min((out / "manifest").iterdir())
    lines = log.read_bytes().splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if b'"kind":"part"' in line)
    lines[place] = lines[place].replace(b'"part"', b'"port"', 1)  # others follow: it is no torn end
    log.write_bytes(b"".join(lines))
    shown = jobs.run("check", out, "--json")
    [job] = json.loads(shown.stdout)["jobs"]
    assert (shown.returncode, job["is_checked"], job["findings"][0]["problem"]) == (2, False, "manifest_damaged")
    repaired = jobs.run("check", out, "--repair", "--json")
    [job] = json.loads(repaired.stdout)["jobs"]
    assert (repaired.returncode, job["replaced_logs"]) == (2, [f"damaged/{log.name}"])


def test_diff(done: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = done.parent / "out"
    found = asked("diff", out, out, "--out", tmp_path / "diff.parquet")
    assert (found["key"], found["a"], found["identity_changes"]) == ("row_index", found["b"], [])
    changes = found["changes"]
    assert (changes["num_both"], changes["num_changed"], changes["examples"]) == (NUM_ROWS, 0, [])
    num_tokens = sum(len(row["token_ids"] or ()) for row in jobs.rows_of(out))
    columns = {column["name"]: column for column in changes["columns"]}
    assert (changes["decides"], columns["text"]["num_changed"]) == (["text"], 0)
    assert columns["logprobs"]["deltas"] == {
        "num": num_tokens, "num_not_finite": 0, "mean": 0.0, "mean_abs": 0.0, "max_abs": 0.0
    }  # fmt: skip
    assert found["written_to"] == str(tmp_path / "diff.parquet")


def test_validate(done: pathlib.Path) -> None:
    found = asked("validate", done, "--row", "row-1", "--row", "row-0")
    assert (found["output"]["holds"], found["output"]["drift"], found["seed"]) == ("done job", None, None)
    assert (found["input"]["num_rows"], found["input"]["columns"]) == (NUM_ROWS, {"id": "string", "prompt": "string"})
    lengths = found["prompt_lengths"]
    assert (lengths["num_sampled"], lengths["p50"] > 0) == (NUM_ROWS, True)
    assert [(it["error_type"], it["num_rows"], it["first_row"]) for it in lengths["errors"]] == [("null_prompt", 1, 0)]
    good, bad = found["rows"]
    assert (good["row_index"], good["id"], good["error"], good["is_named"]) == (1, "row-1", None, True)
    assert good["text"] == "<|begin_of_text|>Say 1 \U0001f44b."
    assert len(good["token_ids"]) > 3
    assert good["sampling"]["max_tokens"] == 32
    assert (bad["id"], bad["error"]["error_type"], bad["sampling"]) == ("row-0", "null_prompt", None)
    settings = {it["name"]: (it["value"], it["origin"]) for it in found["task"]["sampling"]}
    assert settings["max_tokens"] == (32, "spec")


@pytest.mark.parametrize("arguments", [("status", "."), ("check", "."), ("diff", ".", "."), ("validate", "x.yaml")])
def test_without_a_result_nothing_is_printed(arguments: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    failed = jobs.run(*arguments, "--json")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("error: ") and failed.stderr.count("\n") == 1


def test_numbers_that_are_not_finite_are_null() -> None:
    assert to_json({"a": [float("nan"), (1.5, float("-inf"))], "b": None}) == '{"a": [null, [1.5, null]], "b": null}'

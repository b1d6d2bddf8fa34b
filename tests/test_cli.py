"""The command line as users meet it: exit codes, one clear line for each mistake, what each command shows."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer.main
import yaml
from rich.cells import cell_len

import batchinf
import jobs
from batchinf import cli
from batchinf.base.text import size_text, time_taken


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path, str]:
    """A finished job: its spec, its output folder and its closing lines."""
    folder = tmp_path_factory.mktemp("done")
    spec = jobs.spec_of(folder, scripted={"step_s": 0.0}, output={"include_prompt": True})
    finished = jobs.finish(spec)
    return spec, folder / "out", finished.stdout


def seen(out: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Every file of a folder with its size and time."""
    files = [path for path in out.rglob("*") if path.is_file()]
    return {str(path.relative_to(out)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def without_speed(closing: str) -> list[str]:
    """The closing lines that do not depend on this run. A slow run also says what limited it."""
    of_run = ("this run took ", "rows by replica: ", "limited by ")
    lines = closing.splitlines()
    assert sum(line.startswith("this run took ") for line in lines) == 1
    return [line for line in lines if not line.startswith(of_run) and "replicas had no rows: " not in line]


def assert_one_clear_line(errors: str, *words: str) -> None:
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, errors
    assert "Traceback" not in errors
    for word in words:
        assert word in errors


def test_the_closing_lines_say_what_came_out_and_where(done: Any) -> None:
    _, out, closing = done
    rows, parts = jobs.rows_of(out), list((out / "parts").glob("*.parquet"))
    assert f"{len(rows):,} output rows, 0 of them errors" in closing
    assert f"{len(parts)} Parquet files" in closing
    assert f"{size_text(sum(part.stat().st_size for part in parts))}, in" in closing
    assert f"{out}/parts" in closing
    device_s = sum(event["device_s"] for event in jobs.events_of(out, "replica_ended"))
    assert device_s > 0
    assert f"{time_taken(device_s)} of replica time over all attempts" in closing


def test_a_finished_job_says_so_at_once(done: Any) -> None:
    spec, out, closing = done
    files = seen(out)
    command = [sys.executable, "-X", "importtime", "-m", "batchinf", "run", str(spec)]
    again = subprocess.run(command, capture_output=True, text=True, cwd=jobs.ROOT, check=True)
    lines = without_speed(closing)
    assert again.stdout.replace("was already done", "done").splitlines() == lines
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in again.stderr.splitlines()}
    assert "batchinf" in imported
    assert not imported & {"vllm", "torch", "transformers", "pandas", "httpx2"}
    assert seen(out) == files


def test_no_work_in_progress_is_left(done: Any) -> None:
    _, out, _ = done
    assert not list((out / "staging").iterdir())
    assert not list((out / "journal").iterdir())
    assert not list(out.rglob(".tmp-*"))
    assert not (out / "lock").exists()


def test_parts_say_where_they_are_from(done: Any) -> None:
    _, out, _ = done
    header = jobs.state_of(out).header
    for path in (out / "parts").glob("*.parquet"):
        stored = {key.decode(): value.decode() for key, value in pq.read_metadata(path).metadata.items()}
        assert stored["batchinf.fingerprint"] == header.fingerprint
        assert stored["batchinf.job_id"] == header.job_id
        assert stored["batchinf.model"] == str(jobs.MODEL)
        assert stored["batchinf.model_commit"] == header.identity["model"]
        assert stored["batchinf.version.batchinf"] == batchinf.__version__
        assert stored["batchinf.version.engine"] == "scripted"
        assert stored["batchinf.format_version"] == "1"


def test_the_resolved_spec_is_stored(done: Any) -> None:
    _, out, _ = done
    spec = yaml.safe_load((out / "job.yaml").read_text())
    assert spec["sampling"]["max_tokens"] == 32
    assert spec["sampling"]["top_p"] == 0.9  # from the model's generation_config


def test_kept_columns_and_prompts_are_the_inputs_own(done: Any) -> None:
    _, out, _ = done
    inputs = [json.loads(line) for line in jobs.prompts().read_text(encoding="utf-8").split("\n") if line]
    rows = jobs.rows_of(out)
    for name in ("id", "language", "prompt"):
        assert [row[name] for row in rows] == [row[name] for row in inputs]
    assert all(len(row["prompt_token_ids"]) == row["num_prompt_tokens"] for row in rows)


@pytest.mark.parametrize(
    ("field", "value", "was"),
    [
        ("sampling.max_tokens", "16", "32"),
        ("sampling.seed", "7", "0"),
        ("output.keep_columns", "[]", '"language"'),
    ],
)
def test_drift_is_refused_with_a_diff_and_two_ways_out(field: str, value: str, was: str, done: Any) -> None:
    spec, out, _ = done
    files = seen(out)
    drifted = jobs.run("run", spec, "--set", f"{field}={value}")
    assert drifted.returncode == 2
    assert_one_clear_line(drifted.stderr, field, value, was, "set these back", "another output.path", "--fresh")
    assert seen(out) == files


def test_a_real_job_in_the_folder_of_a_scripted_one(done: Any) -> None:
    spec, out, _ = done
    files = seen(out)
    text = yaml.safe_load(spec.read_text())
    real = spec.with_name("real.yaml")
    real.write_text(yaml.safe_dump({name: section for name, section in text.items() if name != "scripted"}))
    drifted = jobs.run("run", real)
    assert drifted.returncode == 2
    [line] = [line for line in drifted.stderr.splitlines() if "scripted" in line]
    assert line == "  scripted: the job has it, so its answers are invented; now it is left out"
    assert seen(out) == files


@pytest.mark.parametrize("has_other_task", [True, False])
def test_another_jobs_folder_is_refused_in_one_line(done: Any, tmp_path: pathlib.Path, *, has_other_task: bool) -> None:
    _, out, _ = done
    sections: dict[str, Any] = {"task": "score", "sampling": None, "input": {"text_column": "prompt"}}
    if not has_other_task:
        shutil.copytree(jobs.MODEL, tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
        (tmp_path / "rows.jsonl").write_text('{"id": 1, "prompt": "Once", "language": "en"}\n')
        sections = {"model": str(tmp_path / "model"), "input": {"path": str(tmp_path / "rows.jsonl"), "limit": 1}}
    refused = jobs.run("run", jobs.spec_of(tmp_path, **sections, output={"path": str(out)}))
    assert refused.returncode == 2
    [line] = [line for line in refused.stderr.splitlines() if "job" in line]
    assert line.startswith(f"error: {out} holds another job: task generate with {jobs.MODEL} over {jobs.prompts()}, ")
    assert line.endswith("give this job another output.path, or start a new job with --fresh (in Python fresh=True), "
                         "which keeps the old folder under another name")  # fmt: skip


def test_an_input_that_changed_is_drift(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Once"}\n' * 20)
    sections = {"output": {"keep_columns": []}, "parallel": {"data_parallel_size": 1}}
    spec = jobs.spec_of(tmp_path, input={"path": str(path), "id_column": None}, **sections)
    jobs.finish(spec)
    path.write_text('{"prompt": "Twice"}\n' * 20)
    drifted = jobs.run("run", spec)
    assert drifted.returncode == 2
    assert_one_clear_line(drifted.stderr, "1 file is changed: prompts.jsonl", "another output.path", "on: prompt_hash")


def test_runtime_and_layout_may_change(done: Any) -> None:
    spec, _, closing = done
    changes = ["parallel.data_parallel_size=1", "checkpoint_interval_s=3", "scripted.step_s=0.5", "max_restarts=0"]
    changes.append("output.rows_per_shard=7")
    again = jobs.run("run", spec, *(item for change in changes for item in ("--set", change)))
    assert again.returncode == 0
    lines = without_speed(closing)
    assert again.stdout.replace("was already done", "done").splitlines() == lines


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["sampling.max_tokns=3"], ["max_tokns", "max_tokens"]),
        (["sampling.max_tokens=-3"], ["sampling.max_tokens", "-3"]),
        (["input.path=missing.jsonl"], ["missing.jsonl"]),
        (["input.prompt_column=prmpt"], ["prmpt", "prompt"]),
        (["output.keep_columns=[text]"], ["text"]),
        (["model.name=no/such/folder"], ["no/such/folder"]),
        (["parallel.data_parallel_size=0"], ["data_parallel_size"]),
        (["nonsense"], ["nonsense"]),
    ],
)
def test_mistakes_are_one_clear_line(changes: list[str], words: list[str], tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path)
    given = [item for change in changes for item in ("--set", change)]
    failed = jobs.run("run", spec, *given)
    assert failed.returncode == 2
    assert_one_clear_line(failed.stderr, *words)


@pytest.mark.parametrize("arguments", [["run", "missing.yaml"], ["status", "."], ["head", "."], ["validate", "x.yaml"]])
def test_what_is_not_there_is_one_clear_line(arguments: list[str]) -> None:
    failed = jobs.run(*arguments)
    assert failed.returncode == 2
    assert_one_clear_line(failed.stderr, arguments[1])


def test_an_output_folder_that_cannot_be_made(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    failed = jobs.run("run", jobs.spec_of(tmp_path, output={"path": str(tmp_path / "file" / "out")}))
    assert failed.returncode == 2
    assert_one_clear_line(failed.stderr, "output folder")


def test_an_output_folder_that_is_a_dangling_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    failed = jobs.run("run", jobs.spec_of(tmp_path))
    assert failed.returncode == 2
    assert_one_clear_line(failed.stderr, "is a symbolic link to nowhere, which does not exist")


@pytest.mark.slow
def test_a_limit_on_addresses(tmp_path: pathlib.Path) -> None:
    # With this limit, the tokenizer's library aborted the process when it read the first rows.
    limited = ("bash", "-c", 'ulimit -v 420000; exec "$@"', "_")
    failed = jobs.run("run", jobs.spec_of(tmp_path), prefix=limited)
    assert failed.returncode == 2
    assert "`ulimit -v` allows each process 0.4 GiB of addresses" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_parts_without_a_manifest_are_left_alone(done: Any, tmp_path: pathlib.Path) -> None:
    _, out, _ = done
    shutil.copytree(out / "parts", tmp_path / "out" / "parts")
    files = seen(tmp_path / "out")
    failed = jobs.run("run", jobs.spec_of(tmp_path))
    assert failed.returncode == 2
    assert_one_clear_line(failed.stderr, "another output.path")
    assert files.items() <= seen(tmp_path / "out").items()


def test_a_bug_keeps_its_traceback(tmp_path: pathlib.Path) -> None:
    failed = jobs.run("run", jobs.spec_of(tmp_path), faults="storage.write.before_fsync=nonsense")
    assert failed.returncode == 1
    assert "Traceback" in failed.stderr


def test_status_of_a_finished_job(done: Any) -> None:
    _, out, _ = done
    shown = jobs.run("status", out)
    assert shown.returncode == 0
    rows = len(jobs.rows_of(out))
    assert shown.stdout.startswith(f"{out}: done")
    assert f"{rows} of {rows} output rows" in shown.stdout


@pytest.mark.parametrize("command", ["status", "head", "check", "report", "diff"])
def test_a_file_in_the_place_of_a_jobs_folder(command: str, tmp_path: pathlib.Path) -> None:
    spec, other = jobs.spec_of(tmp_path), tmp_path / "prompts.jsonl"
    other.write_text('{"prompt": "Once"}\n')
    for path, more in ((spec, f": the output.path of this spec is {tmp_path / 'out'}"), (other, "")):
        more_arguments = {"diff": [path]}.get(command, [])
        refused = jobs.run(command, path, *more_arguments)
        assert refused.returncode == 2
        assert refused.stderr == f"error: {path} is a file; batchinf {command} takes a job's output folder{more}\n"


def test_a_run_in_another_folder_leaves_nothing(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, input={"path": "data/prompts.jsonl"}, output={"path": str(tmp_path / "out" / "one")})
    refused = jobs.run("run", spec)
    assert refused.returncode == 2
    assert_one_clear_line(refused.stderr, "data/prompts.jsonl does not exist")
    assert not (tmp_path / "out").exists()


def test_validate_shows_all_and_writes_nothing(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path)
    shown = jobs.run("validate", spec, "-n", "3")
    assert shown.returncode == 0, shown.stderr
    assert not (tmp_path / "out").exists()
    for words in (
        "LlamaForCausalLM",
        "weights whole",
        f"{len(jobs.unhurt())} rows",
        "language string",
        "top_p 0.9 (generation_config)",
        "max_tokens 32 (spec)",
        "<|begin_of_text|>",
        "token ids: ",
        "a new job",
    ):
        assert words in shown.stdout
    first = json.loads(jobs.PROMPTS.read_text(encoding="utf-8").split("\n")[0])["prompt"]
    assert repr("<|begin_of_text|>" + first)[1:20] in shown.stdout
    assert shown.stdout.count("token ids: ") == 3


def test_validate_shows_the_rows_that_are_wanted(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path)
    named = jobs.run("validate", spec, "--row", "en-0041", "--row", "vi-0005")
    assert named.returncode == 0, named.stderr
    shown = [line for line in named.stdout.splitlines() if line.startswith("row ")]
    assert [line.partition(":")[0] for line in shown] == ["row 1, id 'en-0041'", "row 0, id 'vi-0005'"]
    drawn = jobs.run("validate", spec, "--random", "-n", "4")
    assert drawn.stdout.count("token ids: ") == 4
    seed = next(line for line in drawn.stdout.splitlines() if line.startswith("rows drawn with "))
    again = jobs.run("validate", spec, *seed.removeprefix("rows drawn with ").rstrip(":").split(), "-n", "4")
    assert again.stdout == drawn.stdout


def test_validate_of_a_finished_job(done: Any) -> None:
    spec, out, _ = done
    files = seen(out)
    shown = jobs.run("validate", spec)
    assert shown.returncode == 0
    assert "the job there is done" in shown.stdout
    assert "other settings" not in shown.stdout
    other = jobs.run("validate", spec, "--set", "sampling.stop=[END]")
    assert 'stop ["END"] (spec)' in other.stdout
    assert '\n  sampling.stop: the job has [], now it is ["END"]\n' in other.stdout
    assert seen(out) == files


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_validate_misses_a_file_of_the_model(missing: str, tmp_path: pathlib.Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(jobs.MODEL, model)
    (model / missing).unlink()
    failed = jobs.run("validate", jobs.spec_of(tmp_path, model=str(model)))
    assert failed.returncode == 2
    assert_one_clear_line(failed.stderr, "model")


def test_help_has_the_commands_in_groups() -> None:
    text = jobs.run("--help", COLUMNS="80").stdout
    titles = re.findall(r"^╭─ (.*?) ─+╮$", text, re.MULTILINE)
    assert titles == ["Options", "Begin", "Run", "Look at the output", "Check and compare"]
    commands = re.findall(r"^│ ([a-z][a-z-]+)  ", text, re.MULTILINE)
    assert sorted(commands) == sorted(typer.main.get_group(cli.app).commands)
    assert "docs/" in text
    assert "Flags of vLLM" in jobs.run("run-batch", "--help", COLUMNS="80").stdout


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_is_light(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "batchinf", *arguments]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=jobs.ROOT, check=True)
    assert "batchinf" in shown.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in shown.stderr.splitlines()}
    own = set() if "run" in arguments else {"pydantic"}  # typer reads the arguments of a command with it
    assert not imported & {"vllm", "torch", "transformers", "pyarrow", *own}


def test_the_schema_is_json() -> None:
    shown = jobs.run("schema")
    assert shown.returncode == 0
    assert "sampling" in json.loads(shown.stdout)["properties"]


COMMANDS = [str(command.name) for command in cli.app.registered_commands]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    shown = jobs.run(command, "--help", COLUMNS="80")
    assert f"Example: batchinf {command}" in shown.stdout
    assert "Usage: batchinf" in shown.stdout
    lines = shown.stdout.splitlines()
    assert not [line for line in lines if "<bool>" in line or "[x>=" in line]  # a flag takes no value
    assert max(map(cell_len, lines)) <= 80


@pytest.mark.parametrize("command", ["run", "validate", "slurm", "plan"])
def test_a_command_that_takes_a_spec_says_so_for_a_folder(command: str, done: Any, tmp_path: pathlib.Path) -> None:
    _, out, _ = done
    takes = f"error: {out} is a folder; batchinf {command} takes a job's spec, a YAML file"
    assert jobs.run(command, out).stderr == f"{takes}: the spec of the job in this folder is {out}/job.yaml\n"
    if command != "plan":  # a folder may be a model's
        assert jobs.run(command, tmp_path).stderr.endswith("a YAML file\n")


def test_verify_takes_a_folder(done: Any, tmp_path: pathlib.Path) -> None:
    _, out, _ = done
    shutil.copytree(out, tmp_path / "moved")
    refused = jobs.run("verify", tmp_path / "moved")
    assert refused.stderr == "error: the job was run by the scripted engine: there is no model to verify\n"
    (tmp_path / "empty").mkdir()
    assert f"error: {tmp_path}/empty is a folder without a job; " in jobs.run("verify", tmp_path / "empty").stderr


def test_the_shell_completes_commands_and_options() -> None:
    def completed(*words: str) -> list[str]:
        asked = {"COMP_WORDS": " ".join(["batchinf", *words]), "COMP_CWORD": str(len(words))}
        environment = {**os.environ, **jobs.quick_start(), "_BATCHINF_COMPLETE": "complete_bash", **asked}
        command = [sys.executable, "-m", "batchinf"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    assert completed("val") == ["validate"]
    assert {"--retry", "--fresh"} <= {*completed("run", "--")}


@pytest.mark.parametrize("command", ["run SPEC", "head OUT", "head OUT --row 0", "export OUT -o - --to csv", "schema"])
def test_a_reader_that_is_gone_does_not_change_the_exit_code(
    command: str, done: tuple[pathlib.Path, pathlib.Path, str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = command.replace("SPEC", str(done[0])).replace("OUT", str(done[1])).split()
    ended = subprocess.run([sys.executable, "-m", "batchinf", *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, "Traceback" in ended.stderr, "rror" in ended.stderr) == (0, False, False)


def test_lines_are_made_to_their_end_without_a_reader() -> None:
    """A check that makes them may fail after the reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys\nfrom batchinf.cli.program import print_lines\n"
    code += "def lines():\n    yield 'a'\n    yield 'b'\n    sys.exit(2)\nprint_lines(lines())"
    assert subprocess.run([sys.executable, "-c", code], stdout=writer).returncode == 2
    os.close(writer)

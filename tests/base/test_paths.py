"""A place on another machine, such as `s3://bucket/x`, is refused wherever a path of this host is meant."""

import json
import os
import pathlib
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinf
import jobs
from batchinf import cli
from batchinf.base.errors import SpecError, UserError
from batchinf.base.parquet import open_part
from batchinf.base.paths import elsewhere
from batchinf.base.storage import Folder
from batchinf.job.scratch import scratch_database
from batchinf.spec.file import read_spec
from batchinf.spec.job import PATH_FIELDS

STORES = (
    "s3://bucket/x", "S3://bucket/x", "s3:/bucket/x", " s3://bucket/x", "hf://datasets/o/n", "gs://b/x", "gcs://b/x",
    "abfs://c@acc.dfs.core.windows.net/x", "az://c/x", "https://host/x", "http://host/x", "file:///x", "ftp://h/x",
    "hdfs://h/x", "dbfs:/x", "me@host:/x", "host:/x", "simplecache::s3://b/x", "zip://*.csv::s3://b/x.zip",
)  # fmt: skip
PATHS = (
    "out",
    "/out",
    "./s3:/bucket/x",
    "out/s3://x",
    "run:1",
    "run:1/x",
    "C:/x",
    "2026-11-25T10:00/x",
    "a b/c",
    "~/x",
)


@pytest.mark.parametrize("place", STORES)
def test_a_place_on_another_machine_is_told_from_a_path(place: str) -> None:
    message = elsewhere(place, "do this")
    assert message is not None and message.startswith("got '")
    assert "do this" in message or place.startswith("file:")


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_a_path(path: str) -> None:
    assert elsewhere(path, "") is None


def test_no_secret_of_a_url_is_shown() -> None:
    assert "SECRET" not in str(elsewhere("s3://key:SECRET@bucket/x?sig=SECRET", ""))


SPEC: dict[str, Any] = {"model": "m", "task": "generate", "input": {"path": "rows.jsonl"}, "output": {"path": "out"}}
PLACES = {
    **{f"{section}.{name}": "s3://b/x" for section, name in PATH_FIELDS if section != "input"},
    "model.lora ": {"a": "s3://b/x"},
    "input.exclude": {"job": "s3://b/x", "on": "id"},
    "input.exclude ": {"job": ["out", "s3://b/x"], "on": "prompt_hash"},
    "input.prompt_template": {"file": "s3://b/x"},
    "sampling.structured_outputs": {"json": {"file": "s3://b/x"}},
    "engine.download_dir": "s3://b/x",
    "engine.hf_config_path": "s3://b/x",
    "engine.speculative_config": {"model": "s3://b/x"},
}


@pytest.mark.parametrize("store", ["s3://b/x", "hf://b/x", "gs://b/x", "abfs://b/x", "az://b/x", "https://b/x"])
@pytest.mark.parametrize("field", PLACES)
def test_each_path_field_refuses_each_store(field: str, store: str) -> None:
    value = json.loads(json.dumps(PLACES[field]).replace("s3://b/x", store))
    is_bucket = field == "output.path" and store[:2] in ("s3", "gs", "az", "hf")
    words = "must be a folder in a bucket|only a path of this host is possible"
    with pytest.raises(SpecError, match=words) as refused:
        read_spec(SPEC, {field.strip(): "hf://b" if is_bucket else value})
    assert len(str(refused.value).splitlines()) == 1
    assert field.strip() in str(refused.value)


def test_the_input_may_be_a_url() -> None:
    assert read_spec(SPEC, {"input.path": "s3://b/x"}).spec.input.path == "s3://b/x"


COMMANDS = [
    *(f"{command} job.yaml --set output.path=abfs://b/x" for command in ("run", "validate", "plan", "tune", "verify")),
    *(f"{command} s3://b/job.yaml" for command in ("run", "validate", "plan", "tune", "verify", "slurm")),
    *(f"{command} abfs://b/x" for command in ("status", "head", "check", "report", "head --row 0", "export -o x")),
    "diff abfs://b/x out", "diff out abfs://b/x", "diff out out --out s3://b/x.parquet", "report out -o s3://b/x.html",
    "tune job.yaml --out s3://b/x",
    "init s3://b/x.yaml",
    "init new.yaml --for generate --model model --data rows.jsonl --out abfs://b/x",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_refuses_it_before_anything_starts(
    command: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs.spec_of(pathlib.Path())
    pathlib.Path("out").mkdir()
    monkeypatch.setattr(sys, "argv", ["batchinf", *command.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.count("\n") == 1 and said.err.startswith("error: ")
    assert (
        "got 's3://b/" in said.err or "got 'abfs://b/" in said.err
    ) and "only a path of this host is possible" in said.err
    assert sorted(os.listdir()) == ["job.yaml", "out"]
    assert os.listdir("out") == []


def test_each_function_refuses_it(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path)
    for call in (
        lambda: batchinf.open("abfs://b/x"),
        lambda: batchinf.open(pathlib.Path("s3://b/x")),
        lambda: batchinf.status("abfs://b/x"),
        lambda: batchinf.run(spec, overrides={"output.path": pathlib.Path("s3://b/x")}),
        lambda: batchinf.tune(spec, out="s3://b/x"),
        lambda: batchinf.validate("s3://b/job.yaml"),
    ):
        with pytest.raises(UserError, match="only a path of this host is possible"):
            call()


def test_a_folder_that_an_earlier_version_filled_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("abfs:/bucket/x").mkdir(parents=True)
    with pytest.raises(UserError, match="'abfs:/bucket/x' is a path here too: rename it"):
        batchinf.status("abfs://bucket/x")


@pytest.mark.parametrize("name", ["HF_HOME", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TMPDIR"])
def test_a_cache_on_another_machine_is_refused(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "s3://bucket/cache")
    with pytest.raises(UserError, match=f"{name}: got 's3://bucket/cache'.*set it to a folder of this host"):
        batchinf.run(jobs.spec_of(tmp_path))
    assert os.listdir(tmp_path) == ["job.yaml"]


def test_a_part_in_a_folder_that_looks_like_a_url(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("run:1").mkdir()
    pq.write_table(pa.table({"a": [1]}), pathlib.Path("run:1/a.parquet").absolute())
    with open_part("run:1/a.parquet") as file:
        assert file.read().num_rows == 1
    with scratch_database(Folder("run:1"), "64MB") as scratch:
        assert scratch.column("SELECT 1") == [1]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_replicas")
@pytest.mark.parametrize("folder", ["run:1", "a[1]*"])
def test_a_folder_whose_name_looks_like_a_url_is_a_folder(
    folder: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pyarrow takes `run:1/parts/x.parquet` for a URL, and DuckDB `run:` for an extension."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"{number}", "prompt": f"Say {number}"} for number in range(12)]
    spec = jobs.spec_of(pathlib.Path(), input={"path": f"{folder}/in.parquet"})
    pathlib.Path(folder).mkdir()
    pq.write_table(pa.Table.from_pylist(rows), pathlib.Path(folder, "in.parquet").absolute())
    common = {"output.keep_columns": ["prompt"], "parallel.data_parallel_size": 1}
    ordered = {**common, "input.order": "prefix", "output.path": f"{folder}/a"}
    batchinf.run(spec, overrides=ordered, quiet=True)
    batchinf.run(spec, overrides=ordered, quiet=True, retry="row_index < 3")
    others = {"job": f"{folder}/a", "on": "id"}
    pq.write_table(pa.Table.from_pylist([*rows, {"id": "x", "prompt": "Say x"}]), pathlib.Path("more.parquet"))
    new = {"input.path": "more.parquet", "input.exclude": others, "output.path": f"{folder}/b"}
    assert batchinf.run(spec, overrides={**common, **new}, quiet=True).table().num_rows == 1
    assert batchinf.open(f"{folder}/a").dataset().num_rows == 12
    for command in ("check --deep", "head", "report", "head --row 3", "status"):
        monkeypatch.setattr(sys, "argv", ["batchinf", *command.split(), f"{folder}/a"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert ended.value.code == 0, (command, said.err)
    monkeypatch.setattr(sys, "argv", ["batchinf", "diff", f"{folder}/a", f"{folder}/a", "--out", f"{folder}/d.parquet"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0


@pytest.mark.parametrize("out", ["rows.csv", "rows.csv/job", "gone"])
def test_validate_refuses_an_output_folder_that_run_could_not_make(out: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt\nOnce\n")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    spec = jobs.spec_of(tmp_path, output={"path": str(tmp_path / out)})
    place = tmp_path / out.partition("/")[0]
    with pytest.raises(
        SpecError, match=rf"output\.path: got {tmp_path / out}, but {place} is no folder; give another path$"
    ):
        batchinf.validate(spec)


def test_validate_warns_of_an_output_folder_in_which_the_user_may_not_write(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host it may be there: a spec is also validated where the job does not run."""
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path / "locked")  # root may write anywhere
    report = batchinf.validate(jobs.spec_of(tmp_path, output={"path": str(tmp_path / "locked" / "job")}))
    assert f"warning: you may not write in {tmp_path / 'locked'}, so `run` on this host" in str(report)

"""Whole jobs whose model moves: a branch of the hub under their feet, a folder that is staged or altered."""

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest
from hub_server import Hub, serving

import jobs
from batchinf.base.slices import Slice
from batchinf.job.drift import check_cut, join_cut
from batchinf.job.open import open_job
from batchinf.model import files as model_files
from batchinf.spec.file import read_spec

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Gives the sample model as org/tiny, in two commits of which the later has another chat template."""
    files = {path.name: path.read_bytes() for path in jobs.MODEL.iterdir()}
    with serving(tmp_path, monkeypatch) as hub:
        hub.refs["org/tiny"] = {"main": OLD}
        hub.commits = {OLD: files, NEW: {**files, "chat_template.jinja": b"{{ messages }}"}}
        yield hub


def online(hub: Hub, tmp_path: pathlib.Path) -> dict[str, str]:
    """The environment of a machine that asks this hub."""
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}


def commits_of(out: pathlib.Path) -> set[str]:
    """What the parts say that their rows are from."""
    paths = sorted((out / "parts").glob("*.parquet"))
    return {pq.read_metadata(path).metadata[b"batchinf.model_commit"].decode() for path in paths}


def assert_refused(refused: "jobs.subprocess.CompletedProcess[str]", *words: str) -> None:
    assert refused.returncode == 2, refused.stderr
    errors = refused.stderr.partition("error: ")[2]
    assert "Traceback" not in refused.stderr
    for word in words:
        assert word in errors


@pytest.mark.slow
def test_a_branch_that_moves_does_not_move_the_job(tmp_path: pathlib.Path, hub: Hub) -> None:
    environment = online(hub, tmp_path)
    out = tmp_path / "out"
    one = {"parallel": {"data_parallel_size": 1}, "output": {"rows_per_shard": 50}}  # all its processes are new ones
    spec = jobs.spec_of(tmp_path, model="org/tiny", scripted={"step_s": 0.004}, **one)
    process = jobs.start("run", spec, **environment)
    jobs.wait_until(lambda: len(list((out / "parts").glob("*.parquet"))) >= 2)
    jobs.kill(jobs.family(process.pid))
    jobs.end(process)
    hub.refs["org/tiny"]["main"] = NEW
    hub.asked.clear()
    jobs.finish(spec, "--set", "scripted.step_s=0", **environment)
    assert not [path for path in hub.asked if path.endswith(("/org/tiny", "/main")) or NEW in path]
    assert commits_of(out) == {OLD}
    assert tuple(jobs.rows_of(out)) == jobs.unhurt()
    # One that is done asks nobody for what it is; another revision is another model.
    hub.asked.clear()
    again = jobs.run("run", spec, **environment)
    assert (again.returncode, [path for path in hub.asked if path.endswith(("/org/tiny", "/main"))]) == (0, [])
    other = jobs.run("run", spec, "--set", f"model.revision={NEW}", **environment)
    assert_refused(other, f'model: the job has a model with content "org/tiny@{OLD}", now it is', f'"org/tiny@{NEW}"')
    # Without its commit in the cache, it is said which one it was.
    shutil.rmtree(tmp_path / "hf")
    gone = jobs.run("run", spec, **{**environment, "HF_HUB_OFFLINE": "1"})
    assert_refused(
        gone,
        "model.name: there is no folder 'org/tiny', nor a model in the hub cache, and HF_HUB_OFFLINE is set; unset it, "
        f"or run `hf download org/tiny --revision {OLD}` first. The job began with this commit: restore it, or start a "
        "new job\n",
    )


def test_slices_that_begin_later_take_the_commit_of_the_first(tmp_path: pathlib.Path, hub: Hub) -> None:
    spec = jobs.spec_of(tmp_path, model="org/tiny")
    first, second = (dataclasses.replace(read_spec(spec), slice=Slice.parse(text)) for text in ("0/2", "1/2"))
    job = open_job(first)
    join_cut(job, job.source.num_rows)
    job.source.close()
    hub.refs["org/tiny"]["main"] = NEW
    job = open_job(second)
    check_cut(job)
    job.source.close()
    assert job.model.commit == OLD


def test_a_folder_may_be_staged_elsewhere_and_not_altered(tmp_path: pathlib.Path) -> None:
    out, first, other = tmp_path / "out", tmp_path / "shared" / "tiny", tmp_path / "local" / "model"
    shutil.copytree(jobs.MODEL, first)
    spec = jobs.spec_of(tmp_path, model=str(first), scripted={"step_s": 0.004}, output={"rows_per_shard": 50})
    process = jobs.start("run", spec)
    jobs.wait_until(lambda: (out / "parts").is_dir() and any((out / "parts").iterdir()))
    jobs.kill(jobs.family(process.pid))
    jobs.end(process)
    other.parent.mkdir()
    first.rename(other)
    for path in other.iterdir():
        os.utime(path, (1, 1))
    staged = ("--set", f"model.name={other}", "--set", "scripted.step_s=0")
    jobs.finish(spec, *staged)
    assert tuple(jobs.rows_of(out)) == jobs.unhurt()
    for name, altered in alterations(other).items():
        kept = (other / name).read_bytes()
        assert altered != kept
        (other / name).write_bytes(altered)
        assert_refused(jobs.run("run", spec, *staged), "  model: the job has a model with content ")
        (other / name).write_bytes(kept)
    jobs.finish(spec, *staged)


def alterations(folder: pathlib.Path) -> dict[str, bytes]:
    """By file, what it might be: each as small a change as can be."""
    weights = (folder / "model.safetensors").read_bytes()
    header, start = model_files.read_header(folder / "model.safetensors")
    name = next(name for name, tensor in header.items() if tensor["dtype"] == "BF16")
    place = weights.index(b'"BF16"', weights.index(json.dumps(name).encode()))
    assert place < start
    return {
        "config.json": (folder / "config.json").read_bytes().replace(b"1e-06", b"1e-05"),
        "tokenizer_config.json": (folder / "tokenizer_config.json").read_bytes().replace(b"2048", b"2047"),
        "model.safetensors": weights[:place] + b'"F16" ' + weights[place + 6 :],
    }


def test_weights_that_are_not_whole_are_said_before_an_engine_starts(tmp_path: pathlib.Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(jobs.MODEL, model)
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused = jobs.run("run", jobs.spec_of(tmp_path, model=str(model), scripted=None), is_refused=True)
    assert_refused(
        refused,
        f"the weights of '{model}' are not whole: model-00002-of-00002.safetensors is missing. Copy them again, or get "
        f"them with `hf download ORG/MODEL --local-dir {model}`\n",
    )
    assert not any((tmp_path / "out" / "logs").iterdir())

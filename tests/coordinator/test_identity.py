"""No finished job has rows of two models: no result is stored before the digests of local files are durable."""

import json
import os
import pathlib
import shutil
import subprocess
import time

import pytest
from adapters import make_adapter

import jobs
from batchinf.base.slices import FILES_RECORD
from batchinf.model import files as model_files
from batchinf.model.model import resolve
from batchinf.spec.file import read_spec

MODULES = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
DENSE = "2_Dense/model.safetensors"
SLOWLY = {"scripted": {"step_s": 0.004}, "output": {"rows_per_shard": 50}}
AT_ONCE = ("--set", "scripted.step_s=0")


def model_in(folder: pathlib.Path) -> pathlib.Path:
    """A copy of the sample model, with a dense layer behind it."""
    model = folder / "model"
    shutil.copytree(jobs.MODEL, model)
    (model / "modules.json").write_text(json.dumps(MODULES))
    (model / "2_Dense").mkdir()
    (model / DENSE).write_bytes(os.urandom(500))
    return model


def zero_a_third(weights: pathlib.Path) -> None:
    """Zero the first third of each tensor of a safetensors file, in place."""
    tensors, start = model_files.read_header(weights)
    with weights.open("r+b") as file:
        for tensor in tensors.values():
            first, last = tensor["data_offsets"]
            file.seek(start + first)
            file.write(bytes((last - first) // 3))


def killed_at_work(spec: pathlib.Path) -> None:
    """Run a job until it has stored rows, and kill all of its processes."""
    process = jobs.start("run", spec)
    parts = pathlib.Path(read_spec(spec).spec.output.path) / "parts"
    jobs.wait_until(lambda: (parts.is_dir() and any(parts.iterdir())) or process.poll() is not None)
    jobs.kill(jobs.family(process.pid))
    jobs.end(process)
    assert any(parts.iterdir())


def refused(spec: pathlib.Path, *words: str) -> None:
    done = jobs.run("run", spec, *AT_ONCE)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr.partition("error: ")[2]


def results_in(out: pathlib.Path) -> list[str]:
    """Names of all files with results."""
    return [path.name for name in ("parts", "staging", "journal") for path in (out / name).glob("*")]


def test_weights_that_are_zeroed_between_kill_and_resume_are_refused(tmp_path: pathlib.Path) -> None:
    model = model_in(tmp_path)
    spec = jobs.spec_of(tmp_path, model=str(model), **SLOWLY)
    killed_at_work(spec)
    before, kept = list((tmp_path / "out" / "parts").iterdir()), shutil.copytree(model, tmp_path / "kept")
    weights, dense, template = (model / name for name in ("model.safetensors", DENSE, "chat_template.jinja"))
    fingerprint = resolve(read_spec(spec).spec.model).fingerprint
    zero_a_third(weights)
    dense.write_bytes(bytes(500))
    assert resolve(read_spec(spec).spec.model).fingerprint == fingerprint  # the header's does not tell
    words = "its bytes are not those that the job began with"
    refused(spec, f"  {DENSE}: {words} ({dense})\n", f"  model.safetensors: {words} ({weights})\n")
    template.write_text("{{ messages }}")
    refused(spec, "  model: the job has a model with content", f"  chat_template.jinja: {words} ({template})\n")
    assert all(part.exists() for part in before)
    shutil.copytree(kept, model, dirs_exist_ok=True)
    # These files have the bytes of the first ones again, and other times.
    jobs.finish(spec, *AT_ONCE)
    assert jobs.rows_of(tmp_path / "out") == list(jobs.unhurt())


def test_an_adapter_of_other_bytes_is_refused(tmp_path: pathlib.Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", 1)
    spec = jobs.spec_of(tmp_path, model={"name": str(jobs.MODEL), "lora": str(adapter)}, **SLOWLY)
    killed_at_work(spec)
    zero_a_third(adapter / "adapter_model.safetensors")
    refused(spec, "  lora/lora/adapter_model.safetensors: its bytes are not those that the job began with")


@pytest.mark.slow
def test_an_adapter_that_changes_while_rows_run_is_refused(tmp_path: pathlib.Path) -> None:
    # vLLM reads adapters again if it has more of them than fit into its memory.
    adapter = make_adapter(tmp_path / "adapter", 1)
    spec = jobs.spec_of(tmp_path, model={"name": str(jobs.MODEL), "lora": str(adapter)}, **SLOWLY)
    process = jobs.start("run", spec)
    jobs.wait_until(lambda: any((tmp_path / "out" / "parts").glob("*")) or process.poll() is not None)
    os.utime(adapter / "adapter_model.safetensors")
    code, _, errors = jobs.end(process)
    assert code == 2, errors
    assert "adapter_model.safetensors was changed while the job ran" in errors.partition("error: ")[2]
    jobs.finish(spec, *AT_ONCE)  # it has the same bytes


def held(spec: pathlib.Path, marker: pathlib.Path, where: str, *more: str) -> "subprocess.Popen[str]":
    """Start a job that stands still at a fault point."""
    process = jobs.start("run", spec, *more, faults=f"{where}=hold {marker}")
    jobs.wait_until(lambda: (marker.exists() and marker.read_text()) or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    return process


def test_results_wait_until_the_digests_are_durable(tmp_path: pathlib.Path) -> None:
    out, marker = tmp_path / "out", tmp_path / "held"
    spec = jobs.spec_of(tmp_path, model=str(model_in(tmp_path)), checkpoint_interval_s=0.1)
    process = held(spec, marker, "content.digest")
    # Most rows run, and no result is stored in ten intervals.
    jobs.wait_until(lambda: jobs.snapshot_of(out).get("num_output_tokens", 0) > 2000 or process.poll() is not None)
    time.sleep(1.0)
    assert process.poll() is None, process.communicate()
    assert results_in(out) == []
    assert not jobs.state_of(out).files
    marker.unlink()
    code, _, errors = jobs.end(process)
    assert code == 0, errors
    assert "results wait in memory until all bytes of the model's files are read: 0 " in errors
    assert set(jobs.state_of(out).files) >= {"model.safetensors", DENSE, "tokenizer.json"}
    assert jobs.rows_of(out) == list(jobs.unhurt())


@pytest.mark.slow
def test_a_stop_while_results_wait(tmp_path: pathlib.Path) -> None:
    out, marker = tmp_path / "out", tmp_path / "held"
    spec = jobs.spec_of(tmp_path, model=str(model_in(tmp_path)), drain_timeout_s=60, **SLOWLY)
    process = held(spec, marker, "content.digest")
    jobs.wait_until(lambda: jobs.snapshot_of(out).get("num_output_tokens", 0) > 500 or process.poll() is not None)
    process.terminate()
    jobs.wait_until(lambda: jobs.snapshot_of(out).get("state") in ("stopping", "ending"))
    assert results_in(out) == []
    # The digests are there in time: what has finished is stored.
    marker.unlink()
    code, _, errors = jobs.end(process)
    assert code == 75, errors
    assert results_in(out)
    jobs.finish(spec, *AT_ONCE)
    assert jobs.rows_of(out) == list(jobs.unhurt())


STEPS = ("content.digest", "content.digest:2", "identity.before_line", "identity.after_line", "journal.before_fsync",
         "coordinator.before_publish")  # fmt: skip


@pytest.mark.parametrize("step", [STEPS[2], *jobs.slowly(*STEPS[:2], *STEPS[3:])])
def test_killed_at_a_step(step: str, tmp_path: pathlib.Path) -> None:
    model, marker, out = model_in(tmp_path), tmp_path / "held", tmp_path / "out"
    spec = jobs.spec_of(tmp_path, model=str(model), output={"rows_per_shard": 60})
    process = held(spec, marker, step)
    time.sleep(0.5)
    has_line = bool(jobs.state_of(out).files) if (out / "job.yaml").exists() else False
    assert has_line == (step not in STEPS[:3])
    assert has_line or results_in(out) == []
    everyone = jobs.family(process.pid)
    jobs.kill(everyone)
    process.communicate()
    assert jobs.are_gone(everyone)
    # Weights of another model are refused from the line on. Before it, no row is stored yet.
    kept = (model / "model.safetensors").read_bytes()
    zero_a_third(model / "model.safetensors")
    if has_line:
        refused(spec, "  model.safetensors: its bytes are not those that the job began with")
        (model / "model.safetensors").write_bytes(kept)
    jobs.finish(spec)
    assert jobs.rows_of(out) == list(jobs.unhurt())


@pytest.mark.slow
def test_a_resume_with_unchanged_files_reads_no_weights(tmp_path: pathlib.Path) -> None:
    model = model_in(tmp_path)
    spec = jobs.spec_of(tmp_path, model=str(model), **SLOWLY)
    time.sleep(2.1)  # digests of files that have just changed are not kept
    killed_at_work(spec)
    assert jobs.finish(spec, *AT_ONCE, faults="content.digest=kill")
    assert jobs.rows_of(tmp_path / "out") == list(jobs.unhurt())
    # Other bytes are refused before an engine starts.
    before = len(jobs.events_of(tmp_path / "out", "replica_started"))
    (model / DENSE).write_bytes(bytes(500))
    assert jobs.run("run", spec).returncode == 0  # it is done, and no row runs
    retry = jobs.run("run", spec, "--retry", "row_index < 9", *AT_ONCE)
    assert retry.returncode == 2
    assert f"{DENSE}: its bytes are not" in retry.stderr
    assert len(jobs.events_of(tmp_path / "out", "replica_started")) <= before + 2


def test_a_file_that_changes_while_an_engine_loads_it_is_refused(tmp_path: pathlib.Path) -> None:
    model, marker = model_in(tmp_path), tmp_path / "held"
    spec = jobs.spec_of(tmp_path, model=str(model), parallel={"data_parallel_size": 1})
    process = held(spec, marker, "engine.start")
    zero_a_third(model / "model.safetensors")
    marker.unlink()
    code, _, errors = jobs.end(process)
    assert code == 2, errors
    assert f"{model / 'model.safetensors'} was changed while the job ran" in errors.partition("error: ")[2]
    assert results_in(tmp_path / "out") == []


@pytest.mark.slow
def test_slices_are_of_one_model(tmp_path: pathlib.Path) -> None:
    model = model_in(tmp_path)
    spec = jobs.spec_of(tmp_path, model=str(model), scripted={"step_s": 0.0})
    first = jobs.run("run", spec, "--slice", "0/2")
    assert first.returncode == 0, first.stderr
    kept = (model / "model.safetensors").read_bytes()
    zero_a_third(model / "model.safetensors")
    second = jobs.run("run", spec, "--slice", "1/2")
    assert second.returncode == 2, second.stderr
    assert "holds slices of a job" in second.stderr
    assert "  model.safetensors: its bytes are not those that the job began with" in second.stderr
    (model / "model.safetensors").write_bytes(kept)
    assert jobs.run("run", spec, "--slice", "1/2").returncode == 0
    rows = [row for number in range(2) for row in jobs.rows_of(tmp_path / "out" / f"slice-{number}")]
    assert rows == list(jobs.unhurt())
    # A bit that has flipped in the record is noticed. A slice that has begun writes a new one.
    record = tmp_path / "out" / FILES_RECORD
    kept = record.read_bytes()
    record.write_bytes(kept.replace(b'"model.safetensors": "', b'"model.safetensors": "0'))
    again = jobs.run("run", spec, "--slice", "1/2", "--fresh")
    assert again.returncode == 2
    assert f"{record} is damaged" in again.stderr
    checked = jobs.run("check", tmp_path / "out")
    assert (checked.returncode, f"{record} is damaged" in checked.stderr) == (2, True)
    record.unlink()
    jobs.finish(spec, "--slice", "0/2", "--retry", "row_index = 0")
    assert record.read_bytes() == kept


@pytest.mark.slow
def test_a_repaired_manifest_keeps_the_digests(tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, **SLOWLY), tmp_path / "out"
    killed_at_work(spec)
    before = jobs.state_of(out).files
    [log] = (out / "manifest").iterdir()
    data = bytearray(log.read_bytes())
    place = data.index(b'"kind": "part"' if b'"kind": "part"' in data else b'"kind":"part"')
    data[place + 20] ^= 1
    log.write_bytes(data)
    jobs.run("check", out, "--repair")
    assert before
    assert jobs.state_of(out).files == before

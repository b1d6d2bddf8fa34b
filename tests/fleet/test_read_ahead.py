"""Weights are read into the machine's memory before anything waits for them."""

import os
import pathlib
import types

import pytest

import jobs
from batchinf.fleet.local import backend as local
from batchinf.job import open as job_open
from batchinf.model.model import Model
from batchinf.spec.file import read_spec

BLOCK = local._BLOCK_BYTES
NUM_BLOCKS = 8


def model_at(path: pathlib.Path | str) -> Model:
    return Model("m", str(path), None, "", {}, {}, False, None, None, str(path))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "model.safetensors").write_bytes(os.urandom(BLOCK * NUM_BLOCKS - 100))
    (tmp_path / "training_args.bin").write_bytes(b"no weights")
    return tmp_path


def bytes_read() -> int:
    line = next(line for line in pathlib.Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def test_all_weights_are_read(folder: pathlib.Path) -> None:
    before = bytes_read()
    thread = local.read_ahead(model_at(folder), "auto")
    assert thread is not None
    thread.join(120)
    assert not thread.is_alive()
    assert bytes_read() - before >= BLOCK * NUM_BLOCKS - 100


def test_where_nothing_is_read(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local.read_ahead(model_at(folder), "dummy") is None
    assert local.read_ahead(model_at("org/on-the-hub"), "auto") is None
    memory = types.SimpleNamespace(available=BLOCK * NUM_BLOCKS)
    monkeypatch.setattr(local.psutil, "virtual_memory", lambda: memory)
    assert local.read_ahead(model_at(folder), "auto") is None


def test_the_model_is_known_before_the_input_is_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_open, "open_job_input", lambda *_, **__: 1 / 0)
    prepared = job_open.prepare_job(read_spec(jobs.spec_of(tmp_path)))
    assert prepared.model.path == str(jobs.MODEL)
    with pytest.raises(ZeroDivisionError):
        job_open.open_input(prepared)

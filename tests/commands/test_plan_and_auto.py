"""`plan` and degrees of `auto` make the same choice, with the same reason, for 40 jobs on GPUs that are not here."""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch  # noqa: F401  # with these two here, models are counted in this process
import transformers  # noqa: F401
from model_configs import GPT_OSS_120B, QWEN3_235B_FP8

import jobs
from batchinf.base.errors import SpecError
from batchinf.commands.plan import PlanOptions, make_plan
from batchinf.fleet.local.backend import LocalBackend
from batchinf.fleet.parallel import with_degrees
from batchinf.model import memory
from batchinf.model.parameters import Described, described
from batchinf.planning.degrees import shape_text
from batchinf.planning.gpus import gpu_named
from batchinf.spec.file import read_spec
from benchmarks.shapes import SHAPES

MODELS = {**SHAPES, "gpt-oss-120b": GPT_OSS_120B, "qwen3-235b-fp8": QWEN3_235B_FP8}
AUTO = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), "auto")
LABEL = {"temperature": 0.0, "max_tokens": 200, "structured_outputs": {"choice": ["yes", "no"]}}
JOBS: dict[str, dict[str, Any]] = {
    "short outputs": {"engine": {"max_model_len": 4096}},
    "long outputs": {"sampling": {"temperature": 0.0, "max_tokens": 2000}, "engine": {"max_model_len": 8192}},
    "labels": {"sampling": LABEL, "engine": {"max_model_len": 2048, "gpu_memory_utilization": 0.85}},
    "two replicas": {"parallel": {"data_parallel_size": 2}, "engine": {"max_model_len": 4096}},
    "a pipeline of two": {"parallel": {"pipeline_parallel_size": 2}, "engine": {"max_model_len": 4096}},
    "vectors": {"task": "embed", "sampling": None, "output": {}, "engine": {"max_model_len": 4096}},
    "FP8": {"model": {"quantization": "fp8"}, "engine": {"max_model_len": 8192, "kv_cache_dtype": "fp8"}},
}
# model, job, and GPUs with their number
CASES = [
    ("llama-3.3-70b", "short outputs", ("a100-80 8", "h200 8", "h100-80 4", "a100-80 1")),
    ("llama-3.3-70b", "long outputs", ("a100-80 8", "h100-80 8", "l40s 8", "b200 2")),
    ("llama-3.3-70b", "labels", ("a100-80 2", "h100-80 8", "a100-40 8", "rtx-4090 8")),
    ("llama-3.3-70b", "FP8", ("h100-80 1", "h100-80 2", "h200 1", "l40s 4")),
    ("llama-3.1-8b", "long outputs", ("l4 4", "rtx-4090 2", "a10 8", "t4 8")),
    ("llama-3.1-8b", "two replicas", ("h100-80 8", "a100-40 1", "l4 8", "a6000 3")),
    ("qwen3-32b", "a pipeline of two", ("a100-40 8", "l40s 6", "h100-80 2", "a100-80 1")),
    ("qwen3-0.6b", "vectors", ("h100-80 4", "h200 1", "l4 2", "a10 16")),
    ("qwen3-235b-fp8", "short outputs", ("h100-80 8", "h100-80 4", "h200 8", "h200 16")),
    ("gpt-oss-120b", "long outputs", ("h100-80 1", "h100-80 8", "a100-80 2", "l40s 8")),
]


class Devices(LocalBackend):
    """Devices of one kind, which only this class sees."""

    def __init__(self, number: int, gpu: str) -> None:
        super().__init__()
        self._number, self._gpu = number, gpu_named(gpu)

    def devices(self) -> tuple[str, ...]:
        return tuple(map(str, range(self._number)))

    def device_size(self, device: str) -> tuple[int | None, str]:
        return self._gpu.memory_bytes, f"NVIDIA {self._gpu.title}"


@functools.cache
def _described(config: str) -> Described:
    return described(json.loads(config))


@pytest.fixture(autouse=True)
def _counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count each model once: a model of 70B takes a second."""

    def once(config: Mapping[str, Any], **_: Any) -> Described:
        return _described(json.dumps(config, sort_keys=True))

    monkeypatch.setattr(memory, "described", once)


def spec_of(folder: pathlib.Path, model: str, job: str) -> pathlib.Path:
    """A job with the sample's tokenizer, and the config of this model in place of the sample's."""
    place = folder / "model"
    place.mkdir()
    for path in jobs.MODEL.iterdir():
        if path.suffix == ".json" and path.name != "config.json":
            (place / path.name).symlink_to(path.resolve())
    (place / "config.json").write_text(json.dumps(MODELS[model]))
    sections = dict(JOBS[job])
    given = {"name": str(place), "load_format": "dummy", **sections.pop("model", {})}
    return jobs.spec_of(
        folder, scripted=None, model=given, parallel={**AUTO, **sections.pop("parallel", {})}, **sections
    )


@pytest.mark.parametrize(("model", "job", "machines"), CASES, ids=lambda it: it if isinstance(it, str) else "")
def test_plan_and_auto_choose_alike(model: str, job: str, machines: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    path = spec_of(tmp_path, model, job)
    for machine in machines:
        gpu, number = machine.split()
        [plan] = make_plan(str(path), (), PlanOptions(gpus=(gpu,), gpus_per_node=int(number))).gpus
        said: list[str] = []
        if plan.chosen is None:
            with pytest.raises(SpecError):
                with_degrees(read_spec(path), Devices(int(number), gpu), said.append)
            continue
        file = with_degrees(read_spec(path), Devices(int(number), gpu), said.append)
        degrees = plan.chosen.degrees
        assert file.spec.parallel.sizes == (degrees.tensor, degrees.pipeline), machine
        shape = shape_text(degrees, plan.chosen.data)
        used = plan.chosen.data * degrees.num_devices
        [line] = said
        assert line.startswith(f"parallel: {shape} on {used} GPUs: {plan.reason}; weights "), machine

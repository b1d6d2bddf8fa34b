"""`auto` for the degrees, and what is refused, on devices that are not here."""

import dataclasses
import pathlib
from typing import Any

import pytest
import torch  # noqa: F401  # with these two here, models are counted in this process
import transformers  # noqa: F401
from fleets import Devices
from model_configs import model_folder

import jobs
from batchinf.base.errors import SpecError
from batchinf.engines.installed import is_cpu_build
from batchinf.fleet.parallel import check_devices, check_processor, choose_degrees, with_degrees
from batchinf.model.memory import fit_of
from batchinf.model.model import resolve
from batchinf.planning.degrees import Machine
from batchinf.planning.gpus import gpu_named
from batchinf.planning.throughput import Workload
from batchinf.spec.file import SpecFile, read_spec
from batchinf.spec.job import JobSpec
from benchmarks.shapes import SHAPES


def spec_of(folder: pathlib.Path, shape: str | None = None, **sections: Any) -> SpecFile:
    """A job with the sample's tokenizer, and a config of this shape in place of the sample's."""
    parallel = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), "auto")
    model = {"name": str(jobs.MODEL), "load_format": "dummy"}
    if shape is not None:
        model["name"] = str(model_folder(folder / "model", SHAPES[shape]))
    given = {"model": {**model, **sections.pop("model", {})}, "parallel": {**parallel, **sections.pop("parallel", {})}}
    given["engine"] = {"max_model_len": 8192, **sections.pop("engine", {})}
    return read_spec(jobs.spec_of(folder, scripted=None, **given, **sections))


def test_70b_on_eight_h200_by_auto(tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    rows = {"path": str(jobs.PROMPTS), "limit": 240}
    file = with_degrees(spec_of(tmp_path, "llama-3.3-70b", input=rows), backend=Devices(8, "h200"), say=said.append)
    assert file.spec.parallel.sizes == (2, 1)
    assert said == [
        "parallel: tensor 2 × data 4 on 8 GPUs: the fewest GPUs that hold the model, and no larger degree predicts "
        "clearly more tokens a second; limited by memory (for prompts of 38 and outputs of 32 tokens); weights 65.7 "
        "GiB a GPU, 399,169 tokens of cache for each replica"
    ]


def test_a_small_model_takes_one_device_each(tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    assert with_degrees(spec_of(tmp_path), backend=Devices(4, "h200"), say=said.append).spec.parallel.sizes == (1, 1)
    assert said[0].startswith("parallel: tensor 1 × data 4 on 4 GPUs")


def test_without_devices_auto_is_one(tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    assert with_degrees(spec_of(tmp_path), backend=Devices(0, "h200"), say=said.append).spec.parallel.sizes == (1, 1)
    assert not said


def test_what_the_spec_fixes_is_kept(tmp_path: pathlib.Path) -> None:
    fixed = spec_of(tmp_path, "llama-3.3-70b", parallel={"pipeline_parallel_size": 1, "data_parallel_size": 2})
    assert with_degrees(fixed, backend=Devices(8, "h200"), say=lambda line: None).spec.parallel.sizes[1] == 1


def test_too_few_devices_are_one_line_with_the_place(tmp_path: pathlib.Path) -> None:
    file = spec_of(tmp_path, "llama-3.3-70b")
    with pytest.raises(SpecError, match=r"tensor_parallel_size: got auto, but weights of 131\.4 GiB .* needs 2:") as it:
        with_degrees(file, backend=Devices(1, "h200"), say=lambda line: None)
    assert "\n" not in str(it.value)


def test_where_the_cache_is_starved_a_larger_degree_is_taken(tmp_path: pathlib.Path) -> None:
    """Few sequences fit beside the weights on one card, many beside half of them."""
    file = spec_of(tmp_path, "llama-3.1-8b", engine={"max_model_len": 256})
    gpu, work = gpu_named("h200"), Workload(10_000, 128, 128, 128)
    # An H200 of which others use nearly all: 0.9 GB are left for the cache.
    starved = fit_of(resolve(file.spec.model), file.spec, 20_778 << 20, gpu.title)
    machine = Machine(gpu, 4, 1, 0.92)
    chosen, reason = choose_degrees(file, starved, machine, work)
    assert chosen.degrees.tensor > 1
    assert "times the tokens a second of tensor 1 × data 4, which is limited by the cache" in reason
    roomy = dataclasses.replace(starved, device_bytes=gpu.memory_bytes)
    assert choose_degrees(file, roomy, machine, work)[0].degrees.tensor == 1


def on(gpu: str, tmp_path: pathlib.Path, **sections: Any) -> list[str]:
    spec = spec_of(tmp_path, **sections).spec
    device = gpu_named(gpu)
    fit = fit_of(resolve(spec.model), spec, device.memory_bytes, f"NVIDIA {device.title}")
    return list(check_devices(spec, fit, 1))


def test_types_that_a_device_lacks_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SpecError, match=r"model\.dtype: got bfloat16, .*RTX 2080 Ti cannot run it: no bfloat16; set"):
        on("rtx-2080-ti", tmp_path, model={"dtype": "bfloat16"})
    assert not on("rtx-2080-ti", tmp_path, model={"dtype": "float16"})
    with pytest.raises(SpecError, match=r"model\.dtype: .*V100.*7\.5"):
        on("v100-32", tmp_path, model={"dtype": "float16"})
    with pytest.raises(SpecError, match=r"engine\.kv_cache_dtype: got fp8, .*A100.*8\.9"):
        on("a100-80", tmp_path, engine={"kv_cache_dtype": "fp8"})
    assert not on("h100-80", tmp_path, engine={"kv_cache_dtype": "fp8"})
    assert "16 bits" in on("a100-80", tmp_path, model={"quantization": "fp8"})[0]


def test_ranks_without_nvlink_get_a_warning(tmp_path: pathlib.Path) -> None:
    [line] = on("rtx-4090", tmp_path, parallel={"tensor_parallel_size": 2})
    assert "no NVLink" in line and "pipeline_parallel_size" in line
    assert not on("h100-80", tmp_path, parallel={"tensor_parallel_size": 2})


def test_offload_beyond_the_hosts_memory_is_refused(tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path, "llama-3.3-70b", engine={"cpu_offload_gb": 10_000}).spec
    fit = fit_of(resolve(spec.model), spec, gpu_named("h200").memory_bytes, "NVIDIA H200")
    with pytest.raises(SpecError, match=r"engine\.cpu_offload_gb: got 10000, which takes 1,051\.3 GiB"):
        list(check_devices(spec, fit, 8))


def test_heads_that_do_not_divide_are_refused_with_the_legal_degrees(tmp_path: pathlib.Path) -> None:
    path = jobs.spec_of(tmp_path, scripted=None, parallel={"tensor_parallel_size": 3, "data_parallel_size": 1})
    for command in ("validate", "run"):
        done = jobs.run(command, path, is_refused=True)
        assert done.returncode == 2
        [line] = done.stderr.strip().splitlines()[-1:]
        assert "parallel.tensor_parallel_size: got 3" in line and "must be one of 1, 2" in line
        assert f"{path}:" in line


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"engine": {"max_num_batched_tokens": 511}}, "max_num_batched_tokens"),
        ({"engine": {"max_num_batched_tokens": 512, "enable_chunked_prefill": True}}, "enable_chunked_prefill"),
        ({"engine": {"enable_chunked_prefill": None}}, "enable_chunked_prefill"),
        ({"engine": {"speculative_config": {"method": "ngram"}}}, "speculative_config"),
        ({"engine": {"speculative_config": {"method": "ngram"}, "enable_chunked_prefill": False}},
         "speculative_config"),
        ({"sampling": {"temperature": 0.0}, "engine": {"speculative_config": {"method": "ngram"}}}, None),
        ({"sampling": {"temperature": 0.0, "columns": {"temperature": "t"}},
          "engine": {"max_num_batched_tokens": 511}}, "max_num_batched_tokens"),
        ({"sampling": {"temperature": 0.0}, "input": {"path": "x", "format": "openai"},
          "engine": {"max_num_batched_tokens": 511}}, "max_num_batched_tokens"),
        ({"engine": {"max_num_batched_tokens": 512}}, None),
        ({"engine": {}}, None),
        ({"sampling": {"temperature": 0.0}, "engine": {"max_num_batched_tokens": 64}}, None),
        ({"sampling": {"temperature": 0.0}, "engine": {"enable_chunked_prefill": True}}, None),
        ({"task": "embed", "sampling": {}, "engine": {"max_num_batched_tokens": 64}}, None),
        ({"scripted": {}, "engine": {"max_num_batched_tokens": 64}}, None),
    ],
)  # fmt: skip
def test_settings_that_sampled_rows_cannot_have_on_a_processor(sections: dict[str, Any], field: str | None) -> None:
    given = {"model": {"name": "m"}, "task": "generate", "input": {"path": "x"}, "output": {"path": "y"},
             "sampling": {"temperature": 0.8}}  # fmt: skip
    spec = JobSpec.model_validate({**given, **sections})
    if field is None:
        check_processor(spec, 512)
        return
    with pytest.raises(SpecError, match=rf"^engine\.{field}: got .* (its engine dies|wrong tokens)"):
        check_processor(spec, 512)


def test_a_job_whose_prompts_would_be_cut_starts_no_engine(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    if not is_cpu_build():
        pytest.skip("not on a processor")
    engine = {"max_model_len": 512, "max_num_batched_tokens": 64}
    spec = jobs.spec_of(tmp_path, scripted=None, engine=engine, sampling={"temperature": 0.8})
    for command in ("validate", "run"):
        done = jobs.run(command, spec, is_refused=True)
        assert done.returncode == 2
        assert "engine.max_num_batched_tokens: got 64, less than max_model_len 512" in done.stderr
        piped = jobs.run(command, spec, "--set", "parallel.pipeline_parallel_size=2", is_refused=True)
        assert piped.returncode == 2
        assert "parallel.pipeline_parallel_size: got 2, but no CUDA device is visible" in piped.stderr
    assert not list((tmp_path / "out").glob("logs/*"))

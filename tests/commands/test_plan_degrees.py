"""Degrees of `plan` on GPUs that are not here: what it chooses and leaves out, and that `auto` chooses the same."""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch  # noqa: F401  # with these two here, models are counted in this process
import transformers  # noqa: F401
from fleets import Devices
from model_configs import GPT_OSS_120B, QWEN3_235B_FP8, model_folder

import jobs
from batchinf.base import process
from batchinf.base.errors import SpecError, UserError
from batchinf.commands.plan import plan
from batchinf.commands.plan.plan import PlanOptions, make_plan
from batchinf.commands.plan.report import PlanReport
from batchinf.fleet.parallel import with_degrees
from batchinf.model import memory
from batchinf.model.model import resolve
from batchinf.model.parameters import Described, described
from batchinf.planning.degrees import shape_text
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


@functools.cache
def _described(config: str) -> Described:
    return described(json.loads(config))


@pytest.fixture(autouse=True)
def _counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count each model once: a model of 70B takes a second."""

    def once(config: Mapping[str, Any], **_: Any) -> Described:
        return _described(json.dumps(config, sort_keys=True))

    monkeypatch.setattr(memory, "described", once)


def model_of(folder: pathlib.Path, model: str) -> pathlib.Path:
    """A folder with this model's config and the sample's tokenizer."""
    return model_folder(folder / "model", MODELS[model])


def spec_of(folder: pathlib.Path, model: str, job: str) -> pathlib.Path:
    sections = dict(JOBS[job])
    given = {"name": str(model_of(folder, model)), "load_format": "dummy", **sections.pop("model", {})}
    return jobs.spec_of(
        folder, scripted=None, model=given, parallel={**AUTO, **sections.pop("parallel", {})}, **sections
    )


def _slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "job", "machines"),
    [*CASES[:2], *(_slow(*case) for case in CASES[2:])],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_plan_and_auto_choose_alike(model: str, job: str, machines: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    path = spec_of(tmp_path, model, job)
    for machine in machines:
        gpu, number = machine.split()
        [plan] = make_plan(str(path), (), PlanOptions(gpus=(gpu,), gpus_per_node=int(number))).gpus
        said: list[str] = []
        if plan.chosen is None:
            with pytest.raises(SpecError):
                with_degrees(read_spec(path), backend=Devices(int(number), gpu), say=said.append)
            continue
        file = with_degrees(read_spec(path), backend=Devices(int(number), gpu), say=said.append)
        degrees = plan.chosen.degrees
        assert file.spec.parallel.sizes == (degrees.tensor, degrees.pipeline), machine
        shape = shape_text(degrees, plan.chosen.data)
        used = plan.chosen.data * degrees.num_devices
        [line] = said
        assert line.startswith(f"parallel: {shape} on {used} GPUs: {plan.reason}; weights "), machine


def planned(place: pathlib.Path, gpu: str, number: int | None = None, **given: Any) -> PlanReport:
    """The plan of a model. given: degrees of the spec."""
    sets = {f"parallel.{name}_parallel_size": value for name, value in given.items()}
    return make_plan(str(place), sets, PlanOptions(gpus=(gpu,), gpus_per_node=number, context=8192))


def test_a_model_without_a_job_is_planned_for_assumed_lengths(tmp_path: pathlib.Path) -> None:
    choice = planned(model_of(tmp_path, "llama-3.3-70b"), "a100-80", 8).choice
    assert choice.startswith("8 × A100 SXM 80 GB: tensor 4 × data 2: 1.")
    assert "times the tokens a second of tensor 2 × data 4, which is limited by the cache" in choice
    assert choice.endswith("(for assumed prompts of 1,024 and outputs of 256 tokens)")


def test_numbers_of_the_spec_win_over_faster_degrees(tmp_path: pathlib.Path) -> None:
    place = model_of(tmp_path, "llama-3.3-70b")
    fixed = planned(place, "a100-80", 8, tensor=8)
    [option] = fixed.gpus[0].options
    assert (option.degrees.tensor, option.data) == (8, 1)
    assert ": tensor 8 × data 1: the degrees that the spec gives; limited by " in fixed.choice
    one = planned(place, "h200", 8, tensor=2, data=1)
    assert one.choice.startswith("2 of 8 × H200 SXM: tensor 2 × data 1: ")
    [plan] = planned(place, "a100-80", 8, tensor=1).gpus
    assert plan.chosen is None and plan.cells()[2:] == ("no", "63.0 GiB a GPU are missing")
    [plan] = planned(place, "a100-80", 2, data=2).gpus
    assert plan.cells()[2:] == ("2", "not on 2: tensor 2 × data 2 takes 4 GPUs")
    assert planned(place, "a100-80", data=2).choice.startswith("4 × A100 SXM 80 GB: tensor 2 × data 2")
    pipeline = planned(place, "h200", 4, pipeline=2)
    assert all(it.degrees.pipeline == 2 for it in pipeline.gpus[0].options) and pipeline.gpus[0].chosen is not None
    with pytest.raises(
        SpecError, match=r"tensor_parallel_size: got 3, but the number of attention heads \(64\) cannot"
    ):
        planned(place, "a100-80", 8, tensor=3)


def test_a_job_whose_spec_gives_no_degrees_is_told_what_run_takes(tmp_path: pathlib.Path) -> None:
    path = spec_of(tmp_path, "llama-3.3-70b", "short outputs")
    options = PlanOptions(gpus=("h200",), gpus_per_node=8)
    hint = "the spec gives no degrees, so `run` takes tensor 1 × pipeline 1"
    assert not any(note.startswith(hint) for note in make_plan(str(path), (), options).notes)
    spec = json.loads(path.read_text())
    path.write_text(json.dumps({**spec, "parallel": {}}))
    assert any(note.startswith(hint) for note in make_plan(str(path), (), options).notes)


def test_degrees_that_cut_blocks_are_left_out_with_the_reason(tmp_path: pathlib.Path) -> None:
    place = model_of(tmp_path, "qwen3-235b-fp8")
    report = planned(place, "h100", 8)
    [plan] = report.gpus
    assert [it.degrees.tensor for it in plan.options] == [4]
    words = "the width of the experts, 1,536 / 8 = 192, is not a multiple of the 128 weights that share a scale"
    assert report.notes == (f"tensor 8 is left out: {words}; engine.enable_expert_parallel: true leaves experts whole",)
    given = planned(place, "h100", 8, tensor=8)
    assert given.notes == (f"warning: tensor 8: {words}: vLLM may refuse it, or be slower",)
    whole = {"engine.enable_expert_parallel": True}
    [plan] = make_plan(str(place), whole, PlanOptions(gpus=("h100",), gpus_per_node=8, context=8192)).gpus
    assert [it.degrees.tensor for it in plan.options] == [4, 8]


def test_nodes_and_pipelines_are_explained(tmp_path: pathlib.Path) -> None:
    place = model_of(tmp_path, "llama-3.3-70b")
    [note] = planned(place, "h200", 16).notes
    assert note == "--gpus 16: all in one node; for nodes of 8, give --gpus 8 --nodes 2"
    sets = {"parallel.devices": [0], "parallel.replicas_per_device": 2}
    notes = make_plan(str(place), sets, PlanOptions(gpus=("h200",), context=8192)).notes
    assert [note.split(" is not looked at")[0] for note in notes] == [*sets]
    assert not planned(place, "h200", 8).notes
    lines = list(planned(place, "t4", None).lines())
    assert not any(" × 2: tensor" in line for line in lines)
    spec = {"model.dtype": "float16"}
    lines = list(make_plan(str(place), spec, PlanOptions(gpus=("t4",), context=8192)).lines())
    assert next(line for line in lines if line.startswith("t4 ")).split()[2:5] == ["8", "×", "2"]
    assert "least 8 × 2: tensor 8 × pipeline 2, which is 16 GPUs" in lines


def test_a_sliding_window_is_explained_where_more_run_than_vllm_reports(tmp_path: pathlib.Path) -> None:
    report = planned(model_of(tmp_path, "gpt-oss-120b"), "h100")
    [plan] = report.gpus
    assert plan.chosen is not None
    degrees = plan.chosen.degrees
    # Of 36 layers, 18 keep 8,192 tokens, and 18 the window of 128 and one more block of 16.
    room = int(plan.gpu.memory_bytes * 0.92) - degrees.weight_bytes - degrees.step_bytes
    token = 2 * 8 * 64 * 2 * 18
    assert degrees.sequences == pytest.approx(room / (2 * token * 8192), rel=0.01)
    assert degrees.decoding == pytest.approx(room / (token * (8192 + 128 + 16)), rel=0.01)
    [line] = [line for line in report.lines() if line.startswith("seqs is vLLM's worst case")]
    assert line.endswith(f"h100-80 has room for {degrees.decoding:.1f}")


def test_outputs_of_labels_are_as_long_as_a_choice(tmp_path: pathlib.Path) -> None:
    path = spec_of(tmp_path, "llama-3.1-8b", "labels")
    labels = make_plan(str(path), (), PlanOptions(gpus=("h200",))).job
    assert labels is not None and labels.output < 10
    assert labels.output_from == "each output is as long as its longest choice"
    thinking = {"model.reasoning_parser": "qwen3"}
    job = make_plan(str(path), thinking, PlanOptions(gpus=("h200",))).job
    assert job is not None and job.output == 200
    assert labels.output_bytes < job.output_bytes / 5


def test_what_would_fit_is_what_a_plan_of_it_says(tmp_path: pathlib.Path) -> None:
    place = model_of(tmp_path, "llama-3.3-70b")
    asked = PlanOptions(gpus=("a100-80",), gpus_per_node=1, context=4096)
    report = make_plan(str(place), (), asked)
    assert report.gpus[0].chosen is None
    [fp8, four_bits, larger] = report.advice

    def of(settings: dict[str, Any], gpu: str) -> str:
        return make_plan(str(place), settings, dataclasses.replace(asked, gpus=(gpu,))).gpus[0].chosen_text

    assert fp8 == f"FP8 weights (model.quantization: fp8): {of({'model.quantization': 'fp8'}, 'a100-80')}"
    awq = of({"model.quantization": "awq", "model.load_format": "dummy"}, "a100-80")
    assert four_bits == f"a 4-bit checkpoint, such as an AWQ one: {awq}"
    assert larger == f"1 × B200 SXM: {of({}, 'b200')}"
    assert "to fit, or for more cache, on as many GPUs:" in list(report.lines())
    # It fits with 10,631 tokens of cache: eight sequences of the assumed lengths.
    few = make_plan(str(place), {"model.quantization": "fp8"}, asked)
    assert few.gpus[0].chosen is not None and [line.split(":")[0] for line in few.advice] == [
        "a 4-bit checkpoint, such as an AWQ one", "1 × H200 SXM",
    ]  # fmt: skip
    assert not planned(place, "h200", 8).advice


def test_degrees_of_the_spec_that_are_too_small_are_named(tmp_path: pathlib.Path) -> None:
    place = model_of(tmp_path, "llama-3.3-70b")
    report = planned(place, "a100-80", 8, tensor=1, data=2)
    assert report.gpus[0].chosen is None
    what_fits = planned(place, "a100-80", 8).gpus[0].chosen_text
    words = "other degrees than the spec's parallel (tensor_parallel_size 1, data_parallel_size 2)"
    assert report.advice[0] == f"{words}: {what_fits}"
    # `auto` and the default are not the user's choice, and a larger number does not help one GPU.
    for number, given in ((1, {"tensor": "auto"}), (1, {"tensor": 1})):
        assert not any("other degrees" in line for line in planned(place, "a100-80", number, **given).advice)


def test_whole_experts_are_advised_where_cut_ones_do_not_fit(tmp_path: pathlib.Path) -> None:
    place = model_of(tmp_path, "qwen3-235b-fp8")
    asked = PlanOptions(gpus=("l40s",), gpus_per_node=8, context=8192)
    without_pipelines = {"parallel.tensor_parallel_size": "auto", "parallel.pipeline_parallel_size": 1}
    report = make_plan(str(place), without_pipelines, asked)
    assert report.gpus[0].chosen is None
    degrees, experts, four_bits, *_ = report.advice
    assert degrees.startswith("other degrees than the spec's parallel (pipeline_parallel_size 1): tensor 4 × pipeline ")
    assert experts.startswith("whole experts (engine.enable_expert_parallel: true): tensor 8 × data 1: ")
    assert four_bits.startswith("a 4-bit checkpoint")


def test_weights_of_4_bits_are_not_advised_in_4_bits(tmp_path: pathlib.Path) -> None:
    place = model_of(tmp_path, "gpt-oss-120b")
    report = make_plan(str(place), (), PlanOptions(gpus=("h100-80",), gpus_per_node=1, context=8192))
    assert [line.split(":")[0] for line in report.advice] == ["1 × H100 NVL 94 GB"]


def test_a_slow_plan_says_what_it_does(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*arguments: Any) -> Any:
        time.sleep(1.0)
        return resolve(*arguments)

    monkeypatch.setattr(plan, "resolve", slowly)
    place = str(model_of(tmp_path, "llama-3.1-8b"))
    said: list[str] = []
    make_plan(place, (), PlanOptions(gpus=("h200",)), said.append)
    assert not any("config" in line for line in said)
    monkeypatch.setattr(process, "_SLOW_S", 0.1)
    make_plan(place, (), PlanOptions(gpus=("h200",)), said.append)
    assert f"reading the config of {place} …" in said


def test_a_price_needs_rows(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="price: a model alone has no rows, so it has no cost"):
        make_plan(str(model_of(tmp_path, "llama-3.1-8b")), (), PlanOptions(gpus=("h200",), price=2.0))

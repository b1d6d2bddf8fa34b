"""Which engine arguments and how many replicas on a device are chosen, where the spec leaves them open."""

import dataclasses
import itertools
import os
import pathlib
from typing import Any

import pytest

from batchinf.base.errors import SpecError
from batchinf.engines.protocol import DEVICE_LOCK
from batchinf.fleet.devices import Slot
from batchinf.fleet.engine_defaults import (
    chosen_arguments,
    graph_sizes,
    prompt_graph_sizes,
    replicas_per_device,
    values,
)
from batchinf.fleet.local.devices import slots_on
from batchinf.fleet.local.environment import process_environment
from batchinf.fleet.memory.engine_settings import EngineSettings, applies_to, kept
from batchinf.fleet.memory.out_of_memory import OutOfMemory
from batchinf.fleet.memory.step_down import effective, step_down
from batchinf.manifest.lines import Lowered
from batchinf.model.cache import LayerState, kv_cache_of
from batchinf.model.memory import GIB, Fit
from batchinf.model.weights import Weights
from batchinf.spec.job import WHOLE_STEPS, JobSpec
from batchinf.tasks.registry import task_of
from benchmarks.shapes import SHAPES

CONFIG = SHAPES["qwen3-0.6b"]
CACHE = kv_cache_of(CONFIG, CONFIG, "bfloat16", {})
H200: dict[str, Any] = {"device_bytes": 140 * GIB, "device_name": "NVIDIA H200", "max_model_len": 4096}
SMALL = Fit(Weights.of_total(2 * GIB), CACHE, config=CONFIG, **H200)
LARGE = Fit(Weights.of_total(15 * GIB), None, **H200)
SCORE: dict[str, Any] = {"task": "score", "input": {"text_column": "text"}}
NO_DEVICE = dataclasses.replace(SMALL, device_bytes=None)


def spec_of(path: str = "prompts.jsonl", **sections: Any) -> JobSpec:
    sections["input"] = {"path": path, **sections.get("input", {})}
    return JobSpec.model_validate({"model": {"name": "m"}, "output": {"path": "out"}, **sections})


def number(spec: JobSpec, fit: Fit = SMALL, num_devices: int = 1) -> int:
    return replicas_per_device(spec, fit, task_of(spec), num_devices)


@pytest.fixture
def large_input(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An input of 1 GiB on a host with 16 cores. The file has no content."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(GIB)
    return str(path)


# Without CUDA graphs for whole steps.
PIECES: dict[str, Any] = {"task": "embed", "engine": {"worker_cls": None}}


def test_a_small_model_with_a_large_input_shares_its_device(large_input: str) -> None:
    assert number(spec_of(large_input, **PIECES)) == 2
    assert number(spec_of(str(pathlib.Path(large_input).parent), **PIECES)) == 2


def test_an_engine_with_graphs_for_whole_steps_keeps_its_device_busy(large_input: str) -> None:
    assert number(spec_of(large_input, task="embed")) == 1
    assert number(spec_of(large_input, **SCORE)) == 1
    graphs = {"engine": {"enforce_eager": True}}
    assert number(spec_of(large_input, **SCORE, **graphs)) == number(spec_of(large_input, task="embed", **graphs)) == 2


@pytest.mark.parametrize(
    ("fit", "sections"),
    [
        (LARGE, {}),
        (dataclasses.replace(SMALL, device_bytes=40 * GIB), {}),
        (Fit(None, None, **H200), {}),
        (SMALL, {"task": "generate"}),
        (SMALL, {"input": {"limit": 1000}}),
        (SMALL, {"engine": {"gpu_memory_utilization": 0.9}}),
        (SMALL, {"parallel": {"tensor_parallel_size": 2}}),
        (SMALL, {"engine": {"kv_cache_memory_bytes": GIB}}),
        (SMALL, {"parallel": {"replicas_per_device": 1}}),
        (SMALL, {"parallel": {"data_parallel_size": 1}}),
        (dataclasses.replace(SMALL, device_bytes=80 * GIB, device_name="NVIDIA A100-SXM4-80GB"), {}),
    ],
)
def test_other_jobs_do_not(large_input: str, fit: Fit, sections: dict[str, Any]) -> None:
    engine = {**PIECES["engine"], **sections.get("engine", {})}
    assert number(spec_of(large_input, **{**PIECES, **sections, "engine": engine}), fit) == 1


def test_a_host_with_few_cores_does_not(large_input: str) -> None:
    assert number(spec_of(large_input, **PIECES), num_devices=4) == 1


def test_an_unknown_input_does_not(large_input: str) -> None:
    assert number(spec_of("some-user/some-dataset", **PIECES)) == 1


def test_a_number_in_the_spec_counts() -> None:
    assert number(spec_of(parallel={"replicas_per_device": 3}), LARGE) == 3


def test_a_distributed_model_cannot_share() -> None:
    with pytest.raises(SpecError, match="replicas_per_device: got 2 with tensor_parallel_size 2"):
        number(spec_of(parallel={"replicas_per_device": 2, "tensor_parallel_size": 2}))


def test_more_memory_than_the_device_has_is_refused() -> None:
    spec = spec_of(parallel={"replicas_per_device": 3}, engine={"gpu_memory_utilization": 0.5})
    with pytest.raises(SpecError, match=r"got 0.5, but 3 replicas share a device .* give at most 0.29"):
        number(spec)


def test_replicas_of_the_first_round_have_devices_of_their_own() -> None:
    slots = slots_on(spec_of(parallel={"replicas_per_device": 2}).parallel, ["0", "1"], range(8))
    assert [(slot.devices, slot.sharers) for slot in slots] == [(("0",), 2), (("1",), 2), (("0",), 2), (("1",), 2)]
    assert sum(slot.num_devices for slot in slots) == 2
    three = spec_of(parallel={"replicas_per_device": 2, "data_parallel_size": 3}).parallel
    fewer = slots_on(three, ["0", "1"], range(8))
    assert [(slot.devices, slot.sharers) for slot in fewer] == [(("0",), 2), (("1",), 1), (("0",), 2)]
    with pytest.raises(SpecError, match="5 replica"):
        slots_on(spec_of(parallel={"replicas_per_device": 2, "data_parallel_size": 5}).parallel, ["0", "1"], range(8))


def test_engines_that_share_a_device_share_its_memory() -> None:
    spec = spec_of(parallel={"replicas_per_device": 3})
    engine = values(chosen_arguments(spec, SMALL, task_of(spec), 3))
    assert engine["gpu_memory_utilization"] == 0.29
    assert "gpu_memory_utilization" not in values(chosen_arguments(spec, SMALL, task_of(spec), 1))


def test_a_value_in_the_spec_wins_and_null_is_the_default_of_vllm() -> None:
    spec = spec_of(engine={"max_num_seqs": 300, "compilation_config": None, "worker_cls": "their.Worker"})
    chosen = chosen_arguments(spec, SMALL, task_of(spec), 1)
    assert not chosen
    assert EngineSettings(spec, SMALL, None, chosen).engine == spec.engine


def test_a_small_model_gets_a_larger_batch_and_graphs_for_all_of_it() -> None:
    spec = spec_of()
    engine = values(chosen_arguments(spec, SMALL, task_of(spec), 1))
    assert engine["max_num_seqs"] == max(engine["compilation_config"]["cudagraph_capture_sizes"]) == 2048
    assert engine["worker_cls"] is None  # vLLM's own
    parted = spec_of(parallel={"tensor_parallel_size": 2})
    assert "worker_cls" not in values(chosen_arguments(parted, SMALL, task_of(parted), 1))
    engine = values(chosen_arguments(spec, LARGE, task_of(spec), 1))
    assert set(engine) == {"compilation_config"}
    assert max(engine["compilation_config"]["cudagraph_capture_sizes"]) == 1024


@pytest.mark.parametrize("name", ["cudagraph_capture_sizes", "max_cudagraph_capture_size", "enforce_eager"])
def test_the_specs_own_graphs_stay(name: str) -> None:
    spec = spec_of(engine={name: [1] if name.endswith("sizes") else 1})
    assert "compilation_config" not in values(chosen_arguments(spec, LARGE, task_of(spec), 1))


def test_a_batch_has_no_more_sequences_than_tokens() -> None:
    spec = spec_of(engine={"max_num_batched_tokens": 1024})
    fit = dataclasses.replace(SMALL, engine=spec.engine)
    assert values(chosen_arguments(spec, fit, task_of(spec), 1))["max_num_seqs"] == 1024


def test_graphs_end_at_a_lowered_batch() -> None:
    spec = spec_of()
    engine = EngineSettings(spec, SMALL, {"max_num_seqs": 100}, chosen_arguments(spec, SMALL, task_of(spec), 1))
    assert max(engine.engine["compilation_config"]["cudagraph_capture_sizes"]) <= 100


def test_lowered_settings_hold_for_as_many_replicas_on_a_device() -> None:
    spec, one = (spec_of(parallel={"replicas_per_device": number}) for number in (2, 1))
    lowered = {"gpu_memory_utilization": 0.39}
    record = Lowered(lowered, applies_to(spec, lowered))
    assert kept(spec, record) == lowered
    assert kept(one, record) == {}


def never() -> float:
    raise AssertionError("the input is read for nothing")


def test_processors_get_no_graphs() -> None:
    for spec in (spec_of(), spec_of(task="embed")):
        assert not values(chosen_arguments(spec, NO_DEVICE, task_of(spec), 1, shared_share=never))


@pytest.mark.parametrize(
    "sections", [{"task": "embed"}, {"task": "classify"}, {"task": "reward"}, {"task": "hidden_states"}]
)
def test_one_vector_for_each_prompt_is_computed_beside_the_next_step(sections: dict[str, Any]) -> None:
    spec = spec_of(**sections)
    engine = values(chosen_arguments(spec, SMALL, task_of(spec), 1))
    assert engine == {
        "compilation_config": {"cudagraph_capture_sizes": prompt_graph_sizes(16384)},
        "async_scheduling": True,
        "additional_config": {WHOLE_STEPS: True},
        "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1},
    }
    two = values(chosen_arguments(spec, SMALL, task_of(spec), 2))
    assert two == {**engine, "gpu_memory_utilization": 0.44}


@pytest.mark.parametrize(
    "engine",
    [{"worker_cls": None}, {"additional_config": {}}, {"attention_config": None}, {"kv_transfer_config": {}}],
)
def test_vectors_have_graphs_of_pieces_with_settings_that_whole_steps_do_not_allow(engine: dict[str, Any]) -> None:
    spec = spec_of(task="embed", engine=engine)
    assert set(values(chosen_arguments(spec, SMALL, task_of(spec), 1))) == {"compilation_config", "async_scheduling"}


def with_config(**changed: Any) -> Fit:
    """The small model, with changes to its config; None leaves a field out."""
    config = {name: value for name, value in {**CONFIG, **changed}.items() if value is not None}
    return dataclasses.replace(SMALL, config=config)


def with_states() -> Fit:
    """The small model, with a layer that has a state besides."""
    first = CACHE.layers[0][0]
    state = dataclasses.replace(first, state=LayerState(*(1 for _ in dataclasses.fields(LayerState))))
    cache = dataclasses.replace(CACHE, layers=((state,), *CACHE.layers))
    return dataclasses.replace(SMALL, kv_cache=cache)


@pytest.mark.parametrize(
    "fit",
    [
        with_config(num_key_value_heads=None),  # an encoder
        with_config(is_causal=False),
        with_config(use_bidirectional_attention=True),
        with_states(),
        dataclasses.replace(SMALL, device_name="NVIDIA B200", device_bytes=180 * GIB),
        dataclasses.replace(SMALL, device_name="another", device_bytes=180 * GIB),
        dataclasses.replace(SMALL, kv_cache=None),
    ],
)
def test_models_and_gpus_without_whole_steps_have_graphs_of_pieces(fit: Fit, large_input: str) -> None:
    spec, score = spec_of(large_input, task="embed"), spec_of(large_input, **SCORE)
    assert set(values(chosen_arguments(spec, fit, task_of(spec), 1))) == {"compilation_config", "async_scheduling"}
    assert not values(chosen_arguments(score, fit, task_of(score), 1))
    assert number(spec, fit) == number(score, fit) == 2


def test_scores_of_a_small_model_have_one_graph_for_a_whole_step() -> None:
    spec = spec_of(**SCORE)
    engine = values(chosen_arguments(spec, SMALL, task_of(spec), 1, shared_share=never))
    assert engine == {
        "additional_config": {WHOLE_STEPS: True},
        "compilation_config": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": prompt_graph_sizes(16384)},
        "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1},
    }


@pytest.mark.parametrize(
    ("fit", "sections"),
    [
        (LARGE, {"task": "embed"}),
        (dataclasses.replace(SMALL, device_bytes=40 * GIB), {"task": "embed"}),
        (LARGE, SCORE),
        (dataclasses.replace(SMALL, device_bytes=40 * GIB), SCORE),
        (SMALL, {**SCORE, "parallel": {"tensor_parallel_size": 2}}),
        (SMALL, {**SCORE, "model": {"name": "m", "lora": "adapter"}}),
        (SMALL, {**SCORE, "engine": {"compilation_config": None}}),
        (SMALL, {**SCORE, "engine": {"enforce_eager": True}}),
        (SMALL, {**SCORE, "engine": {"worker_cls": None}}),
        (SMALL, {**SCORE, "engine": {"attention_config": {"flash_attn_version": 2}}}),
        (SMALL, {"task": "logits"}),
        (SMALL, {"task": "hidden_states", "pooling": {"layers": [3]}}),
        (SMALL, {"task": "hidden_states", "pooling": {"positions": "all"}}),
        (SMALL, {"task": "embed", "parallel": {"tensor_parallel_size": 2}}),
        (SMALL, {"task": "embed", "engine": {"async_scheduling": None}}),
        (SMALL, {"task": "embed", "engine": {"enforce_eager": True}}),
        (SMALL, {"task": "embed", "engine": {"distributed_executor_backend": "ray"}}),
        (SMALL, {"task": "embed", "engine": {"compilation_config": {"mode": 0}}}),
    ],
)
def test_other_prompts_are_computed_as_vllm_does(fit: Fit, sections: dict[str, Any]) -> None:
    spec = spec_of(**sections)
    assert not values(chosen_arguments(spec, fit, task_of(spec), 1, shared_share=never))


@pytest.mark.parametrize(
    ("share", "engine", "expected"),
    [
        (0.0, {}, False),
        (0.19, {}, False),
        (0.2, {}, None),
        (None, {}, None),
        (never, {"enable_prefix_caching": True}, None),
        (never, {"enable_prefix_caching": None}, None),
    ],
)
def test_the_prefix_cache_is_off_where_prompts_begin_differently(
    share: Any, engine: dict[str, Any], expected: bool | None
) -> None:
    spec = spec_of(task="embed", engine=engine)
    shared_share = share if callable(share) else lambda: share
    chosen = values(chosen_arguments(spec, SMALL, task_of(spec), 1, shared_share=shared_share))
    assert chosen.get("enable_prefix_caching") is expected


def test_a_task_that_generates_keeps_the_prefix_cache() -> None:
    spec = spec_of()
    assert "enable_prefix_caching" not in values(chosen_arguments(spec, SMALL, task_of(spec), 1, shared_share=never))


RECURRENT = Fit(
    Weights.of_total(64 * GIB),
    kv_cache_of(SHAPES["qwen3.5-35b-a3b"], SHAPES["qwen3.5-35b-a3b"], "bfloat16", {}),
    config=SHAPES["qwen3.5-35b-a3b"],
    **H200,
)


@pytest.mark.parametrize(
    ("share", "sections", "expected"),
    [
        (0.19, {}, False),
        (0.2, {}, None),
        (None, {}, None),
        (never, {"engine": {"enable_prefix_caching": True}}, None),
        (never, {"sampling": {"n": 2}}, None),
        (never, {"sampling": {"n": {"column": "times"}}}, None),
        (never, {"input": {"format": "openai"}}, None),
    ],
)
def test_states_are_cached_only_where_prompts_begin_alike_or_rows_have_several_outputs(
    share: Any, sections: dict[str, Any], expected: bool | None
) -> None:
    """vLLM's cache of states turns the scheduler's short loops off."""
    spec = spec_of(**sections)
    shared_share = share if callable(share) else lambda: share
    chosen = values(chosen_arguments(spec, RECURRENT, task_of(spec), 1, shared_share=shared_share))
    assert chosen.get("enable_prefix_caching") is expected


@pytest.mark.parametrize("most", [1, 100, 2048, 5000, 16384, 32768])
def test_graph_sizes_of_prompts_end_at_the_largest_step(most: int) -> None:
    sizes = prompt_graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and len(sizes) <= 30
    # A step is padded to the next size. Small steps take less time than their start.
    assert all(after <= before * (1.25 if before >= 2048 else 2) for before, after in itertools.pairwise(sizes))


def test_graphs_of_prompts_end_at_a_lowered_step() -> None:
    for sections in ({"task": "embed"}, SCORE):
        spec = spec_of(**sections)
        chosen = chosen_arguments(spec, SMALL, task_of(spec), 1)
        for lowered, most in (
            ({"max_num_seqs": 100}, 16384),
            ({"max_num_batched_tokens": 4096}, 4096),
            ({"max_num_batched_tokens": 5000}, 5000),
        ):
            graphs = EngineSettings(spec, SMALL, lowered, chosen).engine["compilation_config"]
            assert graphs["cudagraph_capture_sizes"][-1] == most
            assert graphs.keys() == values(chosen)["compilation_config"].keys()


@pytest.mark.parametrize("most", [1, 7, 64, 300, 1024, 2048])
def test_graph_sizes_end_at_the_batch(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and max(sizes) == max(most, 4) and len(sizes) <= 50
    # A batch is padded to the next size: by at most a quarter from 32 on.
    assert all(after <= before * 1.25 + 8 for before, after in itertools.pairwise(sizes))


def test_a_step_down_starts_from_the_chosen_values() -> None:
    spec = spec_of()
    settings = EngineSettings(spec, SMALL, None, chosen_arguments(spec, SMALL, task_of(spec), 1))
    lowered = step_down(settings.engine, OutOfMemory("batch", "CUDA out of memory"), SMALL)
    assert effective(settings.engine, SMALL)["max_num_seqs"] == 2048 and lowered is not None
    launched = JobSpec.model_validate_json(settings.launch_spec("000001.0001"))
    assert launched.engine == settings.engine


def test_engines_of_a_shared_device_lock_one_file(tmp_path: pathlib.Path) -> None:
    def lock_of(slot: Slot) -> str | None:
        return process_environment(slot, sockets=tmp_path, own_cache=None, port=20_000).get(DEVICE_LOCK)

    shared = [lock_of(Slot(replica, ("0",), (0,), 2)) for replica in (0, 1)]
    assert shared[0] == shared[1] and shared[0] is not None
    assert lock_of(Slot(2, ("1",), (0,), 2)) not in shared
    assert lock_of(Slot(0, ("0",), (0,))) is None

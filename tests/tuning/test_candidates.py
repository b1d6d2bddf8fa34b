"""What is tried where the spec says nothing, and what the user may try."""

import json
import os
import pathlib
from typing import Any

import pytest

import jobs
from batchinf.base.errors import SpecError
from batchinf.fleet.devices import Slot
from batchinf.fleet.local.backend import LocalBackend
from batchinf.fleet.local.devices import slots_on
from batchinf.planning.gpus import gpu_named
from batchinf.spec.file import SpecFile, read_spec
from batchinf.spec.job import JobSpec
from batchinf.tuning import candidates as tried
from batchinf.tuning.candidates import (
    candidates,
    kept_settings,
    left_open,
    named_by_user,
    requests_at_once,
)
from benchmarks.shapes import SHAPES


class Devices(LocalBackend):
    """H200s that only this class sees."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self._gpu = number, gpu_named("h200")

    def devices(self) -> tuple[str, ...]:
        return tuple(map(str, range(self._number)))

    def device_size(self, device: str) -> tuple[int | None, str]:
        return self._gpu.memory_bytes, f"NVIDIA {self._gpu.title}"

    def slots_for(self, spec: JobSpec) -> list[Slot]:
        return slots_on(spec.parallel, self.devices(), (0,))


def spec_of(folder: pathlib.Path, shape: str, **sections: Any) -> SpecFile:
    model = folder / shape
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPES[shape]))
    sections["model"] = {"name": str(model), "load_format": "dummy"}
    return read_spec(jobs.spec_of(folder, scripted=None, **{"parallel": None, **sections}))


def opened(file: SpecFile, num_devices: int) -> list[list[Any]]:
    backend = Devices(num_devices)
    try:
        return [[dict(settings) for settings in dimension] for dimension in left_open(file, backend)]
    finally:
        backend.close()


# Without CUDA graphs for whole steps, one engine leaves the device idle.
IN_PIECES = {"max_model_len": 512, "worker_cls": None}
REPLICAS = [{"parallel.replicas_per_device": 2}, {"parallel.replicas_per_device": 3}]


def test_a_small_model_on_one_device(tmp_path: pathlib.Path) -> None:
    assert opened(spec_of(tmp_path, "llama-3.2-1b"), 1) == [
        [{"engine.max_num_seqs": 512}, {"engine.max_num_seqs": 1024}, {"engine.max_num_seqs": 256}],  # 2,048 is chosen
        [{"engine.compilation_config": None}],
        [{"engine.max_num_batched_tokens": 8192}, {"engine.max_num_batched_tokens": 32768},
         {"engine.max_num_batched_tokens": 4096}],
        [{"input.order": "prefix"}],
        REPLICAS,  # one engine that generates keeps the device busy
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "num_cores", "num_devices", "is_first"),
    [
        ("qwen3-0.6b", 8, 1, True),
        ("qwen3-0.6b", 7, 1, False),  # two engines need eight cores
        ("qwen3-0.6b", 8, 2, False),
        ("qwen3-8b", 8, 1, False),
    ],
)
def test_several_replicas_on_a_device_are_tried_first_only_where_a_gain_is_likely(
    shape: str,
    num_cores: int,
    num_devices: int,
    is_first: bool,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    found = opened(spec_of(tmp_path, shape, task="embed", sampling=None, engine=IN_PIECES), num_devices)
    assert [place for place, one in enumerate(found) if one == REPLICAS] == [len(found) - 1 if not is_first else 0]


@pytest.mark.parametrize(("given", "num_bytes", "expected"), [
    ({}, 1000, 2), ({}, 999, None), ({"parallel.replicas_per_device": 1}, 1000, None),
    ({"engine.gpu_memory_utilization": 0.6}, 1000, None),  # it has no room for two
])  # fmt: skip
def test_a_sample_runs_on_as_many_replicas_as_the_whole_input(
    given: dict[str, Any], num_bytes: int, expected: int | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("batchinf.fleet.engine_defaults.LEAST_INPUT_BYTES", 1000)
    long = tmp_path / "long.jsonl"
    long.write_text('{"text": "Once upon a time"}\n'.ljust(num_bytes))
    file = spec_of(tmp_path, "qwen3-0.6b", task="embed", sampling=None, engine=IN_PIECES,
                   input={"path": str(long), "prompt_column": "text"})  # fmt: skip
    backend = Devices(1)
    kept = kept_settings(file, backend, given)
    backend.close()
    assert kept == ({} if expected is None else {"parallel.replicas_per_device": expected})
    if not given:
        others = [{"parallel.replicas_per_device": number} for number in ((1, 3) if expected else (2, 3))]
        assert opened(file, 1)[0] == others


def test_requests_at_once_are_those_of_all_engines_and_the_largest_batch(tmp_path: pathlib.Path) -> None:
    backend, larger = Devices(2), {"engine.max_num_seqs": 4096}
    for folder, parallel, field, expected in (
        ("own", {}, [{}], 2 * 2048),  # what a small model gets
        ("tried", {}, [{}, larger], 2 * 4096),
        ("one", {"data_parallel_size": 1}, [{}], 2048),
        ("auto", {"tensor_parallel_size": "auto"}, [{}], 2048),
    ):
        (tmp_path / folder).mkdir()
        file = spec_of(tmp_path / folder, "llama-3.2-1b", parallel=parallel)
        assert requests_at_once(file, backend, field) == expected
    backend.close()


def test_tasks_that_only_read_prompts_are_tried_without_a_prefix_cache(tmp_path: pathlib.Path) -> None:
    file = spec_of(tmp_path, "qwen3-0.6b", task="embed", sampling=None, parallel={"replicas_per_device": 1})
    *_, graphs, steps, caching, order = opened(file, 1)
    assert graphs == [{"engine.compilation_config": None, "engine.async_scheduling": None}]
    assert [settings["engine.max_num_batched_tokens"] for settings in steps] == [8192, 32768, 4096]
    assert (caching, order) == ([{"engine.enable_prefix_caching": False}], [{"input.order": "prefix"}])


def test_the_prefix_cache_is_tried_where_batchinf_leaves_it_out(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "shared_share", lambda _: 0.0)
    file = spec_of(tmp_path, "qwen3-0.6b", task="embed", sampling=None)
    found = opened(file, 1)
    assert [{"engine.enable_prefix_caching": True}] in found
    own = {"engine.compilation_config": None, "engine.async_scheduling": None, "engine.enable_prefix_caching": False}
    assert [own] in found  # the job would not leave out the cache without the graphs


@pytest.mark.parametrize(
    "sections",
    [
        {"task": "score", "input": {"text_column": "text"}},  # it is off
        {"task": "embed", "engine": {"enable_prefix_caching": True}},
        {"task": "generate"},  # a request decodes far longer than it takes to fill the cache
    ],
)
def test_where_the_prefix_cache_is_left_as_it_is(tmp_path: pathlib.Path, sections: dict[str, Any]) -> None:
    found = opened(spec_of(tmp_path, "qwen3-0.6b", sampling=None, **sections), 1)
    assert {"engine.enable_prefix_caching": False} not in [settings for dimension in found for settings in dimension]


def test_degrees_where_several_devices_are_seen(tmp_path: pathlib.Path) -> None:
    degrees = opened(spec_of(tmp_path, "llama-3.3-70b", engine={"max_model_len": 8192}), 4)[0]
    assert degrees == [
        {"parallel.tensor_parallel_size": 2, "parallel.pipeline_parallel_size": 1},
        {"parallel.tensor_parallel_size": 4, "parallel.pipeline_parallel_size": 1},
    ]


def test_what_the_spec_says_stays(tmp_path: pathlib.Path) -> None:
    engine = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "enforce_eager": True}
    given = {"engine": engine, "parallel": {"replicas_per_device": 1}, "input": {"order": "input"}}
    assert opened(spec_of(tmp_path, "llama-3.2-1b", **given), 1) == []


def test_values_of_the_user(tmp_path: pathlib.Path) -> None:
    file = read_spec(jobs.spec_of(tmp_path))
    found = [named_by_user(file.spec, text) for text in ("engine.max_num_seqs=64, 256", "input.order=prefix")]
    assert found == [[{"engine.max_num_seqs": 64}, {"engine.max_num_seqs": 256}], [{"input.order": "prefix"}]]
    assert len(list(candidates(found))) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine.max_num_seqs", "must be field=value,value"),
        ("engine.max_num_seqs=", "must be field=value,value"),
        ("engine.max_num_seqs=[", "must be field=value,value"),
        ("sampling.temperature=0.5,1", "sampling.temperature changes the output"),
        ("engine.seed=1", "engine.seed changes the output"),
        ("parallel.tensor_parallel_size=0", "parallel.tensor_parallel_size"),
        ("nothing=1", "nothing"),
    ],
)
def test_what_cannot_be_tried(tmp_path: pathlib.Path, text: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        named_by_user(read_spec(jobs.spec_of(tmp_path)).spec, text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)

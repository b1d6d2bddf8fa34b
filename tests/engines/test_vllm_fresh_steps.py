"""Steps of whole prompts, whose attention goes without the KV cache: which steps these are, and that no others do so.

FlashAttention runs on GPUs alone. Here a recorder takes its place.
"""

import dataclasses
import functools
import inspect
import types
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.v1.attention.backends import flash_attn
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from batchinf.engines.vllm.kernels import fresh_steps
from batchinf.engines.vllm.kernels.comparison import AttentionShape
from batchinf.engines.vllm.scheduling import whole_prompts
from batchinf.engines.vllm.scheduling.pooling_scheduler import POOLING_SCHEDULER, pooling_scheduler
from batchinf.engines.vllm.scheduling.scheduler import SCHEDULER
from batchinf.engines.vllm.scheduling.whole_prompts import takes_prompts_whole
from batchinf.spec.job import WHOLE_STEPS
from benchmarks.mutants import pytorch_attention
from benchmarks.scheduler_steps import arguments, pooling_request


def scheduler_of(num_tokens: int = 64, **changed: Any) -> Any:
    """A real one with room for `num_tokens` in a step. changed: of the scheduler's settings."""
    given = arguments(num_blocks=300, max_num_seqs=8, is_async=False, is_caching=False, max_model_len=1024)
    config = given["vllm_config"]
    config.additional_config[WHOLE_STEPS] = True
    config.scheduler_config.scheduler_cls = POOLING_SCHEDULER
    config.scheduler_config.max_num_batched_tokens = num_tokens
    for name, value in changed.items():
        setattr(config.scheduler_config, name, value)
    return pooling_scheduler(**given)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_prompts, "_LEAST_TOKENS", 64)


def steps_of(scheduler: Any, lengths: list[int]) -> list[tuple[dict[str, int], bool]]:
    """The tokens of each request in each step, and whether the step needs no cache."""
    for number, length in enumerate(lengths):
        scheduler.add_request(pooling_request(str(number), [7] * length, False))
    found, left = [], dict(enumerate(lengths))
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        assert output.total_num_scheduled_tokens > 0
        found.append((output.num_scheduled_tokens, fresh_steps.is_fresh(output)))
        names = list(output.num_scheduled_tokens)
        for name, num_tokens in output.num_scheduled_tokens.items():
            left[int(name)] -= num_tokens
        vectors = [None if left[int(name)] else torch.ones(2) for name in names]
        index = {name: place for place, name in enumerate(names)}
        scheduler.update_from_output(output, ModelRunnerOutput(names, index, pooler_output=vectors))
    return found


def test_a_prompt_that_fits_into_a_step_is_not_cut() -> None:
    assert steps_of(scheduler_of(), [40, 40, 64, 1]) == [
        ({"0": 40, "3": 1}, True),  # the last one fits, the others wait for a step of their own
        ({"1": 40}, True),
        ({"2": 64}, True),
    ]


def test_without_whole_steps_it_is_cut_as_vllm_does() -> None:
    cut = [({"0": 40, "1": 24}, False), ({"1": 16, "2": 48}, False), ({"2": 16, "3": 1}, False)]
    assert steps_of(scheduler_of(scheduler_cls=None), [40, 40, 64, 1]) == cut


def test_a_longer_prompt_begins_with_a_step_of_its_own() -> None:
    assert steps_of(scheduler_of(), [10, 150, 10, 60, 50]) == [
        ({"0": 10, "2": 10}, True),
        ({"1": 64}, False),
        ({"1": 64}, False),
        ({"1": 22}, False),
        ({"3": 60}, True),
        ({"4": 50}, True),
    ]


def test_longer_prompts_fill_the_steps_of_each_other() -> None:
    """A step with a part needs the cache anyway. Prompts that fit into a step stay whole."""
    assert steps_of(scheduler_of(), [100, 100, 40, 60]) == [
        ({"0": 64}, False),
        ({"0": 36, "1": 28}, False),
        ({"1": 64}, False),
        ({"1": 8, "2": 40}, False),
        ({"3": 60}, True),
    ]


def test_only_a_few_prompts_are_looked_at() -> None:
    lengths = [40, *[30] * 70, 1]
    first, _ = steps_of(scheduler_of(max_num_seqs=100), lengths)[0]
    assert first == {"0": 40}


def test_a_prompt_waits_for_the_next_step_alone() -> None:
    """Shorter ones may go before it once."""
    assert [tokens for tokens, _ in steps_of(scheduler_of(), [60, 63, 4, 62, 1])] == [
        {"0": 60, "2": 4},
        {"1": 63, "4": 1},
        {"3": 62},
    ]


def test_a_request_that_is_not_new_is_left_to_vllm() -> None:
    scheduler = scheduler_of()
    requests = [
        pooling_request(name, [7] * length, False) for name, length in (("a", 60), ("b", 60), ("c", 2), ("d", 3))
    ]
    for request in requests:
        scheduler.add_request(request)
    requests[2].num_computed_tokens = 1  # as after a preemption
    assert scheduler.schedule().num_scheduled_tokens == {"a": 60, "d": 3}


@pytest.mark.parametrize("scheduler", [POOLING_SCHEDULER, SCHEDULER])
def test_the_settings_that_need_no_cache(scheduler: str) -> None:
    assert takes_prompts_whole(settings(scheduler_cls=scheduler))
    assert takes_prompts_whole(settings(max_num_batched_tokens=64))
    assert takes_prompts_whole(settings(max_num_batched_tokens=32, max_model_len=32))


@pytest.mark.parametrize(
    "changed",
    [
        {"additional_config": {}},
        {"scheduler_cls": None},
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        {"enable_prefix_caching": True},
        {"cache_dtype": "fp8"},
        {"kv_transfer_config": "a connector"},  # also made by `kv_offloading_size`
        {"policy": "priority"},
        {"long_prefill_token_threshold": 100},
        {"prefill_schedule_interval": 2},
        {"max_num_batched_tokens": 63},
    ],
)
def test_other_settings_keep_it(changed: dict[str, Any]) -> None:
    assert not takes_prompts_whole(settings(**changed))


def test_a_version_whose_scheduler_was_not_read_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_prompts, "allowed", lambda piece: piece != "admit")
    assert not takes_prompts_whole(settings())


def settings(**changed: Any) -> Any:
    """What vLLM's config has of it."""
    given: dict[str, Any] = {
        "additional_config": {WHOLE_STEPS: True}, "scheduler_cls": POOLING_SCHEDULER, "enable_prefix_caching": False,
        "cache_dtype": "auto", "kv_transfer_config": None, "policy": "fcfs", "long_prefill_token_threshold": 0,
        "max_num_batched_tokens": 16384, "max_model_len": 32768,
        **changed,
    }  # fmt: skip
    every = types.SimpleNamespace(**given)
    return types.SimpleNamespace(
        additional_config=every.additional_config,
        scheduler_config=every,
        cache_config=every,
        model_config=every,
        kv_transfer_config=every.kv_transfer_config,
    )


def scheduled(new: dict[str, tuple[int, int, int]], cached: list[str]) -> SchedulerOutput:
    """A step. new: of each new request its tokens in this step, those of its prompt, and those computed before."""
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = dataclasses.replace(CachedRequestData.make_empty(), req_ids=cached)
    output.num_scheduled_tokens = {name: tokens for name, (tokens, _, _) in new.items()} | dict.fromkeys(cached, 1)
    output.scheduled_new_reqs = [
        types.SimpleNamespace(req_id=name, prompt_token_ids=[1] * length, num_computed_tokens=computed)
        for name, (_, length, computed) in new.items()
    ]  # type: ignore[assignment]
    return output


@pytest.mark.parametrize(
    ("new", "cached", "is_fresh"),
    [
        ({"a": (5, 5, 0), "b": (1, 1, 0)}, [], True),
        ({}, [], True),  # a step without requests
        ({"a": (5, 5, 0)}, ["b"], False),
        ({"a": (5, 6, 0)}, [], False),
        ({"a": (5, 5, 0), "b": (3, 4, 1)}, [], False),
        ({"a": (5, 9, 4)}, [], False),
    ],
)
def test_fresh_steps_have_whole_prompts_alone(
    new: dict[str, tuple[int, int, int]], cached: list[str], is_fresh: bool
) -> None:
    assert fresh_steps.is_fresh(scheduled(new, cached)) is is_fresh


def test_only_a_step_that_runs_is_fresh() -> None:
    steps = fresh_steps.FreshSteps()
    seen = []

    def fail() -> None:
        with steps.running(is_fresh=True):
            seen.append(steps.is_fresh)
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert seen == [True] and not steps.is_fresh


def test_prompts_of_embeddings_are_never_fresh() -> None:
    """They have no token ids."""
    output = scheduled({"a": (5, 5, 0)}, [])
    output.scheduled_new_reqs[0].prompt_token_ids = None
    assert not fresh_steps.is_fresh(output)


class Impl:
    """In place of vLLM's FlashAttentionImpl."""

    num_heads, num_kv_heads, head_size = 4, 2, 8
    scale, logits_soft_cap, sinks = 0.5, 0, None
    sliding_window, kv_sharing_target_layer_name = (-1, -1), None
    calls: list[Any]

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None,
    ) -> Any:  # fmt: skip
        self.calls.append(("cache", attn_metadata, output_scale))
        return output

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        self.calls.append(("written", slot_mapping))


@pytest.fixture
def impl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An attention whose calls are kept. FlashAttention takes PyTorch's place for each prompt."""
    kind = type("TheirImpl", (Impl,), {"forward": Impl.forward, "do_kv_cache_update": Impl.do_kv_cache_update})
    kind.calls = []

    def attend(**given: Any) -> None:
        kind.calls.append(("direct", given))
        pytorch_attention(**given)

    module = types.SimpleNamespace(FlashAttentionImpl=kind, flash_attn_varlen_func=attend, CUDAGraphMode=CUDAGraphMode)
    monkeypatch.setattr(fresh_steps, "optional", lambda _, name, cost: getattr(module, name, None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(fresh_steps, "is_right", functools.partial(fresh_steps.is_right, device="cpu"))
    return kind()


def installed(impl: Any, steps: fresh_steps.FreshSteps) -> bool:
    done = fresh_steps.install(steps, [impl], torch.float32, 16, 200)
    impl.calls.clear()
    return done


def run(impl: Any, metadata: Any) -> torch.Tensor:
    """A layer's attention, which gets more tokens than the graph has."""
    query, key, value, output = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8), torch.zeros(6, 4, 8)
    impl.do_kv_cache_update(None, key, value, None, "slots")
    assert impl.forward(None, query, key, value, None, metadata, output=output, output_scale=None) is output
    return output


@pytest.fixture
def metadata() -> Any:
    """Two prompts, and a graph with room for a third one and for five tokens."""
    starts = torch.tensor([0, 1, 4, 4])
    return types.SimpleNamespace(num_actual_tokens=5, query_start_loc=starts, max_query_len=16384, causal=True)


def test_a_fresh_step_reads_and_writes_no_cache(impl: Any, metadata: Any) -> None:
    steps = fresh_steps.FreshSteps()
    assert installed(impl, steps)
    with steps.running(is_fresh=True):
        output = run(impl, metadata)
    [(how, given)] = impl.calls
    assert how == "direct"
    assert given["q"].shape == (5, 4, 8) and given["k"].shape == given["v"].shape == (5, 2, 8)
    assert given["out"].data_ptr() == output.data_ptr() and len(given["out"]) == 5
    assert given["cu_seqlens_q"] is given["cu_seqlens_k"]
    assert given["cu_seqlens_q"].tolist() == [0, 1, 4, 4, 5]  # the token behind the prompts is one more
    assert given["max_seqlen_q"] == given["max_seqlen_k"] == 16384
    assert given["causal"] is True and given["fa_version"] == 3 and given["softmax_scale"] == 0.5
    assert given["softcap"] == 0 and given["s_aux"] is None
    assert given["window_size"] == [-1, -1] and given["num_splits"] == 1


def test_a_prompt_whose_tokens_see_all_others_stays_so(impl: Any, metadata: Any) -> None:
    steps = fresh_steps.FreshSteps()
    assert installed(impl, steps)
    metadata.causal = False
    with steps.running(is_fresh=True):
        run(impl, metadata)
    assert impl.calls[0][1]["causal"] is False


def test_tokens_behind_the_last_prompt_never_have_what_was_in_the_memory(impl: Any, metadata: Any) -> None:
    """FlashAttention reads them with weight 0 beside the last prompt. If one is NaN, the prompt's result is NaN too."""
    steps = fresh_steps.FreshSteps()
    assert installed(impl, steps)
    tensors = [torch.randn(5, heads, 8) for heads in (4, 2, 2)]
    output = torch.full((5, 4, 8), torch.nan)
    with steps.running(is_fresh=True):
        impl.forward(None, *tensors, None, metadata, output=output)
    assert output.isfinite().all()


def test_all_layers_of_a_step_share_the_starts_but_a_captured_graph_makes_its_own(
    impl: Any, metadata: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = fresh_steps.FreshSteps()
    assert installed(impl, steps)
    with steps.running(is_fresh=True):
        run(impl, metadata)
        run(impl, metadata)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        metadata.query_start_loc[1] = 2
        run(impl, metadata)
    first, second, third = (given["cu_seqlens_q"] for _, given in impl.calls)
    assert first is second and third is not first
    assert third.tolist() == [0, 2, 4, 4, 5]


def test_other_steps_do_both(impl: Any, metadata: Any) -> None:
    steps = fresh_steps.FreshSteps()
    assert installed(impl, steps)
    run(impl, metadata)
    assert impl.calls == [("written", "slots"), ("cache", metadata, None)]


def test_vllm_s_measurement_of_memory_has_no_plan(impl: Any) -> None:
    steps = fresh_steps.FreshSteps()
    assert installed(impl, steps)
    with steps.running(is_fresh=True):
        run(impl, None)
    assert impl.calls == [("cache", None, None)]


def test_a_second_engine_of_a_process_has_its_own_steps(impl: Any, metadata: Any) -> None:
    old, new = fresh_steps.FreshSteps(), fresh_steps.FreshSteps()
    assert installed(impl, old) and installed(impl, new)
    with old.running(is_fresh=True):
        run(impl, metadata)
    assert [how for how, *_ in impl.calls] == ["written", "cache"]


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"sliding_window": (511, 0)}, False),
        ({"kv_sharing_target_layer_name": "model.layers.3"}, False),
    ],
)
def test_attention_that_needs_more_than_a_layer_s_own_numbers_keeps_the_cache(
    changed: dict[str, Any], fits: bool
) -> None:
    other = type("Other", (Impl,), changed)()
    assert fresh_steps.fits([Impl(), other], torch.bfloat16) is fits


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_numbers_that_may_overflow_do_too(dtype: torch.dtype) -> None:
    assert not fresh_steps.fits([Impl()], dtype)


@pytest.fixture
def no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.usefixtures("no_graph")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
def test_a_right_attention_is_taken(heads: tuple[int, int], dtype: torch.dtype) -> None:
    num_heads, num_key_heads = heads
    shape = AttentionShape(num_heads=num_heads, num_key_heads=num_key_heads, head_size=8, dtype=dtype)
    assert fresh_steps.is_right(pytorch_attention, shape, 200, "cpu")


def no_first_key(*, k: Any, cu_seqlens_q: Any, **given: Any) -> None:
    if "block_table" not in given:
        k = k.clone()
        k[cu_seqlens_q[:-1][cu_seqlens_q.diff() > 1].long()] = -100.0
    pytorch_attention(k=k, cu_seqlens_q=cu_seqlens_q, **given)


def next_prompt_s_keys(*, cu_seqlens_q: Any, **given: Any) -> None:
    if "block_table" not in given:
        cu_seqlens_q = torch.cat((cu_seqlens_q[:2], cu_seqlens_q[3:]))
    pytorch_attention(cu_seqlens_q=cu_seqlens_q, **given)


def nothing_behind_the_prompts(*, cu_seqlens_q: Any, **given: Any) -> None:
    pytorch_attention(cu_seqlens_q=cu_seqlens_q if "block_table" in given else cu_seqlens_q[:-1], **given)


def fails(**_: Any) -> None:
    raise RuntimeError("no kernel image is available")


@pytest.mark.usefixtures("no_graph")
@pytest.mark.parametrize("wrong", [no_first_key, next_prompt_s_keys, nothing_behind_the_prompts, fails])
def test_a_wrong_one_is_said_and_left_alone(wrong: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shape = AttentionShape(num_heads=4, num_key_heads=2, head_size=8, dtype=torch.float32)
    assert not fresh_steps.is_right(wrong, shape, 200, "cpu")
    assert capsys.readouterr().out.startswith("steps of prompts use the KV cache, which is slower for short ones: ")


def test_without_a_right_attention_vllm_s_code_is_kept(impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type(impl).forward
    monkeypatch.setattr(fresh_steps, "is_right", lambda *shape: False)
    assert not installed(impl, fresh_steps.FreshSteps())
    assert type(impl).forward is theirs


@pytest.mark.parametrize("missing", ["forward", "do_kv_cache_update"])
def test_other_names_keep_the_cache(missing: str, impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    delattr(type(impl), missing)
    monkeypatch.delattr(Impl, missing)
    assert not fresh_steps.install(fresh_steps.FreshSteps(), [], torch.float32, 16, 200)


def test_steps_that_need_the_cache_run_without_a_graph() -> None:
    steps = fresh_steps.FreshSteps()
    manager: Any = CudaGraphManager.__new__(CudaGraphManager)
    graph = BatchExecutionDescriptor(CUDAGraphMode.FULL, 16, 16)
    manager._graphs_captured, manager._lora_dispatch_map, manager._max_lora_case = True, {}, 0
    manager._candidates = {(12, 0): [graph]}
    captured = []
    runner = types.SimpleNamespace(
        cudagraph_manager=manager, capture_model=lambda **named: captured.append((steps.is_fresh, named))
    )
    assert fresh_steps.capture_fresh_steps(runner, steps)
    runner.capture_model(profile_only=False)
    assert captured == [(True, {"profile_only": False})] and not steps.is_fresh
    for is_fresh in (True, False, True):
        with steps.running(is_fresh):
            found = manager.dispatch(3, 12, None, num_active_loras=0)
        assert found == (graph if is_fresh else BatchExecutionDescriptor(CUDAGraphMode.NONE, 12, 3))


def test_in_the_v1_runner_too() -> None:
    steps = fresh_steps.FreshSteps()
    config = VllmConfig()
    graphs = config.compilation_config
    graphs.cudagraph_mode, graphs.cudagraph_capture_sizes = CUDAGraphMode.FULL, [16]
    graphs.max_cudagraph_capture_size, graphs.mode = 16, CompilationMode.VLLM_COMPILE
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL, 1)
    runner = types.SimpleNamespace(cudagraph_manager=None, cudagraph_dispatcher=dispatcher, capture_model=list)
    assert fresh_steps.capture_fresh_steps(runner, steps)
    for is_fresh in (True, False, True):
        with steps.running(is_fresh):
            mode, size = dispatcher.dispatch(num_tokens=12, uniform_decode=False, invalid_modes=None)
        assert (mode, size.num_tokens) == ((CUDAGraphMode.FULL, 16) if is_fresh else (CUDAGraphMode.NONE, 12))


def test_a_runner_with_other_names_is_left_alone() -> None:
    chooser = types.SimpleNamespace(dispatch=len)
    for runner in (types.SimpleNamespace(cudagraph_manager=chooser), types.SimpleNamespace(capture_model=list)):
        assert not fresh_steps.capture_fresh_steps(runner, fresh_steps.FreshSteps())
    assert chooser.dispatch is len


def test_the_installed_vllm_has_what_fresh_steps_need(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = flash_attn.FlashAttentionImpl
    for name in ("forward", "do_kv_cache_update"):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # restored after the test
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", lambda **named: None, raising=False)
    assert fresh_steps.install(fresh_steps.FreshSteps(), [], torch.float32, 16, 200)
    source = inspect.getsource(kind)
    assert all(f"self.{name} = " in source for name in ("num_heads", "num_kv_heads", "head_size"))
    named = {"scale", "logits_soft_cap", "sinks", "kv_cache_dtype", "kv_sharing_target_layer_name", "sliding_window"}
    assert all(f"self.{name} = " in source for name in named)
    known = {field.name for field in dataclasses.fields(flash_attn.FlashAttentionMetadata)}
    assert {"num_actual_tokens", "query_start_loc", "max_query_len", "causal"} <= known
    for runner in (GPUModelRunner, GPUModelRunnerV2):
        assert callable(runner.capture_model)

"""The scheduler that holds outputs back, against the same outputs sent token by token; on real vLLM."""

import tracemalloc
import types
from typing import Any

import numpy as np
import pytest

vllm = pytest.importorskip("vllm")
from vllm import SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason  # noqa: E402
from vllm.v1.outputs import LogprobsLists  # noqa: E402

from batchinf.engines.vllm.arguments import sampling_params  # noqa: E402
from batchinf.engines.vllm.engine import VllmEngine  # noqa: E402
from batchinf.engines.vllm.scheduling.scheduler import _PIECE_BYTES, _SLOT_ENTRIES, HoldingMixin, RowStore  # noqa: E402
from batchinf.records import Completion, Request  # noqa: E402
from batchinf.spec.sampling import SamplingSpec  # noqa: E402

SLOT_BYTES = 8 * _SLOT_ENTRIES
FINAL = {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}


class Script:
    """In vLLM's scheduler's place: says what each step gives, as vLLM's would make it of the runner's arrays."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def finish_requests(self, request_ids: Any, status: Any) -> list[Any]:
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids or self.requests)
        return [self.requests.pop(name) for name in names if name in self.requests]

    def update_from_output(self, new: dict[str, tuple[list[int], Any]], given: Any) -> dict[int, EngineCoreOutputs]:
        outputs = []
        for name, (token_ids, reason) in new.items():
            wants = self.requests[name].sampling_params.logprobs is not None and given.logprobs is not None
            row = given.req_id_to_index[name]
            rows = given.logprobs.slice_request(row, len(token_ids)) if wants else None
            outputs.append(EngineCoreOutput(name, token_ids, rows, finish_reason=reason))
            if reason is not None:
                del self.requests[name]
        return {0: EngineCoreOutputs(outputs=outputs)}


class Holding(HoldingMixin, Script):
    """What is tested."""


def request(name: str, **params: Any) -> Any:
    return types.SimpleNamespace(request_id=name, sampling_params=SamplingParams(**{**FINAL, **params}))


@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize(("most", "length"), [(1, 150), (3, 150), (1, 3000), (9, 3000)])
def test_outputs_come_together(has_others: bool, most: int, length: int) -> None:
    """Requests with several k, of which one wants its tokens as they come; several tokens a step as `most` says.

    Long outputs come in pieces, so that no request holds more than a bound, whatever its length is.
    """
    random = np.random.default_rng(most)
    one, other = Holding(), Script()
    ks: dict[str, int | None] = {"none": None, "zero": 0, "five": 5, "five too": 5, "wide": 300}
    requests = [request(name, logprobs=k) for name, k in ks.items()]
    if has_others:
        ks["stops"] = 5
        requests.append(request("stops", logprobs=5, detokenize=True, stop=["x"]))
    left = {name: length + 7 * number for number, name in enumerate(ks)}
    for each in requests:
        one.add_request(each)
        other.add_request(each)
    sent: dict[str, list[Any]] = {name: [] for name in ks}
    expected: dict[str, list[Any]] = {name: [] for name in ks}
    while other.requests:
        names = [name for name in other.requests if random.random() < 0.8]
        random.shuffle(names)
        counts = [min(left[name], int(random.integers(0, most + 1)) if most > 1 else 1) for name in names]
        starts = np.cumsum([0, *counts]).tolist()
        lists = LogprobsLists(
            random.integers(0, 1000, (starts[-1], 301)),
            random.random((starts[-1], 301), np.float32),
            random.integers(1, 9, starts[-1]),
            starts if most > 1 else None,
        )
        index = {name: number for number, name in enumerate(names)}
        new: dict[str, Any] = {}
        for name, count in zip(names, counts, strict=True):
            left[name] -= count
            if count:
                token_ids = random.integers(0, 1000, count).tolist()
                new[name] = token_ids, None if left[name] else FinishReason.LENGTH
        for scheduler, found in ((one, sent), (other, expected)):
            runner = types.SimpleNamespace(logprobs=lists, req_id_to_index=index)
            for output in scheduler.update_from_output(new, runner)[0].outputs:
                found[output.request_id].append(output)
        for held in one._held.values():
            assert held.store is None or len(held.token_ids) * held.store.width * 8 <= _PIECE_BYTES + 2 * SLOT_BYTES
    for name, k in ks.items():
        if name == "stops":
            assert len(sent[name]) == len(expected[name]) > 1
        else:
            # The first says only that the prompt was run.
            assert not sent[name][0].new_token_ids
            num_bytes = 8 * (k + 1) * length if k is not None else 0
            num_pieces = len(sent[name]) - 1
            assert num_pieces == 1 if num_bytes < _PIECE_BYTES else num_pieces >= num_bytes // (2 * _PIECE_BYTES)
        assert together(sent[name], k) == together(expected[name], k)
        assert sent[name][-1].finish_reason == FinishReason.LENGTH
    assert not one._held
    assert not one._others
    assert all(len(store._free) == len(store._used) for store in one._stores.values())


@pytest.mark.slow
def test_held_memory_does_not_grow_with_the_length() -> None:
    """12 requests with their top 20 and 12 without logprobs. Held back whole, 8,500 tokens of each take 18 MB."""
    scheduler, number, length = Holding(), 12, 8500
    names = [f"{kind} {place}" for place in range(number) for kind in ("top 20", "none")]
    for name in names:
        scheduler.add_request(request(name, logprobs=20 if name.startswith("top") else None))
    lists = LogprobsLists(np.ones((24, 21), np.int64), np.ones((24, 21), np.float32), np.ones(24, np.int64))
    index = {name: place for place, name in enumerate(names)}
    num_sent = dict.fromkeys(names, 0)
    tracemalloc.start()
    try:
        for _ in range(length):
            runner = types.SimpleNamespace(logprobs=lists, req_id_to_index=index)
            message = scheduler.update_from_output({name: ([7], None) for name in names}, runner)[0]
            for output in message.outputs:
                num_sent[output.request_id] += len(output.new_token_ids)
            del message
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A piece of each, which is copied when it leaves, and the slots, of which there are at least 64.
    assert peak < 2 * number * 2 * (_PIECE_BYTES + SLOT_BYTES) + 70 * SLOT_BYTES
    for name in names:
        num_held = len(scheduler._held[name].token_ids)
        assert num_held + num_sent[name] == length
        assert num_held * 8 < _PIECE_BYTES


def together(outputs: list[Any], k: int | None) -> tuple[list[int], ...]:
    """Token ids and logprobs of several outputs, each request's own k + 1 columns."""
    token_ids = [token for output in outputs for token in output.new_token_ids]
    if k is None:
        assert all(output.new_logprobs is None for output in outputs)
        return (token_ids,)
    rows = [output.new_logprobs for output in outputs if output.new_token_ids]
    columns = [np.concatenate([row[part] for row in rows]) for part in range(3)]
    return (token_ids, columns[0][:, : k + 1].tolist(), columns[1][:, : k + 1].tolist(), columns[2].tolist())


@pytest.mark.parametrize("names", ["one", ["one"], None, iter(["one"])])
def test_what_is_cut_short_is_forgotten(names: Any) -> None:
    scheduler = Holding()
    scheduler.add_request(request("one", logprobs=2))
    lists = LogprobsLists(np.ones((1, 3), np.int64), np.ones((1, 3), np.float32), np.ones(1, np.int64))
    runner = types.SimpleNamespace(logprobs=lists, req_id_to_index={"one": 0})
    message = scheduler.update_from_output({"one": ([1], None)}, runner)[0]
    assert [output.new_token_ids for output in message.outputs] == [[]]
    scheduler.finish_requests(names, None)
    assert not scheduler._held
    scheduler.add_request(request("one", logprobs=2))
    runner.logprobs = lists
    output = scheduler.update_from_output({"one": ([5], FinishReason.STOP)}, runner)[0].outputs[0]
    assert output.new_token_ids == [5]
    assert output.new_logprobs.logprob_token_ids.shape == (1, 3)


def test_slots_are_given_out_again_and_empty() -> None:
    store = RowStore(3)
    slots = [store.new_slot() for _ in range(200)]
    assert len(set(slots)) == 200
    lists = LogprobsLists(np.arange(6).reshape(2, 3), np.zeros((2, 3), np.float32), np.array([7, 8]))
    store.append(slots[:2], [1, 0], lists)
    token_ids, logprobs, ranks = store.take(slots[0])
    assert (token_ids.tolist(), logprobs.shape, ranks.tolist()) == ([[3, 4, 5]], (1, 3), [8])
    assert (token_ids.dtype, logprobs.dtype, ranks.dtype) == (np.int32, np.float32, np.int32)
    assert store.take(slots[0])[0].shape == (0, 3)
    store.free(slots[1])
    assert store.new_slot() == slots[1]
    assert store.take(slots[1])[0].shape == (0, 3)


def test_the_engine_holds_outputs_back(vllm_engine: VllmEngine) -> None:
    """In the engine that the other tests hold against `LLM.generate`; tokens come out of the core in one message."""
    core = vllm_engine._engine.engine_core.engine_core
    assert isinstance(core.scheduler, HoldingMixin)
    assert core.scheduler._changes is not None  # decodes in the short loops
    sampling = SamplingSpec(temperature=0, logprobs=3, ignore_eos=True)
    assert not sampling_params(sampling).detokenize
    requests = [Request(row, 0, [5, 6, 7 + row], sampling, max_tokens=6 + 2 * row) for row in range(4)]
    assert sorted(run(vllm_engine, requests)[1]) == [0, 0, 0, 0, 6, 8, 10, 12]
    assert not core.scheduler._held


@pytest.mark.slow
def test_a_long_output_is_the_same_in_pieces(vllm_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingSpec(temperature=0, logprobs=7, ignore_eos=True)
    requests = [Request(row, 0, [5, 6, 7 + row], sampling, max_tokens=380 + row) for row in range(3)]
    whole, sizes = run(vllm_engine, requests)
    assert sorted(sizes) == [0, 0, 0, 380, 381, 382]
    core = vllm_engine._engine.engine_core.engine_core
    monkeypatch.setattr("batchinf.engines.vllm.scheduling.scheduler._PIECE_BYTES", 1)
    monkeypatch.setattr(core.scheduler, "_stores", {})
    pieces, sizes = run(vllm_engine, requests)
    depth = _SLOT_ENTRIES // 8
    assert sorted(sizes) == sorted([0, depth, depth] * 3 + [length - 2 * depth for length in (380, 381, 382)])
    for one, other in zip(whole, pieces, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs is not None
        assert other.logprobs is not None
        for name in ("token_ids", "logprobs", "ranks"):
            np.testing.assert_array_equal(getattr(one.logprobs, name), getattr(other.logprobs, name))


def run(engine: VllmEngine, requests: list[Request]) -> tuple[list[Completion], list[int]]:
    """The completions in the order of the requests, and how many tokens came in each message of the engine's core."""
    sizes: list[int] = []
    found: dict[int, Completion] = {}
    own = engine._engine.output_processor.process_outputs

    def count(outputs: list[Any], *arguments: Any, **named: Any) -> Any:
        sizes.extend(len(output.new_token_ids) for output in outputs)
        return own(outputs, *arguments, **named)

    engine._engine.output_processor.process_outputs = count
    try:
        for request in requests:
            engine.add(request)
        while engine.num_unfinished():
            found.update({completion.request.row_index: completion for completion in engine.step()})
    finally:
        engine._engine.output_processor.process_outputs = own
    return [found[request.row_index] for request in requests], sizes

"""Our scheduler's short loops against vLLM's own scheduler, both driven by the same requests, steps and aborts."""

import dataclasses
import random
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

vllm = pytest.importorskip("vllm")
import llguidance  # noqa: E402
import llguidance.hf  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine import FinishReason  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar  # noqa: E402
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar  # noqa: E402
from vllm.v1.structured_output.request import StructuredOutputRequest  # noqa: E402

from batchinf.engines.vllm.scheduling import scheduler as ours  # noqa: E402
from batchinf.engines.vllm.scheduling.masks import GuidedRows  # noqa: E402
from benchmarks.scheduler_steps import FULL, SIZES, arguments, request  # noqa: E402
from benchmarks.shapes import make_tokenizer  # noqa: E402

EOS, STOP, WORDS, THOUGHT = 3, 4, 40, 1
REFUSED = range(11, 16)
WIDTH = 4
MODEL_LEN = 96


class Grammar(StructuredOutputGrammar):
    """Accepts all tokens that are not REFUSED, and remembers what it was given.

    After it has refused a token it accepts all, as that of guidance does.
    """

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.has_refused = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if not self.has_refused and any(token in REFUSED for token in tokens):
            self.has_refused = True
            return False
        self.accepted += tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        raise NotImplementedError

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        self.accepted = []


class Reasoner:
    """The structure begins after the first token THOUGHT."""

    def __init__(self, tokenizer: Any) -> None:
        pass

    def is_reasoning_end(self, token_ids: Any) -> bool:
        return False

    def is_reasoning_end_streaming(self, token_ids: Any, delta: Any) -> bool:
        return THOUGHT in delta

    def extract_content_ids(self, token_ids: list[int]) -> list[int]:
        return token_ids[token_ids.index(THOUGHT) + 1 :]


def make_structured(new: Any, grammar: Any) -> Any:
    """Give a request a structured output."""
    new.structured_output_request = StructuredOutputRequest(StructuredOutputsParams(regex="x"), grammar)
    return grammar


class Driver:
    """A scheduler with a made-up model: a token follows from the request's name and the number of tokens before it."""

    def __init__(self, made: Any, words: int) -> None:
        self.made, self.words = made, words
        self.flying: deque[tuple[Any, dict[str, int]]] = deque()
        self.sent: dict[str, list[Any]] = {}

    def schedule(self) -> dict[str, Any]:
        output = self.made.schedule()
        # Requests whose prompt is computed with this step, and how many tokens each has then.
        ready = {}
        for name in output.num_scheduled_tokens:
            one = self.made.requests[name]
            if not one.is_prefill_chunk:
                ready[name] = one.num_computed_tokens
        self.flying.append((output, ready))
        cached = output.scheduled_cached_reqs
        return {
            "scheduled": list(output.num_scheduled_tokens.items()),
            "total": output.total_num_scheduled_tokens,
            "cached": vars(cached) | {"resumed_req_ids": sorted(cached.resumed_req_ids)},
            "new": [
                (new.req_id, new.block_ids, new.num_computed_tokens, new.prefill_token_ids and [*new.prefill_token_ids])
                for new in output.scheduled_new_reqs
            ],
            "finished": output.finished_req_ids,
            "preempted": output.preempted_req_ids,
            "zeroed": output.new_block_ids_to_zero,
            "shared": output.num_common_prefix_blocks,
            "masked": (output.has_structured_output_requests, output.pending_structured_output_tokens),
        }

    def update(self) -> None:
        output, ready = self.flying.popleft()
        names = sorted(output.num_scheduled_tokens)
        rows = [zlib.crc32(f"{name} {ready.get(name)}".encode()) for name in names]
        lists = LogprobsLists(
            np.array([[row % (1000 + column) for column in range(WIDTH + 1)] for row in rows], np.int64),
            np.array([[row % (99 + column) for column in range(WIDTH + 1)] for row in rows], np.float32),
            np.array([row % 7 for row in rows], np.int64),
        )
        given = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[
                [row % self.words] if name in ready else [] for name, row in zip(names, rows, strict=True)
            ],
            logprobs=lists if names else None,
        )
        for message in self.made.update_from_output(output, given).values():
            for one in message.outputs:
                self.sent.setdefault(one.request_id, []).append(one)

    def state(self) -> dict[str, Any]:
        """All that a later step depends on."""
        made, managers = self.made, self.made.kv_cache_manager.coordinator.single_type_managers
        pool = managers[0].block_pool
        names = "status num_computed_tokens num_output_placeholders num_in_flight_tokens num_stale_output_tokens"
        names += " is_prefill_chunk num_preemptions stop_reason block_hashes _all_token_ids _output_token_ids"
        return {
            "running": [one.request_id for one in made.running],
            "waiting": [one.request_id for one in made.waiting],
            "requests": {
                name: [getattr(one, field, None) for field in names.split()] for name, one in made.requests.items()
            },
            "grammars": {
                name: getattr(one.structured_output_request.grammar, "accepted", None)
                for name, one in made.requests.items()
                if one.structured_output_request
            },
            "blocks": [
                {name: [block.block_id for block in blocks] for name, blocks in manager.req_to_blocks.items()}
                for manager in managers
            ],
            "cached": [manager.num_cached_block for manager in managers],
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "hashes": {key: repr(blocks) for key, blocks in pool.cached_block_hash_to_block._cache.items()},
            "limits": {name: number for name, number in vars(made).items() if name.startswith("max_num")},
            "before": made.prev_step_scheduled_req_ids,
            "prefills": sorted(one.request_id for one in made._inflight_prefills),
            "deferred": sorted(one.request_id for one in made.deferred_waiting),
        }

    def output(self, name: str) -> tuple[Any, ...]:
        """Tokens, logprobs, finish reason and stop reason of a request, of however many messages."""
        sent = self.sent.get(name, [])
        lists = [one.new_logprobs for one in sent if one.new_token_ids and one.new_logprobs is not None]
        return (
            [token for one in sent for token in one.new_token_ids],
            [np.concatenate([each[part] for each in lists]).tolist() for part in range(3)] if lists else None,
            [(one.finish_reason, one.stop_reason) for one in sent[-1:]],
        )


def disturb(drivers: list[Any], chance: random.Random, step: int, aborted: set[str]) -> None:
    """Abort a request now and then, take all blocks away with results in flight, and pause for two steps."""
    known = drivers[0].made.requests
    if chance.random() < 0.05 and known:
        name = chance.choice(sorted(known))
        aborted.add(name)
        for driver in drivers:
            driver.made.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    for driver in drivers:
        if step in (50, 51, 150):
            driver.made.reset_prefix_cache(reset_running_requests=True)
        if step in (70, 72):
            driver.made.set_pause_state(PauseState.PAUSED_ALL if step == 70 else PauseState.UNPAUSED)


def advance(one: Driver, other: Driver, chance: random.Random, is_async: bool) -> None:
    """A step of both. Asynchronous: mostly, a second step is scheduled before the first is updated."""
    assert one.schedule() == other.schedule()
    assert one.state() == other.state()
    while len(one.flying) > (1 if is_async and chance.random() < 0.9 else 0):
        one.update()
        other.update()
        assert one.state() == other.state()


def make_params(chance: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": chance.choice([1, 2, 5, 16, 17, 40, 90]), "logprobs": WIDTH}
    params["min_tokens"] = chance.choice([0, 0, params["max_tokens"] // 2])
    if chance.random() < 0.3:
        params["stop_token_ids"] = [STOP]
    if chance.random() < 0.1:
        params["repetition_detection"] = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    if chance.random() < 0.1:
        params |= {"detokenize": True, "stop": ["x"]}  # not held back
    return params


@pytest.mark.parametrize("num_blocks", [14, 60])
@pytest.mark.parametrize("is_caching", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_v2", [False, True])
def test_the_loops_do_what_vllm_does(
    is_v2: bool, is_async: bool, is_caching: bool, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks: requests are preempted. Two words: the outputs, and so their blocks, are alike.

    Any four of the five conditions are tried together, in each way.
    """
    words = 2 if is_v2 ^ is_async ^ is_caching ^ (num_blocks == 14) else WORDS
    made_of = arguments(num_blocks, 8, is_async, is_caching, MODEL_LEN)
    hold_against_vllm(made_of, words, monkeypatch, is_v2=is_v2, is_caching=is_caching)


@pytest.mark.parametrize("is_caching", [False, True])
def test_preemptions_are_counted_with_and_without_the_prefix_cache(is_caching: bool) -> None:
    """vLLM counts them where its prefix cache is asked again, so without that cache it counts none."""
    made = ours.scheduler(**arguments(14, 8, True, is_caching, MODEL_LEN) | {"log_stats": True})
    driver = Driver(made, 50)
    for number in range(6):
        made.add_request(request(f"row {number}", [number] * 20, is_caching, max_tokens=40, ignore_eos=True))
    counted = expected = 0
    while made.requests or driver.flying:
        expected += len(driver.schedule()["preempted"] or ())
        stats = made.make_stats()
        assert stats is not None and stats.prefix_cache_stats is not None
        counted += stats.prefix_cache_stats.preempted_requests
        driver.update()
    assert counted == expected > 0


WINDOW = SlidingWindowSpec(sliding_window=24, **SIZES)
STATE = MambaSpec(block_size=MODEL_LEN, shapes=((1,),), dtypes=(torch.float32,))
# Groups of cache, and the number of blocks with which requests are preempted.
GROUPS: dict[str, tuple[list[Any], int]] = {
    "windows": ([FULL, WINDOW, WINDOW], 34),
    "windows alone": ([WINDOW], 14),
    "windows of two sizes": ([FULL, SlidingWindowSpec(sliding_window=17, **SIZES), WINDOW], 34),
    "windows with other blocks": ([FULL, SlidingWindowSpec(sliding_window=10, **{**SIZES, "block_size": 32})], 34),
    "chunks": ([FULL, ChunkedLocalAttentionSpec(attention_chunk_size=32, **SIZES)], 24),
    "reference windows": ([FULL, RSWASpec(rswa_window=20, **SIZES)], 24),
    "rings": ([FULL, CircularBufferSpec(**{**SIZES, "block_size": 8})], 24),
    "states": ([FULL, STATE, STATE], 28),
    "states alone": ([STATE], 7),
    "states in blocks": ([FULL, dataclasses.replace(STATE, block_size=16, mamba_cache_mode="all")], 30),
}


@pytest.mark.parametrize("is_caching", [False, True])
@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("kind", GROUPS)
def test_they_do_so_with_other_groups_of_cache(
    kind: str, is_async: bool, is_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks leave windows, and the free blocks are the same after each step."""
    if kind == "states alone" and is_caching:
        pytest.skip("vLLM has no prefix cache for states alone")
    groups, num_blocks = GROUPS[kind]
    made_of = arguments(num_blocks, 8, is_async, is_caching, MODEL_LEN, groups=groups)
    hold_against_vllm(made_of, WORDS, monkeypatch, is_v2=True, is_caching=is_caching)


@pytest.mark.parametrize("is_caching", [False, True])
def test_unknown_managers_are_left_to_vllm(is_caching: bool, capsys: pytest.CaptureFixture[str]) -> None:
    aligned = dataclasses.replace(STATE, block_size=16, mamba_cache_mode="align")
    made = ours.scheduler(**arguments(60, 8, True, is_caching, MODEL_LEN, groups=[FULL, aligned]))
    assert made._changes is None
    line = "the scheduler's short loops are off for MambaManager in mode align; steps take longer\n"
    assert capsys.readouterr().out == line
    crossed = CrossAttentionSpec(**SIZES)
    made = ours.scheduler(**arguments(60, 8, True, False, MODEL_LEN, groups=[FULL, crossed]))
    assert made._changes is None
    assert capsys.readouterr().out == line.replace("MambaManager in mode align", "CrossAttentionManager")


@pytest.mark.parametrize("is_async", [False, True])
def test_they_do_so_with_grammars_of_guidance(is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammars of a step are advanced in one call, and refuse tokens now and then."""
    made_of = arguments(60, 8, is_async, False, MODEL_LEN)
    made_of["structured_output_manager"].backend = object()
    accepted: list[int] = []
    accept = GuidedRows.accept

    def count_accepted(self: GuidedRows, tokens: Any) -> dict[str, bool]:
        found = accept(self, tokens)
        accepted.append(len(found))
        return found

    monkeypatch.setattr(GuidedRows, "accept", count_accepted)
    tokenizer = llguidance.hf.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(2000)))
    grammar = llguidance.grammar_from("regex", r"[^,\-./0]*")  # the tokens REFUSED

    def guided() -> GuidanceGrammar:
        return GuidanceGrammar(llguidance.LLMatcher(tokenizer, grammar, log_level=0), tokenizer, 2000)

    hold_against_vllm(made_of, WORDS, monkeypatch, is_v2=True, is_caching=False, grammar_of=guided)
    assert sum(accepted) > 50


def hold_against_vllm(
    made_of: dict[str, Any],
    words: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_v2: bool,
    is_caching: bool,
    grammar_of: Callable[[], Any] = Grammar,
) -> None:
    """Drive our scheduler and vLLM's by the same requests, and compare them after each step."""
    # Short pieces: 8 tokens in a slot, 16 with logprobs in a piece, and 30 without.
    for name, value in (("_SLOT_ENTRIES", 8 * (WIDTH + 1)), ("_PIECE_BYTES", 640), ("_PIECE_TOKENS", 30)):
        monkeypatch.setattr(ours, name, value)
    is_async = made_of["vllm_config"].scheduler_config.async_scheduling
    num_blocks = made_of["kv_cache_config"].num_blocks
    chance = random.Random(f"{is_v2} {is_async} {is_caching} {num_blocks} {words}")
    made_of["vllm_config"].scheduler_config.watermark = 0.3 if words == 2 else 0.0
    has_reasoner = chance.random() < 0.5 and grammar_of is Grammar
    if has_reasoner:
        made_of["structured_output_manager"].reasoner_cls = Reasoner
        made_of["structured_output_manager"].tokenizer = None
    vllms_own = AsyncScheduler if is_async else Scheduler
    drivers = [Driver(made, words) for made in (ours.scheduler(**made_of), vllms_own(**made_of))]
    one, other = drivers
    assert one.made._changes is not None
    counts = {"head": 0, "quiet": 0, "preempted": 0, "masked": 0}
    schedule_head, add_tokens = one.made._schedule_head, one.made._add_tokens

    def count_head(changes: Any) -> Any:
        result = schedule_head(changes)
        counts["head"] += len(result[1].req_ids)
        counts["masked"] += bool(result[2])
        return result

    def count_quiet(scheduled: dict[str, int], *rest: Any, **named: Any) -> Any:
        result = add_tokens(scheduled, *rest, **named)
        counts["quiet"] += len(scheduled) - len(result)
        return result

    monkeypatch.setattr(one.made, "_schedule_head", count_head)
    monkeypatch.setattr(one.made, "_add_tokens", count_quiet)
    for driver in drivers:
        driver.made.use_v2_model_runner = is_v2
    prefix = [7] * 40
    names: list[str] = []
    grammars: list[list[Any]] = [[], []]
    aborted: set[str] = set()
    for step in range(2000):
        while step < 200 and len(one.made.requests) < 10:
            name = f"row {len(names)}"
            names.append(name)
            prompt = prefix[: chance.choice([0, 20, 40])] + [chance.randrange(9) for _ in range(chance.randint(1, 30))]
            params = make_params(chance)
            if chance.random() < 0.3:
                params["logprobs"] = None
            has_eos, has_grammar = chance.random() < 0.3, chance.random() < 0.3
            for driver, own in zip(drivers, grammars, strict=True):
                new = request(name, prompt, is_caching, **params)
                new.sampling_params._eos_token_id = EOS if has_eos else None
                if has_grammar:
                    own.append(make_structured(new, grammar_of()))
                driver.made.add_request(new)
        disturb(drivers, chance, step, aborted)
        if not one.made.requests and not one.flying:
            break
        advance(one, other, chance, is_async)
        # Pieces leave: with logprobs after two slots of 8 tokens.
        for held in one.made._held.values():
            assert len(held.token_ids) < (30 if held.store is None else 16)
        counts["preempted"] += any(each.num_preemptions for each in one.made.requests.values())
    assert not one.made.requests
    for name in names:
        if name not in aborted:
            assert one.output(name) == other.output(name), name
            assert one.output(name)[2][0][0] is not None
    if grammar_of is Grammar:
        assert [each.accepted for each in grammars[0]] == [each.accepted for each in grammars[1]]
    assert not one.made._held
    assert not one.made._others
    assert counts["head"] > 100
    assert counts["quiet"] > 100
    assert counts["preempted"]
    assert counts["masked"] > 10
    ends = [one.output(name)[2][0][0] for name in names if name not in aborted]
    if not has_reasoner:
        assert (FinishReason.ERROR in ends) == (words == WORDS)

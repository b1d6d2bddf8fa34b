"""Changes vLLM's workers: rows of the vocabulary without a sort, logprobs of prompts, raw scores before the grammar.

For `logprobs=-1` vLLM sorts each row and sends it in rank order with its ids, 8 bytes a number. For prompts it holds 14
bytes a number of all positions on the device. Here a row is sent in the order of the vocabulary and in the stored type,
with one token id, by which `logprobs.py` recognises it, and a prompt is processed a few hundred positions at a time.
The V1 runner takes logprobs of prompts in such pieces too; in V2, kernels of our own take logprobs. If a request asks
for some positions of its prompt, the V1 runner sends only these; V2 does not know whose rows it makes, so it sends all,
and the front end keeps some. In a tensor-parallel group the first rank alone sends rows, in a pipeline the last stage.
"""

import functools
import importlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors

from batchinf.engines.vllm.kernels.scores import is_right, takes, token_scores
from batchinf.engines.vllm.known_sources import allowed
from batchinf.engines.vllm.scheduling import joined
from batchinf.engines.vllm.scheduling.joined import splitting, start_joining

# What `engine_arguments` gives as `worker_extension_cls`: vLLM imports it by name in each worker.
WORKER_EXTENSION = f"{__name__}.RowsExtension"
# Rows processed at once, each of about 128k float32.
_CHUNK = 256
# Key in `extra_args` of SamplingParams (0.32 and 0.33): the prompt positions, ascending, that a request asks for; all
# without it. Rows of chosen positions have position + 1 as their rank.
POSITIONS = "batchinf_positions"
_GRAMMAR = "vllm.v1.structured_output.utils"
_V2_MODULES = ("vllm.v1.worker.gpu.sample.sampler", "vllm.v1.worker.gpu.sample.prompt_logprob")
# For a prompt that is run in pieces, rows that the V2 runner may keep on the device until the last piece.
_DEVICE_BYTES = 1 << 30


class RowsExtension:
    """A base that vLLM adds to its worker; `collective_rpc` finds its methods."""

    model_runner: Any
    vllm_config: Any

    def install_vocabulary_rows(self, dtype: str, token_ids: Sequence[int] | None) -> bool:
        """Send rows as they are stored. False if this version has other names: `logprobs.py` then sorts vLLM's rows."""
        is_v2 = _is_v2(self.model_runner)
        if not allowed("rows_v2" if is_v2 else "rows_v1"):
            return False
        rows = ScoreRows(dtype, token_ids, is_sent=get_tp_group().rank_in_group == 0)
        return (_install_v2 if is_v2 else _install_v1)(self.model_runner, rows)

    def install_scores(self, ks: list[int]) -> bool:
        """Take logprobs by our own kernels (V2), or those of prompts in pieces (V1). False if vLLM's code is kept."""
        runner = self.model_runner
        if not allowed("rows_v2" if _is_v2(runner) else "rows_v1"):
            return False
        if not _is_v2(runner):
            runner._get_prompt_logprobs_dict = _prompt_scores(runner, None)
            return True
        return _install_kernels(runner, ks)

    def join_results(self) -> bool:
        """Send the results of all prompts of a step as one. False if the scheduler is in another process."""
        return start_joining(self.vllm_config)

    def install_late_mask(self) -> bool:
        """Let the grammar mask logits after their raw scores are taken; False where this version cannot."""
        # vLLM's check of drafted tokens reads only masked logits.
        if getattr(self.model_runner, "speculative_config", None) is not None:
            return False
        if _is_v2(self.model_runner):
            return allowed("mask_v2") and _mask_late_v2(self.model_runner)
        # On some GPUs of AMD, 0.33 samples before it has called what applies the mask here.
        return not current_platform.is_rocm() and allowed("mask_v1") and _mask_late_v1(self.model_runner)


def _is_v2(runner: Any) -> bool:
    return type(runner).__module__.startswith("vllm.v1.worker.gpu.")


def install(engine: Any, method: str, *arguments: Any) -> bool:
    """Call a method of `RowsExtension` in all workers. False if one cannot, or if the spec has its own extension."""
    is_ours = engine.vllm_config.parallel_config.worker_extension_cls == WORKER_EXTENSION
    return is_ours and all(engine.collective_rpc(method, args=arguments))


def join_results(engine: Any) -> None:
    """Let an engine's scheduler send the results of all prompts of a step as one, and its front end split them."""
    front = engine.output_processor
    is_right = joined.is_right(engine.vllm_config.model_config.max_model_len, width=2)
    if is_right and install(engine, "join_results"):
        front.process_outputs = splitting(front.process_outputs)


class ScoreRows:
    """Turns scores of the whole vocabulary into the rows that are sent. dtype: `float16` or `float32`.

    token_ids: None is all. is_sent: False if vLLM takes no output from this worker; its rows are then empty.
    """

    def __init__(self, dtype: str, token_ids: Sequence[int] | None, is_sent: bool = True) -> None:
        self.dtype = getattr(torch, dtype)
        self._token_ids = token_ids if is_sent else []
        self._index: Any = None

    def width(self, vocab_size: int) -> int:
        return vocab_size if self._token_ids is None else len(self._token_ids)

    def of(self, scores: Any) -> Any:
        """[n, width] of scores [n, vocab_size]."""
        if self._token_ids is not None:
            if self._index is None or self._index.device != scores.device:
                self._index = torch.tensor(self._token_ids, dtype=torch.int64, device=scores.device)
            scores = scores.index_select(-1, self._index)
        return scores.to(self.dtype)

    def tensors(self, scores: Any, token_ids: Any) -> Any:
        """In vLLM's type. token_ids: [n], the sampled tokens; their ranks are not used."""
        ranks = torch.zeros(len(scores), dtype=torch.int32, device=scores.device)
        return LogprobsTensors(token_ids.to(torch.int32).unsqueeze(-1), scores, ranks)


# -- the V1 runner -----------------------------------------------------------------------------------------------------


def _install_v1(runner: Any, rows: ScoreRows) -> bool:
    runner._get_prompt_logprobs_dict = _prompt_scores(runner, rows)
    sampler = runner.sampler
    theirs = sampler.gather_logprobs

    def gather_logprobs(logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
        if num_logprobs < logprobs.shape[-1]:
            return theirs(logprobs, num_logprobs, token_ids)
        return rows.tensors(rows.of(logprobs), token_ids)

    sampler.gather_logprobs = gather_logprobs
    return True


def _prompt_scores(runner: Any, rows: ScoreRows | None) -> Callable[..., Any]:
    """Replaces `GPUModelRunner._get_prompt_logprobs_dict` and follows it step by step, in pieces of `_CHUNK` positions.

    rows: makes the rows of requests that want the whole vocabulary. None leaves these rows in vLLM's order.
    """

    def prompt_scores(hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        wanted = runner.num_prompt_logprobs
        vocab_size = runner.model_config.get_vocab_size()
        is_logits = runner.model_config.logprobs_mode in ("raw_logits", "processed_logits")
        done: dict[str, Any] = {}
        for request_id in list(wanted):
            num_tokens = num_scheduled_tokens.get(request_id)
            if num_tokens is None:  # preempted within its prompt
                continue
            request = runner.requests[request_id]
            num_prompt_tokens, start = len(request.prompt_token_ids), request.num_computed_tokens
            k, chosen, kept = wanted[request_id], None, request.in_progress_prompt_logprobs_cpu
            own = rows if k >= vocab_size else None
            if own is not None:
                chosen = (getattr(request.sampling_params, "extra_args", None) or {}).get(POSITIONS)
            if kept is None:
                num_kept = num_prompt_tokens - 1
                kept = request.in_progress_prompt_logprobs_cpu = (
                    LogprobsTensors.empty_cpu(num_kept, k + 1)
                    if own is None
                    else _empty(num_kept, own.width(vocab_size), own.dtype, chosen)
                )
            # A chunk that ends at the last token but one is returned with the next step, which has an output token.
            num_left = num_prompt_tokens - (start + 1)
            num_rows = num_tokens if num_tokens <= num_left else num_left
            if num_tokens > num_left:
                done[request_id] = kept
            offset = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]].item()
            states, place = hidden_states[offset : offset + num_rows], start
            if chosen is not None:
                place, end = bisect_left(chosen, start), bisect_left(chosen, start + num_rows)
                here = torch.tensor([position - start for position in chosen[place:end]], device=states.device)
                states = states[here.long()]
            if own is None:
                following = request.prompt_token_ids[start + 1 : start + 1 + num_rows]
                targets = torch.tensor(following, dtype=torch.int64, device=states.device)
            for first in range(0, len(states), _CHUNK):
                logits = runner.model.compute_logits(states[first : first + _CHUNK])
                at = slice(place + first, place + first + len(logits))
                scores = logits if is_logits else runner.sampler.compute_logprobs(logits)
                if own is not None:
                    kept.logprobs[at].copy_(own.of(scores), non_blocking=True)
                    continue
                found = runner.sampler.gather_logprobs(scores.float(), k, targets[first : first + len(logits)])
                for mine, new in zip(kept[:3], found[:3], strict=True):
                    mine[at].copy_(new, non_blocking=True)
        for request_id in done:
            del wanted[request_id]
            runner.requests[request_id].in_progress_prompt_logprobs_cpu = None
        if done and hidden_states.device.type != "cpu":
            torch.accelerator.synchronize()  # the copies above are asynchronous
        return done

    return prompt_scores


def _empty(num_rows: int, width: int, dtype: Any, chosen: list[int] | None) -> Any:
    # Not pinned: the driver would allocate it anew for each prompt, which takes longer than the slower copy.
    ranks = torch.zeros(num_rows, dtype=torch.int32) if chosen is None else torch.tensor(chosen, dtype=torch.int32) + 1
    return LogprobsTensors(
        torch.zeros((len(ranks), 1), dtype=torch.int32), torch.empty((len(ranks), width), dtype=dtype), ranks
    )


def _mask_late_v1(runner: Any) -> bool:
    """vLLM's sampler takes raw scores first and then calls `apply_logits_processors`."""
    sampler = runner.sampler
    mask: Any = importlib.import_module(_GRAMMAR).apply_grammar_bitmask
    waiting: list[Callable[[Any], Any]] = []
    their_sample, their_processors = runner.sample_tokens, sampler.apply_logits_processors

    def sample_tokens(grammar_output: Any) -> Any:
        state = runner.execute_model_state
        waiting.clear()
        if grammar_output is not None and state is not None:
            waiting.append(functools.partial(mask, state.scheduler_output, grammar_output, runner.input_batch))
            grammar_output = None
        return their_sample(grammar_output)

    def apply_logits_processors(logits: Any, *arguments: Any, **named: Any) -> Any:
        while waiting:
            waiting.pop()(logits)
        return their_processors(logits, *arguments, **named)

    runner.sample_tokens, sampler.apply_logits_processors = sample_tokens, apply_logits_processors
    return True


# -- the V2 runner -----------------------------------------------------------------------------------------------------


def _v2_modules() -> list[Any]:
    """Those that take scores of outputs and of prompts."""
    return [importlib.import_module(name) for name in _V2_MODULES]


def _install_v2(runner: Any, rows: ScoreRows) -> bool:
    for module in _v2_modules():
        module.compute_topk_scores = v2_scores(rows, module.compute_topk_scores)
    worker: Any = getattr(runner, "prompt_logprobs_worker", None)  # in a pipeline only the last stage has one
    if isinstance(getattr(worker, "in_progress_prompt_logprobs", None), dict):
        worker.in_progress_prompt_logprobs = PiecesOfPrompts()
    return True


def v2_scores(rows: ScoreRows, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `compute_topk_scores` of the sampler and of prompts."""

    def compute_topk_scores(logits: Any, num_logprobs: int, sampled_token_ids: Any, *rest: Any, **named: Any) -> Any:
        starts = rest[0] if rest else named.get("cu_num_logits")  # several rows per request in speculative decoding
        if num_logprobs < logits.shape[-1] or starts is not None:
            return theirs(logits, num_logprobs, sampled_token_ids, *rest, **named)
        width = rows.width(logits.shape[-1])
        found = torch.empty((len(logits), width), dtype=rows.dtype, device=logits.device)
        for first in range(0, len(logits) if width else 0, _CHUNK):
            scores = logits[first : first + _CHUNK]
            if not named.get("logits_mode", False):
                scores = scores.log_softmax(dim=-1, dtype=torch.float32)
            found[first : first + _CHUNK] = rows.of(scores)
        return rows.tensors(found, sampled_token_ids)

    return compute_topk_scores


def _install_kernels(runner: Any, ks: list[int]) -> bool:
    if getattr(runner, "prompt_logprobs_worker", None) is None:  # of a pipeline only the last stage has one
        return not getattr(runner, "is_last_pp_rank", True)
    modules = _v2_modules()
    theirs = modules[0].compute_topk_scores
    if any(module.compute_topk_scores is not theirs for module in modules):
        return False
    config = runner.model_config
    if not is_right(theirs, config.get_vocab_size(), config.dtype, runner.device, ks=ks):
        return False
    for module in modules:
        module.compute_topk_scores = scores_in_one_pass(theirs, ks)
    return True


# Arguments of `compute_topk_scores` that the kernels do not support, and those that go with the second of them.
_NOT_FOR = ("cu_num_logits", "max_per_req_token_ids", "logits_mode")
_OF_CHOSEN_TOKENS = ("logprob_token_ids_state", "expanded_idx_mapping")


def scores_in_one_pass(theirs: Callable[..., Any], ks: list[int]) -> Callable[..., Any]:
    """Replaces `compute_topk_scores`. Calls `theirs` for all that the kernels do not support.

    ks: numbers of logprobs that were compared. All above 1 have the same kernel.
    """
    compared = {min(k, 2) for k in ks}

    def compute_topk_scores(logits: Any, num_logprobs: int, token_ids: Any, *rest: Any, **named: Any) -> Any:
        # The first of `rest` is `cu_num_logits`: several rows per request in speculative decoding.
        is_plain = len(rest) <= 1 and not any((*rest, *map(named.get, _NOT_FOR)))
        is_known = named.keys() <= {*_NOT_FOR, *_OF_CHOSEN_TOKENS}
        is_compared = min(num_logprobs, 2) in compared and takes(num_logprobs, logits.shape[-1])
        if not (is_plain and is_known and is_compared):
            return theirs(logits, num_logprobs, token_ids, *rest, **named)
        return LogprobsTensors(*token_scores(logits, token_ids, num_logprobs))

    return compute_topk_scores


def _mask_late_v2(runner: Any) -> bool:
    """vLLM's sampler calls `sample`, which may not change the logits, and then takes raw scores of them.

    Compared with the source of 0.32.0 and 0.33.0, not tested.
    """
    grammar: Any = getattr(runner, "structured_outputs_worker", None)
    sampler: Any = getattr(runner, "sampler", None)
    if grammar is None or sampler is None:  # of a pipeline the last stage has both
        return not getattr(runner, "is_last_pp_rank", True)
    waiting: list[tuple[Any, Callable[[Any], Any]]] = []
    their_mask, their_sample = grammar.apply_grammar_bitmask, sampler.sample

    def apply_grammar_bitmask(logits: Any, *arguments: Any) -> None:
        waiting[:] = [(logits, lambda copy: their_mask(copy, *arguments))]

    def sample(logits: Any, *arguments: Any, **named: Any) -> Any:
        # A worker without requests of its own in a step does not sample, and the next step has other logits.
        if waiting and waiting[0][0] is logits:
            logits = logits.clone()
            waiting[0][1](logits)
        waiting.clear()
        return their_sample(logits, *arguments, **named)

    grammar.apply_grammar_bitmask, sampler.sample = apply_grammar_bitmask, sample
    return True


class PiecesOfPrompts(dict[str, list[Any]]):
    """Replaces the V2 runner's dict: by request, rows of a prompt whose last piece has not run yet.

    vLLM keeps and joins them on the device. For a long prompt and a whole vocabulary this takes gigabytes, which memory
    profiling does not count. Beyond `_DEVICE_BYTES` they move to the host's memory.
    """

    def __setitem__(self, request_id: str, pieces: list[Any]) -> None:
        super().__setitem__(request_id, _Pieces(pieces))


class _Pieces(list[Any]):
    """LogprobsTensors, all on the device or all in the host's memory."""

    def append(self, piece: Any) -> None:
        super().append(piece)
        if sum(each.logprobs.nbytes for each in self) > _DEVICE_BYTES:
            self[:] = [LogprobsTensors(*(tensor.cpu() for tensor in each[:3])) for each in self]

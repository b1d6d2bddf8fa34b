"""Masks and tokens of structured outputs by guidance, for all requests of a step in one call.

vLLM fills masks in threads of Python, which wait for the interpreter lock, and accepts tokens row by row. In a step of
960 requests of an 8B model on an H200, that took 26 of 49 ms, and the GPU was idle for half of the step
(`benchmarks/kineto.py json`). llguidance has calls for many rows, with threads of its own and without the lock.
"""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

_FULL = -1
# As many as vLLM has for masks, or fewer: the replica's environment has its share of the host's cores.
_MOST_THREADS = 8


class GuidedRows:
    """In front of vLLM's StructuredOutputManager, for requests with a grammar of guidance."""

    def __init__(self, manager: Any) -> None:
        from llguidance import LLExecutor

        self._manager = manager
        self._theirs = manager.grammar_bitmask
        num_threads = int(os.environ.get("RAYON_NUM_THREADS", _MOST_THREADS))
        self._executor = LLExecutor(max(1, min(_MOST_THREADS, num_threads)))

    def grammar_bitmask(
        self, requests: dict[str, Any], names: list[str], drafts: dict[str, list[int]]
    ) -> npt.NDArray[np.int32] | None:
        """See vLLM. It fills the masks with drafts, with reasoning, and if some grammar is not of guidance."""
        bitmask, reasons = self._manager._grammar_bitmask, self._manager.reasoner_cls is not None
        grammars = [requests[name].structured_output_request.grammar for name in names]
        # vLLM makes the room for the masks.
        if drafts or reasons or bitmask is None or not all(type(grammar) is GuidanceGrammar for grammar in grammars):
            return self._theirs(requests, names, drafts)  # type: ignore[no-any-return]
        rows = []
        for row, grammar in enumerate(grammars):
            if grammar.is_terminated():
                bitmask[row].fill_(_FULL)
            else:
                rows.append((grammar.ll_matcher, row))
        if rows:  # llguidance refuses none
            self._executor.unsafe_compute_mask_ptr(rows, bitmask.data_ptr(), bitmask.shape[1] * 4, len(bitmask))
        for grammar in grammars:
            grammar.check_error()
        return bitmask[: len(names)].numpy()  # type: ignore[no-any-return]

    def accept(self, tokens: Iterable[tuple[str, Any, int]]) -> dict[str, bool]:
        """Advance grammars as `accept_tokens` does, one token each. Returns whether each accepted its token, by name.

        tokens: names, grammars and tokens. A grammar is left out if it is not of guidance or has ended.
        """
        chosen = [
            (name, grammar, token)
            for name, grammar, token in tokens
            if type(grammar) is GuidanceGrammar
            and token != grammar.ll_tokenizer.eos_token
            and not grammar.ll_matcher.is_stopped()
        ]
        if not chosen:
            return {}
        results = self._executor.consume_token_par([(grammar.ll_matcher, token) for _, grammar, token in chosen])
        for (_, grammar, _), is_accepted in zip(chosen, results, strict=True):
            if not is_accepted:
                grammar.check_error()
        return {name: is_accepted for (name, _, _), is_accepted in zip(chosen, results, strict=True)}

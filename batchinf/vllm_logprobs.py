"""Logprobs stay arrays on their way through vLLM's front end, which by itself makes Python objects of them."""

from typing import Any

import numpy as np
from vllm.v1.engine import output_processor

from batchinf.errors import BatchinfError
from batchinf.records import TokenLogprobs

LogprobsProcessor: Any = getattr(output_processor, "LogprobsProcessor", object)  # there from 0.26 to 0.33


class Rows:
    """Logprobs of a growing run of tokens. Holds copies, so that it keeps no message of the engine core alive."""

    def __init__(self, k: int) -> None:
        self._width = k + 1
        self._token_ids, self._logprobs, self._ranks = bytearray(), bytearray(), bytearray()
        self._types: tuple[Any, ...] = (np.int32, np.float32, np.int32)

    def extend(self, token_ids: Any, logprobs: Any, ranks: Any) -> None:
        """Take arrays [n, k + 1], [n, k + 1] and [n]; the first two are wider where a neighbour's k is larger."""
        self._types = token_ids.dtype, logprobs.dtype, ranks.dtype
        self._token_ids += token_ids[:, : self._width].tobytes()
        self._logprobs += logprobs[:, : self._width].tobytes()
        self._ranks += ranks.tobytes()

    def arrays(self) -> TokenLogprobs:
        """All of it."""
        kept = zip((self._token_ids, self._logprobs, self._ranks), self._types, strict=True)
        token_ids, logprobs, ranks = (np.frombuffer(data, dtype) for data, dtype in kept)
        return _arrays(token_ids, logprobs, ranks, self._width)


class ArrayLogprobsProcessor(LogprobsProcessor):
    """vLLM's keeper of one request's logprobs, with arrays where vLLM makes Python objects of them."""

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
        """Ours for requests that want flat logprobs, which all of ours do; vLLM's own for those of others."""
        params = request.sampling_params
        if not params.flat_logprobs:
            return LogprobsProcessor.from_new_request(tokenizer, request)
        processor = super().from_new_request(None, request)
        processor.logprobs = None if params.num_logprobs is None else Rows(params.num_logprobs)
        processor.prompt_logprobs = None if params.prompt_logprobs is None else Rows(params.prompt_logprobs)
        return processor

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        self.logprobs.extend(*logprobs_lists[:3])

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: Any) -> None:
        self.prompt_logprobs.extend(*(tensor.numpy() for tensor in prompt_logprobs_tensors[:3]))


def install_arrays() -> bool:
    """Let vLLM keep arrays; False where it no longer can, and flat logprobs are converted instead."""
    names = ("from_new_request", "update_from_output", "_update_sample_logprobs", "_update_prompt_logprobs")
    if has_seam := all(hasattr(LogprobsProcessor, name) for name in names):
        output_processor.LogprobsProcessor = ArrayLogprobsProcessor
    return has_seam


def token_logprobs(kept: Any, k: int | None, num_tokens: int) -> TokenLogprobs | None:
    """What was kept of a request's logprobs, [num_tokens, k + 1]; None where none were wanted."""
    if k is None:
        return None
    if isinstance(kept, Rows):
        rows = kept.arrays()
    else:  # vLLM's FlatLogprobs, with ranks for all of a position's tokens, and an empty first position for a prompt
        rows = _arrays(kept.token_ids, kept.logprobs, kept.ranks[:: k + 1], k + 1)
    if not len(rows.token_ids) == len(rows.logprobs) == len(rows.ranks) == num_tokens:
        raise BatchinfError(f"vLLM gave {len(rows.token_ids)} rows of logprobs for {num_tokens} tokens")
    return rows


def _arrays(token_ids: Any, logprobs: Any, ranks: Any, width: int) -> TokenLogprobs:
    return TokenLogprobs(
        np.array(token_ids, np.int32).reshape(-1, width),
        np.array(logprobs, np.float32).reshape(-1, width),
        np.array(ranks, np.int32),
    )

"""Logprobs stay arrays on their way through vLLM's front end, which by itself makes Python objects of them."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinf.base.errors import BatchinfError
from batchinf.engines.vllm.names import optional
from batchinf.records import RowsWanted, TokenLogprobs

_PLACE = "vllm.v1.engine.output_processor"
LogprobsProcessor: Any = optional(_PLACE, "LogprobsProcessor", "logprobs come as Python objects, slowly", object)


class LogprobRows:
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


class VocabularyRows:
    """Rows of numbers, one for each of a growing run of tokens: of the whole vocabulary, or of chosen tokens.

    From `worker` they come as they are to be, beside one token id each; `places`, where it sent some rows of a
    prompt alone, are their positions, ascending. From vLLM itself a row comes in the order of its ranks, behind the
    token's own number, and is put in the order of the vocabulary here.
    """

    def __init__(self) -> None:
        self.is_chosen = False
        self.places: list[int] = []
        self._rows: list[Any] = []

    def extend(self, token_ids: Any, logprobs: Any, ranks: Any) -> None:
        """Take arrays [n, 1] and [n, width], or both [n, vocab_size + 1]."""
        if token_ids.shape[1] == 1:
            self.is_chosen = True
            self.places += (ranks[ranks > 0] - 1).tolist()
            # A view of a whole step's rows would keep them all alive.
            is_whole = logprobs.base is None or getattr(logprobs.base, "nbytes", 0) <= logprobs.nbytes
            self._rows.append(logprobs if is_whole else logprobs.copy())
            return
        rows = np.empty((len(logprobs), logprobs.shape[1] - 1), np.float32)
        np.put_along_axis(rows, token_ids[:, 1:].astype(np.int64), logprobs[:, 1:], axis=1)
        self._rows.append(rows)

    def pieces(self, wanted: RowsWanted) -> list[Any]:
        """Of all tokens so far, [n, width] each, in the type that is wanted."""
        rows = self._rows
        if not self.is_chosen and wanted.token_ids is not None:
            rows = [piece[:, list(wanted.token_ids)] for piece in rows]
        with np.errstate(over="ignore"):
            return [piece.astype(wanted.dtype, copy=False) for piece in rows]


class ArrayLogprobsProcessor(LogprobsProcessor):
    """vLLM's keeper of one request's logprobs, with arrays where vLLM makes Python objects of them."""

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
        """Ours for requests that want flat logprobs, which all of ours do; vLLM's own for those of others."""
        params = request.sampling_params
        if not params.flat_logprobs:
            return LogprobsProcessor.from_new_request(tokenizer, request)
        processor = super().from_new_request(None, request)
        processor.logprobs = _keeper(params.num_logprobs)  # of chosen tokens, where `logprobs` is None
        processor.prompt_logprobs = _keeper(params.prompt_logprobs)
        return processor

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        self.logprobs.extend(*logprobs_lists[:3])

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: Any) -> None:
        self.prompt_logprobs.extend(*(tensor.numpy() for tensor in prompt_logprobs_tensors[:3]))


def _keeper(k: int | None) -> LogprobRows | VocabularyRows | None:
    return None if k is None else VocabularyRows() if k == -1 else LogprobRows(k)


def vocabulary_rows(wanted: RowsWanted, generated: Any, prompt: Any) -> npt.NDArray[Any]:
    """[num_positions, width] of what was kept of a request's output tokens and of its prompt.

    prompt: None where only rows behind its last token are wanted. Raises BatchinfError where rows are missing.
    """
    if not isinstance(generated, VocabularyRows) or not isinstance(prompt, VocabularyRows | None):
        raise BatchinfError("this version of vLLM does not let its rows of the vocabulary be kept as arrays")
    pieces = generated.pieces(wanted)
    if wanted.positions is not None:
        pieces = [*([] if prompt is None else prompt.pieces(wanted)), pieces[0][:1]]
    rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if prompt is not None and prompt.places:
        return _placed(rows, prompt.places, wanted.positions or ())
    if wanted.positions is None or isinstance(wanted.positions, range):
        return rows  # type: ignore[no-any-return]
    if prompt is None:
        return np.repeat(rows, len(wanted.positions), axis=0) if len(wanted.positions) > 1 else rows
    return rows[list(wanted.positions)]  # type: ignore[no-any-return]


def _placed(rows: npt.NDArray[Any], places: list[int], positions: Sequence[int]) -> npt.NDArray[Any]:
    """The rows at these positions, of those at `places` and, last, that of the prompt's last token."""
    index = {place: number for number, place in enumerate([*places, max(*positions, places[-1] + 1)])}
    if len(index) != len(rows) or not index.keys() >= set(positions):
        raise BatchinfError(f"vLLM's worker gave rows of {len(places)} positions, and not of all that are wanted")
    order = [index[position] for position in positions]
    return rows if order == [*range(len(rows))] else rows[order]


def install_arrays() -> bool:
    """Let vLLM keep arrays; False where it no longer can, and flat logprobs are converted instead."""
    names = ("from_new_request", "update_from_output", "_update_sample_logprobs", "_update_prompt_logprobs")
    if has_seam := all(hasattr(LogprobsProcessor, name) for name in names):
        importlib.import_module(_PLACE).LogprobsProcessor = ArrayLogprobsProcessor  # type: ignore[attr-defined]
    return has_seam


def token_logprobs(kept: Any, k: int | None, num_tokens: int) -> TokenLogprobs | None:
    """What was kept of a request's logprobs, [num_tokens, k + 1]; None where none were wanted."""
    if k is None:
        return None
    if isinstance(kept, LogprobRows):
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

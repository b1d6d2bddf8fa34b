"""Keeps logprobs as arrays in vLLM's front end, by our own `LogprobsProcessor` instead of vLLM's.

vLLM makes Python objects of them: 1,960 bytes for a token with its top 20. As arrays they take 172 bytes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.engine import output_processor
from vllm.v1.engine.output_processor import LogprobsProcessor

from batchinf.base.errors import BatchinfError
from batchinf.engines.vllm.known_sources import allowed
from batchinf.records import RowsWanted, TokenLogprobs


class LogprobRows:
    """Logprobs of a growing sequence of tokens. Holds copies, so that no message of the engine core stays alive."""

    def __init__(self, k: int) -> None:
        self._width = k + 1
        self._token_ids, self._logprobs, self._ranks = bytearray(), bytearray(), bytearray()
        self._types: tuple[Any, ...] = (np.int32, np.float32, np.int32)

    def extend(self, token_ids: Any, logprobs: Any, ranks: Any) -> None:
        """Append arrays [n, k + 1], [n, k + 1] and [n]. The first two are wider if another request's k is larger."""
        self._types = token_ids.dtype, logprobs.dtype, ranks.dtype
        self._token_ids += token_ids[:, : self._width].tobytes()
        self._logprobs += logprobs[:, : self._width].tobytes()
        self._ranks += ranks.tobytes()

    def arrays(self) -> TokenLogprobs:
        kept = zip((self._token_ids, self._logprobs, self._ranks), self._types, strict=True)
        token_ids, logprobs, ranks = (np.frombuffer(data, dtype) for data, dtype in kept)
        return _arrays(token_ids, logprobs, ranks, self._width)


class VocabularyRows:
    """Rows of numbers over the vocabulary or chosen tokens, one for each token of a growing sequence.

    `worker.py` sends rows in their final order, with one token id each. If it sent only some rows of a prompt, `places`
    has their positions, ascending. vLLM itself sends a row in the order of its ranks, after the token's own value; such
    a row is put into the order of the vocabulary here.
    """

    def __init__(self) -> None:
        self.is_chosen = False
        self.places: list[int] = []
        self._rows: list[Any] = []

    def extend(self, token_ids: Any, logprobs: Any, ranks: Any) -> None:
        """Append arrays [n, 1] and [n, width], or both [n, vocab_size + 1]."""
        if token_ids.shape[1] == 1:
            self.is_chosen = True
            self.places += (ranks[ranks > 0] - 1).tolist()
            # A view would keep all rows of the step alive.
            is_whole = logprobs.base is None or getattr(logprobs.base, "nbytes", 0) <= logprobs.nbytes
            self._rows.append(logprobs if is_whole else logprobs.copy())
            return
        rows = np.empty((len(logprobs), logprobs.shape[1] - 1), np.float32)
        np.put_along_axis(rows, token_ids[:, 1:].astype(np.int64), logprobs[:, 1:], axis=1)
        self._rows.append(rows)

    def pieces(self, wanted: RowsWanted) -> list[Any]:
        """The rows of all tokens so far, in arrays [n, width] of the wanted type."""
        rows = self._rows
        if not self.is_chosen and wanted.token_ids is not None:
            rows = [piece[:, list(wanted.token_ids)] for piece in rows]
        with np.errstate(over="ignore"):
            return [piece.astype(wanted.dtype, copy=False) for piece in rows]


class ArrayLogprobsProcessor(LogprobsProcessor):
    """vLLM's processor of one request's logprobs, with arrays instead of Python objects."""

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
        """Ours for requests with flat logprobs, as all of ours are; vLLM's own for others."""
        params = request.sampling_params
        if not params.flat_logprobs:
            return LogprobsProcessor.from_new_request(tokenizer, request)
        processor = super().from_new_request(None, request)
        processor.logprobs = _keeper(params.num_logprobs)  # also set for chosen tokens, where `logprobs` is None
        processor.prompt_logprobs = _keeper(params.prompt_logprobs)
        return processor

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        self.logprobs.extend(*logprobs_lists[:3])

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: Any) -> None:
        self.prompt_logprobs.extend(*(tensor.numpy() for tensor in prompt_logprobs_tensors[:3]))


def _keeper(k: int | None) -> LogprobRows | VocabularyRows | None:
    return None if k is None else VocabularyRows() if k == -1 else LogprobRows(k)


def vocabulary_rows(wanted: RowsWanted, generated: Any, prompt: Any) -> npt.NDArray[Any]:
    """[num_positions, width] from the kept rows of a request's output tokens and of its prompt.

    prompt: None if only the row after its last token is wanted. Raises BatchinfError if rows are missing.
    """
    if not isinstance(generated, VocabularyRows) or not isinstance(prompt, VocabularyRows | None):
        raise BatchinfError("this version of vLLM does not let its rows of the vocabulary be kept as arrays")
    pieces = generated.pieces(wanted)
    if wanted.positions is not None:
        pieces = [*([] if prompt is None else prompt.pieces(wanted)), pieces[0][:1]]
    rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if wanted.positions is None or isinstance(wanted.positions, range):
        return rows  # type: ignore[no-any-return]
    positions = np.array(wanted.positions)
    if prompt is not None and not prompt.places:
        return rows[positions]  # type: ignore[no-any-return]
    # `rows` has those at `places` and, last, the row of the prompt's last token.
    places = [] if prompt is None else prompt.places
    index = np.searchsorted(places, positions)
    if len(rows) != len(places) + 1 or (np.append(places, positions.max())[index] != positions).any():
        raise BatchinfError(f"vLLM's worker gave rows of {len(places)} positions, and not of all that are wanted")
    return rows[index]  # type: ignore[no-any-return]


def install_arrays() -> bool:
    """Let vLLM keep arrays. False if this version cannot; its flat logprobs are then converted."""
    if is_known := allowed("arrays"):
        output_processor.LogprobsProcessor = ArrayLogprobsProcessor
    return is_known


def token_logprobs(kept: Any, k: int | None, num_tokens: int) -> TokenLogprobs | None:
    """The kept logprobs of a request, [num_tokens, k + 1]; None if it asked for none."""
    if k is None:
        return None
    if isinstance(kept, LogprobRows):
        rows = kept.arrays()
    else:  # vLLM's FlatLogprobs: a rank for each token of a position, and an empty first position for a prompt
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

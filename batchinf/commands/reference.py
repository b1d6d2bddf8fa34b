"""Runs a job's model with transformers in float32, one sequence at a time, for `verify`."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from batchinf.base.errors import UserError
from batchinf.base.text import error_message
from batchinf.model.model import Model
from batchinf.records import FloatArray, Int64Array
from batchinf.tasks.base import Task

# Positions whose logprobs are computed at once: 128 MB in float32 for 128,256 tokens, besides the logits of all.
_POSITIONS_AT_ONCE = 256
# vLLM's types of pooling → the vector [1, width] of a sequence, from its states [num_tokens, width].
_POOLERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "LAST": lambda states: states[-1:],
    "MEAN": lambda states: states.mean(0, keepdim=True),
    "CLS": lambda states: states[:1],
}


class Reference:
    """The job's model: a causal language model, or one that embeds."""

    def __init__(self, task: Task, model: Model, device: str) -> None:
        """Raises UserError if transformers cannot load the model."""
        self.description = f"transformers {transformers.__version__} in float32 on {device}"
        self._device = device
        self._pooling = task.pooling
        auto = transformers.AutoModelForCausalLM if self._pooling is None else transformers.AutoModel
        transformers.utils.logging.disable_progress_bar()
        try:
            loaded = auto.from_pretrained(
                model.path,
                revision=model.commit if not pathlib.Path(model.path).is_dir() else None,
                dtype=torch.float32,
                attn_implementation="eager",  # the plainest arithmetic
                trust_remote_code=task.spec.model.trust_remote_code,
            )
            self._model: Any = loaded.to(device).eval()
        except Exception as error:  # the model's own code may raise anything
            reason = error_message(error, 300)
            raise UserError(f"transformers cannot load '{model.name}' to verify it: {reason}") from error

    def embedding(self, token_ids: list[int], pooling_type: str, dimensions: int | None) -> FloatArray:
        """The embedding of a sequence, [1, width]. pooling_type: in vLLM's words. Raises UserError for other types."""
        if pooling_type not in _POOLERS:
            raise UserError(
                f"the engine pooled by {pooling_type or 'a way that it did not say'}; {', '.join(_POOLERS)} can be "
                "verified"
            )
        with torch.inference_mode():
            states = self._model(input_ids=self._tensor(token_ids)[None]).last_hidden_state[0]
        vector = _POOLERS[pooling_type](states)[:, :dimensions]
        is_normalized = self._pooling is not None and self._pooling.use_activation
        vector = torch.nn.functional.normalize(vector, dim=-1) if is_normalized else vector
        array: FloatArray = vector.cpu().numpy()
        return array

    def logits(
        self, token_ids: list[int], positions: Int64Array, tokens: npt.NDArray[Any] | None, *, are_logprobs: bool
    ) -> Iterator[FloatArray]:
        """The logits or logprobs that the model gives after the tokens at `positions`, in pieces [n, k].

        tokens: [num_positions, k], whose numbers are wanted; None: those of the whole vocabulary.
        """
        first = int(positions.min())
        stop = int(positions.max()) + 1
        ids = self._tensor(token_ids[:stop])[None]
        with torch.inference_mode():
            try:
                output = self._model(input_ids=ids, use_cache=False, logits_to_keep=stop - first)
            except TypeError:  # a model's own code may not have logits_to_keep
                output = self._model(input_ids=ids, use_cache=False)
        logits = output.logits[0, first - stop :]
        for start in range(0, len(positions), _POSITIONS_AT_ONCE):
            block = slice(start, start + _POSITIONS_AT_ONCE)
            rows = logits[self._tensor(positions[block] - first)]
            rows = rows.log_softmax(-1) if are_logprobs else rows
            yield (rows if tokens is None else rows.gather(1, self._tensor(tokens[block]))).cpu().numpy()

    def _tensor(self, numbers: Any) -> torch.Tensor:
        return torch.tensor(np.asarray(numbers, np.int64), device=self._device)

"""Runs a job's model with transformers in float32, one sequence at a time and with LoRA adapters, for `verify`."""

import math
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from batchinf.base.errors import UserError
from batchinf.base.text import error_message
from batchinf.model import files as model_files
from batchinf.model.files import ADAPTER, ADAPTER_CONFIG
from batchinf.model.lora import TENSOR_NAME, Adapter
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

    def __init__(self, task: Task, model: Model, device: str, adapters: Sequence[Adapter] = ()) -> None:
        """Raises UserError if transformers cannot load the model."""
        self.description = f"transformers {transformers.__version__} in float32 on {device}"
        self._device = device
        self._pooling = task.pooling
        self._adapters = {adapter.name: adapter for adapter in adapters}
        self._changed: dict[str, torch.Tensor] = {}
        self._current: str | None = None
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

    def merge(self, name: str | None) -> None:
        """Add this adapter to the weights. Weights that the previous adapter changed are restored, bit by bit."""
        if name == self._current:
            return
        for module, weight in self._changed.items():
            self._model.get_submodule(module).weight.data.copy_(weight)
        self._changed = {}
        self._current = name
        if name is None:
            return
        for module, delta in _deltas(self._adapters[name]):
            module = module if self._has(module) else module.removeprefix(f"{self._model.base_model_prefix}.")
            if not self._has(module):
                raise UserError(f"the adapter '{name}' changes {module}, which transformers' model does not have")
            weight = self._model.get_submodule(module).weight
            self._changed[module] = weight.data.to("cpu", copy=True)
            delta = delta if delta.shape == weight.shape else delta.T
            weight.data += delta.to(weight.device)

    def _has(self, module: str) -> bool:
        try:
            return hasattr(self._model.get_submodule(module), "weight")
        except AttributeError:
            return False


def _deltas(adapter: Adapter) -> Iterator[tuple[str, torch.Tensor]]:
    """B·A·scale in float32, by module. Raises UserError if the adapter has other tensors, too."""
    folder = pathlib.Path(adapter.path)
    config = model_files.read_json(folder / ADAPTER_CONFIG)
    tensors: dict[str, torch.Tensor] = {}
    for file in model_files.weight_files(folder, ADAPTER):
        if not file.endswith(".safetensors"):
            raise UserError(f"the adapter '{adapter.name}' is in {file}, a pickle, which verify does not open; save it "
                            "as safetensors")  # fmt: skip
        from safetensors.torch import load_file

        tensors |= load_file(folder / file)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for tensor, weight in tensors.items():
        half = TENSOR_NAME.fullmatch(tensor)
        if half is None:
            raise UserError(
                f"the adapter '{adapter.name}' has {tensor}, which is neither lora_A nor lora_B: it cannot be verified"
            )
        pairs.setdefault(half["module"], {})[half["half"]] = weight.float()
    for module, halves in pairs.items():
        yield module, halves["B"] @ halves["A"] * _scale(config, module, len(halves["A"]))


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """PEFT's scale: alpha / rank, or alpha / sqrt(rank) for rsLoRA. A module may have its own alpha."""
    patterns = (config.get("alpha_pattern") or {}).items()
    alphas = (alpha for name, alpha in patterns if re.match(rf"(.*\.)?({name})$", module))
    alpha = float(next(alphas, config["lora_alpha"]))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank

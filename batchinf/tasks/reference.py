"""Runs a job's model with transformers, one sequence at a time and with LoRA adapters. `verify` compares with it."""

import math
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from batchinf.base.errors import UserError
from batchinf.base.text import error_message
from batchinf.model import files as model_files
from batchinf.model.files import ADAPTER, ADAPTER_CONFIG
from batchinf.model.identity import Model
from batchinf.model.lora import TENSOR_NAME, Adapter
from batchinf.records import FloatArray
from batchinf.spec.job import JobSpec
from batchinf.tasks.verification import ReferenceWanted, StoredLogprobs, StoredVectors

# Positions whose logprobs are computed at once: 128 MB in float32 for 128,256 tokens, besides the logits of all.
_POSITIONS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Scores:
    """The reference's results for consecutive positions."""

    values: npt.NDArray[np.float32]
    """[num_positions, k + 1], logprobs (or logits) of `StoredLogprobs.tokens`."""
    best: npt.NDArray[np.int64]
    """[num_positions], the likeliest token."""


class Reference:
    """A model of transformers, by default a causal language model."""

    auto = "AutoModelForCausalLM"
    """The class that loads it, if the job has no images."""
    auto_of_images = "AutoModelForImageTextToText"
    """The class that loads it in a job with images."""

    def __init__(self, spec: JobSpec, wanted: ReferenceWanted) -> None:
        """spec: resolved. Raises UserError if transformers cannot load the model."""
        model = wanted.model
        self._adapters = {adapter.name: adapter for adapter in wanted.adapters}
        self._changed: dict[str, torch.Tensor] = {}
        self._current: str | None = None
        self._device = wanted.device
        self._are_logits = wanted.are_logits
        transformers.utils.logging.disable_progress_bar()
        self.description = f"transformers {transformers.__version__} in {wanted.dtype} on {wanted.device}"
        try:
            # Eager attention has the plainest arithmetic.
            auto = self.auto_of_images if spec.input.has_images else self.auto
            loaded, info = getattr(transformers, auto).from_pretrained(
                model.path,
                revision=model.commit if not pathlib.Path(model.path).is_dir() else None,
                dtype=getattr(torch, wanted.dtype),
                attn_implementation="eager",
                trust_remote_code=spec.model.trust_remote_code,
                output_loading_info=True,
            )
            self._model: Any = loaded.to(wanted.device).eval()
        except Exception as error:  # the model's own code may raise anything
            reason = error_message(error, 300)
            raise UserError(f"transformers cannot load '{model.name}' to verify it: {reason}") from error
        self._check_loaded(model, info)

    def _check_loaded(self, model: Model, info: dict[str, Any]) -> None:
        """Raise UserError if a needed part of the model was not loaded."""

    def scores(self, stored: StoredLogprobs, adapter: str | None) -> Scores:
        """Logprobs of the tokens whose logprobs are stored, by teacher forcing."""
        self.merge(adapter)
        num_positions = len(stored.tokens)
        values = []
        best = []
        with torch.inference_mode():
            logits = self.logits(stored, stored.first + num_positions - 1, num_positions)
            for start in range(0, num_positions, _POSITIONS_AT_ONCE):
                positions = slice(start, start + _POSITIONS_AT_ONCE)
                rows = self._values(logits[positions])
                tokens = torch.from_numpy(stored.tokens[positions]).to(rows.device)
                values.append(rows.gather(1, tokens).cpu().numpy())
                best.append(rows.argmax(-1).cpu().numpy())
        return Scores(np.concatenate(values), np.concatenate(best))

    def vectors(self, stored: StoredVectors, adapter: str | None) -> Iterator[FloatArray]:
        """The same vectors as `stored`, computed again: [n, width] in order, in several pieces. Raises UserError.

        By default these are vectors over the vocabulary.
        """
        self.merge(adapter)
        positions = stored.positions
        assert positions is not None
        width = stored.values.shape[1]
        first = int(positions.min())
        last = int(positions.max())
        with torch.inference_mode():
            logits = self.logits(stored, last + 1, last + 1 - first)
            if stored.vocabulary is None:
                check_width(width, min(width, logits.shape[1]))
                vocabulary = None
            else:
                ids = np.broadcast_to(np.asarray(stored.vocabulary, np.int64), stored.values.shape)
                vocabulary = torch.tensor(ids, device=logits.device)
            for start in range(0, len(positions), _POSITIONS_AT_ONCE):
                block = slice(start, start + _POSITIONS_AT_ONCE)
                values = self._values(logits[torch.from_numpy(positions[block] - first).to(logits.device)])
                values = values[:, :width] if vocabulary is None else values.gather(1, vocabulary[block])
                yield values.cpu().numpy()

    def _values(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of some positions, or their log-softmax if that is wanted, in float32."""
        return logits.float() if self._are_logits else logits.float().log_softmax(-1)

    def logits(self, stored: StoredLogprobs | StoredVectors, stop: int, num_positions: int) -> torch.Tensor:
        """[num_positions, vocab_size], for the last of the first `stop` positions of a sequence."""
        # A sequence with images runs whole: its end may be a part of an image.
        end = stop if stored.rendered is None else len(stored.token_ids)
        inputs = self.inputs(stored.token_ids[:end], stored)
        num_kept = num_positions + end - stop
        try:
            output = self._model(**inputs, use_cache=False, logits_to_keep=num_kept)
        except TypeError:  # a model's own code may not have logits_to_keep
            output = self._model(**inputs, use_cache=False)
        logits: torch.Tensor = output.logits[0, -num_kept:][:num_positions]
        return logits

    def inputs(self, token_ids: list[int], stored: StoredLogprobs | StoredVectors) -> dict[str, Any]:
        """The arguments of the model: a sequence, with its images."""
        of_images = {} if stored.rendered is None else stored.rendered(token_ids)
        weights = self._model.dtype
        tensors = {
            name: tensor.to(self._device, weights if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in of_images.items()
        }
        return {"input_ids": torch.tensor([token_ids], device=self._device), **tensors}

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
        adapter = self._adapters[name]
        for module, delta in _deltas(adapter):
            module = module if self._has(module) else module.removeprefix(f"{self._model.base_model_prefix}.")
            if not self._has(module):
                raise UserError(f"the adapter '{name}' changes {module}, which transformers' model does not have")
            weight = self._model.get_submodule(module).weight
            self._changed[module] = weight.data.to("cpu", copy=True)
            delta = delta if delta.shape == weight.shape else delta.T
            weight.data += delta.to(weight.device, weight.dtype)

    def _has(self, module: str) -> bool:
        try:
            return hasattr(self._model.get_submodule(module), "weight")
        except AttributeError:
            return False


def check_width(stored: int, given: int) -> None:
    """Raise UserError if the job's vectors and those of transformers have different widths."""
    if stored != given:
        raise UserError(
            f"the job's rows have {stored:,} numbers each, transformers' {given:,}: they cannot be verified"
        )


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

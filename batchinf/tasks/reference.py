"""The model that `verify` compares a job with, run by transformers one sequence at a time, with its LoRA adapters."""

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
from batchinf.model.files import ADAPTER
from batchinf.model.identity import Model
from batchinf.model.lora import ADAPTER_CONFIG, TENSOR_NAME, Adapter
from batchinf.records import FloatArray
from batchinf.spec.job import JobSpec
from batchinf.tasks.compare import ReferenceWanted, StoredVectors

# Positions whose logprobs are made at once, beside the logits of all: 128 MB in float32 for 128,256 tokens.
POSITIONS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Scores:
    """What the reference says of a run of positions.

    values: float32 [num_positions, num_wanted], logprobs (or logits) of the tokens asked for. best: int64
    [num_positions], the likeliest token of each.
    """

    values: npt.NDArray[np.float32]
    best: npt.NDArray[np.int64]


class Reference:
    """A model of transformers: here a causal language model. auto: the class that loads it."""

    auto = "AutoModelForCausalLM"

    def __init__(self, spec: JobSpec, wanted: ReferenceWanted) -> None:
        """spec: the resolved one. Raises UserError, in one line, where transformers cannot load the model."""
        model, dtype, device = wanted.model, wanted.dtype, wanted.device
        self._spec = spec
        self._adapters = {adapter.name: adapter for adapter in wanted.adapters}
        self._changed: dict[str, torch.Tensor] = {}
        self._current: str | None = None
        self._device = device
        transformers.utils.logging.disable_progress_bar()
        self.description = f"transformers {transformers.__version__} in {dtype} on {device}"
        try:
            # The module's own eager attention: the plainest arithmetic there is.
            loaded, info = getattr(transformers, self.auto).from_pretrained(
                model.path,
                revision=model.commit if not pathlib.Path(model.path).is_dir() else None,
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
                trust_remote_code=spec.model.trust_remote_code,
                output_loading_info=True,
            )
            self._model: Any = loaded.to(device).eval()
        except Exception as error:  # anything at all may come out of here
            reason = error_message(error, 300)
            raise UserError(f"transformers cannot load '{model.name}' to verify it: {reason}") from error
        self._check_loaded(model, info)

    def _check_loaded(self, model: Model, info: dict[str, Any]) -> None:
        """Raise UserError where what was loaded is not all of the model that is needed."""

    def scores(
        self,
        token_ids: list[int],
        first: int,
        wanted: npt.NDArray[np.int64],
        adapter: str | None = None,
        are_logits: bool = False,
    ) -> Scores:
        """Teacher-forced: what the model says, after token `first + i - 1`, of the tokens `wanted[i]`.

        wanted: int64 [num_positions, num_wanted]. are_logits: before the softmax.
        """
        self.merge(adapter)
        last = first + len(wanted)
        ids = torch.tensor([token_ids[: last - 1]], device=self._device)
        values, best = [], []
        with torch.inference_mode():
            logits = self.logits(ids, len(wanted))
            for start in range(0, len(wanted), POSITIONS_AT_ONCE):
                stop = start + POSITIONS_AT_ONCE
                rows = logits[start:stop].float()
                if not are_logits:
                    rows = rows.log_softmax(-1)
                asked = torch.from_numpy(wanted[start:stop]).to(rows.device)
                values.append(rows.gather(1, asked).cpu().numpy())
                best.append(rows.argmax(-1).cpu().numpy())
        return Scores(np.concatenate(values), np.concatenate(best))

    def vectors(self, stored: StoredVectors, adapter: str | None, are_logits: bool) -> Iterator[FloatArray]:
        """The vectors that are stored as `stored`, [n, width], some at a time in their order. Raises UserError.

        are_logits: before the softmax, where they are of a vocabulary.
        """
        raise NotImplementedError

    def logits(self, ids: torch.Tensor, num_positions: int) -> torch.Tensor:
        """[num_positions, vocab_size], of the last positions."""
        try:
            output = self._model(input_ids=ids, use_cache=False, logits_to_keep=num_positions)
        except TypeError:  # code of a model's own may not know it
            output = self._model(input_ids=ids, use_cache=False)
        logits: torch.Tensor = output.logits[0, -num_positions:]
        return logits

    def merge(self, name: str | None) -> None:
        """Make the weights those of this adapter. What it changed is put back as it was, bit by bit."""
        if name == self._current:
            return
        for module, weight in self._changed.items():
            self._model.get_submodule(module).weight.data.copy_(weight)
        self._changed, self._current = {}, name
        if name is None:
            return
        adapter = self._adapters[name]
        for module, delta in _deltas(adapter):
            module = module if self._has(module) else module.removeprefix(f"{self._model.base_model_prefix}.")
            if not self._has(module):
                raise UserError(f"the adapter '{name}' changes {module}, which transformers' model has not")
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
    """Raise UserError where the job's rows and transformers' have not as many numbers."""
    if stored != given:
        raise UserError(
            f"the job's rows have {stored:,} numbers each, transformers' {given:,}: they cannot be verified"
        )


def _deltas(adapter: Adapter) -> Iterator[tuple[str, torch.Tensor]]:
    """B·A·scale in float32, by module. Raises UserError where the adapter has more than such pairs."""
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
        found = TENSOR_NAME.fullmatch(tensor)
        if found is None:
            raise UserError(f"the adapter '{adapter.name}' has {tensor}, which is no half of a matrix: not verified")
        pairs.setdefault(found["module"], {})[found["half"]] = weight.float()
    for module, halves in pairs.items():
        yield module, halves["B"] @ halves["A"] * _scale(config, module, len(halves["A"]))


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """PEFT's: alpha / rank, or over its root (rsLoRA); a module may have an alpha of its own."""
    own = (
        alpha for name, alpha in (config.get("alpha_pattern") or {}).items() if re.match(rf"(.*\.)?({name})$", module)
    )
    alpha = float(next(own, config["lora_alpha"]))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank

"""The reference that `verify` compares a job with: the model run by transformers, one sequence at a time."""

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
from batchinf.commands.verify.claims import RowsClaim
from batchinf.model import files as model_files
from batchinf.model.files import ADAPTER
from batchinf.model.identity import Model
from batchinf.model.lora import ADAPTER_CONFIG, Adapter
from batchinf.spec.job import JobSpec
from batchinf.tasks.vectors.model import projected_width

# Positions whose logprobs are made at once, beside the logits of all: 128 MB in float32 for 128,256 tokens.
_POSITIONS_AT_ONCE = 256
_HALF = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class Scores:
    """What the reference says of a run of positions.

    values: float32 [num_positions, num_wanted], logprobs (or logits) of the tokens asked for. best: int64
    [num_positions], the likeliest token of each.
    """

    values: npt.NDArray[np.float32]
    best: npt.NDArray[np.int64]


class Reference:
    """A model of transformers: here a causal language model."""

    auto = "AutoModelForCausalLM"

    def __init__(self, spec: JobSpec, model: Model, adapters: tuple[Adapter, ...], dtype: str, device: str) -> None:
        """spec: the resolved one. dtype: of weights and arithmetic. Raises UserError, in one line, where transformers
        cannot load the model.
        """
        self._spec = spec
        self._adapters = {adapter.name: adapter for adapter in adapters}
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
            words = " ".join(f"{error}".split())[:300] or type(error).__name__
            raise UserError(f"transformers cannot load '{model.name}' to verify it: {words}") from error
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
        self._merge(adapter)
        last = first + len(wanted)
        ids = torch.tensor([token_ids[: last - 1]], device=self._device)
        values, best = [], []
        with torch.inference_mode():
            logits = self._logits(ids, len(wanted))
            for start in range(0, len(wanted), _POSITIONS_AT_ONCE):
                stop = start + _POSITIONS_AT_ONCE
                rows = logits[start:stop].float()
                if not are_logits:
                    rows = rows.log_softmax(-1)
                asked = torch.from_numpy(wanted[start:stop]).to(rows.device)
                values.append(rows.gather(1, asked).cpu().numpy())
                best.append(rows.argmax(-1).cpu().numpy())
        return Scores(np.concatenate(values), np.concatenate(best))

    def rows(self, claim: RowsClaim, adapter: str | None, are_logits: bool) -> Iterator[npt.NDArray[np.float32]]:
        """The numbers that a claim is of, [n, width], some at a time in their order. Raises UserError.

        are_logits: before the softmax, where the claim is of a vocabulary's.
        """
        self._merge(adapter)
        logits_of, positions = self._spec.logits, claim.positions
        assert logits_of is not None and positions is not None
        first, last = int(positions.min()), int(positions.max())
        ids = torch.tensor([claim.token_ids[: last + 1]], device=self._device)
        with torch.inference_mode():
            logits = self._logits(ids, last + 1 - first)
            if logits_of.is_full:
                check_width(logits_of.width, min(logits_of.width, logits.shape[1]))
            columns = None if logits_of.is_full else torch.tensor(logits_of.token_ids, device=logits.device)
            for start in range(0, len(positions), _POSITIONS_AT_ONCE):
                places = torch.from_numpy(positions[start : start + _POSITIONS_AT_ONCE] - first).to(logits.device)
                rows = logits[places].float()
                if not are_logits:
                    rows = rows.log_softmax(-1)
                rows = rows[:, : logits_of.width] if columns is None else rows[:, columns]
                yield rows.cpu().numpy()

    def _logits(self, ids: torch.Tensor, num_positions: int) -> torch.Tensor:
        """[num_positions, vocab_size], of the last positions."""
        try:
            output = self._model(input_ids=ids, use_cache=False, logits_to_keep=num_positions)
        except TypeError:  # code of a model's own may not know it
            output = self._model(input_ids=ids, use_cache=False)
        logits: torch.Tensor = output.logits[0, -num_positions:]
        return logits

    def _merge(self, name: str | None) -> None:
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
        found = _HALF.fullmatch(tensor)
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


_POOLING_TYPES = ("LAST", "MEAN", "CLS")
# Of a config, where cross-encoders of sentence-transformers have theirs.
_OWN_ACTIVATIONS = ("sentence_transformers", "sbert_ce_default_activation_function")


class StatesReference(Reference):
    """A model without a head, of which `embed` and `hidden_states` store what its layers make."""

    auto = "AutoModel"

    def __init__(
        self, spec: JobSpec, model: Model, adapters: tuple[Adapter, ...], dtype: str, device: str, pooling_type: str
    ) -> None:
        """pooling_type: of which positions an embedding is made, as vLLM said: LAST, MEAN or CLS. Raises UserError."""
        if spec.task == "embed" and pooling_type not in _POOLING_TYPES:
            raise UserError(
                f"the engine pooled by {pooling_type or 'a way that it did not say'}; {', '.join(_POOLING_TYPES)} can "
                "be verified"
            )
        if spec.task == "embed" and projected_width(model, spec) is not None:
            raise UserError(
                f"'{model.name}' has a dense layer behind it (modules.json), which transformers does not apply: its "
                "embeddings cannot be verified"
            )
        super().__init__(spec, model, adapters, dtype, device)
        self._pooling_type = pooling_type
        self._before_norm: list[torch.Tensor] = []
        depth = self._model.config.get_text_config().num_hidden_layers
        if self._needs_last_layer(depth):
            _last_layer(self._model, depth).register_forward_hook(self._keep)

    def _needs_last_layer(self, depth: int) -> bool:
        pooling = self._spec.pooling
        return self._spec.task == "hidden_states" and (not pooling.final_norm or depth in (pooling.layers or ()))

    def _keep(self, _: Any, __: Any, output: Any) -> None:
        # transformers' own `hidden_states` has the last layer's with the final norm applied.
        self._before_norm = [output[0] if isinstance(output, tuple) else output]

    def rows(self, claim: RowsClaim, adapter: str | None, are_logits: bool) -> Iterator[npt.NDArray[np.float32]]:
        """See `Reference.rows`: one piece."""
        self._merge(adapter)
        pooling, ids = self._spec.pooling, torch.tensor([claim.token_ids], device=self._device)
        with torch.inference_mode():
            output = self._model(input_ids=ids, output_hidden_states=pooling.layers is not None)
            states = self._states(output, claim.kind)
            found = self._pooled(states) if claim.positions is None else states[torch.from_numpy(claim.positions)]
        check_width(claim.values.shape[1], found.shape[1])
        yield found.cpu().numpy()

    def _states(self, output: Any, column: str) -> torch.Tensor:
        """[num_tokens, width] in float32, of a column's layer."""
        pooling = self._spec.pooling
        states = output.last_hidden_state
        if pooling.layers is not None:
            layer = int(column.rpartition("_")[2])
            is_last = layer == len(output.hidden_states) - 1
            states = self._before_norm[0] if is_last else output.hidden_states[layer]
        elif not pooling.final_norm:
            states = self._before_norm[0]
        found: torch.Tensor = states.reshape(-1, states.shape[-1]).float()
        return found

    def _pooled(self, states: torch.Tensor) -> torch.Tensor:
        """[1, width]: an embedding."""
        pooling = self._spec.pooling
        means = {"LAST": lambda: states[-1:], "CLS": lambda: states[:1], "MEAN": lambda: states.mean(0, keepdim=True)}
        vector: torch.Tensor = means[self._pooling_type]()[:, : pooling.dimensions]
        return torch.nn.functional.normalize(vector, dim=-1) if pooling.normalize else vector


def _last_layer(model: Any, depth: int) -> Any:
    """The last of a model's layers: of the longest list of modules, where that has as many as it has layers."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == depth]
    if not lists:
        name = type(model).__name__
        raise UserError(f"transformers' {name} has no list of {depth} layers; what its last one gives is not verified")
    return lists[0][-1]


class HeadReference(Reference):
    """A model with a classification head, of which `classify` and `reward` store what it says."""

    auto = "AutoModelForSequenceClassification"

    def __init__(self, spec: JobSpec, model: Model, adapters: tuple[Adapter, ...], dtype: str, device: str) -> None:
        """Raises UserError, too, where vLLM was told to do what transformers' heads do not."""
        given = {
            "pooling.pooling_type": spec.pooling.pooling_type,
            "engine.pooler_config": spec.engine.get("pooler_config"),
        }
        for name, value in given.items():
            if value is not None:
                raise UserError(f"{name} is {value}; transformers' head has a way of its own: it cannot be verified")
        if self._is_active(spec) and any(model.config.get(name) for name in _OWN_ACTIVATIONS):
            raise UserError(
                f"'{model.name}' names an activation of its own, which transformers does not apply; a job with "
                "pooling.use_activation: false can be verified"
            )
        super().__init__(spec, model, adapters, dtype, device)

    def _check_loaded(self, model: Model, info: dict[str, Any]) -> None:
        # transformers makes up a head where it finds none.
        if missing := sorted(info["missing_keys"]):
            raise UserError(
                f"transformers finds no {', '.join(missing[:3])} in '{model.name}': its head is made by vLLM, and "
                "cannot be verified"
            )

    def rows(self, claim: RowsClaim, adapter: str | None, are_logits: bool) -> Iterator[npt.NDArray[np.float32]]:
        """See `Reference.rows`: one row."""
        self._merge(adapter)
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([claim.token_ids], device=self._device)).logits.float()
            found = logits if not self._is_active(self._spec) else self._activated(logits)
        check_width(claim.values.shape[1], found.shape[1])
        yield found.cpu().numpy()

    @staticmethod
    def _is_active(spec: JobSpec) -> bool:
        pooling = spec.pooling
        return pooling.use_activation is not False if spec.task == "classify" else bool(pooling.use_activation)

    def _activated(self, logits: torch.Tensor) -> torch.Tensor:
        """What vLLM's `get_act_fn` chooses, the same in 0.26 and 0.32."""
        kind = self._model.config.problem_type
        if kind == "regression":
            return logits
        if kind == "multi_label_classification" or logits.shape[-1] < 2:
            return logits.sigmoid()
        return logits.softmax(-1)

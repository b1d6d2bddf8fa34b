"""The references of the tasks that make vectors: a model's states, and a classification head, by transformers.

Imports torch and transformers, which takes seconds.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchinf.adapter import Adapter
from batchinf.claims import RowsClaim
from batchinf.errors import UserError
from batchinf.model import Model
from batchinf.pooling import projected_width
from batchinf.reference import Reference, check_width
from batchinf.spec import JobSpec

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

"""References of the vector tasks for `verify`: a model's hidden states, or its classification head."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchinf.base.errors import UserError
from batchinf.model.identity import Model
from batchinf.records import FloatArray
from batchinf.spec.job import JobSpec
from batchinf.tasks.reference import Reference, check_width
from batchinf.tasks.vectors.model_config import projected_width
from batchinf.tasks.vectors.section import is_activated, pooling_of
from batchinf.tasks.verification import ReferenceWanted, StoredVectors

_POOLING_TYPES = ("LAST", "MEAN", "CLS")
# Config keys with which cross-encoders of sentence-transformers name their own activation.
_OWN_ACTIVATIONS = ("sentence_transformers", "sbert_ce_default_activation_function")


class _StatesReference(Reference):
    """A model without a head, for `embed` and `hidden_states`."""

    auto = "AutoModel"

    def __init__(self, spec: JobSpec, wanted: ReferenceWanted) -> None:
        super().__init__(spec, wanted)
        self._pooling = pooling_of(spec)
        self._before_norm: list[torch.Tensor] = []
        depth = self._model.config.get_text_config().num_hidden_layers
        if self.needs_last_layer(depth):
            _last_layer(self._model, depth).register_forward_hook(self._keep)

    def needs_last_layer(self, depth: int) -> bool:
        """Whether the states of the last layer are needed before the final norm. depth: number of layers."""
        return False

    def _keep(self, _: Any, __: Any, output: Any) -> None:
        # transformers applies the final norm to the last layer's states in its own `hidden_states`.
        self._before_norm = [output[0] if isinstance(output, tuple) else output]

    def vectors(self, stored: StoredVectors, adapter: str | None) -> Iterator[FloatArray]:
        """See `Reference.vectors`: in one piece."""
        self.merge(adapter)
        ids = torch.tensor([stored.token_ids], device=self._device)
        with torch.inference_mode():
            output = self._model(input_ids=ids, output_hidden_states=self._pooling.layers is not None)
            states = self._states(output, stored.kind)
            vectors = self.chosen(states, stored.positions)
        check_width(stored.values.shape[1], vectors.shape[1])
        yield vectors.cpu().numpy()

    def chosen(self, states: torch.Tensor, positions: npt.NDArray[np.int64] | None) -> torch.Tensor:
        """The vectors [n, width] from the states [num_tokens, width]."""
        raise NotImplementedError

    def _states(self, output: Any, column: str) -> torch.Tensor:
        """The states [num_tokens, width] of a column's layer, in float32."""
        pooling = self._pooling
        states = output.last_hidden_state
        if pooling.layers is not None:
            layer = int(column.rpartition("_")[2])
            is_last = layer == len(output.hidden_states) - 1
            states = self._before_norm[0] if is_last else output.hidden_states[layer]
        elif self._before_norm:
            states = self._before_norm[0]
        rows: torch.Tensor = states.reshape(-1, states.shape[-1]).float()
        return rows


class EmbedReference(_StatesReference):
    """See `_StatesReference`."""

    def __init__(self, spec: JobSpec, wanted: ReferenceWanted) -> None:
        """Raises UserError if transformers cannot pool like vLLM, or if a dense layer follows the model."""
        self._pooling_type = wanted.pooling_type
        if self._pooling_type not in _POOLING_TYPES:
            raise UserError(
                f"the engine pooled by {self._pooling_type or 'a way that it did not say'}; "
                f"{', '.join(_POOLING_TYPES)} can be verified"
            )
        if projected_width(wanted.model, spec) is not None:
            raise UserError(
                f"'{wanted.model.name}' has a dense layer behind it (modules.json), which transformers does not apply: "
                "its embeddings cannot be verified"
            )
        super().__init__(spec, wanted)

    def chosen(self, states: torch.Tensor, positions: npt.NDArray[np.int64] | None) -> torch.Tensor:
        """See `_StatesReference`: the embedding."""
        means = {"LAST": lambda: states[-1:], "CLS": lambda: states[:1], "MEAN": lambda: states.mean(0, keepdim=True)}
        vector: torch.Tensor = means[self._pooling_type]()[:, : self._pooling.dimensions]
        return torch.nn.functional.normalize(vector, dim=-1) if self._pooling.normalize else vector


class HiddenStatesReference(_StatesReference):
    """See `_StatesReference`."""

    def needs_last_layer(self, depth: int) -> bool:
        return not self._pooling.final_norm or depth in (self._pooling.layers or ())

    def chosen(self, states: torch.Tensor, positions: npt.NDArray[np.int64] | None) -> torch.Tensor:
        assert positions is not None
        return states[torch.from_numpy(positions)]


def _last_layer(model: Any, depth: int) -> Any:
    """A model's last layer: the end of the list of modules with as many items as the model has layers."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == depth]
    if not lists:
        name = type(model).__name__
        raise UserError(f"transformers' {name} has no list of {depth} layers; its last layer cannot be verified")
    return lists[0][-1]


class HeadReference(Reference):
    """A model with a classification head, for `classify` and `reward`."""

    auto = "AutoModelForSequenceClassification"

    def __init__(self, spec: JobSpec, wanted: ReferenceWanted) -> None:
        """Raises UserError for settings of vLLM that transformers' heads lack."""
        model = wanted.model
        self._is_activated = is_activated(spec)
        settings = {
            "pooling.pooling_type": pooling_of(spec).pooling_type,
            "engine.pooler_config": spec.engine.get("pooler_config"),
        }
        for name, value in settings.items():
            if value is not None:
                raise UserError(f"{name} is {value}, which transformers' head does not take: it cannot be verified")
        if self._is_activated and any(model.config.get(name) for name in _OWN_ACTIVATIONS):
            raise UserError(
                f"'{model.name}' names an activation of its own, which transformers does not apply; a job with "
                "pooling.use_activation: false can be verified"
            )
        super().__init__(spec, wanted)

    def _check_loaded(self, model: Model, info: dict[str, Any]) -> None:
        # transformers initialises a missing head at random.
        if missing := sorted(info["missing_keys"]):
            raise UserError(
                f"transformers finds no {', '.join(missing[:3])} in '{model.name}': its head is made by vLLM, and "
                "cannot be verified"
            )

    def vectors(self, stored: StoredVectors, adapter: str | None) -> Iterator[FloatArray]:
        """See `Reference.vectors`: one vector."""
        self.merge(adapter)
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([stored.token_ids], device=self._device)).logits.float()
            outputs = self._activated(logits) if self._is_activated else logits
        check_width(stored.values.shape[1], outputs.shape[1])
        yield outputs.cpu().numpy()

    def _activated(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the activation that vLLM's `get_act_fn` chooses, which is the same in 0.26 and 0.32."""
        kind = self._model.config.problem_type
        if kind == "regression":
            return logits
        if kind == "multi_label_classification" or logits.shape[-1] < 2:
            return logits.sigmoid()
        return logits.softmax(-1)


# By the name of the task.
REFERENCES: dict[str, type[Reference]] = {
    "embed": EmbedReference,
    "classify": HeadReference,
    "reward": HeadReference,
    "hidden_states": HiddenStatesReference,
}

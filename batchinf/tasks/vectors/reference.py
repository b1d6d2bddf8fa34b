"""References of the vector tasks for `verify`: a model's hidden states, or its classification head."""

from collections.abc import Iterator
from typing import Any

import torch

from batchinf.base.errors import UserError
from batchinf.model.identity import Model
from batchinf.records import FloatArray
from batchinf.spec.job import JobSpec
from batchinf.tasks.reference import Reference, check_width
from batchinf.tasks.vectors.section import CROSS_ENCODER, is_activated, pooling_of, projected_width
from batchinf.tasks.verification import ReferenceWanted, StoredVectors

_POOLING_TYPES = ("LAST", "MEAN", "CLS")
# Config keys with which cross-encoders of sentence-transformers name their own activation.
_OWN_ACTIVATIONS = ("sentence_transformers", "sbert_ce_default_activation_function")


class _PooledReference(Reference):
    """A model without the head of a language model."""

    auto = "AutoModel"
    auto_of_images = "AutoModel"

    def __init__(self, spec: JobSpec, wanted: ReferenceWanted) -> None:
        super().__init__(spec, wanted)
        self._pooling = pooling_of(spec)

    def vectors(self, stored: StoredVectors, adapter: str | None) -> Iterator[FloatArray]:
        """See `Reference.vectors`: in one piece."""
        self.merge(adapter)
        with torch.inference_mode():
            output = self._run(stored.token_ids, stored)
            vectors = self.chosen(output, stored)
        check_width(stored.values.shape[1], vectors.shape[1])
        yield vectors.cpu().numpy()

    def _run(self, token_ids: list[int], stored: StoredVectors) -> Any:
        """The model's output for a sequence."""
        inputs = self.inputs(token_ids, stored)
        start = None if stored.request is None else stored.request.token_type_start
        if start is not None:
            inputs["token_type_ids"] = (torch.arange(len(token_ids)) >= start).long()[None].to(self._device)
        return self._model(**inputs, output_hidden_states=self._pooling.layers is not None)

    def chosen(self, output: Any, stored: StoredVectors) -> torch.Tensor:
        """The vectors [n, width] from the model's output, in float32."""
        raise NotImplementedError


class EmbedReference(_PooledReference):
    """The embedding of a sequence."""

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
        self._has_lines = spec.input.is_batch_file

    def chosen(self, output: Any, stored: StoredVectors) -> torch.Tensor:
        states = _rows(output.last_hidden_state)
        is_vector = self._has_lines and stored.other_token_ids is None
        dimensions = stored.values.shape[1] if is_vector else self._pooling.dimensions  # a line has its own
        means = {"LAST": lambda: states[-1:], "CLS": lambda: states[:1], "MEAN": lambda: states.mean(0, keepdim=True)}
        vector: torch.Tensor = means[self._pooling_type]()[:, :dimensions]
        return torch.nn.functional.normalize(vector, dim=-1) if self._pooling.normalize else vector


class CosineReference(EmbedReference):
    """The cosine of the embeddings of two sequences."""

    def vectors(self, stored: StoredVectors, adapter: str | None) -> Iterator[FloatArray]:
        """See `Reference.vectors`."""
        assert stored.other_token_ids is not None
        self.merge(adapter)
        with torch.inference_mode():
            one, other = (
                self.chosen(self._run(ids, stored), stored) for ids in (stored.token_ids, stored.other_token_ids)
            )
            yield torch.nn.functional.cosine_similarity(one, other)[None].cpu().numpy()


class HiddenStatesReference(_PooledReference):
    """The hidden states of a model, after some of its layers or the last one."""

    def __init__(self, spec: JobSpec, wanted: ReferenceWanted) -> None:
        super().__init__(spec, wanted)
        self._before_norm: list[torch.Tensor] = []
        depth = self._model.config.get_text_config().num_hidden_layers
        if not self._pooling.final_norm or depth in (self._pooling.layers or ()):
            _last_layer(self._model, depth).register_forward_hook(self._keep)

    def _keep(self, _: Any, __: Any, output: Any) -> None:
        # transformers applies the final norm to the last layer's states in its own `hidden_states`.
        self._before_norm = [output[0] if isinstance(output, tuple) else output]

    def chosen(self, output: Any, stored: StoredVectors) -> torch.Tensor:
        assert stored.positions is not None
        states = self._before_norm[0] if self._before_norm else output.last_hidden_state
        if self._pooling.layers is not None:
            layer = int(stored.kind.rpartition("_")[2])
            is_last = layer == len(output.hidden_states) - 1
            states = self._before_norm[0] if is_last else output.hidden_states[layer]
        return _rows(states)[torch.from_numpy(stored.positions)]


def _rows(states: torch.Tensor) -> torch.Tensor:
    """[num_tokens, width], in float32."""
    return states.reshape(-1, states.shape[-1]).float()


def _last_layer(model: Any, depth: int) -> Any:
    """A model's last layer: the end of the list of modules with as many items as the model has layers."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == depth]
    if not lists:
        name = type(model).__name__
        raise UserError(f"transformers' {name} has no list of {depth} layers; its last layer cannot be verified")
    return lists[0][-1]


class HeadReference(_PooledReference):
    """A model with a classification head, for `classify` and `reward`."""

    auto = "AutoModelForSequenceClassification"
    auto_of_images = "AutoModelForSequenceClassification"

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

    def chosen(self, output: Any, stored: StoredVectors) -> torch.Tensor:
        logits: torch.Tensor = output.logits.float()
        own = None if stored.request is None else stored.request.use_activation
        return self._activated(logits) if (self._is_activated if own is None else own) else logits

    def _activated(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the activation that vLLM's `get_act_fn` chooses."""
        kind = self._model.config.problem_type
        if kind == "regression":
            return logits
        if kind == "multi_label_classification" or logits.shape[-1] < 2:
            return logits.sigmoid()
        return logits.softmax(-1)


def reference_of(spec: JobSpec, wanted: ReferenceWanted) -> Reference:
    """The reference of the spec's task. Raises UserError."""
    classes: dict[str, type[Reference]] = {
        "embed": EmbedReference,
        "classify": HeadReference,
        "reward": HeadReference,
        "hidden_states": HiddenStatesReference,
        "rerank": HeadReference if pooling_of(spec).score_type == CROSS_ENCODER else CosineReference,
    }
    return classes[spec.task](spec, wanted)

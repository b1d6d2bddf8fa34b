"""The vectors and classes of a model as its config describes them, for the tasks that store vectors."""

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import ModelError, SpecError
from batchinf.model import files as model_files
from batchinf.model.identity import Model, text_section
from batchinf.spec.job import JobSpec
from batchinf.tasks.vectors.section import pooling_of

_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
_DEPTH_KEYS = ("num_hidden_layers", "n_layer")
# Architectures with these endings have no classification head.
_GENERATORS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_HEADS_FROM = ("classifier_from_token", "method")  # with these keys vLLM makes a head of the LM head


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's config, with `engine.hf_overrides` applied."""

    model: Model
    values: Mapping[str, Any]

    @classmethod
    def of(cls, spec: JobSpec, model: Model) -> "ModelConfig":
        overrides = spec.engine.get("hf_overrides")
        return cls(model, {**model.config, **(overrides if isinstance(overrides, dict) else {})})

    def number(self, keys: tuple[str, ...]) -> int | None:
        """The first of these keys that has a whole number, in the text model's section or at the top level."""
        for section in (text_section(self.values), self.values):
            for key in keys:
                if isinstance(section.get(key), int):
                    return int(section[key])
        return None


def resolved_fields(spec: JobSpec, model: Model) -> dict[str, Any]:
    """The fields of the section `pooling` that depend on the model. Raises SpecError."""
    config = ModelConfig.of(spec, model)
    pooling = pooling_of(spec)
    if spec.task in ("classify", "reward"):
        labels = pooling.labels or _labels_of(config)
        _check_head(config, spec.task)
        return {"labels": labels} if spec.task == "classify" else {"width": pooling.width or len(labels)}
    if spec.task == "hidden_states":
        width = pooling.width or _width_of(config)
        _check_layers(config, spec)
    else:
        width = pooling.width or projected_width(model, spec) or _width_of(config)
        if pooling.dimensions is not None:
            _check_dimensions(config, pooling.dimensions, width)
    return {"width": width}


def _width_of(config: ModelConfig) -> int:
    """Numbers in one of the model's vectors."""
    width = config.number(_WIDTH_KEYS)
    if width is None:
        raise SpecError(
            "pooling.width: missing; the model's config does not say how many numbers a vector has: give that number"
        )
    return width


def projected_width(model: Model, spec: JobSpec) -> int | None:
    """Width after the last dense layer of a sentence-transformers model, which vLLM applies; None without one."""
    folder = pathlib.Path(model.path)
    if not folder.is_dir():  # not fetched yet, but its small files are here
        folder = pathlib.Path(model.tokenizer)
    if spec.model.tokenizer is not None and str(folder) == model.tokenizer:
        return None
    try:
        modules = json.loads((folder / "modules.json").read_bytes())
        dense = [module["path"] for module in modules if str(module.get("type", "")).endswith(".Dense")]
        return int(model_files.read_json(folder / dense[-1] / "config.json")["out_features"]) if dense else None
    except (ModelError, KeyError, TypeError, ValueError, OSError):
        return None


def _labels_of(config: ModelConfig) -> tuple[str, ...]:
    """The names of the model's classes, in order."""
    names = config.values.get("id2label")
    if isinstance(names, dict) and names:
        try:
            return tuple(str(names[key]) for key in sorted(names, key=int))
        except (TypeError, ValueError):
            raise SpecError("pooling.labels: id2label in the model's config has no numbers; name the labels") from None
    # transformers' default is two labels.
    return tuple(f"LABEL_{number}" for number in range(config.number(("num_labels",)) or 2))


def _check_head(config: ModelConfig, task: str) -> None:
    """Raise SpecError if the model has no classification head. task: its name, for the message."""
    architectures = config.values.get("architectures") or []
    has_none = bool(architectures) and all(str(name).endswith(_GENERATORS) for name in architectures)
    if has_none and not any(config.values.get(key) for key in _HEADS_FROM):
        raise SpecError(
            f"model.name: {', '.join(map(str, architectures))} of '{config.model.name}' has no classification head, "
            f"which task {task} needs; give a model such as a …ForSequenceClassification"
        )


def _check_dimensions(config: ModelConfig, dimensions: int, width: int) -> None:
    """Raise SpecError if the model was not trained for vectors that are cut to this many numbers."""
    allowed = config.values.get("matryoshka_dimensions")
    if not (config.values.get("is_matryoshka") or allowed):
        raise SpecError(
            f"pooling.dimensions: got {dimensions}, but the model's config does not say that it was trained for fewer "
            "(Matryoshka); leave it out, or, if it was, set engine.hf_overrides: {is_matryoshka: true}"
        )
    if dimensions > width or (isinstance(allowed, list) and dimensions not in allowed):
        which = ", ".join(map(str, allowed)) if isinstance(allowed, list) else f"at most {width}"
        raise SpecError(f"pooling.dimensions: got {dimensions}; must be {which}")


def _check_layers(config: ModelConfig, spec: JobSpec) -> None:
    """Raise SpecError for layers that the model does not have or vLLM cannot return."""
    pooling = pooling_of(spec)
    layers = pooling.layers
    depth = config.number(_DEPTH_KEYS)
    if layers is not None and depth is not None and layers[-1] > depth:
        raise SpecError(
            f"pooling.layers: got {layers[-1]}; must be from 0, the embedding, to {depth}, the model's last layer"
        )
    if (layers is not None or not pooling.final_norm) and spec.parallel.pipeline_parallel_size != 1:
        name = "layers" if layers is not None else "final_norm"
        raise SpecError(
            f"pooling.{name}: vLLM gives states between layers with pipeline_parallel_size 1 alone; "
            f"got {spec.parallel.pipeline_parallel_size}: use tensor_parallel_size"
        )

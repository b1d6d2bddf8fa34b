"""What a model's config says of the vectors that it makes: how wide they are, what its classes are called."""

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import ModelError, SpecError
from batchinf.model import files as model_files
from batchinf.model.identity import Model, text_section
from batchinf.spec.job import JobSpec
from batchinf.tasks.vectors.section import OPENAI_LINES, PoolingSpec

_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
_DEPTH_KEYS = ("num_hidden_layers", "n_layer")
# Architectures that end so have no classification head.
_GENERATORS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_HEADS_FROM = ("classifier_from_token", "method")  # by which vLLM makes one of the language model's own


@dataclass(frozen=True, slots=True)
class _Config:
    """A model's config, with what `engine.hf_overrides` says in its place."""

    model: Model
    values: Mapping[str, Any]

    @classmethod
    def of(cls, spec: JobSpec, model: Model) -> "_Config":
        """See `engine.hf_overrides` of vLLM."""
        overrides = spec.engine.get("hf_overrides")
        return cls(model, {**model.config, **(overrides if isinstance(overrides, dict) else {})})

    def number(self, keys: tuple[str, ...]) -> int | None:
        """The first of these keys that says one, in the text model's section or at the top."""
        for section in (text_section(self.values), self.values):
            for key in keys:
                if isinstance(section.get(key), int):
                    return int(section[key])
        return None


def resolve_pooling(spec: JobSpec, model: Model) -> PoolingSpec:
    """The section with widths and labels filled in, for a task that makes vectors; else as it is. Raises SpecError."""
    if not spec.is_pooling:
        return spec.pooling
    config, pooling = _Config.of(spec, model), spec.pooling
    if spec.task in ("classify", "reward"):
        labels = pooling.labels or _labels(config)
        _check_head(config, spec)
        filled: dict[str, Any] = (
            {"labels": labels} if spec.task == "classify" else {"width": pooling.width or len(labels)}
        )
        return pooling.model_copy(update=filled)
    width = pooling.width or _width(config, spec)
    if pooling.dimensions is not None:
        _check_dimensions(config, pooling.dimensions, width)
    _check_layers(config, spec)
    return pooling.model_copy(update={"width": width})


def check_not_batch_file(spec: JobSpec) -> None:
    """Raise SpecError where an input turns out to be a batch file, of which a task that makes vectors has no use."""
    if spec.is_pooling and spec.input.is_batch_file:
        raise SpecError(f"input.format: {OPENAI_LINES.format(task=spec.task)}")


def vectors_line(spec: JobSpec) -> str:
    """What a row gets, for people. spec: the resolved one."""
    pooling, width = spec.pooling, f"{spec.pooling.vector_width:,}"
    if spec.task == "classify":
        what = "logits" if pooling.use_activation is False else "probabilities"
        labels = [*(pooling.labels or ())]
        return f"task classify: {what} of {width} labels: {', '.join(labels[:8])}{', …' if len(labels) > 8 else ''}"
    if spec.task == "reward":
        return f"task reward: {'a number' if pooling.width == 1 else f'{width} numbers'} for each row"
    if spec.task == "embed":
        length = "of length 1" if pooling.normalize else "as it is"
        return f"task embed: a vector of {width} {pooling.dtype} for each row, {length}"
    which = "the last token" if pooling.positions == "last" else "each token"
    if pooling.layers is not None:
        where = f"after {'layer' if len(pooling.layers) == 1 else 'layers'} {', '.join(map(str, pooling.layers))}"
    else:
        where = (
            "after the last layer, with the final norm"
            if pooling.final_norm
            else "after the last layer, before the norm"
        )
    return f"task hidden_states: {width} {pooling.dtype} for {which} of a prompt, {where}"


def bytes_per_vectors(spec: JobSpec, num_tokens: int) -> int:
    """A guess at what a row's vectors take on disk, with so many tokens in its prompt: they hardly compress."""
    pooling = spec.pooling
    item_bytes = 2 if pooling.dtype == "float16" else 4
    is_all = spec.task == "hidden_states" and pooling.positions == "all"
    return pooling.vector_width * len(pooling.layers or (0,)) * item_bytes * (num_tokens if is_all else 1)


def _width(config: _Config, spec: JobSpec) -> int:
    width = config.number(_WIDTH_KEYS)
    if spec.task == "embed":
        width = projected_width(config.model, spec) or width
    if width is None:
        raise SpecError(
            "pooling.width: missing; must be the numbers in one of the model's vectors, as its config does not say it"
        )
    return width


def projected_width(model: Model, spec: JobSpec) -> int | None:
    """What comes out of the last dense layer that a sentence-transformers model has behind it, as vLLM applies it."""
    folder = pathlib.Path(model.path)
    if not folder.is_dir():  # still to be fetched; its small files are here
        folder = pathlib.Path(model.tokenizer)
    if spec.model.tokenizer is not None and str(folder) == model.tokenizer:
        return None
    try:
        modules = json.loads((folder / "modules.json").read_bytes())
        dense = [module["path"] for module in modules if str(module.get("type", "")).endswith(".Dense")]
        return int(model_files.read_json(folder / dense[-1] / "config.json")["out_features"]) if dense else None
    except (ModelError, KeyError, TypeError, ValueError, OSError):
        return None


def _labels(config: _Config) -> tuple[str, ...]:
    names = config.values.get("id2label")
    if isinstance(names, dict) and names:
        try:
            return tuple(str(names[key]) for key in sorted(names, key=int))
        except (TypeError, ValueError):
            raise SpecError("pooling.labels: id2label in the model's config has no numbers; name the labels") from None
    # transformers' own default is two.
    return tuple(f"LABEL_{number}" for number in range(config.number(("num_labels",)) or 2))


def _check_head(config: _Config, spec: JobSpec) -> None:
    architectures = config.values.get("architectures") or []
    has_none = bool(architectures) and all(str(name).endswith(_GENERATORS) for name in architectures)
    if has_none and not any(config.values.get(key) for key in _HEADS_FROM):
        raise SpecError(
            f"model.name: {', '.join(map(str, architectures))} of '{config.model.name}' has no classification head, "
            f"which task {spec.task} needs; give a model such as a …ForSequenceClassification"
        )


def _check_dimensions(config: _Config, dimensions: int, width: int) -> None:
    allowed = config.values.get("matryoshka_dimensions")
    if not (config.values.get("is_matryoshka") or allowed):
        raise SpecError(
            f"pooling.dimensions: got {dimensions}, but the model's config does not say that it was trained for fewer "
            "(Matryoshka); leave it out, or, if it was, say engine.hf_overrides: {is_matryoshka: true}"
        )
    if dimensions > width or (isinstance(allowed, list) and dimensions not in allowed):
        which = ", ".join(map(str, allowed)) if isinstance(allowed, list) else f"at most {width}"
        raise SpecError(f"pooling.dimensions: got {dimensions}; must be {which}")


def _check_layers(config: _Config, spec: JobSpec) -> None:
    layers, depth = spec.pooling.layers, config.number(_DEPTH_KEYS)
    if layers is not None and depth is not None and layers[-1] > depth:
        raise SpecError(
            f"pooling.layers: got {layers[-1]}; the model has {depth}: must be from 0, the embedding, to that"
        )
    if (layers is not None or not spec.pooling.final_norm) and spec.parallel.pipeline_parallel_size > 1:
        name = "layers" if layers is not None else "final_norm"
        raise SpecError(
            f"pooling.{name}: vLLM gives states between layers with pipeline_parallel_size 1 alone; "
            f"got {spec.parallel.pipeline_parallel_size}: use tensor_parallel_size"
        )

"""The section `pooling` of a spec, and its fields that depend on the model's config."""

import json
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from batchinf.base.errors import ModelError, SpecError
from batchinf.model import files as model_files
from batchinf.model.identity import Model, text_section
from batchinf.spec.fields import IDENTITY, Positive, Section, Texts, TokenIds, wrong
from batchinf.spec.job import JobSpec, TaskSection

OPENAI_LINES = (
    "got 'openai', whose lines ask for text or embeddings; must be another format with task {task}: name the prompt's "
    "column"
)
# Of task `embed` over lines of a batch file.
LINES_COLUMN = "embeddings"
# The fields that each task uses.
_FIELDS = {
    "embed": ("normalize", "dimensions", "pooling_type", "dtype", "width"),
    "classify": ("use_activation", "pooling_type", "labels"),
    "reward": ("use_activation", "pooling_type", "width"),
    "hidden_states": ("positions", "layers", "final_norm", "dtype", "width"),
}
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
_DEPTH_KEYS = ("num_hidden_layers", "n_layer")
# Architectures with these endings have no classification head.
_GENERATORS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_HEADS_FROM = ("classifier_from_token", "method")  # with these keys vLLM makes a head of the LM head


class PoolingSpec(Section):
    """What the tasks `embed`, `classify`, `reward` and `hidden_states` store."""

    normalize: Annotated[bool, IDENTITY] = True
    """`embed`: scale each vector to length 1."""
    dimensions: Annotated[Positive | None, IDENTITY] = None
    """`embed`: cut each vector to this many numbers, for models that were trained for it (Matryoshka)."""
    pooling_type: Annotated[Literal["last", "mean", "cls"] | None, IDENTITY] = None
    """`embed`, `classify`, `reward`: how positions are pooled; default: from the model's config, else vLLM's choice."""
    use_activation: Annotated[bool | None, IDENTITY] = None
    """`classify`, `reward`: apply softmax, sigmoid or the model's activation; default: true for `classify` only."""
    positions: Annotated[Literal["last", "all"], IDENTITY] = "last"
    """`hidden_states`: store the last token of a prompt, or all tokens."""
    layers: Annotated[TokenIds | None, IDENTITY] = None
    """`hidden_states`: store the states after these layers, before the final norm: 1 is the first layer, 0 the
    embedding. Default: the model's output."""
    final_norm: Annotated[bool, IDENTITY] = True
    """`hidden_states`: apply the final norm to the model's output; false stores the state before it."""
    dtype: Annotated[Literal["float16", "float32"], IDENTITY] = "float32"
    """`embed`, `hidden_states`: stored type; float16 cannot hold numbers above 65,504."""
    width: Annotated[Positive | None, IDENTITY] = None
    """How many numbers a vector of the model has; default: from its config."""
    labels: Annotated[Texts | None, IDENTITY] = None
    """`classify`: names of the classes, in order; default: `id2label` from the model's config."""

    @property
    def vector_width(self) -> int:
        """Numbers in a stored vector, of a resolved spec."""
        return self.dimensions or self.width or len(self.labels or ())


def pooling_of(spec: JobSpec) -> PoolingSpec:
    """The section of a spec."""
    section: PoolingSpec = getattr(spec, SECTION.name)
    return section


def stored_columns(spec: JobSpec) -> tuple[str, ...]:
    """The output columns with the model's numbers."""
    layers = pooling_of(spec).layers
    match spec.task:
        case "embed":
            return (LINES_COLUMN,) if spec.input.is_batch_file else ("embedding",)
        case "classify":
            return ("probabilities" if is_activated(spec) else "logits",)
        case "reward":
            return ("reward",)
    return ("hidden_states",) if layers is None else tuple(f"hidden_states_{layer}" for layer in layers)


def is_activated(spec: JobSpec) -> bool:
    """Whether a softmax, a sigmoid or the model's activation is applied to its output; for `embed`, the length of 1."""
    pooling = pooling_of(spec)
    default = pooling.normalize if spec.task == "embed" else spec.task == "classify"
    return default if pooling.use_activation is None else pooling.use_activation


def _check(spec: JobSpec) -> None:
    """Raise a validator's error for the first field that the spec's task does not use."""
    task = spec.task
    pooling = pooling_of(spec)
    for name, value in pooling.model_dump(exclude_defaults=True).items():
        if name not in _FIELDS.get(task, ()):
            tasks = [other for other, fields in _FIELDS.items() if name in fields]
            reason = f"got {_in_words(value)}; must be left out with task {task}: it is for {_listed(tasks)}"
            raise wrong(reason, f"pooling.{name}")
    if task not in _FIELDS:
        return
    for name, value in spec.sampling.model_dump(exclude_defaults=True).items():
        reason = f"got {_in_words(value)}; must be left out with task {task}, which generates no text"
        raise wrong(reason, f"sampling.{name}")
    if spec.model.reasoning_parser is not None:
        reason = f"got '{spec.model.reasoning_parser}'; must be left out with task {task}, which generates no text"
        raise wrong(reason, "model.reasoning_parser")
    if spec.input.is_batch_file and task != "embed":
        raise wrong(OPENAI_LINES.format(task=task), "input.format")
    if spec.output.logprobs_dtype != "float32":
        reason = f"got '{spec.output.logprobs_dtype}'; must be left out with task {task}, which has no logprobs"
        raise wrong(reason, "output.logprobs_dtype")
    _check_layers(pooling)


def _check_layers(pooling: PoolingSpec) -> None:
    layers = pooling.layers
    if layers is None:
        return
    if list(layers) != sorted(set(layers)) or not layers:
        raise wrong(f"got {_in_words(layers)}; must be numbers of layers, each once, ascending", "pooling.layers")
    if not pooling.final_norm:
        reason = "got false beside layers; must be left out, as no layer has the final norm"
        raise wrong(reason, "pooling.final_norm")


def _in_words(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "an empty list"
    if isinstance(value, bool):
        return str(value).lower()
    return "a mapping" if isinstance(value, dict) else f"'{value}'" if isinstance(value, str) else str(value)


def _listed(tasks: list[str]) -> str:
    return tasks[0] if len(tasks) == 1 else f"{', '.join(tasks[:-1])} and {tasks[-1]}"


SECTION = TaskSection("pooling", PoolingSpec, PoolingSpec(), _check)


# -- fields that depend on the model -----------------------------------------------------------------------------------

# A model's config, with `engine.hf_overrides` applied.
Config = Mapping[str, Any]


def resolved_fields(spec: JobSpec, model: Model) -> dict[str, Any]:
    """The fields of the section `pooling` that depend on the model. Raises SpecError."""
    overrides = spec.engine.get("hf_overrides")
    config = {**model.config, **(overrides if isinstance(overrides, dict) else {})}
    pooling = pooling_of(spec)
    if spec.task in ("classify", "reward"):
        labels = pooling.labels or _labels_of(config)
        _check_head(config, model.name, spec.task)
        return {"labels": labels} if spec.task == "classify" else {"width": pooling.width or len(labels)}
    if spec.task == "hidden_states":
        width = pooling.width or _width_of(config)
        _check_depth(config, spec)
    else:
        width = pooling.width or projected_width(model, spec) or _width_of(config)
        if pooling.dimensions is not None:
            _check_dimensions(config, pooling.dimensions, width)
    return {"width": width}


def _number(config: Config, keys: tuple[str, ...]) -> int | None:
    """The first of these keys that has a whole number, in the text model's section or at the top level."""
    for section in (text_section(config), config):
        for key in keys:
            if isinstance(section.get(key), int):
                return int(section[key])
    return None


def _width_of(config: Config) -> int:
    """Numbers in one of the model's vectors."""
    width = _number(config, _WIDTH_KEYS)
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


def _labels_of(config: Config) -> tuple[str, ...]:
    """The names of the model's classes, in order."""
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        try:
            return tuple(str(names[key]) for key in sorted(names, key=int))
        except (TypeError, ValueError):
            raise SpecError("pooling.labels: id2label in the model's config has no numbers; name the labels") from None
    # transformers' default is two labels.
    return tuple(f"LABEL_{number}" for number in range(_number(config, ("num_labels",)) or 2))


def _check_head(config: Config, model: str, task: str) -> None:
    """Raise SpecError if the model has no classification head. model, task: their names, for the message."""
    architectures = config.get("architectures") or []
    has_none = bool(architectures) and all(str(name).endswith(_GENERATORS) for name in architectures)
    if has_none and not any(config.get(key) for key in _HEADS_FROM):
        raise SpecError(
            f"model.name: {', '.join(map(str, architectures))} of '{model}' has no classification head, "
            f"which task {task} needs; give a model such as a …ForSequenceClassification"
        )


def _check_dimensions(config: Config, dimensions: int, width: int) -> None:
    """Raise SpecError if the model was not trained for vectors that are cut to this many numbers."""
    allowed = config.get("matryoshka_dimensions")
    if not (config.get("is_matryoshka") or allowed):
        raise SpecError(
            f"pooling.dimensions: got {dimensions}, but the model's config does not say that it was trained for fewer "
            "(Matryoshka); leave it out, or, if it was, set engine.hf_overrides: {is_matryoshka: true}"
        )
    if dimensions > width or (isinstance(allowed, list) and dimensions not in allowed):
        which = ", ".join(map(str, allowed)) if isinstance(allowed, list) else f"at most {width}"
        raise SpecError(f"pooling.dimensions: got {dimensions}; must be {which}")


def _check_depth(config: Config, spec: JobSpec) -> None:
    """Raise SpecError for layers that the model does not have or vLLM cannot return."""
    pooling = pooling_of(spec)
    layers = pooling.layers
    depth = _number(config, _DEPTH_KEYS)
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

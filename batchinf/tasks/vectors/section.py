"""The section `pooling` of a spec, and its fields that depend on the model's config."""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from batchinf.base.errors import ModelError, SpecError
from batchinf.model import files as model_files
from batchinf.model.model import Model, text_section
from batchinf.spec.fields import IDENTITY, Positive, Section, Texts, TokenIds, wrong
from batchinf.spec.input import CHAT_FIELDS, PROMPT_FORMS
from batchinf.spec.job import JobSpec, TaskSection

OPENAI_LINES = (
    "got 'openai', whose lines ask for text, embeddings or scores; must be another format with task {task}: name the "
    "prompt's column"
)
# Of task `embed` over lines of a batch file.
LINES_COLUMN = "embeddings"
# Of task `rerank`: a row has one score or several, and these a ranking.
RERANK_COLUMNS = ("relevance_score", "relevance_scores")
RANKING = "ranking"
# The fields that each task uses.
_FIELDS = {
    "embed": ("normalize", "dimensions", "pooling_type", "dtype", "width"),
    "classify": ("use_activation", "pooling_type", "labels"),
    "reward": ("use_activation", "pooling_type", "width"),
    "hidden_states": ("positions", "layers", "final_norm", "dtype", "width"),
    "rerank": ("top_n", "score_type", "use_sep_token", "use_activation", "pooling_type", "width"),
}
# The tasks that run lines of batch files.
_OF_LINES = ("embed", "rerank")
CROSS_ENCODER = "cross-encoder"
BI_ENCODER = "bi-encoder"
# vLLM's engine argument `convert` → how a model then scores.
_CONVERTED = {"classify": CROSS_ENCODER, "embed": BI_ENCODER}
# The columns of `rerank`; a row of the input has one of the last two.
_RERANK_COLUMNS = ("query_column", "documents_column", "document_column")
# Fields of chat that `rerank` takes.
_TEMPLATE_FIELDS = ("chat_template", "chat_template_kwargs")
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
_DEPTH_KEYS = ("num_hidden_layers", "n_layer")
# Architectures with these endings have no classification head.
_GENERATORS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_CLASSIFIERS = ("ForSequenceClassification", "ClassificationModel")
_HEADS_FROM = ("classifier_from_token", "method")
# Rerankers with prompts that vLLM makes by code of their own.
_OWN_PROMPTS = ("JinaForRanking", "JinaVLForRanking")


class PoolingSpec(Section):
    """What the tasks `embed`, `classify`, `reward`, `hidden_states` and `rerank` store."""

    normalize: Annotated[bool, IDENTITY] = True
    """`embed`: scale each vector to length 1."""
    dimensions: Annotated[Positive | None, IDENTITY] = None
    """`embed`: cut each vector to this many numbers, for models that were trained for it (Matryoshka)."""
    pooling_type: Annotated[Literal["last", "mean", "cls"] | None, IDENTITY] = None
    """All but `hidden_states`: how positions are pooled; default: from the model's config, else vLLM's choice."""
    use_activation: Annotated[bool | None, IDENTITY] = None
    """`classify`, `reward`, `rerank` with a cross-encoder: apply softmax, sigmoid or the model's activation; default:
    false for `reward` only."""
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

    top_n: Annotated[Positive | None, IDENTITY] = None
    """`rerank`: how many documents `ranking` has; default: all. A line of a batch file may have its own."""
    score_type: Annotated[Literal["cross-encoder", "bi-encoder"] | None, IDENTITY] = None
    """`rerank`: a cross-encoder reads query and document together, and its head gives the score; of a bi-encoder, the
    score is the cosine of their embeddings. Default: cross-encoder for models with a classification head."""
    use_sep_token: Annotated[bool | None, IDENTITY] = None
    """`rerank` with a cross-encoder: whether the tokenizer joins query and document as a pair, with its separator, or
    the text of one follows that of the other. Default: from the model's config, else true."""

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
        case "rerank":
            return RERANK_COLUMNS[:1] if spec.input.document_column is not None else RERANK_COLUMNS[1:]
    return ("hidden_states",) if layers is None else tuple(f"hidden_states_{layer}" for layer in layers)


def is_activated(spec: JobSpec) -> bool:
    """Whether a softmax, a sigmoid or the model's activation is applied to its output; for `embed`, the length of 1."""
    pooling = pooling_of(spec)
    default = pooling.normalize if spec.task == "embed" else spec.task in ("classify", "rerank")
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
    if task != "rerank":
        for name in spec.input.given(_RERANK_COLUMNS):
            raise wrong(f"got it with task {task}; must be left out, or set task: rerank", f"input.{name}")
    if task not in _FIELDS:
        return
    _check_no_text(spec)
    _check_layers(pooling)
    if task == "rerank":
        _check_rerank(spec)


def _check_no_text(spec: JobSpec) -> None:
    """Raise a validator's error for the first field that a task without text does not use."""
    task = spec.task
    for name, value in spec.sampling.model_dump(exclude_defaults=True).items():
        reason = f"got {_in_words(value)}; must be left out with task {task}, which generates no text"
        raise wrong(reason, f"sampling.{name}")
    if spec.model.reasoning_parser is not None:
        reason = f"got '{spec.model.reasoning_parser}'; must be left out with task {task}, which generates no text"
        raise wrong(reason, "model.reasoning_parser")
    if spec.input.is_batch_file and task not in _OF_LINES:
        raise wrong(OPENAI_LINES.format(task=task), "input.format")
    if spec.output.logprobs_dtype != "float32":
        reason = f"got '{spec.output.logprobs_dtype}'; must be left out with task {task}, which has no logprobs"
        raise wrong(reason, "output.logprobs_dtype")


def _check_sides(columns: Sequence[str]) -> None:
    """Raise an error for a validator unless the columns with the two sides of a score are both given, or none."""
    if len(columns) == 1:
        missing = "documents_column or document_column" if columns == ["query_column"] else "query_column"
        raise wrong(f"got it without {missing}; a score is that of a query and a document", f"input.{columns[0]}")
    if len(columns) == 3:
        raise wrong("got it beside documents_column; give one of them", "input.document_column")


def _check_rerank(spec: JobSpec) -> None:
    for name in spec.input.given(name for name in (*PROMPT_FORMS, *CHAT_FIELDS) if name not in _TEMPLATE_FIELDS):
        if name != "query_column":
            raise wrong("got it with task rerank, whose prompts are a query and a document: name their columns in "
                        "query_column and documents_column", f"input.{name}")  # fmt: skip
    _check_sides(spec.input.given(_RERANK_COLUMNS))
    pooling = pooling_of(spec)
    if pooling.top_n is not None and spec.input.document_column is not None:
        raise wrong(f"got {pooling.top_n} with input.document_column, of which a row has one; leave it out",
                    "pooling.top_n")  # fmt: skip
    if pooling.score_type == BI_ENCODER:
        for field, reason in _only_cross_encoders(spec):
            raise wrong(reason, field)


def _only_cross_encoders(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """The fields that a bi-encoder does not use, each with the reason."""
    for name in spec.input.given(_TEMPLATE_FIELDS):
        yield f"input.{name}", "got it with a bi-encoder, which embeds each text as it is; leave it out"
    for name in ("use_activation", "use_sep_token"):
        if (value := getattr(pooling_of(spec), name)) is not None:
            reason = f"got {_in_words(value)} with a bi-encoder, whose scores are cosines; leave it out"
            yield f"pooling.{name}", reason


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


def config_of(spec: JobSpec, model: Model) -> Config:
    """The model's config, as the engine reads it."""
    overrides = spec.engine.get("hf_overrides")
    return {**model.config, **(overrides if isinstance(overrides, dict) else {})}


def resolved_fields(spec: JobSpec, model: Model) -> dict[str, Any]:
    """The fields of the section `pooling` that depend on the model. Raises SpecError."""
    config = config_of(spec, model)
    pooling = pooling_of(spec)
    if spec.task == "rerank":
        return _scored(config, spec, model)
    if spec.task in ("classify", "reward"):
        labels = pooling.labels or _labels_of(config)
        _check_head(config, model.name, spec.task)
        return {"labels": labels} if spec.task == "classify" else {"width": pooling.width or len(labels)}
    if spec.task == "hidden_states":
        width = pooling.width or _width_of(config)
        _check_depth(config, spec)
        return {"width": width}
    return {"width": _embedding_width(config, spec, model)}


def _embedding_width(config: Config, spec: JobSpec, model: Model) -> int:
    """Raises SpecError for `pooling.dimensions` that the model does not have."""
    pooling = pooling_of(spec)
    width = _vector_width(config, spec, model)
    if pooling.dimensions is not None:
        _check_dimensions(config, pooling.dimensions, width)
    return width


def _vector_width(config: Config, spec: JobSpec, model: Model) -> int:
    return pooling_of(spec).width or projected_width(model, spec) or _width_of(config)


def _scored(config: Config, spec: JobSpec, model: Model) -> dict[str, Any]:
    """How the model scores, and the width of its results."""
    for name in _architectures(config):
        if name in _OWN_PROMPTS:
            raise SpecError(
                f"model.name: {name} of '{model.name}' needs prompts that task rerank does not make; give a "
                "cross-encoder (…ForSequenceClassification) or a model of embeddings"
            )
    pooling = pooling_of(spec)
    score_type = pooling.score_type or _score_type(config, spec)
    if score_type == BI_ENCODER:
        for field, reason in _only_cross_encoders(spec):
            raise SpecError(f"{field}: {reason}")
        return {"score_type": score_type, "width": _vector_width(config, spec, model)}
    _check_head(config, model.name, spec.task)
    num_labels = _number(config, ("num_labels",)) or len(_labels_of(config))
    if num_labels != 1 and not _makes_head(config):
        raise SpecError(
            f"model.name: the head of '{model.name}' has {num_labels} labels, and task rerank needs one with 1; give "
            "another model, or task classify"
        )
    if pooling.width not in (None, 1):
        raise SpecError(
            f"pooling.width: got {pooling.width} with a cross-encoder, whose score is one number; leave it out"
        )
    use_sep_token = _has_separator(config) if pooling.use_sep_token is None else pooling.use_sep_token
    return {"score_type": score_type, "width": 1, "use_sep_token": use_sep_token}


def _score_type(config: Config, spec: JobSpec) -> str:
    """How vLLM scores with the model: by `engine.convert`, else by its head."""
    has_head = _makes_head(config) or any(name.endswith(_CLASSIFIERS) for name in _architectures(config))
    return _CONVERTED.get(str(spec.engine.get("convert")), CROSS_ENCODER if has_head else BI_ENCODER)


def _architectures(config: Config) -> list[str]:
    return list(map(str, config.get("architectures") or []))


def _makes_head(config: Config) -> bool:
    """Whether vLLM makes a head for one label of the model's LM head."""
    return any(map(config.get, _HEADS_FROM))


def _has_separator(config: Config) -> bool:
    """Whether a cross-encoder reads query and document as a pair with a separator, by vLLM's rule."""
    for key in ("use_pad_token", "use_sep_token"):
        if (value := text_section(config).get(key, config.get(key))) is not None:
            return bool(value)
    return not _makes_head(config)


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
    if has_none and not _makes_head(config):
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

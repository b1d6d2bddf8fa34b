"""The section `pooling` of a spec."""

from typing import Annotated, Any, Literal

from batchinf.spec.fields import IDENTITY, Positive, Section, Texts, TokenIds, wrong
from batchinf.spec.job import JobSpec, TaskSection

OPENAI_LINES = (
    "got 'openai', whose lines ask for text; must be another format with task {task}: name the prompt's column"
)
# The fields that each task uses.
_FIELDS = {
    "embed": ("normalize", "dimensions", "pooling_type", "dtype", "width"),
    "classify": ("use_activation", "pooling_type", "labels"),
    "reward": ("use_activation", "pooling_type", "width"),
    "hidden_states": ("positions", "layers", "final_norm", "dtype", "width"),
}


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


def number_columns(spec: JobSpec) -> tuple[str, ...]:
    """The output columns with the model's numbers."""
    layers = pooling_of(spec).layers
    match spec.task:
        case "embed":
            return ("embedding",)
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
    if spec.input.is_batch_file:
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

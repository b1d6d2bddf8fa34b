"""Which model it is: its place, a fingerprint, its config, and the sampling that it suggests.

The fingerprint of a folder is the digest of its content; path and modification times do not count. A hub id is resolved
to a commit once, and a resume uses that commit without asking the hub. The lengths here are the config's; the engine
has the last word. Imports neither torch nor vllm nor transformers.
"""

import pathlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from batchinf.base.errors import ModelError, SpecError
from batchinf.base.text import name_type
from batchinf.model import files as model_files
from batchinf.model.files import ModelFolder
from batchinf.spec.job import ModelSpec
from batchinf.spec.sampling import SamplingSpec

# vLLM's defaults. max_tokens has none: it is what fits into `max_model_len`.
_SAMPLING_DEFAULTS: dict[str, float | int | None] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "max_tokens": None,
}  # fmt: skip

_TEXT_SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config", "decoder", "generator")
_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# Kinds of rotary scaling that the config's length already includes.
_ROPE_ALREADY_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_TOKENIZER = ", tokenizer "  # in a fingerprint, before that of a separate tokenizer


@dataclass(frozen=True, slots=True)
class Model:
    """A model that was found."""

    name: str
    """As the user wrote it."""
    path: str
    """For the engine: a folder or, if the weights are not here yet, the hub id, with `commit` as its revision."""
    commit: str | None
    fingerprint: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    has_chat_template: bool
    max_model_len: int | None
    """From the config, as vLLM reads it; None if it does not say."""
    vocab_size: int | None
    """From the config; None if it does not say."""
    tokenizer: str
    """A folder."""
    folder: str = ""
    """The folder of the config."""


def resolve(spec: ModelSpec, began_as: str = "", *, has_images: bool = False) -> Model:
    """Find the model and its tokenizer and read their configs. `check_weights` checks the weights.

    Asks the hub for the commit of a hub id and fetches its small files; without a network it uses the cache.
    began_as: the fingerprint that a job began with. Its commits are used, wherever the branches point now. has_images:
    the job has images, so that the files of the model's image processor decide the output too. Raises ModelError.
    """
    of_model, _, of_tokenizer = began_as.partition(_TOKENIZER)
    commit = commit_of(spec.name, of_model)
    place = _locate("model.name", spec.name, revision=spec.revision, load_format=spec.load_format, commit=commit)
    tokenizer = place
    if spec.tokenizer is not None:
        tokenizer = _locate("model.tokenizer", spec.tokenizer, commit=commit_of(spec.tokenizer, of_tokenizer))
    _check_tokenizer(tokenizer)
    config = _read_config(place)
    generation_config = place.folder / "generation_config.json"
    is_to_be_fetched = place.is_online and bool(model_files.weight_problems(place.folder, spec.load_format))
    return Model(
        name=spec.name,
        path=place.name if is_to_be_fetched else str(place.folder),
        commit=place.commit,
        fingerprint=_fingerprint(place, tokenizer, spec, model_files.PROCESSOR_FILES if has_images else ()),
        config=config,
        generation_config=model_files.read_json(generation_config) if generation_config.is_file() else {},
        has_chat_template=_has_chat_template(tokenizer.folder),
        max_model_len=derive_max_model_len(config),
        vocab_size=next((section["vocab_size"] for section in _sections(config) if section.get("vocab_size")), None),
        tokenizer=str(tokenizer.folder),
        folder=str(place.folder),
    )


def check_weights(model: Model, load_format: str) -> None:
    """Raise ModelError unless the weights at `path` are whole, by sizes and headers. The hub's are not checked."""
    folder = pathlib.Path(model.path)
    problems = model_files.weight_problems(folder, load_format) if folder.is_dir() else []
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3:,} more" if len(problems) > 3 else "")
        raise ModelError(f"the weights of '{model.name}' are not whole: {shown}. {_remedy(model, shown)}")


def _remedy(model: Model, problems: str) -> str:
    if model.commit is not None:
        again = " --force-download" if "cut short" in problems else ""
        return f"Get them with `hf download {model.name} --revision {model.commit}{again}`"
    if "git-lfs" in problems:
        return f"Get them with `git lfs pull` in {model.path}"
    return f"Copy them again, or get them with `hf download ORG/MODEL --local-dir {shlex.quote(model.path)}`"


def _locate(
    field: str, name: str, *, revision: str | None = None, load_format: str = "dummy", commit: str | None
) -> ModelFolder:
    try:
        place = model_files.find(field, name, commit or revision, load_format)
    except ModelError as error:
        if commit is None:
            raise
        raise ModelError(f"{error}. The job began with this commit: restore it, or start a new job") from error
    if place.commit is None and revision is not None:
        raise ModelError(f"model.revision: got '{revision}', but '{name}' is a folder here and has no revisions")
    return place


def _fingerprint(place: ModelFolder, tokenizer: ModelFolder, spec: ModelSpec, more: tuple[str, ...]) -> str:
    """`id@commit` of a hub id; of a folder 32 hexadecimal digits over the files that decide the output."""
    code = ("*.py",) if spec.trust_remote_code else ()
    names = model_files.CONFIG_FILES + model_files.TOKENIZER_FILES + more + code
    fingerprint = place.fingerprint(names, spec.load_format)
    if tokenizer is place:
        return fingerprint
    return f"{fingerprint}{_TOKENIZER}{tokenizer.fingerprint(model_files.TOKENIZER_FILES + code, 'dummy')}"


def commit_of(hub_id: str, fingerprint: str) -> str | None:
    """The commit in a fingerprint, if it names this hub id."""
    name, _, commit = fingerprint.rpartition("@")
    return commit if name == hub_id else None


def _read_config(place: ModelFolder) -> dict[str, Any]:
    path = place.folder / "config.json"
    if not path.is_file():
        raise ModelError(f"model.name: '{place.name}' has no config.json; give a model in the Hugging Face format")
    config = model_files.read_json(path)
    for name in ("quantization_config", "compression_config"):
        if not isinstance(config.get(name), Mapping | None):
            raise ModelError(
                f"model.name: {name} in {path} is {name_type(config[name])}; must be a mapping with quant_method, or "
                "absent"
            )
    return config


def _check_tokenizer(place: ModelFolder) -> None:
    """Raise ModelError if there clearly is none. Transformers would need 10 s and three lines to say so."""
    config = place.folder / "tokenizer_config.json"
    if not config.is_file():
        return
    is_plain = model_files.read_json(config).get("tokenizer_class") in model_files.PLAIN_TOKENIZERS
    if is_plain and not any(next(place.folder.glob(it), None) for it in model_files.VOCABULARY_FILES):
        raise ModelError(f"'{place.name}' has no tokenizer.json; copy it there, or name a tokenizer in model.tokenizer")


def _has_chat_template(folder: pathlib.Path) -> bool:
    config = folder / "tokenizer_config.json"
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return config.is_file() and bool(model_files.read_json(config).get("chat_template"))


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The sections of a config that may describe the text model, the innermost first."""
    for name in _TEXT_SECTIONS:
        if isinstance(config.get(name), dict):
            yield from _sections(config[name])
    yield config


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of a config with the text model's layers; the config itself if there is none."""
    layered = (section for section in _sections(config) if {"num_hidden_layers", "n_layer"} & section.keys())
    return next(layered, config)


def derive_max_model_len(config: Mapping[str, Any]) -> int | None:
    """The model's longest sequence in tokens, as vLLM 0.32 derives it from config.json; None if it does not say.

    `model_max_length` if given, else the smallest of several keys; times a rotary scaling that is not included yet.
    """
    for section in _sections(config):
        lengths = [section[key] for key in _LENGTH_KEYS if isinstance(section.get(key), int)]
        if lengths:
            return _scaled(section, section.get("model_max_length") or min(lengths))
    return None


def _scaled(section: Mapping[str, Any], length: int) -> int:
    scalings = _rope_scalings(section)
    if any(kind in ("longrope", "su") for kind, _ in scalings):
        return int(section.get("original_max_position_embeddings") or length)
    if "gemma3" in section.get("model_type", ""):
        return length
    factors = [factor for kind, factor in scalings if kind not in _ROPE_ALREADY_SCALED and factor is not None]
    return int(length * factors[-1]) if factors else length


def _rope_scalings(section: Mapping[str, Any]) -> list[tuple[str | None, float | None]]:
    """Kind and factor of each rotary scaling. Some configs have one for each type of layer."""
    rope = section.get("rope_parameters") or section.get("rope_scaling") or {}
    scalings = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return [(scaling.get("rope_type", scaling.get("type")), scaling.get("factor")) for scaling in scalings]


def sampling_defaults(model: Model, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The generation config under vLLM's arguments `generation_config` and `override_generation_config`.

    For `resolve_sampling`. Raises ModelError if the argument names a folder without a generation_config.json.
    """
    source = engine.get("generation_config", "auto")
    defaults = model.generation_config if source == "auto" else {}
    if source not in ("auto", "vllm"):
        path = pathlib.Path(source) / "generation_config.json"
        if not path.is_file():
            raise ModelError(f"engine.generation_config: got '{source}', where there is no generation_config.json")
        defaults = model_files.read_json(path)
    return {**defaults, **engine.get("override_generation_config", {})}


def resolve_sampling(
    sampling: SamplingSpec, generation_config: Mapping[str, Any]
) -> tuple[SamplingSpec, dict[str, str]]:
    """Fill fields that the spec leaves open from the model's generation config, else with vLLM's defaults.

    Like vLLM's `get_diff_sampling_param`: `max_new_tokens` is `max_tokens`; `do_sample` and other keys are ignored.
    Also returns the origin of each field: `spec`, `generation_config` or `default`. Raises SpecError if a value of the
    generation config cannot be used.
    """
    filled: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for field, default in _SAMPLING_DEFAULTS.items():
        suggested = generation_config.get("max_new_tokens" if field == "max_tokens" else field)
        if getattr(sampling, field) is not None:
            origins[field] = "spec"
        elif suggested is not None:
            # Earlier versions of vLLM wrote "all" as -1.
            filled[field] = 0 if (field, suggested) == ("top_k", -1) else suggested
            origins[field] = "generation_config"
        else:
            filled[field] = default
            origins[field] = "default"
    return _with(sampling, filled), origins


def _with(sampling: SamplingSpec, filled: Mapping[str, Any]) -> SamplingSpec:
    try:
        return SamplingSpec.model_validate({**sampling.model_dump(), **filled})
    except ValidationError as error:
        first = error.errors()[0]
    reason = first["msg"][0].lower() + first["msg"][1:]
    if first["loc"]:
        field = first["loc"][0]
        reason = f"{reason}, but the model's generation_config has {first['input']!r}; set it in the spec"
    else:
        # A field of the spec contradicts one that was filled in.
        field = first.get("ctx", {}).get("field", "")
        others = ", ".join(f"{name}={value!r}" for name, value in filled.items() if value != _SAMPLING_DEFAULTS[name])
        reason = f"{reason} (from the model's generation_config: {others})"
    raise SpecError(f"sampling.{field}: {reason}")

"""LoRA adapters of a job: the folder, rank and fingerprint of each, and the check that it fits the model."""

import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import ModelError, SpecError
from batchinf.model import files as model_files
from batchinf.model.files import ADAPTER, ADAPTER_CONFIG, ModelFolder
from batchinf.model.model import Model, commit_of, text_section
from batchinf.model.parameters import OTHER_MODELS
from batchinf.spec.job import JobSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that was found."""

    name: str
    """Its name in rows."""
    path: str
    """Its folder."""
    rank: int
    fingerprint: str
    """Of its content."""
    modules: tuple[str, ...]
    """The last names of the modules that it changes, such as `q_proj`; empty if its file does not tell."""


FIELD = "model.lora"
# vLLM's argument for adapters that change the image encoder. Models that do not support it pass over them all the same.
TOWERS = "enable_tower_connector_lora"
# The name of the one adapter of all rows, which has none in the spec.
UNNAMED = "lora"
# vLLM's MaxLoRARanks in 0.32 and 0.33: the allowed values of `max_lora_rank`.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# The name of one of a module's two matrices in an adapter's file.
TENSOR_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
# Keys of the config that vLLM does not apply or misreads, with the values that do no harm.
_PLAIN = {
    "use_dora": (None, False), "lora_bias": (None, False), "bias": (None, "none"), "layer_replication": (None, []),
    "modules_to_save": (None, [], ["classifier"], ["score"]), "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False), "use_bdlora": (None, {}), "trainable_token_indices": (None, [], {}),
}  # fmt: skip
# Values of `init_lora_weights` that say only how training began, not how to read the weights.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


@dataclass(frozen=True, slots=True)
class Half:
    """One of the two matrices that an adapter adds to a module: `A` [rank, in] or `B` [out, rank]."""

    tensor: str
    module: str
    half: str
    shape: tuple[int, ...]


def adapter_places(model: ModelSpec) -> dict[str, str]:
    """The adapters' folders or hub ids by their names in rows; empty if there are none."""
    if model.lora is None:
        return {}
    return {UNNAMED: model.lora} if isinstance(model.lora, str) else dict(model.lora)


def resolve_adapters(spec: JobSpec, model: Model, began_as: Any = None) -> tuple[Adapter, ...]:
    """Find the job's adapters, in the order of the spec; those of hub ids are fetched, because they are small.

    began_as: the `lora_identity` of a job that is resumed; its commits are used.
    Raises ModelError or SpecError in one line that begins with the field.
    """
    adapters = []
    for name, folder_or_id in adapter_places(spec.model).items():
        what = f"{FIELD}: " if isinstance(spec.model.lora, str) else f"{FIELD}: adapter '{name}': "
        began = began_as.get(name) if isinstance(began_as, Mapping) else began_as
        place = _locate(what, folder_or_id, began if isinstance(began, str) else "")
        rank = _check(what, place.folder, model)
        if spec.input.has_images and not spec.engine.get(TOWERS):
            _refuse_towers(what, place.folder, model)
        modules = tuple(sorted({half.module.rpartition(".")[2] for half in halves(place.folder)}))
        fingerprint = place.fingerprint((ADAPTER_CONFIG,), ADAPTER)
        adapters.append(Adapter(name, str(place.folder), rank=rank, fingerprint=fingerprint, modules=modules))
    _check_ranks(adapters, spec.engine.get("max_lora_rank"))
    return tuple(adapters)


def _refuse_towers(what: str, folder: pathlib.Path, model: Model) -> None:
    in_tower = next((half.module for half in halves(folder) if _is_in_tower(half.module, model)), None)
    if in_tower is not None:
        raise ModelError(f"{what}it changes {in_tower} of the image encoder, which vLLM would pass over; set engine."
                         f"{TOWERS}: true, and compare a few rows with transformers and PEFT")  # fmt: skip


def _is_in_tower(module: str, model: Model) -> bool:
    """Whether a module is not of the text model. Its widths and its number of layers are others."""
    return "vision_config" in model.config and OTHER_MODELS.search(module) is not None


def refuse_head(adapters: Sequence[Adapter]) -> None:
    """Raise ModelError if an adapter changes the head of the model, for jobs that need logits of prompts."""
    for adapter in adapters:
        if "lm_head" in adapter.modules:
            raise ModelError(f"{FIELD}: {adapter.path} changes lm_head, and vLLM then gives no logprobs of prompts")


def _check_ranks(adapters: Sequence[Adapter], most: Any) -> None:
    largest = max(adapters, key=lambda adapter: adapter.rank, default=None)
    if largest is not None and isinstance(most, int) and most < largest.rank:
        what = f"the adapter '{largest.name}' has rank {largest.rank}"
        raise SpecError(f"engine.max_lora_rank: got {most}, but {what}; leave it out")


def lora_identity(spec: JobSpec, adapters: tuple[Adapter, ...]) -> Any:
    """The adapters in a job's identity: fingerprints by name, or the fingerprint of the one adapter of all rows."""
    if isinstance(spec.model.lora, str):
        return adapters[0].fingerprint
    return {adapter.name: adapter.fingerprint for adapter in adapters}


def rank_for(adapters: tuple[Adapter, ...]) -> int:
    """The least `max_lora_rank` that vLLM allows for these adapters."""
    return next(rank for rank in RANKS if rank >= max(adapter.rank for adapter in adapters))


def halves(folder: pathlib.Path) -> Iterator[Half]:
    """The matrices of an adapter's safetensors file, from its header; none for other files. Raises ModelError."""
    for name in model_files.weight_files(folder, ADAPTER):
        if not name.endswith(".safetensors"):
            return
        tensors, _ = model_files.read_header(folder / name)
        for tensor, described in tensors.items():
            if (match := TENSOR_NAME.fullmatch(tensor)) is not None:
                yield Half(tensor, match["module"], match["half"], tuple(described["shape"]))


def _locate(what: str, name: str, began_as: str) -> ModelFolder:
    """name: of a folder or a hub id. began_as: the fingerprint that a job began with."""
    field = what.removesuffix(": ")
    place = model_files.find(field, name, commit_of(name, began_as), ADAPTER)
    if place.commit is not None and model_files.weight_problems(place.folder, ADAPTER):
        model_files.fetch(field, name, place.commit, (ADAPTER_CONFIG, "adapter_model.*"))
    return place


def _check(what: str, folder: pathlib.Path, model: Model) -> int:
    """The adapter's rank. Raises ModelError if its config or its weights do not fit this model."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ModelError(f"{what}{folder} has no {ADAPTER_CONFIG}; give the folder of a LoRA adapter as PEFT saves it")
    config = model_files.read_json(path)
    if problem := _config_problem(config):
        raise ModelError(f"{what}{path} {problem}")
    if problems := model_files.weight_problems(folder, ADAPTER):
        raise ModelError(f"{what}the weights are not whole: {problems[0]}; get them again")
    ranks = _ranks(config)
    if max(ranks) > RANKS[-1]:
        raise ModelError(f"{what}its rank is {max(ranks)}; vLLM takes at most {RANKS[-1]}")
    if problem := _misfit(folder, model, ranks):
        base = config.get("base_model_name_or_path")
        names = f" Its {ADAPTER_CONFIG} names '{base}'" if base else ""
        raise ModelError(f"{what}{problem}; is it an adapter of another base model?{names}")
    return int(max(ranks))


def _ranks(config: Mapping[str, Any]) -> list[Any]:
    return [config.get("r"), *(config.get("rank_pattern") or {}).values()]


def _config_problem(config: Mapping[str, Any]) -> str | None:
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        return f"is of type {config['peft_type']}; vLLM takes LORA"
    if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 1 for rank in _ranks(config)):
        return f"has no rank: `r` is {config.get('r')!r}; it must be a whole number from 1 on"
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            return f"has {key} {config[key]!r}, which vLLM cannot apply; train it without"
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        # Such a start changes the base weights. vLLM refuses it.
        return (
            f"has init_lora_weights {start}, which changes the base model's weights too; make a plain adapter of it "
            "with path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    return None


def _misfit(folder: pathlib.Path, model: Model, ranks: list[int]) -> str | None:
    """Why the weights do not fit this model, by their shapes and the model's config; None if they do."""
    config = text_section(model.config)
    widths = _widths(config)
    num_layers = config.get("num_hidden_layers")
    matrices = list(halves(folder))
    if not matrices and any(name.endswith(".safetensors") for name in model_files.weight_files(folder, ADAPTER)):
        return "its weights have no lora_A and lora_B"
    for half in itertools.filterfalse(lambda half: _is_in_tower(half.module, model), matrices):
        layer = _LAYER.search(half.module)
        if layer is not None and isinstance(num_layers, int) and int(layer[1]) >= num_layers:
            return f"it has {half.module}, but the model has {num_layers} layers"
        if len(half.shape) == 2 and (problem := _shape_problem(half, model.name, ranks, widths)):
            return problem
    return None


def _shape_problem(half: Half, model: str, ranks: list[int], widths: dict[str, dict[str, int | None]]) -> str | None:
    rank, width = half.shape if half.half == "A" else half.shape[::-1]
    if rank not in ranks:
        return f"{half.tensor} has rank {rank}, but {ADAPTER_CONFIG} says {', '.join(map(str, ranks))}"
    expected = widths.get(half.module.rpartition(".")[2], {}).get(half.half)
    if expected in (None, width):
        return None
    end = "takes" if half.half == "A" else "gives"
    return f"{half.module} {end} {expected:,} values in '{model}', and {width:,} in the adapter"


def _widths(config: Mapping[str, Any]) -> dict[str, dict[str, int | None]]:
    """Input (A) and output (B) widths of the usual modules; None if the config does not say."""
    hidden = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or config.get("q_lora_rank"):
        return {}
    head = config.get("head_dim") or hidden // heads
    queries: int | None = heads * head
    keys: int | None = (config.get("num_key_value_heads") or heads) * head
    inner = config.get("intermediate_size")
    # Models with experts, or layers of several kinds, have more than one such width.
    if any(word in key for key in config for word in ("expert", "layer_types", "block_types")):
        queries = keys = inner = None
    return {
        # A query matrix with a gate for the attention's output has twice the width.
        "q_proj": {"A": hidden, "B": None if config.get("attn_output_gate") else queries},
        "k_proj": {"A": hidden, "B": keys},
        "v_proj": {"A": hidden, "B": keys},
        "o_proj": {"A": queries, "B": hidden},
        "gate_proj": {"A": hidden, "B": inner},
        "up_proj": {"A": hidden, "B": inner},
        "down_proj": {"A": inner, "B": hidden},
    }

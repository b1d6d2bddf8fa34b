"""The parameters of a model by part: from the headers of its weight files, or counted on transformers' meta device.

`described` counts in a process of its own, so that its caller imports neither torch nor transformers. The result is
kept in the user's cache folder. Also gives the config with the defaults of its class, which many config.json leave out.
"""

import json
import math
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from batchinf.base.errors import ModelError
from batchinf.base.text import one_line
from batchinf.model import files as model_files
from batchinf.model.answers import answer_of, kept_file, print_answer

# `linear`: a matrix that quantization changes. `embedding` and `head` stay as they are, and so do all `other` ones.
Part = Literal["linear", "expert", "embedding", "head", "other"]

_VERSION = 2  # of the cached counts
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
# Encoders of images and sound, and what joins them to the text model, which vLLM loads in 16 bits.
OTHER_MODELS = re.compile(r"vision|visual|image|audio|multi_modal|mm_proj|connector|vit\.", re.IGNORECASE)
_EXPERTS = re.compile(r"\.experts\.|\.experts$|experts_")
_ROUTERS = re.compile(r"\.(gate|router|shared_expert_gate)(\.|$)|norm")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Parameters of one name and shape."""

    name: str
    """With `*` in place of each number."""
    part: Part
    shape: tuple[int, ...]
    layer: int | None
    """None outside of the text model's layers."""
    dtype: str = ""
    """As stored in a weight file, such as `BF16`; empty if counted."""
    is_other: bool = False
    """Of an encoder of images or sound."""
    number: int = 1
    """How many of them there are."""

    @property
    def is_of_experts(self) -> bool:
        """Whether it has the matrices of experts, or the scales of these."""
        return self.part == "expert" or (_EXPERTS.search(self.name) is not None and self.name.endswith("_scales"))

    @property
    def num_parameters(self) -> int:
        """Parameters in all of them."""
        return self.number * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Described:
    """A model as transformers builds it."""

    config: dict[str, Any]
    """With the defaults of the model's class."""
    tensors: tuple[Tensor, ...]
    """Tied ones once."""


def stored(folder: pathlib.Path, load_format: str, *, is_tied: bool) -> tuple[Tensor, ...]:
    """The tensors in a folder's safetensors files; empty without such files, or if one is damaged."""
    try:
        names = model_files.weight_files(folder, load_format)
        if not all(name.endswith(".safetensors") for name in names):
            return ()
        headers = [model_files.read_header(folder / name)[0] for name in names]
        tensors = [item for header in headers for item in header.items()]
        return _merged(
            _tensor(name, tuple(it["shape"]), is_linear=_is_layer_matrix(name, it["shape"]), dtype=str(it["dtype"]))
            for name, it in tensors
            if not (is_tied and name.endswith("lm_head.weight"))
        )
    except (OSError, ValueError, AttributeError, ModelError):
        return ()


def _is_layer_matrix(name: str, shape: Sequence[int]) -> bool:
    return len(shape) == 2 and _LAYER.search(name) is not None


def _tensor(name: str, shape: tuple[int, ...], *, is_linear: bool, dtype: str = "") -> Tensor:
    """is_linear: whether it is the matrix of a linear layer."""
    layer = _LAYER.search(name)
    is_other = OTHER_MODELS.search(name) is not None
    return Tensor(
        name=re.sub(r"\d+", "*", name.removesuffix(".weight")),
        part=_part(name, is_linear or _is_fused_expert(name, shape)),
        shape=shape,
        layer=None if layer is None or is_other else int(layer[1]),
        dtype=dtype,
        is_other=is_other,
    )


def _merged(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Equal tensors as one, with their number."""
    return tuple(replace(tensor, number=number) for tensor, number in Counter(tensors).items())


def _part(name: str, is_linear: bool) -> Part:
    if re.search(r"lm_head|embed_out|output\.weight$", name):
        return "head"
    if re.search(r"embed_tokens|wte|word_embeddings|tok_embeddings", name):
        return "embedding"
    if not is_linear or _ROUTERS.search(name):
        return "other"
    return "expert" if _EXPERTS.search(name) else "linear"


def _config_of(transformers: Any, config: Mapping[str, Any], folder: str | None) -> Any:
    """The config as an object. folder: with the model's own code, if that may run."""
    if folder is not None:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    family = plain.pop("model_type", None)
    return transformers.AutoConfig.for_model(family, **plain)


def count_parameters(
    config: Mapping[str, Any], *, trust_remote_code: bool = False, folder: str | None = None
) -> Described:
    """Build the model without memory and count. Imports torch and transformers, and raises what these raise.

    folder: with the model's own code, for `trust_remote_code`.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    built = _config_of(transformers, config, folder if trust_remote_code else None)
    architecture = getattr(transformers, next(iter(config.get("architectures") or ()), ""), None)
    with torch.device("meta"):
        if architecture is not None and hasattr(architecture, "_from_config"):
            model = architecture._from_config(built)
        else:
            model = _auto_class(transformers, built).from_config(built, trust_remote_code=trust_remote_code)
    is_linear = {
        f"{name}.weight": isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
        for name, module in model.named_modules()
    }
    tensors = [
        _tensor(name, tuple(it.shape), is_linear=is_linear.get(name, False)) for name, it in model.named_parameters()
    ]
    return Described(_settings(built), _merged(tensors))


def _settings(built: Any) -> dict[str, Any]:
    """The config as JSON values. Some classes give the kind of each layer only as a property."""
    settings = built.to_dict()
    text = built.get_text_config()
    for key in ("layers_block_type", "layer_types"):
        if (kinds := getattr(text, key, None)) is not None:
            (settings if text is built else settings.setdefault("text_config", {}))[key] = list(kinds)
    values: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return values


def _auto_class(transformers: Any, built: Any) -> Any:
    mappings = transformers.models.auto.modeling_auto
    if type(built) in mappings.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    is_image_model = type(built) in mappings.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if is_image_model else transformers.AutoModel


def _is_fused_expert(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor has a matrix for each expert. MXFP4 files have these in blocks, and scales for the blocks."""
    return len(shape) in (3, 4) and not name.endswith("_scales") and _EXPERTS.search(name) is not None


def described(config: Mapping[str, Any], *, trust_remote_code: bool = False, folder: str | None = None) -> Described:
    """`count_parameters` in a process of its own (about 5 s), or from the cache. Raises ModelError."""
    if {"torch", "transformers"} <= sys.modules.keys():
        return _counted(config, trust_remote_code, folder)
    # Only a model's own code is read from its folder: otherwise equal configs have the same parameters anywhere.
    question = {
        "config": config,
        "trust_remote_code": trust_remote_code,
        "folder": folder if trust_remote_code else None,
    }
    # A folder's own code may change under the same config.
    kept = None if trust_remote_code else kept_file("parameters", _VERSION, question)
    what = "the model's parameters could not be counted"
    return answer_of(__name__, question, _decoded, kept=kept, what=what)


def _decoded(answer: Mapping[str, Any]) -> Described:
    tensors = tuple(Tensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in answer["tensors"])
    return Described(dict(answer["config"]), tensors)


def _counted(config: Mapping[str, Any], trust_remote_code: bool, folder: str | None) -> Described:
    try:
        return count_parameters(config, trust_remote_code=trust_remote_code, folder=folder)
    except Exception as error:  # transformers raises what its models raise
        family = config.get("model_type")
        # The names of all known families, a page of them, say nothing here.
        words = one_line(str(error).partition("Should contain one of")[0], 200)
        raise ModelError(f"transformers cannot build a model of type {family!r} from this config: {words}") from error


if __name__ == "__main__":
    print_answer(lambda question: asdict(_counted(**question)))

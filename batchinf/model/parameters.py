"""The parameters of a model by part: from the headers of its weight files, or counted on transformers' meta device.

`described` counts in a process of its own, so that its caller imports neither torch nor transformers. The result is
kept in the user's cache folder. Also gives the config with the defaults of its class, which many config.json leave out.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchinf.base.child import NoAnswerError, ask
from batchinf.base.errors import ModelError
from batchinf.base.text import one_line
from batchinf.model import files as model_files

# `linear`: a matrix that quantization changes. `embedding` and `head` stay as they are, and so do all `other` ones.
Part = Literal["linear", "expert", "embedding", "head", "other"]

_VERSION = 1  # of the cached counts
_WAIT_S = 300.0
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
# Encoders of images and sound, and what joins them to the text model, which vLLM loads in 16 bits.
_OTHER_MODELS = re.compile(r"vision|visual|image|audio|multi_modal|mm_proj|connector|vit\.", re.IGNORECASE)
_EXPERTS = re.compile(r"\.experts\.|\.experts$|experts_")
_ROUTERS = re.compile(r"\.(gate|router|shared_expert_gate)(\.|$)|norm")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Parameters of one name and shape. name: with `*` for each number. layer: None outside of the text model's layers.

    dtype: as stored in a weight file, such as `BF16`; empty if counted. is_other: of an encoder of images or sound.
    """

    name: str
    part: Part
    shape: tuple[int, ...]
    number: int
    layer: int | None
    dtype: str = ""
    is_other: bool = False

    @property
    def num_parameters(self) -> int:
        """Parameters in all of them."""
        product = self.number
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True, slots=True)
class Described:
    """A model as transformers builds it. config: with the defaults of its class. tensors: tied ones once."""

    config: dict[str, Any]
    tensors: tuple[Tensor, ...]


def stored(folder: pathlib.Path, load_format: str, *, is_tied: bool) -> tuple[Tensor, ...]:
    """The tensors in a folder's safetensors files; empty without such files, or if one is damaged."""
    try:
        names = model_files.weight_files(folder, load_format)
        if not all(name.endswith(".safetensors") for name in names):
            return ()
        headers = [model_files.read_header(folder / name)[0] for name in names]
        each = [
            (name, tuple(tensor["shape"]), str(tensor["dtype"]))
            for header in headers
            for name, tensor in header.items()
            if not (is_tied and name.endswith("lm_head.weight"))
        ]
    except (OSError, ValueError, AttributeError, ModelError):
        return ()
    return _merged((name, shape, dtype, (len(shape) == 2 and _LAYER.search(name) is not None)
                    or _is_fused_expert(name, shape)) for name, shape, dtype in each)  # fmt: skip


def _merged(each: Iterable[tuple[str, tuple[int, ...], str, bool]]) -> tuple[Tensor, ...]:
    """each: name, shape, stored type, whether it is the matrix of a linear layer or of an expert."""
    found: Counter[tuple[str, Part, tuple[int, ...], int | None, str, bool]] = Counter()
    for name, shape, dtype, is_linear in each:
        layer = _LAYER.search(name)
        is_other = _OTHER_MODELS.search(name) is not None
        number = None if layer is None or is_other else int(layer[1])
        pattern = re.sub(r"\d+", "*", name.removesuffix(".weight"))
        found[pattern, _part(name, is_linear), shape, number, dtype, is_other] += 1
    return tuple(
        Tensor(name, part, shape, number, layer, dtype, is_other)
        for (name, part, shape, layer, dtype, is_other), number in found.items()
    )


def _part(name: str, is_linear: bool) -> Part:
    if re.search(r"lm_head|embed_out|output\.weight$", name):
        return "head"
    if re.search(r"embed_tokens|wte|word_embeddings|tok_embeddings", name):
        return "embedding"
    if not is_linear or _ROUTERS.search(name):
        return "other"
    return "expert" if _EXPERTS.search(name) else "linear"


def count_parameters(
    config: Mapping[str, Any], *, trust_remote_code: bool = False, folder: str | None = None
) -> Described:
    """Build the model without memory and count. Imports torch and transformers, and raises what these raise.

    folder: with the model's own code, for `trust_remote_code`.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    family = plain.pop("model_type", None)
    if trust_remote_code and folder is not None:
        made = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    else:
        made = transformers.AutoConfig.for_model(family, **plain)
    architecture = next(iter(config.get("architectures") or ()), "")
    made_of = getattr(transformers, architecture, None)
    with torch.device("meta"):
        if made_of is not None and hasattr(made_of, "_from_config"):
            model = made_of._from_config(made)
        else:
            model = _auto_class(transformers, made).from_config(made, trust_remote_code=trust_remote_code)
    linear = {f"{name}.weight" for name, module in model.named_modules() if _is_linear(module, torch)}
    each = [(name, tuple(it.shape), "", name in linear or _is_fused_expert(name, it.shape))
            for name, it in model.named_parameters()]  # fmt: skip
    settings = made.to_dict()
    # Some classes give the kind of each layer only as a property.
    text = made.get_text_config()
    for key in ("layers_block_type", "layer_types"):
        if (kinds := getattr(text, key, None)) is not None:
            (settings if text is made else settings.setdefault("text_config", {}))[key] = list(kinds)
    return Described(json.loads(json.dumps(settings, default=str)), _merged(each))


def _auto_class(transformers: Any, made: Any) -> Any:
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(made) in causal:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText if type(made) in mapping else transformers.AutoModel


def _is_linear(module: Any, torch: Any) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def _is_fused_expert(name: str, shape: Any) -> bool:
    """Whether a tensor has a matrix for each expert. MXFP4 files have these in blocks, and scales for the blocks."""
    return len(shape) in (3, 4) and not name.endswith("_scales") and _EXPERTS.search(name) is not None


def described(config: Mapping[str, Any], *, trust_remote_code: bool = False, folder: str | None = None) -> Described:
    """`count_parameters` in a process of its own (about 5 s), or from the cache. Raises ModelError."""
    if {"torch", "transformers"} <= sys.modules.keys():
        return _counted(config, trust_remote_code, folder)
    # Only a model's own code is read from its folder: otherwise equal configs have the same parameters anywhere.
    read = folder if trust_remote_code else None
    question = {"config": config, "trust_remote_code": trust_remote_code, "folder": read}
    asked = json.dumps(question, sort_keys=True)
    version = f"{_VERSION} {importlib.metadata.version('transformers')}"
    # A folder's own code may change under the same config.
    name = f"{hashlib.sha256(f'{version} {asked}'.encode()).hexdigest()}.json"
    place = None if trust_remote_code else model_files.user_cache("parameters") / name
    if place is not None and place.is_file():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return _decoded(json.loads(place.read_text()))
    try:
        # Without devices, torch never makes a CUDA context.
        environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        answer = ask("batchinf.model.parameters", question, _WAIT_S, environment)
    except NoAnswerError as error:
        raise ModelError(f"the model's parameters could not be counted: {error}") from None
    if "error" in answer:
        raise ModelError(answer["error"])
    if place is not None:
        with contextlib.suppress(OSError):
            model_files.write_cached(place, json.dumps(answer).encode())
    return _decoded(answer)


def _decoded(answer: Mapping[str, Any]) -> Described:
    tensors = tuple(Tensor(name, part, tuple(shape), *rest) for name, part, shape, *rest in answer["tensors"])
    return Described(dict(answer["config"]), tensors)


def _counted(config: Mapping[str, Any], trust_remote_code: bool, folder: str | None) -> Described:
    try:
        return count_parameters(config, trust_remote_code=trust_remote_code, folder=folder)
    except Exception as error:  # transformers raises what its models raise
        family = config.get("model_type")
        raise ModelError(
            f"transformers cannot build a model of type {family!r} from this config: {_words(error)}"
        ) from error


def _words(error: Exception) -> str:
    # The names of all known families, a page of them, say nothing here.
    return one_line(str(error).partition("Should contain one of")[0], 200)


def _main() -> None:
    asked = json.loads(sys.stdin.read())
    try:
        found = _counted(asked["config"], asked["trust_remote_code"], asked["folder"])
        tensors = [[it.name, it.part, it.shape, it.number, it.layer, it.dtype, it.is_other] for it in found.tensors]
        answer: dict[str, Any] = {"config": found.config, "tensors": tensors}
    except ModelError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()

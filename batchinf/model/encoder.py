"""The image encoder of a model: its parameters, from the names and shapes of tensors, and how it groups patches.

An image is cut into patches. All of them pass through the layers of the encoder. What follows joins several patches to
one token of the text model.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchinf.model.identity import text_section
from batchinf.model.parameters import Tensor

_IN_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.\*\.")


@dataclass(frozen=True, slots=True)
class Encoder:
    """What an image costs beside its tokens in the text model."""

    num_parameters: int
    """All of the encoder and of what joins it to the text model, with norms, biases and embeddings."""
    layer_parameters: int
    """Parameters that compute each patch."""
    joint_parameters: int
    """Parameters that compute each token of an image: those that join the encoder to the text model."""
    num_full_layers: int
    """Layers in which a patch sees all of its group; in the others it sees a small window, which is not counted."""
    hidden: int
    """Numbers of a patch between layers."""
    inner: int
    """Numbers of a patch within a layer, at the widest place."""
    patch_pixels: int
    """Numbers of a patch before the first layer."""
    patches_per_token: int
    """Patches that become one token."""
    group: int | None
    """Patches that see each other: those of one tile; None: all of an image."""
    output_width: int
    """Numbers that the encoder makes for each token, which wait in vLLM's encoder cache."""

    def flops(self, image_tokens: float, images: float = 1.0) -> float:
        """Arithmetic of so many images with so many tokens together: 2 for each parameter, and attention."""
        patches = image_tokens * self.patches_per_token
        seen = patches / max(images, 1e-9) if self.group is None else min(patches, self.group)
        attention = 4 * self.hidden * self.num_full_layers * patches * seen
        return 2 * self.layer_parameters * patches + 2 * self.joint_parameters * image_tokens + attention

    def cache_bytes(self, num_tokens: int) -> int:
        """The outputs for so many tokens of images, in 16 bits."""
        return 2 * self.output_width * num_tokens

    def pixel_bytes(self, num_tokens: float) -> int:
        """What the model's processor makes of images with so many tokens, in 32 bits."""
        return round(4 * self.patch_pixels * self.patches_per_token * num_tokens)

    def step_bytes(self, num_tokens: int) -> int:
        """What it takes while it makes so many tokens of images: pixels, an MLP's input, output and inside, 16 bits."""
        return 2 * (self.patch_pixels + 2 * self.hidden + 2 * self.inner) * num_tokens * self.patches_per_token


def encoder_of(tensors: Sequence[Tensor], config: Mapping[str, Any]) -> Encoder | None:
    """The image encoder in these tensors; None without one. config: of the whole model."""
    others = [tensor for tensor in tensors if tensor.is_other and "audio" not in tensor.name]
    matrices = [tensor for tensor in others if _IN_LAYER.search(tensor.name) and len(tensor.shape) == 2]
    if not matrices:
        return None
    patch = [tensor for tensor in others if len(tensor.shape) > 2 and "patch" in tensor.name]
    vision = config.get("vision_config") or {}
    full = vision.get("fullatt_block_indexes")
    hidden = _hidden_of(matrices)
    return Encoder(
        num_parameters=sum(tensor.num_parameters for tensor in others),
        layer_parameters=sum(tensor.num_parameters for tensor in (*matrices, *patch)),
        joint_parameters=sum(tensor.num_parameters for tensor in others if _is_joint(tensor)),
        num_full_layers=len(full) if full else min(tensor.number for tensor in matrices),
        hidden=hidden,
        inner=max(max(tensor.shape) for tensor in matrices),
        patch_pixels=math.prod(patch[0].shape[1:]) if patch else 0,
        patches_per_token=_patches_per_token(config, vision),
        group=None if _merged(config, vision) else _patches_of_tile(vision),
        output_width=_output_width(config, vision, hidden),
    )


def _hidden_of(matrices: Sequence[Tensor]) -> int:
    """The width that most matrices of the layers read: it is that of queries, keys, values and the MLP."""
    widths = Counter[int]()
    for tensor in matrices:
        widths[tensor.shape[1]] += tensor.number
    return widths.most_common(1)[0][0]


def _is_joint(tensor: Tensor) -> bool:
    """Whether a tensor outside the text model is a matrix behind the layers of the encoder."""
    return len(tensor.shape) == 2 and "embed" not in tensor.name and _IN_LAYER.search(tensor.name) is None


def _output_width(config: Mapping[str, Any], vision: Mapping[str, Any], hidden: int) -> int:
    """That of the text model, once for the last layer and once for each deeper layer whose output it gets."""
    width = text_section(config).get("hidden_size")
    deeper = vision.get("deepstack_visual_indexes") or ()
    return (width if isinstance(width, int) else hidden) * (1 + len(deeper))


def _merged(config: Mapping[str, Any], vision: Mapping[str, Any]) -> int | None:
    """The side of the square of patches that become a token; None of encoders that take tiles of one size."""
    sides = (vision.get("spatial_merge_size"), config.get("spatial_merge_size"))
    is_whole = 1 if vision.get("model_type") == "pixtral" else None
    side: int | None = next((side for side in sides if isinstance(side, int)), is_whole)
    return side


def _patches_per_token(config: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    if (side := _merged(config, vision)) is not None:
        return side**2
    of_tile = _patches_of_tile(vision)
    for_tile = config.get("mm_tokens_per_image")
    if of_tile is not None and isinstance(for_tile, int):
        return max(1, round(of_tile / for_tile))
    ratio = config.get("downsample_ratio")
    factor = 1 / ratio if isinstance(ratio, float) and ratio else config.get("scale_factor")
    return max(1, round(factor**2)) if isinstance(factor, int | float) else 1


def _patches_of_tile(vision: Mapping[str, Any]) -> int | None:
    """Patches of an image of the encoder's own size; None if the config does not say."""
    size = vision.get("image_size")
    patch = vision.get("patch_size")
    sides = size if isinstance(size, list) else [size, size]
    of_patch = patch if isinstance(patch, list) else [patch, patch]
    if not all(isinstance(number, int) and number > 0 for number in (*sides, *of_patch)):
        return None
    number: int = math.prod(side // part for side, part in zip(sides, of_patch, strict=False))
    return number

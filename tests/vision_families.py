"""Tiny models of families whose processors need torchvision, and a torchvision for a PyTorch without CUDA.

    python tests/vision_families.py qwen3-vl FOLDER

PyPI has torchvision for CUDA alone, and its import fails beside a PyTorch for CPUs. It works without its compiled
parts if its operators are declared: the processors use none of them.
"""

import json
import pathlib
import re
import subprocess
import sys
import zipfile

_TORCHVISION = {"2.13": "0.28.0"}  # by the version of PyTorch
# Operators for which torchvision registers Python code at its import. Nothing calls them here.
_OPERATORS = """
qnms(Tensor dets, Tensor scores, float scale, int zero, float score_scale, int score_zero, float iou) -> Tensor
qroi_align(Tensor input, Tensor rois, float scale, SymInt height, SymInt width, int ratio, bool aligned) -> Tensor
box_iou_rotated(Tensor boxes1, Tensor boxes2) -> Tensor
nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor
roi_align(Tensor input, Tensor rois, float scale, SymInt height, SymInt width, int ratio, bool aligned) -> Tensor
roi_pool(Tensor input, Tensor rois, float scale, SymInt height, SymInt width) -> (Tensor, Tensor)
ps_roi_align(Tensor input, Tensor rois, float scale, SymInt height, SymInt width, int ratio) -> (Tensor, Tensor)
ps_roi_pool(Tensor input, Tensor rois, float scale, SymInt height, SymInt width) -> (Tensor, Tensor)
deform_conv2d(Tensor input) -> Tensor
_roi_align_backward(Tensor grad) -> Tensor
_roi_pool_backward(Tensor grad) -> Tensor
_ps_roi_align_backward(Tensor grad) -> Tensor
_ps_roi_pool_backward(Tensor grad) -> Tensor
_deform_conv2d_backward(Tensor grad) -> Tensor
"""
_TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
# The place of an image in a prompt, by family.
_OF_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
PLACEHOLDERS = {"qwen3-vl": _OF_QWEN, "qwen2.5-vl": _OF_QWEN, "pixtral": "[IMG]"}


def torchvision_for_cpu(folder: pathlib.Path) -> pathlib.Path:
    """Download torchvision and put it into this folder, ready to import. Raises CalledProcessError if it cannot."""
    import torch

    version = _TORCHVISION[re.match(r"\d+\.\d+", torch.__version__)[0]]  # type: ignore[index]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder / "wheel"), f"torchvision=={version}"], check=True)
    [wheel] = (folder / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not re.search(r"\.so|\.libs/", name)])
    declare = "import torch\n_LIBRARY = torch.library.Library('torchvision', 'DEF')\n"
    declare += "".join(f"_LIBRARY.define({schema!r})\n" for schema in _OPERATORS.strip().splitlines())
    extension = folder / "torchvision" / "extension.py"
    extension.write_text(declare + extension.read_text())
    return folder


def make(family: str, folder: pathlib.Path) -> None:
    """Write a model with random weights and its processor. Run it where torchvision can be imported."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        pathlib.Path(__file__).parents[1] / "sample_data" / "tiny-llama"
    )
    torch.manual_seed(0)
    model, processor = _MAKE[family](transformers, tokenizer)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.normal_(0, 0.08)  # larger than usual, so that images matter
    model.float().save_pretrained(folder)
    processor.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "tokenizer_class": "PreTrainedTokenizerFast"}))


def _tokens_of_qwen(tokenizer):  # type: ignore[no-untyped-def]
    """The ids of the marks of images, by their names in configs."""
    marks = {
        "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
        "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    }  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks.values())})
    return {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}


def _qwen3_vl(transformers, tokenizer):  # type: ignore[no-untyped-def]
    ids = _tokens_of_qwen(tokenizer)
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True, "rope_theta": 10000.0}
    config = transformers.Qwen3VLConfig(
        text_config={**_TEXT, "vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **ids,
    )  # fmt: skip
    images = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 1024, "longest_edge": 16384}, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor = transformers.Qwen3VLProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(patch_size=16),
    )
    return transformers.Qwen3VLForConditionalGeneration(config), processor


def _qwen2_5_vl(transformers, tokenizer):  # type: ignore[no-untyped-def]
    ids = _tokens_of_qwen(tokenizer)
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    # The width of a head is that of the model by the number of heads: the CPU's attention needs 32.
    text = {name: value for name, value in _TEXT.items() if name != "head_dim"} | {"hidden_size": 128}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 32, "out_hidden_size": 128, "num_heads": 2, "intermediate_size": 64,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        **ids,
    )  # fmt: skip
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 12544}),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config), processor


def _pixtral(transformers, tokenizer):  # type: ignore[no-untyped-def]
    tokenizer.add_special_tokens({"additional_special_tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]})
    config = transformers.LlavaConfig(
        vision_config=transformers.PixtralVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
            image_size=64, patch_size=16,
        ),
        text_config=transformers.LlamaConfig(vocab_size=len(tokenizer), **_TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    images = transformers.PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16})
    processor = transformers.PixtralProcessor(image_processor=images, tokenizer=tokenizer, patch_size=16)
    return transformers.LlavaForConditionalGeneration(config), processor


_MAKE = {"qwen3-vl": _qwen3_vl, "qwen2.5-vl": _qwen2_5_vl, "pixtral": _pixtral}

if __name__ == "__main__":
    make(sys.argv[1], pathlib.Path(sys.argv[2]))

"""Makes tiny-vision: an Idefics3 of 330,944 random weights that takes pictures; and pictures/ with a list of them.

Run `python sample_data/make_tiny_vision.py [folder]` once tiny-llama is there (a few seconds): its tokenizer is used,
with the tokens of pictures. The weights are random, so the texts are nonsense, but each picture changes the logprobs.
All seeds are fixed.
"""

import argparse
import json
from pathlib import Path

import torch
from make_tiny_llama import SEED
from PIL import Image, ImageDraw
from transformers import (
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)
from transformers.utils.logging import disable_progress_bar

FOLDER = Path(__file__).parent
IMAGE = "<image>"
# Those that Idefics3 writes around a picture and its tiles. Its processor needs their names.
MARKS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
NUM_TILES = 6  # in a row and in a column
# Larger than in a model that is to be trained, so that pictures change the logprobs.
WEIGHT_STD = 0.08
CHAT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}
                {{- '<image>' }}
            {%- elif part['type'] == 'text' %}
                {{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
COLOURS = {"red": "#c0392b", "green": "#27ae60", "blue": "#2e5fd0", "yellow": "#f1c40f"}
SHAPES = ("circle", "square", "triangle")
SIZE = (96, 64)


def new_processor() -> Idefics3Processor:
    """The tokenizer of tiny-llama with the tokens of pictures, and a processor for small ones: 4 tokens a tile."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "tiny-llama")
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, NUM_TILES + 1) for column in range(1, NUM_TILES + 1)]
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, *MARKS, *tiles]})
    images = Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=4, chat_template=CHAT_TEMPLATE)


def new_model(processor: Idefics3Processor) -> Idefics3ForConditionalGeneration:
    """An Idefics3 with random weights: two layers for pictures, and two of a Llama for text."""
    tokenizer = processor.tokenizer
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 2048, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 7,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.normal_(0, WEIGHT_STD)
    return model


def save(model: Idefics3ForConditionalGeneration, processor: Idefics3Processor, folder: Path) -> int:
    """Write the checkpoint in bfloat16; its size in bytes."""
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"  # as in make_tiny_llama.py
    for name in ("is_local", "local_files_only"):
        fields.pop(name, None)
    config.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for its owner alone
    return sum(path.stat().st_size for path in folder.iterdir())


def picture(shape: str, colour: str) -> Image.Image:
    """A shape of one colour on white."""
    image = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(image)
    box = (24, 8, 72, 56)
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(48, 8), (72, 56), (24, 56)], fill=colour)
    return image


def write_pictures(folder: Path) -> int:
    """Write the pictures and pictures.jsonl beside their folder. Returns the number of pictures."""
    (folder / "pictures").mkdir(exist_ok=True)
    rows = []
    for colour, value in COLOURS.items():
        for shape in SHAPES:
            path = f"pictures/{colour}-{shape}.png"
            picture(shape, value).save(folder / path, optimize=True)
            rows.append({"id": f"{colour}-{shape}", "photo": path, "colour": colour, "shape": shape})
    with (folder / "pictures.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return len(rows)


def main() -> None:
    """Make the model and the pictures, and say how large they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    disable_progress_bar()
    torch.manual_seed(SEED)
    processor = new_processor()
    num_bytes = save(new_model(processor), processor, folder / "tiny-vision")
    print(f"{num_bytes} bytes; {write_pictures(folder)} pictures")


if __name__ == "__main__":
    main()

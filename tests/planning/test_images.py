"""Tokens of images in prompts before any engine has made them ready."""

import json
import pathlib
from typing import Any

import pytest
from pictures import VISION, write_lines
from PIL import Image
from transformers import AutoProcessor

import jobs
from batchinf.model.identity import Model, resolve
from batchinf.model.image_tokens import image_tokens
from batchinf.planning.lengths import Lengths, lengths_of, opened
from batchinf.spec.file import read_spec
from batchinf.spec.job import ModelSpec

QUESTION = "Which colour is it?"
# As the hub's Qwen3-VL has it, but images are scaled to a megapixel at most.
QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor", "patch_size": 16,
    "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 1 << 20},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Rows with one and two pictures, one on another host, and one that is not there."""
    folder = tmp_path_factory.mktemp("pictures")
    Image.new("RGB", (60, 40), "red").save(folder / "a.png")
    Image.new("RGB", (640, 480), "blue").save(folder / "b.jpg")
    photos = ["a.png", ["a.png", "b.jpg"], "https://images.example.com/c.jpg", "gone.png", ["a.png"] * 5]
    write_lines(folder / "rows.jsonl", [{"id": str(number), "photo": photo} for number, photo in enumerate(photos)])
    return folder


def spec_of(folder: pathlib.Path, out: pathlib.Path, **engine: Any) -> pathlib.Path:
    content = [{"type": "image", "column": "photo"}, {"type": "text", "text": QUESTION}]
    where = {"path": str(folder / "rows.jsonl"), "messages": [{"role": "user", "content": content}]}
    engine = {"max_model_len": 512} | engine
    return jobs.spec_of(out, model=str(VISION), input=where, engine=engine, output={"keep_columns": []}, scripted=None)


def lengths(path: pathlib.Path) -> Lengths:
    file = read_spec(path)
    with opened(file) as found:
        assert found is not None
        return lengths_of(found[0], file, found[1])


def test_prompts_have_the_tokens_of_their_images(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    found = lengths(spec_of(folder, tmp_path))
    processor = AutoProcessor.from_pretrained(VISION)
    pictures = [Image.open(folder / name).convert("RGB") for name in ("a.png", "b.jpg")]
    expected = []
    for images in (pictures[:1], pictures):
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": QUESTION}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        expected.append(len(processor(text=text, images=[images], add_special_tokens=False)["input_ids"][0]))
    assert list(found.prompts) == [*expected, expected[0]]  # the one of another host is as large as the others
    of_one = expected[1] - expected[0]
    assert found.num_shared < 10  # all prompts begin with an image, and images differ
    assert found.images.num_images == pytest.approx(4 / 3)
    assert found.images.num_tokens == pytest.approx(4 / 3 * (of_one - 1))
    assert found.row_error is not None and found.row_error.error_type == "image_not_found"
    assert "not fetched" in found.image_notes[1]


def test_validate_shows_lengths_with_images_and_rows_without_them(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = jobs.run("validate", spec_of(folder, tmp_path), *"--row 0 --row 1 --row 3 --json".split())
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert sum(each["num_rows"] for each in report["lengths"]["histogram"]) == 3
    assert {each["error_type"] for each in report["lengths"]["errors"]} == {"image_not_found", "too_many_images"}
    one, two, gone = report["rows"]
    assert two["num_image_tokens"] == 2 * one["num_image_tokens"] > 0
    assert len(one["token_ids"]) + one["num_image_tokens"] == report["lengths"]["histogram"][0]["shortest"]
    assert gone["error"]["error_type"] == "image_not_found"


def test_a_prompt_that_is_too_long_with_its_images(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    longest = max(lengths(spec_of(folder, tmp_path)).prompts)
    found = lengths(spec_of(folder, tmp_path, max_model_len=longest))
    assert len(found.prompts) == 2
    assert found.row_error is not None and found.row_error.error_type == "prompt_too_long"


def test_tokens_of_a_model_that_takes_images_of_all_sizes(tmp_path: pathlib.Path) -> None:
    """Its processor needs torchvision for videos; that of images does not."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((VISION / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN_PROCESSOR))
    model: Model = resolve(ModelSpec(name=str(tmp_path), load_format="dummy"))
    sizes = [(640, 480), (4000, 3000), (40, 3000), (10, 3000)]
    found = image_tokens(model, sizes, {})
    # A token has 32 × 32 pixels. Both sides of a large picture are scaled by the same factor, to whole tokens.
    assert found == {(640, 480): 20 * 15, (4000, 3000): 36 * 27, (40, 3000): 1 * 94}
    assert image_tokens(model, sizes[:1], {"mm_processor_kwargs": {"max_pixels": 1 << 16}}) == {(640, 480): 9 * 6}

"""Tokens of images in prompts before any engine has made them ready."""

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import VISION, png, write_lines
from PIL import Image
from transformers import AutoProcessor

import batchinf
import jobs
from batchinf.fleet.engine_defaults import step_for_images, with_most_images
from batchinf.model.image_tokens import image_tokens
from batchinf.model.memory import GIB, Fit
from batchinf.model.model import Model, resolve
from batchinf.planning.image_rows import ImagesOfRows, images_of_rows
from batchinf.planning.lengths import Lengths, lengths_of, opened
from batchinf.spec.file import read_spec
from batchinf.spec.job import ModelSpec

QUESTION = "Which colour is it?"
# As the hub's Qwen3-VL has it, but images are scaled to a megapixel at most.
QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor", "patch_size": 16,
    "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 1 << 20},
}  # fmt: skip


pytestmark = [
    # As in production, where Pillow's warnings are no errors.
    pytest.mark.filterwarnings("ignore"),
    # Each question to an image processor would import PyTorch: 12 s of processor time.
    pytest.mark.usefixtures("quick_vllm_replicas"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Rows with one and two pictures, one on another host, and one that is not there."""
    folder = tmp_path_factory.mktemp("pictures")
    Image.new("RGB", (60, 40), "red").save(folder / "a.png")
    damaged = b"Exif\0\0II*\0\xff\xff\xff\xff"  # of which Pillow warns
    Image.new("RGB", (640, 480), "blue").save(folder / "b.jpg", exif=damaged)
    photos = ["a.png", ["a.png", "b.jpg"], "https://images.example.com/c.jpg", "gone.png", ["a.png"] * 5]
    write_lines(folder / "rows.jsonl", [{"id": str(number), "photo": photo} for number, photo in enumerate(photos)])
    return folder


def spec_of(folder: pathlib.Path, out: pathlib.Path, **engine: Any) -> pathlib.Path:
    content = [{"type": "image", "column": "photo"}, {"type": "text", "text": QUESTION}]
    where = {"path": str(folder / "rows.jsonl"), "messages": [{"role": "user", "content": content}],
             "images": {"hosts": ["images.example.com"]}}  # fmt: skip
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
    assert found.num_shared < 10  # all prompts begin with an image, and images differ
    assert found.row_error is not None and found.row_error.error_type == "image_not_found"
    assert "not fetched" in found.image_notes[1]


def test_a_model_without_its_image_processor_is_a_warning_above_the_table(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    left_out = shutil.ignore_patterns("*processor_config.json")
    model = shutil.copytree(VISION, tmp_path / "model", ignore=left_out)
    report = batchinf.plan(spec_of(folder, tmp_path), overrides={"model.name": str(model)}, gpu="h200")
    lines = list(report.lines())
    [place] = [number for number, line in enumerate(lines) if line.startswith("warning: each image counts as one")]
    assert lines[place].endswith(f"'{model}' has no preprocessor_config.json; copy it there")
    assert place < next(number for number, line in enumerate(lines) if line.startswith("GPU "))
    parts = dict(report.model.parts)
    assert parts["image and audio encoders"] == sum(parts.values()) - 2 * report.model.num_parameters > 0
    assert [line for line in lines if "the image encoder's own memory and time are not counted" in line]


def test_validate_shows_lengths_with_images_and_rows_without_them(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    spec = spec_of(folder, tmp_path)
    done = jobs.run("validate", spec, *"--row 0 --row 1 --row 3 --json".split())
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr
    report = json.loads(done.stdout)
    num_errors = sum(each["num_rows"] for each in report["prompt_lengths"]["errors"])
    assert report["prompt_lengths"]["num_sampled"] == 3 + num_errors
    assert {each["error_type"] for each in report["prompt_lengths"]["errors"]} == {"image_not_found", "too_many_images"}
    one, two, gone = report["rows"]
    assert two["num_image_tokens"] == 2 * one["num_image_tokens"] > 0
    assert len(one["token_ids"]) + one["num_image_tokens"] == report["prompt_lengths"]["p50"]
    assert gone["error"]["error_type"] == "image_not_found"
    shown = jobs.run("validate", spec, "--row", "0").stdout
    num_tokens = len(one["token_ids"]) + one["num_image_tokens"]
    assert f": {num_tokens:,} tokens ({one['num_image_tokens']:,} image tokens not shown)" in shown


def test_a_prompt_that_is_too_long_with_its_images(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    longest = max(lengths(spec_of(folder, tmp_path)).prompts)
    found = lengths(spec_of(folder, tmp_path, max_model_len=longest))
    assert len(found.prompts) == 2
    assert found.row_error is not None and found.row_error.error_type == "prompt_too_long"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("qwen")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((VISION / name).read_bytes())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN_PROCESSOR))
    return resolve(ModelSpec(name=str(folder), load_format="dummy"))


def test_tokens_of_a_model_that_takes_images_of_all_sizes(qwen: Model) -> None:
    """Its processor needs torchvision for videos; that of images does not."""
    sizes = [(640, 480), (4000, 3000), (40, 3000), (10, 3000)]
    # A token has 32 × 32 pixels. Both sides of a large picture are scaled by the same factor, to whole tokens. The last
    # one is too narrow.
    assert image_tokens(qwen, sizes, {}) == {(640, 480): 20 * 15, (4000, 3000): 36 * 27, (40, 3000): 1 * 94}
    assert image_tokens(qwen, sizes[:1], {"mm_processor_kwargs": {"max_pixels": 1 << 16}}) == {(640, 480): 9 * 6}


def test_the_most_images_of_a_row(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A limit below the spec's must be sure: a row with more images would be an error row."""
    told: list[str] = []
    photos = ["a.png", None, ["a.png", "b.jpg"]]
    rows = write_lines(
        folder / "good.jsonl", [{"id": str(number), "photo": photo} for number, photo in enumerate(photos)]
    )
    whole = read_spec(spec_of(folder, tmp_path), [f"input.path={rows}"])
    found = images_of_rows(whole)
    assert found == ImagesOfRows(2, (640, 480))
    images = with_most_images(whole.spec, found, told.append).input.images
    assert images is not None and images.max_per_row == 2 and len(told) == 1
    # The user's own number stays, and so does the default if a row cannot be read: its images may be there later.
    by_user = read_spec(spec_of(folder, tmp_path), [f"input.path={rows}", "input.images.max_per_row=3"])
    assert with_most_images(by_user.spec, found, told.append) is by_user.spec
    assert images_of_rows(read_spec(spec_of(folder, tmp_path))) == ImagesOfRows(None, (640, 480))
    assert len(told) == 1


def test_bytes_are_one_image_in_each_row(tmp_path: pathlib.Path) -> None:
    pixels = png(np.zeros((4, 6, 3)))
    table = pa.table({"id": [str(number) for number in range(1200)], "photo": [pixels] * 1200})
    pq.write_table(table, tmp_path / "rows.parquet")
    for name, most in (("photo", 1), ("id", None)):  # a text may be a list of paths
        content = [{"type": "image", "column": name}]
        where = {"path": str(tmp_path / "rows.parquet"), "messages": [{"role": "user", "content": content}]}
        path = jobs.spec_of(tmp_path, model=str(VISION), input=where, output={"keep_columns": []})
        found = images_of_rows(read_spec(path))
        assert found is not None and found.most_per_row == most


def test_a_step_holds_the_largest_image(qwen: Model, tmp_path: pathlib.Path, folder: pathlib.Path) -> None:
    spec = read_spec(spec_of(folder, tmp_path)).spec
    limits = {"max_num_batched_tokens": 512}
    fit = Fit(None, None, device_bytes=40 * GIB, device_name="NVIDIA A100", batch_limits=limits)
    large, small = (ImagesOfRows(1, size) for size in ((4000, 3000), (640, 480)))
    assert step_for_images(spec, qwen, fit, large)["max_num_batched_tokens"][0] == 36 * 27
    assert step_for_images(spec, qwen, fit, small) == {}
    own = spec.model_copy(update={"engine": {"max_num_batched_tokens": 512}})
    assert step_for_images(own, qwen, fit, large) == {}

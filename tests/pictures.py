"""Rows with pictures for tests: ten prompts with none to two pictures each, in the forms in which inputs give them."""

import base64
import contextlib
import csv
import io
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

import jobs
from batchinf.job.open import open_job_input
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

# `engines/test_vllm_image_families.py` runs tests with other models.
VISION = pathlib.Path(os.environ.get("TEST_VISION_MODEL", jobs.ROOT / "sample_data" / "tiny-vision"))
IMAGE = os.environ.get("TEST_VISION_PLACEHOLDER", "<image>")
MAX_MODEL_LEN = 512


def spec_of(where: dict[str, Any], **sections: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"name": str(VISION), "dtype": "float32"},
            "input": {"apply_chat_template": False, **where},
            "output": {"path": "out", "include_prompt": True},
            "engine": {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8},
            **sections,
        }
    )


def prompts_of(spec: JobSpec, cache: pathlib.Path) -> list[Prompt]:
    """The prompts of all rows, before their images are loaded."""
    builder = task_of(spec).prompt_builder(load_tokenizer(str(VISION), False), None)
    with contextlib.closing(open_job_input(spec, cache, (), "refuse")) as source:
        return builder.build(source.read(0, source.num_rows, builder.columns), MAX_MODEL_LEN)


@dataclass(frozen=True)
class Row:
    """A prompt with the model's placeholders, and its pictures as PNG files."""

    text: str
    pictures: tuple[bytes, ...]


def ten_rows() -> list[Row]:
    """Pictures of random pixels: all have another size."""
    random = np.random.RandomState(1)
    rows = []
    for number in range(10):
        pictures = tuple(png(random.randint(0, 256, (40 + number, 60, 3))) for _ in range(number % 3))
        rows.append(Row(f"Look {f'{IMAGE} and ' * len(pictures)}say {number}:", pictures))
    return rows


def png(pixels: Any) -> bytes:
    """pixels: [height, width, 3], from 0 to 255."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file, "png")
    return file.getvalue()


def data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def write_lines(path: pathlib.Path, rows: Sequence[Any]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _files(folder: pathlib.Path, rows: Sequence[Row]) -> list[list[str]]:
    """Write the pictures as files; their paths relative to the folder, for each row."""
    (folder / "pictures").mkdir(exist_ok=True)
    paths = []
    for number, row in enumerate(rows):
        of_row = [f"pictures/{number}-{place}.png" for place in range(len(row.pictures))]
        for path, picture in zip(of_row, row.pictures, strict=True):
            (folder / path).write_bytes(picture)
        paths.append(of_row)
    return paths


def paths_in_lines(folder: pathlib.Path, rows: Sequence[Row]) -> dict[str, Any]:
    """A list of paths, one path without a list, or null."""
    values = [of_row if len(of_row) > 1 else next(iter(of_row), None) for of_row in _files(folder, rows)]
    lines = [{"prompt": row.text, "photos": value} for row, value in zip(rows, values, strict=True)]
    return {"path": str(write_lines(folder / "paths.jsonl", lines)), "images_column": "photos"}


def urls_in_lines(folder: pathlib.Path, rows: Sequence[Row]) -> dict[str, Any]:
    """`file:` and `data:` URLs."""
    lines = []
    for row, of_row in zip(rows, _files(folder, rows), strict=True):
        urls = [(folder / path).as_uri() for path in of_row[:1]] + [data_url(picture) for picture in row.pictures[1:]]
        lines.append({"prompt": row.text, "photos": urls})
    return {"path": str(write_lines(folder / "urls.jsonl", lines)), "images_column": "photos"}


def bytes_in_parquet(folder: pathlib.Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Two columns of bytes."""
    columns = {
        f"photo_{place}": pa.array([row.pictures[place] if len(row.pictures) > place else None for row in rows])
        for place in range(2)
    }
    pq.write_table(pa.table({"prompt": [row.text for row in rows], **columns}), folder / "bytes.parquet")
    return {"path": str(folder / "bytes.parquet"), "images_column": list(columns)}


def mappings_in_parquet(folder: pathlib.Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Lists of the feature `Image` of Hugging Face datasets."""
    feature = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    values = [[{"bytes": picture, "path": "gone.png"} for picture in row.pictures] for row in rows]
    table = pa.table({"prompt": [row.text for row in rows], "photos": pa.array(values, feature)})
    pq.write_table(table, folder / "mappings.parquet")
    return {"path": str(folder / "mappings.parquet"), "images_column": "photos"}


def paths_in_csv(folder: pathlib.Path, rows: Sequence[Row]) -> dict[str, Any]:
    """A path, JSON text of a list, or an empty field."""
    with (folder / "paths.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "photos"])
        for row, of_row in zip(rows, _files(folder, rows), strict=True):
            writer.writerow([row.text, of_row[0] if len(of_row) == 1 else json.dumps(of_row) if of_row else ""])
    return {"path": str(folder / "paths.csv"), "images_column": "photos"}


FORMS: tuple[Callable[[pathlib.Path, Sequence[Row]], dict[str, Any]], ...] = (
    paths_in_lines,
    paths_in_csv,
    urls_in_lines,
    bytes_in_parquet,
    mappings_in_parquet,
)

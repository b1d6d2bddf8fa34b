"""Rows with pictures for tests: ten prompts with none to three pictures each, in the forms of inputs."""

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

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather
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
    """A spec for the sample model. Rows without any picture run, unless `where` says otherwise."""
    if where.get("images_column") or '"image"' in json.dumps(where.get("messages")) or where.get("images") is not None:
        where = {**where, "images": {"on_missing": "run", **(where.get("images") or {})}}
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


# The pictures of a row, as PNG files.
Pictures = tuple[bytes, ...]


@dataclass(frozen=True)
class Row:
    """A prompt with the model's placeholders, and its pictures."""

    text: str
    pictures: Pictures


def ten_rows() -> list[Row]:
    """Pictures of random pixels: all have another size."""
    random = np.random.RandomState(1)
    rows = []
    for number in range(10):
        pictures = tuple(png(random.randint(0, 256, (40 + number, 60, 3))) for _ in range(number % 4))
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


def _files(folder: pathlib.Path, rows: Sequence[Pictures]) -> list[list[str]]:
    """Write the pictures as files; their paths relative to the folder, for each row."""
    (folder / "pictures").mkdir(exist_ok=True)
    paths = []
    for number, row in enumerate(rows):
        of_row = [f"pictures/{number}-{place}.png" for place in range(len(row))]
        for path, picture in zip(of_row, row, strict=True):
            (folder / path).write_bytes(picture)
        paths.append(of_row)
    return paths


def _pictures(rows: Sequence[Row]) -> list[Pictures]:
    return [row.pictures for row in rows]


def paths_in_lines(folder: pathlib.Path, rows: Sequence[Row]) -> dict[str, Any]:
    """A list of paths, one path without a list, or null."""
    values = [of_row if len(of_row) > 1 else next(iter(of_row), None) for of_row in _files(folder, _pictures(rows))]
    lines = [{"prompt": row.text, "photos": value} for row, value in zip(rows, values, strict=True)]
    return {"path": str(write_lines(folder / "paths.jsonl", lines)), "images_column": "photos"}


def urls_in_lines(folder: pathlib.Path, rows: Sequence[Row]) -> dict[str, Any]:
    """`file:` and `data:` URLs."""
    lines = []
    for row, of_row in zip(rows, _files(folder, _pictures(rows)), strict=True):
        urls = [(folder / path).as_uri() for path in of_row[:1]] + [data_url(picture) for picture in row.pictures[1:]]
        lines.append({"prompt": row.text, "photos": urls})
    return {"path": str(write_lines(folder / "urls.jsonl", lines)), "images_column": "photos"}


def bytes_in_parquet(folder: pathlib.Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Three columns of bytes."""
    columns = {
        f"photo_{place}": pa.array([row.pictures[place] if len(row.pictures) > place else None for row in rows])
        for place in range(3)
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
        for row, of_row in zip(rows, _files(folder, _pictures(rows)), strict=True):
            writer.writerow([row.text, of_row[0] if len(of_row) == 1 else json.dumps(of_row) if of_row else ""])
    return {"path": str(folder / "paths.csv"), "images_column": "photos"}


def bytes_in_arrow(folder: pathlib.Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Lists of bytes."""
    photos = pa.array([list(row.pictures) for row in rows], pa.list_(pa.binary()))
    pyarrow.feather.write_feather(pa.table({"prompt": [row.text for row in rows], "photos": photos}),
                                  folder / "bytes.arrow")  # fmt: skip
    return {"path": str(folder / "bytes.arrow"), "images_column": "photos"}


def saved_dataset(folder: pathlib.Path, rows: Sequence[Row]) -> dict[str, Any]:
    """A dataset of Hugging Face with lists of its feature `Image`, as `save_to_disk` writes it."""
    features = datasets.Features({"prompt": datasets.Value("string"), "photos": datasets.List(datasets.Image())})
    values = {
        "prompt": [row.text for row in rows],
        "photos": [[{"bytes": picture, "path": None} for picture in row.pictures] for row in rows],
    }
    datasets.Dataset.from_dict(values, features).save_to_disk(folder / "saved")
    return {"path": str(folder / "saved"), "images_column": "photos"}


FORMS: tuple[Callable[[pathlib.Path, Sequence[Row]], dict[str, Any]], ...] = (
    paths_in_lines,
    paths_in_csv,
    urls_in_lines,
    bytes_in_parquet,
    mappings_in_parquet,
    bytes_in_arrow,
    saved_dataset,
)

QUESTION = "What is it?"
_ASKED = {"role": "user", "content": [{"type": "image", "column": "photos"}, {"type": "text", "text": QUESTION}]}


def _conversations(folder: pathlib.Path, rows: Sequence[Pictures]) -> list[list[dict[str, Any]]]:
    """A turn of the user for each row: its pictures, as `data:` URLs, and the question."""
    parts = [[{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in row] for row in rows]
    return [[{"role": "user", "content": [*of_row, {"type": "text", "text": QUESTION}]}] for of_row in parts]


def parts_of_spec(folder: pathlib.Path, rows: Sequence[Pictures]) -> dict[str, Any]:
    """`input.messages` with the images of a column."""
    lines = [{"photos": of_row} for of_row in _files(folder, rows)]
    return {"path": str(write_lines(folder / "rows.jsonl", lines)), "messages": [_ASKED]}


def parts_of_conversations(folder: pathlib.Path, rows: Sequence[Pictures]) -> dict[str, Any]:
    lines = [{"chat": chat} for chat in _conversations(folder, rows)]
    return {"path": str(write_lines(folder / "chats.jsonl", lines)), "messages_column": "chat", "images": {}}


def parts_in_parquet(folder: pathlib.Path, rows: Sequence[Pictures]) -> dict[str, Any]:
    """Bare parts of conversations, which the images of a column fill."""
    content = [[*[{"type": "image", "text": None}] * len(row), {"type": "text", "text": QUESTION}] for row in rows]
    chats = [[{"role": "user", "content": parts}] for parts in content]
    photos = pa.array([list(row) for row in rows], pa.list_(pa.binary()))
    pq.write_table(pa.table({"chat": chats, "photos": photos}), folder / "chats.parquet")
    return {"path": str(folder / "chats.parquet"), "messages_column": "chat", "images_column": "photos"}


def _batch_file(folder: pathlib.Path, url: str, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body} for number, body in enumerate(bodies)
    ]
    return {"path": str(write_lines(folder / "batch.jsonl", lines)), "format": "openai", "images": {}}


def chats_in_batch_file(folder: pathlib.Path, rows: Sequence[Pictures]) -> dict[str, Any]:
    bodies = [{"messages": chat} for chat in _conversations(folder, rows)]
    return _batch_file(folder, "/v1/chat/completions", bodies)


def folder_of_pictures(folder: pathlib.Path, rows: Sequence[Pictures]) -> dict[str, Any]:
    """A row for each picture."""
    for number, [picture] in enumerate(rows):
        (folder / f"{number}.png").write_bytes(picture)
    ask = {"role": "user", "content": [{"type": "image", "column": "path"}, {"type": "text", "text": QUESTION}]}
    return {"path": str(folder), "messages": [ask]}


# Forms of rows that are a question about pictures, for the model's chat template.
CHAT_FORMS: tuple[Callable[[pathlib.Path, Sequence[Pictures]], dict[str, Any]], ...] = (
    parts_of_spec,
    parts_of_conversations,
    parts_in_parquet,
    chats_in_batch_file,
    folder_of_pictures,
)

"""A format is one file and one line of registration: no other file names it."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchinf
from batchinf.source.files import InputLocation
from batchinf.source.find import find_files
from batchinf.source.formats.base import FileFormat
from batchinf.source.formats.registry import FORMATS
from jobs import ROOT, quick_start, rows_of, spec_of

PACKAGE = Path(batchinf.__file__).parent
FORMATS_FOLDER = PACKAGE / "source" / "formats"
OWNERS = {format.name: sys.modules[type(format).__module__].__file__ for format in FORMATS}
OWNERS |= {ending: OWNERS[f.name] for f in FORMATS if isinstance(f, FileFormat) for ending in f.endings}

# Outside of `source` and of the input's spec these say nothing about the input's format.
OUTPUT_TOO = {
    "json": "a kind of structure, and pydantic's name of a mode",
    ".json": "the ending of a model's files",
    "text": "a column of the output, and a kind of message part",
    ".jsonl": "the ending of batchinf's own logs",
    ".parquet": "the ending of a job's parts",
    "images": "the section input.images, and a column of datasets",
    ".png": "the ending of a dataset card's plots",
}
# The same word for something else, by module.
ALSO_MEANT = {
    ("spec/input.py", "images"): "the section input.images",
    ("source/versions.py", ".json"): "the ending of a version's record",
    ("model/files.py", "hf"): "a value of vLLM's load_format",
    ("source/formats/huggingface.py", "arrow"): "a format of the library `datasets`",
    ("engines/vllm/structured_output/tools.py", "openai"): "vLLM's parser of gpt-oss",
    ("prompts/tools.py", "openai"): "vLLM's parser of gpt-oss",
}


def strangers(module: Path, text: str) -> Iterator[str]:
    """Where a module has a format's name or ending as a whole string, without being that format's own."""
    place = module.relative_to(PACKAGE).as_posix()
    if place.startswith("export/"):  # the formats of an export have these names, too
        return
    is_about_input = place.startswith("source/") or place == "spec/input.py"
    for node in ast.walk(ast.parse(text)):
        word = node.value if isinstance(node, ast.Constant) else None
        if not isinstance(word, str) or OWNERS.get(word) in (None, str(module)) or (place, word) in ALSO_MEANT:
            continue
        if is_about_input or word not in OUTPUT_TOO:
            yield f"{place}:{node.lineno} names {word!r}"


def test_no_other_file_names_a_format() -> None:
    found = [said for path in PACKAGE.rglob("*.py") for said in strangers(path, path.read_text(encoding="utf-8"))]
    assert not found


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("job/open.py", 'format = "jsonl" if where.format == "openai" else where.format'),
        ("source/rows.py", 'is_line = entry.format in ("jsonl", "text")'),
        ("source/scan.py", 'PASSES = {"csv": None}'),
        ("source/formats/csv.py", 'other = ".parquet"'),
        ("spec/input.py", 'format: Literal["hf", "text"] | None'),
    ],
)
def test_a_name_elsewhere_is_found(place: str, line: str) -> None:
    assert list(strangers(PACKAGE / place, line))
    assert not list(strangers(PACKAGE / place, '"A docstring may speak of jsonl, csv and text."'))


def test_each_name_and_ending_is_of_one_format() -> None:
    endings = [ending for format in FORMATS if isinstance(format, FileFormat) for ending in format.endings]
    assert len(set(endings)) == len(endings)
    assert len({format.name for format in FORMATS}) == len(FORMATS)
    assert all(OWNERS[format.name] is not None for format in FORMATS)


@pytest.mark.parametrize("ending", [e for f in FORMATS if isinstance(f, FileFormat) for e in f.endings])
def test_a_file_is_known_by_its_ending(ending: str, tmp_path: Path) -> None:
    (tmp_path / f"X{ending.upper()}").write_bytes(b"")
    format, _ = find_files(InputLocation(str(tmp_path)))
    assert OWNERS[format.name] == OWNERS[ending]


SEMICOLONS = '''
"""Prompts between semicolons, for a test."""

import pyarrow as pa

from batchinf.source.files import content_hash
from batchinf.source.formats.base import ColumnarReader, FileFormat
from batchinf.source.types import MixedTypes


class Semicolons(FileFormat):
    name = "semicolons"
    endings = (".semi",)
    mixed_types = MixedTypes.STRING

    def scan(self, file, scratch):
        prompts = read(file)
        return scratch.entry(content_hash(file), len(prompts), pa.schema([("question", pa.string())]))

    def reader(self, own, read_types):
        return Prompts(own)


def read(file):
    with file.open() as stream:
        return stream.read().decode().split(";")


class Prompts(ColumnarReader):
    def __init__(self, own):
        super().__init__(own.entry.arrow_schema())
        self._prompts = pa.table({"question": read(own.file)})

    def _slice(self, start, stop, columns):
        return self._prompts.slice(start, stop - start).select(columns)
'''


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the package that has one more file and one more format in the registry."""
    shutil.copytree(PACKAGE, tmp_path / "copy" / "batchinf", ignore=shutil.ignore_patterns("__pycache__"))
    formats = tmp_path / "copy" / "batchinf" / "source" / "formats"
    (formats / "semicolons.py").write_text(SEMICOLONS)
    registry = (formats / "registry.py").read_text()
    known = "from batchinf.source.formats.parquet import Parquet\n"
    assert known in registry and "    TextLines(),\n" in registry
    registry = registry.replace(known, "from batchinf.source.formats.semicolons import Semicolons\n" + known)
    (formats / "registry.py").write_text(
        registry.replace("    TextLines(),\n", "    TextLines(),\n    Semicolons(),\n")
    )
    return tmp_path / "copy"


def run(copy: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run the copy of `batchinf` to its end."""
    environment = {**os.environ, **quick_start(), "PYTHONPATH": f"{ROOT / 'tests' / 'quick'}{os.pathsep}{copy}"}
    command = [sys.executable, "-m", "batchinf", *map(str, arguments)]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.slow
def test_a_new_format_runs_a_whole_job(copy: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.semi").write_text(";".join(f"Prompt {i}" for i in range(30)))
    (data / "b.semi").write_text("Prompt 30;Prompt 31")
    input = {"path": str(data), "prompt_column": "question", "id_column": None}
    one = {"data_parallel_size": 1}
    path = spec_of(tmp_path, input=input, output={"keep_columns": ["question"]}, parallel=one)
    done = run(copy, "run", path)
    assert done.returncode == 0, done.stderr
    assert [row["question"] for row in rows_of(tmp_path / "out")] == [f"Prompt {i}" for i in range(32)]
    (data / "c.semi").write_text("Prompt 32")
    done = run(copy, "run", path, "--extend")
    assert done.returncode == 0, done.stderr
    assert [row["question"] for row in rows_of(tmp_path / "out")] == [f"Prompt {i}" for i in range(33)]
    os.truncate(data / "a.semi", 5)
    done = run(copy, "run", path)
    assert done.returncode == 2
    assert "1 file is changed: a.semi" in done.stderr


@pytest.mark.slow
def test_a_new_format_is_named_by_the_spec_and_its_errors(copy: Path, tmp_path: Path) -> None:
    path = spec_of(tmp_path, input={"format": "semicolon"})
    done = run(copy, "run", path)
    assert done.returncode == 2
    assert "must be one of jsonl, json, parquet, csv, text, semicolons, arrow, images, openai, hf" in done.stderr
    assert done.stderr.count("\n") == 1
    path = spec_of(tmp_path, input={"path": "none.yaml", "format": None})
    (copy / "none.yaml").write_text("x: 1")
    assert ".text, .semi, .arrow" in run(copy, "run", path).stderr
    format = json.loads(run(copy, "schema").stdout)["$defs"]["InputSpec"]["properties"]["format"]
    assert "semicolons" in format["anyOf"][0]["enum"]

"""Rows without pictures: error rows, unless only some of their columns are empty, or the spec lets them run."""

import pathlib
from typing import Any

import pytest
from pictures import png, prompts_of, spec_of, write_lines

from batchinf.prompts.checks import EmptyValues
from batchinf.source.rows import Row
from batchinf.spec.images import ImageSettings
from batchinf.spec.job import JobSpec

PICTURE = png([[[10, 20, 30]] * 3] * 2)
ROWS: list[dict[str, Any]] = [
    {"text": "Both", "a": "a.png", "b": "a.png"},
    {"text": "One", "a": None, "b": "a.png"},
    {"text": "None", "a": "", "b": None},
    {"text": "Absent"},
    {"text": "Lists", "a": [], "b": "[]"},
]
PARTS = [
    {"type": "image", "column": "a"}, {"type": "image", "column": "b"}, {"type": "text", "text": "{{ text }}"},
]  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": PARTS}]},
    {"prompt_column": "text", "add_generation_prompt": True, "images_column": ["a", "b"]},
]


def spec_with(folder: pathlib.Path, form: dict[str, Any], rows: list[dict[str, Any]] = ROWS) -> JobSpec:
    (folder / "a.png").write_bytes(PICTURE)
    path = str(write_lines(folder / "rows.jsonl", rows))
    where = {"path": path, "apply_chat_template": None, "images": {"on_missing": "error"}, **form}
    return spec_of(where)


def test_such_rows_are_errors_by_default() -> None:
    assert ImageSettings().on_missing == "error"


@pytest.mark.parametrize("form", FORMS)
def test_a_row_without_any_image_is_an_error_row(form: dict[str, Any], tmp_path: pathlib.Path) -> None:
    prompts = prompts_of(spec_with(tmp_path, form), tmp_path / "cache")
    errors = [None if prompt.error is None else prompt.error.error_type for prompt in prompts]
    assert errors == [None, None, "image_missing", "image_missing", "image_missing"]
    assert [len(prompt.image_sources) for prompt in prompts[:2]] == [2, 1]
    assert prompts[2].error is not None
    said = "the row has no image in a, b; input.images.on_missing: run lets such rows run"
    assert prompts[2].error.error_message == said


@pytest.mark.parametrize("form", FORMS)
def test_it_runs_if_the_spec_lets_it(form: dict[str, Any], tmp_path: pathlib.Path) -> None:
    allowed = spec_with(tmp_path, {**form, "images": {"on_missing": "run"}})
    prompts = prompts_of(allowed, tmp_path / "cache")
    assert [prompt.error for prompt in prompts] == [None] * 5
    assert [len(prompt.image_sources) for prompt in prompts] == [2, 1, 0, 0, 0]


def test_rows_without_images_are_counted_as_empty_texts_are(tmp_path: pathlib.Path) -> None:
    def warnings(spec: JobSpec, rows: list[dict[str, Any]] = ROWS) -> list[str]:
        empty = EmptyValues(spec)
        assert {"a", "b"} <= {*empty.columns}
        empty.add(Row(number, row) for number, row in enumerate(rows))
        return [line for line in empty.warnings() if "picture" in line]

    errors, some = warnings(spec_with(tmp_path, FORMS[0]))
    assert errors == (
        "warning: 3 rows of 5 sampled without a picture in 'a' or 'b' (row 2 first): such rows are error rows, unless "
        "input.images.on_missing is run"
    )
    assert some == (
        "warning: 1 row of 5 sampled without a picture in one of the columns 'a' or 'b' (row 1 first): such rows run "
        "all the same; input.where can leave them out"
    )
    allowed = spec_with(tmp_path, {**FORMS[1], "images": {"on_missing": "run"}})
    assert warnings(allowed)[0].endswith("such rows run all the same; input.where can leave them out")
    assert warnings(allowed, ROWS[:1]) == []

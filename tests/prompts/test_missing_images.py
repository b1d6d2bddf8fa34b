"""Rows without pictures are counted, as rows with empty texts are."""

import pathlib
from typing import Any

import pytest
from pictures import spec_of

from batchinf.prompts.checks import EmptyValues
from batchinf.source.rows import Row

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


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_images_are_counted(form: dict[str, Any], tmp_path: pathlib.Path) -> None:
    def warnings(rows: list[dict[str, Any]]) -> list[str]:
        empty = EmptyValues(spec_of({"path": str(tmp_path), "apply_chat_template": None, **form}))
        assert {"a", "b"} <= {*empty.columns}
        empty.add(Row(number, row) for number, row in enumerate(rows))
        return list(empty.warnings())

    remedy = "such rows run all the same; input.where can leave them out"
    assert warnings(ROWS) == [
        f"warning: 3 rows of 5 sampled without a picture in 'a' or 'b' (row 2 first): {remedy}",
        f"warning: 1 row of 5 sampled without a picture in one of the columns 'a' or 'b' (row 1 first): {remedy}",
    ]
    assert warnings(ROWS[:1]) == []

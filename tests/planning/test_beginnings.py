"""How much of the prompts vLLM's prefix cache can serve."""

import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.planning import lengths
from batchinf.planning.lengths import shared_share
from batchinf.source import rows as source_rows
from batchinf.spec.file import read_spec

RULES = "Say whether the review below is good or bad. Answer with one word. " * 8  # 536 characters


def share_of(folder: pathlib.Path, texts: Sequence[str | None], column: str = "prompt", **given: Any) -> float | None:
    """Of a job whose input has these texts."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    sections: dict[str, Any] = {"input": {"path": str(path), "id_column": None, **given}}
    return shared_share(read_spec(jobs.spec_of(folder, output={"keep_columns": []}, **sections)))


def own(number: int) -> str:
    """A text of 104 characters that begins unlike the others."""
    return f"{number * 7919:08x}" * 13


def test_texts_that_begin_differently_share_nothing(tmp_path: pathlib.Path) -> None:
    assert share_of(tmp_path, [own(number) for number in range(500)]) == 0.0


def test_a_common_beginning_counts_for_all_rows_but_the_first(tmp_path: pathlib.Path) -> None:
    # Whole blocks of 64 characters count: 512 of 640 characters.
    assert share_of(tmp_path, [RULES + own(number) for number in range(100)]) == pytest.approx(0.99 * 512 / 640)


def test_rows_with_one_beginning_need_not_be_neighbours(tmp_path: pathlib.Path) -> None:
    groups = [own(group) * 5 for group in range(10)]  # 520 characters
    texts = [group + own(number) for number, group in zip(range(100), itertools.cycle(groups), strict=False)]
    assert share_of(tmp_path, texts) == pytest.approx(0.9 * 512 / 624)


def test_the_text_of_a_template_counts(tmp_path: pathlib.Path) -> None:
    texts = [own(number) for number in range(100)]
    assert share_of(tmp_path, texts, "review", prompt_template=RULES + "{{ review }}") == pytest.approx(0.792)


def test_of_a_large_input_a_copy_of_some_rows_is_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_rows, "_MANY_BYTES", 1)
    assert share_of(tmp_path, [RULES + own(number) for number in range(20_000)]) == pytest.approx(0.8, abs=0.01)


def test_an_error_row_does_not_count(tmp_path: pathlib.Path) -> None:
    assert share_of(tmp_path, [RULES, None, RULES]) == pytest.approx(512 / (2 * 536))


@pytest.mark.parametrize(
    "given",
    [
        {"order": "prefix"},
        {"order": "auto"},
        {"prompt_column": "nothing"},
        {"path": "nothing.jsonl"},
        {"path": "some-user/some-dataset"},
        {"path": "https://example.invalid/rows.jsonl"},
    ],
)
def test_where_the_share_is_unknown(tmp_path: pathlib.Path, given: dict[str, str]) -> None:
    assert share_of(tmp_path, ["a", "b"], **given) is None


def test_an_input_that_cannot_be_read_is_left_to_the_start(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_rows, "_MANY_BYTES", 1)
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"prompt": [own(number) for number in range(5000)]}), whole)
    assert share_of(tmp_path, [], path=str(whole)) == 0.0
    half = tmp_path / "half.parquet"
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert share_of(tmp_path, [], path=str(half)) is None
    damaged = bytearray(whole.read_bytes())
    damaged[100:40_000] = bytes(39_900)
    half.write_bytes(damaged)
    assert share_of(tmp_path, [], path=str(half)) is None


def test_without_a_valid_prompt_the_share_is_unknown(tmp_path: pathlib.Path) -> None:
    assert share_of(tmp_path, [None, None]) is None


def test_many_files_are_not_opened(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "_MOST_FILES", 1)
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"prompt": "a"}\n')
    assert share_of(tmp_path, [], path=str(folder)) == 0.0
    (folder / "b.jsonl").write_text('{"prompt": "b"}\n')
    assert share_of(tmp_path, [], path=str(folder)) is None

import itertools
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinf.base.parquet import ParquetFile, readable_rows

COLUMNS = {
    "a": [{"b": "inside", "c": 1}, {"b": None, "c": 2}],
    "a.b": ["beside", "below"],
    "a.b.c": [1.5, 2.5],
    "d": [[1, 2], []],
    "d.list": ["x", "y"],
    "e": [None, 7],
}


@pytest.mark.parametrize("names", [list(names) for n in (1, 2, 3) for names in itertools.permutations(COLUMNS, n)])
def test_a_name_is_a_column_s_and_no_path(names: list[str], tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table(COLUMNS), tmp_path / "x.parquet")
    expected = {name: COLUMNS[name] for name in names}
    with ParquetFile(tmp_path / "x.parquet") as file:
        assert file.read(names).to_pydict() == expected
        assert file.read(columns=names).column_names == names
        assert file.read_row_group(0, names).to_pydict() == expected
        [batch] = file.iter_batches(columns=names)
        assert batch.to_pydict() == expected


def test_without_names_it_reads_all(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table(COLUMNS), tmp_path / "x.parquet")
    with ParquetFile(tmp_path / "x.parquet") as file:
        assert file.read().to_pydict() == file.read_row_group(0).to_pydict() == COLUMNS
        assert [batch.to_pydict() for batch in file.iter_batches()] == [COLUMNS]


def test_rows_with_text_that_is_not_utf_8_can_be_shown() -> None:
    """As in a part whose bytes were damaged."""
    text = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 2, 4], np.int32)), pa.py_buffer(b"ok\xe9x"))
    table = pa.table({"id": [1, 2], "text": text})
    assert readable_rows(table) == [
        {"id": 1, "text": "ok"},
        {"id": 2, "text": "a value that Python cannot build (string)"},
    ]

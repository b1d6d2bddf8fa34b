import itertools
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinf.base.parquet import ParquetFile

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

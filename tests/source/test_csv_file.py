import pathlib

from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source


def test_csv_that_is_not_utf8_or_never_closes_a_quote(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.csv").write_bytes(b'a,b\n1,2\n\xff,3\n4,5\n6,"open\n7,8\n')
    found = open_source(InputLocation(str(tmp_path / "x.csv")), tmp_path / "cache")
    rows = found.read(0, found.num_rows)
    assert [row.error and row.error.partition(":")[0] for row in rows] == [None, "x.csv line 3", None, "x.csv line 5"]
    assert rows[2].values == {"a": 4, "b": 5}
    found.close()

import pathlib

import pytest

from batchinf.base.errors import InputError
from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source


def test_csv_that_is_not_utf8_or_never_closes_a_quote(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.csv").write_bytes(b'a,b\n1,2\n\xff,3\n4,5\n6,"open\n')
    found = open_source(InputLocation(str(tmp_path / "x.csv")), tmp_path / "cache")
    rows = found.read(0, found.num_rows)
    assert [row.error and row.error.partition(":")[0] for row in rows] == [None, "x.csv line 3", None, "x.csv line 5"]
    remedy = "; if the file is in cp1252, `iconv -f cp1252 -t utf-8` converts it"
    assert rows[1].error == f"x.csv line 3: not UTF-8: byte 0xff at byte 1{remedy}"
    assert rows[2].values == {"a": 4, "b": 5}
    found.close()


def test_a_quote_that_swallows_the_rows_after_it_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.csv").write_text('a,b\n1,2\n6,"open\n7,8\n9,10\n')
    words = "x.csv: a quote opens in line 3 and is never closed, so that row would have the next 2 lines in it"
    with pytest.raises(InputError, match=words):
        open_source(InputLocation(str(tmp_path / "x.csv")), tmp_path / "cache")


def test_a_header_in_cp1252(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes("id,große\n1,2\n".encode("cp1252"))
    remedy = "if the file is in cp1252, `iconv -f cp1252 -t utf-8` converts it"
    with pytest.raises(InputError, match=f"x.csv: its header is not UTF-8: byte 0xdf at byte 7; {remedy}"):
        open_source(InputLocation(str(path)), tmp_path / "cache")

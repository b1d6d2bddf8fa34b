import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinf.base.errors import DriftError, InputError
from batchinf.source.files import InputLocation
from batchinf.source.rows import Source, open_source


def values(source: Source) -> list[object]:
    rows = [dict(row.values) for row in source.read(0, source.num_rows)]
    source.close()
    return rows


@pytest.mark.parametrize("glob", ["", "/**/*.parquet", "/lang=*/year=2024/*"])
def test_a_partitioned_dataset(glob: str, tmp_path: pathlib.Path) -> None:
    table = pa.table({"text": ["a", "b", "c"], "lang": ["de", "x y/z", None], "year": [2024] * 3})
    pq.write_to_dataset(table, tmp_path / "data", partition_cols=["lang", "year"])
    source = open_source(InputLocation(f"{tmp_path}/data{glob}"), tmp_path / "cache")
    found = sorted(values(source), key=lambda row: row["text"])
    assert found == [{**row, "year": "2024"} for row in table.to_pylist()]
    assert source.read_columns(0, 3, ["year", "text", "lang"]).to_pylist() == [
        {name: row[name] for name in ("year", "text", "lang")} for row in values(source)
    ]
    assert source.read_columns(0, 3, ["lang"]).num_rows == 3
    assert [row.values for row in source.read(0, 1, ["year"])] == [{"year": "2024"}]
    source.close()


def lines(folder: pathlib.Path, name: str, *texts: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(f"{text}\n" for text in texts))


def test_moved_files_keep_their_values_in_a_job_and_change_a_new_one(tmp_path: pathlib.Path) -> None:
    data = tmp_path / "data"
    lines(data, "lang=de/a.jsonl", '{"text": "x"}', "broken")
    first = open_source(InputLocation(str(data)), tmp_path / "cache")
    (data / "lang=de").rename(data / "lang=fr")
    again = open_source(InputLocation(str(data)), tmp_path / "cache", first.fingerprints)
    assert values(again) == [{"text": "x", "lang": "de"}, {}]
    other = open_source(InputLocation(str(data)), tmp_path / "other cache")
    assert values(other)[0] == {"text": "x", "lang": "fr"}
    assert other.fingerprint != first.fingerprint
    lines(data, "lang=en/b.jsonl", '{"text": "y"}')
    with pytest.raises(DriftError, match="1 file is new"):
        open_source(InputLocation(str(data)), tmp_path / "cache", first.fingerprints)
    grown = open_source(InputLocation(str(data)), tmp_path / "cache", first.fingerprints, "take")
    assert [row.get("lang") for row in values(grown)] == ["de", None, "en"]


def test_a_column_of_the_files_stays(tmp_path: pathlib.Path) -> None:
    lines(tmp_path / "data", "lang=de/a.jsonl", '{"lang": "own"}')
    lines(tmp_path / "data", "b.jsonl", '{"text": "y"}')
    source = open_source(InputLocation(str(tmp_path / "data")), tmp_path / "cache")
    assert values(source) == [{"text": "y"}, {"lang": "own"}]
    assert source.schema.names == ["text", "lang"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_folder_does_not_lose_its_value_to_a_column_of_other_files(is_new: bool, tmp_path: pathlib.Path) -> None:
    lines(tmp_path / "data", "lang=de/a.jsonl", '{"text": "x", "lang": "own"}')
    lines(tmp_path / "data", "lang=fr/b.jsonl", '{"text": "y"}')
    lines(tmp_path / "data", "lang=__HIVE_DEFAULT_PARTITION__/c.jsonl", '{"text": "z"}')
    location = InputLocation(str(tmp_path / "data"), is_new=is_new)
    if not is_new:  # a job of before goes on
        assert sorted(row["text"] for row in values(open_source(location, tmp_path / "cache"))) == ["x", "y", "z"]
        return
    with pytest.raises(
        InputError, match=r"column 'lang': lang=de/a\.jsonl has it itself, and lang=fr/b\.jsonl only in"
    ):
        open_source(location, tmp_path / "cache")


def test_a_folder_that_comes_later_does_not_lose_its_value(tmp_path: pathlib.Path) -> None:
    lines(tmp_path / "data", "lang=de/a.jsonl", '{"text": "x", "lang": "own"}')
    location = InputLocation(str(tmp_path / "data"))
    first = open_source(location, tmp_path / "cache")
    lines(tmp_path / "data", "lang=fr/b.jsonl", '{"text": "y"}')
    with pytest.raises(InputError, match="only in its folder's name"):
        open_source(location, tmp_path / "cache", first.fingerprints, "take")

"""Each count of a part is in its line, in its footer and in every sum, whichever counts there are."""

import dataclasses
import pathlib
from typing import Any

import pyarrow.parquet as pq
import pytest
from test_parts import SPECS, whole, write

from batchinf.base.storage import Folder
from batchinf.manifest.lines import BASIC_COUNTS, part_line, read_line
from batchinf.output.counts import count_rows
from batchinf.output.parts import count_entries, stated_counts
from batchinf.records import Part, PartCounts

COUNTS = [field.name for field in dataclasses.fields(PartCounts)]
RARE = [field.name for field in dataclasses.fields(PartCounts) if field.metadata.get("is_rare")]


def part(**counts: int) -> Part:
    return Part(shard=3, file="part-000003.parquet", num_bytes=9, digest="00", **counts)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make("journal", "staging", "parts")
    return folder


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_written_read_and_summed(name: str) -> None:
    own = part(**{name: 7})
    line = part_line("part", own)
    assert line[name] == 7
    assert read_line(line) == own
    entries = count_entries(own)
    assert entries[f"batchinf.{name}"] == "7"
    assert stated_counts(entries) == PartCounts(**{name: 7})
    assert PartCounts.sum([own, part(**{name: 5}), part()]) == PartCounts(**{name: 12})
    assert PartCounts(**{name: 1}) + PartCounts(**{name: 2}) == PartCounts(**{name: 3})


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [-1, "many", 1.0, None, True])
def test_a_count_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        read_line({**part_line("part", part()), name: value})


@pytest.mark.parametrize("name", COUNTS)
def test_only_a_basic_count_may_not_be_missing(name: str) -> None:
    line, entries = part_line("part", part()), count_entries(part())
    assert (name in line) == (f"batchinf.{name}" in entries) == (name not in RARE)
    line.pop(name, None)
    entries.pop(f"batchinf.{name}", None)
    if name not in BASIC_COUNTS:
        assert read_line(line) == part()
        assert stated_counts(entries) == PartCounts()
        return
    with pytest.raises(LookupError, match=name):
        read_line(line)
    with pytest.raises(LookupError, match=name):
        stated_counts(entries)


def test_a_written_part_says_the_same_in_its_record_and_in_its_footer(folder: Folder) -> None:
    spec = SPECS["three samples"]
    made = write(folder, whole(folder, spec), spec)
    entries = pq.read_metadata(folder.path(f"staging/{made.file}")).metadata
    stated = stated_counts({key.decode(): value.decode() for key, value in entries.items()})
    assert stated == PartCounts.sum([made])
    assert made.num_errors > 0 and made.num_output_tokens > 0
    table = pq.read_table(folder.path(f"staging/{made.file}"))
    assert count_rows(table) == stated


def test_counts_of_pieces_add_up(folder: Folder) -> None:
    batch = whole(folder, SPECS["one sample"]).fresh[0]
    pieces = [count_rows(batch.slice(0, 20)), count_rows(batch.slice(20))]
    assert PartCounts.sum(pieces) == count_rows(batch)

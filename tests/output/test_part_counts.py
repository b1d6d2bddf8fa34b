"""Each count of a part is in its line, in its footer and in every sum, whichever counts there are."""

import json
import pathlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_parts import SPECS, whole, write

from batchinf.base.storage import Folder
from batchinf.manifest.lines import BASIC_COUNTS, part_line, read_line
from batchinf.manifest.names import staged_file
from batchinf.output.counts import count_rows
from batchinf.output.parts import count_entries, stated_counts
from batchinf.records import ALWAYS_WRITTEN, COUNT_NAMES, Part, PartCounts
from batchinf.tasks.registry import task_of

COUNTS = [name for name in COUNT_NAMES if name != "task_counts"]
RARE = [name for name in COUNTS if name not in ALWAYS_WRITTEN]


def part(**counts: Any) -> Part:
    return Part(shard=3, num_bytes=9, digest="00", **counts)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make("journal", "staging", "parts")
    return folder


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_written_read_and_summed(name: str) -> None:
    own = part(**{name: 7})
    line = part_line(own)
    assert line[name] == 7
    assert read_line(line) == own
    entries = count_entries(own)
    assert entries[f"batchinf.{name}"] == "7"
    assert stated_counts(entries) == PartCounts(**{name: 7})
    assert PartCounts.sum([own, part(**{name: 5}), part()]) == PartCounts(**{name: 12})
    assert PartCounts(**{name: 1}) + PartCounts(**{name: 2}) == PartCounts(**{name: 3})


def test_the_counts_of_a_task_are_written_read_and_summed() -> None:
    counted = part(task_counts={"num_right": 7, "num_left": 0})
    line = part_line(counted)
    assert line["task_counts"] == {"num_right": 7, "num_left": 0}
    assert read_line(line) == counted
    assert stated_counts(count_entries(counted)).task_counts == counted.task_counts
    assert "task_counts" not in part_line(part()) and "batchinf.task_counts" not in count_entries(part())
    total = PartCounts.sum([part(), counted, part(task_counts={"num_right": 5, "num_left": 0})])
    assert total.task_counts == {"num_right": 12, "num_left": 0}
    assert PartCounts.sum([part(), part()]).task_counts is None


@pytest.mark.parametrize("value", [7, [], {"num_right": -1}, {"num_right": "many"}])
def test_counts_of_a_task_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="task_counts"):
        read_line({**part_line(part()), "task_counts": value})
    with pytest.raises(ValueError, match="task_counts"):
        stated_counts({**count_entries(part()), "batchinf.task_counts": json.dumps(value)})


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [-1, "many", 1.0, None, True])
def test_a_count_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        read_line({**part_line(part()), name: value})


@pytest.mark.parametrize("name", COUNTS)
def test_only_a_basic_count_may_not_be_missing(name: str) -> None:
    line, entries = part_line(part()), count_entries(part())
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
    made = write(whole(folder, spec))
    entries = pq.read_metadata(folder.path(staged_file(made))).metadata
    stated = stated_counts({key.decode(): value.decode() for key, value in entries.items()})
    assert stated == PartCounts.sum([made])
    assert made.num_errors > 0 and made.num_output_tokens > 0
    table = pq.read_table(folder.path(staged_file(made)))
    assert count_rows(table, task_of(spec)) == stated


def test_counts_of_pieces_add_up(folder: Folder) -> None:
    spec = SPECS["one sample"]
    table = pa.table(whole(folder, spec).fresh[0])
    pieces = [count_rows(rows, task_of(spec)) for rows in (table.slice(0, 20), table.slice(20))]
    assert PartCounts.sum(pieces) == count_rows(table, task_of(spec))

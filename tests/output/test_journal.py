"""Segments: whole ones come back as they were written, all others are named and left out."""

import os
import pathlib
import random

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from test_tasks_generate import make_results, make_spec

from batchinf.base.storage import Folder
from batchinf.output import counts as counts_module
from batchinf.output import journal
from batchinf.output.counts import joined, row_bytes
from batchinf.output.journal import Journal, drop, list_shards
from batchinf.records import Part
from batchinf.tasks.registry import task_of

SPEC = make_spec(n=2, logprobs=2, prompt_logprobs=1)
SCHEMA = task_of(SPEC).result_schema


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make("journal")
    return folder


def results(*rows: int) -> pa.Table:
    return pa.Table.from_batches([task_of(SPEC).encode(make_results(SPEC, [row])) for row in rows])


def path_of(folder: Folder, segment: journal.Segment) -> pathlib.Path:
    return folder.path(f"journal/{segment.name}")


def test_segments_of_all_incarnations_come_back(folder: Folder) -> None:
    one, other = Journal(folder, "0-a", SCHEMA), Journal(folder, "1-b", SCHEMA)
    written = {
        one.write(4, results(1, 2)).name: results(1, 2),
        other.write(4, results(3)).name: results(3),
        one.write(4, results(7, 5, 6)).name: results(7, 5, 6),
    }
    one.write(5, results(9))
    assert list(written) == ["000004-0-a-00000", "000004-1-b-00000", "000004-0-a-00001"]
    segments, damaged = Journal(folder, "2", SCHEMA).recover(4)
    assert damaged == []
    assert {segment.name: segment.table() for segment in segments} == written


def test_results_that_are_in_no_part_are_counted(folder: Folder) -> None:
    """A part has the results of its own retry and of those before it, and a later retry's wait for the next part."""
    for incarnation, rows in (("000001.0001", (1, 2)), ("000002.r1.0001", (3,)), ("000003.r2.0001", (4, 5, 6))):
        Journal(folder, incarnation, SCHEMA).write(0, results(*rows))
    Journal(folder, "000001.0001", SCHEMA).write(1, results(9))
    parts = [Part(shard=0, num_bytes=1, digest="d", num_rows=6, num_errors=0, retry=retry) for retry in range(3)]
    samples = 2  # of each row
    assert journal.num_results(folder, {}) == samples * 7
    assert [journal.num_results(folder, {0: part}) for part in parts] == [samples * 5, samples * 4, samples * 1]


def test_keys(folder: Folder) -> None:
    segment = Journal(folder, "a", SCHEMA).write(0, results(4, 2, 3))
    row_index, request_index, num_requests = segment.keys()
    assert row_index.tolist() == [4, 4, 2, 2, 3, 3]
    assert request_index.tolist() == [0, 1] * 3
    assert num_requests.tolist() == [2] * 6
    assert (row_index.dtype, request_index.dtype, num_requests.dtype) == (np.int64, np.int32, np.int32)


def test_an_empty_segment_and_a_shard_without_any(folder: Folder) -> None:
    writer = Journal(folder, "a", SCHEMA)
    writer.write(0, SCHEMA.empty_table())
    [segment] = writer.recover(0)[0]
    assert segment.table().num_rows == 0
    assert writer.recover(1) == ([], [])


def test_a_segment_is_mapped_and_not_loaded(folder: Folder) -> None:
    batch = pa.record_batch([pa.array(np.arange(1 << 20))], names=["row_index"])
    writer = Journal(folder, "a", batch.schema)
    segment = writer.write(0, pa.Table.from_batches([batch] * 4))
    del batch
    before, descriptors = pa.total_allocated_bytes(), len(os.listdir("/proc/self/fd"))
    [segment] = writer.recover(0)[0]
    assert segment.table().take([5, 1 << 21]).column(0).to_pylist() == [5, 0]
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert segment.table().column(0).chunk(0).buffers()[1].address % 8 == 0
    assert path_of(folder, segment).name in pathlib.Path("/proc/self/maps").read_text()
    segment.close()
    assert path_of(folder, segment).name not in pathlib.Path("/proc/self/maps").read_text()


def test_torn_anywhere(folder: Folder) -> None:
    writer = Journal(folder, "a", SCHEMA)
    torn, whole = writer.write(0, results(1)), writer.write(0, results(2))
    path = path_of(folder, torn)
    size = path.stat().st_size
    # In its header, between the buffers of its columns, and in its last bytes.
    for length in sorted({*range(64), *range(64, size, 7), *range(size - 16, size)}, reverse=True):
        os.truncate(path, length)
        segments, damaged = writer.recover(0)
        assert damaged == [torn.name]
        assert [segment.name for segment in segments] == [whole.name]


def test_any_flipped_bit(folder: Folder) -> None:
    writer = Journal(folder, "a", SCHEMA)
    segment = writer.write(0, results(1))
    path, chance = path_of(folder, segment), random.Random(0)
    data = path.read_bytes()
    # Every bit of the header, and one of each byte after it.
    bits = [*range(8 * 64), *(8 * place + chance.randrange(8) for place in range(64, len(data)))]
    with path.open("r+b", buffering=0) as file:
        for bit in bits:
            os.pwrite(file.fileno(), bytes([data[bit // 8] ^ 1 << bit % 8]), bit // 8)
            assert writer.recover(0) == ([], [segment.name])
            os.pwrite(file.fileno(), data[bit // 8 :][:1], bit // 8)
    assert len(writer.recover(0)[0]) == 1


def rewritten(data: bytes, place: int, new: bytes) -> bytes:
    """With `new` at `place` of the header, and a header checksum that fits."""
    header = data[:place] + new + data[place + len(new) : 56]
    return header + xxhash.xxh3_64_digest(header) + data[64:]


@pytest.mark.parametrize(
    ("place", "new"),
    [(0, b"otherjob"), (8, b"\2\0\0\0"), (12, b"\1\0\0\0"), (16, b"\0"), (24, b"\x63"), (32, b"\0\0\0")],
    ids=["magic", "later version", "shard", "length", "rows", "digest"],
)
def test_a_header_of_another_kind(folder: Folder, place: int, new: bytes) -> None:
    segment = Journal(folder, "a", SCHEMA).write(0, results(1))
    path = path_of(folder, segment)
    data = path.read_bytes()
    assert rewritten(data, 0, b"batchinf") == data
    path.write_bytes(rewritten(data, place, new))
    assert Journal(folder, "a", SCHEMA).recover(0)[1] == [segment.name]


def test_foreign_content(folder: Folder) -> None:
    writer = Journal(folder, "a", SCHEMA)
    segment = writer.write(0, results(1))
    data = path_of(folder, segment).read_bytes()
    folder.path("journal/000000-long-00000").write_bytes(data + b"\0")
    folder.path("journal/000000-text-00000").write_text("hello")
    folder.path("journal/000001-a-00000").write_bytes(data)
    assert writer.recover(0)[1] == ["000000-long-00000", "000000-text-00000"]
    assert writer.recover(1)[1] == ["000001-a-00000"]
    other = Journal(folder, "a", task_of(make_spec(n=2, logprobs=3)).result_schema)
    assert segment.name in other.recover(0)[1]


def test_an_unreadable_payload_with_fitting_checksums(folder: Folder) -> None:
    segment = Journal(folder, "a", SCHEMA).write(0, results(1))
    payload = b"\xff\xff\xff\xff not an Arrow stream"
    new = len(payload).to_bytes(8, "little") + (2).to_bytes(8, "little") + xxhash.xxh3_128_digest(payload)
    path = path_of(folder, segment)
    path.write_bytes(rewritten(path.read_bytes()[:64], 16, new) + payload)
    assert Journal(folder, "a", SCHEMA).recover(0)[1] == [segment.name]


STRANGERS = ["000003", "000003-a", "000003-a-00000.bak", "x000003-a-00000", "3-a-00000", "000003-a b-00000", "README"]


def test_only_our_own_names_are_touched(folder: Folder) -> None:
    writer = Journal(folder, "a", SCHEMA)
    for shard in (3, 3, 12, 1_234_567):
        writer.write(shard, results(1))
    for name in STRANGERS:
        folder.path(f"journal/{name}").write_text("precious")
    folder.path("journal/000003-b-00000").write_text("damaged, but ours")
    assert list_shards(folder) == [3, 12, 1_234_567]
    assert writer.recover(3)[1] == ["000003-b-00000"]
    drop(folder, {3: None, 4: None})
    assert list_shards(folder) == [12, 1_234_567]
    assert set(STRANGERS) <= set(folder.list("journal"))


def test_shards_of_seven_digits_are_not_mistaken_for_those_of_six(folder: Folder) -> None:
    writer = Journal(folder, "a", SCHEMA)
    writer.write(1_234_567, results(1))
    drop(folder, {123_456: None})
    assert list_shards(folder) == [1_234_567]
    assert writer.recover(1_234_567)[0][0].table().num_rows == 2


def test_a_failed_write_leaves_nothing(folder: Folder) -> None:
    writer = Journal(folder, "a", SCHEMA)
    with pytest.raises(pa.ArrowInvalid):
        writer.write(0, pa.table({"other": [1]}))
    assert os.listdir(folder.path("journal")) == []


def test_a_segment_is_never_written_over(folder: Folder) -> None:
    first = Journal(folder, "a", SCHEMA).write(0, results(1))
    again = Journal(folder, "a", SCHEMA).write(0, results(2))
    assert first.name != again.name
    assert first.table() == results(1)


@pytest.mark.parametrize("incarnation", ["", "a/b", "../x", "a b", "ä"])
def test_incarnations_that_make_no_file_name(folder: Folder, incarnation: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Journal(folder, incarnation, SCHEMA)


def test_half_written_files_are_not_segments(folder: Folder) -> None:
    folder.path("journal/.tmp-0123-000000-a-00000").write_text("half")
    assert Journal(folder, "a", SCHEMA).recover(0) == ([], [])


def test_joined_batches_are_few_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = results(*range(40)).to_batches()
    monkeypatch.setattr(counts_module, "BATCH_BYTES", 3000)
    found = list(joined(batches))
    assert 1 < len(found) < len(batches)
    assert pa.Table.from_batches(found) == pa.Table.from_batches(batches)
    assert all(batch.nbytes <= 3000 for batch in found)
    assert list(joined([])) == []


def test_row_bytes_are_those_of_each_row_alone() -> None:
    table = results(*range(30)).append_column("doc", pa.array(["x" * 1000 * (index % 3) for index in range(60)]))
    for part in (table, table.slice(7, 11), table.combine_chunks().slice(9, 5)):
        alone = [pa.concat_batches(part.slice(index, 1).to_batches()).nbytes for index in range(part.num_rows)]
        # Lone rows have an offset more in each list, and validity bits.
        assert np.abs(row_bytes(part) - alone).max() <= 12 * part.num_columns
    assert row_bytes(table.slice(3, 0)).tolist() == []


def test_row_bytes_of_types_that_no_task_uses() -> None:
    table = pa.table(
        {
            "struct": pa.array([{"a": 1, "b": "x"}] * 4),
            "large": pa.array(["x", "yy", None, ""], pa.large_string()),
            "fixed": pa.array([[1, 2]] * 4, pa.list_(pa.int8(), 2)),
            "dictionary": pa.array(["a", "a", "b", None]).dictionary_encode(),
            "nothing": pa.nulls(4),
            "empty lists": pa.array([[], None, [], []], pa.list_(pa.string())),
        }
    )
    sizes = row_bytes(table)
    assert sizes[1] == sizes[0] + 1
    assert 4 * 15 < sizes.sum() < 4 * 60

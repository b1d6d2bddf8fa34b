"""Shards from results to Parquet: whatever the order, checkpoints and restarts, a part is what plain Python says."""

import os
import pathlib
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from test_tasks_generate import expected_row, make_results, make_spec

from batchinf.base import faults
from batchinf.base.storage import Folder
from batchinf.job.job import carried_columns
from batchinf.manifest.columns import Columns
from batchinf.manifest.names import parse_part_name, parse_staging_name, part_name, staged_file, staging_name
from batchinf.output import parts
from batchinf.output.journal import Journal
from batchinf.output.open_lease import OpenLease
from batchinf.output.parts import stated_part, write_part
from batchinf.records import Lease, Part, Result
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import Task
from batchinf.tasks.registry import task_of

SHARD = Lease(3, 1000, 1060)
METADATA = {"batchinf.fingerprint": "f00d", "batchinf.model": "m"}
SPECS = {
    "one sample": make_spec(logprobs=2),
    "three samples": make_spec(
        id_column="key",
        n=3,
        logprobs=1,
        prompt_logprobs=1,
        output={"include_prompt": True, "keep_columns": ("kept", "key", "nested")},
    ),
    "kept columns": make_spec(output={"keep_columns": ("kept",), "include_token_ids": False}),
    "float16": make_spec(id_column="nested", logprobs=2, output={"logprobs_dtype": "float16"}),
}


class Rows:
    """A source in memory that notes what is read of it."""

    schema = pa.schema(
        [
            pa.field("key", pa.string(), metadata={"made": "up"}),
            ("kept", pa.timestamp("us", "UTC")),
            ("nested", pa.list_(pa.struct([("a", pa.int8())]))),
        ]
    )

    def __init__(self, key_bytes: int = 0) -> None:
        self.key_bytes = key_bytes
        self.reads: list[int] = []

    def row(self, index: int) -> dict[str, Any]:
        table = self.fields_of(np.array([index]), list(self.schema))
        return {name: table.column(name)[0].as_py() for name in self.schema.names}

    def keep_digests(self) -> None:
        """It has none."""

    def fields_of(self, positions: Any, fields: Sequence[pa.Field], lost: dict[int, str] | None = None) -> pa.Table:
        self.reads.append(len(positions))
        rows = positions.tolist()
        arrays = {
            "key": pa.array([f"row {row}".ljust(self.key_bytes) for row in rows]),
            "kept": pa.array([None if row % 7 == 0 else row for row in rows], self.schema.field("kept").type),
            "nested": pa.array([[{"a": row % 100}] * (row % 3) for row in rows], self.schema.field("nested").type),
        }
        return pa.table([arrays[field.name] for field in fields], schema=pa.schema(fields))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make("journal", "staging", "parts")
    return folder


def opened(folder: Folder, spec: JobSpec, incarnation: str = "0-a", shard: Lease = SHARD) -> OpenLease:
    task = task_of(spec)
    return OpenLease(shard, task, Journal(folder, incarnation, task.result_schema))


def write(shard: OpenLease, source: Any = None) -> Part:
    source = source or Rows()
    return write_part(shard, source, **of_job(shard.task, source))


def of_job(task: Task, rows: Rows, metadata: dict[str, str] = METADATA) -> dict[str, Any]:
    """What all parts of a job need."""
    carried = [rows.schema.field(name) for name in carried_columns(task.spec)]
    return {"carried": carried, "columns": Columns.of_new_job(task, carried), "metadata": metadata}


def expected_output(spec: JobSpec, results: Sequence[Result]) -> list[dict[str, Any]]:
    """Output rows of sorted results, in plain Python, in the documented order of columns."""
    rows, source = [], Rows()
    for result in results:
        own, row = source.row(result.prompt.row_index), expected_row(spec, result)
        head = {} if spec.input.id_column is None else {"id": own[spec.input.id_column]}
        head |= {"row_index": row.pop("row_index"), "prompt_hash": row.pop("prompt_hash")}
        head |= {"sample_index": row.pop("request_index")}
        del row["num_requests"], row["has_second_bos"]
        rows.append(head | {name: own[name] for name in spec.output.keep_columns} | row)
    return rows


def read(folder: Folder, part: Part) -> list[dict[str, Any]]:
    table = pq.read_table(folder.path(staged_file(part)))
    table.validate(full=True)
    rows: list[dict[str, Any]] = table.to_pylist()
    assert not rows or list(rows[0]) == table.column_names
    return rows


# -- any order, any checkpoints, any restarts ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", SPECS)
def test_a_part_is_what_plain_python_says(
    folder: Folder, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, chance = SPECS[name], random.Random(f"{name} {seed}")
    monkeypatch.setattr(parts, "PIECE_BYTES", chance.choice([500, 5_000, 16 << 20]))
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", chance.choice([4_000, 128 << 20]))
    monkeypatch.setattr(parts, "_WIDE_BYTES", chance.choice([0, 300, 1 << 30]))
    monkeypatch.setattr(parts, "_FIRST_ROWS", chance.choice([1, 7, 64]))
    results = make_results(spec, range(SHARD.start, SHARD.stop))
    shard, num_new = run(folder, spec, results, chance)
    assert num_new == shard.num_results == len(results)
    part = write(shard)
    assert read(folder, part) == expected_output(spec, results)
    assert_is_described(folder, part, results)
    assert stated_part(folder, staged_file(part), SHARD, "f00d") == part


def run(folder: Folder, spec: JobSpec, results: list[Result], chance: random.Random) -> tuple[OpenLease, int]:
    """Finish a shard with checkpoints, restarts and results that come twice; how many results were new."""
    shard, num_new, todo = opened(folder, spec, "life-0"), 0, shuffled(results, chance)
    for life in range(1, 1000):
        while todo:
            size = chance.randrange(1, 20)
            batch, todo = todo[:size], todo[size:]
            num_new += shard.add(shard.task.encode(batch))
            check(shard, results)
            if chance.random() < 0.3:
                shard.checkpoint()
            if chance.random() < 0.1:
                break
        if shard.is_complete:
            break
        # Whatever was not journalled is lost here.
        shard.close()
        shard = opened(folder, spec, f"life-{-life % 7}")
        shard.recover()
        assert shard.damaged == ()
        num_new = shard.num_results
        todo = shuffled([result for result in results if not is_done(shard, result)], chance)
    return shard, num_new


def shuffled(results: list[Result], chance: random.Random) -> list[Result]:
    """In any order, a quarter of them twice."""
    return chance.sample(results, len(results)) + chance.sample(results, len(results) // 4)


def is_done(shard: OpenLease, result: Result) -> bool:
    return shard.is_done(result.prompt.row_index, result.request_index)


def check(shard: OpenLease, results: list[Result]) -> None:
    """What an open shard says of itself agrees with itself."""
    done = [is_done(shard, result) for result in results]
    assert sum(done) == shard.num_results
    n = len(results) // SHARD.num_rows
    finished = [all(done[row * n : row * n + n]) for row in range(SHARD.num_rows)]
    assert [shard.is_finished(row) for row in range(SHARD.start, SHARD.stop)] == finished
    assert (not len(shard.unfinished(np.arange(10, 13)))) == all(finished[10:13])
    assert shard.is_complete == all(done)


def assert_is_described(folder: Folder, part: Part, results: list[Result]) -> None:
    data = folder.read(staged_file(part))
    answered = [result for result in results if result.completion is not None]
    assert part == Part(
        shard=SHARD.index,
        num_rows=len(results),
        num_errors=sum(result.error is not None for result in results),
        num_bytes=len(data),
        num_prompt_tokens=sum(len(result.prompt.token_ids) for result in answered),
        num_output_tokens=sum(len(r.completion.token_ids) for r in answered if r.completion is not None),
        digest=xxhash.xxh3_128_hexdigest(data),
    )
    metadata = pq.read_metadata(folder.path(staged_file(part))).metadata
    own = {key.decode(): value.decode() for key, value in metadata.items() if key.startswith(b"batchinf.")}
    assert own == METADATA | {
        "batchinf.format_version": "1",
        "batchinf.shard": "3",
        "batchinf.first_row": "1000",
        "batchinf.num_source_rows": "60",
        "batchinf.num_rows": str(part.num_rows),
        "batchinf.num_errors": str(part.num_errors),
        "batchinf.num_prompt_tokens": str(part.num_prompt_tokens),
        "batchinf.num_output_tokens": str(part.num_output_tokens),
        "batchinf.num_nan_rows": "0",
        "batchinf.num_inf_rows": "0",
    }


def test_schema_of_the_file(folder: Folder) -> None:
    spec = SPECS["three samples"]
    part = write(whole(folder, spec))
    fields = [Rows.schema.field(name) for name in ("key", "kept", "key", "nested")]
    schema = pq.read_schema(folder.path(staged_file(part)))
    assert schema.equals(task_of(spec).output_schema(fields))
    assert "made" not in str(schema.field("id").metadata)


def whole(folder: Folder, spec: JobSpec, shard: Lease = SHARD) -> OpenLease:
    made = opened(folder, spec, shard=shard)
    made.add(made.task.encode(make_results(spec, range(shard.start, shard.stop))))
    return made


# -- open shards -----------------------------------------------------------------------------------------------------


def test_of_two_results_for_one_request_the_first_stands(folder: Folder) -> None:
    spec, shard = make_spec(), Lease(0, 0, 2)
    first, second = make_results(spec, [0, 1], error_rate=0)

    def as_text(result: Result, text: str) -> pa.RecordBatch:
        return task_of(spec).encode([Result(result.prompt, 0, 1, result.completion, text, None, 1)])

    # Two lives that knew nothing of each other: the segments overlap.
    for incarnation, text in (("b", "later"), ("a", "earlier")):
        made = opened(folder, spec, incarnation, shard)
        assert [made.add(as_text(first, text)), made.add(as_text(first, "twice"))] == [1, 0]
        made.checkpoint()
    made = opened(folder, spec, "c", shard)
    made.recover()
    assert (made.damaged, made.num_results) == ((), 1)
    assert made.add(as_text(first, "again")) == 0
    assert made.add(pa.concat_batches([as_text(second, "new"), as_text(second, "newer")])) == 1
    assert [row["text"] for row in read(folder, write(made))] == ["earlier", "new"]


def test_a_checkpoint_forgets_and_nothing_is_written_twice(folder: Folder) -> None:
    made = whole(folder, SPECS["one sample"])
    assert made.unjournalled_bytes > 10_000
    made.checkpoint()
    made.checkpoint()
    [segment] = made.segments
    assert segment.table().num_rows == made.num_results
    assert (made.unjournalled_bytes, made.fresh) == (0, [])
    assert made.add(segment.table().to_batches()[0]) == 0
    assert made.unjournalled_bytes == 0


def test_a_damaged_segment_is_named_and_its_results_are_missing(folder: Folder) -> None:
    spec = SPECS["one sample"]
    made, results = opened(folder, spec), make_results(spec, range(1000, 1060))
    for start in (0, 20, 40):
        made.add(made.task.encode(results[start : start + 20]))
        made.checkpoint()
    names = [segment.name for segment in made.segments]
    os.truncate(folder.path(f"journal/{names[1]}"), 2000)
    again = opened(folder, spec, "b")
    again.recover()
    assert again.damaged == (names[1],)
    assert [again.is_finished(row) for row in range(1000, 1060)] == [True] * 20 + [False] * 20 + [True] * 20
    again.add(again.task.encode(results))
    assert read(folder, write(again)) == expected_output(spec, results)


def test_a_segment_of_strange_rows_counts_as_damaged(folder: Folder) -> None:
    task = task_of(make_spec())
    journal = Journal(folder, "a", task.result_schema)
    strange = journal.write(3, pa.Table.from_batches([task.encode(make_results(make_spec(), [5]))]))
    made = opened(folder, make_spec(), "b")
    made.recover()
    assert (made.damaged, made.num_results, made.segments) == ((strange.name,), 0, [])


@pytest.mark.parametrize(
    ("rows", "requests", "counts"),
    [
        ([999], [0], [1]),
        ([1060], [0], [1]),
        ([1000], [1], [1]),
        ([1000], [-1], [1]),
        ([1000, 1000], [0, 2], [2, 3]),
        ([1001], [0], [4]),
    ],
)
def test_results_that_cannot_be_are_refused(
    folder: Folder, rows: list[int], requests: list[int], counts: list[int]
) -> None:
    spec = make_spec()
    made = opened(folder, spec)
    made.add(made.task.encode(make_results(spec, [1001], error_rate=0)))
    batch = keyed(list(zip(rows, requests, counts, strict=True)))
    with pytest.raises(ValueError, match="got results"):
        made.add(batch)
    assert made.num_results == 1
    assert not made.is_finished(1000)


def test_rows_with_requests_of_different_numbers(folder: Folder) -> None:
    counts = {row: 1 + row * 7 % 40 for row in range(1000, 1060)}
    keys = [(row, index, count) for row, count in counts.items() for index in range(count)]
    random.Random(0).shuffle(keys)
    made, done = opened(folder, make_spec()), set()
    for start in range(0, len(keys), 17):
        assert not made.is_complete
        some = keys[start : start + 17]
        made.add(keyed(some))
        done |= {key[:2] for key in some}
        assert all(made.is_done(row, index) == ((row, index) in done) for row, index, _ in keys)
    assert made.is_complete
    row_index, request_index = np.array(sorted(done), np.int64).T
    assert made.places(row_index, request_index.astype(np.int32)).tolist() == list(range(len(keys)))


def keyed(keys: list[tuple[int, int, int]]) -> pa.RecordBatch:
    """Results with these keys; everything else is null."""
    schema = task_of(make_spec()).result_schema
    values = dict(zip(("row_index", "request_index", "num_requests"), zip(*keys, strict=True), strict=True))
    nulls = [None] * len(keys)
    return pa.record_batch([pa.array(values.get(field.name, nulls), field.type) for field in schema], schema=schema)


def test_an_incomplete_shard_is_not_written(folder: Folder) -> None:
    spec = SPECS["one sample"]
    made = opened(folder, spec)
    made.add(made.task.encode(make_results(spec, range(1000, 1059))))
    with pytest.raises(ValueError, match="not complete"):
        write(made)
    assert os.listdir(folder.path("staging")) == []


# -- bounded memory --------------------------------------------------------------------------------------------------


def test_a_journalled_shard_is_written_in_little_memory(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, shard = make_spec(logprobs=20, max_tokens=1000), Lease(0, 0, 300)
    monkeypatch.setattr(parts, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", 2 << 20)
    made, rows = opened(folder, spec, shard=shard), list(range(300))
    random.Random(0).shuffle(rows)
    for start in range(0, 300, 50):
        made.add(made.task.encode(make_results(spec, rows[start : start + 50])))
        made.checkpoint()
    num_bytes = sum(segment.table().nbytes for segment in made.segments)
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    usual = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        part = write(made)
    finally:
        pa.set_memory_pool(usual)
    assert num_bytes > 15 << 20
    assert pool.max_memory() < 8 << 20
    footer = pq.read_metadata(folder.path(staged_file(part)))
    assert footer.num_row_groups >= num_bytes // (2 << 20)


def test_large_kept_columns_are_read_few_at_a_time(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, shard = make_spec(id_column="key", n=4), Lease(0, 0, 2000)
    made = whole(folder, spec, shard)
    narrow, wide = Rows(), Rows(key_bytes=5000)
    monkeypatch.setattr(parts, "PIECE_BYTES", 200_000)
    pieces: list[int] = []
    reduce = type(made.task).reduce

    def noting(task: Any, columns: pa.Table, results: pa.Table) -> pa.Table:
        table = reduce(task, columns, results)
        pieces.append(table.nbytes)
        return table

    monkeypatch.setattr(type(made.task), "reduce", noting)
    part = write(made, narrow)
    assert narrow.reads[:3] == [64, 256, 1024]
    assert max(pieces) < 250_000
    pieces.clear()
    wide_part = write(made, wide)
    assert wide.reads[0] == 64
    assert max(wide.reads[1:]) <= 41
    assert max(pieces) < 250_000
    assert [row["id"].rstrip() for row in read(folder, wide_part)] == [
        f"row {row}" for row in range(2000) for _ in range(4)
    ]
    assert part.num_rows == wide_part.num_rows == 8000


# -- names and verification ------------------------------------------------------------------------------------------


def test_names() -> None:
    digest = "0123456789abcdef" * 2
    assert (part_name(42), staging_name(42, digest)) == ("part-000042.parquet", f"000042-{digest}.parquet")
    for shard in (0, 42, 1_234_567):
        assert parse_part_name(part_name(shard)) == shard
        assert parse_staging_name(staging_name(shard, digest)) == (shard, digest)


@pytest.mark.parametrize(
    "name",
    [
        "part-42.parquet",
        "part-000042.parquet.bak",
        "my-part-000042.parquet",
        "README",
        "part-00004x.parquet",
        "part-0000042.parquet",
    ],
)
def test_foreign_names(name: str) -> None:
    assert parse_part_name(name) is None
    assert parse_staging_name(name) is None
    assert parse_staging_name("000042.parquet") is None


def test_a_part_states_its_job_and_its_shard(folder: Folder) -> None:
    spec = SPECS["three samples"]
    part = write(whole(folder, spec))
    name = staged_file(part)
    assert stated_part(folder, name, SHARD, "f00d") == part
    folder.publish(name, "parts/part-000003.parquet")
    assert stated_part(folder, "parts/part-000003.parquet", SHARD, "f00d") == part
    strangers = [(SHARD, "other"), (Lease(4, 1000, 1060), "f00d"), (Lease(3, 1000, 1061), "f00d")]
    for shard, fingerprint in [*strangers, (Lease(3, 999, 1059), "f00d")]:
        assert stated_part(folder, "parts/part-000003.parquet", shard, fingerprint) is None


def test_a_file_that_is_no_part_states_nothing(folder: Folder) -> None:
    folder.path("parts/text").write_text("hello")
    folder.path("parts/empty").touch()
    pq.write_table(pa.table({"row_index": [1]}), folder.path("parts/foreign"))
    for name in ("text", "empty", "foreign", "absent"):
        assert stated_part(folder, f"parts/{name}", SHARD, "f00d") is None


def test_a_staged_part_that_is_torn_or_altered_is_not_the_one_of_its_name(folder: Folder) -> None:
    def is_whole() -> bool:
        found = stated_part(folder, name, SHARD, "f00d")
        return found is not None and staged_file(found) == name

    spec = SPECS["one sample"]
    part = write(whole(folder, spec))
    path, name = folder.path(staged_file(part)), staged_file(part)
    data, chance = path.read_bytes(), random.Random(0)
    with path.open("r+b", buffering=0) as file:
        for place in [*range(0, len(data), 17), *range(len(data) - 100, len(data))]:
            os.pwrite(file.fileno(), bytes([data[place] ^ 1 << chance.randrange(8)]), place)
            assert not is_whole()
            os.pwrite(file.fileno(), data[place : place + 1], place)
    assert is_whole()
    for length in sorted({0, 1, 7, 8, 12, *chance.sample(range(len(data)), 60), len(data) - 1}, reverse=True):
        os.truncate(path, length)
        assert not is_whole()


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["before_fsync", "before_rename", "after_rename"])
@pytest.mark.parametrize("where", ["journal", "parts"])
def test_a_disk_that_fails_at_a_step(folder: Folder, where: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["three samples"]
    results = make_results(spec, range(SHARD.start, SHARD.stop))
    monkeypatch.setattr(faults, "_passages", {})
    monkeypatch.setattr(faults, "_FAULTS", {(f"{where}.{step}", 1): "raise 28"})

    def finish(shard: OpenLease) -> Part:
        for start in range(0, len(results), 50):
            shard.add(shard.task.encode(results[start : start + 50]))
            shard.checkpoint()
        return write(shard)

    shard = opened(folder, spec)
    with pytest.raises(OSError, match="No space"):
        finish(shard)
    # The same process may go on, and so may another life.
    for again in (shard, opened(folder, spec, "1-b")):
        if again is not shard:
            again.recover()
            assert again.damaged == ()
            assert again.num_results >= 50
        part = finish(again)
        assert read(folder, part) == expected_output(spec, results)
        assert stated_part(folder, staged_file(part), SHARD, "f00d") == part
    assert not [name for name in os.listdir(folder.path("staging")) if name.startswith(".")]


def test_other_threads_may_ask_while_results_are_added(folder: Folder) -> None:
    counts = {row: 1 + row * 7 % 40 for row in range(1000, 1020)}
    keys = [(row, index, count) for row, count in counts.items() for index in range(count)]
    made = opened(folder, make_spec())
    last, is_over = keys[-1], threading.Event()

    def ask() -> int:
        num_asked = 0
        while not made.is_complete and not is_over.is_set():
            for row, index, _ in keys:
                made.is_done(row, index)
            made.unfinished(np.arange(20))
            num_asked += 1
        return num_asked

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            for key in keys:
                made.add(keyed([key]))
        finally:
            is_over.set()
        assert asked.result(timeout=60) >= 0
    assert made.is_done(last[0], last[1])

"""A part in the place of another: chosen rows are new, the others are untouched, whatever the sizes of the pieces."""

import json
import pathlib
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_parts import METADATA, SHARD, SPECS, Rows, expected_output, of_job, opened, read, write
from test_tasks_generate import make_results

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.manifest.lines import Retry
from batchinf.manifest.names import incarnation_name, part_name, published_file, retry_of, staged_file
from batchinf.output import parts
from batchinf.output import replace as replacing
from batchinf.output.journal import Journal, drop
from batchinf.output.open_lease import OpenLease
from batchinf.output.parts import stated_part
from batchinf.output.replace import check_replaced, retry_metadata, write_replacement
from batchinf.records import Part, Result
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

RETRY = Retry(
    number=1,
    predicate="errors",
    overrides={"sampling.max_tokens": 8},
    num_rows=9,
    num_shards=1,
    positions="",
    stop_row=2000,
)
NAME = incarnation_name(2, 1, RETRY.number)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make("journal", "staging", "parts", "retry")
    return folder


def published(folder: Folder, spec: JobSpec, results: list[Result]) -> Part:
    """A first part of all rows, in place."""
    shard = opened(folder, spec)
    shard.add(shard.task.encode(results))
    part = write(shard)
    folder.publish(staged_file(part), published_file(part))
    return part


def reopened(folder: Folder, spec: JobSpec, chosen: Any, name: str = NAME) -> OpenLease:
    task = task_of(spec)
    return OpenLease(SHARD, task, Journal(folder, name, task.result_schema), chosen=chosen)


def write_new(shard: OpenLease, retry: Retry = RETRY) -> Part:
    rows: Any = Rows()
    return write_replacement(shard, rows, **of_job(shard.task, rows, METADATA | retry_metadata(retry)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SPECS)
def test_chosen_rows_are_new_and_the_others_as_they_were(
    folder: Folder, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, chance = SPECS[name], random.Random(f"{name} {seed}")
    for module in (parts, replacing):
        monkeypatch.setattr(module, "PIECE_BYTES", chance.choice([500, 5_000, 16 << 20]))
    monkeypatch.setattr(parts, "_FIRST_ROWS", chance.choice([1, 7, 64]))
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", chance.choice([4_000, 128 << 20]))
    first = make_results(spec, range(SHARD.start, SHARD.stop))
    old = published(folder, spec, first)
    num_chosen = chance.choice([1, 5, 30, SHARD.num_rows])
    chosen = np.zeros(SHARD.num_rows, np.bool_)
    chosen[chance.sample(range(SHARD.num_rows), num_chosen)] = True
    again = [r for r in make_results(spec, range(SHARD.start, SHARD.stop), 0.0) if chosen[r.prompt.row_index - 1000]]
    shard = reopened(folder, spec, chosen)
    assert len(shard.unfinished(np.arange(SHARD.num_rows)))
    for result in chance.sample(again, len(again)):
        assert not shard.is_complete
        shard.add(shard.task.encode([result]))
        if chance.random() < 0.1:
            shard.checkpoint()
    assert shard.is_complete
    part = write_new(shard)
    # `attempts` goes on from the most that any of the row's samples had.
    before: dict[int, int] = {}
    for result in first:
        before[result.prompt.row_index] = max(before.get(result.prompt.row_index, 0), result.attempts)
    new = {(r.prompt.row_index, r.request_index): replace(r, attempts=r.attempts + before[r.prompt.row_index])
           for r in again}  # fmt: skip
    expected = [new.get((r.prompt.row_index, r.request_index), r) for r in first]
    assert read(folder, part) == expected_output(spec, expected)
    kept = [r for r in first if not chosen[r.prompt.row_index - 1000]]
    assert (part.retry, part.num_kept, part.num_rows) == (1, len(kept), len(first))
    assert part.num_kept_errors == sum(r.error is not None for r in kept)
    staged = staged_file(part)
    whole = stated_part(folder, staged, SHARD, "f00d")
    assert whole == replace(part, num_kept=0, num_kept_errors=0)
    assert part.replaces == old.digest != part.digest
    check_replaced(folder, part, old)
    with pytest.raises(OutputError, match="damaged, and its other rows cannot be kept: move it away"):
        check_replaced(folder, part, replace(old, digest=part.digest))


def test_each_retry_stands_in_the_metadata(folder: Folder) -> None:
    spec = SPECS["one sample"]
    results = make_results(spec, range(SHARD.start, SHARD.stop))
    published(folder, spec, results)
    second = replace(RETRY, number=2, predicate="text = 'ü'", overrides={})
    for retry in (RETRY, second):
        chosen = np.arange(SHARD.num_rows) == retry.number
        shard = reopened(folder, spec, chosen, incarnation_name(2, 1, retry.number))
        shard.add(shard.task.encode(results[retry.number : retry.number + 1]))
        part = write_new(shard, retry)
        folder.publish(staged_file(part), published_file(part))
    stored = pq.read_metadata(folder.path(f"parts/{part_name(SHARD.index)}")).metadata
    assert stored[b"batchinf.retry"] == b"2"
    said = [json.loads(stored[f"batchinf.retry.{number}".encode()]) for number in (1, 2)]
    assert said == [
        {"predicate": "errors", "set": {"sampling.max_tokens": 8}, "num_rows": 9},
        {"predicate": "text = 'ü'", "set": {}, "num_rows": 9},
    ]


def test_a_damaged_part_is_not_merged(folder: Folder) -> None:
    spec = SPECS["one sample"]
    results = make_results(spec, range(SHARD.start, SHARD.stop))
    published(folder, spec, results)
    path = folder.path(f"parts/{part_name(SHARD.index)}")
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    shard = reopened(folder, spec, np.arange(SHARD.num_rows) == 5)
    shard.add(shard.task.encode(results[5:6]))
    with pytest.raises(OutputError, match="moves damaged parts aside"):
        write_new(shard)
    path.write_bytes(data[:1000])
    with pytest.raises(OutputError, match="move it away"):
        write_new(shard)


def test_results_of_rows_that_were_not_chosen_are_strangers(folder: Folder) -> None:
    spec = SPECS["one sample"]
    results = make_results(spec, range(SHARD.start, SHARD.stop))
    shard = reopened(folder, spec, np.arange(SHARD.num_rows) == 5)
    assert shard.is_finished(1004)
    assert not shard.is_finished(1005)
    with pytest.raises(ValueError, match="not to be run"):
        shard.add(shard.task.encode(results[4:6]))


def test_segments_of_one_retry_are_not_taken_for_those_of_another(folder: Folder) -> None:
    spec = SPECS["one sample"]
    results = make_results(spec, range(SHARD.start, SHARD.stop))
    lives = {0: incarnation_name(1, 1, 0), 1: NAME, 2: incarnation_name(2, 2, 2)}
    assert [retry_of(name) for name in lives.values()] == list(lives)
    for retry, name in lives.items():
        shard = reopened(folder, spec, None, name)
        shard.add(shard.task.encode(results[retry : retry + 1]))
        shard.checkpoint()
    for retry in lives:
        shard = reopened(folder, spec, None, incarnation_name(3, 1, retry))
        shard.recover()
        assert shard.damaged == ()
        assert [shard.is_finished(SHARD.start + row) for row in range(3)] == [row == retry for row in range(3)]
    drop(folder, {SHARD.index: 1})
    assert [retry_of(name.split("-")[1]) for name in folder.list("journal")] == [2]

"""NaN and -inf among logprobs: stored as they are, counted by row, said at the end."""

import math
import pathlib
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_parts import SHARD, write
from test_tasks_generate import make_results, make_spec

import jobs
from batchinf.base.storage import Folder
from batchinf.manifest.names import staged_file
from batchinf.output.counts import count_non_finite_rows, number_columns
from batchinf.output.journal import Journal
from batchinf.output.open_lease import OpenLease
from batchinf.output.parts import stated_part
from batchinf.output.remarks import non_finite_lines, rules_out_tokens
from batchinf.records import Part
from batchinf.tasks.registry import task_of

# In every process of a job: of the requests whose first drawn token is even, the first logprob is not finite.
HURT = f"""
import runpy

runpy.run_path({str(jobs.ROOT / "tests" / "quick" / "sitecustomize.py")!r})

import numpy
from batchinf.engines.scripted import ScriptedEngine

complete = ScriptedEngine.complete

def hurt(self, request):
    completion = complete(self, request)
    if completion.logprobs is not None and request.row_index >= 0:
        if request.row_index % 50 == 7:
            completion.logprobs.logprobs[0, 0] = numpy.nan
        if request.row_index % 100 == 7:
            completion.logprobs.logprobs[-1, 1:] = -numpy.inf
    return completion

ScriptedEngine.complete = hurt
"""


def draw(chance: random.Random, depth: int) -> Any:
    """A logprob, or lists of them, with nulls wherever Arrow allows them."""
    if chance.random() < 0.1:
        return None
    if depth:
        return [draw(chance, depth - 1) for _ in range(chance.randrange(4))]
    return chance.choice([-0.5, -2.0, 0.0, -1.0, -7.0, chance.choice([math.nan, -math.inf, -3.0])])


def leaves(value: Any) -> list[float]:
    """All numbers in nested lists."""
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [value]


@pytest.mark.parametrize("item", [pa.float32(), pa.float16(), pa.float64()], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_counted_as_plain_python_counts(item: pa.DataType, seed: int) -> None:
    chance = random.Random(seed)
    columns = {"a": 1, "b": 2}
    pieces = []
    for _ in range(3):
        num_rows = chance.randrange(30)
        values = {name: [draw(chance, depth) for _ in range(num_rows)] for name, depth in columns.items()}
        types = {"a": pa.list_(item), "b": pa.list_(pa.list_(item))}
        table = pa.table({name: pa.array(values[name], types[name]) for name in columns})
        start = chance.randrange(num_rows + 1)
        pieces.append(table.slice(start, chance.randrange(num_rows + 1)))
    table = pa.concat_tables(pieces)
    rows = [leaves(list(row.values())) for row in table.to_pylist()]
    expected = sum(any(map(math.isnan, row)) for row in rows), sum(any(map(math.isinf, row)) for row in rows)
    assert count_non_finite_rows(table, list(columns)) == expected


def test_what_stands_in_the_place_of_a_null_is_not_counted() -> None:
    values = pa.array(np.array([np.nan, 1.0], np.float32), mask=np.array([True, False]))
    lists = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), values)
    assert count_non_finite_rows(pa.table({"a": lists}), ["a"]) == (0, 0)


def test_only_the_task_s_own_columns_are_looked_at() -> None:
    spec = make_spec(logprobs=2, prompt_logprobs=0)
    assert number_columns(task_of(spec).result_schema) == (
        "cumulative_logprob", "logprobs", "top_logprobs", "prompt_logprobs"
    )  # fmt: skip
    assert number_columns(task_of(make_spec()).result_schema) == ("cumulative_logprob",)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    made = Folder(tmp_path)
    made.make("parts", "staging", "journal", "manifest")
    return made


def hurt_part(folder: Folder, dtype: str) -> Part:
    """A part whose row 1003 has a NaN and row 1005 a -inf, and row 1009 both."""
    spec = make_spec(logprobs=2, output={"logprobs_dtype": dtype})
    results = make_results(spec, range(SHARD.start, SHARD.stop), error_rate=0.0)
    for index, place, value in ((3, 0, math.nan), (5, 2, -math.inf), (9, 0, math.nan), (9, 1, -math.inf)):
        completion = results[index].completion
        assert completion is not None and completion.logprobs is not None
        completion.logprobs.logprobs[-1, place] = value
    shard = OpenLease(SHARD, task_of(spec), Journal(folder, "z", task_of(spec).result_schema))
    shard.add(shard.task.encode(results[:30]))
    shard.checkpoint()
    shard.add(shard.task.encode(results[30:]))
    return write(shard)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kept_and_counted_in_a_part(folder: Folder, dtype: str) -> None:
    part = hurt_part(folder, dtype)
    assert (part.num_nan_rows, part.num_inf_rows) == (2, 2)
    table = pq.read_table(folder.path(staged_file(part)))
    assert table.column("logprobs").null_count == 0
    assert math.isnan(table.column("logprobs")[3].as_py()[-1])
    assert table.column("top_logprobs")[5].as_py()[-1][1] == -math.inf
    metadata = pq.read_metadata(folder.path(staged_file(part))).metadata
    assert (metadata[b"batchinf.num_nan_rows"], metadata[b"batchinf.num_inf_rows"]) == (b"2", b"2")
    assert stated_part(folder, staged_file(part), SHARD, "f00d") == part


@pytest.mark.slow
def test_a_whole_job_says_so_at_its_end(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HURT)
    spec, out = jobs.spec_of(tmp_path, parallel={"data_parallel_size": 1}), tmp_path / "out"
    done = jobs.run("run", spec, PYTHONPATH=f"{tmp_path}:{jobs.ROOT}")
    assert done.returncode == 0, done.stderr
    rows, expected = jobs.rows_of(out), list(jobs.unhurt())
    nan = [row["row_index"] for row in rows if any(map(math.isnan, row["logprobs"]))]
    inf = [row["row_index"] for row in rows if -math.inf in leaves(row["top_logprobs"])]
    assert nan == [row["row_index"] for row in expected if row["row_index"] % 50 == 7]
    assert inf == [row["row_index"] for row in expected if row["row_index"] % 100 == 7]
    others = [index for index, row in enumerate(rows) if row["row_index"] % 50 != 7]
    assert [rows[index] for index in others] == [expected[index] for index in others]
    said = non_finite_lines(len(nan), len(inf), expects_inf=False)
    assert said[0].startswith(f"warning: {len(nan)} output rows have NaN") and len(said) == 2
    for text in (done.stdout, jobs.run("run", spec).stdout, jobs.run("status", out).stdout):
        assert all(line in text for line in said)


def test_nothing_is_said_where_all_is_finite() -> None:
    assert non_finite_lines(0, 0, expects_inf=True) == []


@pytest.mark.parametrize(
    ("sampling", "is_expected"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}, "logprobs": 2}, True),
        ({"logprobs_mode": "processed_logprobs", "logprobs": 2}, True),
        ({"logprobs": 2}, False),
    ],
)
def test_tokens_that_are_ruled_out_are_no_damage(sampling: dict[str, Any], *, is_expected: bool) -> None:
    spec = make_spec(**sampling).model_dump(mode="json")
    [line] = non_finite_lines(0, 35, expects_inf=rules_out_tokens(spec))
    assert line.endswith("so nothing is wrong") == is_expected
    assert line.startswith("35 output rows")

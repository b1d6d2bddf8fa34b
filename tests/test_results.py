"""A job's output as arrays: equal to what Parquet holds, for whole jobs and slices, done or not."""

import math
import pathlib
import random
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinf
import jobs
from batchinf.base.errors import OutputError, UserError
from batchinf.base.ragged import Ragged, common_lengths, join_ragged, reduce_runs, to_ragged
from batchinf.results import Results


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A job whose every eighth row is an error."""
    folder = tmp_path_factory.mktemp("job")
    prompts = ["", *[f"Say {number}." for number in range(1, 8)]] * 30
    path = folder / "rows.jsonl"
    path.write_text("".join(f'{{"id": {i}, "prompt": "{prompt}"}}\n' for i, prompt in enumerate(prompts)))
    sampling = {"logprobs": 3, "prompt_logprobs": 2}
    output = {"keep_columns": [], "rows_per_shard": 50, "logprobs_dtype": "float16"}
    sections = {"sampling": sampling, "output": output, "parallel": {"data_parallel_size": 1}}
    jobs.finish(jobs.spec_of(folder, input={"path": str(path)}, **sections, max_error_rate=1))
    return folder / "out"


def test_a_whole_job(out: pathlib.Path) -> None:
    results, rows = batchinf.open(out), jobs.table_of(out)
    assert (len(results), results.is_done) == (240, True)
    assert results.table().equals(rows)
    assert pa.Table.from_batches(results.batches(num_rows=7)).equals(rows)
    assert results.schema.names == rows.schema.names
    assert results.table("text").column_names == ["text"]
    assert results.array("row_index").tolist() == list(range(240))
    assert results.array("finish_reason").tolist() == rows["finish_reason"].to_pylist()
    assert np.isnan(results.array("num_output_tokens")).sum() == 30
    assert results.spec["sampling"]["logprobs"] == 3


def test_large_integers_beside_nulls_are_not_rounded(out: pathlib.Path) -> None:
    results, expected = batchinf.open(out), jobs.table_of(out)["prompt_hash"].to_pylist()
    assert expected.count(None) == 30
    assert results.array("prompt_hash").tolist() == expected
    assert [value for rows in results.arrays("prompt_hash") for value in rows["prompt_hash"]] == expected


def test_error_rows_have_no_vote_whatever_they_keep(tmp_path: pathlib.Path) -> None:
    structure = {"regex": "a+"}  # the scripted engine ignores it: an output fails if it reaches `max_tokens`
    sampling = {"n": 4, "temperature": 1.0, "max_tokens": 3, "structured_outputs": structure}
    jobs.finish(jobs.spec_of(tmp_path, sampling=sampling, input={"limit": 40}, max_error_rate=1))
    results = batchinf.open(tmp_path / "out")
    rows = results.table(["text", "error_type"])
    num_good = rows["error_type"].null_count
    assert rows["text"].null_count == 0
    assert 0 < num_good < len(rows) == 160
    assert sum(vote.num_votes for vote in results.majority(["yes"] * 160)) == num_good
    good = {text for text, error in zip(*(column.to_pylist() for column in rows.columns), strict=True) if error is None}
    assert {vote.answer for vote in results.majority("text")} <= {*good, None}
    assert results.majority(results.table(["text"])["text"]) == results.majority("text")
    with pytest.raises(OutputError, match="answers: got a list; must be texts, numbers or tuples"):
        results.majority("token_ids")
    assert results.pass_at_k([True] * 160).value == pytest.approx(num_good / 160)


@pytest.mark.parametrize("column", ["token_ids", "logprobs", "ranks"])
def test_lists(out: pathlib.Path, column: str) -> None:
    ragged, expected = batchinf.open(out).ragged(column), jobs.table_of(out)[column].to_pylist()
    assert [None if ragged.is_null[i] else ragged[i].tolist() for i in range(len(ragged))] == expected
    assert ragged.lengths.sum() == len(ragged.values)
    assert ragged[-1].tolist() == expected[-1]
    with pytest.raises(IndexError):
        ragged[240]


def test_lists_of_lists(out: pathlib.Path) -> None:
    results, table = batchinf.open(out), jobs.table_of(out)
    top = results.ragged("top_token_ids")
    assert top.values.shape[1] == 3
    assert top.values.dtype == np.int32
    for row, expected in enumerate(table["top_token_ids"].to_pylist()):
        assert top[row].tolist() == (expected or [])
    # A prompt's first token has no logprob.
    prompt = results.ragged("prompt_top_logprobs")
    assert prompt.values.dtype == np.float16
    for row, expected in enumerate(table["prompt_top_logprobs"].to_pylist()):
        if expected is not None:
            assert np.isnan(prompt[row][0]).all()
            assert prompt[row][1:].tolist() == expected[1:]
    assert results.ragged("prompt_top_token_ids")[1][0].tolist() == [-1, -1]
    assert results.ragged("prompt_logprobs")[1][1:].tolist() == table["prompt_logprobs"][1].as_py()[1:]


def test_sums_and_means(out: pathlib.Path) -> None:
    results = batchinf.open(out)
    logprobs = results.ragged("logprobs")
    sums = [sum(row or []) for row in jobs.table_of(out)["logprobs"].to_pylist()]
    assert np.allclose(logprobs.sum(), sums)
    assert np.isnan(logprobs.mean()).sum() == 30
    prompt = results.ragged("prompt_logprobs")
    first = [value for value in jobs.table_of(out)["prompt_logprobs"][1].as_py() if value is not None]
    assert np.isclose(prompt.mean()[1], sum(first) / len(first))


def test_a_dataset(out: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    dataset = batchinf.open(out).dataset()
    assert dataset["row_index"][:] == list(range(240))
    assert dataset[5]["token_ids"] == jobs.table_of(out)["token_ids"][5].as_py()


def test_slices_and_a_job_at_work(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, parallel={"data_parallel_size": 1})
    jobs.finish(spec, "--slice", "1/2")
    results = batchinf.open(tmp_path / "out")
    assert not results.is_done
    assert 0 < len(results) == results.table(["row_index"]).num_rows
    assert results.array("row_index").tolist() == sorted(results.array("row_index"))
    columns = ", ".join(results.schema.names)
    assert repr(results) == f"<Results of {tmp_path}/out: {len(results)} rows, 0 errors, not done; columns {columns}>"


def test_one_vector_a_row_is_a_matrix(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"id": {i}, "prompt": "{"" if i == 7 else f"Say {i}."}"}}\n' for i in range(20)))
    sections = {"input": {"path": str(path)}, "sampling": None, "output": {"keep_columns": [], "rows_per_shard": 6}}
    one = {"parallel": {"data_parallel_size": 1}, "max_error_rate": 1}
    jobs.finish(jobs.spec_of(tmp_path, task="logits", logits={"positions": "last"}, **sections, **one))
    results = batchinf.open(tmp_path / "out")
    logits = results.array("logits")
    assert (logits.dtype, len(logits)) == (np.float16, 20)
    assert np.flatnonzero(np.isnan(logits).all(axis=1)).tolist() == [7]
    lists = results.ragged("logits")
    assert np.array_equal(np.delete(logits, 7, axis=0), lists.values)
    assert logits[9].tolist() == lists[9][0].tolist()


def test_vectors_are_matrices_part_by_part_too(tmp_path: pathlib.Path) -> None:
    jobs.finish(jobs.spec_of(tmp_path, task="embed", sampling=None, output={"keep_columns": []}))
    results = batchinf.open(tmp_path / "out")
    whole = results.array("embedding")
    assert whole.ndim == 2 and whole.dtype == np.float32
    pieces = [rows["embedding"] for rows in results.arrays("embedding", num_rows=7)]
    assert np.array_equal(np.concatenate(pieces), whole, equal_nan=True)


def test_a_name_with_a_dot_beside_a_struct(tmp_path: pathlib.Path) -> None:
    rows = [{"prompt": f"Say {i}.", "a": {"b": "inside", "c": i}, "a.b": f"beside {i}"} for i in range(3)]
    path, kept = tmp_path / "rows.parquet", ["a", "a.b"]
    pq.write_table(pa.Table.from_pylist(rows), path)
    given = {"path": str(path), "id_column": None, "prompt_column": "prompt"}
    jobs.finish(jobs.spec_of(tmp_path, input=given, output={"keep_columns": kept}))
    results = batchinf.open(tmp_path / "out")
    assert results.table(kept).to_pylist() == [{name: row[name] for name in kept} for row in rows]
    assert results.table(["a.b"]).column_names == ["a.b"]
    assert results.array("a.b").tolist() == [row["a.b"] for row in rows]
    assert [batch.column_names for batch in results.batches(["a.b"])] == [["a.b"]]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda results: results.array("txt"), "has no column 'txt'; it has id, row_index"),
        (lambda results: results.array("logprobs"), "read it with ragged()"),
        (lambda results: list(results.batches(num_rows=0)), "num_rows: got 0; must be at least 1"),
        (lambda results: results.ragged("text"), "no lists: read it with array()"),
        (lambda results: results.array("top_logprobs"), "table(), or with ragged() if all its inner lists have one l"),
        (lambda results: results.tokens("text"), "has no token ids: give one whose name ends with token_ids"),
        (lambda results: results.tokens("txt"), "has no column 'txt'; it has id, row_index"),
    ],
)
def test_what_is_refused(out: pathlib.Path, ask: Any, message: str) -> None:
    with pytest.raises(OutputError) as error:
        ask(batchinf.open(out))
    assert message in str(error.value)


@pytest.mark.parametrize("choices", [["a", "more of it"], ["!!", "??"]])
def test_columns_that_are_no_array_are_read_as_the_errors_say(tmp_path: pathlib.Path, choices: list[str]) -> None:
    """The choices of the last rows have other lengths than those before, in the same part or in parts of their own."""
    chosen = [choices] * 30 + [["xxx", "yyy"]] * 30
    rows = pa.table({"q": ["Say"] * 60, "x": chosen, "about": [{"a": [1]}] * 60})
    pq.write_table(rows, tmp_path / "rows.parquet")
    given = {"path": str(tmp_path / "rows.parquet"), "id_column": None, "context_column": "q", "choices_column": "x"}
    output = {"keep_columns": ["about"], "rows_per_shard": 10}
    one = {"parallel": {"data_parallel_size": 1}}
    jobs.finish(jobs.spec_of(tmp_path, task="score", input=given, sampling=None, output=output, **one))
    results, table = batchinf.open(tmp_path / "out"), jobs.table_of(tmp_path / "out")
    for ask, column, advice in [
        (results.array, "choice_token_ids", "read it with table(), or with ragged() if all its inner lists have"),
        (results.ragged, "choice_token_ids", "items are no array: read them with table() or batches()"),
        (results.tokens, "choice_token_ids", "items are no array: read them with table() or batches()"),
        (results.array, "about", "read it with table()"),
        (results.ragged, "about", "no lists: read it with table()"),
    ]:
        with pytest.raises(OutputError) as error:
            ask(column)
        assert str(error.value).startswith(f"column '{column}'") and advice in str(error.value)
        assert results.table([column])[column].to_pylist() == table[column].to_pylist()
        assert sum(batch.num_rows for batch in results.batches([column])) == 60


def test_a_program_that_changes_its_folder(
    out: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(out.parent)
    results = batchinf.open(out.name)
    monkeypatch.chdir(tmp_path)
    assert results.table(["id", "text"]).equals(batchinf.open(out).table(["id", "text"]))


def test_no_job(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OutputError, match="holds no job"):
        Results(tmp_path)


def test_odd_lists() -> None:
    empty = to_ragged(pa.array([], pa.list_(pa.float32())))
    assert (len(empty), empty.sum().tolist()) == (0, [])
    nothing = to_ragged(pa.array([None, []], pa.list_(pa.list_(pa.int32()))))
    assert (nothing.values.shape, nothing.is_null.tolist()) == ((0, 0), [True, False])
    sliced = to_ragged(pa.array([[9], [1, 2], None, [3]], pa.list_(pa.int32())).slice(1))
    assert [sliced[i].tolist() for i in range(3)] == [[1, 2], [], [3]]
    assert Ragged(sliced.values, sliced.offsets, sliced.is_null).sum().tolist() == [3, 0, 3]
    infinite = to_ragged(pa.array([[-np.inf, -1.0, None], [np.inf], [2.0]], pa.list_(pa.float32())))
    assert infinite.sum().tolist() == infinite.mean().tolist() == [-np.inf, np.inf, 2]
    with pytest.raises(OutputError, match="lists of 1 to 2 items are no array"):
        to_ragged(pa.array([[[1], [2, 3]]], pa.list_(pa.list_(pa.int32()))))


@pytest.mark.parametrize(("item", "null"), [(pa.float16(), np.nan), (pa.int32(), -1)])
def test_parts_whose_items_are_all_null_get_the_width_of_the_others(item: pa.DataType, null: float) -> None:
    """The first token of a prompt has no top k: in a part of prompts with one token nothing has."""
    type = pa.list_(pa.list_(item))
    parts = [pa.array(lists, type) for lists in ([], [[None], None], [[None, [1, 2]]], [[]], [[None]])]
    found = join_ragged(parts)
    assert found.values.dtype == item.to_pandas_dtype()
    np.testing.assert_array_equal(found.values, [[null] * 2, [null] * 2, [1, 2], [null] * 2])
    assert found.lengths.tolist() == [1, 0, 2, 0, 1]
    assert found.is_null.tolist() == [False, True, False, False, False]
    assert join_ragged(parts[:2]).values.shape == (1, 0)
    for other in ([[[]]], [[[1, 2, 3]]]):
        with pytest.raises(OutputError, match="items are no array: read them with"):
            join_ragged([*parts, pa.array(other, type)])


def test_lists_side_by_side() -> None:
    chance = random.Random(1)
    lists = [[[chance.randrange(2) for _ in range(chance.randrange(6))] for _ in range(300)] for _ in range(2)]
    lists[0][7] = None  # type: ignore[call-overload]
    a, b = (to_ragged(pa.array(some, pa.list_(pa.int32()))) for some in lists)
    expected = [
        next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
        for one, other in ((one or [], other) for one, other in zip(*lists, strict=True))
    ]
    assert common_lengths(a, b).tolist() == expected
    heads = [other[:length] for other, length in zip(lists[1], expected, strict=True)]
    values = b.values[b.heads(np.array(expected))]
    assert values.tolist() == [value for head in heads for value in head]
    least = reduce_runs(np.minimum, values, np.array(expected), empty=9)
    assert least.tolist() == [min(head, default=9) for head in heads]


def test_parts_of_different_columns(out: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """No column of any part is left out, whichever part has it: one part has a column more, another one less."""
    shutil.copytree(out, tmp_path / "out")
    whole = jobs.table_of(out)
    paths = sorted((tmp_path / "out/parts").iterdir())
    more, less = pq.read_table(paths[2]), pq.read_table(paths[0])
    pq.write_table(more.append_column("extra", pa.array(range(more.num_rows), pa.int64())), paths[2])
    pq.write_table(less.drop_columns(["finish_reason"]), paths[0])
    num_before, num_more = less.num_rows + pq.read_metadata(paths[1]).num_rows, more.num_rows
    extra = [None] * num_before + [*range(num_more)] + [None] * (240 - num_before - num_more)
    reasons = [None] * less.num_rows + whole["finish_reason"].to_pylist()[less.num_rows :]
    results = batchinf.open(tmp_path / "out")
    dataset = results.dataset().with_format("arrow")[:]
    for read in (results.table(), pa.Table.from_batches(results.batches(num_rows=7)), dataset):
        assert read["extra"].to_pylist() == extra
        assert read["finish_reason"].to_pylist() == reasons
    assert results.table(["text", "extra"]).column_names == ["text", "extra"]
    pq.write_table(more.append_column("extra", pa.array(["x"] * num_more)), paths[3])
    with pytest.raises(OutputError, match=r"'extra' is int64 in .*part-000002.parquet and string in part-000003"):
        batchinf.open(tmp_path / "out").table()


@pytest.mark.parametrize("width", [None, 0, 2, 5])
@pytest.mark.parametrize("inner", [(), (3,)])
def test_padded_lists_are_those_of_a_loop(width: int | None, inner: tuple[int, ...]) -> None:
    lengths = np.array([2, 0, 3, 1])
    values = np.arange(6 * math.prod(inner), dtype=np.int32).reshape(6, *inner)
    ragged = Ragged(values, np.concatenate([[0], np.cumsum(lengths)]), lengths == 0)
    array, mask = ragged.padded(fill=-100, width=width)
    longest = 3 if width is None else width
    assert array.shape == (4, longest, *inner) and array.dtype == np.int32 and mask.shape == (4, longest)
    for row in range(4):
        for place in range(longest):
            has_value = place < lengths[row]
            assert mask[row, place] == has_value
            assert np.all(array[row, place] == (ragged[row][place] if has_value else -100))


def test_a_fill_that_would_become_another_value_is_refused() -> None:
    ragged = Ragged(np.zeros(1, np.int32), np.array([0, 1]), np.array([False]))
    for fill in (float("nan"), 0.5, "x"):
        with pytest.raises(UserError, match=r"fill: got .*, which values of type int32 cannot have"):
            ragged.padded(fill=fill)
    texts = Ragged(np.array(["a"], dtype=object), np.array([0, 1]), np.array([False]))
    assert texts.padded(fill="", width=2)[0].tolist() == [["a", ""]]

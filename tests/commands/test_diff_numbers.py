"""What changed between two jobs' scores, logits and vectors: random outputs, held against loops over their rows."""

import dataclasses
import itertools
import math
import pathlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from headers import header_of

from batchinf.base.errors import OutputError, UserError
from batchinf.commands import diff
from batchinf.commands.diff import diff_jobs
from batchinf.manifest.commit_log import encode_commits
from batchinf.manifest.lines import part_line
from batchinf.manifest.names import part_name
from batchinf.records import Part

NUM_ROWS = 40


def job(
    folder: pathlib.Path,
    table: pa.Table,
    task: str,
    spec: dict[str, Any] | None = None,
    cuts: Sequence[int] = (17, 23),
    taken: str = "rows",
    **parquet: Any,
) -> str:
    """A finished job with these output rows, in a part for each piece; its output folder. parquet: how to write it."""
    (folder / "parts").mkdir(parents=True)
    (folder / "manifest").mkdir()
    resolved = {"task": task, "input": {"path": "rows.jsonl"}, **(spec or {})}
    lines: list[dict[str, Any]] = [
        {"kind": "header", **dataclasses.asdict(header_of(identity={"task": task}, spec=resolved))},
        {"kind": "extent", "start": 0, "num_rows": 600, "rows_per_shard": 60, "first_shard": 0,
         "first_row": 0, "stop_row": 600, "source_fingerprint": taken},
    ]  # fmt: skip
    bounds = [0, *cuts, table.num_rows]
    for shard, (start, stop) in enumerate(itertools.pairwise(bounds)):
        piece = table.slice(start, stop - start)
        pq.write_table(piece, folder / "parts" / part_name(shard), **{"row_group_size": 7, **parquet})
        part = Part(shard=shard, num_rows=piece.num_rows, num_bytes=1, digest="00")
        lines.append(part_line(part))
    lines.append({"kind": "done", "name": "done", "at": "2026-01-01T00:00:00+00:00"})
    (folder / "manifest" / "000001.jsonl").write_bytes(encode_commits([lines]))
    return str(folder)


def said(a: str, b: str, **options: Any) -> list[str]:
    wanted = {"on": None, "to": None, "num_examples": 0, **options}
    return list(diff_jobs(a, b, **wanted).lines())


def compared(a: str, b: str, tmp_path: pathlib.Path, **options: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """What is said, and the rows of the Parquet file."""
    to = tmp_path / "diff.parquet"
    lines = said(a, b, to=str(to), **options)
    return lines, pq.read_table(to).to_pylist()


def keys(num_rows: int = NUM_ROWS, other_prompts: Sequence[int] = ()) -> dict[str, pa.Array]:
    hashes = [row + 1000 * (row in other_prompts) for row in range(num_rows)]
    return {
        "id": pa.array([f"row-{row}" for row in range(num_rows)]),
        "row_index": pa.array(range(num_rows), pa.int64()),
        "prompt_hash": pa.array(hashes, pa.int64()),
    }


def errors(values: Sequence[Any]) -> pa.Array:
    return pa.array([None if value is not None else "refused" for value in values], pa.string())


def finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def deltas_said(values: Sequence[float]) -> str:
    """What is said of differences, in plain Python."""
    known = finite(values)
    mean, mean_abs = sum(known) / len(known), sum(map(abs, known)) / len(known)
    others = f"; {len(values) - len(known)} more are not finite" if len(values) > len(known) else ""
    return f"B - A is {mean:+.2e} on average, |B - A| {mean_abs:.2e}, at most {max(map(abs, known)):.2e}{others}"


# -- scores ------------------------------------------------------------------------------------------------------------


def score_table(seed: int, **options: Any) -> pa.Table:
    """Rows 3 and 30 failed in job 1; row 5 has an infinite sum in both, row 6 in job 1 alone, row 7 NaN."""
    chance = random.Random(seed)
    ids = [[chance.randrange(50) for _ in range(3 + row % 4)] for row in range(NUM_ROWS)]
    if seed == 1:
        shared = random.Random(0)
        ids = [[shared.randrange(50) for _ in range(3 + row % 4)] for row in range(NUM_ROWS)]
        ids[9] = [*ids[9], 1]
    logprobs: list[Any] = [[-chance.random() for _ in row] for row in ids]
    sums: list[float | None] = [sum(row) for row in logprobs]
    sums[5] = -math.inf
    if seed == 1:
        sums[3] = sums[30] = logprobs[3] = logprobs[30] = None
        sums[6], sums[7] = -math.inf, math.nan
    is_null = [value is None for value in sums]
    columns = {
        **keys(**options),
        "logprob_sum": pa.array(sums, pa.float64()),
        "logprob_mean": pa.array([None if s is None else s / len(i) for s, i in zip(sums, ids, strict=True)]),
        "num_tokens": pa.array([None if none else len(i) for none, i in zip(is_null, ids, strict=True)], pa.int32()),
        "is_greedy": pa.array([None if none else chance.random() < 0.5 for none in is_null]),
        "token_ids": pa.array([None if none else i for none, i in zip(is_null, ids, strict=True)],
                              pa.list_(pa.int32())),
        "logprobs": pa.array(logprobs, pa.list_(pa.float16())),
        "error_type": errors(sums),
    }  # fmt: skip
    return pa.table(columns)


def test_scores(tmp_path: pathlib.Path) -> None:
    tables = score_table(0), score_table(1, other_prompts=[9])
    a, b = (job(tmp_path / name, table, "score") for name, table in zip("ab", tables, strict=True))
    lines, found = compared(a, b, tmp_path, num_examples=1)
    rows = list(zip(*(table.to_pylist() for table in tables), strict=True))
    expected: dict[str, list[float]] = {"logprob_sum": [], "logprob_mean": [], "tokens": []}
    for number, ((own, other), row) in enumerate(zip(rows, found, strict=True)):
        assert row["key"] == number
        assert row["is_same_prompt"] == (number != 9)
        assert row["is_changed"] == (own["is_greedy"] != other["is_greedy"])
        for name in ("logprob_sum", "logprob_mean"):
            if other[name] is None:
                assert row[f"{name}_delta"] is None
                continue
            delta = 0.0 if own[name] == other[name] else other[name] - own[name]
            expected[name].append(delta)
            assert row[f"{name}_delta"] == delta or (math.isnan(delta) and math.isnan(row[f"{name}_delta"]))
        pairs = zip(own["token_ids"] or [], other["token_ids"] or [], strict=False)
        num_same = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        both = zip((own["logprobs"] or [])[:num_same], (other["logprobs"] or [])[:num_same], strict=True)
        if tokens := [float(y) - float(x) for x, y in both]:
            expected["tokens"] += tokens
            assert row["logprobs_max_abs_delta"] == max(map(abs, tokens))
        else:
            assert row["logprobs_max_abs_delta"] is None
        assert (row["logprob_sum_a"], row["error_type_b"]) == (own["logprob_sum"], other["error_type"])
    assert len(expected["tokens"]) > 100
    num_changed = sum(own["is_greedy"] != other["is_greedy"] for own, other in rows)
    assert "prompts: 1 rows have other token ids: a changed template, tokenizer or input" in lines
    assert "errors: 2 rows only in B, 0 only in A" in lines
    assert f"outputs: {num_changed} of 40 changed ({num_changed / 40:.2%}), by is_greedy" in lines
    assert f"is_greedy: {num_changed} rows differ" in lines
    assert "num_tokens: 3 rows differ" in lines
    sums = deltas_said(expected["logprob_sum"])
    assert any(line.startswith("logprob_sum: ") and line.endswith(f" of 36 numbers, {sums}") for line in lines)
    assert "; 2 more are not finite" in next(line for line in lines if line.startswith("logprob_mean: "))
    tokens = f" of {len(expected['tokens'])} numbers, {deltas_said(expected['tokens'])}"
    assert any(line.startswith("logprobs: ") and line.endswith(tokens) for line in lines)
    first = next(row for row in found if row["is_changed"])
    assert f"  row_index {first['key']}:" in lines
    other = "nothing" if first["is_greedy_b"] is None else first["is_greedy_b"]
    assert f"    is_greedy {first['is_greedy_a']} -> {other}" in lines


def test_columns_that_differ_in_case_alone(tmp_path: pathlib.Path) -> None:
    """DuckDB ignores case. It also takes `*` and `[1]` in a path for a pattern."""
    tables = [score_table(0), score_table(1)]
    names = ["Row_Index", "IS_GREEDY", "Key", "is_greedy_A"]
    others = [
        pa.table([pa.array([7] * NUM_ROWS)] * 4 + table.columns, [*names, *table.schema.names]) for table in tables
    ]
    plain = [job(tmp_path / name, table, "score") for name, table in zip("ab", tables, strict=True)]
    odd = [job(tmp_path / name, table, "score") for name, table in zip(("a[1]", "b*"), others, strict=True)]
    for on in ("row_index", "id"):
        own, same = (said(*pair, on=on, num_examples=2) for pair in (odd, plain))
        assert [own[0], *own[3:]] == [same[0], *same[3:]]


def choice_table(seed: int, has_answer: bool = True) -> pa.Table:
    """Row 4 failed in job 1, row 8 has no answer, row 9 fewer choices in job 1."""
    chance = random.Random(seed)
    sums: list[Any] = [[-chance.random() * 9 for _ in range(4 - (row == 9 and seed == 1))] for row in range(NUM_ROWS)]
    if seed == 1:
        sums[4] = None
    best = [None if row is None else row.index(max(row)) for row in sums]
    columns = {
        **keys(),
        "best": pa.array(best, pa.int32()),
        "best_per_token": pa.array([None if b is None else chance.randrange(4) for b in best], pa.int32()),
        "best_per_byte": pa.array([None if b is None else chance.randrange(4) for b in best], pa.int32()),
        "choice_logprob_sums": pa.array(sums, pa.list_(pa.float64())),
        "answer": pa.array([None if row == 8 else row % 4 for row in range(NUM_ROWS)], pa.int32()),
        "error_type": errors(sums),
    }
    return pa.table({name: column for name, column in columns.items() if has_answer or name != "answer"})


def test_choices(tmp_path: pathlib.Path) -> None:
    tables = choice_table(0), choice_table(1)
    a, b = (job(tmp_path / name, table, "score") for name, table in zip("ab", tables, strict=True))
    lines, found = compared(a, b, tmp_path, num_examples=1)
    own, other = (table.to_pylist() for table in tables)
    deltas = []
    for x, y, row in zip(own, other, found, strict=True):
        assert row["is_changed"] == any(x[name] != y[name] for name in x if name.startswith("best"))
        sums = x["choice_logprob_sums"], y["choice_logprob_sums"]
        if sums[1] is None:
            assert row["choice_logprob_sums_max_abs_delta"] is None
            continue
        each = [after - before for before, after in zip(*sums, strict=False)]
        deltas += each
        assert row["choice_logprob_sums_max_abs_delta"] == max(map(abs, each))
        assert (row["answer_a"], row["best_b"]) == (x["answer"], y["best"])
    assert len(deltas) == 4 * 38 + 3
    num_best = sum(x["best"] != y["best"] for x, y in zip(own, other, strict=True))
    assert f"best: {num_best} rows differ" in lines
    assert f"choice_logprob_sums: 40 rows differ; of 155 numbers, {deltas_said(deltas)}" in lines
    first = next(row for row in found if row["is_changed"])
    assert f"  row_index {first['key']}:" in lines


def test_choices_without_answers(tmp_path: pathlib.Path) -> None:
    a = job(tmp_path / "a", choice_table(0), "score")
    b = job(tmp_path / "b", choice_table(1, has_answer=False), "score")
    lines = said(a, b, num_examples=2)
    assert not any(line.startswith("answer") for line in lines)
    assert "outputs: 0 of 40 changed (0.00%), by best, best_per_token, best_per_byte" in said(a, a)


# -- logits and vectors ------------------------------------------------------------------------------------------------


def lists_of(rows: Sequence[Any], dtype: Any, width: int) -> pa.Array:
    """list<fixed_size_list<dtype>[width]> of arrays [num_positions, width], or None."""
    type = pa.list_(pa.list_(pa.from_numpy_dtype(dtype), width))
    flat = np.concatenate([np.zeros((0, width), dtype), *(row for row in rows if row is not None)]).astype(dtype)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), width)
    offsets = np.cumsum([0, *(0 if row is None else len(row) for row in rows)])
    mask = pa.array([row is None for row in rows])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), vectors, mask=mask).cast(type)


def logits_rows(seed: int, width: int = 11) -> list[Any]:
    """[1 + row % 5, width]; the second job's are the first's and a little more, here and there much more."""
    rng = np.random.default_rng(0)
    rows: list[Any] = [rng.standard_normal((1 + row % 5, width)).astype(np.float16) for row in range(NUM_ROWS)]
    if seed:
        other = np.random.default_rng(seed)
        rows = [row + (0.01 * other.standard_normal(row.shape)).astype(np.float16) for row in rows]
        rows[12][0, 3] = 50
        rows[13][0, 3] = np.inf
        rows[14] = None
        rows[17] = rows[17][:1]
    return rows


def logits_table(rows: Sequence[Any], generated: Sequence[Sequence[int]] | None = None) -> pa.Table:
    positions = [None if row is None else list(range(len(row))) for row in rows]
    columns = {
        **keys(),
        "positions": pa.array(positions, pa.list_(pa.int32())),
        "logits": lists_of(rows, np.float16, 11),
        "error_type": errors(rows),
    }
    if generated is not None:
        columns["token_ids"] = pa.array(generated, pa.list_(pa.int32()))
    return pa.table(columns)


def expected_logits(a: Any, b: Any, num: int) -> tuple[list[float], int]:
    """The differences of one row, and the vectors with the same largest number, in plain Python."""
    deltas = [float(y) - float(x) for one, other in zip(a[:num], b[:num], strict=True)
              for x, y in zip(one, other, strict=True)]  # fmt: skip
    same = sum(int(one.argmax() == other.argmax()) for one, other in zip(a[:num], b[:num], strict=True))
    return deltas, same


@pytest.mark.parametrize("order", ["same", "other order, by id", "rows alone"])
@pytest.mark.parametrize("wide_bytes", [1, 400, 32 << 20])
def test_logits(order: str, wide_bytes: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the second job's rows and the number of rows at once."""
    monkeypatch.setattr(diff, "_WIDE_BYTES", wide_bytes)
    rows = logits_rows(0), logits_rows(1)
    tables = [logits_table(found) for found in rows]
    shuffled = list(range(NUM_ROWS))
    if order == "other order, by id":
        random.Random(3).shuffle(shuffled)
    elif order == "rows alone":
        shuffled = [row for row in shuffled if row not in (0, 18, 19, 39)]
    moved = tables[1].take(shuffled)
    if order != "same":
        moved = moved.set_column(1, "row_index", pa.array(range(len(shuffled)), pa.int64()))
    a, b = job(tmp_path / "a", tables[0], "logits"), job(tmp_path / "b", moved, "logits", cuts=(5, 8, 31), taken=order)
    lines, found = compared(a, b, tmp_path, on="row_index" if order == "same" else None, num_examples=1)
    kept = sorted(shuffled)
    assert [row["key"] for row in found] == ([*kept] if order == "same" else [f"row-{row}" for row in kept])
    deltas, num_same, num_vectors, num_changed = [], 0, 0, 0
    for number, row in zip(kept, found, strict=True):
        own, other = rows[0][number], rows[1][number]
        if other is None:
            assert row["logits_max_abs_delta"] is row["logits_min_cosine"] is None and row["is_changed"]
            num_changed += 1
            continue
        num = min(len(own), len(other))
        of_row, num_equal = expected_logits(own, other, num)
        deltas += of_row
        assert row["logits_num_compared"] == num
        assert row["logits_max_abs_delta"] == max(map(abs, finite(of_row)))
        assert row["is_changed"] == (num_equal < num)
        num_same += num_equal
        num_vectors += num
        num_changed += row["is_changed"]
    assert 0 < num_changed < 10
    assert f"outputs: {num_changed} of {len(kept)} changed ({num_changed / len(kept):.2%}), by logits" in lines
    expected = f"logits: {num_changed} rows differ; of {len(deltas) - 1:,} numbers, {deltas_said(deltas)}"
    share = f"the largest is the same in {num_same} of {num_vectors} ({num_same / num_vectors:.2%})"
    assert f"{expected}; {share}" in lines and "; 1 more are not finite" in expected
    assert f" {'12' if order == 'same' else 'row-12'}:" in lines[-4]


def test_logits_where_tokens_were_drawn(tmp_path: pathlib.Path) -> None:
    """As far as both drew the same tokens, and the vector that the first other one was drawn from."""
    rows = logits_rows(0), logits_rows(0)
    drawn = [[[number] * len(row) for number, row in enumerate(rows[0])] for _ in range(2)]
    drawn[1][9] = [9, 9, 1, 9, 9]
    for row in rows[1]:
        row[3:] += 1
    a, b = (job(tmp_path / n, logits_table(r, d), "logits") for n, r, d in zip("ab", rows, drawn, strict=True))
    _, found = compared(a, b, tmp_path)
    assert [row["logits_num_compared"] for row in found] == [3 if n == 9 else 1 + n % 5 for n in range(NUM_ROWS)]
    assert found[9]["logits_max_abs_delta"] == 0.0
    assert abs(found[4]["logits_max_abs_delta"] - 1) < 0.01


def test_logits_of_rows_own_tokens(tmp_path: pathlib.Path) -> None:
    rows = [row[:2] for row in logits_rows(0)]
    num_vectors = sum(map(len, rows))
    ids = [[[number, 7] + [3] * 9] * len(row) for number, row in enumerate(rows)]
    section = {"logits": {"token_ids_column": "ids", "num_token_ids": 11}}
    kind = pa.list_(pa.list_(pa.int32(), 11))
    table = logits_table(rows).append_column("value_token_ids", pa.array(ids, kind))
    a, b = (job(tmp_path / name, table, "logits", section) for name in "ab")
    to = tmp_path / "same.parquet"
    assert said(a, b, to=str(to))[0] == f"outputs: 0 of {NUM_ROWS} changed (0.00%), by logits"
    assert sum(pq.read_table(to)["logits_num_compared"].to_pylist()) == num_vectors
    ids[3] = [[3, 8] + [3] * 9] * len(rows[3])
    other = job(
        tmp_path / "c", logits_table(rows).append_column("value_token_ids", pa.array(ids, kind)), "logits", section
    )
    with pytest.raises(OutputError, match=r"^value_token_ids of the two jobs differ: compare jobs with the same ids$"):
        said(a, other)


def vectors_of(rows: Sequence[Any], dtype: Any, width: int) -> pa.Array:
    flat = np.concatenate([np.zeros(width) if row is None else row for row in rows]).astype(dtype)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), width, mask=pa.array([row is None for row in rows]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_embeddings(dtype: Any, tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    own: list[Any] = [rng.standard_normal(6).astype(dtype) for _ in range(NUM_ROWS)]
    other: list[Any] = [row + (0.1 * (number == 7)) * rng.standard_normal(6).astype(dtype) for number, row in
                        enumerate(own)]  # fmt: skip
    other[7] = other[7].astype(dtype)
    other[3], own[4] = None, None
    made = [pa.table({**keys(), "embedding": vectors_of(found, dtype, 6), "error_type": errors(found)})
            for found in (own, other)]  # fmt: skip
    a, b = (job(tmp_path / name, table, "embed") for name, table in zip("ab", made, strict=True))
    lines, found = compared(a, b, tmp_path, num_examples=3)
    assert [row["key"] for row in found if row["is_changed"]] == [3, 4, 7]
    x, y = own[7].astype(float), other[7].astype(float)
    cosine = float(x @ y / np.sqrt((x @ x) * (y @ y)))
    assert math.isclose(found[7]["embedding_min_cosine"], cosine) and cosine < 0.9999
    assert found[7]["embedding_max_abs_delta"] == np.abs(y - x).max()
    assert found[3]["embedding_min_cosine"] is found[4]["embedding_max_abs_delta"] is None
    assert "outputs: 3 of 40 changed (7.50%), by embedding" in lines
    assert "errors: 1 rows only in B, 1 only in A" in lines
    said_of_cosines = f"; cosine {(37 + cosine) / 38:.8f} on average, at least {cosine:.8f}"
    assert any(line.startswith("embedding: 3 rows differ; ") and line.endswith(said_of_cosines) for line in lines)
    # The row with numbers that are apart comes first.
    assert next(line for line in lines if line.startswith("  row_index")) == "  row_index 7:"


def test_hidden_states_of_layers(tmp_path: pathlib.Path) -> None:
    """Each layer has columns of its own; positions are compared as far as they are the same."""
    made = []
    for seed in (0, 1):
        rows = [np.full((3, 4), number + 1.0) for number in range(NUM_ROWS)]
        later = [row + 0.25 * seed for row in rows]
        places: list[list[int]] = [[0, 1, 2]] * NUM_ROWS
        if seed:
            places = [*places[:5], [0, 1, 7], *places[6:]]
        layers = {"hidden_states_2": lists_of(rows, np.float32, 4), "hidden_states_4": lists_of(later, np.float32, 4)}
        positions = pa.array(places, pa.list_(pa.int32()))
        made.append(pa.table({**keys(), "positions": positions, **layers, "error_type": errors(rows)}))
    a, b = (job(tmp_path / name, table, "hidden_states") for name, table in zip("ab", made, strict=True))
    lines, found = compared(a, b, tmp_path)
    assert {row["hidden_states_2_max_abs_delta"] for row in found} == {0.0}
    assert {row["hidden_states_4_max_abs_delta"] for row in found} == {0.25}
    assert [row["hidden_states_4_num_compared"] for row in found] == [2 if n == 5 else 3 for n in range(40)]
    line = next(line for line in lines if line.startswith("hidden_states_4: 40 rows differ; of 476 numbers"))
    assert " numbers, without 4 after the first other token or position, B - A is " in line
    assert deltas_said([0.25]) in line
    assert "outputs: 40 of 40 changed (100.00%), by hidden_states_2, hidden_states_4" in lines


def class_table(labels: Sequence[str | None], width: int = 3) -> pa.Table:
    vectors = [None if label is None else np.full(width, 0.5) for label in labels]
    columns = {"label": pa.array(labels), "probabilities": vectors_of(vectors, np.float32, width)}
    return pa.table({**keys(), **columns, "error_type": errors(labels)})


def test_classes(tmp_path: pathlib.Path) -> None:
    own: list[str | None] = ["good", "bad"] * 20
    other = ["bad", None, *own[2:]]
    names = {"pooling": {"labels": ["good", "bad", "so"]}}
    a, b = (job(tmp_path / n, class_table(t), "classify", names) for n, t in zip("ab", (own, other), strict=True))
    lines, found = compared(a, b, tmp_path, num_examples=1)
    assert [row["key"] for row in found if row["is_changed"]] == [0, 1]
    assert lines[0] == "outputs: 2 of 40 changed (5.00%), by label"
    assert {"label: 2 rows differ", "  row_index 0:", "    label good -> bad"} <= {*lines}
    assert any(line.startswith("probabilities: 1 rows differ; ") for line in lines)
    # Of other classes the labels can be compared, and their numbers cannot.
    names = {"pooling": {"labels": ["bad", "good", "so"]}}
    other_order = job(tmp_path / "c", class_table(other), "classify", names)
    lines = said(a, other_order)
    assert "label: 2 rows differ" in lines and not any("probabilities" in line for line in lines)


def test_rewards(tmp_path: pathlib.Path) -> None:
    own: list[float | None] = [float(number) for number in range(NUM_ROWS)]
    other = [*own[:20], 21.5, None, math.nan, *own[23:]]
    made = [pa.table({**keys(), "reward": pa.array(found, pa.float32()), "error_type": errors(found)})
            for found in (own, other)]  # fmt: skip
    a, b = (job(tmp_path / name, table, "reward") for name, table in zip("ab", made, strict=True))
    lines, found = compared(a, b, tmp_path, num_examples=5)
    assert [row["key"] for row in found if row["is_changed"]] == [20, 21, 22]
    assert found[20]["reward_delta"] == 1.5 and found[21]["reward_delta"] is None
    assert f"reward: 3 rows differ; of 38 numbers, {deltas_said([0.0] * 37 + [1.5, math.nan])}" in lines
    assert next(line for line in lines if "row_index " in line) == "  row_index 20:"
    assert "    reward 20 -> 21.5" in lines
    both = [pa.table({**keys(), "reward": pa.array([math.nan] * NUM_ROWS), "error_type": errors([0] * NUM_ROWS)})] * 2
    nan = [job(tmp_path / f"nan-{name}", table, "reward") for name, table in zip("ab", both, strict=True)]
    assert said(*nan)[0] == "outputs: 0 of 40 changed (0.00%), by reward"


# -- what cannot be compared -------------------------------------------------------------------------------------------


def test_what_cannot_be_compared(tmp_path: pathlib.Path) -> None:
    vectors = [np.zeros(4)] * NUM_ROWS
    wide = [np.zeros(5)] * NUM_ROWS
    made: dict[str, tuple[pa.Table, str, dict[str, Any]]] = {
        "scores": (score_table(0), "score", {}),
        "choices": (choice_table(0), "score", {}),
        "logits": (logits_table(logits_rows(0)), "logits", {"logits": {"token_ids": [5, 6]}}),
        "others": (logits_table(logits_rows(0)), "logits", {"logits": {"token_ids": [6, 5]}}),
        "embed": (pa.table({**keys(), "embedding": vectors_of(vectors, np.float32, 4)}), "embed", {}),
        "wider": (pa.table({**keys(), "embedding": vectors_of(wide, np.float32, 5)}), "embed", {}),
    }
    for name, (table, task, spec) in made.items():
        job(tmp_path / name, table, task, spec)
    for a, b, error in (
        ("scores", "embed", "scores has task score, but .*embed has task embed: compare jobs of the same task"),
        ("scores", "choices", r"means the same in both jobs: .*scores has is_greedy \(bool\), and .*choices has best "),
        ("logits", "others", "no column that decides whether a row has changed means the same in both jobs: "),
        ("embed", "wider", r"embed has embedding \(fixed_size_list<.*>\[4\]\), and .*wider has embedding \(.*\[5\]\)$"),
    ):
        with pytest.raises(OutputError, match=error) as raised:
            said(str(tmp_path / a), str(tmp_path / b))
        assert raised.value.exit_code == 2 and "\n" not in str(raised.value)


def test_ids_that_cannot_be_joined(tmp_path: pathlib.Path) -> None:
    table = score_table(0)
    numbers, small = (table.set_column(0, "id", pa.array(range(NUM_ROWS), type)) for type in (pa.int64(), pa.uint8()))
    repeated = table.set_column(0, "id", pa.array([None, None, "x", "y", "x"] + ["z"] * (NUM_ROWS - 5)))
    made = {"a": table, "numbers": numbers, "small": small, "repeated": repeated}
    folders = {name: job(tmp_path / name, found, "score") for name, found in made.items()}
    for pair in (("a", "repeated"), ("repeated", "a")):
        with pytest.raises(UserError, match="repeated has 2 rows of the id 'x', so rows cannot be joined by id"):
            said(*(folders[name] for name in pair), on="id")
    with pytest.raises(UserError, match=r"the ids of .*/a are string, and those of .*/numbers int64"):
        said(folders["a"], folders["numbers"], on="id")
    assert "rows: 40 in both, by id" in said(folders["numbers"], folders["small"], on="id")


def test_no_row_in_both(tmp_path: pathlib.Path) -> None:
    table = score_table(0)
    others = table.set_column(0, "id", pa.array([f"other-{row}" for row in range(NUM_ROWS)]))
    a, b = job(tmp_path / "a", table, "score"), job(tmp_path / "b", others, "score")
    with pytest.raises(UserError) as raised:
        said(a, b, on="id", to=str(tmp_path / "x.parquet"))
    assert str(raised.value) == (
        f"no id is in both jobs: {a} has 40 rows, such as 'row-0', and {b} has 40 rows, such as 'other-0'; if both "
        "have the same rows in the same order, use --on row_index"
    )
    assert not (tmp_path / "x.parquet").exists()

"""Figures of output rows, against NumPy over the same rows."""

import pathlib
from collections.abc import Sequence

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinf.report import rows as report_rows
from batchinf.report.rows import RowFigures, Share, _nice_bins, _Rows

NUM_ROWS = 2000
random = np.random.default_rng(0)
LENGTHS = random.integers(0, 300, NUM_ROWS)
LOGPROBS = [np.log(random.dirichlet(np.ones(8), size=n % 5)).astype(np.float32) for n in range(NUM_ROWS)]


def parts_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Two parts with all that a job may have, hostile texts too."""
    errors = [
        "got 7,001 tokens" if i % 20 == 1 else "<script>x</script>" if i % 20 == 2 else None for i in range(NUM_ROWS)
    ]
    table = pa.table(
        {
            "id": [f"\u202ename {i}\x1b[31m" for i in range(NUM_ROWS)],
            "row_index": pa.array(range(NUM_ROWS)),
            "text": pa.array([None if error else ("yes", "no", "no")[i % 3] for i, error in enumerate(errors)]),
            "own": pa.array(random.random(NUM_ROWS)),
            "reward": pa.array(np.where(np.arange(NUM_ROWS) % 100 == 0, np.nan, random.normal(size=NUM_ROWS))),
            "logprobs": pa.array([[float(row[0]) for row in rows] for rows in LOGPROBS], pa.list_(pa.float32())),
            "top_logprobs": pa.array(
                [[row[:4].tolist() for row in r] for r in LOGPROBS], pa.list_(pa.list_(pa.float32()))
            ),
            "num_prompt_tokens": pa.array(LENGTHS, pa.int32()),
            "num_output_tokens": pa.array([len(rows) for rows in LOGPROBS], pa.int32()),
            "finish_reason": pa.array(["stop" if i % 4 else "length" for i in range(NUM_ROWS)]),
            "error_type": pa.array([error and "refused" for error in errors]),
            "error_message": pa.array(
                [error and error.replace("7,001", str(7000 + i)) for i, error in enumerate(errors)]
            ),
        }
    )
    paths = [folder / "part-000000.parquet", folder / "it's part-000001.parquet"]
    pq.write_table(table.slice(0, 700), paths[0])
    pq.write_table(table.slice(700), paths[1])
    return paths


def figures_of(paths: list[pathlib.Path]) -> RowFigures:
    with duckdb.connect(":memory:") as connection:
        return _Rows(connection, paths, input_columns=("id", "own")).figures()


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> RowFigures:
    return figures_of(parts_in(tmp_path_factory.mktemp("parts")))


def test_every_row_is_in_a_bin(figures: RowFigures) -> None:
    assert figures.num_rows == NUM_ROWS
    prompts, outputs = figures.lengths
    for histogram, values in ((prompts, LENGTHS), (outputs, np.array([len(rows) for rows in LOGPROBS]))):
        assert sum(one.num for one in histogram.bins) + histogram.num_below + histogram.num_above == NUM_ROWS
        for one in histogram.bins:
            assert one.num == np.count_nonzero((values >= one.start) & (values < one.stop))
    assert dict(prompts.quantiles)["least"] == LENGTHS.min()
    assert dict(prompts.quantiles)["median"] == pytest.approx(np.median(LENGTHS), abs=5)


def test_numbers_of_the_model_and_not_of_the_input(figures: RowFigures) -> None:
    [reward] = figures.numbers
    assert (reward.title, reward.num_not_finite) == ("reward", NUM_ROWS // 100)


def test_logprobs_and_entropies(figures: RowFigures) -> None:
    logprobs, entropies = figures.tokens
    flat = np.concatenate([rows[:, 0] for rows in LOGPROBS])
    assert logprobs.num_values == entropies.num_values == len(flat)
    for one in logprobs.bins:
        assert one.num == np.count_nonzero((flat >= one.start) & (flat < one.stop))
    assert dict(logprobs.quantiles)["median"] == pytest.approx(np.median(flat), abs=0.05)
    p = np.exp(np.concatenate([rows[:, :4] for rows in LOGPROBS]).astype(float))
    rest = 1 - p.sum(1)
    expected = -(p * np.log(p)).sum(1) - rest * np.log(rest)
    middle = entropies.bins[len(entropies.bins) // 2]
    inside = np.count_nonzero((expected >= middle.start) & (expected < middle.stop))
    assert middle.num == pytest.approx(inside, abs=2)


def test_tokens_without_alternatives_have_no_entropy(tmp_path: pathlib.Path) -> None:
    columns = {
        "row_index": pa.array([0, 1]),
        "error_type": pa.nulls(2, pa.string()),
        "choice_logprobs": pa.array([[[-1.0], [-2.0, float("-inf")]], None], pa.list_(pa.list_(pa.float32()))),
        "top_logprobs": pa.array([[None, [], [-0.5, -1.0]], None], pa.list_(pa.list_(pa.float32()))),
    }
    pq.write_table(pa.table(columns), tmp_path / "part-000000.parquet")
    logprobs, entropies = figures_of([tmp_path / "part-000000.parquet"]).tokens
    assert (logprobs.num_values, logprobs.num_not_finite) == (3, 1)
    p = np.exp([-0.5, -1.0])
    rest = 1 - p.sum()
    assert dict(entropies.quantiles)["most"] == pytest.approx(-(p * np.log(p)).sum() - rest * np.log(rest))
    assert entropies.num_values == 1


def test_the_last_bin_of_logprobs_ends_at_zero(tmp_path: pathlib.Path) -> None:
    logprobs = [0.0] * 60 + [-1.0, -2.0, -3.9, -4.0]
    columns = {"row_index": [0], "error_type": pa.nulls(1, pa.string()), "logprobs": [logprobs]}
    pq.write_table(pa.table(columns), tmp_path / "part-000000.parquet")
    [found] = figures_of([tmp_path / "part-000000.parquet"]).tokens
    assert (found.bins[0].start, found.bins[-1].stop, found.bins[-1].num) == (-4.0, 0.0, 60)
    assert sum(one.num for one in found.bins) == found.num_values == 64


def test_labels_reasons_and_errors(figures: RowFigures) -> None:
    assert (figures.labels_of, {share.name for share in figures.labels}) == ("text", {"yes", "no"})
    assert figures.finish_reasons == (Share("stop", 1500), Share("length", 500))
    first, second = figures.errors
    assert (first.num_rows, first.first_row, first.first_message) == (100, 1, "got 7001 tokens")
    assert (second.num_rows, second.first_message) == (100, "<script>x</script>")
    assert first.id == "\\u202ename 1\\x1b[31m"


def test_the_best_choices_have_their_texts(tmp_path: pathlib.Path) -> None:
    best, errors = pa.array([2, 0, 2, None], pa.int32()), pa.nulls(4, pa.string())
    table = {"row_index": [0, 1, 2, 3], "best": best, "error_type": errors, "error_message": errors}
    table |= {"label": ["kept"] * 4, "finish_reason": ["kept"] * 4}
    pq.write_table(pa.table(table), tmp_path / "part-000000.parquet")
    with duckdb.connect(":memory:") as connection:
        paths = [tmp_path / "part-000000.parquet"]
        rows = _Rows(connection, paths, input_columns=("label", "finish_reason"), choices=("good", "bad", "3"))
        figures = rows.figures()
    assert figures.labels == (Share('2: "3"', 2), Share("0: good", 1))
    assert figures.finish_reasons == ()


@pytest.mark.parametrize("input_columns", [("id",), ("prompt", "id")])
def test_samples_and_confusion(input_columns: Sequence[str], tmp_path: pathlib.Path) -> None:
    """Against NumPy, with stored prompts and with a kept column, which has its name.

    The model is the less sure of a row the nearer its sums are.
    """
    sums = random.normal(size=(40, 3))
    probabilities = np.exp(sums.max(axis=1)) / np.exp(sums).sum(axis=1)
    best, answer = sums.argmax(axis=1), random.integers(0, 3, 40)
    failed = np.arange(40) % 10 == 9
    table = pa.table(
        {
            "id": [f"name {i}" for i in range(40)],
            "row_index": pa.array(range(40)),
            "prompt": ["p" * (i + 1) for i in range(40)],
            "choice_logprob_sums": pa.array([None if f else s.tolist() for f, s in zip(failed, sums, strict=True)]),
            "best": pa.array(best, pa.int32(), mask=failed),
            "answer": pa.array(answer, pa.int32()),
            "error_type": pa.array(["refused" if f else None for f in failed]),
            "error_message": pa.array(["no" if f else None for f in failed]),
        }
    )
    pq.write_table(table, tmp_path / "part-000000.parquet")
    with duckdb.connect(":memory:") as connection:
        paths = [tmp_path / "part-000000.parquet"]
        rows = _Rows(connection, paths, input_columns=input_columns, choices=["a", "b", "c"])
        found = rows.figures()
    right = np.zeros((3, 3), int)
    np.add.at(right, (answer[~failed], best[~failed]), 1)
    assert found.confusion is not None
    assert (found.confusion.choices, np.array(found.confusion.counts).tolist()) == (("a", "b", "c"), right.tolist())
    order = [i for i in np.argsort(-probabilities, kind="stable") if not failed[i]]
    kinds = {kind: [row for row in found.samples.rows if row.kind == kind] for kind in ("best", "worst", "random")}
    assert [row.row_index for row in kinds["best"]] == order[:3]
    assert [row.row_index for row in kinds["worst"]] == order[:-4:-1]
    assert len(kinds["random"]) == 3 and not any(failed[row.row_index] for row in kinds["random"])
    for row in found.samples.rows:
        i = row.row_index
        assert row.quality == pytest.approx(probabilities[i])
        names = [f"{place}: {'abc'[place]}" for place in (best[i], answer[i])]
        assert (row.id, row.output) == (f"name {i}", f"{names[0]} (answer {names[1]})")
        is_kept = "prompt" in input_columns
        text = "p" * (i + 1)
        assert (row.prompt, row.kept) == (("", (("prompt", text),)) if is_kept else (text, ()))


def test_texts_are_samples_by_their_mean_logprob(figures: RowFigures, tmp_path: pathlib.Path) -> None:
    assert {row.kind for row in figures.samples.rows} == {"random"}  # no column says how sure the model was
    assert figures.confusion is None
    table = pa.table(
        {
            "row_index": [0, 1, 2],
            "text": ["long", "sure", "none"],
            "cumulative_logprob": [-5.0, -1.0, 0.0],
            "num_output_tokens": pa.array([10, 1, 0], pa.int32()),
            "error_type": pa.array([None, None, None], pa.string()),
        }
    )
    pq.write_table(table, tmp_path / "part-000000.parquet")
    rows = figures_of([tmp_path / "part-000000.parquet"]).samples.rows
    assert [(row.kind, row.output, row.quality) for row in rows if row.kind != "random"] == [
        ("best", "long", -0.5),
        ("worst", "sure", -1.0),
    ]


def test_a_job_without_parts_has_no_rows() -> None:
    assert figures_of([]).num_rows == 0


def test_bins_are_round_and_hold_both_ends() -> None:
    for low, high, is_whole in (
        (0, 7, True),
        (3, 3, True),
        (-993.9, -1.1, False),
        (0.5, 0.5, False),
        (1e-9, 2e-9, False),
    ):
        start, step, num_bins = _nice_bins(low, high, is_whole)
        assert start <= low
        assert start + num_bins * step > high * (1 - 1e-9)
        assert 1 <= num_bins <= 50


def test_of_many_numbers_one_part_in_a_few_is_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"part-{number:06}.parquet" for number in range(4)]
    for number, path in enumerate(paths):
        logprobs = pa.array([[-float(number)] * 3], pa.list_(pa.float16()))
        error = pa.nulls(1, pa.string())
        pq.write_table(pa.table({"row_index": [number], "error_type": error, "logprobs": logprobs}), path)
    monkeypatch.setattr(report_rows, "_MOST_NUMBERS", 6)
    found = figures_of(paths)
    [logprobs] = found.tokens
    assert (logprobs.num_values, logprobs.quantiles[0][1]) == (6, -2.0)  # of the first and the third
    assert found.num_rows == 4 and "one part in 2" in found.notes[0]


def test_quantiles_are_among_the_values(tmp_path: pathlib.Path) -> None:
    table = {"row_index": [0, 1], "logprob_sum": [-3.989, -0.9933], "error_type": pa.nulls(2, pa.string())}
    pq.write_table(pa.table(table), tmp_path / "part-000000.parquet")
    [sums] = figures_of([tmp_path / "part-000000.parquet"]).numbers
    assert all(-3.989 <= value <= -0.9933 for _, value in sums.quantiles)

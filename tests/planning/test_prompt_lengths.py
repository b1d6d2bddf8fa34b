"""Which rows are sampled, and what `validate` says of the lengths and the errors of their prompts."""

import random

import pytest

from batchinf.base.errors import RowError
from batchinf.job.sample import MOST_SAMPLED, sample_rows
from batchinf.planning.prompt_lengths import LengthCounts
from batchinf.records import Prompt
from batchinf.spec.sampling import SamplingSpec


def prompt(row: int, length: int, **more: object) -> Prompt:
    return Prompt(row, [7] * length, None, None, **more)  # type: ignore[arg-type]


def broken(row: int, error_type: str, message: str) -> Prompt:
    return Prompt(row, [], None, RowError(error_type, message))


def test_a_small_input_is_looked_at_whole() -> None:
    assert [list(run) for run in sample_rows(range(3, 1003), 0)] == [list(range(3, 1003))]


@pytest.mark.parametrize("num_rows", [1001, 1009, 12_345, 50_000_000])
def test_a_large_one_is_sampled_evenly(num_rows: int) -> None:
    runs = [list(run) for run in sample_rows(range(5, 5 + num_rows), 7)]
    rows = [row for run in runs for row in run]
    assert len(rows) == MOST_SAMPLED == len(set(rows))
    assert rows == sorted(rows)
    assert rows[0] >= 5
    assert rows[-1] < 5 + num_rows
    for tenth in range(10):
        inside = [row for row in rows if tenth * num_rows <= 10 * (row - 5) < (tenth + 1) * num_rows]
        assert 80 <= len(inside) <= 120
    assert runs == [list(run) for run in sample_rows(range(5, 5 + num_rows), 7)]
    assert num_rows < 2000 or runs != [list(run) for run in sample_rows(range(5, 5 + num_rows), 8)]


def test_what_is_said_of_a_sample() -> None:
    lengths = LengthCounts(5000, 128, 32)
    numbers = random.Random(1)
    for row in range(988):
        lengths.add(prompt(row, numbers.choice([10, 20, 30])))
    lengths.add(prompt(990, 97))
    lengths.add(prompt(991, 96))
    lengths.add(prompt(992, 97, sampling=SamplingSpec(max_tokens=4)))
    lengths.add(prompt(993, 20, sampling=SamplingSpec(max_tokens=400)))
    lengths.add(prompt(994, 20, is_truncated=True))
    for row in range(995, 1000):
        lengths.add(broken(row, "null_prompt", "column 'prompt' is null"))
    lengths.add(broken(1000, "unreadable", "not JSON: " + "x" * 500))
    lengths.add(broken(1001, "null_prompt", "another"))
    lines = list(lengths.summary().lines())[1:]
    assert lines[0] == "prompt lengths in tokens (1,000 of 5,000 rows):"
    mean = sum(lengths.lengths) * 5
    assert lines[-7:] == [
        f"  p50 20 · p95 30 · max 97 · about {mean / 1000:.3g}k prompt tokens in all",
        "  2 of them leave less than max_tokens below max_model_len 128",
        "  1 of them is cut to fit (prompt_truncated)",
        "  7 of 1,000 sampled rows will be error rows:",
        "    5 null_prompt, first row 995: column 'prompt' is null",
        "    1 unreadable, first row 1,000: not JSON: " + "x" * 358 + "…",
        "    1 null_prompt, first row 1,001: another",
    ]


def test_of_broken_rows_alone() -> None:
    lengths = LengthCounts(1, None, None)
    lengths.add(broken(0, "null_prompt", "column 'prompt' is null"))
    assert list(lengths.summary().lines())[1:] == [
        "  1 of 1 rows will be error rows:",
        "    1 null_prompt, first row 0: column 'prompt' is null",
    ]

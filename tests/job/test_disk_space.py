"""The estimated size of a job's output against `output.max_output_bytes`."""

import contextlib
import pathlib
from typing import Any

import pytest

import jobs
from batchinf.base.errors import SpecError
from batchinf.job.disk_space import bytes_per_row, check_size
from batchinf.job.open import open_job
from batchinf.spec.file import read_spec

ONE_SAMPLE = 100 + 32 * (6 + 5 * 3)  # 32 tokens, each with its own logprob and the top 2


@pytest.mark.parametrize(("limit", "is_refused"), [(60 * 8 * ONE_SAMPLE, False), (60 * 8 * ONE_SAMPLE - 1, True)])
def test_samples_of_a_row_are_counted_once(limit: int, is_refused: bool, tmp_path: pathlib.Path) -> None:
    sampling = {"n": 8, "temperature": 1.0, "max_tokens": 32, "logprobs": 2}
    spec = jobs.spec_of(tmp_path, sampling=sampling, input={"limit": 60}, output={"max_output_bytes": limit})
    file = read_spec(spec)
    job = open_job(file, tmp_path / "cache")
    refused = pytest.raises(SpecError, match=r"estimated at 370\.6 kB \(6\.2 kB each\)")
    with contextlib.closing(job.source), refused if is_refused else contextlib.nullcontext():
        check_size(job, 60)


@pytest.mark.parametrize(
    ("more", "num_tokens"),
    [
        # "prose" has three tokens, and the output has an end token.
        ({"structured_outputs": {"choice": ["prose", "verse"]}}, 4),
        ({"structured_outputs": {"choice": ["prose", "verse"]}, "max_tokens": 2}, 2),
        ({"structured_outputs": {"choice": ["prose", "verse"]}, "columns": {"structured_outputs.choice": "s"}}, 256),
        ({}, 256),
    ],
)
def test_a_label_is_no_longer_than_the_longest_one(
    more: dict[str, Any], num_tokens: int, tmp_path: pathlib.Path
) -> None:
    """Of `output.rows_per_shard: auto`, too, which takes this size of a row."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "prompt": "Once", "s": null}\n')
    sampling = {"logprobs": 0, "max_tokens": None, **more}
    job = open_job(read_spec(jobs.spec_of(tmp_path, sampling=sampling, input={"path": str(rows)},
                                          output={"keep_columns": []})), tmp_path / "cache")  # fmt: skip
    with contextlib.closing(job.source):
        assert bytes_per_row(job) == 100 + num_tokens * (6 + 5)

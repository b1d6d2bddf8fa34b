"""The estimated size of a job's output against `output.max_output_bytes`."""

import contextlib
import pathlib

import pytest

import jobs
from batchinf.base.errors import SpecError
from batchinf.job.disk_space import check_size
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

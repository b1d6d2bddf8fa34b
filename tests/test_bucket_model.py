"""A few strikes of the model of a job in a bucket; `python tests/bucket_model.py --kills 1000` makes more."""

import pytest
from bucket_model import run_model

pytestmark = [pytest.mark.fewer_rows]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_jobs_in_a_bucket_struck_at_random(seed: int) -> None:
    assert run_model(1, seed).total() >= 1

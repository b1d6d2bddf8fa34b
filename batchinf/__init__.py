"""batchinf: offline batch inference with vLLM, from a job spec to Parquet with logprobs."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchinf.results import Results

__version__ = "0.1.0"


def open(out: str | os.PathLike[str]) -> "Results":
    """The output of a job, from its folder: see `batchinf.results.Results`."""
    from batchinf.results import Results

    return Results(out)

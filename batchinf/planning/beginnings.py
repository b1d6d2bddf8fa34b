"""How much of a job's prompts vLLM's prefix cache can serve, from a sample. The choice of engine arguments needs it."""

import numpy as np
import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.job.job import Job
from batchinf.job.open import location_of
from batchinf.job.ordering import prefix_key, shared_in_order
from batchinf.job.sample import sample_rows
from batchinf.planning.lengths import opened
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer
from batchinf.source.find import find_files, is_dataset
from batchinf.source.remote import is_url
from batchinf.spec.file import SpecFile

_MOST_FILES = 1000  # a sample opens each file, before any engine starts
_BLOCK_BYTES = 64  # about 16 tokens of text, a block of vLLM


def shared_share(file: SpecFile) -> float | None:
    """The share of the prompts' text, 0 to 1, that repeats the beginning of an earlier prompt of the sample.

    The share of all rows is higher if they have thousands of different beginnings. None if it is unknown: no quick
    sample can be taken, the input cannot be read, or its rows are put in an order by their prompts.
    """
    location = location_of(file.spec)
    if file.spec.input.order in ("prefix", "auto") or is_url(location.path) or is_dataset(location):
        return None
    try:
        if len(find_files(location)[1]) > _MOST_FILES:
            return None
        with opened(file, may_scan=False) as sample:
            if sample is None:
                return None
            texts = _beginnings(sample[0])
    except (UserError, OSError, ValueError, LookupError, TypeError, pa.ArrowException):
        return None  # the start reads the input again, and says why it cannot
    if not texts:
        return None
    # vLLM caches whole blocks.
    whole = [text[: len(text) // _BLOCK_BYTES * _BLOCK_BYTES] for text in texts]
    return shared_in_order([prefix_key(text) for text in whole]) / max(1, sum(map(len, texts)))


def _beginnings(job: Job) -> list[bytes]:
    """The beginnings of the prompts of a sample of rows."""
    tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
    builder = PromptBuilder(job.spec, tokenizer, job.model.vocab_size)
    return [
        beginning
        for places in sample_rows(job.rows, 0)
        for row in job.source.read_rows(np.asarray(places, np.int64), builder.columns)
        if (beginning := builder.outline(row).beginning) is not None
    ]

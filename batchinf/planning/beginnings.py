"""How much of a job's prompts vLLM's prefix cache can serve, from a sample. The choice of engine arguments needs it."""

import numpy as np

from batchinf.base.errors import UserError
from batchinf.job.ordering import prefix_key, shared_in_order
from batchinf.job.sample import sample_rows
from batchinf.planning.lengths import opened
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer
from batchinf.spec.file import SpecFile

_BLOCK_BYTES = 64  # about 16 tokens of text, a block of vLLM


def shared_share(file: SpecFile) -> float | None:
    """The share of the prompts, 0 to 1, that is in the cache after earlier rows; in characters, without tokenising.

    None if it is unknown: no quick sample can be taken, the input cannot be read, or its rows are put in an order by
    their prompts.
    """
    if file.spec.input.order in ("prefix", "auto"):
        return None
    try:
        with opened(file, may_scan=False) as found:
            if found is None:
                return None
            job, _ = found
            tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
            builder = PromptBuilder(job.spec, tokenizer, job.model.vocab_size)
            texts = [
                text
                for places in sample_rows(job.rows, 0)
                for row in job.source.read_rows(np.asarray(places, np.int64), builder.columns)
                if (text := builder.outline(row).beginning) is not None
            ]
    except UserError:
        return None  # the start reads the input again, and says why it cannot
    # vLLM caches whole blocks.
    whole = [text[: len(text) // _BLOCK_BYTES * _BLOCK_BYTES] for text in texts]
    return shared_in_order([prefix_key(text) for text in whole]) / max(1, sum(map(len, texts)))

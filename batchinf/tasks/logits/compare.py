"""Compares the logits of two jobs for `diff`."""

import numpy as np
import pyarrow as pa

from batchinf.base.errors import OutputError
from batchinf.base.ragged import Ragged, to_ragged
from batchinf.records import Int64Array
from batchinf.tasks.compare import JobOutput, both_columns
from batchinf.tasks.vector_changes import VectorChanges

# The column with each row's own ids, one list for each position, if the spec names a column of them.
VALUE_TOKEN_IDS = "value_token_ids"


class LogitsChanges(VectorChanges):
    """A row has changed if the likeliest token at a position differs."""

    has_top1 = True
    names = ("positions", "token_ids", VALUE_TOKEN_IDS)

    def vector_columns(self, a: JobOutput, b: JobOutput) -> list[str]:
        """See `VectorChanges`. Raises OutputError if the two jobs hold the logits of different tokens."""
        columns = super().vector_columns(a, b)
        sections = [job.spec.get("logits") or {} for job in (a, b)]
        names = ("token_ids", "num_token_ids")
        if columns and any(sections[0].get(name) != sections[1].get(name) for name in names):
            raise OutputError(
                f"{a.folder} holds {columns[0]} of other tokens than {b.folder}: compare jobs with the same "
                "logits.tokens"
            )
        return columns

    def _counts_of(self, rows: pa.RecordBatch, a: Ragged, b: Ragged) -> Int64Array:
        """See `VectorChanges`. Raises OutputError if the two jobs store other tokens for a row."""
        counts = super()._counts_of(rows, a, b)
        if VALUE_TOKEN_IDS in self.columns:
            ids_a, ids_b = (to_ragged(column) for column in both_columns(rows, VALUE_TOKEN_IDS))
            if not np.array_equal(ids_a.values[ids_a.heads(counts)], ids_b.values[ids_b.heads(counts)]):
                raise OutputError(f"{VALUE_TOKEN_IDS} of the two jobs differ: compare jobs with the same ids")
        return counts

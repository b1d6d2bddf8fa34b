"""Compares logits: of two jobs for `diff`, and of a job and its reference for `verify`."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from batchinf.base.errors import OutputError
from batchinf.base.ragged import Ragged, to_ragged
from batchinf.records import Int64Array, IntArray, Prompt, Request
from batchinf.spec.job import JobSpec
from batchinf.tasks.compare import JobOutput, both_columns
from batchinf.tasks.logits.section import logits_of
from batchinf.tasks.vector_changes import VectorChanges
from batchinf.tasks.verification import StoredRow, StoredVectors, Verification, stored_vectors

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


class LogitsVerification(Verification):
    """Compares the logits at each stored position."""

    columns = ("positions", "token_ids")

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._logits = logits_of(spec)
        self.vector_columns = (self._logits.values,)
        self.is_half = self.is_half or self._logits.dtype == "float16"

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        [request] = requests
        # The last output token has no row after it.
        token_ids = [*request.prompt_token_ids, *(row.values.get("token_ids") or ())[:-1]]
        vocabulary: tuple[int, ...] | IntArray | None = self._logits.token_ids or None
        if self._logits.token_ids_column is not None:
            vocabulary = row.numbers(VALUE_TOKEN_IDS)
        return stored_vectors(row, token_ids, vocabulary=vocabulary)

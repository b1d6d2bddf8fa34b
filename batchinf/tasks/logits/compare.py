"""Compares logits: of two jobs for `diff`, and of a job and its reference for `verify`."""

from collections.abc import Iterator, Sequence

from batchinf.base.errors import OutputError
from batchinf.records import Prompt, Request
from batchinf.spec.job import JobSpec
from batchinf.tasks.compare import JobOutput
from batchinf.tasks.logits.section import logits_of
from batchinf.tasks.vector_changes import VectorChanges
from batchinf.tasks.verification import StoredRow, StoredVectors, Verification, stored_vectors


class LogitsChanges(VectorChanges):
    """A row has changed if the likeliest token at a position differs."""

    has_top1 = True
    names = ("positions", "token_ids")

    def vector_columns(self, a: JobOutput, b: JobOutput) -> list[str]:
        """See `VectorChanges`. Raises OutputError if the two jobs hold the logits of different tokens."""
        columns = super().vector_columns(a, b)
        tokens = [(job.spec.get("logits") or {}).get("token_ids") for job in (a, b)]
        if columns and tokens[0] != tokens[1]:
            raise OutputError(
                f"{a.folder} holds {columns[0]} of other tokens than {b.folder}: compare jobs with the same "
                "logits.tokens"
            )
        return columns


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
        return stored_vectors(row, token_ids, vocabulary=self._logits.token_ids or None)

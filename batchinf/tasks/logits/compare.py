"""Compares logits: of two jobs for `diff`, and of a job and its reference for `verify`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from batchinf.base.errors import OutputError
from batchinf.records import Prompt, Request
from batchinf.tasks.compare import JobOutput
from batchinf.tasks.logits.section import logits_of
from batchinf.tasks.stored import ReferenceWanted, StoredRow, StoredVectors, vectors_at_positions
from batchinf.tasks.vector_changes import VectorChanges
from batchinf.tasks.verification import Verification

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


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

    @property
    def vector_columns(self) -> tuple[str, ...]:
        return (logits_of(self.spec).values,)

    @property
    def is_half(self) -> bool:
        return super().is_half or logits_of(self.spec).dtype == "float16"

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        [request] = requests
        # The last output token has no row after it.
        token_ids = [*request.prompt_token_ids, *(row.values.get("token_ids") or ())[:-1]]
        yield from vectors_at_positions(row, token_ids, has_direction=False)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        from batchinf.tasks.logits.reference import LogitsReference

        return LogitsReference(self.spec, wanted)

"""What `verify` compares of task logits: the rows of logits or logprobs at their positions."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from batchinf.records import Prompt, Request
from batchinf.tasks.logits.section import logits_of
from batchinf.tasks.verification import ReferenceWanted, StoredRow, StoredVectors, Verification, vectors_at_positions

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


class LogitsVerification(Verification):
    """See `Verification`."""

    columns = ("positions", "token_ids")

    @property
    def vector_columns(self) -> tuple[str, ...]:
        """See `Verification`."""
        return (logits_of(self.spec).values,)

    @property
    def is_half(self) -> bool:
        """See `Verification`."""
        return super().is_half or logits_of(self.spec).dtype == "float16"

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        """See `Verification`."""
        [request] = requests
        # After the last output token nothing is stored.
        token_ids = [*request.prompt_token_ids, *(row.values.get("token_ids") or ())[:-1]]
        yield from vectors_at_positions(row, token_ids, has_direction=False)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        """See `Verification`."""
        from batchinf.tasks.logits.reference import LogitsReference

        return LogitsReference(self.spec, wanted)

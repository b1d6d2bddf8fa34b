"""What `verify` compares of the tasks that store vectors."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from batchinf.records import Prompt, Request
from batchinf.tasks.vectors.section import pooling_of
from batchinf.tasks.verification import ReferenceWanted, StoredRow, StoredVectors, Verification, vectors_at_positions

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


class _OfPrompt(Verification):
    """One vector of a whole prompt."""

    has_direction = False

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        """See `Verification`."""
        for name in row.columns:
            yield StoredVectors(name, requests[0].prompt_token_ids, None, row.numbers(name), self.has_direction)


class EmbedVerification(_OfPrompt):
    """See `Verification`."""

    has_direction = True
    is_relative = True
    vector_columns = ("embedding",)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        """See `Verification`."""
        from batchinf.tasks.vectors.reference import EmbedReference

        return EmbedReference(self.spec, wanted)


class HiddenStatesVerification(Verification):
    """See `Verification`."""

    columns = ("positions",)
    is_relative = True

    @property
    def vector_columns(self) -> tuple[str, ...]:
        """See `Verification`."""
        layers = pooling_of(self.spec).layers
        return ("hidden_states",) if layers is None else tuple(f"hidden_states_{layer}" for layer in layers)

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        """See `Verification`."""
        yield from vectors_at_positions(row, requests[0].prompt_token_ids, has_direction=True)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        """See `Verification`."""
        from batchinf.tasks.vectors.reference import HiddenStatesReference

        return HiddenStatesReference(self.spec, wanted)


class _OfHead(_OfPrompt):
    @property
    def is_active(self) -> bool:
        """Whether a softmax or a sigmoid is applied to the head's logits."""
        return bool(pooling_of(self.spec).use_activation)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        """See `Verification`."""
        from batchinf.tasks.vectors.reference import HeadReference

        return HeadReference(self.spec, wanted, is_active=self.is_active)


class ClassifyVerification(_OfHead):
    """See `Verification`."""

    @property
    def is_active(self) -> bool:
        """See `_OfHead`."""
        return pooling_of(self.spec).use_activation is not False

    @property
    def is_relative(self) -> bool:
        """See `Verification`."""
        return self.is_active

    @property
    def vector_columns(self) -> tuple[str, ...]:
        """See `Verification`."""
        return ("probabilities" if self.is_active else "logits",)


class RewardVerification(_OfHead):
    """See `Verification`."""

    vector_columns = ("reward",)

"""Compares vectors: of two jobs for `diff`, and of a job and its reference for `verify`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from batchinf.records import Prompt, Request
from batchinf.tasks.compare import JobOutput
from batchinf.tasks.stored import ReferenceWanted, StoredRow, StoredVectors, vectors_at_positions
from batchinf.tasks.vector_changes import VectorChanges, shared_columns, vector_widths
from batchinf.tasks.vectors.section import pooling_of
from batchinf.tasks.verification import Verification

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


class EmbedChanges(VectorChanges):
    """See `VectorChanges`."""

    has_cosine = True


class HiddenStatesChanges(VectorChanges):
    """See `VectorChanges`."""

    has_cosine = True
    names = ("positions",)


class ClassifyChanges(VectorChanges):
    """A row has changed if its label differs."""

    names = ("label",)

    def vector_columns(self, a: JobOutput, b: JobOutput) -> list[str]:
        """See `VectorChanges`. There are none if the classes or their order differ."""
        labels = [(job.spec.get("pooling") or {}).get("labels") for job in (a, b)]
        return shared_columns(a, b) if labels[0] == labels[1] else []


class RewardChanges(VectorChanges):
    """See `VectorChanges`. A reward may be one number for each row."""

    names = ("reward",)

    def vector_columns(self, a: JobOutput, b: JobOutput) -> list[str]:
        has_numbers = not vector_widths(a.schema) and not vector_widths(b.schema)
        return [] if has_numbers else super().vector_columns(a, b)


class _OfPrompt(Verification):
    """Verifies tasks that store one vector for a whole prompt."""

    has_direction = False

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        for name in row.columns:
            yield StoredVectors(
                kind=name,
                token_ids=requests[0].prompt_token_ids,
                positions=None,
                values=row.numbers(name),
                has_direction=self.has_direction,
            )


class EmbedVerification(_OfPrompt):
    """Compares the vectors of `embed`."""

    has_direction = True
    is_relative = True
    vector_columns = ("embedding",)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        from batchinf.tasks.vectors.reference import EmbedReference

        return EmbedReference(self.spec, wanted)


class HiddenStatesVerification(Verification):
    """Compares the states of `hidden_states`, layer by layer."""

    columns = ("positions",)
    is_relative = True

    @property
    def vector_columns(self) -> tuple[str, ...]:
        layers = pooling_of(self.spec).layers
        return ("hidden_states",) if layers is None else tuple(f"hidden_states_{layer}" for layer in layers)

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        yield from vectors_at_positions(row, requests[0].prompt_token_ids, has_direction=True)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        from batchinf.tasks.vectors.reference import HiddenStatesReference

        return HiddenStatesReference(self.spec, wanted)


class ClassifyVerification(_OfPrompt):
    """Compares the scores of all labels."""

    @property
    def is_relative(self) -> bool:
        """Whether a softmax or a sigmoid is applied to the head's logits."""
        return pooling_of(self.spec).use_activation is not False

    @property
    def vector_columns(self) -> tuple[str, ...]:
        return ("probabilities" if self.is_relative else "logits",)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        from batchinf.tasks.vectors.reference import HeadReference

        return HeadReference(self.spec, wanted, is_active=self.is_relative)


class RewardVerification(_OfPrompt):
    """Compares the reward."""

    vector_columns = ("reward",)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        from batchinf.tasks.vectors.reference import HeadReference

        return HeadReference(self.spec, wanted, is_active=bool(pooling_of(self.spec).use_activation))

"""Compares vectors: of two jobs for `diff`, and of a job and its reference for `verify`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from batchinf.records import Prompt, Request
from batchinf.spec.job import JobSpec
from batchinf.tasks.compare import JobOutput
from batchinf.tasks.vector_changes import VectorChanges, shared_columns, vector_widths
from batchinf.tasks.vectors.section import LINES_COLUMN, is_activated, stored_columns
from batchinf.tasks.verification import ReferenceWanted, StoredRow, StoredVectors, Verification, stored_vectors

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


class EmbedChanges(VectorChanges):
    """See `VectorChanges`."""

    has_cosine = True

    def vector_columns(self, a: JobOutput, b: JobOutput) -> list[str]:
        """See `VectorChanges`. The vectors of lines of a batch file have their widths row by row."""
        if all(LINES_COLUMN in job.schema.names for job in (a, b)):
            return [LINES_COLUMN]
        return super().vector_columns(a, b)


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


class PooledVerification(Verification):
    """Compares the vectors of a prompt, or of its positions."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._has_direction = spec.task in ("embed", "hidden_states")
        self.columns = ("positions",) if spec.task == "hidden_states" else ()
        self.vector_columns = stored_columns(spec)
        self.is_relative = self._has_direction or (spec.task == "classify" and is_activated(spec))

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        if self.vector_columns != (LINES_COLUMN,):
            yield from stored_vectors(row, requests[0].prompt_token_ids, has_direction=self._has_direction)
            return
        for request, vector in zip(requests, row.numbers(LINES_COLUMN), strict=True):
            yield StoredVectors(
                kind=LINES_COLUMN,
                token_ids=request.prompt_token_ids,
                positions=None,
                values=vector[None],
                has_direction=True,
            )

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        from batchinf.tasks.vectors.reference import REFERENCES

        return REFERENCES[self.spec.task](self.spec, wanted)

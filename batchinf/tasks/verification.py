"""The base class of what `verify` compares of a task's rows."""

import abc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.records import Prompt, Request
from batchinf.spec.job import JobSpec
from batchinf.tasks.stored import ReferenceWanted, StoredLogprobs, StoredRow, StoredVectors

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


class Verification(abc.ABC):
    """How the rows of a task are verified, for one resolved spec."""

    columns: ClassVar[tuple[str, ...]] = ()
    """The small output columns that it reads, if they are stored."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec

    def check(self, schema: pa.Schema) -> None:  # noqa: B027  # most tasks store all that is needed
        """Raise UserError if the output does not store enough. schema: of the output."""

    @property
    def vector_columns(self) -> tuple[str, ...]:
        """Columns of vectors, which `StoredRow.numbers` reads."""
        return ()

    @property
    def is_relative(self) -> bool:
        """Whether to use the tolerance for unit vectors and probabilities, not the one for logprobs and logits."""
        return False

    @property
    def is_half(self) -> bool:
        """Whether numbers are stored as float16."""
        return self.spec.output.logprobs_dtype == "float16"

    @abc.abstractmethod
    def stored(
        self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]
    ) -> Iterator[StoredLogprobs | StoredVectors]:
        """The stored numbers of a row, from its prompt and its requests."""

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        """The model that computes the numbers again; by default a causal language model. Raises UserError."""
        from batchinf.tasks.reference import Reference  # importing torch and transformers takes seconds

        return Reference(self.spec, wanted)


class NoVerification(Verification):
    """The default: the task cannot be verified."""

    def check(self, schema: pa.Schema) -> None:
        raise UserError(f"task {self.spec.task} cannot be verified")

    def stored(
        self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]
    ) -> Iterator[StoredLogprobs | StoredVectors]:
        return iter(())

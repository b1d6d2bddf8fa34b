"""What `verify` compares of a task: the numbers in a stored row, and the reference that recomputes them."""

import abc
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.base.errors import UserError
from batchinf.base.ragged import to_matrix, to_ragged
from batchinf.model.identity import Model
from batchinf.model.lora import Adapter
from batchinf.records import Prompt, Request
from batchinf.spec.job import JobSpec

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


@dataclass(frozen=True, slots=True)
class StoredRow:
    """An output row. values: its small columns, by name. columns: the names of the large ones. part, group,
    place: where it lies.
    """

    values: dict[str, Any]
    columns: tuple[str, ...]
    part: pathlib.Path
    group: int
    place: int

    def numbers(self, column: str) -> npt.NDArray[Any]:
        """[num_rows, width] of a column of vectors, of lists of them, or of numbers, in the stored type."""
        with pq.ParquetFile(self.part) as part:
            found = part.read_row_group(self.group, [column]).column(0).combine_chunks()
        own = found.slice(self.place, 1)
        if pa.types.is_list(own.type):
            return to_ragged(own)[0]
        if pa.types.is_fixed_size_list(own.type):
            return to_matrix(own)
        return np.asarray(own.to_numpy(zero_copy_only=False)).reshape(1, 1)


@dataclass(frozen=True, slots=True)
class StoredLogprobs:
    """Logprobs of a run of tokens of one sequence, as stored.

    kind: `output`, `prompt` or `scored`. token_ids: the whole sequence up to the run's last token. first: the run's
    first place in it, from 1. wanted: int64 [num_positions, k + 1], the token that stands there, then the k others
    that are stored. values: float32 [num_positions, k + 1], NaN where nothing is stored. has_top: the k others are the
    likeliest, in their order.
    """

    kind: str
    token_ids: list[int]
    first: int
    wanted: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    has_top: bool = True


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """Vectors of one sequence, as stored: logits, hidden states, the answer of a head.

    kind: the column. token_ids: the whole sequence. positions: int64 [n], the tokens behind which the vectors are; None
    is one vector of the whole sequence. values: [n, width], in the stored type. has_direction: length and direction
    count, not single numbers.
    """

    kind: str
    token_ids: list[int]
    positions: npt.NDArray[np.int64] | None
    values: npt.NDArray[Any]
    has_direction: bool


@dataclass(frozen=True, slots=True)
class ReferenceWanted:
    """The model that a reference loads. adapters: of the job. dtype: of weights and arithmetic. device: as torch names
    it. pooling_type: how vLLM said that it pools: LAST, MEAN, CLS …; empty where it did not say.
    """

    model: Model
    adapters: tuple[Adapter, ...]
    dtype: str
    device: str
    pooling_type: str = ""


class Verification(abc.ABC):
    """How the rows of a task are verified, for one resolved spec.

    columns: small output columns that are needed, if they are stored.
    """

    columns: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec

    def check(self, schema: pa.Schema) -> None:  # noqa: B027  # most tasks store all that is needed
        """Raise UserError where too little is stored. schema: of the output."""

    @property
    def vector_columns(self) -> tuple[str, ...]:
        """Columns of vectors, which `StoredRow.numbers` reads."""
        return ()

    @property
    def is_relative(self) -> bool:
        """Whether the tolerance is for vectors of length 1 and probabilities, not for logprobs and logits."""
        return False

    @property
    def is_half(self) -> bool:
        """Whether numbers are stored as float16."""
        return self.spec.output.logprobs_dtype == "float16"

    @abc.abstractmethod
    def stored(
        self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]
    ) -> Iterator[StoredLogprobs | StoredVectors]:
        """The numbers in a row, given its prompt and the requests that the task makes of it."""

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        """The model that recomputes them; here a causal language model. Raises UserError where there is none."""
        from batchinf.tasks.reference import Reference  # torch and transformers: seconds

        return Reference(self.spec, wanted)


class NoVerification(Verification):
    """Of a task that does not say what can be verified."""

    def check(self, schema: pa.Schema) -> None:
        """Raise UserError."""
        raise UserError(f"task {self.spec.task} cannot be verified")

    def stored(
        self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]
    ) -> Iterator[StoredLogprobs | StoredVectors]:
        """Nothing."""
        return iter(())


TOKEN_COLUMNS = ("logprobs", "ranks", "top_token_ids", "top_logprobs")


def stored_logprobs(
    row: Mapping[str, Any], kind: str, token_ids: list[int], first: int, own: list[int], prefix: str, skip: int
) -> StoredLogprobs:
    """Of the columns whose names begin with `prefix`, from the item `skip` on. own: the tokens that stand there."""
    wanted = np.asarray(own, np.int64)[:, None]
    values = _floats(row[f"{prefix}logprobs"][skip:])[:, None]
    top_ids, top = row.get(f"{prefix}top_token_ids"), row.get(f"{prefix}top_logprobs")
    if top_ids is not None and top is not None:
        wanted = np.concatenate([wanted, np.asarray(top_ids[skip:], np.int64)], axis=1)
        values = np.concatenate([values, np.stack([_floats(item) for item in top[skip:]])], axis=1)
    return StoredLogprobs(kind, token_ids, first, wanted, values)


def _floats(values: Sequence[float | None]) -> npt.NDArray[np.float32]:
    return np.array([np.nan if value is None else value for value in values], np.float32)


def vectors_at_positions(row: StoredRow, token_ids: list[int], has_direction: bool) -> Iterator[StoredVectors]:
    """Of a row that has the column `positions`. Raises UserError where it does not fit the vectors."""
    positions = np.asarray(row.values["positions"], np.int64)
    for name in row.columns:
        values = row.numbers(name)
        if len(positions) != len(values) or ((positions < 0) | (positions >= len(token_ids))).any():
            shown = ", ".join([*map(str, positions[:8]), *(["…"] if len(positions) > 8 else [])])
            raise UserError(
                f"row {row.values['row_index']} has {len(values)} rows of {name} at the positions {shown} of "
                f"{len(token_ids)} tokens: its part is damaged; see batchinf check --deep"
            )
        if len(values):
            yield StoredVectors(name, token_ids, positions, values, has_direction)

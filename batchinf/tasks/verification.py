"""What `verify` compares of a task's rows: the stored numbers, in the form that a reference model computes again."""

import abc
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.base.parquet import open_part
from batchinf.base.ragged import to_matrix, to_ragged
from batchinf.model.identity import Model
from batchinf.model.lora import Adapter
from batchinf.records import IntArray, Prompt, Request
from batchinf.spec.job import JobSpec

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference

TOKEN_COLUMNS = ("logprobs", "ranks", "top_token_ids", "top_logprobs")
# Makes the arguments of transformers' model, besides the ids, for a sequence with images: see `RenderedPrompt.for_ids`.
ModelInputs = Callable[[list[int]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """An output row."""

    values: dict[str, Any]
    """Its small columns, by name."""
    columns: tuple[str, ...]
    """Names of the large columns."""
    part: pathlib.Path
    group: int
    """Index of its row group in the part."""
    place: int
    """Its place in the row group."""

    def numbers(self, column: str) -> npt.NDArray[Any]:
        """[num_rows, width] in the stored type, from a column of vectors, lists of vectors, or numbers."""
        with open_part(self.part) as part:
            group = part.read_row_group(self.group, [column]).column(0).combine_chunks()
        cell = group.slice(self.place, 1)
        if pa.types.is_list(cell.type):
            return to_ragged(cell)[0]
        if pa.types.is_fixed_size_list(cell.type):
            return to_matrix(cell)
        return np.asarray(cell.to_numpy(zero_copy_only=False)).reshape(1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLogprobs:
    """Stored logprobs of consecutive tokens of one sequence."""

    kind: str
    """`output`, `prompt` or `scored`."""
    token_ids: list[int]
    """The whole sequence up to the last of these tokens."""
    first: int
    """Index of the first of these tokens in the sequence, at least 1."""
    tokens: npt.NDArray[np.int64]
    """[num_positions, k + 1]: the token at this position, then the k other stored tokens, the likeliest first."""
    values: npt.NDArray[np.float32]
    """[num_positions, k + 1], NaN where nothing is stored."""
    is_unread: npt.NDArray[np.bool_] | None = None
    """[num_positions], whether the model saw a part of an image there and no token; None: nowhere."""
    rendered: ModelInputs | None = None
    """Of a sequence with images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVectors:
    """Stored vectors of one sequence: logits, hidden states, or the output of a classification head."""

    kind: str
    """The column."""
    token_ids: list[int]
    """The whole sequence."""
    positions: npt.NDArray[np.int64] | None
    """[n], the index of the token of each vector; None: one vector for the whole sequence."""
    values: npt.NDArray[Any]
    """[n, width], in the stored type."""
    has_direction: bool
    """Whether length and direction are compared instead of single numbers."""
    vocabulary: tuple[int, ...] | IntArray | None = None
    """Of vectors over the vocabulary: the ids of their tokens, [n, width] if each has its own; None: the first `width`
    ids."""
    other_token_ids: list[int] | None = None
    """Of a cosine: the other sequence. The number is the cosine of both embeddings."""
    request: Request | None = None
    """The request that gave a number, if it had settings of its own."""
    rendered: ModelInputs | None = None
    """Of a sequence with images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceWanted:
    """The model that a reference loads."""

    model: Model
    adapters: tuple[Adapter, ...]
    """Those of the job."""
    dtype: str
    """Of weights and arithmetic."""
    device: str
    """torch's name."""
    are_logits: bool = False
    """Whether it gives logits instead of logprobs."""
    pooling_type: str = ""
    """The type that vLLM reported: LAST, MEAN, CLS …; empty: not reported."""


def stored_logprobs(
    row: Mapping[str, Any],
    kind: str,
    sequence: list[int],
    first: int,
    *,
    prefix: str = "",
    unread: IntArray | None = None,
) -> StoredLogprobs:
    """The last logprobs in the columns that begin with `prefix`.

    sequence: ends with the last of their tokens. first: index of the first of these tokens in it. unread: positions in
    it of images, which have no logprobs.
    """
    last = slice(first - len(sequence), None)
    tokens = np.asarray(sequence[last], np.int64)[:, None]
    values = _floats(row[f"{prefix}logprobs"][last])[:, None]
    is_unread = None if unread is None else np.isin(np.arange(first, len(sequence)), unread)
    top_ids = row.get(f"{prefix}top_token_ids")
    top = row.get(f"{prefix}top_logprobs")
    if top_ids is not None and top is not None:
        k = max(len(ids or ()) for ids in top_ids[last])
        none = [None] * k
        others = [ids or [own] * k for ids, [own] in zip(top_ids[last], tokens.tolist(), strict=True)]
        tokens = np.concatenate([tokens, np.asarray(others, np.int64)], axis=1)
        values = np.concatenate([values, np.stack([_floats(item or none) for item in top[last]])], axis=1)
    return StoredLogprobs(kind=kind, token_ids=sequence, first=first, tokens=tokens, values=values, is_unread=is_unread)


def _floats(values: Sequence[float | None]) -> npt.NDArray[np.float32]:
    return np.array([np.nan if value is None else value for value in values], np.float32)


def stored_vectors(
    row: StoredRow,
    token_ids: list[int],
    *,
    has_direction: bool = False,
    vocabulary: tuple[int, ...] | IntArray | None = None,
) -> Iterator[StoredVectors]:
    """The vectors of a row. Raises UserError if they do not match its positions, which only some tasks store."""
    stored = row.values.get("positions")
    positions = None if stored is None else np.asarray(stored, np.int64)
    for name in row.columns:
        values = row.numbers(name)
        if positions is not None:
            _check_positions(row, name, positions=positions, values=values, num_tokens=len(token_ids))
        if len(values):
            yield StoredVectors(
                kind=name,
                token_ids=token_ids,
                positions=positions,
                values=values,
                has_direction=has_direction,
                vocabulary=vocabulary,
            )


def _check_positions(
    row: StoredRow, name: str, *, positions: npt.NDArray[np.int64], values: npt.NDArray[Any], num_tokens: int
) -> None:
    if len(positions) != len(values) or ((positions < 0) | (positions >= num_tokens)).any():
        shown = ", ".join([*map(str, positions[:8]), *(["…"] if len(positions) > 8 else [])])
        raise UserError(
            f"row {row.values['row_index']} has {len(values)} rows of {name} at the positions {shown} of {num_tokens} "
            "tokens: its part is damaged; see batchinf check --deep"
        )


class Verification(abc.ABC):
    """How the rows of a task are verified, for one resolved spec."""

    columns: tuple[str, ...] = ()
    """The small output columns that it reads, if they are stored."""
    vector_columns: tuple[str, ...] = ()
    """Columns of vectors, which `StoredRow.numbers` reads."""
    is_relative: bool = False
    """Whether to use the tolerance for unit vectors and probabilities, not the one for logprobs and logits."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.is_half = spec.output.logprobs_dtype == "float16"  # whether numbers are stored as float16

    def check(self, schema: pa.Schema) -> None:  # noqa: B027  # most tasks store all that is needed
        """Raise UserError if the output does not store enough. schema: of the output."""

    @abc.abstractmethod
    def stored(
        self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]
    ) -> Iterator[StoredLogprobs | StoredVectors]:
        """The stored numbers of a row, from its prompt and its requests."""

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        """The model that computes the numbers again; by default a causal language model. Raises UserError."""
        from batchinf.tasks.reference import Reference  # importing torch and transformers takes seconds

        return Reference(self.spec, wanted)

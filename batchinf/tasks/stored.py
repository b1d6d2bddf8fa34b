"""What a job has stored of a row, in the form in which `verify` compares it with a reference model."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.base.parquet import open_part
from batchinf.base.ragged import to_matrix, to_ragged
from batchinf.model.identity import Model
from batchinf.model.lora import Adapter

TOKEN_COLUMNS = ("logprobs", "ranks", "top_token_ids", "top_logprobs")


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
    pooling_type: str = ""
    """The type that vLLM reported: LAST, MEAN, CLS …; empty: not reported."""


def stored_logprobs(
    row: Mapping[str, Any], kind: str, sequence: list[int], first: int, *, prefix: str = "", num_skipped: int = 0
) -> StoredLogprobs:
    """The logprobs in the columns that begin with `prefix`, without their first `num_skipped` items.

    sequence: ends with the last of their tokens. first: index of their first token in it.
    """
    tokens = np.asarray(sequence[first:], np.int64)[:, None]
    values = _floats(row[f"{prefix}logprobs"][num_skipped:])[:, None]
    top_ids = row.get(f"{prefix}top_token_ids")
    top = row.get(f"{prefix}top_logprobs")
    if top_ids is not None and top is not None:
        tokens = np.concatenate([tokens, np.asarray(top_ids[num_skipped:], np.int64)], axis=1)
        values = np.concatenate([values, np.stack([_floats(item) for item in top[num_skipped:]])], axis=1)
    return StoredLogprobs(kind=kind, token_ids=sequence, first=first, tokens=tokens, values=values)


def _floats(values: Sequence[float | None]) -> npt.NDArray[np.float32]:
    return np.array([np.nan if value is None else value for value in values], np.float32)


def vectors_at_positions(row: StoredRow, token_ids: list[int], *, has_direction: bool) -> Iterator[StoredVectors]:
    """The vectors of a row that has the column `positions`. Raises UserError if positions and vectors do not match."""
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
            yield StoredVectors(
                kind=name, token_ids=token_ids, positions=positions, values=values, has_direction=has_direction
            )

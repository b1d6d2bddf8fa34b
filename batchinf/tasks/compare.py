"""Base classes of the counts of `diff` and the comparisons of `verify`. Each task adds its own part."""

import abc
import math
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import OutputError, UserError
from batchinf.base.parquet import open_part
from batchinf.base.ragged import Ragged, to_matrix, to_ragged
from batchinf.model.identity import Model
from batchinf.model.lora import Adapter
from batchinf.records import BoolArray, Prompt, Request
from batchinf.spec.job import JobSpec

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


class JobOutput(Protocol):
    """The job data that a comparison needs: its folder, its stored spec and its output's columns."""

    folder: str
    spec: dict[str, Any]

    @property
    def schema(self) -> pa.Schema:
        """The output's columns."""


@dataclass(frozen=True, slots=True)
class DeltaSummary:
    """Differences B - A. num: how many are finite. mean, mean_abs, max_abs: of the finite ones; 0 if there are none."""

    num: int
    num_not_finite: int
    mean: float
    mean_abs: float
    max_abs: float

    def __str__(self) -> str:
        others = f"; {self.num_not_finite:,} more are not finite" if self.num_not_finite else ""
        return f"B - A is {self.mean:+.2e} on average, |B - A| {self.mean_abs:.2e}, at most {self.max_abs:.2e}{others}"


class Found(abc.ABC):
    """The counts of a task: a dataclass. `--json` shows its fields as `changes.own`."""

    __slots__ = ()

    def headline(self, num_changed: int, num_both: int) -> Iterator[str]:
        """The lines that come first: how much has changed for a reader."""
        yield f"outputs: {num_changed:,} of {num_both:,} changed ({num_changed / max(1, num_both):.2%})"

    @abc.abstractmethod
    def lines(self) -> Iterator[str]:
        """The counts as text."""

    @abc.abstractmethod
    def example_lines(self, key: str, row: dict[str, Any]) -> Iterator[str]:
        """One of the examples as text. key: the name of the column that the rows were joined by."""


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What changed in the rows that are in both jobs.

    num_other_prompts: rows whose prompts differ in token ids. examples: rows of the table of `Changes.take`: the first
    changed rows, or the rows with the greatest distance.
    """

    num_both: int
    num_changed: int
    num_other_prompts: int
    num_errors_only_a: int
    num_errors_only_b: int
    own: Found
    examples: tuple[dict[str, Any], ...]


class Changes(abc.ABC):
    """Counts what changed between two jobs of a task. Each task defines when the output of a row has changed.

    columns: the columns of both jobs that are needed. wide: columns of vectors, which can be large.
    """

    wide: Sequence[str] = ()

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int, columns: Sequence[str]) -> None:
        """columns: those of the task. Only columns that both jobs have are compared."""
        wanted = ("prompt_hash", *columns, "error_type")
        self.columns = [name for name in wanted if name in a.schema.names and name in b.schema.names]
        self._num_examples = num_examples
        self._examples: list[tuple[float, dict[str, Any]]] = []
        # The first five fields of RowChanges.
        self._counts = np.zeros(5, np.int64)

    def take(self, rows: pa.RecordBatch) -> pa.Table:
        """Compare rows of both jobs, whose columns are named `…_a` and `…_b`.

        The table has one row for each of them, with the columns `key`, `is_same_prompt`, `is_changed`, the task's own
        columns, `error_type_a` and `error_type_b`.
        """
        columns: dict[str, Any] = {name: rows[name] for name in ("key", "sample_index") if name in rows.schema.names}
        columns["is_same_prompt"] = is_same = equal(rows, "prompt_hash")
        columns |= self._compare(rows)
        columns |= self._both(rows, "error_type")
        a, b = (np.asarray(errors.is_valid()) for errors in both_columns(rows, "error_type"))
        self._counts += [rows.num_rows, columns["is_changed"].sum(), (~is_same).sum(), (a & ~b).sum(), (b & ~a).sum()]
        table = pa.table(columns)
        distances = self._distances(table)
        furthest = np.argsort(-distances, kind="stable")[: self._num_examples]
        examples = zip(distances[furthest].tolist(), table.take(pa.array(furthest)).to_pylist(), strict=True)
        self._examples = sorted([*self._examples, *examples], key=lambda it: -it[0])[: self._num_examples]
        return table

    @abc.abstractmethod
    def _compare(self, rows: pa.RecordBatch) -> dict[str, Any]:
        """Make the task's own counts. Returns the task's columns of the table, `is_changed` first."""

    def _distances(self, table: pa.Table) -> npt.NDArray[np.float64]:
        """The distance of A and B in each row; 0 if they are the same. The most distant rows become the examples."""
        return np.asarray(table["is_changed"], np.float64)

    def _both(self, rows: pa.RecordBatch, *names: str) -> dict[str, pa.Array]:
        return {f"{name}_{job}": rows[f"{name}_{job}"] for name in names if name in self.columns for job in "ab"}

    def found(self) -> RowChanges:
        """All counts."""
        examples = tuple(row for distance, row in self._examples if distance > 0)
        both, changed, prompts, only_a, only_b = self._counts.tolist()
        return RowChanges(both, changed, prompts, only_a, only_b, self._own_found(), examples)

    @abc.abstractmethod
    def _own_found(self) -> Found:
        """The task's own counts."""


class Comparison(Protocol):
    """Begins the comparison of two jobs of a task. Raises OutputError if they cannot be compared."""

    def __call__(self, a: JobOutput, b: JobOutput, num_examples: int) -> Changes: ...


def no_comparison(a: JobOutput, b: JobOutput, num_examples: int) -> Changes:
    """The `Comparison` of a task whose jobs cannot be compared."""
    raise OutputError(f"{a.folder} is of task {a.spec['task']}, whose outputs cannot be compared")


class Deltas:
    """Differences, B - A, over all rows."""

    def __init__(self) -> None:
        self._sums, self._greatest = np.zeros(4), 0.0

    def add(self, deltas: npt.NDArray[np.float64]) -> None:
        """Add differences."""
        known = deltas[np.isfinite(deltas)]
        absolute = np.abs(known)
        sums = [len(known), len(deltas) - len(known), known.sum(), absolute.sum()]
        self.add_sums(sums, absolute.max(initial=0.0))

    def add_sums(self, sums: Sequence[float], greatest: float) -> None:
        """Add differences that are summed already.

        sums: the number of finite ones, the number of others, the sum of the finite ones, the sum of their absolute
        values. greatest: the greatest of these absolute values.
        """
        self._sums += sums
        self._greatest = max(self._greatest, float(greatest))

    def summary(self) -> DeltaSummary:
        """The summary of all differences."""
        num, num_others, total, total_abs = self._sums.tolist()
        return DeltaSummary(int(num), int(num_others), total / max(1, num), total_abs / max(1, num), self._greatest)


def delta(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """B - A in float64; 0 if both are the same infinity."""
    a, b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    with np.errstate(invalid="ignore"):
        found: npt.NDArray[np.float64] = b - a
    if not np.isfinite(found).all():
        found[a == b] = 0.0
    return found


def number_deltas(rows: pa.RecordBatch, name: str, to: Deltas) -> pa.Array:
    """B - A of a column of numbers; null where A or B is null. Adds all other differences to `to`."""
    a, b = both_columns(rows, name)
    is_null = np.asarray(a.is_null()) | np.asarray(b.is_null())
    found = delta(*(np.asarray(numbers.to_numpy(zero_copy_only=False)) for numbers in (a, b)))
    to.add(found[~is_null])
    return pa.array(found, mask=is_null)


def both_columns(rows: pa.RecordBatch, name: str) -> list[Any]:
    """The column of A and the column of B."""
    return [rows[f"{name}_{job}"] for job in "ab"]


def list_pair(rows: pa.RecordBatch, name: str) -> list[Ragged]:
    """The column of A and the column of B, which have lists."""
    return [to_ragged(column) for column in both_columns(rows, name)]


@dataclass(frozen=True, slots=True)
class ValueChange:
    """How many rows have the value `a` in job A and `b` in job B. The two may be the same."""

    a: str | None
    b: str | None
    num_rows: int


def value_changes(pairs: Counter[tuple[str | None, str | None]]) -> tuple[ValueChange, ...]:
    """The changes, the most frequent first."""
    return tuple(ValueChange(a, b, num_rows) for (a, b), num_rows in pairs.most_common())


def value_pairs(rows: pa.RecordBatch, name: str) -> Iterator[tuple[Any, Any]]:
    """The values of the column in A and B, row by row."""
    return zip(*(column.to_pylist() for column in both_columns(rows, name)), strict=True)


def equal(rows: pa.RecordBatch, name: str) -> BoolArray:
    """Whether both jobs have the same value, or both have null; bool [num_rows]."""
    a, b = both_columns(rows, name)
    is_same = pc.fill_null(pc.equal(a, b), False)
    return np.asarray(pc.or_(is_same, pc.and_(a.is_null(), b.is_null())).to_numpy(zero_copy_only=False), np.bool_)


_MAX_CHARS = 120


def clip_value(value: Any) -> str:
    """A value in one short line."""
    text = "nothing" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
    return repr(text)[:_MAX_CHARS] if isinstance(value, str) and "\n" in text else text[:_MAX_CHARS]


@dataclass(frozen=True, slots=True)
class StoredRow:
    """An output row. values: its small columns, by name. columns: the names of the large columns.

    part, group, place: its file, row group and place in the group.
    """

    values: dict[str, Any]
    columns: tuple[str, ...]
    part: pathlib.Path
    group: int
    place: int

    def numbers(self, column: str) -> npt.NDArray[Any]:
        """[num_rows, width] in the stored type, from a column of vectors, lists of vectors, or numbers."""
        with open_part(self.part) as part:
            found = part.read_row_group(self.group, [column]).column(0).combine_chunks()
        own = found.slice(self.place, 1)
        if pa.types.is_list(own.type):
            return to_ragged(own)[0]
        if pa.types.is_fixed_size_list(own.type):
            return to_matrix(own)
        return np.asarray(own.to_numpy(zero_copy_only=False)).reshape(1, 1)


@dataclass(frozen=True, slots=True)
class StoredLogprobs:
    """Stored logprobs of consecutive tokens of one sequence.

    kind: `output`, `prompt` or `scored`. token_ids: the whole sequence up to the last of these tokens. first: index of
    the first of these tokens in the sequence, at least 1. wanted: int64 [num_positions, k + 1], the token at this
    position, then the k other stored tokens, the likeliest first. values: float32 [num_positions, k + 1], NaN where
    nothing is stored.
    """

    kind: str
    token_ids: list[int]
    first: int
    wanted: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """Stored vectors of one sequence: logits, hidden states, or the output of a classification head.

    kind: the column. token_ids: the whole sequence. positions: int64 [n], the index of the token of each vector; None:
    one vector for the whole sequence. values: [n, width], in the stored type. has_direction: whether length and
    direction are compared instead of single numbers.
    """

    kind: str
    token_ids: list[int]
    positions: npt.NDArray[np.int64] | None
    values: npt.NDArray[Any]
    has_direction: bool


@dataclass(frozen=True, slots=True)
class ReferenceWanted:
    """The model that a reference loads. adapters: those of the job. dtype: of weights and arithmetic.

    device: torch's name. pooling_type: the type that vLLM reported: LAST, MEAN, CLS …; empty: not reported.
    """

    model: Model
    adapters: tuple[Adapter, ...]
    dtype: str
    device: str
    pooling_type: str = ""


class Verification(abc.ABC):
    """How the rows of a task are verified, for one resolved spec.

    columns: the small output columns that it reads, if they are stored.
    """

    columns: ClassVar[tuple[str, ...]] = ()

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


TOKEN_COLUMNS = ("logprobs", "ranks", "top_token_ids", "top_logprobs")


def stored_logprobs(
    row: Mapping[str, Any], kind: str, token_ids: list[int], first: int, own: list[int], prefix: str, skip: int
) -> StoredLogprobs:
    """The logprobs in the columns that begin with `prefix`, from item `skip` on. own: the tokens at these positions."""
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
            yield StoredVectors(name, token_ids, positions, values, has_direction)

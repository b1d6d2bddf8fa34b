"""The base classes for what `diff` counts and `verify` compares. Each task adds its own part."""

import abc
import math
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinf.base.errors import OutputError, UserError
from batchinf.base.ragged import to_matrix, to_ragged
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
    """Differences B - A. num: the finite ones. mean, mean_abs and max_abs are over these; 0 without any."""

    num: int
    num_not_finite: int
    mean: float
    mean_abs: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What changed in the rows that are in both jobs.

    num_other_prompts: rows whose prompts differ in token ids. own: a dataclass of the task. examples: rows of the
    table that `Changes.take` returns: the first changed ones, or those with the largest differences.
    """

    num_both: int
    num_changed: int
    num_other_prompts: int
    num_errors_only_a: int
    num_errors_only_b: int
    own: Any
    examples: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How `diff` compares two jobs of a task.

    begin: checks that the jobs can be compared and returns the `Changes`; raises OutputError. lines: `RowChanges.own`
    as text. example_lines: one example as text; the first argument is the name of the key that joins the jobs.
    """

    begin: Callable[[JobOutput, JobOutput, int], "Changes"]
    lines: Callable[[Any], Iterator[str]]
    example_lines: Callable[[str, dict[str, Any]], Iterator[str]]


def _no_begin(a: JobOutput, b: JobOutput, num_examples: int) -> "Changes":
    raise OutputError(f"{a.folder} is of task {a.spec['task']}, whose outputs cannot be compared")


# The default: the outputs cannot be compared.
NO_COMPARISON = Comparison(_no_begin, lambda own: iter(()), lambda key, row: iter(()))


class Changes(abc.ABC):
    """Counts the changed rows of two jobs. Each subclass defines when a row counts as changed.

    columns: the columns to compare, which both jobs have. wide: the large ones, which `take` gets separately.
    """

    columns: Sequence[str] = ()
    wide: Sequence[str] = ()

    def __init__(self, num_examples: int) -> None:
        self.num_both = self.num_other_prompts = self.num_changed = 0
        self.errors: Counter[tuple[bool, bool]] = Counter()
        self.examples: list[dict[str, Any]] = []
        self.num_examples = num_examples

    def take(self, rows: pa.RecordBatch, wide: Sequence[pa.Table]) -> pa.Table:
        """Compare some rows and count the changes. Returns a table with one row each: `key`, `is_same_prompt`,
        `is_changed`, the columns of the subclass, `error_type_a` and `error_type_b`.
        """
        columns: dict[str, Any] = {name: rows.column(name) for name in ("key", "sample_index") if name in _names(rows)}
        columns["is_same_prompt"] = equal(rows, "prompt_hash")
        columns |= self.compare(rows, wide)
        columns |= {f"error_type_{job}": rows.column(f"error_type_{job}") for job in "ab"}
        table = pa.table(columns)
        self.num_both += table.num_rows
        self.num_other_prompts += table.num_rows - int(np.count_nonzero(table["is_same_prompt"].to_numpy()))
        self.num_changed += int(np.count_nonzero(table["is_changed"].to_numpy()))
        errors = (np.asarray(table[f"error_type_{job}"].is_valid()) for job in "ab")
        self.errors.update(zip(*(found.tolist() for found in errors), strict=True))
        self.count(table)
        self.remember(table)
        return table

    @abc.abstractmethod
    def compare(self, rows: pa.RecordBatch, wide: Sequence[pa.Table]) -> dict[str, Any]:
        """The subclass's own columns of the table, `is_changed` first."""

    @abc.abstractmethod
    def count(self, table: pa.Table) -> None:
        """Update the subclass's own counts."""

    def remember(self, table: pa.Table) -> None:
        """Keep examples: the first changed rows."""
        wanted = self.num_examples - len(self.examples)
        if wanted > 0:
            self.examples += table.filter(table["is_changed"]).slice(0, wanted).to_pylist()

    def found(self) -> RowChanges:
        only_a, only_b = self.errors[True, False], self.errors[False, True]
        examples = ({name: row[name] for name in row if name != "_distance"} for row in self.examples)
        return RowChanges(
            self.num_both, self.num_changed, self.num_other_prompts, only_a, only_b, self.own_found(), tuple(examples)
        )

    @abc.abstractmethod
    def own_found(self) -> object:
        """The task's own counts, as a dataclass."""


class Deltas:
    """Statistics of the differences B - A over all rows. Only finite differences enter sums and maximum."""

    def __init__(self) -> None:
        self.num = self.num_others = 0
        self.total = self.total_abs = self.greatest = 0.0

    def add(self, deltas: npt.NDArray[np.float64]) -> None:
        """Add differences. Those that are not finite are only counted."""
        known = deltas[np.isfinite(deltas)]
        total, total_abs = float(known.sum()), float(np.abs(known).sum())
        self.add_sums(len(known), len(deltas) - len(known), total, total_abs, float(np.abs(known).max(initial=0.0)))

    def add_sums(self, num: int, num_others: int, total: float, total_abs: float, greatest: float) -> None:
        """Add differences that are already summed."""
        self.num, self.num_others = self.num + num, self.num_others + num_others
        self.total, self.total_abs = self.total + total, self.total_abs + total_abs
        self.greatest = max(self.greatest, greatest)

    def summary(self) -> DeltaSummary:
        num = max(1, self.num)
        return DeltaSummary(self.num, self.num_others, self.total / num, self.total_abs / num, self.greatest)


def delta(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """B - A in float64; 0 if both are the same infinity."""
    a, b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    with np.errstate(invalid="ignore"):
        found: npt.NDArray[np.float64] = b - a
    if not np.isfinite(found).all():
        found[a == b] = 0.0
    return found


def equal(rows: pa.RecordBatch, name: str) -> BoolArray:
    """For each row, whether both jobs have the same value in this column, or both null."""
    a, b = (rows.column(f"{name}_{job}") for job in "ab")
    is_same = pc.fill_null(pc.equal(a, b), False)
    return np.asarray(pc.or_(is_same, pc.and_(a.is_null(), b.is_null())).to_numpy(zero_copy_only=False), np.bool_)


def num_common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Length of the common beginning."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _names(rows: pa.RecordBatch) -> list[str]:
    return list(rows.schema.names)


_MAX_CHARS = 120


def delta_text(deltas: DeltaSummary) -> str:
    """The differences in one line."""
    others = f"; {deltas.num_not_finite:,} more are not finite" if deltas.num_not_finite else ""
    return (
        f"B - A is {deltas.mean:+.2e} on average, |B - A| {deltas.mean_abs:.2e}, at most {deltas.max_abs:.2e}{others}"
    )


def clip_value(value: Any) -> str:
    """A value in one short line."""
    text = "nothing" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
    return repr(text)[:_MAX_CHARS] if isinstance(value, str) and "\n" in text else text[:_MAX_CHARS]


@dataclass(frozen=True, slots=True)
class StoredRow:
    """An output row. values: its small columns, by name. columns: the names of the large ones. part, group, place: its
    file, row group and place in the group.
    """

    values: dict[str, Any]
    columns: tuple[str, ...]
    part: pathlib.Path
    group: int
    place: int

    def numbers(self, column: str) -> npt.NDArray[Any]:
        """[num_rows, width] in the stored type, from a column of vectors, lists of vectors, or numbers."""
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
    """Stored logprobs of consecutive tokens of one sequence.

    kind: `output`, `prompt` or `scored`. token_ids: the sequence up to the last of these tokens. first: index of the
    first of them, at least 1. wanted: int64 [num_positions, k + 1], the token at each position, then the k other tokens
    that are stored. values: float32 [num_positions, k + 1]; NaN: not stored. has_top: whether the k others are the
    likeliest tokens, in that order.
    """

    kind: str
    token_ids: list[int]
    first: int
    wanted: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    has_top: bool = True


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """Stored vectors of one sequence: logits, hidden states, or the output of a classification head.

    kind: the column. token_ids: the whole sequence. positions: int64 [n], the index of the token of each vector; None:
    one vector for the whole sequence. values: [n, width], in the stored type. has_direction: whether length and
    direction are compared, and not single numbers.
    """

    kind: str
    token_ids: list[int]
    positions: npt.NDArray[np.int64] | None
    values: npt.NDArray[Any]
    has_direction: bool


@dataclass(frozen=True, slots=True)
class ReferenceWanted:
    """The model that a reference loads. adapters: of the job. dtype: of weights and arithmetic. device: torch's name.
    pooling_type: the type that vLLM reported: LAST, MEAN, CLS …; empty: not reported.
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
        """Whether to use the tolerance for unit vectors and probabilities, instead of that for logprobs and logits."""
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

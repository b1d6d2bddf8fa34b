"""`batchinf diff A B`: what changed between two jobs over the same rows, as two models, or versions of one, give it.

Rows are joined by their position where both jobs had the same input, else by `id`; DuckDB joins them, and spills to
disk what is more than its share of memory. Logprobs are compared as far as both jobs gave the same tokens: behind the
first difference they are of other texts.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinf.errors import OutputError, UserError
from batchinf.results import Results, to_ragged

KEYS = ("row_index", "id")
_MEMORY = "2GB"
_ROWS_AT_ONCE = 4096
_WANTED = ("prompt_hash", "text", "token_ids", "finish_reason", "cumulative_logprob", "logprobs", "error_type")
_LONGEST_TEXT = 120


@dataclass(slots=True)
class Totals:
    """What is counted over all rows. deltas: sums over the tokens that both jobs gave, from each row's beginning."""

    num_both: int = 0
    num_other_prompts: int = 0
    num_changed: int = 0
    num_compared: int = 0
    num_tokens: int = 0
    sum_delta: float = 0.0
    sum_abs_delta: float = 0.0
    max_abs_delta: float = 0.0
    reasons: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    errors: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)


def diff_lines(a: str, b: str, on: str | None, to: str | None, num_examples: int) -> Iterator[str]:
    """What changed, for people. to: a Parquet file that gets a row for each row of both jobs.

    Raises UserError where the two cannot be joined, or where `to` cannot be written.
    """
    first, second = Results(a), Results(b)
    for job in (first, second):
        if "sample_index" not in job.schema.names:
            task = job.spec.get("task", "generate")
            raise OutputError(f"{job.folder} holds no texts, but what task {task} makes: compare two jobs of texts")
    key = _key(first, second, on)
    yield from _job_lines(first, second)
    totals = Totals()
    with tempfile.TemporaryDirectory() as scratch:
        joined = _Joined(first, second, key, scratch)
        _write(joined, totals, to, num_examples)
        only_a, only_b = joined.num_alone()
    yield from _total_lines(totals, key, only_a, only_b)
    for row in totals.examples:
        yield f"  {key} {row['key']}, sample {row['sample_index']}, other from token {row['first_difference']} on:"
        yield from (f"    {name} {_clip(row[f'text_{name.lower()}'])}" for name in "AB")
    if to is not None:
        yield f"{totals.num_both:,} rows in {to}"


def _key(a: Results, b: Results, on: str | None) -> str:
    # As far as both go: rows that came later may be others, at the same positions.
    is_same_input = all(one == other for one, other in zip(a.taken, b.taken, strict=False))
    has_id = "id" in a.schema.names and "id" in b.schema.names
    if on not in (None, *KEYS):
        raise UserError(f"--on: got {on!r}; must be {' or '.join(KEYS)}")
    if on == "id" and not has_id:
        raise UserError("--on id: not both jobs have an id; give them the same input.id_column, or say --on row_index")
    if on is None and not is_same_input and not has_id:
        raise UserError(
            f"{a.folder} and {b.folder} had different inputs, and rows have no id to be joined by; if rows stand at "
            "the same places in both, say --on row_index"
        )
    if on is not None:
        return on
    return "row_index" if is_same_input else "id"


def _job_lines(a: Results, b: Results) -> Iterator[str]:
    for name, job in (("A", a), ("B", b)):
        stands = "" if job.is_done else ", not done"
        yield f"{name} {job.folder}: {len(job):,} rows{stands}, {', '.join(f'{k} {v}' for k, v in _about(job).items())}"
    names = sorted(a.identity.keys() | b.identity.keys())
    changed = [name for name in names if a.identity.get(name) != b.identity.get(name)]
    for name in changed:
        yield f"  {name}: {_clip(repr(a.identity.get(name)))} -> {_clip(repr(b.identity.get(name)))}"


def _about(job: Results) -> dict[str, str]:
    stored = pq.read_metadata(job.parts[0]).metadata or {}
    said = {key.decode().removeprefix("batchinf."): value.decode() for key, value in stored.items()}
    names = {"model": "model", "version.vllm": "vllm", "version.torch": "torch", "device": "device"}
    return {name: said[key] for key, name in names.items() if key in said}


class _Joined:
    """Both jobs' rows, joined. The columns of each are named `…_a` and `…_b`, but for the keys."""

    def __init__(self, a: Results, b: Results, key: str, scratch: str) -> None:
        import duckdb

        settings: dict[str, str | bool | int | float | list[str]] = {"memory_limit": _MEMORY, "temp_directory": scratch}
        self._connection = duckdb.connect(":memory:", config=settings)
        self.has_logprobs = all("logprobs" in job.schema.names for job in (a, b))
        self.columns = [name for name in _WANTED if all(name in job.schema.names for job in (a, b))]
        self.key = key
        for name, job in (("a", a), ("b", b)):
            self._connection.register(name, _reader(job, [*_keys(key), *self.columns]))
            # A reader can be read once, and the rows are asked for twice.
            self._connection.execute(f"CREATE TABLE t{name} AS SELECT * FROM {name}")
            self._connection.unregister(name)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Rows of both, in A's order."""
        columns = ", ".join(f"ta.{name} AS {name}_a, tb.{name} AS {name}_b" for name in self.columns)
        query = (
            f"SELECT ta.{self.key} AS key, ta.sample_index AS sample_index, {columns} "
            f"FROM ta JOIN tb ON ta.{self.key} = tb.{self.key} AND ta.sample_index = tb.sample_index "
            "ORDER BY ta.row_index, ta.sample_index"
        )
        found: Any = self._connection.sql(query)
        # Named otherwise before DuckDB 2.
        read = found.to_arrow_reader if hasattr(found, "to_arrow_reader") else found.fetch_arrow_reader
        yield from read(_ROWS_AT_ONCE)

    def num_alone(self) -> tuple[int, int]:
        """Rows that only A has, and that only B has."""

        def alone(one: str, other: str) -> int:
            same = f"{one}.{self.key} = {other}.{self.key} AND {one}.sample_index = {other}.sample_index"
            row = self._connection.execute(f"SELECT count(*) FROM {one} ANTI JOIN {other} ON {same}").fetchone()
            return int(row[0]) if row else 0

        return alone("ta", "tb"), alone("tb", "ta")


def _keys(key: str) -> list[str]:
    return [*dict.fromkeys(("row_index", key)), "sample_index"]


def _reader(job: Results, columns: Sequence[str]) -> pa.RecordBatchReader:
    schema = pa.schema([job.schema.field(name) for name in columns])
    # DuckDB knows no half floats.
    wide = pa.schema([pa.field(f.name, pa.list_(pa.float32())) if f.name == "logprobs" else f for f in schema])
    return pa.RecordBatchReader.from_batches(wide, (b.select(columns).cast(wide) for b in job.batches(columns)))


def _write(joined: _Joined, totals: Totals, to: str | None, num_examples: int) -> None:
    writer = None
    try:
        for batch in joined.batches():
            table = _compare(batch, joined.has_logprobs)
            _count(table, totals, num_examples)
            if to is not None:
                writer = writer or pq.ParquetWriter(to, table.schema, compression="zstd")
                writer.write_table(table)
    except OSError as error:
        raise OutputError(f"--out: {to} cannot be written: {error.strerror or error}") from error
    finally:
        if writer is not None:
            writer.close()


def _compare(batch: pa.RecordBatch, has_logprobs: bool) -> pa.Table:
    """The batch with what is the same: see the names of the columns that are added."""
    ids = [to_ragged(batch.column(f"token_ids_{name}")) for name in "ab"] if "token_ids_a" in batch.schema.names else []
    num_rows = batch.num_rows
    columns: dict[str, Any] = {name: batch.column(name) for name in ("key", "sample_index")}
    columns["is_same_prompt"] = _equal(batch, "prompt_hash")
    if ids:
        common = np.array([_num_common(ids[0][row], ids[1][row]) for row in range(num_rows)], np.int64)
        is_changed = (common < ids[0].lengths) | (common < ids[1].lengths) | (ids[0].is_null != ids[1].is_null)
    else:
        common = np.zeros(num_rows, np.int64)
        is_changed = ~_equal(batch, "text")
    columns["is_changed"] = is_changed
    columns["first_difference"] = pa.array(common, mask=~is_changed | (not ids))
    if has_logprobs and ids:
        columns |= _deltas(batch, common)
    for name in ("text", "finish_reason", "cumulative_logprob", "error_type"):
        columns |= {f"{name}_{job}": batch.column(f"{name}_{job}") for job in "ab" if f"{name}_a" in batch.schema.names}
    return pa.table(columns)


def _deltas(batch: pa.RecordBatch, common: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Over each row's common tokens: how many there are, and the sum and the greatest of B's logprobs less A's."""
    a, b = (to_ragged(batch.column(f"logprobs_{name}")) for name in "ab")
    found = np.zeros((len(common), 3))
    counts = np.minimum(np.minimum(a.lengths, b.lengths), common)
    for row in np.flatnonzero(counts):
        delta = b[row][: counts[row]].astype(np.float64) - a[row][: counts[row]]
        found[row] = delta.sum(), np.abs(delta).sum(), np.abs(delta).max()
    is_null = counts == 0
    return {
        "num_common_tokens": common,
        "sum_delta_logprob": pa.array(found[:, 0], mask=is_null),
        "sum_abs_delta_logprob": pa.array(found[:, 1], mask=is_null),
        "max_abs_delta_logprob": pa.array(found[:, 2], mask=is_null),
        "num_compared_tokens": counts,
    }


def _num_common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """How many items from the beginning are the same."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _equal(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.bool_]:
    """Whether both jobs have the same there, or both nothing."""
    a, b = (batch.column(f"{name}_{job}") for job in "ab")
    is_same = pc.fill_null(pc.equal(a, b), False)
    return np.asarray(pc.or_(is_same, pc.and_(a.is_null(), b.is_null())).to_numpy(zero_copy_only=False), np.bool_)


def _count(table: pa.Table, totals: Totals, num_examples: int) -> None:
    changed = table.filter(table["is_changed"])
    totals.num_both += table.num_rows
    totals.num_other_prompts += table.num_rows - int(np.count_nonzero(table["is_same_prompt"].to_numpy()))
    totals.num_changed += changed.num_rows
    totals.reasons.update(zip(*(changed[f"finish_reason_{job}"].to_pylist() for job in "ab"), strict=True))
    errors = (np.asarray(table[f"error_type_{job}"].is_valid()) for job in "ab")
    totals.errors.update(zip(*(found.tolist() for found in errors), strict=True))
    if "num_compared_tokens" in table.column_names:
        totals.num_tokens += int(table["num_compared_tokens"].to_numpy().sum())
        totals.num_compared += int(np.count_nonzero(table["num_compared_tokens"].to_numpy()))
        sums = (table[f"{name}_delta_logprob"].to_numpy() for name in ("sum", "sum_abs", "max_abs"))
        total, absolute, greatest = (found[~np.isnan(found)] for found in sums)
        totals.sum_delta += float(total.sum())
        totals.sum_abs_delta += float(absolute.sum())
        totals.max_abs_delta = max(totals.max_abs_delta, float(greatest.max(initial=0.0)))
    wanted = num_examples - len(totals.examples)
    totals.examples += changed.slice(0, max(0, wanted)).to_pylist()


def _total_lines(totals: Totals, key: str, only_a: int, only_b: int) -> Iterator[str]:
    alone = f"; {only_a:,} only in A, {only_b:,} only in B" if only_a or only_b else ""
    yield f"rows: {totals.num_both:,} in both, by {key}{alone}"
    if totals.num_other_prompts:
        yield f"prompts: {totals.num_other_prompts:,} rows have other token ids: a changed template, tokenizer or input"
    if totals.errors[False, True] or totals.errors[True, False]:
        yield f"errors: {totals.errors[False, True]:,} rows only in B, {totals.errors[True, False]:,} only in A"
    share = totals.num_changed / max(1, totals.num_both)
    yield f"outputs: {totals.num_changed:,} of {totals.num_both:,} changed ({share:.2%})"
    for (a, b), num_rows in totals.reasons.most_common():
        if a != b:
            yield f"  finish_reason {a} -> {b}: {num_rows:,}"
    if totals.num_tokens:
        mean, mean_abs = totals.sum_delta / totals.num_tokens, totals.sum_abs_delta / totals.num_tokens
        yield (
            f"logprobs of {totals.num_tokens:,} tokens that both gave ({totals.num_compared:,} rows, up to the first "
            f"difference): B - A is {mean:+.2e} on average, |B - A| {mean_abs:.2e}, at most {totals.max_abs_delta:.2e}"
        )


def _clip(value: Any) -> str:
    text = "nothing" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
    return repr(text)[:_LONGEST_TEXT] if isinstance(value, str) and "\n" in text else text[:_LONGEST_TEXT]

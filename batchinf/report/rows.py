"""Figures of a job's output rows: lengths, numbers, logprobs, finish reasons, labels, errors.

DuckDB adds them up within its limit of memory.
"""

import contextlib
import glob
import math
import pathlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb
import pyarrow as pa

from batchinf.base.database import open_duckdb
from batchinf.base.errors import OutputError
from batchinf.base.parquet import absolute, joined_schema, open_part
from batchinf.base.text import COMPARED_CHARS, VARYING, ErrorGroup, choice_name, clip, list_names
from batchinf.manifest.look import Look
from batchinf.manifest.names import part_name
from batchinf.manifest.versions import stored_spec
from batchinf.report.samples import CHOICE_PROBABILITY, Confusion, Samples, confusion, samples
from batchinf.spec.job import JobSpec
from batchinf.tasks.columns import IMAGE_DIGESTS

_SETTINGS = {"memory_limit": "1GB", "preserve_insertion_order": "false"}
_NUM_BINS = 40
# Numbers in lists that are read, which takes about ten seconds; of more, parts at equal distances are.
_MOST_NUMBERS = 20_000_000
_MOST_GROUPS = 40
_MOST_LABELS = 24
_MESSAGE_CHARS = 300
_LABEL_CHARS = 40
# Columns with the logprobs of tokens, and SQL for these.
_LOGPROBS = {"logprobs": "unnest(logprobs)", "choice_logprobs": "unnest(flatten(choice_logprobs))"}
_ENTROPY = "Entropy at a token, from its most likely tokens"
# In nats, of each token. All tokens that are not among the most likely ones count as one, so this is a lower bound.
_ENTROPIES = """
    unnest(list_transform(
        list_transform(top_logprobs, lambda top: list_transform(top, lambda x: exp(x))),
        lambda p: if(len(p) > 0, greatest(0, -list_sum(
            list_transform(list_append(p, 1 - list_sum(p)), lambda x: if(x > 0, x * ln(x), 0))
        )), NULL)
    ))
"""
_QUANTILES = ("least", "5 % below", "median", "95 % below", "most")


@dataclass(frozen=True, slots=True)
class Bin:
    """Values from `start` to `stop` (exclusive)."""

    start: float
    stop: float
    num: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often a number has which values."""

    title: str
    unit: str
    bins: tuple[Bin, ...]
    num_below: int = 0
    num_above: int = 0
    """Values outside of the bins."""
    num_not_finite: int = 0
    """NaN and infinities."""
    quantiles: tuple[tuple[str, float], ...] = ()
    has_single_values: bool = False
    """Whether each bin holds one whole number."""

    @property
    def num_values(self) -> int:
        return sum(each.num for each in self.bins) + self.num_below + self.num_above + self.num_not_finite


@dataclass(frozen=True, slots=True)
class Share:
    """How many rows have a value."""

    name: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class ShownErrors(ErrorGroup):
    """A group with the id and the prompt of its first row."""

    id: str
    prompt: str
    """Empty if the job does not store prompts."""


@dataclass(frozen=True, slots=True)
class RowFigures:
    """What the report says about the rows in parts."""

    num_rows: int
    lengths: tuple[Histogram, ...]
    numbers: tuple[Histogram, ...]
    tokens: tuple[Histogram, ...]
    finish_reasons: tuple[Share, ...]
    labels_of: str
    labels: tuple[Share, ...]
    num_labels: int
    errors: tuple[ShownErrors, ...]
    num_error_groups: int
    samples: Samples
    confusion: Confusion | None
    """None if the rows have no answers, or choices of their own."""
    notes: tuple[str, ...]
    """What was left out, for people to read."""


def row_figures(look: Look) -> RowFigures:
    """The figures of the rows in the parts of a job, or of all its slices."""
    jobs = look.begun()
    spec = stored_spec(jobs[0][1].header.spec)
    parts = look.parts(jobs)
    notes: list[str] = []
    try:
        figures = _figures(spec, [*parts])
    except (duckdb.Error, OutputError):
        readable = [path for index in range(len(parts)) if (path := _readable(parts, index)) is not None]
        figures = _figures(spec, readable)
        names = [part_name(shard) for _, state in jobs for shard in sorted(state.parts)]
        if damaged := [name for index, name in enumerate(names) if _readable(parts, index) is None]:
            notes.append(
                f"{list_names(damaged)}: missing or damaged, and left out; `batchinf check --deep` finds all such files"
            )
    if not all(state.is_done for _, state in jobs):
        notes.append("finished rows that are in no part yet are left out")
    return replace(figures, notes=(*notes, *figures.notes))


def _figures(spec: JobSpec, paths: Sequence[pathlib.Path]) -> RowFigures:
    input_columns = (*spec.output.keep_columns.values(), "id")
    choices = spec.input.choices or ()
    with tempfile.TemporaryDirectory() as scratch, open_duckdb(**_SETTINGS, temp_directory=scratch) as connection:
        return _Rows(connection, paths, input_columns=input_columns, choices=choices).figures()


def _readable(parts: Sequence[pathlib.Path], index: int) -> pathlib.Path | None:
    with contextlib.suppress(OutputError), open_part(parts[index]):
        return parts[index]
    return None


class _Rows:
    """The output rows as a table of DuckDB, for the columns without lists, and as batches of Arrow for the others."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        paths: Sequence[pathlib.Path],
        *,
        input_columns: Sequence[str],
        choices: Sequence[str] = (),
    ) -> None:
        """choices: the texts that `best` counts, if all rows have the same."""
        self._connection = connection
        self._paths = paths
        self._choices = choices
        schema = joined_schema(paths) if paths else pa.schema([])
        nested = {field.name for field in schema if pa.types.is_nested(field.type)}
        self._lists = nested - {*input_columns}
        self._token_lists = [name for name in (*_LOGPROBS, "top_logprobs") if name in self._lists]
        self._types = {field.name: field.type for field in schema if field.name not in nested}
        self._numbers = [n for n, kind in self._types.items() if pa.types.is_floating(kind) and n not in input_columns]
        # A kept column may have the name of a column of another task.
        self._own_columns = set(self._types) - (set(input_columns) - {"id"})
        self._kept = [name for name in input_columns if name != "id" and name in self._types]
        self._create_view()

    def _create_view(self) -> None:
        if not self._paths:
            self._connection.execute("CREATE VIEW output AS SELECT NULL AS error_type WHERE false")
            return
        files = [glob.escape(absolute(path)) for path in self._paths]
        self._connection.read_parquet(files, union_by_name=True).create_view("parts")
        columns = ", ".join(map(_quoted, self._types))
        if IMAGE_DIGESTS in self._lists:
            columns += f", {IMAGE_DIGESTS}"
            self._own_columns.add(IMAGE_DIGESTS)
        if "choice_logprob_sums" in self._lists:
            columns += f", {CHOICE_PROBABILITY} AS choice_probability"
            self._own_columns.add("choice_probability")
        self._connection.execute(f"CREATE VIEW output AS SELECT {columns} FROM parts")

    def figures(self) -> RowFigures:
        [(num_rows,)] = self._query("SELECT count(*) FROM output")
        tokens, notes = self._token_histograms()
        labels_of, labels, num_labels = self._labels(num_rows)
        errors, num_groups = self._errors()
        return RowFigures(
            num_rows=num_rows,
            lengths=self._lengths(),
            numbers=tuple(self._histogram(name, name, "") for name in self._numbers),
            tokens=tokens,
            finish_reasons=self._shares("finish_reason") if "finish_reason" in self._own_columns else (),
            labels_of=labels_of,
            labels=labels,
            num_labels=num_labels,
            errors=errors,
            num_error_groups=num_groups,
            samples=samples(self._query, self._own_columns, self._choices, kept=self._kept),
            confusion=confusion(self._query, self._own_columns, self._choices),
            notes=notes,
        )

    def _lengths(self) -> tuple[Histogram, ...]:
        """Of prompts, and of outputs if any row has one."""
        # A row with choices has a request for each; its tokens are the sum.
        prompts = "Prompt tokens of a row, all requests" if "best" in self._own_columns else "Prompt length"
        titles = {"num_prompt_tokens": prompts, "num_output_tokens": "Output length"}
        lengths = [self._histogram(name, title, "tokens") for name, title in titles.items() if name in self._types]
        return (
            *lengths[:1],
            *(outputs for outputs in lengths[1:] if not outputs.quantiles or outputs.quantiles[-1][1]),
        )

    def _query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    def _histogram(self, name: str, title: str, unit: str, view: str = "output") -> Histogram:
        """Of a column of numbers: equal bins from the 0.5th to the 99.5th percentile, rounded outwards."""
        column = _quoted(name)
        is_whole = view == "output" and pa.types.is_integer(self._types[name])
        finite = f"FROM {view} WHERE {column} IS NOT NULL AND isfinite({column}::DOUBLE)"
        shares = [0.005, 0.05, 0.5, 0.95, 0.995]
        [(low, high, quantiles, num_odd)] = self._query(
            f"SELECT min({column})::DOUBLE, max({column})::DOUBLE, approx_quantile({column}::DOUBLE, {shares}), "
            f"(SELECT count({column}) FROM {view}) - count(*) {finite}"
        )
        if low is None:
            return Histogram(title, unit, (), num_not_finite=num_odd)
        # Of a few negative numbers, the approximation may be above all of them.
        quantiles = [min(max(value, low), high) for value in quantiles]
        start, step, num_bins = _nice_bins(max(low, quantiles[0]), min(high, quantiles[-1]), is_whole)
        # The last bin of fractions has its end, too: many logprobs are 0.
        is_above = f"{column} {'>=' if is_whole else '>'} {start + num_bins * step}"
        place = f"least(greatest(floor(({column} - {start}) / {step}), -1), if({is_above}, {num_bins}, {num_bins - 1}))"
        counts = dict(self._query(f"SELECT {place}::INT, count(*) {finite} GROUP BY 1"))
        values = [low, *quantiles[1:4], high]
        return Histogram(
            title,
            unit,
            tuple(Bin(start + i * step, start + (i + 1) * step, counts.get(i, 0)) for i in range(num_bins)),
            num_below=counts.get(-1, 0),
            num_above=counts.get(num_bins, 0),
            num_not_finite=num_odd,
            quantiles=tuple(zip(_QUANTILES, map(round, values) if is_whole else values, strict=True)),
            has_single_values=is_whole and step == 1,
        )

    def _shares(self, name: str) -> tuple[Share, ...]:
        rows = self._query(
            f"SELECT left({_quoted(name)}::VARCHAR, {2 * _LABEL_CHARS}) AS value, count(*) FROM output "
            f"WHERE {_quoted(name)} IS NOT NULL GROUP BY value ORDER BY count(*) DESC, value LIMIT {_MOST_LABELS}"
        )
        if name == "best":
            rows = [(str(choice_name(int(value), self._choices)), num_rows) for value, num_rows in rows]
        return tuple(Share(clip(value, _LABEL_CHARS), num_rows) for value, num_rows in rows)

    def _labels(self, num_rows: int) -> tuple[str, tuple[Share, ...], int]:
        """The column with the labels of the rows, if there is one: few texts that many rows share."""
        for name in ("label", "best", "text"):
            if name in self._own_columns:
                distinct = f"approx_count_distinct(left({_quoted(name)}::VARCHAR, 1000))"
                [(num,)] = self._query(f"SELECT {distinct} FROM output")
                if name != "text" or (num <= 1.2 * _MOST_LABELS and 4 * num <= num_rows):
                    return name, self._shares(name), num
        return "", (), 0

    def _errors(self) -> tuple[tuple[ShownErrors, ...], int]:
        """The largest groups, and the number of all."""
        if "error_message" not in self._types:
            return (), 0
        id_, prompt = (name if name in self._types else "NULL" for name in ("id", "prompt"))
        varying = VARYING.replace("'", "''")
        rows = self._query(
            "SELECT error_type, count(*), arg_min(left(error_message, 2000), row_index), min(row_index), "
            f"arg_min(left({id_}::VARCHAR, 500), row_index), arg_min(left({prompt}, 2000), row_index), "
            "count(*) OVER () FROM output WHERE error_type IS NOT NULL "
            f"GROUP BY error_type, regexp_replace(left(error_message, {COMPARED_CHARS}), '{varying}', '#', 'g') "
            f"ORDER BY count(*) DESC, min(row_index) LIMIT {_MOST_GROUPS}"
        )
        groups = tuple(
            ShownErrors(
                error_type=clip(str(error_type), _LABEL_CHARS),
                num_rows=num_rows,
                first_message=clip(message or "", _MESSAGE_CHARS),
                first_row=row_index,
                id=clip(id_ or "", 2 * _LABEL_CHARS),
                prompt=clip(prompt or "", _MESSAGE_CHARS),
            )
            for error_type, num_rows, message, row_index, id_, prompt, _ in rows
        )
        return groups, rows[0][-1] if rows else 0

    # -- lists ---------------------------------------------------------------------------------------------------------

    def _token_histograms(self) -> tuple[tuple[Histogram, ...], tuple[str, ...]]:
        """Logprobs and entropies of tokens, and notes about them."""
        step = self._create_lists()
        logprobs = [sql for name, sql in _LOGPROBS.items() if name in self._token_lists]
        entropies = [_ENTROPIES] if "top_logprobs" in self._token_lists else []
        histograms = []
        for title, values in (("Logprob of a token", logprobs), (_ENTROPY, entropies)):
            if values:
                selects = " UNION ALL ".join(f"SELECT {sql} AS value FROM lists" for sql in values)
                self._connection.execute(f"CREATE OR REPLACE VIEW tokens AS {selects}")
                histograms.append(self._histogram("value", title, "nats", view="tokens"))
        note = f"Logprobs and entropies are those of one part in {step:,}, from all over the job."
        return tuple(each for each in histograms if each.num_values), (note,) if step > 1 else ()

    def _create_lists(self) -> int:
        """Create the view `lists` with the numbers of tokens in each n-th part; returns n."""
        if not self._token_lists:
            return 1
        files = [glob.escape(absolute(path)) for path in self._paths]
        [(num_numbers,)] = self._query(
            "SELECT sum(num_values) FROM parquet_metadata($1) WHERE split_part(path_in_schema, ',', 1) IN $2",
            files,
            self._token_lists,
        )
        step = max(1, math.ceil((num_numbers or 0) / _MOST_NUMBERS))
        self._connection.read_parquet(files[::step], union_by_name=True).create_view("lists")
        return step


def _nice_bins(low: float, high: float, is_whole: bool) -> tuple[float, float, int]:
    """The start, the width and the number of about 40 equal bins that hold both numbers."""
    step = (high - low) / _NUM_BINS
    if step <= 0 or not math.isfinite(step):
        step = 1.0 if is_whole else max(abs(low), 1.0) / _NUM_BINS
    size = 10.0 ** math.floor(math.log10(step))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= step * (1 - 1e-9))
    step = max(1.0, float(math.ceil(step))) if is_whole else step
    start = math.floor(low / step) * step
    num_bins = math.floor((high - start) / step) + 1 if is_whole else math.ceil((high - start) / step - 1e-9)
    return start, step, max(1, num_bins)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

"""The reports of `diff` and `verify` as text."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from batchinf.base.errors import VerificationFailed
from batchinf.base.text import clip, short_count
from batchinf.commands.diff import ComparedJob, DiffReport, IdentityChange
from batchinf.commands.verify import LogprobDeviations, VectorDeviations, VerifyReport

# A long setting is cut to so many characters, of which so many are equal text before the first difference.
_CHANGE_CHARS, _SAME_CHARS = 120, 24


def diff_lines(report: DiffReport, to: str | None) -> Iterator[str]:
    """How much has changed, then the two jobs, the other changes, and examples. to: the file of `--out`, if any."""
    yield from report.changes.own.headline(report.changes.num_changed, report.changes.num_both)
    yield from (_job_line(name, job) for name, job in (("A", report.a), ("B", report.b)))
    for change in report.identity_changes:
        yield _input_line(report.a, report.b) if change.name == "input" else change_line(change)
    yield from _change_lines(report)
    yield from report.changes.own.lines()
    for row in report.changes.examples:
        yield from report.changes.own.example_lines(report.key, row)
    if to is not None:
        yield f"{report.changes.num_both:,} rows in {to}"


def _input_line(a: ComparedJob, b: ComparedJob) -> str:
    """The inputs of two jobs that have other content. Their fingerprints would say nothing to a reader."""
    if a.input_path != b.input_path:
        return f"  input: {a.input_path} ({a.num_input_rows:,} rows) -> {b.input_path} ({b.num_input_rows:,} rows)"
    read = f"A has read {a.num_input_rows:,} rows of it, B {b.num_input_rows:,}"
    return f"  input: {a.input_path} has changed from one job to the other; {read}"


def change_line(change: IdentityChange) -> str:
    """A setting in A and in B. Of long values, the text around the first difference."""
    a, b = repr(change.a), repr(change.b)
    start = 0
    if max(len(a), len(b)) > _CHANGE_CHARS:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
        start = max(0, sum(1 for _ in same) - _SAME_CHARS)
    shown = (("…" if start else "") + clip(text[start:], _CHANGE_CHARS) for text in (a, b))
    return f"  {change.name}: {' -> '.join(shown)}"


def _job_line(name: str, job: ComparedJob) -> str:
    about = {"model": job.model, "vllm": job.vllm, "torch": job.torch, "device": job.device}
    said = ", ".join(f"{key} {value}" for key, value in about.items() if value is not None)
    return f"{name} {job.folder}: {job.num_rows:,} rows{'' if job.is_done else ', not done'}, {said}"


def _change_lines(report: DiffReport) -> Iterator[str]:
    found, only_a, only_b = report.changes, report.num_only_a, report.num_only_b
    alone = f"; {only_a:,} only in A, {only_b:,} only in B" if only_a or only_b else ""
    yield f"rows: {found.num_both:,} in both, by {report.key}{alone}"
    if found.num_other_prompts:
        yield f"prompts: {found.num_other_prompts:,} rows have other token ids: a changed template, tokenizer or input"
    if found.num_errors_only_a or found.num_errors_only_b:
        yield f"errors: {found.num_errors_only_b:,} rows only in B, {found.num_errors_only_a:,} only in A"


# The titles of a table's columns, with their widths.
_Head = tuple[tuple[str, int], ...]
# All columns together fit a terminal of 80.
_MEASURES: _Head = (("max |Δ|", 8), ("mean |Δ|", 8))
_SHARES: _Head = (("top-1", 7), ("rank corr.", 10))
_TOKEN_HEAD: _Head = (("tokens of", 9), ("positions", 9), *_MEASURES, ("max |Δ| of top k", 16), *_SHARES)
_ROW_HEAD: _Head = (("rows of", 13), ("positions", 9), ("numbers", 7), *_MEASURES, *_SHARES)
_VECTOR_HEAD: _Head = (
    ("vectors of", 16), ("positions", 9), ("numbers", 7), *_MEASURES, ("relative Δ", 10), ("min cosine", 10),
)  # fmt: skip


def verify_lines(report: VerifyReport) -> Iterator[str]:
    """The verdict, a table, and the worst rows. `raise_if_beyond` ends the command if the verdict is bad."""
    yield f"verdict: {report.verdict} the tolerance of {report.tolerance:g}"
    yield (
        f"{report.job}: {report.num_rows:,} of {report.num_stored:,} rows (--seed {report.seed}), engine in "
        f"{report.engine_dtype}, against {report.reference}"
    )
    yield from table_lines(report.deviations)
    for number, row in enumerate(report.worst):
        if isinstance(report.deviations[row.kind], LogprobDeviations):
            where = f"row {row.row_index}, sample {row.sample_index}, {row.kind} token {row.place}"
        else:
            where = f"row {row.row_index}, {row.kind}{'' if row.place is None else f' at token {row.place}'}"
        yield f"{'worst rows: ' if not number else '            '}{where}: {row.max_abs_delta:.2e}"
    if num_nan := sum(found.num_nan for found in report.deviations.values()):
        yield f"{num_nan:,} {_what(report)} are missing or NaN"


def raise_if_beyond(report: VerifyReport) -> None:
    """Raise VerificationFailed if a number is beyond the tolerance or missing."""
    if not report.is_within:
        raise VerificationFailed(
            f"the stored {_what(report)} are beyond the tolerance of {report.tolerance:g}; see the rows named above"
        )


def _what(report: VerifyReport) -> str:
    are_logprobs = all(isinstance(found, LogprobDeviations) for found in report.deviations.values())
    return "logprobs" if are_logprobs else "numbers"


def table_lines(deviations: Mapping[str, LogprobDeviations | VectorDeviations]) -> Iterator[str]:
    """A header, then a line for each kind of logprobs or each column of vectors."""
    last: _Head = ()
    for kind, found in deviations.items():
        if isinstance(found, LogprobDeviations):
            head, cells = _TOKEN_HEAD, _token_cells(found)
        elif found.has_direction:
            head, cells = _VECTOR_HEAD, _vector_cells(found)
        else:
            head, cells = _ROW_HEAD, _row_cells(found)
        if head != last:
            yield _line(head, [name for name, _ in head])
        last = head
        yield _line(head, [kind, f"{found.num_positions:,}", *cells])


def _token_cells(found: LogprobDeviations) -> list[str]:
    return [
        f"{found.max_abs_delta:.2e}",
        f"{found.sum_abs_delta / max(1, found.num_positions):.2e}",
        f"{found.max_abs_delta_top:.2e}" if found.num_values > found.num_positions else "-",
        *_shares(found),
    ]


def _row_cells(found: VectorDeviations) -> list[str]:
    return [*_deltas(found), *_shares(found)]


def _vector_cells(found: VectorDeviations) -> list[str]:
    return [*_deltas(found), f"{found.max_relative:.2e}", f"{found.min_cosine:.7f}"]


def _deltas(found: VectorDeviations) -> list[str]:
    mean = found.sum_abs_delta / max(1, found.num_values - found.num_nan)
    return [short_count(found.num_values), f"{found.max_abs_delta:.2e}", f"{mean:.2e}"]


def _shares(found: LogprobDeviations | VectorDeviations) -> list[str]:
    return [
        f"{found.num_agreeing / found.num_ranked:.2%}" if found.num_ranked else "-",
        f"{found.sum_correlation / found.num_correlated:.5f}" if found.num_correlated else "-",
    ]


def _line(head: _Head, cells: Sequence[str]) -> str:
    widths = [width for _, width in head]
    return "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])

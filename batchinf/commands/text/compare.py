"""The reports of `diff` and `verify` as text."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from batchinf.base.errors import VerificationFailed
from batchinf.base.text import clip, short_count
from batchinf.commands.deviations import Deviations, LogprobDeviations, VectorDeviations
from batchinf.commands.diff import ComparedJob, DiffReport, IdentityChange
from batchinf.commands.verify import VerifyReport

# A long setting is cut to so many characters, of which so many are equal text before the first difference.
_CHANGE_CHARS = 120
_SAME_CHARS = 24


def diff_lines(report: DiffReport) -> Iterator[str]:
    """How much has changed, then the two jobs, the other changes, and examples."""
    changes = report.changes
    yield from changes.own.headline(changes.num_changed, changes.num_both)
    yield from (_job_line(name, job) for name, job in (("A", report.a), ("B", report.b)))
    for change in report.identity_changes:
        yield _input_line(report.a, report.b) if change.name == "input" else change_line(change)
    yield from _change_lines(report)
    yield from changes.own.lines()
    for row in changes.examples:
        yield from changes.own.example_lines(report.key, row)
    if report.written_to is not None:
        yield f"{changes.num_both:,} rows in {report.written_to}"


def _input_line(a: ComparedJob, b: ComparedJob) -> str:
    """The inputs of two jobs that have other content. Their fingerprints would say nothing to a reader."""
    if a.input_path != b.input_path:
        return f"  input: {a.input_path} ({a.num_input_rows:,} rows) -> {b.input_path} ({b.num_input_rows:,} rows)"
    read = f"A has read {a.num_input_rows:,} rows of it, B {b.num_input_rows:,}"
    return f"  input: {a.input_path} has changed from one job to the other; {read}"


def change_line(change: IdentityChange) -> str:
    """A setting in A and in B. Of long values, the text around the first difference."""
    texts = [repr(change.a), repr(change.b)]
    start = 0
    if max(map(len, texts)) > _CHANGE_CHARS:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
        start = max(0, len(list(same)) - _SAME_CHARS)
    shown = (("…" if start else "") + clip(text[start:], _CHANGE_CHARS) for text in texts)
    return f"  {change.name}: {' -> '.join(shown)}"


def _job_line(name: str, job: ComparedJob) -> str:
    engine = {"model": job.model, "vllm": job.vllm, "torch": job.torch, "device": job.device}
    known = ", ".join(f"{key} {value}" for key, value in engine.items() if value is not None)
    return f"{name} {job.folder}: {job.num_rows:,} rows{'' if job.is_done else ', not done'}, {known}"


def _change_lines(report: DiffReport) -> Iterator[str]:
    changes = report.changes
    has_alone = report.num_only_a or report.num_only_b
    alone = f"; {report.num_only_a:,} only in A, {report.num_only_b:,} only in B" if has_alone else ""
    yield f"rows: {changes.num_both:,} in both, by {report.key}{alone}"
    if num := changes.num_other_prompts:
        yield f"prompts: {num:,} rows have other token ids: a changed template, tokenizer or input"
    if changes.num_errors_only_a or changes.num_errors_only_b:
        yield f"errors: {changes.num_errors_only_b:,} rows only in B, {changes.num_errors_only_a:,} only in A"


# The titles of a table's columns, with their widths. All columns together fit a terminal of 80.
_Head = tuple[tuple[str, int], ...]
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
    if num_nan := sum(deviations.num_nan for deviations in report.deviations.values()):
        yield f"{num_nan:,} {_what(report)} are missing or NaN"


def raise_if_beyond(report: VerifyReport) -> None:
    """Raise VerificationFailed if a number is beyond the tolerance or missing."""
    if not report.is_within:
        raise VerificationFailed(
            f"the stored {_what(report)} are beyond the tolerance of {report.tolerance:g}; see the rows named above"
        )


def _what(report: VerifyReport) -> str:
    are_logprobs = all(isinstance(kind, LogprobDeviations) for kind in report.deviations.values())
    return "logprobs" if are_logprobs else "numbers"


def table_lines(by_kind: Mapping[str, LogprobDeviations | VectorDeviations]) -> Iterator[str]:
    """A header, then a line for each kind of logprobs or each column of vectors."""
    last: _Head = ()
    for kind, deviations in by_kind.items():
        head, cells = _head_and_cells(deviations)
        if head != last:
            yield _line(head, [name for name, _ in head])
        last = head
        yield _line(head, [kind, f"{deviations.num_positions:,}", *cells])


def _head_and_cells(deviations: LogprobDeviations | VectorDeviations) -> tuple[_Head, list[str]]:
    shares = [
        f"{deviations.num_agreeing / deviations.num_ranked:.2%}" if deviations.num_ranked else "-",
        f"{deviations.sum_correlation / deviations.num_correlated:.5f}" if deviations.num_correlated else "-",
    ]
    if isinstance(deviations, LogprobDeviations):
        has_top = deviations.num_values > deviations.num_positions
        top = f"{deviations.max_abs_delta_top:.2e}" if has_top else "-"
        return _TOKEN_HEAD, [*_deltas(deviations, deviations.num_positions), top, *shares]
    cells = [short_count(deviations.num_values), *_deltas(deviations, deviations.num_values - deviations.num_nan)]
    if deviations.has_direction:
        return _VECTOR_HEAD, [*cells, f"{deviations.max_relative:.2e}", f"{deviations.min_cosine:.7f}"]
    return _ROW_HEAD, [*cells, *shares]


def _deltas(deviations: Deviations, num_compared: int) -> list[str]:
    return [f"{deviations.max_abs_delta:.2e}", f"{deviations.sum_abs_delta / max(1, num_compared):.2e}"]


def _line(head: _Head, cells: Sequence[str]) -> str:
    widths = [width for _, width in head]
    return "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])

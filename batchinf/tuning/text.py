"""The result of `batchinf tune` as text, and as a chart."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from batchinf.base.chart import bars, svg_of
from batchinf.base.text import clip, short_count, time_taken
from batchinf.tuning.search import SearchResult, gain_of
from batchinf.tuning.trial import TuneTrial


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The result of `batchinf tune` for one spec."""

    spec: str
    """Path of the spec's file."""
    folder: str
    """Holds the trials and `tune.svg`."""
    found: SearchResult
    spent_s: float
    """Time of all trials, also of earlier calls."""
    written: bool
    """The best settings are in the spec's file now."""
    warning: str | None
    """Why the trials say little; None if they say enough."""


def trial_line(trial: TuneTrial) -> str:
    """One trial in a line."""
    each = f", {short_count(trial.tokens_per_s / trial.num_devices)} a GPU" if trial.num_devices > 1 else ""
    rates = f"{short_count(trial.tokens_per_s)} tokens/s{each}"
    return f"{trial.candidate.name}: {clip(trial.error, 200) if trial.error else rates}"


def tune_lines(report: TuneReport) -> Iterator[str]:
    """The table of the trials, the winner, and what to do."""
    result = report.found
    yield from _table(result)
    yield ""
    if result.best is result.base:
        yield f"best: the spec as it is; no settings were 2 % faster on {result.base.num_rows:,} rows"
    else:
        name = result.best.candidate.name
        yield f"best: {name}: {result.gain:.2f} x the spec as it is, on {result.best.num_rows:,} rows"
    if report.warning is not None:
        yield report.warning
    if result.is_cut:
        yield "the budget ended before the last comparison; run the command again with a larger --budget to go on"
    if result.num_left_out:
        yield f"{result.num_left_out:,} more candidates had no room in the budget"
    yield f"trials took {time_taken(report.spent_s)}; they and the plot tune.svg are in {report.folder}"
    run = f"batchinf run {shlex.quote(report.spec)}"
    if report.written:
        yield f"{report.spec} has these settings now; next: {run}"
    elif result.best is not result.base:
        changes = result.best.candidate.settings.items()
        options = " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in changes)
        yield f"next: {run} {options}, or put them into the spec with batchinf tune --write"


def _table(result: SearchResult) -> Iterator[str]:
    bases = {trial.num_rows: trial for trial in result.trials if not trial.candidate.settings}
    yield f"{'rows':>8} {'tokens/s':>9} {'a GPU':>9} {'gain':>5}  settings"
    for trial in sorted(result.trials, key=lambda trial: (trial.num_rows, -trial.rows_per_s)):
        if trial.error:
            cells = ["-", "-", "-"]
        else:
            each = short_count(trial.tokens_per_s / trial.num_devices) if trial.num_devices else "-"
            gain = gain_of(trial, bases[trial.num_rows], result.num_rows)
            cells = [short_count(trial.tokens_per_s), each, f"{gain:.2f}"]
        error = f": {clip(trial.error, 120)}" if trial.error else ""
        yield f"{trial.num_rows:>8,} {cells[0]:>9} {cells[1]:>9} {cells[2]:>5}  {trial.candidate.name}{error}"


def chart(result: SearchResult) -> str:
    """The trials as SVG: a bar for each candidate, a panel for each number of rows."""
    values = [
        {"settings": clip(trial.candidate.name, 90), "rows": f"{trial.num_rows:,} rows", "tokens/s": trial.tokens_per_s}
        for trial in result.trials
        if not trial.error
    ]
    spec = {
        "data": {"values": values},
        "facet": {"row": {"field": "rows", "title": None, "sort": None}},
        "resolve": {"scale": {"y": "independent"}},
        "spec": bars("tokens/s", "settings", sort="-x"),
    }
    return svg_of(spec)

"""The result of `batchinf tune` as text, and as a chart."""

from collections.abc import Iterator
from dataclasses import dataclass

from batchinf.base.chart import svg_of
from batchinf.base.text import clip, counted, short_count, time_taken
from batchinf.tuning.search import SearchResult, gain_of
from batchinf.tuning.trial import TuneTrial


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What was found for a spec. folder: holds the trials and `tune.svg`. written: the spec has the settings now.

    warning: why the trials say little; None if they do not.
    """

    spec: str
    folder: str
    found: SearchResult
    spent_s: float
    written: bool
    warning: str | None


def few_rows_warning(num_rows: int, at_once: int, *, is_all: bool) -> str:
    """A line about trials of so few rows. at_once: requests that the engines run. is_all: the input has no more."""
    about = "a larger input" if is_all else "the whole input; give more --rows"
    return (
        f"warning: with {counted(num_rows, 'row')} the engines are never full, as they run up to {at_once:,} requests "
        f"at once; so the trials say little about {about}"
    )


def trial_line(trial: TuneTrial) -> str:
    """One trial in a line."""
    if trial.error:
        return f"{trial.candidate.name}: {clip(trial.error, 200)}"
    return f"{trial.candidate.name}: {_rates(trial)}"


def _rates(trial: TuneTrial) -> str:
    each = f", {short_count(trial.tokens_per_s / trial.num_devices)} a GPU" if trial.num_devices > 1 else ""
    return f"{short_count(trial.tokens_per_s)} tokens/s{each}"


def tune_lines(report: TuneReport) -> Iterator[str]:
    """The table of the trials, the winner, and what to do."""
    found = report.found
    bases = {trial.num_rows: trial for trial in found.trials if not trial.candidate.settings}
    yield f"{'rows':>8} {'tokens/s':>9} {'a GPU':>9} {'gain':>5}  settings"
    for trial in sorted(found.trials, key=lambda it: (it.num_rows, -it.rows_per_s)):
        if trial.error:
            yield f"{trial.num_rows:>8,} {'-':>9} {'-':>9} {'-':>5}  {trial.candidate.name}: {clip(trial.error, 120)}"
            continue
        each = short_count(trial.tokens_per_s / trial.num_devices) if trial.num_devices else "-"
        gain = gain_of(trial, bases[trial.num_rows], found.num_rows)
        yield (
            f"{trial.num_rows:>8,} {short_count(trial.tokens_per_s):>9} {each:>9} {gain:>5.2f}  {trial.candidate.name}"
        )
    yield ""
    if found.best is found.base:
        yield f"best: the spec as it is; no settings were 2 % faster on {found.base.num_rows:,} rows"
    else:
        best = found.best
        yield f"best: {best.candidate.name}: {found.gain:.2f} x the spec as it is, on {best.num_rows:,} rows"
    if report.warning is not None:
        yield report.warning
    if found.is_cut:
        yield "the budget ended before the last comparison; run the command again with a larger --budget to go on"
    if found.num_left_out:
        yield f"{found.num_left_out:,} more candidates had no room in the budget"
    yield f"trials took {time_taken(report.spent_s)}; they and the plot tune.svg are in {report.folder}"
    if report.written:
        yield f"{report.spec} has these settings now; next: batchinf run {report.spec}"
    elif found.best is not found.base:
        words = " ".join(f"--set {name}={value}" for name, value in found.best.candidate.settings.items())
        yield f"next: batchinf run {report.spec} {words}, or put them into the spec with batchinf tune --write"


def chart(found: SearchResult) -> str:
    """The trials as SVG: a bar for each candidate, a panel for each number of rows."""
    values = [
        {"settings": clip(trial.candidate.name, 90), "rows": f"{trial.num_rows:,} rows", "tokens/s": trial.tokens_per_s}
        for trial in found.trials
        if not trial.error
    ]
    spec = {
        "data": {"values": values},
        "facet": {"row": {"field": "rows", "title": None, "sort": None}},
        "resolve": {"scale": {"y": "independent"}},
        "spec": {
            "width": 420,
            "mark": "bar",
            "encoding": {
                "y": {"field": "settings", "type": "nominal", "sort": "-x", "title": None, "axis": {"labelLimit": 480}},
                "x": {"field": "tokens/s", "type": "quantitative"},
            },
        },
    }
    return svg_of(spec)

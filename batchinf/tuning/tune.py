"""Tunes one spec: runs its candidates on the same rows within a budget, and shows which is the fastest."""

import pathlib
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from batchinf.base.errors import SpecError, UserError
from batchinf.base.text import clip, counted, duration, short_count, time_taken
from batchinf.fleet.backend import Backend
from batchinf.planning.lengths import lengths_of, opened
from batchinf.spec.file import SpecFile
from batchinf.tuning.candidates import (
    Settings,
    candidates,
    kept_settings,
    left_open,
    name_of,
    named_by_user,
    requests_at_once,
)
from batchinf.tuning.trial import RunJob, TuneTrial, run_trial

# Requests of a trial for each that the engines run at once: with fewer, the end of the trial decides, where the batches
# are no longer full.
_REQUESTS_PER_PLACE = 4
_LEAST_ROWS = 1000
_SEVERAL = 1.3  # a sample's share is approximate
# Settings that gain less are not worth a longer spec: two equal trials differ by as much.
_LEAST_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The result of `batchinf tune` for one spec."""

    spec: str
    """Path of the spec's file."""
    num_rows: int
    """Rows of the input."""
    trials: tuple[TuneTrial, ...]
    """The first is that of the spec as it is."""
    best: TuneTrial
    """The first one if no settings gain 2 %."""
    num_left_out: int
    """Candidates for which the budget has no time."""
    warning: str | None
    """Why the trials say little; None if they say enough."""

    @property
    def gain(self) -> float:
        """How many times as fast the whole input is done as by the spec as it is."""
        return self.best.gain(self.trials[0], self.num_rows)

    def lines(self) -> Iterator[str]:
        """The table of the trials, the winner, and what to do."""
        yield f"{'tokens/s':>9} {'a GPU':>9} {'gain':>5}  settings"
        for trial in sorted(self.trials, key=lambda trial: -trial.rows_per_s):
            each = short_count(trial.tokens_per_s / trial.num_devices) if trial.num_devices else "-"
            cells = [short_count(trial.tokens_per_s), each, f"{trial.gain(self.trials[0], self.num_rows):.2f}"]
            rate, each, gain = ["-"] * 3 if trial.error else cells
            error = f": {clip(trial.error, 120)}" if trial.error else ""
            yield f"{rate:>9} {each:>9} {gain:>5}  {name_of(trial.settings)}{error}"
        settings = self.best.settings
        on = f"on {counted(self.best.num_rows, 'row')}"
        yield ""
        if settings:
            yield f"best: {name_of(settings)}: {self.gain:.2f} x the spec as it is, {on}"
        else:
            yield f"best: the spec as it is; no settings were 2 % faster {on}"
        if self.warning is not None:
            yield self.warning
        if self.num_left_out:
            yield f"{self.num_left_out:,} more candidates had no room in the budget; a larger --budget tries them"
        yield f"trials took {time_taken(sum(trial.start_s + trial.work_s for trial in self.trials))}"
        if settings:
            options = " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
            yield f"next: batchinf run {shlex.quote(self.spec)} {options}, or put these fields into the spec"


def tune_job(
    file: SpecFile,
    backend: Backend,
    *,
    run: RunJob,
    say: Callable[[str], None],
    budget_s: float,
    num_rows: int | None,
    tries: Sequence[str],
    out: str | None,
) -> TuneReport:
    """Find the fastest settings for a spec. run: runs the spec with more overrides.

    budget_s: time of all trials. num_rows: rows of a trial; None: from the batch sizes. tries: texts of `--try`; empty:
    try what the spec leaves open. out: folder of the running trial; None: beside the job's output.

    Raises UserError if the spec as it is cannot run, or not within the budget.
    """
    if out is None and file.spec.output.is_bucket:
        words = "batchinf tune does not work with a bucket yet; give the trials a folder here with --out"
        raise file.error("output.path", words)
    dimensions = [named_by_user(file.spec, text) for text in tries] or left_open(file, backend)
    if not dimensions:
        raise SpecError(f"{file.path}: the spec leaves nothing open to tune; name values, as in "
                        "--try engine.max_num_seqs=256,512")  # fmt: skip
    tried = list(candidates(dimensions))
    most_rows, sample_rows, warning = _sample_of(file, requests_at_once(file, backend, tried), num_rows)
    if warning is not None:
        say(warning)
    share = _SEVERAL * sample_rows / most_rows
    sample = {"input.limit": sample_rows, **({"input.sample": share} if share < 1 else {})}
    folder = pathlib.Path(out or f"{file.spec.output.path.rstrip('/')}-tune")

    def measure(settings: Settings, label: str) -> TuneTrial:
        say(f"{label}: {name_of(settings)}, {sample_rows:,} rows")
        trial = run_trial(settings, {**kept_settings(file, backend, settings), **sample}, folder=folder, run=run)
        if trial.error and not settings:
            raise UserError(f"the spec as it is cannot run: {trial.error}")
        say(f"  {clip(trial.error, 200) or f'{short_count(trial.tokens_per_s)} tokens/s'}")
        return trial

    trials = search(tried, budget_s, measure)
    if len(trials) == 1:
        raise UserError(
            f"one trial of {sample_rows:,} rows took {time_taken(trials[0].start_s + trials[0].work_s)}, so that the "
            f"budget of {duration(budget_s)} has no time for a second one; give a larger --budget or fewer --rows"
        )
    best = best_of(trials, most_rows)
    return TuneReport(file.path, most_rows, tuple(trials), best, num_left_out=len(tried) - len(trials), warning=warning)


def search(
    tried: Sequence[Settings], budget_s: float, measure: Callable[[Settings, str], TuneTrial]
) -> list[TuneTrial]:
    """Run settings, of which the first are those of the spec as it is, while the budget has time for one more.

    measure: runs one; its last argument tells the user which trial this is.
    """
    trials: list[TuneTrial] = []
    for number, settings in enumerate(tried, 1):
        if trials and sum(trial.start_s + trial.work_s for trial in trials) + _expected_s(trials) > budget_s:
            break
        trials.append(measure(settings, f"trial {number} of at most {len(tried)}"))
    return trials


def _expected_s(trials: Sequence[TuneTrial]) -> float:
    """The time of a trial. The first trial's start counts only without others: it compiles what later ones load."""
    starts = [trial.start_s for trial in trials[1:] if not trial.error]
    return (statistics.median(starts) if starts else trials[0].start_s) + trials[0].work_s


def best_of(trials: Sequence[TuneTrial], num_rows: int) -> TuneTrial:
    """The fastest trial for an input of `num_rows` rows; the first one if none gains 2 % over it."""
    best = max(trials, key=lambda trial: trial.gain(trials[0], num_rows))
    return best if best.gain(trials[0], num_rows) >= _LEAST_GAIN else trials[0]


def _sample_of(file: SpecFile, at_once: int, num_rows: int | None) -> tuple[int, int, str | None]:
    """Rows of the input and of a trial, and a warning if these cannot fill the engines. Raises UserError."""
    with opened(file) as opened_job:
        assert opened_job is not None
        job, num_copied = opened_job
        lengths = lengths_of(job, file, num_copied)
    most = lengths.num_rows
    if not most:
        raise UserError(f"{file.path}: the input has no rows to tune with")
    enough = max(_LEAST_ROWS, round(_REQUESTS_PER_PLACE * at_once / max(1.0, lengths.requests_per_row)))
    number = min(num_rows or enough, most)
    if number * lengths.requests_per_row >= at_once:
        return most, number, None
    about = "a larger input" if number == most else "the whole input; give more --rows"
    return most, number, (
        f"warning: with {counted(number, 'row')} the engines are never full, as they run up to {at_once:,} requests at "
        f"once; so the trials say little about {about}"
    )  # fmt: skip

"""Tunes one spec: makes its candidates, runs the search within a budget, and keeps what it finds in a folder."""

import json
import os
import pathlib
import re
from collections.abc import Callable, Sequence

from batchinf.base.errors import SpecError, UserError
from batchinf.base.text import counted, duration, time_taken
from batchinf.fleet.backend import Backend
from batchinf.planning.lengths import Lengths, lengths_of, opened
from batchinf.spec.file import SpecFile, read_spec
from batchinf.spec.job import fingerprint
from batchinf.tuning.candidates import (
    Candidate,
    Settings,
    candidates,
    kept_settings,
    left_open,
    named_by_user,
    requests_at_once,
)
from batchinf.tuning.search import search
from batchinf.tuning.text import TuneReport, chart, trial_line
from batchinf.tuning.trial import RunJob, TrialRecord, TuneTrial, run_trial

# Requests of a first trial for each that the engines run at once: with fewer, the end of the trial decides, where the
# batches are no longer full.
_REQUESTS_PER_PLACE = 4
_LEAST_ROWS = 1000
_SEVERAL = 1.3  # a sample's share is approximate


def tune_job(
    file: SpecFile,
    backend: Backend,
    *,
    run: RunJob,
    say: Callable[[str], None],
    budget_s: float,
    first_rows: int | None,
    tries: Sequence[str],
    out: str | None,
    writes: bool,
) -> TuneReport:
    """Find the fastest settings for a spec. run: runs the spec with more overrides. Trials of an earlier call count.

    budget_s: time of all trials. first_rows: rows of the first round; None: from the batch sizes. tries: texts of
    `--try`; empty: try what the spec leaves open. out: folder of the trials; None: beside the job's output. writes: put
    the winner into the spec.

    Raises UserError if the spec as it is cannot run, or not within the budget.
    """
    if out is None:
        file.check_folder("tune", "give the trials a folder here with --out")
    if writes and not os.path.isfile(file.path):
        raise UserError(f"--write: {file.path} is not a file; a spec must be a YAML file to be written to")
    tried = _tried(file, backend, tries)
    at_once = requests_at_once(file, backend, tried)
    lengths = _lengths(file)
    most_rows = lengths.num_rows
    enough_rows = max(_LEAST_ROWS, round(_REQUESTS_PER_PLACE * at_once / max(1.0, lengths.requests_per_row)))
    num_rows = min(first_rows or enough_rows, most_rows)
    warning = None
    if num_rows * lengths.requests_per_row < at_once:
        warning = _never_full(num_rows, most_rows, at_once)
        say(warning)
    folder = pathlib.Path(out or f"{file.spec.output.path.rstrip('/')}-tune")
    spec = file.spec.model_dump(mode="json", exclude={"output"})
    record = TrialRecord(folder, fingerprint({"spec": spec, "rows": most_rows}))

    used_s = 0.0  # by trials that this search has asked for, in an earlier call or now

    def measure(candidate: Candidate, num_rows: int, label: str) -> TuneTrial:
        nonlocal used_s
        trial = record.find(candidate, num_rows)
        if trial is None:
            say(f"{label}: {candidate.name}, {num_rows:,} rows")
            share = min(1.0, _SEVERAL * num_rows / most_rows)
            trial = run_trial(
                candidate,
                num_rows,
                kept=kept_settings(file, backend, candidate),
                share=share if share < 1 else None,
                folder=folder,
                run=run,
            )
            if trial.error and not candidate.settings:
                raise UserError(f"the spec as it is cannot run: {trial.error}")
            record.add(trial)
        used_s += trial.start_s + trial.work_s
        say(f"  {trial_line(trial)}")
        return trial

    result = search(tried, num_rows=num_rows, most_rows=most_rows, left_s=lambda: budget_s - used_s, measure=measure)
    if len(result.trials) == 1:
        raise UserError(
            f"one trial of {result.base.num_rows:,} rows took {time_taken(used_s)}, so that the budget of "
            f"{duration(budget_s)} has no time for a second one; give a larger --budget or fewer --rows"
        )
    is_written = writes and bool(result.best.candidate.settings)
    if is_written:
        write_settings(file.path, result.best.candidate.settings)
    (folder / "tune.svg").write_text(chart(result), encoding="utf-8")
    return TuneReport(
        spec=file.path,
        folder=os.fspath(folder),
        found=result,
        spent_s=record.spent_s,
        written=is_written,
        warning=warning,
    )


def _tried(file: SpecFile, backend: Backend, tries: Sequence[str]) -> list[Candidate]:
    """What is tried: the values that the user names, else those that the spec leaves open. Raises SpecError."""
    dimensions = [named_by_user(file.spec, text) for text in tries] or left_open(file, backend)
    if not dimensions:
        raise SpecError(f"{file.path}: the spec leaves nothing open to tune; name values, as in "
                        "--try engine.max_num_seqs=256,512")  # fmt: skip
    return list(candidates(dimensions))


def _never_full(num_rows: int, most_rows: int, at_once: int) -> str:
    about = "a larger input" if num_rows == most_rows else "the whole input; give more --rows"
    return (
        f"warning: with {counted(num_rows, 'row')} the engines are never full, as they run up to {at_once:,} "
        f"requests at once; so the trials say little about {about}"
    )


def _lengths(file: SpecFile) -> Lengths:
    with opened(file) as opened_job:
        assert opened_job is not None
        job, num_rows = opened_job
        lengths = lengths_of(job, file, num_rows)
    if not lengths.num_rows:
        raise UserError(f"{file.path}: the input has no rows to tune with")
    return lengths


def write_settings(path: str, settings: Settings) -> None:
    """Add the settings to a spec's file. Raises UserError, which names the lines to add by hand, if that fails."""
    file = pathlib.Path(os.path.realpath(path))
    wanted = read_spec(path, settings).spec
    text = file.read_text(encoding="utf-8")
    for name, value in settings.items():
        section, _, field = name.partition(".")
        text = _added(text, section, field, json.dumps(value))
    staged = file.with_name(f".{file.name}.tune")
    try:
        staged.write_text(text, encoding="utf-8")
        os.chmod(staged, file.stat().st_mode & 0o777)
        try:
            is_same = read_spec(staged).spec == wanted
        except SpecError:
            is_same = False
        if not is_same:
            lines = "; ".join(f"{name}: {json.dumps(value)}" for name, value in settings.items())
            raise UserError(f"{path}: the settings cannot be added by --write; add them yourself: {lines}")
        os.replace(staged, file)
    finally:
        staged.unlink(missing_ok=True)


def _added(text: str, section: str, field: str, value: str) -> str:
    """The text with the field as the first of its section, or with a new section at its end."""
    heading = re.search(rf"^{section}:[ \t]*(#.*)?$", text, re.MULTILINE)
    if heading is None:
        return f"{text.rstrip()}\n\n{section}:\n  {field}: {value}\n"
    below = re.search(r"^([ \t]+)[^\s#]", text[heading.end() :], re.MULTILINE)
    indent = "  " if below is None else below[1]
    return f"{text[: heading.end()]}\n{indent}{field}: {value}{text[heading.end() :]}"

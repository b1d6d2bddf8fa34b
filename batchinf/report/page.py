"""Makes the report of a job: collects the figures from its files and fills the page `page.html`."""

import datetime
import functools
import os
import pathlib
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import OutputError
from batchinf.base.slices import JobFolder, job_folders
from batchinf.base.storage import PAGE_MARK, Folder, reason, write_named
from batchinf.base.text import clip, counted, duration, short_count, size_text, time_taken
from batchinf.commands.status import job_status, read_job
from batchinf.commands.text.status import JobTotals, StatusReport
from batchinf.fleet.status import read_looks
from batchinf.manifest.state import State
from batchinf.manifest.versions import stored_spec
from batchinf.report import charts
from batchinf.report.rows import RowFigures, row_figures
from batchinf.report.template import template
from batchinf.report.timeline import PHASES, Timeline, timeline
from batchinf.tasks.registry import task_named, task_of
from batchinf.version import __version__

REPORT_FILE = "report.html"
_SPEC_CHARS, _LINE_CHARS = 100_000, 400
_SETTINGS = ("dtype", "tensor_parallel_size", "pipeline_parallel_size", "attention_backend", "kv_cache_size_tokens")


def write_report(out: str, file: str | None = None) -> pathlib.Path:
    """Write the report of a job, which may be live, dead or done. Returns the path of the file.

    file: None means `report.html` in the output folder. Raises OutputError without a job, or if another file is there.
    """
    html = report_page(out).encode()
    path = pathlib.Path(out, REPORT_FILE) if file is None else pathlib.Path(file)
    try:
        write_named(path, html, b"" if file is None else PAGE_MARK)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {reason(error)}; name another file with -o") from error
    return path


@dataclass(frozen=True, slots=True)
class Card:
    """A figure of the summary. note: a few words below it."""

    name: str
    value: str
    note: str = ""


def report_page(out: str) -> str:
    """The page as HTML."""
    report = job_status(out)
    found = [(job, read_job(job.folder)) for job in job_folders(out)]
    begun = [(job, state) for job, state in found if state is not None]
    if not begun or report.totals is None:
        raise OutputError(f"{out}: none of the slices has begun, so there is nothing to report")
    history = timeline(
        {str(job.slice or ""): (functools.partial(read_looks, job.folder), list(state.events)) for job, state in begun}
    )
    rows = row_figures([(job.folder, state, task_of(stored_spec(state.header.spec))) for job, state in begun])
    return template("page.html").render(
        title=clip(os.path.basename(os.path.normpath(out)), 80),
        folder=clip(os.path.abspath(out), 300),
        state=_state(report),
        made_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        version=__version__,
        report=report,
        totals=report.totals,
        cards=_cards(report, report.totals, history, rows),
        timeline=history,
        replicas=_replicas(history),
        runs=[run for job, state in begun if (run := _run_speed(job, state)) is not None],
        phases=PHASES,
        phase_colors=charts.PHASE_COLORS,
        rows=rows,
        charts=charts,
        spec=_spec_text(begun[0][0].folder),
        platforms=_platforms([state for _, state in begun]),
        duration=duration,
        clip=clip,
    )


def _state(report: StatusReport) -> str:
    """`done`, `running` and so on; of a job in slices the states of all."""
    states = [job.activity for job in report.jobs]
    if report.num_slices is None:
        return states[0]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _cards(report: StatusReport, totals: JobTotals, history: Timeline | None, rows: RowFigures) -> list[Card]:
    live = [job.progress for job in report.jobs if job.progress is not None]
    num_done = max(rows.num_rows, totals.num_rows_committed)
    num_errors = max(totals.num_errors, sum(group.num_rows for group in rows.errors))
    # Before the first part is committed, both are 0 and not shown.
    output, prompt = totals.num_output_tokens, totals.num_prompt_tokens
    work_s = history.work_s if history is not None else 0.0
    cards = [
        Card("output rows", f"{num_done:,}", f"of {totals.num_rows:,} ({num_done / max(1, totals.num_rows):.1%})"),
        Card("errors", f"{num_errors:,}", f"{num_errors / max(1, num_done):.2%} of these rows"),
        *([Card("output tokens", short_count(output), f"{output:,} in parts")] if output else []),
        *([Card("prompt tokens", short_count(prompt), f"{prompt:,} in parts")] if prompt else []),
    ]
    if history is not None:
        cards += _speed_cards(report, history)
    if history is not None and work_s:
        name, unit = ("output_tokens_per_s", "output tokens/s") if output else ("rows_per_s", "output rows/s")
        cards.append(Card(f"mean {unit}", short_count(history.mean(name)), "with the start of the engines"))
        cards.append(Card("time of work", time_taken(work_s), counted(totals.num_starts, "start")))
    cards.append(Card("device time", duration(totals.device_s), "of replicas that have ended"))
    cards.append(
        Card("output", size_text(totals.num_bytes), f"{totals.num_parts_committed:,} of {totals.num_parts:,} parts")
    )
    figures = task_named(totals.task).count_figures(totals.num_rows_committed, totals.task_counts)
    cards.extend(Card(*figure) for figure in figures)
    for progress in live[:1] if len(live) == 1 else ():
        if progress.left_s is not None:
            cards.append(Card("time left", duration(progress.left_s), "when the report was made"))
    return cards


def _speed_cards(report: StatusReport, history: Timeline) -> list[Card]:
    """Tokens a second over all runs, without the starts of the engines; none before the first token."""
    prompt, output = (history.mean_of_engines(f"{name}_tokens_per_s") for name in ("prompt", "output"))
    work_s, runs = history.engines_s, f" in {history.num_runs:,} runs"
    speed = report.jobs[0].speed
    # Of the only run, as in its closing lines: these do not depend on samples.
    if history.num_runs <= 1 and len(report.jobs) == 1 and speed is not None:
        prompt, output, work_s = speed.prompt_tokens_per_s, speed.output_tokens_per_s, speed.work_s
    name, rate = ("output", output) if output else ("prompt", prompt)
    note = f"while the engines worked ({time_taken(work_s)}{runs if history.num_runs > 1 else ''})"
    return [Card(f"{name} tokens/s", short_count(rate), note)] if rate else []


@dataclass(frozen=True, slots=True)
class RunSpeed:
    """What a run was predicted to do, and what it did. name: of the slice, if there are slices.

    rows: each with its name and both values; a value is None if it is unknown. limit: what limited the run, in words.
    """

    name: str
    rows: tuple[tuple[str, float | None, float | None], ...]
    limit: str


# In the events `expected_speed`, of a run that has begun, and `speed`, of one that has ended.
_RATES = {
    "prompt_tokens_per_s": "prompt tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "work_s": "seconds of work",
    "cache_tokens": "tokens of cache",
}


def _run_speed(job: JobFolder, state: State) -> RunSpeed | None:
    """Of the last run that was predicted; None if none was."""
    measured = state.speed if state.is_done else None
    expected = state.expected_speed if measured is None else measured.expected
    if expected is None:
        return None
    rows = tuple(
        (name, getattr(expected, field), None if measured is None else getattr(measured, field))
        for field, name in _RATES.items()
    )
    found = None if measured is None else measured.bottleneck
    limit = expected.limited_by if found is None else f"{found.reason}; to try: {found.change}"
    return RunSpeed(str(job.slice or ""), rows, clip(limit, 400))


def _replicas(history: Timeline | None) -> list[tuple[str, dict[Any, float], float]]:
    """Each replica with its seconds in each phase, and their sum without those in which it was stopped."""
    if history is None:
        return []
    found = [(replica, history.seconds(replica)) for replica in history.replicas]
    return [(replica, seconds, max(sum(seconds.values()) - seconds["stopped"], 1e-9)) for replica, seconds in found]


def _spec_text(folder: Folder) -> str:
    try:
        text = folder.read("job.yaml").decode(errors="replace")
    except OSError:
        return "job.yaml is missing"
    return "\n".join(clip(line, _LINE_CHARS) for line in text[:_SPEC_CHARS].splitlines())


def _platforms(states: list[State]) -> list[dict[str, str]]:
    """The devices, versions and settings of the engines, each kind once."""
    found: dict[str, dict[str, str]] = {}
    for state in states:
        for event in [*state.kept.values(), *state.events]:
            if event.name == "ready":
                versions, settings = event.fields.get("versions", {}), event.fields.get("settings", {})
                own = {"device": event.fields.get("device", ""), **versions}
                own |= {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}
                shown = {clip(str(name), 60): clip(str(value), 200) for name, value in own.items()}
                found[repr(shown)] = shown
    return list(found.values())

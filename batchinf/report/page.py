"""Makes the report of a job: collects the figures from its files and fills the page `page.html`.

The page has no scripts or connections.
"""

import functools
import importlib.resources
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from batchinf.base.errors import BatchinfError, OutputError, UserError
from batchinf.base.paths import is_bucket
from batchinf.base.storage import PAGE_MARK, Folder, has_mark, naming_option, refuse_foreign, write_named
from batchinf.base.text import clip, counted, duration, one_line, plain, short_count, size_text, time_taken, utc_now
from batchinf.commands.status import JobTotals, StatusReport, job_status
from batchinf.commands.whole_row import build_again
from batchinf.fleet.status import read_looks
from batchinf.job.pictures import Picture, Pictures
from batchinf.manifest.events import EVENTS_FILE, read_events
from batchinf.manifest.lines import Platform
from batchinf.manifest.look import Look
from batchinf.manifest.names import TELEMETRY_FOLDER
from batchinf.manifest.state import State
from batchinf.prompts.encoder import show
from batchinf.report import charts
from batchinf.report.rows import RowFigures, row_figures
from batchinf.report.samples import Samples, sample_groups
from batchinf.report.timeline import PHASES, Phase, Timeline, timeline
from batchinf.results import Results
from batchinf.tasks.registry import TASKS
from batchinf.version import __version__

REPORT_FILE = "report.html"
_SPEC_CHARS = 100_000
_LINE_CHARS = 400
# Of each sample row.
_PICTURES_OF_ROW = 4
_PROMPT_TOKENS = 200
_PROMPT_CHARS = 300
_SETTINGS = ("dtype", "tensor_parallel_size", "pipeline_parallel_size", "attention_backend", "kv_cache_size_tokens")


def write_report(out: str, file: str | None = None, price: float | None = None) -> pathlib.Path:
    """Write the report of a job, which may be live, dead or done. Returns the path of the file.

    file: None means `report.html` in the output folder. price: see `job_status`. Raises OutputError without a job, or
    if another file is there.
    """
    if file is not None and file.endswith(".md"):
        raise UserError(f"-o: got {file}; the report is HTML: name it report.html, or take `batchinf status --json`")
    if file is None and is_bucket(out):
        raise UserError(f"-o: missing; {out} is in a bucket, so say which file to write, such as -o {REPORT_FILE}")
    path = pathlib.Path(out, REPORT_FILE) if file is None else pathlib.Path(file)
    mark = b"" if file is None else PAGE_MARK
    with naming_option(path, "-o"):
        refuse_foreign(path, lambda there: has_mark(there, mark))  # before the charts are drawn
    text = report_page(out, price).encode()
    with naming_option(path, "-o"):
        write_named(path, text, mark)
    return path


@dataclass(frozen=True, slots=True)
class Card:
    """A figure of the summary."""

    name: str
    value: str
    note: str = ""
    """A few words below the value."""


def report_page(out: str, price: float | None = None) -> str:
    """The page as HTML."""
    facts = _facts(out, price)
    inputs = _inputs(out, facts["rows"].samples)
    # In all values, marks of HTML, control characters and marks of direction are escaped.
    environment = jinja2.Environment(
        autoescape=True,
        finalize=lambda value: plain(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=_number, utc=lambda at: f"{at[:19].replace('T', ' ')} UTC")
    text = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    page = environment.from_string(text)
    return page.render(**facts, inputs=inputs, phase_colors=charts.PHASE_COLORS, charts=charts)


def _number(number: float) -> str:
    return f"{number:,.0f}" if isinstance(number, int) or abs(number) >= 1000 else f"{number:.4g}"


def _facts(out: str, price: float | None) -> dict[str, Any]:
    """What the templates show. Raises OutputError without a job that has begun."""
    report = job_status(out, price)
    look = Look(out)
    begun = look.begun()
    totals = report.totals
    if not begun or totals is None:
        raise OutputError(f"{out}: none of the slices has begun, so there is nothing to report")
    for job, _ in begun:
        look.copy_folder(job, TELEMETRY_FOLDER)
        look.copy_file(job, EVENTS_FILE)
    jobs = [(str(job.slice or ""), job) for job, _ in begun]
    history = timeline({name: (functools.partial(read_looks, folder), read_events(folder)) for name, folder in jobs})
    rows = row_figures(look)
    replicas = _replicas(history)
    return {
        "title": clip(os.path.basename(os.path.normpath(out)), 80),
        "folder": clip(out if look.is_bucket else os.path.abspath(out), 300),
        "state": _state(report),
        "made_at": utc_now("seconds"),
        "version": __version__,
        "report": report,
        "totals": totals,
        "cards": _cards(report, totals, history, rows),
        "count_lines": list(TASKS[totals.task].count_lines(totals.num_rows_committed, totals.task_counts)),
        "timeline": history,
        "replicas": replicas,
        "runs": [run for job, state in begun if (run := _run_speed(job, state)) is not None],
        "phases": [phase for phase in PHASES if any(seconds[phase] for _, seconds, _ in replicas)],
        "rows": rows,
        "numbers": [figure for figure in (*rows.tokens, *rows.numbers) if figure.num_values],
        "sample_groups": sample_groups,
        "spec": _spec_text(begun[0][0]),
        "platforms": _platforms([state for _, state in begun]),
        "duration": duration,
        "clip": clip,
    }


@dataclass(frozen=True, slots=True)
class Inputs:
    """What sample rows have asked, by their positions, made again from the input."""

    prompts: Mapping[int, str]
    """The beginnings of prompts that the job does not store."""
    pictures: Mapping[int, tuple[Picture, ...]]
    note: str = ""
    """Why they are not shown."""


def _inputs(out: str, shown: Samples) -> Inputs:
    """The prompts and the images of the sample rows. Empty with a note if the input cannot be read any more."""
    digests = {row.row_index: row.image_digests[:_PICTURES_OF_ROW] for row in shown.rows}
    wanted = sorted({row.row_index for row in shown.rows if row.image_digests or not shown.has_prompts})
    if not wanted:
        return Inputs({}, {})
    try:
        results = Results(out)
        built = build_again(results, wanted)
        tokenizer = results.tokenizer()
    except BatchinfError as error:
        return Inputs({}, {}, f"the prompts and images of these rows are not shown: {one_line(error)}")
    pictures = Pictures(built.job, has_copies=True, fetches=False) if any(digests.values()) else None
    prompts: dict[int, str] = {}
    shown_pictures: dict[int, tuple[Picture, ...]] = {}
    for prompt in built.prompts:
        row = prompt.row_index
        if not shown.has_prompts:
            prompts[row] = clip(show(tokenizer, prompt.token_ids[:_PROMPT_TOKENS]), _PROMPT_CHARS)
        if pictures is not None and digests[row]:
            shown_pictures[row] = pictures.of(prompt.image_sources, digests[row])
    return Inputs(prompts, shown_pictures)


def _state(report: StatusReport) -> str:
    """`done`, `running` and so on; of a job in slices the states of all."""
    states = [job.activity for job in report.jobs]
    if report.num_slices is None:
        return states[0]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _cards(report: StatusReport, totals: JobTotals, history: Timeline | None, rows: RowFigures) -> list[Card]:
    num_rows = max(rows.num_rows, totals.num_rows_committed)
    num_errors = max(totals.num_errors, sum(group.num_rows for group in rows.errors))
    tokens = {"output": totals.num_output_tokens, "prompt": totals.num_prompt_tokens}
    parts = f"{totals.num_parts_committed:,} of {totals.num_parts:,} parts"
    device_time = "GPU time" if totals.has_devices else "replica time"
    cards = [
        Card("output rows", f"{num_rows:,}", f"of {totals.num_rows:,} ({num_rows / max(1, totals.num_rows):.1%})"),
        Card("errors", f"{num_errors:,}", f"{num_errors / max(1, num_rows):.2%} of these rows"),
        # Before the first part is committed, both are 0.
        *(Card(f"{kind} tokens", short_count(num), f"{num:,} in parts") for kind, num in tokens.items() if num),
        *(_speed_cards(report, totals, history) if history is not None else ()),
        Card(device_time, duration(totals.device_s), "of replicas that have ended"),
        *([] if report.cost is None else [Card("cost", f"{report.cost.total:,.2f}", report.cost.units_text)]),
        Card("output", size_text(totals.num_bytes), parts),
    ]
    figures = TASKS[totals.task].count_figures(totals.num_rows_committed, totals.task_counts)
    cards.extend(Card(*figure) for figure in figures)
    cards.extend(_repair_cards(report))
    live = [job.progress for job in report.jobs if job.progress is not None]
    if len(live) == 1 and live[0].left_s is not None:
        cards.append(Card("time left", duration(live[0].left_s), "when the report was made"))
    return cards


def _repair_cards(report: StatusReport) -> Iterator[Card]:
    """Input rows that retries mended or took from files."""
    for job in report.jobs:
        for retry in job.retries:
            if retry.num_mended is not None:
                note = f"of {retry.num_rows:,} by retry {retry.number} ({clip(retry.predicate)})"
                yield Card("input rows mended", f"{retry.num_mended:,}", note)
        for repair in job.repairs:
            note = f"by retry {repair.retry}, from {clip(repair.path)}"
            yield Card("input rows repaired", f"{repair.num_rows:,}", note)


def _speed_cards(report: StatusReport, totals: JobTotals, history: Timeline) -> Iterator[Card]:
    """The speed of the engines over all runs, none before the first token; and that of the job with their starts."""
    engines_s = history.engines_s
    runs = f" in {history.num_runs:,} runs" if history.num_runs > 1 else ""
    rates = {name: history.total(f"{name}_tokens_per_s") / (engines_s or math.inf) for name in ("output", "prompt")}
    speed = report.jobs[0].speed
    # Of the only run, as in its closing lines: these do not depend on samples.
    if history.num_runs <= 1 and len(report.jobs) == 1 and speed is not None:
        rates = {"output": speed.output_tokens_per_s, "prompt": speed.prompt_tokens_per_s}
        engines_s = speed.work_s
    if name := next((name for name, rate in rates.items() if rate), None):
        note = f"while the engines worked ({time_taken(engines_s)}{runs})"
        yield Card(f"{name} tokens/s", short_count(rates[name]), note)
    if history.work_s:
        unit = "output tokens" if totals.num_output_tokens else "output rows"
        total = history.total("output_tokens_per_s" if totals.num_output_tokens else "rows_per_s")
        yield Card(f"mean {unit}/s", short_count(total / history.work_s), "with the start of the engines")
        yield Card("running time", time_taken(history.work_s), counted(totals.num_starts, "start"))


@dataclass(frozen=True, slots=True)
class RunSpeed:
    """How fast the last run of a job was."""

    name: str
    """Of the slice, if there are slices."""
    rows: tuple[tuple[str, float | None], ...]
    """Names with the measured values; None if unknown."""
    limit: str
    """What limited the run, in words; empty if it was too short to say."""


_RATES = {
    "prompt_tokens_per_s": "prompt tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "work_s": "seconds of the engines",
    "cache_tokens": "tokens of cache",
}


def _run_speed(job: Folder, state: State) -> RunSpeed | None:
    """Of the last run; None while the job is not done."""
    speed = state.speed if state.is_done else None
    if speed is None:
        return None
    rows = tuple((name, getattr(speed, field)) for field, name in _RATES.items())
    limit = "" if speed.bottleneck is None else f"{speed.bottleneck.reason}; to try: {speed.bottleneck.change}"
    return RunSpeed(str(job.slice or ""), rows, clip(limit, 400))


def _replicas(history: Timeline | None) -> list[tuple[str, dict[Phase, float], float]]:
    """Each replica with its seconds in each phase, and their sum without those in which it was stopped."""
    if history is None:
        return []
    phases = [(replica, history.phases[replica]) for replica in history.replicas]
    return [(replica, seconds, max(sum(seconds.values()) - seconds["stopped"], 1e-9)) for replica, seconds in phases]


def _spec_text(folder: Folder) -> str:
    try:
        text = folder.read("job.yaml").decode(errors="replace")
    except OSError:
        return "job.yaml is missing"
    return "\n".join(clip(line, _LINE_CHARS) for line in text[:_SPEC_CHARS].splitlines())


def _platforms(states: Sequence[State]) -> list[dict[str, str]]:
    """The devices, versions and settings of the engines, each kind once."""
    platforms: dict[str, dict[str, str]] = {}
    for each in (platform for state in states for platform in state.of(Platform)):
        settings = {name: each.settings[name] for name in _SETTINGS if each.settings.get(name) is not None}
        platform = {clip(str(name), 60): clip(str(value), 200) for name, value in {**each.values, **settings}.items()}
        platforms[repr(platform)] = platform
    return list(platforms.values())

"""`batchinf status --watch`: the lines of `status`, every second until the job ends."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator

from rich.live import Live
from rich.text import Text

from batchinf.base.text import plain, to_json
from batchinf.commands.screen import console
from batchinf.commands.status import JobState, StatusReport, job_status
from batchinf.coordinator.display import status_line

_EVERY_S = 1.0
_EVERY_LINE_S = 10.0
# A look reads the manifest, which takes a second for 100,000 parts. It may take a fifth of a processor core.
_PAUSE = 4.0


def watch(out: str, *, price: float | None = None, as_json: bool) -> StatusReport:
    """Show a job until no process runs it, Ctrl-C is pressed or the reader of stdout goes. Returns its last state.

    price: see `job_status`. Without a terminal: a line of progress every 10 s. as_json: print one object a
    second. Raises OutputError without a job.
    """
    report = job_status(out, price)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError), contextlib.ExitStack() as stack:
        every_s = _EVERY_S
        show: Callable[[StatusReport], None] = _print_json
        if not as_json and sys.stdout.isatty():
            live = stack.enter_context(Live(console=console(), auto_refresh=False, transient=True))
            show = functools.partial(_draw, live)
        elif not as_json:
            every_s = _EVERY_LINE_S
            show = _print_lines
        took_s = 0.0
        while any(job.process is not None for job in report.jobs):
            show(report)
            time.sleep(max(every_s - took_s, _PAUSE * took_s))
            began = time.monotonic()
            report = job_status(out, price)
            took_s = time.monotonic() - began
    return report


def why_ended(report: StatusReport) -> Iterator[str]:
    """One line if slices have not begun and none runs, so that there is nothing more to watch."""
    absent = [str(job.slice) for job in report.jobs if job.activity == "not begun"]
    if absent and all(job.process is None for job in report.jobs):
        which = f"slice {absent[0]} has" if len(absent) == 1 else f"{len(absent):,} slices have"
        yield f"the view ends: no slice runs now, and {which} not begun"


def _print_json(report: StatusReport) -> None:
    print(to_json(report), flush=True)


def _draw(live: Live, report: StatusReport) -> None:
    live.update(watch_text(report), refresh=True)


def watch_text(report: StatusReport) -> Text:
    """What a terminal shows."""
    return Text("\n".join(map(plain, ("Ctrl-C ends this view, not the job", *report.lines()))))


def _print_lines(report: StatusReport) -> None:
    """A line for each job or slice that runs."""
    for job in report.jobs:
        if job.progress is not None:
            print(plain(f"{_title(job)}: {status_line(job.progress)}"), flush=True)
        elif job.process is not None:
            print(_title(job), flush=True)


def _title(job: JobState) -> str:
    return f"{job.activity}" if job.slice is None else f"slice {job.slice} {job.activity}"

"""`batchinf status --watch`: a job's progress and a table of its replicas, every second until the job ends."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batchinf.base.text import clip, plain, to_json
from batchinf.commands.screen import console
from batchinf.commands.status import JobState, StatusReport, job_status
from batchinf.coordinator.display import beside_bar, figures, fit, status_line
from batchinf.fleet.devices import DeviceLook
from batchinf.fleet.status import JobStatus, ReplicaStatus

_EVERY_S = 1.0
_EVERY_LINE_S = 10.0
# A look reads the manifest, which takes a second for 100,000 parts. It may take a fifth of a processor core.
_PAUSE = 4.0


def watch(out: str, *, price: float | None = None, as_json: bool) -> StatusReport:
    """Show a job until no process runs it or Ctrl-C is pressed, and return its last state.

    price: see `job_status`. Without a terminal: in lines. as_json: print one object a second, and no table. Raises
    OutputError without a job.
    """
    report = job_status(out, price)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
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
    live.update(watch_view(report, live.console.width), refresh=True)


def _print_lines(report: StatusReport) -> None:
    """A line for each job or slice that runs."""
    for job in report.jobs:
        if job.progress is not None:
            print(plain(f"{_title(job)}: {status_line(job.progress)}"), flush=True)
        elif job.process is not None:
            print(_title(job), flush=True)


def watch_view(report: StatusReport, width: int) -> RenderableType:
    """The progress of each job or slice that runs, and the table of their replicas. width: of the terminal."""
    live = [(job, job.progress) for job in report.jobs if job.progress is not None]
    above: list[RenderableType] = [Text(f"{clip(report.folder, 200)}: Ctrl-C ends this view, not the job")]
    for job, progress in live:
        done = ProgressBar(progress.num_rows, progress.num_rows_done, width=min(40, width))
        rows = fit(beside_bar(progress), width - min(40, width) - len(_title(job)) - 4)
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(f"{_title(job)}:"), done, Text(rows))
        above += [line, Text(clip(fit(figures(progress), width), width))]
    above += [Text(_title(job)) for job in report.jobs if job.process is not None and job.progress is None]
    return Group(*above, "", _replicas([(job.slice, progress) for job, progress in live], width))


def _title(job: JobState) -> str:
    return f"{job.activity}" if job.slice is None else f"slice {job.slice} {job.activity}"


_STYLES = {"up": "green", "starting": "yellow"}
_NARROW = 92


def _replicas(jobs: list[tuple[str | None, JobStatus]], width: int) -> Table:
    table = Table(box=None, padding=(0, 2 if width >= _NARROW + 20 else 1, 0, 0))
    hits = "hits" if width < _NARROW else "prefix hits"
    has_devices = any(replica.devices for _, progress in jobs for replica in progress.replicas)
    of_devices = ("GPU", "memory", "load", "power") if has_devices else ()
    for name in ("replica", "state", *of_devices, "running", "waiting", "cache", hits, "restarts"):
        is_text = name in ("replica", "state", "GPU")
        # Only the name of a GPU is cut if the table does not fit.
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "GPU")
    for slice_, progress in jobs:
        looks = {look.device: look for look in progress.devices} if has_devices else None
        for replica in progress.replicas:
            _add_rows(table, slice_, replica, looks)
    return table


def _add_rows(table: Table, slice_: str | None, replica: ReplicaStatus, looks: dict[str, DeviceLook] | None) -> None:
    """A row for each device of a replica; the first one has the figures of the engine. looks: None without devices."""
    name = f"{replica.replica}" if slice_ is None else f"{slice_}: {replica.replica}"
    state = {"running": "up", "restarting": "restarting", "given up": "given up", "ended": "ended"}
    word = state.get(replica.state, "starting")
    hits = replica.prefix_cache_hit_rate
    engine = [
        f"{replica.num_running:,}",
        f"{replica.num_waiting:,}",
        f"{replica.kv_cache_usage:.0%}",
        "–" if hits is None else f"{hits:.0%}",
        f"{replica.restarts:,}",
    ]
    state_cell = Text(word, _STYLES.get(word, "red"))
    if looks is None:
        table.add_row(name, state_cell, *engine)
        return
    devices = replica.devices or ("–",)
    table.add_row(name, state_cell, *_device_cells(devices[0], looks), *engine)
    for device in devices[1:]:
        table.add_row("", "", *_device_cells(device, looks), *([""] * len(engine)))


def _device_cells(device: str, looks: dict[str, DeviceLook]) -> list[RenderableType]:
    look = looks.get(device)
    # A UUID has a prefix, `GPU-` or `MIG-`. As a string, the name would be markup.
    short = clip(device.partition("-")[2].partition("-")[0] or device, 8)
    name = Text(short, no_wrap=True, overflow="ellipsis")
    if look is None:
        return [name, "–", "–", "–"]
    used = look.memory_used_bytes
    total = look.memory_total_bytes
    return [
        name,
        "–" if used is None or total is None else f"{used / 2**30:.0f}/{total / 2**30:.0f} GiB",
        "–" if look.utilization is None else f"{look.utilization}%",
        "–" if look.power_w is None else f"{look.power_w:.0f} W",
    ]

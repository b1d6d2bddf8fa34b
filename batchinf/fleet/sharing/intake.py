"""How many rows a replica's engine takes, by its reports: the coordinator hands out no more while few are left."""

from collections import deque
from dataclasses import dataclass

# A report and its answer take up to this long, or two of the engine's steps. What the engine takes in that time may
# wait for it.
_AHEAD_S = 0.25
_AHEAD_STEPS = 2
# The slowest of so many spans between reports counts. Rows of one length end together, and then none for a long time.
_SPANS = 4


@dataclass(frozen=True, slots=True)
class Report:
    """What an engine had at a time. Counts are in rows."""

    at: float
    """In seconds of the monotonic clock."""
    steps: int = 0
    num_finished: int = 0
    num_running: int = 0
    num_waiting: int = 0
    """Rows in the engine that it cannot run yet."""
    kv_cache_usage: float = 0.0
    """Share of the cache in use, from 0 to 1."""


class Intake:
    """The reports of one engine, since it came up."""

    def __init__(self, max_num_rows: int, at: float) -> None:
        """max_num_rows: rows that it can run at once, if its cache holds them. at: when it came up."""
        self._max_num_rows = max_num_rows
        self._reports = deque([Report(at)], _SPANS + 1)
        self.step_s: float | None = None
        """Seconds that a step takes, by the last two reports; None before the first step."""
        self.rows: int | None = None
        """Rows that the engine runs, or will run before it can be given more; None before its first step."""

    def note(self, report: Report) -> None:
        """Take in the next report."""
        last = self._reports[-1]
        if report.at <= last.at:
            return
        if report.steps > last.steps:
            self.step_s = (report.at - last.at) / (report.steps - last.steps)
        self._reports.append(report)
        if self.step_s is not None:
            self.rows = self._rows(report, self.step_s)

    def _rows(self, last: Report, step_s: float) -> int:
        if last.num_waiting:
            taken = [report.num_finished + report.num_running for report in self._reports]
            runs = last.num_running
        else:
            taken = [report.num_finished for report in self._reports]
            runs = self._max_num_rows
            if last.num_running and last.kv_cache_usage:
                runs = min(runs, max(last.num_running, int(last.num_running / last.kv_cache_usage)))
        spans = zip(self._reports, list(self._reports)[1:], taken, taken[1:], strict=False)
        rows_per_s = min((after - before) / (later.at - earlier.at) for earlier, later, before, after in spans)
        return runs + int(rows_per_s * max(_AHEAD_S, _AHEAD_STEPS * step_s))

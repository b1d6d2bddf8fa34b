"""What people see while a job runs: a tqdm bar on a terminal, a plain line every 30 s elsewhere."""

import contextlib
import sys
import time
from typing import Any, TextIO

from tqdm import tqdm

from batchinf.fleet.status import JobStatus, duration, short_count, status_line

_LINE_EVERY_S = 30.0


class ProgressDisplay:
    """Shows one job; `say` prints a line that stays."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._bar: tqdm[Any] | None = None
        self._next_line = time.monotonic() + _LINE_EVERY_S
        self._last_state = ""

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        # A terminal that has gone away, or a closed pipe, ends no job.
        with contextlib.suppress(OSError):
            if self._bar is None:
                print(line, file=self._stream, flush=True)
            else:
                tqdm.write(line, file=self._stream)

    def show(self, status: JobStatus) -> None:
        """Bring the display up to date."""
        with contextlib.suppress(OSError):
            self._show(status)

    def _show(self, status: JobStatus) -> None:
        if self._is_terminal:
            self._show_bar(status)
        elif time.monotonic() >= self._next_line or status.state != self._last_state:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            self._last_state = status.state
            print(f"{status.state}: {status.message or status_line(status)}", file=self._stream, flush=True)

    def _show_bar(self, status: JobStatus) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=status.num_rows,
                initial=status.num_rows_done,
                file=self._stream,
                unit="row",
                dynamic_ncols=True,
                bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows [{elapsed}{postfix}]",
            )
        self._bar.n = status.num_rows_done
        self._bar.set_description_str(status.state, refresh=False)
        self._bar.set_postfix_str(status.message or _postfix(status), refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        """Leave the terminal tidy."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
            self._bar = None


def _postfix(status: JobStatus) -> str:
    up = sum(replica.state == "running" for replica in status.replicas)
    return (
        f"left {duration(status.left_s)}, in {short_count(status.prompt_tokens_per_s)} out "
        f"{short_count(status.output_tokens_per_s)} tok/s, {status.num_errors} errors, "
        f"{up}/{len(status.replicas)} up"
    )

"""What users see while a job runs: a bar in a terminal or a notebook, else lines of text or JSON."""

import contextlib
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

from batchinf.base.text import counted, duration, plain, short_count, terminal_width, utc_now, wrapped
from batchinf.fleet.status import JobStatus

_LINE_EVERY_S = 30.0
_ECHO_CELLS = 4  # of two Ctrl-C
_NOTEBOOK_CELLS = 100  # of a line in a notebook's output, which says nothing of its width
_ERASE_RIGHT = "\x1b[K"
_WARNING = "warning: "


class ProgressDisplay:
    """The progress display of one job. A closed terminal or pipe does not end the job."""

    def __init__(self, stream: TextIO | None = None, *, is_json: bool = False, is_quiet: bool = False) -> None:
        """stream: default stderr. is_json: show no bar, and one JSON object a line. is_quiet: show only warnings."""
        self._stream = stream or sys.stderr
        self._is_json = is_json
        self._is_quiet = is_quiet
        self._shows_bar = not self._is_json and not is_quiet and (self._stream.isatty() or _is_in_notebook())
        self._bar: _Bar | None = None
        self._next_line = time.monotonic() + _LINE_EVERY_S
        self._last_state = ""

    def say(self, line: str) -> None:
        """Print a line above the bar. The bar stays."""
        is_warning = line.startswith(_WARNING)
        if self._is_quiet and not is_warning:
            return
        with contextlib.suppress(OSError):
            if self._is_json:
                level = "warning" if is_warning else "info"
                print(json_line(level, line.removeprefix(_WARNING)), file=self._stream, flush=True)
            else:
                line = wrapped(plain(line), self._stream)
                if self._bar is None:
                    print(line, file=self._stream, flush=True)
                else:
                    self._bar.say(line)

    def show(self, status: JobStatus) -> None:
        """Show the progress: at once with a bar, otherwise when the state has changed and every 30 s."""
        with contextlib.suppress(OSError):
            if self._shows_bar:
                self._bar = self._bar or _Bar(self._stream, status)
                self._bar.show(status)
            elif not self._is_quiet and (time.monotonic() >= self._next_line or status.state != self._last_state):
                self._next_line = time.monotonic() + _LINE_EVERY_S
                self._last_state = status.state
                if self._is_json:
                    line = json_line("info", status_line(status), progress=dataclasses.asdict(status))
                else:
                    line = f"{status.state}: {status_line(status)}"
                print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it is. A later `show` makes a new one."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
            self._bar = None


def json_line(level: str, message: str, **more: object) -> str:
    """A line of `--log-format json`."""
    return json.dumps({"at": utc_now(), "level": level, "message": message, **more})


def _is_in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "ipykernel" not in sys.modules:
        return False
    with warnings.catch_warnings():
        # Without ipywidgets, the first import of tqdm.auto warns, and libraries of Hugging Face import it.
        warnings.simplefilter("ignore")
        import tqdm.auto  # noqa: F401
    return True


def _has_widgets() -> bool:
    import tqdm.notebook

    return getattr(tqdm.notebook, "IProgress", None) is not None  # None without ipywidgets


class _Bar:
    """tqdm's bar, in a terminal with more figures in a line below. A notebook shows a widget, or one line."""

    def __init__(self, stream: TextIO, status: JobStatus) -> None:
        self._stream = stream
        self._below: Any = None
        self._is_widget = False
        options: dict[str, Any] = {"file": stream, "total": status.num_rows, "initial": status.num_rows_done}
        if _is_in_notebook() and _has_widgets():
            from tqdm.notebook import tqdm_notebook

            self._bar: Any = tqdm_notebook(**options)
            self._is_widget = True
        elif _is_in_notebook():
            from tqdm import tqdm

            self._bar = tqdm(**options, ncols=_NOTEBOOK_CELLS, bar_format="{desc}")
        else:
            from tqdm import tqdm

            self._bar = tqdm(**options, position=0, bar_format="{desc}")
            self._below = tqdm(file=stream, total=0, position=1, bar_format="{desc}", leave=False)

    def show(self, status: JobStatus) -> None:
        self._bar.n = status.num_rows_done
        self._bar.total = status.num_rows
        if self._below is None and not self._is_widget:
            text = fit([*beside_bar(status), *figures(status)], _NOTEBOOK_CELLS - len(status.state) - 30)
            self._bar.bar_format = f"{status.state}: {{percentage:3.0f}}%|{{bar}}| {text} [{{elapsed}}]"
        elif self._below is None:
            self._bar.bar_format = f"{status.state}: {{percentage:3.0f}}%{{bar}}{status_line(status)} [{{elapsed}}]"
        else:
            # The terminal prints ^C behind the bar. In a full line it would wrap, and the bar would stay there twice.
            width = terminal_width(self._stream) - _ECHO_CELLS
            separator = _separator(self._stream)
            # The state, the percentage and the time take the rest, and the bar has at least ten cells.
            right = fit(beside_bar(status), width - len(status.state) - 30, separator)
            self._bar.ncols = self._below.ncols = width
            self._bar.bar_format = f"{status.state}: {{percentage:3.0f}}%|{{bar}}| {right} [{{elapsed}}]{_ERASE_RIGHT}"
            self._below.set_description_str(fit(figures(status), width, separator), refresh=False)
            self._below.refresh()
        self._bar.refresh()

    def say(self, line: str) -> None:
        self._bar.write(line if self._below is None else _ERASE_RIGHT + line, file=self._stream)

    def close(self) -> None:
        if self._below is not None:
            self._below.close()
        self._bar.close()


def _separator(stream: TextIO) -> str:
    try:
        _SEPARATOR.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return ", "
    return _SEPARATOR


_SEPARATOR = " · "
# A figure in all its lengths, the longest first. An empty one leaves it out.
Figure = tuple[str, ...]


def fit(figures: Sequence[Figure], width: int | None = None, separator: str = _SEPARATOR) -> str:
    """Figures in one line of at most `width` cells: the last ones are shortened first. None: no limit."""
    chosen = [0] * len(figures)

    def text() -> str:
        return separator.join(filter(None, (lengths[i] for lengths, i in zip(figures, chosen, strict=True))))

    for place in reversed(range(len(figures))):
        while width is not None and len(text()) > width and chosen[place] < len(figures[place]) - 1:
            chosen[place] += 1
    return text()


def status_line(status: JobStatus) -> str:
    """One line: rows, time left, requests in flight, rates, errors, replicas."""
    if status.state == "done":
        return fit([(counted(status.num_rows_done, "output row"),), _errors(status), _waited(status)])
    return fit([*beside_bar(status), *figures(status)])


def beside_bar(status: JobStatus) -> list[Figure]:
    """Rows and time left."""
    rows = f"{status.num_rows_done:,}/{status.num_rows:,}"
    return [(f"{rows} output rows", f"{rows} rows", rows), _left(status)]


def figures(status: JobStatus) -> list[Figure]:
    """All other figures, the most important first."""
    starts = _starts(status)
    if status.state == "starting" and starts:
        return [*starts, *([_errors(status)] if status.num_errors else [])]
    if status.state == "ending":
        rest = "" if status.num_rows_done == status.num_rows else "writing the last rows and "
        return [(f"{rest}ending the engines",), _errors(status), _waited(status)]
    return _figures_of_run(status, starts)


def _figures_of_run(status: JobStatus, starts: list[Figure]) -> list[Figure]:
    """Those of a job whose engines run. starts: of the replicas that are not up yet."""
    num_up = sum(replica.state == "running" for replica in status.replicas)
    up = f"{num_up}/{len(status.replicas)} replicas up"
    num_tokens = status.num_output_tokens
    in_flight = (f"{sum(replica.in_flight for replica in status.replicas):,} in flight",)
    out = _rate("out", status.output_tokens_per_s if num_tokens else None)
    # Until the first row is finished, only this number grows.
    generated = (f"{short_count(num_tokens)} tokens generated" if num_tokens else "", "")
    rest_of_rates = [generated, _rate("in", status.prompt_tokens_per_s)]
    if status.state == "running" and num_up < len(status.replicas):
        return [in_flight, (up,), out, _errors(status), _waited(status), *starts, *rest_of_rates]
    return [in_flight, out, _errors(status), _waited(status), *rest_of_rates, (up, ""), *starts]


def _rate(name: str, tokens_per_s: float | None) -> Figure:
    return ("",) if not tokens_per_s else (f"{name} {short_count(tokens_per_s)} tok/s", "")


def _left(status: JobStatus) -> Figure:
    return ("",) if status.left_s is None or status.state != "running" else (f"{duration(status.left_s)} left", "")


def _waited(status: JobStatus) -> Figure:
    return ("",) if status.stalled_by_disk_s < 1 else (f"waited {duration(status.stalled_by_disk_s)} for the disk", "")


def _errors(status: JobStatus) -> Figure:
    number = "1 error" if status.num_errors == 1 else f"{status.num_errors:,} errors"
    kinds = [f"{num_rows:,} {name}" for name, num_rows in status.errors.items()]
    if not kinds:
        return number, ""
    num_results = sum(status.errors.values())
    if status.num_errors > num_results:
        kinds.append(f"{status.num_errors - num_results:,} before")
    kind, num_rows = next(iter(status.errors.items()))
    mostly = f"{number}, mostly {kind}" if 2 * num_rows > status.num_errors else number
    if num_results > status.num_errors:  # a row has several requests
        return f"{number}, in requests: {', '.join(kinds)}", mostly, number
    return f"{number}: {', '.join(kinds)}", mostly, number


def _starts(status: JobStatus) -> list[Figure]:
    by_detail: dict[str, list[int]] = {}
    for replica in status.replicas:
        if replica.state != "running":
            by_detail.setdefault(replica.start_detail or replica.state, []).append(replica.replica)
    return [(f"{_named(replicas)}: {detail}", "") for detail, replicas in by_detail.items()]


_MOST_NAMED = 4


def _named(replicas: Sequence[int]) -> str:
    if len(replicas) == 1:
        return f"replica {replicas[0]}"
    many = len(replicas) > _MOST_NAMED
    return f"{len(replicas)} replicas" if many else f"replicas {', '.join(map(str, replicas))}"

"""Requests to stop: signals, and how much time each leaves. The coordinator acts on them.

A signal while a job is opened ends it at once (`interruptible`). While it runs, replicas admit nothing more and drain
for as long as the request allows. Replicas ignore signals: their coordinator tells them to stop. Python gives signals
to the main thread only, so a job on another thread has a request of its own: an event.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from batchinf.base.errors import Interrupted

# People and schedulers send these to a job's whole process tree.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Stands for the event of a job in Python; no signal has this number.
_EVENT = 0

# One Ctrl-C may reach the process twice: from the terminal, and passed on by `timeout` or a launcher.
_SAME_PRESS_S = 0.5

# Slurm and Kubernetes kill 30 s after SIGTERM. The rest is for writing parts and freeing devices.
_TERM_DRAIN_S = 20.0
_TERM_END_S = 25.0
# How long replicas may take beyond their drain to write their parts and end.
ENDING_S = 10.0

# DuckDB's errors in place of an interruption: of a signal, and of a connection that is told to stop.
_WORDS_OF_DUCKDB = ("Query interrupted", "INTERRUPT Error")


class _ThreadRequests(threading.local):
    """What asks the job of this thread to stop."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.heard: list[tuple[int, float]] = []
        """Signals so far, with their times."""
        self.event: threading.Event | None = None
        """Asks for a stop when it is set."""
        self.is_open = False
        """Within `interruptible`."""


_requests = _ThreadRequests()

# How many `shielded` blocks the main thread is in, and whether an interruption waits for their end.
_shields = 0
_is_put_off = False


def request_name(number: int) -> str:
    """The name of a request, for people."""
    return "request" if number == _EVENT else signal.Signals(number).name


class StopAskedFor(KeyboardInterrupt):
    """A stop signal ends the block of `interruptible`. Not a subclass of Exception: libraries catch and drop those."""


class StopRequests:
    """The requests to stop so far; the one that leaves the least time counts. Times are monotonic, in seconds."""

    def __init__(self, drain_timeout_s: float) -> None:
        self._drain_timeout_s = drain_timeout_s
        # A library may have swallowed an interruption while the job was opened; it still counts.
        self._heard = _requests.heard if _requests.is_open else []
        self._event = _requests.event

    def note(self, number: int) -> None:
        """Record a request."""
        self._heard.append((number, time.monotonic()))

    def __bool__(self) -> bool:
        if self._event is not None and self._event.is_set() and not self._heard:
            self.note(_EVENT)
        return bool(self._heard)

    @property
    def name(self) -> str:
        """The name of the first request, for people."""
        return request_name(self._heard[0][0])

    @property
    def drain_until(self) -> float:
        """Until when running requests may finish; infinity without a request to stop."""
        return min((at + self._drain_s(number) for number, at in self._heard), default=math.inf)

    @property
    def end_by(self) -> float:
        """When replicas that have not ended are killed."""
        ends = (at + self._end_s(number) for number, at in self._heard)
        return min(ends, default=math.inf)

    @property
    def is_at_once(self) -> bool:
        """Whether to stop without draining: Ctrl-C after another request.

        Only Ctrl-C counts. Other signals may come twice for one request: a shell repeats the kernel's SIGHUP, and srun
        repeats SIGTERM.
        """
        return any(number == signal.SIGINT for number, _ in self._heard[1:])

    @property
    def advice(self) -> str:
        """Which setting, or which other way to stop, leaves running requests more time."""
        leaves = f"drain_timeout_s leaves them {self._drain_timeout_s:g} s"
        if self.is_at_once:
            return f"a second Ctrl-C loses them, and the results since the last checkpoint; after one Ctrl-C, {leaves}"
        number = min(self._heard, key=lambda heard: heard[1] + self._drain_s(heard[0]))[0]
        if self._drain_s(number) == self._drain_timeout_s:
            return f"{leaves}: a larger value keeps more"
        return f"{request_name(number)} leaves them {self._drain_s(number):g} s; after SIGINT or SIGUSR1, {leaves}"

    def _drain_s(self, number: int) -> float:
        if number == signal.SIGTERM:
            return min(self._drain_timeout_s, _TERM_DRAIN_S)
        return self._drain_timeout_s

    def _end_s(self, number: int) -> float:
        end_s = self._drain_s(number) + ENDING_S
        return min(end_s, _TERM_END_S) if number == signal.SIGTERM else end_s


@contextlib.contextmanager
def on_stop_signals(act: Callable[[int], None] | None = None) -> Iterator[None]:
    """Record each signal that asks for a stop, and call `act` with it.

    Signals that are ignored, as under nohup, stay ignored. A handler of the program that called batchinf stays too.
    """
    heard = _requests.heard

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and any(it == number and now - at < _SAME_PRESS_S for it, at in heard):
            return
        heard.append((number, now))
        if act is not None:
            act(number)

    heeded = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        heeded = {number: handler for number, handler in before.items() if _is_ours_to_replace(handler)}
    handle.is_batchinf = True  # type: ignore[attr-defined]
    try:
        for number in heeded:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in heeded.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def _is_ours_to_replace(handler: object) -> bool:
    # In a cell with `await`, the handler of a notebook's kernel only ends the next await, after the job.
    is_notebook = str(getattr(handler, "__module__", "")).startswith("ipykernel.")
    return handler in (signal.SIG_DFL, signal.default_int_handler) or is_notebook or hasattr(handler, "is_batchinf")


@contextlib.contextmanager
def interruptible(event: threading.Event | None = None, *, ends_process: bool = False) -> Iterator[None]:
    """End the block at once when a stop is asked for, and raise Interrupted. A block within another one adds nothing.

    event: asks for a stop too, but only a job that runs looks at it. ends_process: after the block the process ignores
    signals to its end, so that they cannot change the exit code. Otherwise the handlers are put back.
    """
    if _requests.is_open:
        yield
        return

    heard: list[tuple[int, float]] = []

    def interrupt(number: int) -> None:
        # The first signal starts the unwinding, which releases the lock. Only a further Ctrl-C may disturb that.
        global _is_put_off
        if len(heard) == 1 and _shields:
            _is_put_off = True
        elif len(heard) == 1 or number == signal.SIGINT:
            raise StopAskedFor(number)

    _requests.heard = heard
    _requests.event = event
    _requests.is_open = True
    try:
        with on_stop_signals(interrupt):
            try:
                yield
            finally:
                if ends_process:
                    for number in STOP_SIGNALS:
                        signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        # CPython remembers a KeyboardInterrupt from `exec` of text, which dataclasses use, until the next `exec`.
        # Without this call, CPython would end the process with SIGINT and ignore its exit code.
        exec("")
        raise Interrupted(f"stopped on {request_name(heard[0][0] if heard else signal.SIGINT)}") from None
    except Exception as error:
        if not heard or not is_interruption(error):
            raise
        raise Interrupted(f"stopped on {request_name(heard[0][0])}") from None
    finally:
        _requests.clear()


def is_interruption(error: Exception) -> bool:
    """Whether a library, such as pydantic or DuckDB, has made an error of its own of an interruption, by its text."""
    words = str(error)
    return StopAskedFor.__name__ in words or words.startswith(_WORDS_OF_DUCKDB)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Delay an interruption of the main thread until the block is done; a second Ctrl-C is not delayed."""
    global _shields, _is_put_off
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _shields += 1
    try:
        yield
    finally:
        _shields -= 1
        if _is_put_off and not _shields:
            _is_put_off = False
            raise KeyboardInterrupt

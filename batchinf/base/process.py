"""Processes: a quicker start and end of this one, its threads, and questions that a module answers in another one.

Imports make hundreds of thousands of objects that are never garbage. Python's garbage collector looks through them
again and again while they are made, and once more when the process ends.
"""

import atexit
import contextlib
import gc
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

_T = TypeVar("_T")

_USUAL = gc.get_threshold()
_RARE = 250_000
_SLOW_S = 2.0


def collect_rarely() -> None:
    """Collect garbage after 250,000 new objects, not 700: for commands that end soon, whose imports make fewer."""
    gc.set_threshold(_RARE, *_USUAL[1:])


def collect_as_usual() -> None:
    """Collect garbage as Python does by default, but never look at the objects that exist now."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage in this block. vLLM's import then takes 5.4 s of processor time, else 7.0.

    `time python -c "import gc; gc.disable(); import batchinf.engines.vllm.engine"`, with and without `gc.disable()`.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def say_if_slow(say: Callable[[str], None] | None, words: str) -> Iterator[None]:
    """Say what the block does if it takes 2 s. None: say nothing."""
    timer = threading.Timer(_SLOW_S, lambda: say and say(f"{words} …"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def without_long_collections() -> Iterator[None]:
    """Look at all objects a hundred times less often in this block, but at new ones as usual.

    With 1,000 replicas such a look takes 70 ms, every 5 s. Meanwhile no replica gets an answer.
    """
    usual = gc.get_threshold()
    gc.set_threshold(usual[0], usual[1], 100 * usual[2])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def leave(code: int) -> NoReturn:
    """End this process as Python does, but leave its objects to the kernel: freeing those of vLLM takes 4 s."""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def on_thread(call: Callable[[], _T]) -> "Future[_T]":
    """Run a call on a thread that does not keep the process alive."""
    from concurrent.futures import Future  # not for every command: it takes 3 ms

    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# -- questions to another process --------------------------------------------------------------------------------------


def python_path() -> str:
    """PYTHONPATH for a process of this package, which may run from a source tree that is not installed."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


class NoAnswerError(Exception):
    """The process gave no answer; the message says why."""


class Question:
    """A question that a module of this package answers in another process. Leaving the `with` block ends that process.

    What the module imports stays out of this process.
    """

    def __init__(self, module: str, question: object, timeout_s: float, environment: Mapping[str, str]) -> None:
        """Start `python -m module` with the question as JSON on stdin. environment: added to this process's."""
        import tempfile  # not for every command: it takes 2 ms

        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s

        # Files, and not pipes: nothing has to be read while the process runs.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(question).encode())
            stdin.seek(0)
            self._process = subprocess.Popen(
                # -P: a module in the user's folder must not replace one of Python.
                [sys.executable, "-P", "-m", module],
                stdin=stdin,
                stdout=self._output,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": python_path(), **environment},
            )

    @property
    def is_answered(self) -> bool:
        """Whether `answer` returns at once."""
        return self._process.poll() is not None or time.monotonic() >= self._until

    def answer(self) -> dict[str, Any]:
        """The last line of the process's output, read as JSON. Raises NoAnswerError."""
        try:
            self._process.wait(max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise NoAnswerError(f"it took more than {self._timeout_s:.0f} s") from None
        try:
            answer: dict[str, Any] = json.loads(_text(self._output).rpartition("\n")[2])
        except ValueError:
            raise NoAnswerError((_text(self._errors) or "it said nothing").splitlines()[-1][:300]) from None
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
        self._errors.close()


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace")).strip()

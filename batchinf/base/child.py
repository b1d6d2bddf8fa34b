"""Runs a module of this package in another process and reads its answer. What it imports stays out of this process."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Self


class NoAnswerError(Exception):
    """The process gave no answer; the message says why."""


class Question:
    """A question that another process is answering. Leaving the `with` block ends that process."""

    def __init__(self, module: str, question: object, timeout_s: float, environment: Mapping[str, str]) -> None:
        """Start `python -m module` with the question as JSON on stdin. environment: added to this process's."""
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        root = str(pathlib.Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
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
                env={**os.environ, "PYTHONPATH": path, **environment},
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

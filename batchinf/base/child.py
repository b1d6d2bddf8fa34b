"""Asks a module of this package in a process of its own, so that what it imports stays out of this one."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


class NoAnswerError(Exception):
    """The process gave no answer; the message says why."""


def ask(module: str, question: object, timeout_s: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run `python -m module` with the question as JSON on stdin. Returns the last line of its output, read as JSON.

    environment: added to the variables of this process. Raises NoAnswerError.
    """
    root = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            # -P: a module in the user's folder must not replace one of Python.
            [sys.executable, "-P", "-m", module],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"it took more than {timeout_s:.0f} s") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        raise NoAnswerError((done.stderr.strip() or "it said nothing").splitlines()[-1][:300]) from None
    return answer

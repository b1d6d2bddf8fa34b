"""Fault points: tests kill, delay or fail a process at a named point. Nothing happens without `BATCHINF_FAULTS`.

`BATCHINF_FAULTS="parts.before_rename:3=kill,journal.write=sleep 5"` kills the process with SIGKILL the third time it
passes `parts.before_rename`, and sleeps 5 s the first time it passes `journal.write`; `:*` means every time.
`die` raises the error of a dying engine, and `die FILE` one with the text in FILE. `refuse FILE` raises the error of
an engine that cannot start. `hold FILE` writes the process id to FILE and waits until FILE is deleted, so that a test
can kill any process at that moment.
`BATCHINF_FAULTS_ONCE=FOLDER` makes each fault without `:*` strike once over all processes and restarts.
"""

import os
import pathlib
import signal
import time

from batchinf.base.errors import EngineDeadError, EngineStartError

_passages: dict[str, int] = {}


def _parse(text: str) -> dict[tuple[str, int | str], str]:
    faults: dict[tuple[str, int | str], str] = {}
    for item in filter(None, text.split(",")):
        where, _, action = item.partition("=")
        name, _, count = where.partition(":")
        faults[name, count if count == "*" else int(count or 1)] = action
    return faults


_FAULTS = _parse(os.environ.get("BATCHINF_FAULTS", ""))


def point(name: str, item: object = "") -> None:
    """Pass the fault point `name`, or `name.item` if there are several."""
    if _FAULTS:
        _strike(f"{name}.{item}" if item != "" else name)


def _strike(name: str) -> None:
    _passages[name] = _passages.get(name, 0) + 1
    action = _FAULTS.get((name, _passages[name]))
    if action is not None and not _first_time(f"{name}-{_passages[name]}"):
        action = None
    action = _FAULTS.get((name, "*"), action)
    if action is not None:
        _act(name, action)


def _act(name: str, action: str) -> None:
    verb, _, argument = action.partition(" ")
    if verb == "kill":
        os.kill(os.getpid(), getattr(signal, argument or "SIGKILL"))
        signal.pause()
    elif verb == "sleep":
        time.sleep(float(argument))
    elif verb == "hold":
        _hold(pathlib.Path(argument))
    elif verb == "die":
        raise EngineDeadError(pathlib.Path(argument).read_text() if argument else f"the fault {name} ended the engine")
    elif verb == "refuse":
        raise EngineStartError(pathlib.Path(argument).read_text())
    elif verb == "raise":
        raise OSError(int(argument), os.strerror(int(argument)))
    else:
        allowed = "kill [SIGNAL], sleep S, hold FILE, raise ERRNO, die [FILE], refuse FILE"
        raise ValueError(f"BATCHINF_FAULTS: unknown action {action!r}; allowed: {allowed}")


def _hold(marker: pathlib.Path) -> None:
    marker.write_text(str(os.getpid()))
    while marker.exists():
        time.sleep(0.005)


def _first_time(key: str) -> bool:
    folder = os.environ.get("BATCHINF_FAULTS_ONCE")
    if folder is None:
        return True
    try:
        pathlib.Path(folder, key).open("x").close()
    except FileExistsError:
        return False
    return True

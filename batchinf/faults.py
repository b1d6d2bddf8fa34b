"""Named points at which a test can hurt the process that passes them; nothing happens unless one is asked for.

`BATCHINF_FAULTS="parts.before_rename:3=kill,journal.write=sleep 5"` kills the process with SIGKILL at the third
passage of `parts.before_rename`, and sleeps 5 s at the first of `journal.write`; `:*` is every passage. `die` is what a
dying engine raises. `hold FILE` writes the process id to
FILE and stands still until FILE is deleted, so that a test can kill whom it likes at that very moment.
`BATCHINF_FAULTS_ONCE=FOLDER` makes each fault strike once over all processes and restarts: a file in FOLDER remembers.
"""

import os
import pathlib
import signal
import time

from batchinf.errors import EngineDeadError

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
    """Pass the fault point `name`, or `name.item` where it is one of many."""
    if _FAULTS:
        _strike(f"{name}.{item}" if item != "" else name)


def _strike(name: str) -> None:
    _passages[name] = _passages.get(name, 0) + 1
    action = _FAULTS.get((name, "*"))
    if action is None:
        action = _FAULTS.get((name, _passages[name]))
        if action is None or not _first_time(f"{name}-{_passages[name]}"):
            return
    verb, _, argument = action.partition(" ")
    if verb == "kill":
        os.kill(os.getpid(), getattr(signal, argument or "SIGKILL"))
        signal.pause()
    elif verb == "sleep":
        time.sleep(float(argument))
    elif verb == "hold":
        _hold(pathlib.Path(argument))
    elif verb == "die":
        raise EngineDeadError(f"the fault {name} ended the engine")
    elif verb == "raise":
        raise OSError(int(argument), os.strerror(int(argument)))
    else:
        allowed = "kill [SIGNAL], sleep S, hold FILE, raise ERRNO, die"
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

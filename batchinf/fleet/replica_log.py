"""What a replica's log says of its end: the error that is the cause, not those that point at it."""

import pathlib
import re

from batchinf.fleet.local import LocalReplica

# The ranks of a large engine each write a traceback.
_LOG_TAIL_BYTES = 1 << 20
_ERROR_LINE = re.compile(r"(?:^|\s)((?:[\w.]+\.)?\w*(?:Error|Exception|Killed)\b: .+)")
_ERROR_LEVEL = re.compile(r"\bERROR\b")
_NO_CAUSE = (
    "Engine core initialization failed",
    "EngineCore failed to start",
    "See root cause above",
    "EngineCore encountered an issue",
    "See stack trace for root cause",
)


def points_elsewhere(words: str) -> bool:
    """Whether an error only says that another one is the cause."""
    return any(hint in words for hint in _NO_CAUSE)


def told_cause(words: str, replica: LocalReplica) -> str:
    """A replica's last words; where they only point at another error, what its log names as that."""
    found = last_error(replica.log, replica.log_start) if points_elsewhere(words) else ""
    return f"{words}; its log says: {found}" if found else words


def last_error(log: pathlib.Path, start: int = 0) -> str:
    """The last error that a replica's log names after byte `start`, leaving out those that point at another one."""
    found = [match.group(1).strip() for line in _tail(log, start) if (match := _ERROR_LINE.search(line))]
    telling = [line for line in found if not points_elsewhere(line)]
    return telling[-1] if telling else ""


def log_errors(log: pathlib.Path, start: int = 0) -> list[str]:
    """All lines of a replica's log after byte `start` that name an error, or are logged as one."""
    return [line for line in _tail(log, start) if _ERROR_LINE.search(line) or _ERROR_LEVEL.search(line)]


def _tail(log: pathlib.Path, start: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []

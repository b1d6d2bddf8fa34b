"""Why an incarnation ended: from its last message, from how its backend saw it end, and from the errors in its log."""

import re

from batchinf.fleet.backend import Ending, ReplicaHandle
from batchinf.replica.messages import Failed

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


def told_cause(words: str, handle: ReplicaHandle) -> str:
    """A replica's last words. If they only point at another error, also the error that its log names."""
    found = last_error(handle.log_tail()) if points_elsewhere(words) else ""
    return f"{words}; its log says: {found}" if found else words


def cause_of(ending: Ending, failed: Failed | None, handle: ReplicaHandle) -> str:
    """One line on why an incarnation ended. failed: its last words, if it said any."""
    if failed is not None:
        return told_cause(failed.cause, handle)
    words = last_error(handle.log_tail())
    return f"ended with {ending.description}" + (f"; its log ends: {words}" if words else "")


def memory_words(cause: str, failed: Failed | None, handle: ReplicaHandle) -> str:
    """Where to look for an error of the memory: the cause and, if that is not the whole story, the log's errors."""
    if failed is not None and not points_elsewhere(failed.cause):
        return cause
    return "\n".join([cause, *error_lines(handle.log_tail())])


def last_error(log: list[str]) -> str:
    """The last error that a log's lines name, leaving out errors that point at another one; "" if there is none."""
    found = [match.group(1).strip() for line in log if (match := _ERROR_LINE.search(line))]
    telling = [line for line in found if not points_elsewhere(line)]
    return telling[-1] if telling else ""


def error_lines(log: list[str]) -> list[str]:
    """All lines of a log that name an error, or are logged as one."""
    return [line for line in log if _ERROR_LINE.search(line) or _ERROR_LEVEL.search(line)]

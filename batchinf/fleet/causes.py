"""Why an incarnation ended: its last message, or the errors in its log, for the fleet and for people."""

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


def points_elsewhere(message: str) -> bool:
    """Whether an error only says that another one is the cause."""
    return any(hint in message for hint in _NO_CAUSE)


def full_message(message: str, handle: ReplicaHandle) -> str:
    """A replica's error message. If it only points at another error, also that error from its log."""
    error = last_error(handle.log_tail()) if points_elsewhere(message) else ""
    return f"{message}; its log says: {error}" if error else message


def cause_of(ending: Ending, failed: Failed | None, handle: ReplicaHandle) -> str:
    """One line on why an incarnation ended. failed: its last message, if it sent one."""
    if failed is not None:
        return full_message(failed.cause, handle)
    error = last_error(handle.log_tail())
    return f"ended with {ending.description}" + (f"; its log ends: {error}" if error else "")


def cause_with_log(cause: str, failed: Failed | None, handle: ReplicaHandle) -> str:
    """The cause and, if that only points at another error, the log's errors: the text to search for out of memory."""
    if failed is not None and not points_elsewhere(failed.cause):
        return cause
    errors = [line for line in handle.log_tail() if _ERROR_LINE.search(line) or _ERROR_LEVEL.search(line)]
    return "\n".join([cause, *errors])


def last_error(log: list[str]) -> str:
    """The last error in a log that does not just point at another one; "" if there is none."""
    errors = (match[1].strip() for line in reversed(log) if (match := _ERROR_LINE.search(line)))
    return next((error for error in errors if not points_elsewhere(error)), "")

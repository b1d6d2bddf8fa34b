"""The exceptions that end a job, each with the exit code that a shell or a scheduler sees.

    BatchinfError              1  a bug, unless a subclass says otherwise
    ├── UserError              2  the user can fix it; shown as one line without a traceback
    │   ├── SpecError             the job spec
    │   ├── InputError            the input
    │   │   └── NoRowsError          the input is there and has no rows; `run` ends with 0 instead
    │   ├── ModelError            the model's folder or hub id
    │   ├── DriftError            a resume with another spec, input or model
    │   ├── OutputError           the output folder: foreign, damaged, full or held by another process
    │   ├── EngineStartError      no replica could start
    │   └── HopelessJob           half of the first rows have failed; ended early
    ├── ErrorRateExceeded      3  done, but more rows failed than `max_error_rate`
    ├── VerificationFailed     3  `verify` found values beyond its tolerance
    └── Interrupted           75  stopped on request; the same command resumes the job

A failed row ends no job: it raises `RowFailed` where its value is wrong, and becomes an error row of the output.
"""

import errno
import resource
from dataclasses import dataclass
from typing import ClassVar

from batchinf.base.text import within_a_screen

_LEAST_ADDRESSES = 1 << 30  # bytes: Python with all modules of `run` takes a third of it


class BatchinfError(Exception):
    """Base of everything raised on purpose."""

    exit_code: ClassVar[int] = 1


class UserError(BatchinfError):
    """An error that the user can fix. The message says what was got, what is allowed and what to do.

    As text it is never longer than a screen, however long the texts are that it quotes.
    """

    exit_code = 2

    def __str__(self) -> str:
        return within_a_screen(super().__str__())


class SpecError(UserError):
    """The job spec is wrong."""


class InputError(UserError):
    """The input cannot be read as the spec says."""


class NoRowsError(InputError):
    """The input is there and has no rows."""


class ModelError(UserError):
    """The model cannot be found, or is not whole."""


class DriftError(UserError):
    """The output folder holds a job whose identity differs from this one."""


class OutputError(UserError):
    """The output folder cannot be used."""


class EngineStartError(UserError):
    """No replica could start its engine."""


class HopelessJob(UserError):
    """So many of the first rows failed that the job was ended early."""


class ErrorRateExceeded(BatchinfError):
    """The job is done, but too many of its rows are error rows."""

    exit_code = 3


class VerificationFailed(BatchinfError):
    """Stored values differ from the reference by more than the tolerance."""

    exit_code = 3


class Interrupted(BatchinfError):
    """The job was stopped on request and can be resumed with the same command."""

    exit_code = 75


class EngineDeadError(BatchinfError):
    """The engine died; its requests run again."""


def out_of_memory_message(error: BaseException) -> str | None:
    """A line for the user if a process has no memory left, or none under `ulimit -v`; None for other errors."""
    is_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    limit = address_limit()
    if not limit:
        return "no memory is left on this machine; free some and run the same command again" if is_memory else None
    return f"no memory is left: {limit}" if is_memory or "can't start new thread" in str(error) else None


def address_limit() -> str:
    """What `ulimit -v` means for engines, and what to do; "" without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    return (
        f"`ulimit -v` allows each process {limit / 2**30:.1f} GiB of addresses, and engines need far more than they "
        "fill; set `ulimit -v unlimited` and run the same command again"
    )


def check_addresses() -> None:
    """Raise UserError if `ulimit -v` is too low for a coordinator, in which libraries may then abort or never end."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESSES:
        raise UserError(address_limit())


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row has no result: `error_type` and `error_message` of its output rows."""

    error_type: str
    error_message: str


class RowFailed(Exception):
    """A row has no prompt, an image of it cannot be used, or the engine refuses its request.

    It is raised where the value is wrong. Code that handles several rows catches it for each and keeps its `error`.
    """

    def __init__(self, error_type: str, error_message: str) -> None:
        super().__init__(error_message)
        self.error = RowError(error_type, error_message)

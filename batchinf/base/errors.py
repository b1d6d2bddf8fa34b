"""The exceptions that end a job, each with the exit code that a shell or a scheduler sees.

    BatchinfError              1  a bug, unless a subclass says otherwise
    ├── UserError              2  the user's to mend; shown as one clear line, no traceback
    │   ├── SpecError             the job spec
    │   ├── InputError            the prompts dataset
    │   ├── ModelError            the model's folder or hub id
    │   ├── DriftError            a resume whose spec, input or model is not the job's
    │   ├── OutputError           the output folder: foreign, damaged, full or held by another
    │   ├── EngineStartError      no replica could start
    │   └── HopelessJob           half of the first rows have failed; ended early
    ├── ErrorRateExceeded      3  done, but more rows failed than `max_error_rate`
    ├── VerificationFailed     3  `verify` found values beyond its tolerance
    └── Interrupted           75  stopped on request; the same command goes on

A row that fails is never an exception here: it is a `RowError` value that becomes a row of the output.
"""

from dataclasses import dataclass
from typing import ClassVar


class BatchinfError(Exception):
    """Base of everything raised on purpose."""

    exit_code: ClassVar[int] = 1


class UserError(BatchinfError):
    """Something that the user can mend: the message says what was got, what is allowed, what to do."""

    exit_code = 2


class SpecError(UserError):
    """The job spec is wrong."""


class InputError(UserError):
    """The prompts dataset cannot be read as asked."""


class ModelError(UserError):
    """The model cannot be found, or is not whole."""


class DriftError(UserError):
    """The output folder holds a job whose identity differs from this one."""


class OutputError(UserError):
    """The output folder cannot be used."""


class EngineStartError(UserError):
    """No replica could start its engine."""


class HopelessJob(UserError):
    """So many of the first rows have failed that the job was not worth going on with."""


class ErrorRateExceeded(BatchinfError):
    """The job is done, but too many of its rows are error rows."""

    exit_code = 3


class VerificationFailed(BatchinfError):
    """What is stored is further from the reference than allowed."""

    exit_code = 3


class Interrupted(BatchinfError):
    """The job was stopped on request and can be resumed with the same command."""

    exit_code = 75


class EngineDeadError(BatchinfError):
    """The engine died under its replica; what was in it has to be run again.

    was_killed: a signal from outside ended one of its processes, as far as can be told.
    """

    def __init__(self, message: str, was_killed: bool = False) -> None:
        super().__init__(message)
        self.was_killed = was_killed


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row has no result: `error_type` and `error_message` of its output rows."""

    error_type: str
    error_message: str


class RequestRefused(Exception):
    """An engine will not take a request; the engine is unharmed and the row becomes an error row."""

    def __init__(self, error: RowError) -> None:
        super().__init__(error.error_message)
        self.error = error

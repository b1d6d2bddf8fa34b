"""batchinf: offline batch inference with vLLM, from a job spec to Parquet with logprobs.

    import batchinf

    results = batchinf.run("job.yaml")        # or a mapping, or a JobSpec; the same call resumes the job
    rows = batchinf.open("out/my-job").table()

`batchinf.api` has the functions, `batchinf.results` the reader, `batchinf.base.errors` the exceptions.
"""
# ruff: noqa: F403, F405

import importlib
from typing import TYPE_CHECKING, Any

from batchinf.base.errors import (
    BatchinfError,
    DriftError,
    EngineStartError,
    ErrorRateExceeded,
    HopelessJob,
    InputError,
    Interrupted,
    ModelError,
    NoRowsError,
    OutputError,
    SpecError,
    UserError,
    VerificationFailed,
)
from batchinf.version import __version__ as __version__

if TYPE_CHECKING:
    from batchinf.api import *

__all__ = [
    "BatchinfError",
    "DriftError",
    "EngineStartError",
    "ErrorRateExceeded",
    "HopelessJob",
    "InputError",
    "Interrupted",
    "JobSpec",
    "JobStatus",
    "ModelError",
    "NoRowsError",
    "OutputError",
    "PlanReport",
    "Results",
    "RunResults",
    "SpecError",
    "StatusReport",
    "Summary",
    "TuneReport",
    "UserError",
    "ValidateReport",
    "VerificationFailed",
    "open",
    "plan",
    "run",
    "status",
    "tune",
    "validate",
]


def __getattr__(name: str) -> Any:
    # The names of `batchinf.api` are imported when they are first used, so that `batchinf --help` stays fast. To read
    # results, no module that runs jobs is needed: they take 0.1 s.
    if name not in __all__:
        raise AttributeError(f"module 'batchinf' has no attribute {name!r}")
    module = "batchinf.results" if name in ("Results", "open") else "batchinf.api"
    globals()[name] = value = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Refuses a job that is not the one in its folder: other settings, another model, another input, other slices."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchinf.base.errors import DriftError, OutputError
from batchinf.base.slices import Cut, read_cut, refuse_other_cut, write_cut
from batchinf.base.storage import Folder
from batchinf.base.text import utc_now
from batchinf.job.job import Job, PreparedJob
from batchinf.manifest.lines import Header
from batchinf.manifest.state import State
from batchinf.model.model import Model
from batchinf.source.rows import NewRows
from batchinf.spec.job import JobSpec, fields, fingerprint
from batchinf.spec.output import OutputSpec
from batchinf.spec.retry import FIXED_SAMPLING, SAMPLING, SAMPLING_COLUMNS

_SCRIPTED = "scripted."
_MEANINGS = {"model": "a model with content ", "input": "an input with content ", "lora": "adapters with content "}


def check_drift(
    job: Job | PreparedJob, header: Header, identity: dict[str, Any] | None = None, files: Sequence[str] = ()
) -> None:
    """Raise DriftError if the folder holds another job: in one line, or with a line for each difference.

    identity: instead of the job's own. files: lines about files of the model that differ.
    """
    identity = job.identity if identity is None else identity
    if header.fingerprint == fingerprint(identity) and not files:
        return
    _refuse_other_job(job.folder, job.spec, job.model, header)
    output = job.spec.output
    holder = f"{_place(job.folder, output)} holds a job"
    error = drift_error(holder, header.identity, identity, files=files, output=output)
    if files or not _is_for_retry(header.identity, identity):
        raise error
    raise DriftError(
        f"{error}\nto run only some rows again with this sampling, in the same folder, add --retry, such as "
        "--retry \"finish_reason = 'length'\""
    )


def _is_for_retry(before: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether the identities differ only in fields of sampling that a retry may change."""
    changed = {name for name in before.keys() | current.keys() if before.get(name) != current.get(name)}
    return all(name.startswith(SAMPLING) for name in changed) and not changed & {*FIXED_SAMPLING, SAMPLING_COLUMNS}


@contextlib.contextmanager
def refusing_other_job(folder: Folder, spec: JobSpec, model: Model, state: State | None) -> Iterator[None]:
    """Shorten a DriftError to one line if the folder holds another job."""
    try:
        yield
    except DriftError:
        if state is not None:
            _refuse_other_job(folder, spec, model, state.header)
        raise


def _refuse_other_job(folder: Folder, spec: JobSpec, model: Model, header: Header) -> None:
    """Raise DriftError, in one line, if the folder's job has another task, or another model and another input."""
    stored_spec = header.spec
    is_other_task = fields(spec, "identity")["task"] != header.identity["task"]
    is_other_model = model.fingerprint != header.identity["model"]
    if is_other_task or (is_other_model and spec.input.path != stored_spec["input"]["path"]):
        raise DriftError(
            f"{_place(folder, spec.output)} holds another job: task {stored_spec['task']} with "
            f"{stored_spec['model']['name']} over {stored_spec['input']['path']}, begun {header.created_at}; "
            f"give this job another output.path, or {_beginning_anew(spec.output)}"
        )


def _place(folder: Folder, output: OutputSpec) -> str:
    """Where the job is, for a message."""
    return f"{output.path} (work folder {folder.root})" if output.is_bucket else str(folder.root)


def _beginning_anew(output: OutputSpec | None) -> str:
    """How to begin another job there: a bucket has no `--fresh`."""
    if output is not None and output.is_bucket:
        return "delete the objects there and the work folder first"
    return "start a new job with --fresh (in Python fresh=True), which keeps the old folder under another name"


def limit_as_begun(folder: Folder, spec: JobSpec, state: State, new: NewRows) -> int | None:
    """The limit in the job's identity. Raising the limit does not change the identity.

    Raises DriftError if the limit is lower, or higher without `--extend`.
    """
    limit = spec.input.limit
    last = state.limit
    is_raised = last is not None and (limit is None or limit > last)
    if limit == last or (new == "take" and is_raised):
        return state.header.identity.get("input.limit")
    holder = f"{_place(folder, spec.output)} holds a job"
    error = drift_error(holder, {"input.limit": last}, {"input.limit": limit}, output=spec.output)
    raise DriftError(f"{error}\nwith --extend, input.limit may be raised, but not lowered")


def join_cut(job: Job, num_rows: int, positions: str | None = None) -> None:
    """Join a slice to the others of its output folder. num_rows, positions: of all slices together.

    Raises DriftError if the others began as another job, and OutputError if they run other rows.
    """
    assert job.slice is not None
    out = job.spec.output.folder
    refuse_other_cut(out, job.slice)
    cut = write_cut(
        out,
        Cut(
            num_slices=job.slice.num_slices,
            num_rows=num_rows,
            identity=_identity_of_all(job),
            begun_at=utc_now("seconds"),
            positions=positions,
            rules=job.spec.rules,
        ),
        job.spec.output.bucket(),
    )
    check_cut(job)
    if (cut.num_rows, cut.positions) != (num_rows, positions):
        raise OutputError(
            f"{out}: its slices began with {cut.num_rows:,} chosen rows, but spec and input now choose {num_rows:,} or "
            "others; restore them, or give the job another output.path"
        )


def check_cut(job: Job) -> None:
    """Raise DriftError if the other slices of the output folder began as another job."""
    out = job.spec.output.folder
    refuse_other_cut(out, job.slice)
    identity = _identity_of_all(job)
    cut = read_cut(out)
    if cut is not None and cut.identity != identity:
        raise drift_error(f"{out} holds slices of a job", cut.identity, identity)


def _identity_of_all(job: Job) -> dict[str, Any]:
    return {name: value for name, value in job.identity.items() if name != "slice"}


def drift_error(
    holder: str,
    before: Mapping[str, Any] = {},
    current: Mapping[str, Any] = {},
    *,
    files: Sequence[str] = (),
    output: OutputSpec | None = None,
) -> DriftError:
    """The error for another job.

    holder: what holds the job, with this identity before. files: see `check_drift`. output: where the job is, if that
    may be a bucket.
    """
    lines = [
        f"  {name}: the job has {_shown(before, name)}, now it is {_shown(current, name)}"
        for name in sorted(before.keys() | current.keys())
        if before.get(name) != current.get(name)
    ]
    if _has_scripted(before) and not _has_scripted(current):
        lines = [line for line in lines if not line.startswith(f"  {_SCRIPTED}")]
        lines.append("  scripted: the job has it, so its answers are invented; now it is left out")
    return DriftError(
        f"{holder} that began with other settings:\n"
        + "\n".join([*lines, *files])
        + "\nset these back to continue the job, or give the new job another output.path; or "
        + _beginning_anew(output)
    )


def _has_scripted(identity: Mapping[str, Any]) -> bool:
    return any(name.startswith(_SCRIPTED) for name in identity)


def _shown(identity: Mapping[str, Any], name: str) -> str:
    if name not in identity or (name == "input.limit" and identity[name] is None):
        return "nothing"
    return _MEANINGS.get(name, "") + json.dumps(identity[name], ensure_ascii=False)

"""What this version of batchinf can read and continue: format versions, stored specs and columns of other versions."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.manifest.commit_log import Fields
from batchinf.manifest.lines import Header
from batchinf.spec.file import dump_spec
from batchinf.spec.job import OLDEST_RULES, JobSpec

# Of all files in an output folder. CONTRIBUTING.md says when to raise it, and what a later version must still read.
FORMAT_VERSION = 3
OLDEST_VERSION = 2
_LAST_COMMITS = {2: "ce7877c3"}
"""The last commit of batchinf that runs rows of jobs in an older format. Later ones only read such jobs."""
_FRESH = "start a new job with --fresh (in Python fresh=True), which keeps the old folder under another name"


def check_version(folder: Folder, fields: Fields) -> None:
    """Raise OutputError for a line of a format version that this version of batchinf does not read."""
    version = fields.get("format_version")
    if not isinstance(version, int) or OLDEST_VERSION <= version <= FORMAT_VERSION:
        return
    age = "a newer" if version > FORMAT_VERSION else "an older"
    writer = fields.get("batchinf_version")
    is_one = OLDEST_VERSION == FORMAT_VERSION
    reads = f"version {FORMAT_VERSION}" if is_one else f"versions {OLDEST_VERSION} to {FORMAT_VERSION}"
    raise OutputError(
        f"{folder.root} was written by {age} batchinf{f', {writer},' if writer else ''} in format version {version}; "
        f"this one reads {reads}: use {age} one, or {_FRESH}"
    )


def check_current(folder: Folder, header: Header, *, is_done: bool) -> None:
    """Raise OutputError for a job in an older format, which can be read, but runs no more rows."""
    if header.format_version == FORMAT_VERSION:
        return
    commit = _LAST_COMMITS[header.format_version]
    way_out = f"finish it with batchinf of commit {commit}"
    if is_done:
        way_out = f"run its rows in a new job with input.exclude.job, or use batchinf of commit {commit}"
    raise OutputError(
        f"{folder.root} holds a job in format version {header.format_version}, and this batchinf runs and repairs only "
        f"version {FORMAT_VERSION}: {way_out}"
    )


def rules_of(spec: Mapping[str, Any]) -> int:
    """The rules of a stored spec: 1 if it is older than their numbers."""
    return int(spec.get("rules", 1))


def older_rules(rules: int) -> str:
    """Why rows of a job with these rules do not run, and their prompts may come out otherwise; empty if they do."""
    if rules >= OLDEST_RULES:
        return ""
    return f"the job began with rules {rules}, which only batchinf of commit {_LAST_COMMITS[2]} and before has: use it"


def stored_spec(spec: dict[str, Any]) -> JobSpec:
    """The spec in a job's manifest. Raises OutputError if this version of batchinf cannot read it.

    A spec of older rules has the oldest ones that there are: such a job is finished, so no row runs by them.
    """
    try:
        return JobSpec.model_validate({**spec, "rules": max(rules_of(spec), OLDEST_RULES)})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise OutputError(
            f"the stored spec has {field or 'values'} that this version of batchinf does not read ({first['msg']})"
        ) from error


def spec_text(spec: dict[str, Any], limit: int | None) -> str:
    """The text of `job.yaml`: the header's spec with the current `input.limit`."""
    return dump_spec(stored_spec({**spec, "input": {**spec["input"], "limit": limit}}))


def later_columns_line(names: Sequence[str]) -> str:
    """A line for users about columns that the job goes on without."""
    if len(names) == 1:
        return f"column {names[0]} is of a later version; this job goes on without it"
    return f"columns {', '.join(names)} are of a later version; this job goes on without them"


def begun_spec(folder: Folder, header: Header) -> JobSpec:
    """The spec with which a job began. Raises OutputError if this version of batchinf cannot continue the job."""
    with _naming(folder, header):
        return stored_spec(header.spec)


def later_columns(folder: Folder, header: Header) -> list[str]:
    """The columns that this version of batchinf writes, and the job does not have, because it began without them.

    Raises OutputError if this version cannot continue the job: it lacks a column, or gives it another type.
    """
    with _naming(folder, header):
        return header.columns.later(stored_spec(header.spec))


@contextlib.contextmanager
def _naming(folder: Folder, header: Header) -> Iterator[None]:
    """Add to an OutputError which job cannot be continued, and what to do."""
    try:
        yield
    except OutputError as error:
        raise OutputError(
            f"{folder.root} holds a job that this version of batchinf cannot continue: {error}; continue it with "
            f"batchinf {header.batchinf_version}, which began it, or {_FRESH}"
        ) from error

"""A row of `inspect` as one HTML file: fills the page `row.html`."""

import pathlib

from batchinf.base.errors import UserError
from batchinf.base.storage import PAGE_MARK, reason, write_named
from batchinf.commands.inspect import (
    InspectedSample,
    InspectReport,
    probability,
    sample_title,
    share,
    shown_fields,
    token_text,
)
from batchinf.report.template import template


def row_page(report: InspectReport) -> str:
    """The row as one HTML file without scripts, with everything in it."""
    return template("row.html").render(
        report=report,
        error_of=_error,
        sample_title=sample_title,
        shown_fields=shown_fields,
        token_text=token_text,
        probability=probability,
        share=share,
    )


def _error(sample: InspectedSample) -> str:
    error = sample.fields.get("error_type")
    return "" if error is None else f"{error}: {sample.fields.get('error_message')}"


def write_page(report: InspectReport, path: str) -> None:
    """Write the page. Raises UserError if it cannot be written, or if another file is there."""
    try:
        write_named(pathlib.Path(path), row_page(report).encode(errors="backslashreplace"), PAGE_MARK)
    except OSError as error:
        raise UserError(f"--html: cannot write {path}: {reason(error)}; name another file") from error

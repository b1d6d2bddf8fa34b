"""A row of `inspect` as one HTML file: fills the page `row.html`."""

import os
import pathlib

from batchinf.base.errors import UserError
from batchinf.base.storage import reason
from batchinf.commands.inspect import InspectedSample, InspectReport
from batchinf.commands.text.inspect import probability, sample_title, share, shown_fields, token_text
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
    """Write the page. Raises UserError if the file cannot be written."""
    try:
        pathlib.Path(path).write_text(row_page(report), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"--html: cannot write {os.fspath(path)}: {reason(error)}") from error

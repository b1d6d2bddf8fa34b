"""A manifest's header for tests whose job has no files."""

from typing import Any

import pyarrow as pa

from batchinf.manifest.columns import Columns
from batchinf.manifest.lines import Header
from batchinf.manifest.versions import FORMAT_VERSION
from batchinf.source.cache import schema_text


def header_of(**changed: Any) -> Header:
    """A header with these fields; the others are small or empty."""
    no_columns = schema_text(pa.schema([]))
    fields = {
        "format_version": FORMAT_VERSION,
        "batchinf_version": "0.1.0",
        "job_id": "0" * 32,
        "created_at": "2026-01-01T00:00:00+00:00",
        "identity": {},
        "fingerprint": "0" * 32,
        "layout": {},
        "spec": {},
        "columns": Columns(journal=no_columns, part=no_columns),
    }
    return Header(**fields | changed)

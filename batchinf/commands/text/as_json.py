"""A command's report as one JSON object, for `--json`."""

import dataclasses
import json
import math
from typing import Any


def to_json(report: Any) -> str:
    """One line. Fields have the names of the report's dataclasses; a number that is not finite is null."""
    # Dates, bytes and the like, as an input row may have them, are text.
    return json.dumps(_values(report), default=str)


def _values(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: _values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Words that all tasks use for what `diff` found."""

import math
from typing import Any

from batchinf.tasks.changes import DeltaSummary

_MAX_CHARS = 120


def delta_text(deltas: DeltaSummary) -> str:
    """The differences in one line."""
    others = f"; {deltas.num_not_finite:,} more are not finite" if deltas.num_not_finite else ""
    return (
        f"B - A is {deltas.mean:+.2e} on average, |B - A| {deltas.mean_abs:.2e}, at most {deltas.max_abs:.2e}{others}"
    )


def clip_value(value: Any) -> str:
    """A value in one short line."""
    text = "nothing" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
    return repr(text)[:_MAX_CHARS] if isinstance(value, str) and "\n" in text else text[:_MAX_CHARS]

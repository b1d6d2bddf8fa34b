"""Words for what changed between two jobs' texts."""

from collections.abc import Iterator
from typing import Any

from batchinf.tasks.changes import Comparison
from batchinf.tasks.changes_text import clip_value, delta_text
from batchinf.tasks.generate.changes import TextChanges, TextsFound


def _lines(found: TextsFound) -> Iterator[str]:
    for reason in found.finish_reasons:
        if reason.a != reason.b:
            yield f"  finish_reason {reason.a} -> {reason.b}: {reason.num_rows:,}"
    if found.logprobs.num:
        yield (
            f"logprobs of {found.logprobs.num:,} tokens that both gave ({found.num_compared_rows:,} rows, up to the "
            f"first difference): {delta_text(found.logprobs)}"
        )


def _example_lines(key: str, row: dict[str, Any]) -> Iterator[str]:
    yield f"  {key} {row['key']}, sample {row['sample_index']}, other from token {row['first_difference']} on:"
    yield from (f"    {name} {clip_value(row[f'text_{name.lower()}'])}" for name in "AB")


COMPARISON = Comparison(TextChanges, _lines, _example_lines)

"""What `verify` compares of scored rows: the logprobs of the tokens that are scored."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.records import Prompt, Request, Span
from batchinf.tasks.verification import TOKEN_COLUMNS, StoredLogprobs, StoredRow, Verification, stored_logprobs


class ScoreVerification(Verification):
    """See `Verification`."""

    columns = (*TOKEN_COLUMNS, *(f"choice_{name}" for name in TOKEN_COLUMNS))

    def check(self, schema: pa.Schema) -> None:
        """See `Verification`."""
        if not self.spec.output.include_token_logprobs:
            raise UserError("the job stored sums alone; run one with output.include_token_logprobs: true")

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredLogprobs]:
        """See `Verification`: of each span."""
        spans = () if prompt.scoring is None else prompt.scoring.spans
        columns = _of_choices if "choice_logprobs" in row.values else _of_windows
        for span, own in zip(spans, columns(row.values, spans), strict=True):
            first = len(span.token_ids) - len(own["logprobs"])
            yield stored_logprobs(own, "scored", span.token_ids, first, span.token_ids[first:], "", 0)


def _of_choices(row: dict[str, Any], spans: Sequence[Span]) -> list[dict[str, Any]]:
    kept = {name: values for name in TOKEN_COLUMNS if (values := row.get(f"choice_{name}")) is not None}
    return [{name: values[place] for name, values in kept.items()} for place in range(len(spans))]


def _of_windows(row: dict[str, Any], spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Of a text, whose windows' tokens lie end to end."""
    # Where all of a context is stored, nothing is of its first token.
    has_all = len(spans) == 1 and len(row["logprobs"]) == len(spans[0].token_ids)
    starts = [1 if has_all else span.start for span in spans]
    ends = np.cumsum([len(span.token_ids) - start for span, start in zip(spans, starts, strict=True)]) + has_all
    return [
        {
            name: row[name][end - len(span.token_ids) + start : end]
            for name in TOKEN_COLUMNS
            if row.get(name) is not None
        }
        for span, start, end in zip(spans, starts, ends.tolist(), strict=True)
    ]

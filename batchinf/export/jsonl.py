"""Export as JSON lines: an object for each row, with the logprobs of a token in one place."""

from collections.abc import Sequence
from typing import IO, Any

import pyarrow as pa

from batchinf.export.base import ExportedJob, Format, json_lines, rows_of
from batchinf.export.tokens import PREFIXES, StoredToken, token_columns, tokens_of
from batchinf.results import Results


class JsonLinesExport(Format):
    """Columns of tokens become one list: `{"token", "token_id", "logprob", "rank", "top"}` for each token."""

    name = "jsonl"
    suffix = ".jsonl"

    def __init__(self, job: ExportedJob, schema: pa.Schema, stream: IO[bytes], errors: IO[bytes]) -> None:
        super().__init__(job, schema, stream, errors)
        own = pa.schema([field for field in job.results.own_schema if field.name in schema.names])
        self._token_columns = {prefix: columns for prefix in PREFIXES if (columns := token_columns(prefix, own))}

    @classmethod
    def columns(cls, wanted: Sequence[str], results: Results) -> list[str]:
        """See `Format`. Logprobs bring the other columns of their tokens with them."""
        names = super().columns(wanted, results)
        brought = [token_columns(prefix, results.own_schema) for prefix in PREFIXES if f"{prefix}logprobs" in names]
        return list(dict.fromkeys([*names, *(name for columns in brought for name in columns)]))

    def write(self, batch: pa.RecordBatch) -> None:
        rows = rows_of(batch)
        for prefix, columns in self._token_columns.items():
            for row in rows:
                self._join(prefix, columns, row)
        self.stream.write(json_lines(rows))

    def _join(self, prefix: str, columns: Sequence[str], row: dict[str, Any]) -> None:
        """Put all that is known of a row's tokens into its column of logprobs."""
        tokens = {name: row[name] for name in columns}
        for name in columns:
            if name not in (f"{prefix}token_ids", f"{prefix}logprobs"):
                del row[name]
        if tokens[f"{prefix}logprobs"] is not None:
            stored = [*tokens_of(prefix, tokens)]
            spelt = zip(stored, self.job.tokens.spell(stored), strict=True)
            row[f"{prefix}logprobs"] = [_entry(token, text, others) for token, (text, others) in spelt]


def _entry(token: StoredToken, text: str, others: Sequence[str]) -> dict[str, Any]:
    """What is known of a token. others: the texts of its alternatives."""
    entry: dict[str, Any] = {"token": text, "token_id": token.id, "logprob": token.logprob, "rank": token.rank}
    if token.top is not None:
        top: dict[str, float] = {}
        for name, (token_id, logprob) in zip(others, token.top, strict=True):
            # Two ids may have one text, or none: the less likely one then goes by its id, too.
            top[name if name and name not in top else f"{name} ({token_id})"] = logprob
        entry["top"] = top
    return entry

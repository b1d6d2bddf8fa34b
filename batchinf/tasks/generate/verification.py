"""What `verify` compares of generated text: the logprobs of output tokens and of prompt tokens."""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.records import Prompt, Request
from batchinf.tasks.verification import TOKEN_COLUMNS, StoredLogprobs, StoredRow, Verification, stored_logprobs


class TextVerification(Verification):
    """See `Verification`."""

    columns = ("token_ids", *TOKEN_COLUMNS, *(f"prompt_{name}" for name in TOKEN_COLUMNS))

    def check(self, schema: pa.Schema) -> None:
        """See `Verification`."""
        if "logprobs" not in schema.names and "prompt_logprobs" not in schema.names:
            raise UserError(
                "the job stored no logprobs to verify; run one with sampling.logprobs or sampling.prompt_logprobs"
            )
        if "logprobs" in schema.names and "token_ids" not in schema.names:
            raise UserError(
                "the job stored no token_ids, whose logprobs could be verified; run one with "
                "output.include_token_ids: true"
            )
        if self.spec.sampling.structured_outputs is not None:
            raise UserError("structured_outputs change the logprobs that are stored: they cannot be verified")

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredLogprobs]:
        """See `Verification`."""
        values = row.values
        ids = requests[values["sample_index"]].prompt_token_ids
        if values.get("prompt_logprobs") is not None and len(ids) > 1:
            # Nothing is stored of the first token.
            yield stored_logprobs(values, "prompt", ids, 1, ids[1:], "prompt_", 1)
        if values.get("logprobs") is not None and values["token_ids"]:
            own = values["token_ids"]
            yield stored_logprobs(values, "output", [*ids, *own], len(ids), own, "", 0)

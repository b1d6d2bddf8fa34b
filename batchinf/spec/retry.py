"""The section `retry` of a job spec: rows that run again, in the same run, when all rows are done."""

import json
from typing import Annotated, Any

from pydantic import Field, ValidationError

from batchinf.spec.fields import RUNTIME, Section, Text, wrong
from batchinf.spec.sampling import SamplingSpec

SAMPLING = "sampling."
# A retry cannot change these: they change the output's columns, their meaning or the number of rows.
FIXED_SAMPLING = frozenset(
    f"sampling.{name}" for name in ("n", "logprobs", "prompt_logprobs", "logprob_token_ids", "logprobs_mode")
)
# A retry may change them, except the one of `n`. The section `retry` cannot.
SAMPLING_COLUMNS = "sampling.columns"


class RetrySpec(Section):
    """Rows that run again, in the same run, when all rows are done. See docs/how-to/try-again.md."""

    attempts: Annotated[int, Field(ge=1, le=100), RUNTIME] = 1
    """How often a row runs again at most."""
    where: Annotated[Text, RUNTIME] = "errors"
    """Which rows: `errors`, or an expression in SQL over the output columns. All samples of a row run again."""
    set: Annotated[dict[Text, Any], RUNTIME] = Field(default_factory=dict)
    """Fields of `sampling` that have other values then, by dotted names, such as `{sampling.temperature: 0.7}`."""

    def check(self, sampling: SamplingSpec) -> None:
        """Raise the error of `wrong` if `set` cannot be set over the job's sampling."""
        for name, value in self.set.items():
            field = name.removeprefix(SAMPLING)
            is_fixed = name in FIXED_SAMPLING or name == SAMPLING_COLUMNS
            if field == name or field not in SamplingSpec.model_fields or is_fixed:
                raise wrong(f"got {name}; must be the dotted name of a field of sampling, such as "
                            "sampling.temperature, but not n, columns or those of logprobs", "retry.set")  # fmt: skip
            if value is None or (isinstance(value, dict) and [*value] == ["column"]):
                raise wrong(f"got {json.dumps(value)} for {name}; must be a value for all rows", "retry.set")
        try:
            tried = self.sampling_of(sampling)
        except ValidationError as error:
            first = error.errors()[0]
            names = [*map(str, first["loc"]), first.get("ctx", {}).get("field", "")]
            raise wrong(f"{SAMPLING}{'.'.join(filter(None, names))}: {first['msg']}", "retry.set") from None
        if not tried.columns.keys() <= sampling.columns.keys():
            raise wrong("got {column: name}; must be a value for all rows", "retry.set")

    def sampling_of(self, sampling: SamplingSpec) -> SamplingSpec:
        """The sampling of rows that run again. A field of `set` is for all rows, so its column is left out."""
        changes = {name.removeprefix(SAMPLING): value for name, value in self.set.items()}
        columns = {name: column for name, column in sampling.columns.items() if name.partition(".")[0] not in changes}
        fields = {**sampling.model_dump(mode="json", exclude_unset=True), "columns": columns, **changes}
        return SamplingSpec.model_validate_json(json.dumps(fields))

"""The section `output` of a job spec: where the output is, and the columns and the types that are stored."""

import hashlib
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from batchinf.base.bucket import Bucket
from batchinf.base.paths import bucket_problem, elsewhere, is_bucket, shown_url, user_cache
from batchinf.base.text import clip
from batchinf.spec.fields import (
    IDENTITY,
    LAYOUT,
    RUNTIME,
    Path,
    Positive,
    Section,
    Text,
    identity_or,
    on_this_host,
    runtime_or,
    without,
    wrong,
)

TEXTS = {"type": "array", "items": {"type": "string"}}
_COPY_OUTPUT = (
    "give a folder here, such as out/my-job, or a bucket as s3://bucket/my-job, gs://…, az://… or "
    "hf://buckets/user/bucket/my-job"
)


def output_problem(path: str) -> str | None:
    """What is wrong with an output's path or URL; None if nothing is."""
    return bucket_problem(path) if is_bucket(path) else elsewhere(path, _COPY_OUTPUT)


def _dataset_problem(name: str) -> str | None:
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII):
        return None
    return f"got {clip(shown_url(name), 100)!r}; must be the name of a dataset on the hub, USER/NAME"


def _split_problem(name: str) -> str | None:
    # As `datasets` allows: the name begins the names of files.
    return None if re.fullmatch(r"\w+(\.\w+)*", name) else f"got {name!r}; must be a name such as train"


class PushSpec(Section):
    """The dataset on the hub that gets the output rows when the job is done."""

    repository: Annotated[Text, without(_dataset_problem), RUNTIME]
    """Its name, USER/NAME. It must be new, or one that this job has pushed; a new one is private."""
    split: Annotated[Text, without(_split_problem), RUNTIME] = "train"
    """The split that holds the rows."""
    public: Annotated[bool, RUNTIME] = False
    """Push to a dataset that is public, too, and make a new one public."""
    overwrite: Annotated[bool, RUNTIME] = False
    """Replace the data and the card of a dataset that this job has not pushed."""


class OutputSpec(Section):
    """The output folder, and the columns and the types that are stored."""

    path: Annotated[Path, without(output_problem), RUNTIME]
    """The job's output folder, on this host or on a file system that it shares with others. Or a folder in a bucket,
    such as `s3://bucket/my-job`: see docs/how-to/rented-nodes.md."""
    work_dir: Annotated[Annotated[Path, on_this_host("give a folder here")] | None, RUNTIME] = None
    """With a bucket: the folder of this host in which the job works. It may be lost at any time. Default: one in the
    user's cache folder."""
    store_timeout_s: Annotated[float, Field(ge=0, le=10**9), RUNTIME] = 3600.0
    """With a bucket: end the run if the store has not answered for this many seconds."""
    rows_per_shard: Annotated[Positive | Literal["auto"], LAYOUT] = "auto"
    """Rows in one Parquet part. Parts of the last eighth of the rows have a quarter of this number. `auto`: parts of
    about 64 MiB with at most 50,000 rows; a small job has smaller parts. Replicas share the rows of a part, so this
    does not change how evenly they work."""
    logprobs_dtype: Annotated[Literal["float16", "float32"], IDENTITY] = "float32"
    """Stored type of logprobs."""
    include_prompt: Annotated[bool, IDENTITY] = False
    """Store the rendered `prompt` and its `prompt_token_ids`."""
    include_token_ids: Annotated[bool, IDENTITY] = True
    """Store `token_ids`."""
    include_token_logprobs: Annotated[bool, IDENTITY] = True
    """Task `score`: store the scored tokens with their logprobs and ranks; false stores only the sums."""
    keep_columns: Annotated[dict[Text, Text], identity_or(TEXTS)] = Field(default_factory=dict)
    """Input columns to copy to the output. A mapping from input names to output names renames them."""
    max_output_bytes: Annotated[int | None, Field(ge=1, le=2**63 - 1), RUNTIME] = None
    """Refuse a job at its start if its estimated output is larger; default: 10**12 for task `logits`."""

    push_to_hub: Annotated[PushSpec | None, runtime_or({"type": "string"})] = None
    """Push the output rows to this dataset on the hub when the job is done with exit code 0. Text is its name. See
    docs/how-to/rented-gpu.md."""

    @field_validator("push_to_hub", mode="before")
    @classmethod
    def _short_push(cls, value: Any) -> Any:
        # `push_to_hub: name` is short for `push_to_hub: {repository: name}`.
        return {"repository": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_bucket(self) -> Self:
        if self.work_dir is not None and not self.is_bucket:
            raise wrong("must be left out unless output.path is a bucket: the job works in output.path", "work_dir")
        return self

    @property
    def is_bucket(self) -> bool:
        """Whether the output is in a bucket."""
        return is_bucket(self.path)

    @property
    def folder(self) -> str:
        """The folder of this host in which the job works: `path`, unless that is a bucket."""
        if not self.is_bucket:
            return self.path
        name = hashlib.sha256(self.path.rstrip("/").encode()).hexdigest()[:16]
        return self.work_dir or str(user_cache("jobs") / name)

    def bucket(self) -> Bucket | None:
        """The bucket of the output; None for a folder. Raises OutputError if it cannot be opened."""
        return Bucket(self.path) if self.is_bucket else None

    @field_validator("keep_columns", mode="before")
    @classmethod
    def _named_as_they_are(cls, columns: Any) -> Any:
        if not isinstance(columns, list | tuple) or not all(isinstance(column, str) for column in columns):
            return columns
        for column in columns:
            if columns.count(column) > 1:
                raise wrong(f"got {column!r} twice; name each column once")
        return {column: column for column in columns}

    @field_validator("keep_columns")
    @classmethod
    def _each_name_once(cls, columns: dict[str, str]) -> dict[str, str]:
        names = list(columns.values())
        for name in names:
            if names.count(name) > 1:
                raise wrong(f"got {name!r} for two columns; give each a name of its own")
        return columns

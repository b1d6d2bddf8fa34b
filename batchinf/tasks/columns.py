"""The Arrow columns and list arrays that tasks share: of results in the journal, and of output rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from batchinf.base.errors import RowError
from batchinf.prompts import encoder
from batchinf.records import Completion, IntArray, Prompt, Result, TokenLogprobs
from batchinf.spec.job import JobSpec

Fields = Sequence[tuple[str, pa.DataType]]

# Parquet's name for the items of a list. So a file reads back with the schema that it was written with.
ITEM = "element"
INT32 = np.dtype(np.int32)
# Columns with a value for each token of an output or, after `prompt_`, of a prompt.
TOKEN_COLUMNS = ("logprobs", "ranks", "top_token_ids", "top_logprobs")
IMAGE_DIGESTS = "image_digests"  # only in jobs with images
# Only in jobs with images that began with this column: see `Prompt.unrendered_hash`. `input.exclude` compares it, since
# it is known without the model's processor. In rows without images it is `prompt_hash`.
UNRENDERED_HASH = "unrendered_prompt_hash"
_MAX_OFFSET = 2**31 - 1


def logprob_fields(prefix: str, k: int | None, logprob: pa.DataType) -> Fields:
    if k is None:
        return []
    fields = [(f"{prefix}logprobs", list_of(logprob)), (f"{prefix}ranks", list_of(pa.int32()))]
    if k > 0:
        fields.append((f"{prefix}top_token_ids", list_of(list_of(pa.int32()))))
        fields.append((f"{prefix}top_logprobs", list_of(list_of(logprob))))
    return fields


def list_of(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field(ITEM, item))


def float_type(dtype: npt.DTypeLike) -> pa.DataType:
    """Arrow's type of `float16` or `float32`."""
    return pa.from_numpy_dtype(np.dtype(dtype))


def leaf_of(field: pa.Field) -> tuple[str, pa.DataType]:
    """Path and type of a column's leaf in Parquet."""
    path = field.name
    item = field.type
    while pa.types.is_list(item) or pa.types.is_fixed_size_list(item):
        path = f"{path}.list.{ITEM}"
        item = item.value_type
    return path, item


def _error_columns(errors: Sequence[RowError | None]) -> dict[str, pa.Array]:
    return {
        "error_type": strings([None if error is None else error.error_type for error in errors]),
        "error_message": strings([None if error is None else error.error_message for error in errors]),
    }


def shared_columns(results: Sequence[Result], include_prompt: bool, *, has_images: bool = False) -> dict[str, pa.Array]:
    """The columns that the results of all tasks have."""
    # Unless a task stores output tokens, a completion has none.
    num_output_tokens = [None if result.completion is None else 0 for result in results]
    return {
        "request_index": pa.array([result.request_index for result in results], pa.int32()),
        "num_requests": pa.array([result.num_requests for result in results], pa.int32()),
        "attempts": pa.array([result.attempts for result in results], pa.int32()),
        "num_output_tokens": pa.array(num_output_tokens, pa.int32()),
        **_error_columns([result.error for result in results]),
        **_prompt_columns([result.prompt for result in results], include_prompt),
        **(_image_columns([result.prompt for result in results]) if has_images else {}),
    }


# Formats, widths and heights of images, in jobs that began with these columns, in the order of `Prompt.image_shapes`.
IMAGE_FACTS: Fields = (
    ("image_formats", list_of(pa.string())),
    ("image_widths", list_of(pa.int32())),
    ("image_heights", list_of(pa.int32())),
)


def _image_columns(prompts: Sequence[Prompt]) -> dict[str, pa.Array]:
    digests = [None if prompt.image_digests is None else list(prompt.image_digests) for prompt in prompts]
    shapes = [None if prompt.image_digests is None else prompt.image_shapes for prompt in prompts]
    facts = {
        name: pa.array([None if row is None else [shape[place] for shape in row] for row in shapes], type)
        for place, (name, type) in enumerate(IMAGE_FACTS)
    }
    hashes = [_unrendered_hash(prompt) for prompt in prompts]
    return {
        IMAGE_DIGESTS: pa.array(digests, list_of(pa.string())),
        UNRENDERED_HASH: pa.array(hashes, pa.int64()),
        **facts,
    }


def _unrendered_hash(prompt: Prompt) -> int | None:
    if prompt.unrendered_hash is not None or prompt.image_digests != ():
        return prompt.unrendered_hash
    return prompt_hash(np.array(prompt.token_ids, np.int32))


def _prompt_columns(prompts: Sequence[Prompt], include_prompt: bool) -> dict[str, pa.Array]:
    ids = _id_arrays(prompts)
    columns = {
        "row_index": pa.array([prompt.row_index for prompt in prompts], pa.int64()),
        "prompt_hash": pa.array(_prompt_hashes(prompts, ids), pa.int64()),
        "num_prompt_tokens": pa.array([len(prompt.token_ids) or None for prompt in prompts], pa.int32()),
        encoder.SECOND_BOS_COLUMN: pa.array([prompt.has_second_bos for prompt in prompts], pa.bool_()),
        "prompt_truncated": pa.array([p.is_truncated if p.token_ids else None for p in prompts], pa.bool_()),
        "request": pa.array([prompt.request for prompt in prompts], pa.string()),
    }
    return columns | (_texts_and_ids(prompts, ids) if include_prompt else {})


def _id_arrays(prompts: Sequence[Prompt]) -> list[IntArray]:
    """The token ids of each prompt."""
    # A row's samples share one Prompt. Its ids are converted only once, which costs 20 ns a token.
    arrays = {id(prompt): np.array(prompt.token_ids, np.int32) for prompt in {id(p): p for p in prompts}.values()}
    return [arrays[id(prompt)] for prompt in prompts]


def _texts_and_ids(prompts: Sequence[Prompt], ids: Sequence[IntArray]) -> dict[str, pa.Array]:
    """The columns of `output.include_prompt`."""
    return {
        "prompt": strings([prompt.text for prompt in prompts]),
        "prompt_token_ids": number_lists([array if len(array) else None for array in ids]),
    }


def _prompt_hashes(prompts: Sequence[Prompt], ids: Sequence[IntArray]) -> list[int | None]:
    return [prompt_hash(own, prompt.image_digests or ()) for own, prompt in zip(ids, prompts, strict=True)]


def prompt_hash(token_ids: IntArray, image_digests: Sequence[str] = ()) -> int | None:
    """xxh3-64 of the ids as little-endian int32, and of the digests of images, as a signed number; None without ids."""
    if not len(token_ids):
        return None
    hashed = xxhash.xxh3_64(token_ids.data)
    for digest in image_digests:
        hashed.update(bytes.fromhex(digest))
    return int.from_bytes(hashed.digest(), "big", signed=True)


def output_columns(completions: Sequence[Completion | None]) -> dict[str, pa.Array]:
    token_ids = [None if completion is None else completion.token_ids for completion in completions]
    sums = [None if completion is None else completion.cumulative_logprob for completion in completions]
    return {
        "token_ids": number_lists(token_ids),
        "cumulative_logprob": pa.array(sums, pa.float64()),
        "num_output_tokens": pa.array([None if ids is None else len(ids) for ids in token_ids], pa.int32()),
    }


def number_lists(parts: Sequence[npt.NDArray[Any] | None], dtype: np.dtype[Any] = INT32) -> pa.ListArray:
    """list<dtype> from the numbers of each list; None becomes null."""
    offsets = offsets_of([0 if part is None else len(part) for part in parts])
    flat = concatenate([part for part in parts if part is not None], dtype)
    return list_array(offsets, pa.array(flat), np.array([part is None for part in parts], np.bool_))


def strings(values: list[str | None]) -> pa.StringArray:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        # Error messages of other libraries may have lone surrogates, which Arrow's UTF-8 cannot hold.
        encoded = [None if value is None else value.encode("utf-8", "replace") for value in values]
        return pa.array(encoded, pa.binary()).cast(pa.string())


def logprob_columns(prefix: str, tokens: "Tokens", k: int | None, dtype: np.dtype[Any]) -> dict[str, pa.Array]:
    if k is None:
        return {}
    columns = {
        f"{prefix}logprobs": tokens.column([part.logprobs[:, 0] for part in tokens.parts], dtype),
        f"{prefix}ranks": tokens.column([part.ranks for part in tokens.parts], INT32),
    }
    if k > 0:
        columns[f"{prefix}top_token_ids"] = tokens.top([part.token_ids for part in tokens.parts], k, INT32)
        columns[f"{prefix}top_logprobs"] = tokens.top([part.logprobs for part in tokens.parts], k, dtype)
    return columns


class Tokens:
    """Makes list columns from the tokens of several completions.

    parts: one for each result; None: the list is null. num_leading: number of nulls before the tokens of each part.
    unread: positions in each list whose tokens the model did not read, such as those of images: they become null.
    """

    def __init__(
        self,
        parts: Sequence[TokenLogprobs | None],
        num_leading: int = 0,
        unread: Sequence[IntArray | None] | None = None,
    ) -> None:
        self.parts = [part for part in parts if part is not None]
        self._is_missing = np.array([part is None for part in parts], np.bool_)
        self._offsets = offsets_of([0 if part is None else len(part.ranks) + num_leading for part in parts])
        self._num_tokens = int(self._offsets[-1])
        self._is_null: npt.NDArray[np.bool_] | None = None
        if num_leading:
            self._is_null = np.zeros(self._num_tokens, np.bool_)
            self._is_null[self._offsets[:-1][~self._is_missing]] = True
        if unread is not None and any(positions is not None for positions in unread):
            self._leave_out(parts, num_leading, unread)

    def _leave_out(
        self, parts: Sequence[TokenLogprobs | None], num_leading: int, unread: Sequence[IntArray | None]
    ) -> None:
        """Make the unread positions null, and take their tokens out of `parts`."""
        assert self._is_null is not None
        kept = []
        for part, positions, first in zip(parts, unread, self._offsets, strict=False):
            if part is None:
                continue
            if positions is None or not len(positions):
                kept.append(part)
                continue
            self._is_null[first + positions] = True
            left = np.delete(np.arange(len(part.ranks)), positions[positions >= num_leading] - num_leading)
            kept.append(TokenLogprobs(part.token_ids[left], part.logprobs[left], part.ranks[left]))
        self.parts = kept

    def column(self, pieces: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> pa.ListArray:
        """list<dtype> from one piece [num_tokens] for each part."""
        flat = concatenate(pieces, dtype)
        if self._is_null is None:
            return list_array(self._offsets, pa.array(flat), self._is_missing)
        spread = np.zeros(self._num_tokens, dtype)
        spread[~self._is_null] = flat
        return list_array(self._offsets, pa.array(spread, mask=self._is_null), self._is_missing)

    def top(self, pieces: Sequence[npt.NDArray[Any]], k: int, dtype: np.dtype[Any]) -> pa.ListArray:
        """list<list<dtype>> from columns 1 to k of one piece [num_tokens, k + 1] for each part."""
        lengths = np.full(self._num_tokens, k)
        if self._is_null is not None:
            lengths[self._is_null] = 0
        offsets = offsets_of(lengths)
        flat = concatenate([piece[:, 1 : k + 1] for piece in pieces], dtype).reshape(-1)
        return list_array(self._offsets, list_array(offsets, pa.array(flat), self._is_null), self._is_missing)


def concatenate(pieces: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not pieces:
        return np.zeros(0, dtype)
    with np.errstate(over="ignore"):  # float16 turns very small logprobs into -inf
        return np.concatenate(pieces, dtype=dtype, casting="same_kind")


def offsets_of(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Arrow's offsets of lists with these lengths. Raises OverflowError."""
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(ends) and ends[-1] > _MAX_OFFSET:
        raise OverflowError(f"got {ends[-1]} items for one column of lists, which holds 2**31 - 1; encode fewer")
    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends
    return offsets


def list_array(offsets: npt.NDArray[np.int32], values: pa.Array, is_null: npt.NDArray[np.bool_] | None) -> pa.ListArray:
    if offsets[-1] != len(values):  # Arrow itself would read beyond the end
        raise ValueError(f"got {len(values)} values for lists of {offsets[-1]}: not the shape that the spec asks for")
    mask = None if is_null is None or not is_null.any() else pa.array(is_null)
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=list_of(values.type), mask=mask)


def vector_lists(values: Sequence[npt.NDArray[Any] | None], dtype: np.dtype[Any], vector: pa.DataType) -> pa.ListArray:
    """list<vector> from values [num_positions, width] for each result, which are copied once; None becomes null."""
    known = [value for value in values if value is not None]
    if any(value.shape[1] != vector.list_size for value in known):
        widths = sorted({value.shape[1] for value in known})
        raise ValueError(f"got vectors of {widths} numbers; the job's have {vector.list_size}")
    flat = concatenate([value.reshape(-1) for value in known], dtype)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=vector)
    is_null = np.array([value is None for value in values], np.bool_)
    return list_array(offsets_of([0 if value is None else len(value) for value in values]), vectors, is_null)


def repeat(columns: pa.Table, row_index: npt.NDArray[np.int64]) -> pa.Table:
    """Each row of `columns`, repeated for each of its results. row_index: that of each result, sorted."""
    if columns.num_rows == len(row_index):
        return columns
    is_next = np.diff(row_index, prepend=row_index[:1]) != 0
    return columns.take(pa.array(np.cumsum(is_next)))


_OF_RESULTS = frozenset({"request_index", "num_requests", encoder.SECOND_BOS_COLUMN})


def result_schema(spec: JobSpec, task_fields: Fields, *, may_truncate: bool | None = None) -> pa.Schema:
    """The journal's columns of a task: keys, the prompt, the task's own columns, counts and errors.

    may_truncate: whether there is a column `prompt_truncated`; default: whether `input.on_overlong` cuts.
    """
    prompt = [("prompt", pa.string()), ("prompt_token_ids", list_of(pa.int32()))]
    may_truncate = spec.input.on_overlong != "error" if may_truncate is None else may_truncate
    fields = [
        ("row_index", pa.int64()),
        ("request_index", pa.int32()),
        ("num_requests", pa.int32()),
        ("prompt_hash", pa.int64()),
        *([("request", pa.string())] if spec.input.is_batch_file else []),
        *(_image_fields() if spec.input.has_images else []),
        *(prompt if spec.output.include_prompt else []),
        *task_fields,
        ("num_prompt_tokens", pa.int32()),
        *([("prompt_truncated", pa.bool_())] if may_truncate else []),
        ("num_output_tokens", pa.int32()),
        ("error_type", pa.string()),
        ("error_message", pa.string()),
        ("attempts", pa.int32()),
        (encoder.SECOND_BOS_COLUMN, pa.bool_()),
    ]
    return pa.schema(fields)


def _image_fields() -> Fields:
    return [(IMAGE_DIGESTS, list_of(pa.string())), (UNRENDERED_HASH, pa.int64()), *IMAGE_FACTS]


def without_requests(schema: pa.Schema) -> pa.Schema:
    """The fields of a result that an output row has, too."""
    return pa.schema([field for field in schema if field.name not in _OF_RESULTS])

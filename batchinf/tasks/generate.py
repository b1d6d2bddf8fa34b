"""Generate text: n samples of each prompt, each an output row with its tokens and their logprobs.

Results become Arrow columns from flat numpy arrays and offsets; 40 million tokens a second against 0.0006 million
through nested Python lists.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from batchinf.errors import SpecError
from batchinf.records import Completion, IntArray, Prompt, Request, Result, TokenLogprobs
from batchinf.spec import JobSpec

# Named as Parquet names the items of a list, so that a file reads back as the schema that it was written with.
_ITEM = "element"
_MAX_OFFSET = 2**31 - 1
_INT32 = np.dtype(np.int32)

# Kept out of dictionaries and statistics: nearly every value is different, or long.
_UNIQUE = frozenset({"id", "row_index", "prompt_hash", "prompt", "text", "reasoning", "cumulative_logprob"})
_NO_STATISTICS = frozenset({"prompt", "text", "reasoning", "error_message"})


def seed_of(job_seed: int, row_index: int, request_index: int) -> int:
    """A request's own seed, in [0, 2**63).

    63 bits, not 31: among 2**31 seeds a row of 1,000 samples has two alike once in 4,300 rows. Not negative: vLLM
    takes -1 for no seed. It keeps seeds as int64, and a CUDA generator uses them whole (a CPU one the low 32 bits).
    """
    digest = hashlib.blake2b(f"{job_seed},{row_index},{request_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Generate:
    """See `Task`. `spec.sampling` is the resolved one: its temperature is never None."""

    def __init__(self, spec: JobSpec) -> None:
        self._sampling = spec.sampling
        self._output = spec.output
        self._has_id = spec.input.id_column is not None
        self._logprob_dtype = np.dtype(spec.output.logprobs_dtype)
        self.result_schema: pa.Schema = _result_schema(spec)

    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """n requests. `max_tokens` is what the user asks for, even past `max_model_len`, else what fits."""
        sampling = prompt.sampling or self._sampling
        max_tokens = sampling.max_tokens or max(1, max_model_len - len(prompt.token_ids))
        is_greedy = sampling.temperature == 0
        return [
            Request(
                row_index=prompt.row_index,
                request_index=index,
                prompt_token_ids=prompt.token_ids,
                sampling=sampling,
                max_tokens=max_tokens,
                seed=None if is_greedy else seed_of(sampling.seed, prompt.row_index, index),
            )
            for index in range(sampling.n)
        ]

    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """See `Task.encode`. A null is what was never produced."""
        sampling, dtype = self._sampling, self._logprob_dtype
        completions = [result.completion for result in results]
        logprobs = [None if c is None else c.logprobs for c in completions]
        prompt_logprobs = [None if c is None else c.prompt_logprobs for c in completions]
        arrays = {
            **_key_columns(results),
            **_prompt_columns(results, self._output.include_prompt),
            **_output_columns(completions),
            **_text_columns(results),
            **_logprob_columns("", _Tokens(logprobs), sampling.logprobs, dtype),
            # The prompt's first token has no logprob: null at position 0 keeps these aligned to `prompt_token_ids`.
            **_logprob_columns("prompt_", _Tokens(prompt_logprobs, num_leading=1), sampling.prompt_logprobs, dtype),
        }
        schema = self.result_schema
        return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)

    def output_schema(self, columns: Sequence[pa.Field]) -> pa.Schema:
        """id · row_index · prompt_hash · sample_index · kept columns · everything else in the results' order."""
        ids, kept = (columns[:1], columns[1:]) if self._has_id else ((), columns)
        kept = [field.with_name(self._name(field.name)) for field in kept]
        results = [field for field in self.result_schema if field.name not in ("request_index", "num_requests")]
        sample_index = pa.field("sample_index", pa.int32())
        fields = [*(field.with_name("id") for field in ids), *results[:2], sample_index, *kept, *results[2:]]
        names = [field.name for field in fields]
        taken = sorted({field.name for field in kept if names.count(field.name) > 1})
        if taken:
            names_of = {new: column for column, new in self._output.keep_columns.items()}
            own, other = ("columns", "other names") if len(taken) > 1 else ("a column", "another name")
            raise SpecError(
                f"output.keep_columns: got {', '.join(taken)}, which the output has {own} of its own for; "
                f"give {'them' if len(taken) > 1 else 'it'} {other}, as in "
                f"{{{names_of.get(taken[0], taken[0])}: input_{taken[0]}}}"
            )
        return pa.schema([pa.field(field.name, field.type) for field in fields])

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """See `Task.reduce`: each result is a row."""
        schema = self.output_schema([] if columns is None else list(columns.schema))
        arrays = {name: results.column(name) for name in results.column_names}
        arrays["sample_index"] = arrays["request_index"]
        if columns is not None:
            columns = _repeat(columns, results.column("row_index").to_numpy())
            kept = columns.column_names[1:] if self._has_id else columns.column_names
            names = [*(["id"] if self._has_id else []), *map(self._name, kept)]
            arrays |= dict(zip(names, columns.columns, strict=True))
        return pa.Table.from_arrays([arrays[name] for name in schema.names], schema=schema)

    def _name(self, column: str) -> str:
        """What a kept column is called in the output."""
        return self._output.keep_columns.get(column, column)

    def parquet_options(self, schema: pa.Schema) -> dict[str, Any]:
        """zstd 1, byte-stream split on logprobs and ids, dictionaries where values repeat, checksums on pages."""
        own = {*self.result_schema.names} - {"request_index", "num_requests"}
        flat = [field.name for field in schema if not pa.types.is_nested(field.type)]
        leaves = [_leaf(field) for field in schema if field.name in own and pa.types.is_nested(field.type)]
        # DuckDB reads no split float16, which would be 1.55 bytes a logprob against 1.77.
        split = [path for path, item in leaves if item != pa.float16()]
        return {
            "compression": "zstd",
            "compression_level": 1,
            "use_dictionary": [name for name in flat if name not in _UNIQUE],
            "use_byte_stream_split": [*split, "prompt_hash", "cumulative_logprob"],
            "write_statistics": [name for name in flat if name not in _NO_STATISTICS],
            "write_page_checksum": True,
        }


def _result_schema(spec: JobSpec) -> pa.Schema:
    output, sampling = spec.output, spec.sampling
    logprob = pa.float16() if output.logprobs_dtype == "float16" else pa.float32()
    prompt = [("prompt", pa.string()), ("prompt_token_ids", _list(pa.int32()))]
    fields = [
        ("row_index", pa.int64()),
        ("request_index", pa.int32()),
        ("num_requests", pa.int32()),
        ("prompt_hash", pa.int64()),
        *(prompt if output.include_prompt else []),
        ("text", pa.string()),
        *([("reasoning", pa.string())] if spec.model.reasoning_parser is not None else []),
        *([("token_ids", _list(pa.int32()))] if output.include_token_ids else []),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),
        ("cumulative_logprob", pa.float64()),
        *_logprob_fields("", sampling.logprobs, logprob),
        *_logprob_fields("prompt_", sampling.prompt_logprobs, logprob),
        ("num_prompt_tokens", pa.int32()),
        *([("prompt_truncated", pa.bool_())] if spec.input.on_overlong != "error" else []),
        ("num_output_tokens", pa.int32()),
        ("error_type", pa.string()),
        ("error_message", pa.string()),
        ("attempts", pa.int32()),
    ]
    return pa.schema(fields)


def _logprob_fields(prefix: str, k: int | None, logprob: pa.DataType) -> list[tuple[str, pa.DataType]]:
    if k is None:
        return []
    fields = [(f"{prefix}logprobs", _list(logprob)), (f"{prefix}ranks", _list(pa.int32()))]
    if k > 0:
        fields.append((f"{prefix}top_token_ids", _list(_list(pa.int32()))))
        fields.append((f"{prefix}top_logprobs", _list(_list(logprob))))
    return fields


def _list(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field(_ITEM, item))


def _leaf(field: pa.Field) -> tuple[str, pa.DataType]:
    """A column's path in Parquet, and the type at its end."""
    path, item = field.name, field.type
    while pa.types.is_list(item):
        path, item = f"{path}.list.{_ITEM}", item.value_type
    return path, item


# -- results to columns ----------------------------------------------------------------------------------------------


def _key_columns(results: Sequence[Result]) -> dict[str, pa.Array]:
    return {
        "row_index": pa.array([result.prompt.row_index for result in results], pa.int64()),
        "request_index": pa.array([result.request_index for result in results], pa.int32()),
        "num_requests": pa.array([result.num_requests for result in results], pa.int32()),
        "attempts": pa.array([result.attempts for result in results], pa.int32()),
    }


def _text_columns(results: Sequence[Result]) -> dict[str, pa.Array]:
    completions = [result.completion for result in results]
    errors = [result.error for result in results]
    stops = [None if c is None or c.stop_reason is None else str(c.stop_reason) for c in completions]
    return {
        "text": _strings([result.text for result in results]),
        "reasoning": _strings([result.reasoning for result in results]),
        "finish_reason": _strings([None if c is None else c.finish_reason for c in completions]),
        "stop_reason": _strings(stops),
        "error_type": _strings([None if error is None else error.error_type for error in errors]),
        "error_message": _strings([None if error is None else error.error_message for error in errors]),
    }


def _prompt_columns(results: Sequence[Result], include_prompt: bool) -> dict[str, pa.Array]:
    prompts = [result.prompt for result in results]
    # A row's samples share their Prompt: its ids are converted once (20 ns a token) and not for each.
    ids = {id(prompt): np.array(prompt.token_ids, np.int32) for prompt in {id(p): p for p in prompts}.values()}
    hashes = {key: prompt_hash(value) for key, value in ids.items()}
    columns = {
        "prompt_hash": pa.array([hashes[id(prompt)] for prompt in prompts], pa.int64()),
        "num_prompt_tokens": pa.array([len(prompt.token_ids) or None for prompt in prompts], pa.int32()),
        "prompt_truncated": pa.array([p.is_truncated if p.token_ids else None for p in prompts], pa.bool_()),
    }
    if include_prompt:
        columns["prompt"] = _strings([prompt.text for prompt in prompts])
        columns["prompt_token_ids"] = _id_lists([ids[id(p)] if p.token_ids else None for p in prompts])
    return columns


def prompt_hash(token_ids: IntArray) -> int | None:
    """xxh3-64 of the ids as little-endian int32, as a signed number; None where there are none."""
    if not len(token_ids):
        return None
    return int.from_bytes(xxhash.xxh3_64_digest(token_ids.data), "big", signed=True)


def _output_columns(completions: Sequence[Completion | None]) -> dict[str, pa.Array]:
    token_ids = [None if completion is None else completion.token_ids for completion in completions]
    sums = [None if completion is None else completion.cumulative_logprob for completion in completions]
    return {
        "token_ids": _id_lists(token_ids),
        "cumulative_logprob": pa.array(sums, pa.float64()),
        "num_output_tokens": pa.array([None if ids is None else len(ids) for ids in token_ids], pa.int32()),
    }


def _id_lists(parts: Sequence[IntArray | None]) -> pa.ListArray:
    offsets = _offsets([0 if part is None else len(part) for part in parts])
    flat = _concatenate([part for part in parts if part is not None], _INT32)
    return _list_array(offsets, pa.array(flat), np.array([part is None for part in parts], np.bool_))


def _strings(values: list[str | None]) -> pa.StringArray:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        # Lone surrogates, as out of a foreign error message: UTF-8, and so Arrow, has no place for them.
        encoded = [None if value is None else value.encode("utf-8", "replace") for value in values]
        return pa.array(encoded, pa.binary()).cast(pa.string())


def _logprob_columns(prefix: str, tokens: "_Tokens", k: int | None, dtype: np.dtype[Any]) -> dict[str, pa.Array]:
    if k is None:
        return {}
    columns = {
        f"{prefix}logprobs": tokens.column([part.logprobs[:, 0] for part in tokens.parts], dtype),
        f"{prefix}ranks": tokens.column([part.ranks for part in tokens.parts], _INT32),
    }
    if k > 0:
        columns[f"{prefix}top_token_ids"] = tokens.top([part.token_ids for part in tokens.parts], k, _INT32)
        columns[f"{prefix}top_logprobs"] = tokens.top([part.logprobs for part in tokens.parts], k, dtype)
    return columns


class _Tokens:
    """The tokens of a batch's completions in one row: where each completion's begin, and which are null.

    parts: one for each result, None where there is none. num_leading: null tokens put before each part.
    """

    def __init__(self, parts: Sequence[TokenLogprobs | None], num_leading: int = 0) -> None:
        self.parts = [part for part in parts if part is not None]
        self._is_missing = np.array([part is None for part in parts], np.bool_)
        self._offsets = _offsets([0 if part is None else len(part.ranks) + num_leading for part in parts])
        self._num_tokens = int(self._offsets[-1])
        self._is_null: npt.NDArray[np.bool_] | None = None
        if num_leading:
            self._is_null = np.zeros(self._num_tokens, np.bool_)
            self._is_null[self._offsets[:-1][~self._is_missing]] = True

    def column(self, pieces: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> pa.ListArray:
        """list<dtype> of pieces [num_tokens] each."""
        flat = _concatenate(pieces, dtype)
        if self._is_null is None:
            return _list_array(self._offsets, pa.array(flat), self._is_missing)
        spread = np.zeros(self._num_tokens, dtype)
        spread[~self._is_null] = flat
        return _list_array(self._offsets, pa.array(spread, mask=self._is_null), self._is_missing)

    def top(self, pieces: Sequence[npt.NDArray[Any]], k: int, dtype: np.dtype[Any]) -> pa.ListArray:
        """list<list<dtype>> of the ranks 1 to k of pieces [num_tokens, k + 1] each."""
        lengths = np.full(self._num_tokens, k)
        if self._is_null is not None:
            lengths[self._is_null] = 0
        offsets = _offsets(lengths)
        flat = _concatenate([piece[:, 1 : k + 1] for piece in pieces], dtype).reshape(-1)
        return _list_array(self._offsets, _list_array(offsets, pa.array(flat), self._is_null), self._is_missing)


def _concatenate(pieces: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not pieces:
        return np.zeros(0, dtype)
    with np.errstate(over="ignore"):  # what float16 cannot hold is -inf, and no warning
        return np.concatenate(pieces, dtype=dtype, casting="same_kind")


def _offsets(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Where lists of these lengths begin, and where the last one ends. Raises OverflowError."""
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(ends) and ends[-1] > _MAX_OFFSET:
        raise OverflowError(f"got {ends[-1]} items for one column of lists, which holds 2**31 - 1; encode fewer")
    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends
    return offsets


def _list_array(
    offsets: npt.NDArray[np.int32], values: pa.Array, is_null: npt.NDArray[np.bool_] | None
) -> pa.ListArray:
    if offsets[-1] != len(values):  # Arrow itself would read beyond the end
        raise ValueError(f"got {len(values)} values for lists of {offsets[-1]}: not the shape that the spec asks for")
    mask = None if is_null is None or not is_null.any() else pa.array(is_null)
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=_list(values.type), mask=mask)


def _repeat(columns: pa.Table, row_index: npt.NDArray[np.int64]) -> pa.Table:
    """Each row of `columns` as often as its row has results; `row_index` is sorted."""
    if columns.num_rows == len(row_index):
        return columns
    is_next = np.diff(row_index, prepend=row_index[:1]) != 0
    return columns.take(pa.array(np.cumsum(is_next)))

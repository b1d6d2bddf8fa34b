"""A hash of a row's content. It depends neither on the row's position and file nor on other rows; `job` samples by it.

It covers each column's name and each value's text. The order of columns does not count. The integer 5, the float 5.0
and the text 5 are equal, and so are null and an absent column, because types and columns depend on other rows.
`input.sample` promises the same rows forever, so another hash needs another name in the spec.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from batchinf.source.types import is_text


def row_hashes(table: pa.Table, mixed: Mapping[str, Sequence[object]] | None = None) -> npt.NDArray[np.uint64]:
    """uint64 [num_rows]: sums of xxh3-64 over each value's text, seeded with its column's name, then mixed.

    mixed: the values of the columns of several types, whose text in the table may mean a text or another value.
    """
    total = np.zeros(table.num_rows, np.uint64)
    for field, column in zip(table.schema, table.columns, strict=True):
        digest = xxhash.xxh3_64_intdigest
        seed = digest(field.name.encode(errors="replace"))
        values = map(canonical, mixed[field.name]) if mixed and field.name in mixed else texts(column, field)
        hashes = [0 if text is None else digest(text, seed) for text in values]
        total += np.array(hashes, np.uint64)
    return _mixed(total)


def is_in_share(hashes: npt.NDArray[np.uint64], share: float) -> npt.NDArray[np.bool_]:
    """Which rows are in a share (0, 1] of all. Rows of a smaller share are in each larger one too."""
    return hashes <= np.uint64(min(2**64 - 1, int(share * 2.0**64)))


def texts(column: pa.ChunkedArray, field: pa.Field) -> list[bytes | None]:
    """Each value as text; None for null. Equal values have equal texts."""
    type = field.type
    if pa.types.is_temporal(type) and not pa.types.is_interval(type):
        column = column.cast(pa.int32() if type.bit_width == 32 else pa.int64())
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
    if is_text(column.type):
        encoded: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
        return encoded
    return [canonical(value) for value in column.to_pylist()]


def canonical(value: Any) -> bytes | None:
    """A value's text. A list or a mapping becomes JSON with sorted keys, without keys whose value is null."""
    value = _plain(value)
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bool | list | dict):
        text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    else:
        text = value if isinstance(value, str) else repr(value) if isinstance(value, float) else str(value)
    return text.encode(errors="replace")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Splitmix64's finaliser: each bit of the sum changes all bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

"""Prompts that begin alike: a short key of each that sorts them together, and how much two of them share.

A key is a hash of each block of a prompt's beginning: keys in order have shared beginnings side by side, however long
these are, at a sixteenth of the text's size. Which of two groups comes first means nothing.
"""

import contextlib
import itertools
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from batchinf.errors import OutputError
from batchinf.selection import Int64Array

# Blocks of so many bytes up to a place: 64 are about 16 tokens of text, and 16 token ids, as many as vLLM's own blocks.
# Long prompts have longer ones later, where a part of a block more or less is little of the whole.
_BLOCKS = ((64, 4 << 10), (256, 32 << 10), (1 << 10, 256 << 10))
_HASH_BYTES = 4
_ENDS = [
    *range(_BLOCKS[0][0], _BLOCKS[0][1] + 1, _BLOCKS[0][0]),
    *(end for (_, begin), (size, stop) in itertools.pairwise(_BLOCKS) for end in range(begin + size, stop + 1, size)),
]
_MEMORY = "512MB"
_FETCH_ROWS = 1 << 16


def prefix_key(beginning: bytes) -> bytes:
    """4 bytes for each block of a prompt's beginning; the last block may be cut short. At most 1.6 KB."""
    key, start = bytearray(), 0
    for end in _ENDS:
        if start >= len(beginning):
            break
        key += xxhash.xxh32_digest(beginning[start:end])
        start = end
    return bytes(key)


def shared_bytes(one: bytes, other: bytes) -> int:
    """Bytes of prompt that two keys have in common from the beginning: whole blocks alone."""
    most = min(len(one), len(other)) // _HASH_BYTES
    num_blocks = next((i for i in range(most) if one[4 * i : 4 * i + 4] != other[4 * i : 4 * i + 4]), most)
    return _ENDS[num_blocks - 1] if num_blocks else 0


def shared_in_order(keys: Sequence[bytes]) -> int:
    """Bytes that prompts have in common with an earlier one, all of which are held."""
    seen: set[int] = set()
    total = 0
    for key in keys:
        chain, shared = xxhash.xxh3_64(), 0
        for i in range(0, len(key), _HASH_BYTES):
            chain.update(key[i : i + _HASH_BYTES])
            digest = chain.intdigest()
            if digest in seen:
                shared = i // _HASH_BYTES + 1
            seen.add(digest)
        total += _ENDS[shared - 1] if shared else 0
    return total


def shared_when_sorted(keys: Iterable[bytes]) -> int:
    """Bytes that prompts have in common with the one before, when they are sorted by their keys."""
    ordered = sorted(keys)
    return sum(shared_bytes(one, other) for one, other in itertools.pairwise(ordered))


class KeySort:
    """Rows sorted by their keys; DuckDB sorts them, and spills to `scratch` what is more than its share of memory.

    With `with`, as it holds a temporary folder.
    """

    def __init__(self, scratch: pathlib.Path | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=".order-", dir=scratch)
        self._connection: Any = None

    def __enter__(self) -> "KeySort":
        import duckdb

        settings: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": _MEMORY,
            "temp_directory": self._folder.name,
            "threads": "2",
            "preserve_insertion_order": "false",
        }
        self._connection = duckdb.connect(f"{self._folder.name}/keys", config=settings)
        self._connection.execute("CREATE TABLE keys (is_last BOOLEAN, key BLOB, row BIGINT)")
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()
        self._folder.cleanup()

    def add(self, rows: Int64Array, keys: Sequence[bytes | None]) -> None:
        """Take rows, by position, with their keys; those without one come last, in their own order."""
        batch = pa.table(
            {
                "is_last": pa.array([key is None for key in keys]),
                "key": pa.array([key or b"" for key in keys], pa.binary()),
                "row": pa.array(rows),
            }
        )
        self._connection.register("batch", batch)
        with self._naming():
            self._connection.execute("INSERT INTO keys SELECT is_last, key, row FROM batch")
        self._connection.unregister("batch")

    def rows(self, num_waves: int = 1, num_hands: int = 1) -> Iterator[Int64Array]:
        """All rows in order, some at a time; those of one key in their own order.

        They may be dealt: the rows in order are cut into waves of one size, and each wave is dealt, row by row, into
        hands, which follow each other.
        """
        query = "SELECT row FROM keys ORDER BY is_last, key, row"
        with self._naming():
            if (num_waves, num_hands) != (1, 1):
                [[num_rows]] = self._connection.execute("SELECT count(*) FROM keys").fetchall()
                size = max(1, -(-num_rows // num_waves))
                ranks = "SELECT row, row_number() OVER (ORDER BY is_last, key, row) - 1 AS rank FROM keys"
                hand = f"rank % {size} % {num_hands}"
                query = f"SELECT row FROM ({ranks}) ORDER BY rank // {size}, {hand}, rank"
            found = self._connection.sql(query)
            # Named otherwise before DuckDB 2.
            read = found.to_arrow_reader if hasattr(found, "to_arrow_reader") else found.fetch_arrow_reader
            batches = iter(read(_FETCH_ROWS))
        while True:
            with self._naming():
                batch = next(batches, None)
            if batch is None:
                return
            yield np.asarray(batch.column(0).to_numpy(), np.int64)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        import duckdb

        try:
            yield
        except (duckdb.InterruptException, RuntimeError) as error:
            # A signal's KeyboardInterrupt, as DuckDB hands it on.
            if "interrupted" in str(error).lower():
                raise KeyboardInterrupt from None
            raise
        except duckdb.Error as error:
            words = " ".join(str(error).split())[:300]
            raise OutputError(f"{self._folder.name}: the rows cannot be sorted there: {words}") from error

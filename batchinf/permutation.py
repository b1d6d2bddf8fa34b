"""A stored run order: at which place each row of an extent runs, in a durable file of the output folder, mapped."""

import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from batchinf.errors import OutputError
from batchinf.selection import RUN_FOLDER, Int64Array
from batchinf.storage import Folder

_MAGIC, _VERSION = b"bi-order", 1
# Magic, format version, number of the extent from 1, first row, number of rows, bytes of an item, 12 bytes to spare.
_HEADER = struct.Struct("<8sIIQQI12x")
_WIDE = 1 << 32


class Permutation:
    """The rows of an extent in the order in which they run. 4 bytes a row of file; nothing of it stays in memory."""

    def __init__(self, first_row: int, items: npt.NDArray[np.uint32] | npt.NDArray[np.uint64]) -> None:
        """items: [num_rows], each row's position less `first_row`."""
        self._first_row, self._items = first_row, items

    def __len__(self) -> int:
        return len(self._items)

    def rows(self, start: int, stop: int) -> Int64Array:
        """Positions of the rows that run as number `start` to `stop` (exclusive) of the extent, int64, as they run."""
        return self._items[start:stop].astype(np.int64) + self._first_row


def permutation_name(number: int) -> str:
    """The name in the output folder of what says how extent `number` (from 1) is ordered."""
    return f"{RUN_FOLDER}/{number:06d}.order"


def write_permutation(
    folder: Folder, number: int, first_row: int, stop_row: int, num_rows: int, rows: Iterable[Int64Array]
) -> str:
    """Write the file durably, in place of one that may be there; its digest. rows: positions, as they are to run."""
    item = np.dtype("<u4" if stop_row - first_row < _WIDE else "<u8")
    header = _HEADER.pack(_MAGIC, _VERSION, number, first_row, num_rows, item.itemsize)
    digest, num_written = xxhash.xxh3_128(header), 0
    folder.make(RUN_FOLDER)
    with folder.writing(permutation_name(number)) as file:
        file.write(header)
        for some in rows:
            data = (some - first_row).astype(item).tobytes()
            digest.update(data)
            file.write(data)
            num_written += len(some)
        if num_written != num_rows:
            raise ValueError(f"got an order of {num_written} rows for {num_rows}")
    return digest.hexdigest()


def read_permutation(folder: Folder, number: int, digest: str) -> Permutation | None:
    """What is stored, mapped; None if the file is gone or altered, or is not the one of this digest."""
    try:
        data = np.memmap(folder.path(permutation_name(number)), np.uint8, "r")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: it is empty
        return None
    if len(data) < _HEADER.size or xxhash.xxh3_128_hexdigest(data.data) != digest:
        return None
    _, version, _, first_row, num_rows, size = _HEADER.unpack(data[: _HEADER.size].tobytes())
    if version != _VERSION or len(data) != _HEADER.size + num_rows * size:
        return None
    items = data[_HEADER.size :].view(np.ndarray).view("<u4" if size == 4 else "<u8")
    return Permutation(first_row, items)


def stored_permutation(folder: Folder, number: int, digest: str) -> Permutation:
    """The same. Raises OutputError if the file is not there any more."""
    found = read_permutation(folder, number, digest)
    if found is None:
        name = folder.path(permutation_name(number))
        raise OutputError(f"{name} is gone or altered; run the same command again, which makes it anew")
    return found

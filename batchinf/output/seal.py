"""The seal of a part: a checksum in its metadata, by which the file itself shows that each of its bytes is right."""

import pathlib
import re
from typing import Any

import pyarrow as pa
import xxhash

from batchinf.base.storage import HashingWriter

# The seal: a part's metadata holds the xxh3-128 of all bytes of the file, computed with these zeros in place of the
# seal. Page checksums do not cover headers and footer: a third of single flipped bits in a footer go unnoticed.
UNSEALED = {"batchinf.seal": "0" * 32}
_SEAL = re.compile(rb"batchinf\.seal.{1,4}?([0-9a-f]{32})", re.DOTALL)


class SealingWriter(HashingWriter):
    """Holds back the end of a Parquet file, to replace `UNSEALED` in its metadata by the seal."""

    _end: bytearray | None = None

    def hold(self) -> None:
        """Hold back everything from here on until `seal`."""
        self._end = bytearray()

    def write(self, data: Any) -> int:
        """Write all of `data`, or hold it back."""
        if self._end is None:
            return super().write(data)
        self._end += data
        return memoryview(data).nbytes

    def seal(self) -> None:
        """Write the held bytes with the seal."""
        assert self._end is not None
        end = bytes(self._end)
        place = _seal_place(end)
        whole = self._digest.copy()
        whole.update(end)
        self._end = None
        self.write(end[: place.start] + whole.hexdigest().encode() + end[place.stop :])


def read_sealed(path: pathlib.Path) -> memoryview:
    """The bytes of a Parquet file, memory-mapped. Raises ValueError if they do not match its seal, or have none."""
    with pa.memory_map(str(path)) as file:
        data = memoryview(file.read_buffer())
    start = max(0, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
    if not footer_is_sealed(xxhash.xxh3_128(data[:start]), bytes(data[start:])):
        raise ValueError(f"{path} is not as it was written")
    return data


def footer_is_sealed(digest: "xxhash.xxh3_128", footer: bytes) -> bool:
    """Whether the seal in a footer is right. digest: of the bytes before it. Raises ValueError without a seal."""
    place = _seal_place(footer)
    digest = digest.copy()
    digest.update(footer[: place.start] + UNSEALED["batchinf.seal"].encode() + footer[place.stop :])
    return digest.hexdigest().encode() == footer[place]


def _seal_place(end: bytes) -> slice:
    # The last match: the metadata comes after all bytes that depend on the data.
    *_, last = _SEAL.finditer(end)
    return slice(*last.span(1))

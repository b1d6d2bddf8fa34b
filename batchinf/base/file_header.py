"""The header of our own binary files: 64 bytes that say which file it is, with their own checksum.

Journal segments and stored selections begin with it. 64 bytes keep what follows aligned in a memory map.
"""

import struct
from dataclasses import dataclass

import xxhash

_MAGIC = b"batchinf"
_VERSION = 1
# Magic, format version, the four fields, 8 bytes to spare; then the xxh3-64 of all these.
_STRUCT = struct.Struct("<8sIIQQ16s8x")
HEADER_BYTES = _STRUCT.size + 8


@dataclass(frozen=True, slots=True)
class FileHeader:
    """number: of the shard, retry or extent that the file is of. first, second: as its format has it. digest: xxh3-128
    of what follows.
    """

    number: int
    first: int
    second: int
    digest: bytes

    def encode(self) -> bytes:
        """The 64 bytes."""
        fields = _STRUCT.pack(_MAGIC, _VERSION, self.number, self.first, self.second, self.digest)
        return fields + xxhash.xxh3_64_digest(fields)

    @classmethod
    def decode(cls, data: bytes) -> "FileHeader | None":
        """The header in the first 64 bytes; None where they are torn, altered, or of another format version."""
        fields, checksum = data[: _STRUCT.size], data[_STRUCT.size : HEADER_BYTES]
        if len(data) < HEADER_BYTES or xxhash.xxh3_64_digest(fields) != checksum:
            return None
        magic, version, *own = _STRUCT.unpack(fields)
        return cls(*own) if (magic, version) == (_MAGIC, _VERSION) else None

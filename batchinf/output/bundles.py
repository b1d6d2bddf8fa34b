"""Bundles of journal segments, or of pieces of them: the form in which a job's bucket has its journal."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from batchinf.base.storage import Folder
from batchinf.output.journal import place_of


@dataclass(frozen=True, slots=True)
class SegmentPiece:
    """A segment in a bundle, or some of its bytes: a slow link gets a large segment in several bundles."""

    segment: str
    data: bytes
    first: int
    """Place of the first byte in the segment."""
    num_bytes: int
    """Of the whole segment."""


class Unsent(NamedTuple):
    """A segment of which the bucket does not have all bytes. Sorted by age."""

    written_at_ns: int
    name: str
    num_bytes: int
    num_sent: int

    @property
    def num_left(self) -> int:
        return self.num_bytes - self.num_sent

    def read(self, folder: Folder, most_bytes: int) -> SegmentPiece:
        """The next bytes to send."""
        with folder.path(f"journal/{self.name}").open("rb") as file:
            file.seek(self.num_sent)
            return SegmentPiece(self.name, file.read(min(most_bytes, self.num_left)), self.num_sent, self.num_bytes)


def bundled(pieces: Sequence[SegmentPiece]) -> bytes:
    """A bundle: a line of JSON with what its pieces are, and their bytes."""
    sizes = json.dumps([_about(piece) for piece in pieces]).encode()
    return b"".join([sizes, b"\n", *(piece.data for piece in pieces)])


def _about(piece: SegmentPiece) -> list[Any]:
    is_whole = len(piece.data) == piece.num_bytes
    return [piece.segment, len(piece.data), *(() if is_whole else (piece.first, piece.num_bytes))]


def unbundled(data: bytes) -> Iterator[SegmentPiece]:
    """The segments in a bundle, or their pieces. Each segment has a checksum of its own."""
    line, _, rest = data.partition(b"\n")
    with contextlib.suppress(ValueError, TypeError):
        for name, size, *place in json.loads(line):
            piece = rest[:size]
            first, num_bytes = place or (0, len(piece))
            if isinstance(name, str) and place_of(name) is not None:
                yield SegmentPiece(name, piece, int(first), int(num_bytes))
            rest = rest[size:]


def whole_segments(pieces: Iterable[SegmentPiece]) -> Iterator[tuple[str, bytes]]:
    """The segments of which all pieces are there, by name. pieces: of all bundles, in the order of their names."""
    begun: dict[str, bytearray] = {}
    for piece in pieces:
        before = begun.setdefault(piece.segment, bytearray())
        if piece.first <= len(before):
            before[piece.first :] = piece.data  # it may have been sent again, and cut in another place
            if len(before) == piece.num_bytes:
                yield piece.segment, bytes(begun.pop(piece.segment))

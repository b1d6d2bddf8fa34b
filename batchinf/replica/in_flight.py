"""Records which rows are in an engine, in memory that outlives the replica.

When an engine or its replica dies, the backend reads the record: the rows in it are suspected of the death. The memory
is the backend's. A record costs no disk access and less than a microsecond a request.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap

# row_index, then 0 for a free slot or 2 * (order of entering) + (1 once a token came out).
_SLOT = struct.Struct("<qq")

# Sizes of memory to use, in bytes. The first has far more slots than any engine's window. The second is for hosts where
# a limit on the size of files, which holds for shared memory too, allows no more. Requests beyond it are not recorded.
RECORD_BYTES = ((1 << 16) * _SLOT.size, (1 << 12) * _SLOT.size)


@dataclass(frozen=True, slots=True)
class InFlightRequest:
    """A request that was in the engine. has_output: its prompt was run, and a token has come out."""

    row_index: int
    has_output: bool


class InFlightRecord:
    """One replica's requests in flight. The replica writes on its engine's thread; the backend reads at its end."""

    def __init__(self, memory: bytearray | mmap) -> None:
        """memory: zeros, or what an earlier record wrote. One of RECORD_BYTES long."""
        self._memory = memory
        self._free = list(range(len(memory) // _SLOT.size - 1, -1, -1))
        self._num_entered = 0

    def enter(self, row_index: int) -> int:
        """A request goes into the engine; its slot, or -1 where none is left."""
        if not self._free:
            return -1
        slot = self._free.pop()
        self._num_entered += 1
        _SLOT.pack_into(self._memory, slot * _SLOT.size, row_index, 2 * self._num_entered)
        return slot

    def note_output(self, slot: int) -> None:
        """The request's first token has come out."""
        if slot >= 0:
            row_index, state = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
            _SLOT.pack_into(self._memory, slot * _SLOT.size, row_index, state | 1)

    def leave(self, slot: int) -> None:
        """The request has come out of the engine."""
        if slot >= 0:
            _SLOT.pack_into(self._memory, slot * _SLOT.size, 0, 0)
            self._free.append(slot)

    def requests(self) -> Sequence[InFlightRequest]:
        """All requests in the engine, in the order in which they went in."""
        found = [item for item in _SLOT.iter_unpack(self._memory[:]) if item[1]]
        return [InFlightRequest(row, bool(state & 1)) for row, state in sorted(found, key=lambda item: item[1])]

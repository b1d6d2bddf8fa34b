"""Which rows are in an engine, in memory that outlives its process: a death leaves its suspects behind.

The coordinator makes the memory and hands it to a replica as a file descriptor. It touches no disk, costs the engine's
thread less than a microsecond a request, and is gone when both processes are.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

# row_index, then 0 for a free slot or 2 * (order of entering) + (1 once a token came out).
_SLOT = struct.Struct("<qq")
# Far more than any engine's window; requests beyond it are not recorded. The second where a limit on the size of files,
# which holds for memory too, allows no more.
_NUM_SLOTS = (1 << 16, 1 << 12)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A request that was in the engine; `has_output`: its prompt was run, and a token has come out."""

    row_index: int
    has_output: bool


class FlightRecord:
    """One replica's requests in flight. The replica writes on its engine's thread; the coordinator reads at its end."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of the memory, which stays open until `close`."""
        self._descriptor = descriptor
        num_bytes = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, num_bytes)
        self._free = list(range(num_bytes // _SLOT.size - 1, -1, -1))
        self._num_entered = 0

    @classmethod
    def create(cls) -> "FlightRecord":
        """New memory, with nothing in flight. Linux only, as process groups and /proc are elsewhere in batchinf."""
        descriptor = os.memfd_create("batchinf-flight")
        try:
            os.ftruncate(descriptor, _NUM_SLOTS[0] * _SLOT.size)
        except OSError:
            os.ftruncate(descriptor, _NUM_SLOTS[1] * _SLOT.size)
        return cls(descriptor)

    def fileno(self) -> int:
        """The descriptor that a replica inherits."""
        return self._descriptor

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

    def in_flight(self) -> Sequence[InFlight]:
        """All requests in the engine, in the order in which they went in."""
        found = [item for item in _SLOT.iter_unpack(self._memory[:]) if item[1]]
        return [InFlight(row, bool(state & 1)) for row, state in sorted(found, key=lambda item: item[1])]

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
        os.close(self._descriptor)

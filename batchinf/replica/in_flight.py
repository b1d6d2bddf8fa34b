"""The record of the requests in a replica's engine.

It is memory of the backend and outlives the replica: if the engine or the replica dies, the rows in it are suspected.
An entry takes less than a microsecond and no disk access.
"""

import struct
from collections.abc import Sequence
from mmap import mmap

import numpy as np

from batchinf.replica.messages import InFlightRequest

# row_index, then 0 for a free slot or 2 * (order of entering) + (1 once a token came out).
_SLOT = struct.Struct("<qq")

# Sizes of the record, in bytes. The first has far more slots than any engine's window. The second is for hosts that
# limit the size of files, which also limits shared memory. Requests without a slot are not recorded.
RECORD_BYTES = ((1 << 16) * _SLOT.size, (1 << 12) * _SLOT.size)


class InFlightRecord:
    """One replica's requests in flight. The engine thread writes it; the backend reads it when the replica ends."""

    def __init__(self, memory: bytearray | mmap) -> None:
        """memory: zeros, or what an earlier record wrote. One of RECORD_BYTES long."""
        self._memory = memory
        self._free = list(range(len(memory) // _SLOT.size - 1, -1, -1))
        self._num_entered = 0

    def enter(self, row_index: int) -> int:
        """Record a request that goes into the engine. Returns its slot, or -1 if none is free."""
        if not self._free:
            return -1
        slot = self._free.pop()
        self._num_entered += 1
        _SLOT.pack_into(self._memory, slot * _SLOT.size, row_index, 2 * self._num_entered)
        return slot

    def note_output(self, slot: int) -> None:
        """Record the request's first token."""
        if slot >= 0:
            row_index, state = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
            _SLOT.pack_into(self._memory, slot * _SLOT.size, row_index, state | 1)

    def leave(self, slot: int) -> None:
        """Free the slot of a request that has left the engine."""
        if slot >= 0:
            _SLOT.pack_into(self._memory, slot * _SLOT.size, 0, 0)
            self._free.append(slot)

    def requests(self) -> Sequence[InFlightRequest]:
        """All requests in the engine, in the order in which they were added. Takes 0.1 ms, also while it is written."""
        slots = np.frombuffer(self._memory, "<i8").reshape(-1, 2)
        used = slots[slots[:, 1] != 0]
        return [InFlightRequest(row, bool(state & 1)) for row, state in used[np.argsort(used[:, 1])].tolist()]

"""The record of the requests in a replica's engine.

It is memory of the backend and outlives the replica: if the engine or the replica dies, the rows in it are suspected.
To enter a request takes less than a microsecond and no disk access.
"""

import struct
from collections.abc import Sequence
from mmap import mmap

import numpy as np

from batchinf.replica.messages import InFlightRequest

# row_index, then 0 for a free entry or 2 * (order of entering) + (1 once a token came out).
_ENTRY = struct.Struct("<qq")

# Sizes of the record, in bytes. The first has far more entries than any engine's window. The second is for hosts that
# limit the size of files, which also limits shared memory. Requests without an entry are not recorded.
RECORD_BYTES = ((1 << 16) * _ENTRY.size, (1 << 12) * _ENTRY.size)


class InFlightRecord:
    """One replica's requests in flight. The engine thread writes it; the backend reads it when the replica ends."""

    def __init__(self, memory: bytearray | mmap) -> None:
        """memory: zeros, or what an earlier record wrote. One of RECORD_BYTES long."""
        self._memory = memory
        self._free = list(range(len(memory) // _ENTRY.size - 1, -1, -1))
        self._num_entered = 0

    def enter(self, row_index: int) -> int:
        """Record a request that goes into the engine. Returns the number of its entry, or -1 if none is free."""
        if not self._free:
            return -1
        entry = self._free.pop()
        self._num_entered += 1
        _ENTRY.pack_into(self._memory, entry * _ENTRY.size, row_index, 2 * self._num_entered)
        return entry

    def note_output(self, entry: int) -> None:
        """Record the request's first token."""
        if entry >= 0:
            row_index, state = _ENTRY.unpack_from(self._memory, entry * _ENTRY.size)
            _ENTRY.pack_into(self._memory, entry * _ENTRY.size, row_index, state | 1)

    def leave(self, entry: int) -> None:
        """Free the entry of a request that has left the engine."""
        if entry >= 0:
            _ENTRY.pack_into(self._memory, entry * _ENTRY.size, 0, 0)
            self._free.append(entry)

    def requests(self) -> Sequence[InFlightRequest]:
        """All requests in the engine, in the order in which they were added. Takes 0.1 ms, also while it is written."""
        entries = np.frombuffer(self._memory, "<i8").reshape(-1, 2)
        used = entries[entries[:, 1] != 0]
        return [InFlightRequest(row, bool(state & 1)) for row, state in used[np.argsort(used[:, 1])].tolist()]

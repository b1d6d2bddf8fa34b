"""Memory that the coordinator shares with one replica: it holds the requests in flight, and outlives the replica."""

import mmap
import os

from batchinf.replica.in_flight import RECORD_BYTES


class SharedMemory:
    """Anonymous memory behind a file descriptor, which a replica inherits. It touches no disk."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of the memory; open until `close`."""
        self._descriptor = descriptor
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)

    @classmethod
    def create(cls) -> "SharedMemory":
        """New memory, all zeros. Linux only."""
        descriptor = os.memfd_create("batchinf-in-flight")
        preferred, least = RECORD_BYTES
        try:
            os.ftruncate(descriptor, preferred)
        except OSError:
            os.ftruncate(descriptor, least)
        return cls(descriptor)

    def fileno(self) -> int:
        """The descriptor that a replica inherits."""
        return self._descriptor

    def close(self) -> None:
        """Release the memory. No record may use it any more."""
        self.memory.close()
        os.close(self._descriptor)

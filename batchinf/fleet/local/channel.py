"""Connects the coordinator and a local replica: messages over a socket pair, and memory that outlives the process."""

import contextlib
import json
import mmap
import os
import select
import socket
import threading
from dataclasses import asdict
from typing import Any, get_args

from pydantic import TypeAdapter

from batchinf.replica.messages import Command, Event, Launch
from batchinf.replica.worker import RECORD_BYTES


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

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._descriptor < 0

    def close(self) -> None:
        """Release the memory. No record may use it any more."""
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)
        with contextlib.suppress(BufferError):  # an interrupted reader is released with its exception
            self.memory.close()


_KINDS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind) for kind in (Launch, *get_args(Command), *get_args(Event))
}


class Channel:
    """One end of a socket pair. `send` may be called from any thread; `receive` from one."""

    def __init__(self, connection: socket.socket, incarnation: str) -> None:
        self._socket = connection
        self._incarnation = incarnation
        self._sequence = 0
        self._received = 0
        self._lock = threading.Lock()
        self._buffer = b""
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Command | Event | Launch) -> None:
        """Send one message. A peer that is gone is no error here; `is_closed` and its process show it."""
        with self._lock:
            self._sequence += 1
            envelope = {
                "kind": type(message).__name__,
                "incarnation": self._incarnation,
                "sequence": self._sequence,
                "body": asdict(message),
            }
            try:
                self._socket.sendall(json.dumps(envelope).encode() + b"\n")
            except OSError:
                self.is_closed = True

    def receive(self, wait_s: float | None) -> list[Any]:
        """The messages that have arrived, after at most `wait_s` seconds (None: no limit).

        If the list is empty and `is_closed` is set, the peer is gone. Repeated messages and those of other incarnations
        are dropped; invalid data ends the connection.
        """
        if self._socket.fileno() < 0:
            return []
        # Not `select`, which takes only descriptors up to 1023.
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(None if wait_s is None else wait_s * 1000):
            return []
        try:
            data = self._socket.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages = []
        try:
            for line in lines:
                if (message := self._open(json.loads(line))) is not None:
                    messages.append(message)
        except (ValueError, LookupError, TypeError, RecursionError):
            # No peer of ours writes this. The peer sees the closed socket and ends itself.
            self.close()
        return messages

    def _open(self, envelope: dict[str, Any]) -> Any:
        if envelope["incarnation"] != self._incarnation or envelope["sequence"] <= self._received:
            return None
        self._received = envelope["sequence"]
        return _KINDS[envelope["kind"]].validate_python(envelope["body"])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
        self.is_closed = True

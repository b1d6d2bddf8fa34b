"""Connects the coordinator and a local replica by messages over a socket pair."""

import contextlib
import json
import select
import socket
import threading
from dataclasses import asdict
from typing import Any, get_args

from batchinf.base.storage import adapter
from batchinf.replica.messages import Command, Event

_PIECE_BYTES = 1 << 18
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*get_args(Command), *get_args(Event))}


class Channel:
    """One end of a socket pair. `send` may be called from any thread; `receive` from one."""

    def __init__(self, connection: socket.socket, *, sends_later: bool = False) -> None:
        """sends_later: `send` never waits for the peer. A thread sends what the socket's buffer does not take."""
        self._socket = connection
        self._sends_later = sends_later
        self._unsent = bytearray()
        self._lock = threading.Lock()
        self._buffer = b""
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Command | Event) -> None:
        """Send one message. A peer that is gone is no error here; `is_closed` and its process show it."""
        line = json.dumps({"kind": type(message).__name__, "body": asdict(message)}).encode() + b"\n"
        with self._lock:
            try:
                if self._sends_later:
                    self._send_or_keep(line)
                else:
                    self._socket.sendall(line)
            except OSError:
                self.is_closed = True

    def _send_or_keep(self, line: bytes) -> None:
        """Send what the socket takes now, behind all that is unsent. Called with the lock."""
        is_sending = bool(self._unsent)
        self._unsent += line
        if is_sending:
            return
        with contextlib.suppress(BlockingIOError):
            del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
        if self._unsent:
            threading.Thread(target=self._send_unsent, name="send", daemon=True).start()

    def _send_unsent(self) -> None:
        """Send the rest as the peer reads it. Ends when all is sent or the peer is gone."""
        while True:
            with self._lock:
                piece = bytes(self._unsent[:_PIECE_BYTES])
            try:
                num_sent = self._socket.send(piece)
            except OSError:
                self.is_closed = True
                return
            with self._lock:
                del self._unsent[:num_sent]
                if not self._unsent:
                    return

    def receive(self, wait_s: float | None) -> list[Any]:
        """The messages that have arrived, after at most `wait_s` seconds (None: no limit).

        If the list is empty and `is_closed` is set, the peer is gone. Invalid data ends the connection.
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
            for envelope in map(json.loads, lines):
                messages.append(adapter(_KINDS[envelope["kind"]]).validate_python(envelope["body"]))
        except (ValueError, LookupError, TypeError, RecursionError):
            # No peer of ours writes this. The peer sees the closed socket and ends itself.
            self.close()
        return messages

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Wakes a thread that sends.
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()
        self.is_closed = True

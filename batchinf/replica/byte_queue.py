"""The bounded queues between the threads of a replica."""

import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ByteQueue(Generic[Item]):
    """A FIFO queue, bounded in items and bytes; one item may exceed it. `put_all` waits, `offer_all` does not."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items: deque[tuple[Item, int]] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._is_shut = False
        self._changed = threading.Condition()

    @property
    def is_full(self) -> bool:
        """Whether `put_all` would wait."""
        return len(self._items) >= self._max_items or self._num_bytes >= self._max_bytes

    def __len__(self) -> int:
        return len(self._items)

    def put_all(self, items: Iterable[tuple[Item, int]]) -> bool:
        """Append items with their sizes, each once there is room. False if closed; the rest is then dropped."""
        left = deque(items)
        while left:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or not (self._is_shut or self.is_full))
                if self._is_closed:
                    return False
                while left and not self.is_full:
                    self._append(*left.popleft())
                self._changed.notify_all()
        return True

    def offer_all(self, items: Iterable[tuple[Item, int]]) -> None:
        """Append at once, even over the bound: for a producer that must not wait and checks `is_full` itself."""
        with self._changed:
            for item, num_bytes in items:
                self._append(item, num_bytes)
            self._changed.notify_all()

    def _append(self, item: Item, num_bytes: int) -> None:
        self._items.append((item, num_bytes))
        self._num_bytes += num_bytes

    def take(
        self,
        max_items: int,
        wait_s: float = 0.0,
        min_items: int = 1,
        max_bytes: int | None = None,
        *,
        shuts: bool = False,
    ) -> list[Item]:
        """Up to `max_items` or a little more than `max_bytes`, after waiting up to `wait_s` s for `min_items`.

        shuts: producers wait until `open`. If they woke now, they would compete with the consumer for the interpreter.
        """
        with self._changed:
            if wait_s and len(self._items) < min_items:
                # A full queue gets no more items.
                is_due = lambda: self._is_closed or len(self._items) >= min_items or self.is_full  # noqa: E731
                self._changed.wait_for(is_due, wait_s)
            taken: list[Item] = []
            num_bytes = 0
            while self._items and len(taken) < max_items and (max_bytes is None or num_bytes < max_bytes):
                item, size = self._items.popleft()
                taken.append(item)
                num_bytes += size
            if taken:
                self._num_bytes -= num_bytes
                self._is_shut = shuts
                self._changed.notify_all()
            return taken

    def open(self) -> None:
        """Let producers go on after a `take` that shuts."""
        if self._is_shut:
            with self._changed:
                self._is_shut = False
                self._changed.notify_all()

    def close(self) -> None:
        """Wake everything that waits and refuse new items; the items in the queue can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_until_room(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for room."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self.is_full, wait_s)

"""Threads, off the event loop, for what takes a text its time. A short text never waits for a long one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from shared.errors import QueueFullError

T = TypeVar("T")

# A text above this is a long one: its work takes tens of milliseconds and more.
MAX_SHORT_BYTES = 16 * 1024
# Of each lane: some five of the largest texts that a request may have, or ten seconds' work.
MAX_WAITING_BYTES = 16 * 1024 * 1024
# About what a thread encodes; says when a retry may find room.
_BYTES_PER_S = 2 * 1024 * 1024


class Lane:
    """Threads that take their work in the order in which it came, and a bound on the text that waits for them."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_bytes = 0

    @contextmanager
    def admit(self, num_bytes: int) -> Iterator[None]:
        """Let a text in, until the work on it is over; one that finds no other is never too large.

        Raises:
            QueueFullError: too much text is here.
        """
        if self._num_bytes and self._num_bytes + num_bytes > MAX_WAITING_BYTES:
            raise QueueFullError(
                "too much text waits to be encoded",
                retry_delay_s=self._num_bytes / _BYTES_PER_S,
                max_waiting_bytes=MAX_WAITING_BYTES,
            )
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in one of the threads; cancelled while it waits for one, it is not run."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class TextLanes:
    """A lane for short texts, and one of a single thread in which long ones take turns, part by part."""

    def __init__(self, num_threads: int) -> None:
        """Start with so many threads for short texts."""
        self.short = Lane(num_threads, "encode")
        self.long = Lane(1, "encode-long")

    def lane_for(self, num_bytes: int) -> Lane:
        """The lane of a text of so many bytes."""
        return self.short if num_bytes <= MAX_SHORT_BYTES else self.long

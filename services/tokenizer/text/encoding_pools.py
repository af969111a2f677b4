"""Threads for slow work on texts and messages. Short texts never wait for long ones."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from shared.errors import QueueFullError
from shared.network.turns import Slots, get_party
from shared.tenants.fair_room import FairRoom

T = TypeVar("T")

# A text above this size counts as long: work on it takes tens of milliseconds or more.
MAX_SHORT_BYTES = 16 * 1024
# Per pool and party: about five texts of the largest size that a request may have, or ten seconds of work.
MAX_WAITING_BYTES = 16 * 1024 * 1024
# The most text of all parties together, which only memory bounds.
_MAX_BYTES = 8 * MAX_WAITING_BYTES
# What is longer in a thread will never end: the longest work takes a second, and a minute on a very busy machine.
MAX_WORK_S = 60.0
# Roughly what a thread encodes; used to estimate when a retry will find room.
_BYTES_PER_S = 2 * 1024 * 1024


class EncodingPool:
    """Threads that take work by turns between parties, with a bound on each one's text."""

    def __init__(self, num_threads: int, name: str, *, max_work_s: float = MAX_WORK_S) -> None:
        """Work that a thread has had for longer than `max_work_s` is `stuck`."""
        self._name = name
        self._max_work_s = max_work_s
        # The start of each work that is in a thread now.
        self._begun_at: dict[object, float] = {}
        self.num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        # One more than there are threads, so that none waits for the event loop.
        self._slots = Slots(num_threads + 1)
        self._room = FairRoom(MAX_WAITING_BYTES, capacity=_MAX_BYTES)

    @contextmanager
    def admit(self, num_bytes: int) -> Iterator[None]:
        """Count a text against the party's bound inside the `with` block; see `FairRoom.has_room`.

        Raises:
            QueueFullError: the party has too much text in the pool.
        """
        party = get_party()
        if not self._room.has_room(party, num_bytes):
            raise QueueFullError(
                "too much text is waiting to be encoded",
                retry_delay_s=max(num_bytes, self._room.size_of(party)) / _BYTES_PER_S,
                max_waiting_bytes=MAX_WAITING_BYTES,
            )
        with self._room.enter(party, num_bytes):
            yield

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread; skipped if cancelled before a thread is free."""
        async with self._slots:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._timed, work)

    @property
    def stuck(self) -> str | None:
        """What takes too long to end ever, in a few words; None if nothing does."""
        oldest = min(list(self._begun_at.values()), default=math.inf)
        return None if time.monotonic() - oldest < self._max_work_s else f"work in the pool {self._name} is stuck"

    def _timed(self, work: Callable[[], T]) -> T:
        key = object()
        self._begun_at[key] = time.monotonic()
        try:
            return work()
        finally:
            del self._begun_at[key]


class EncodingPools:
    """Threads for short texts, and one in which long texts take turns, part by part."""

    def __init__(self, num_threads: int, name: str = "encode", *, max_work_s: float = MAX_WORK_S) -> None:
        self.short = EncodingPool(num_threads, name, max_work_s=max_work_s)
        self.long = EncodingPool(1, f"{name}-long", max_work_s=max_work_s)

    @property
    def num_threads(self) -> int:
        """The threads of both."""
        return self.short.num_threads + self.long.num_threads

    @property
    def stuck(self) -> str | None:
        """What takes too long to end ever, in a few words; None if nothing does."""
        return self.short.stuck or self.long.stuck

    def pool_for(self, num_bytes: int) -> EncodingPool:
        """The pool for this size."""
        return self.short if num_bytes <= MAX_SHORT_BYTES else self.long

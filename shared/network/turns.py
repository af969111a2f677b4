"""Turns between those that call: whoever sends many calls waits for its own, and hardly makes others wait.

A *party* is a tenant where clients have keys, else an address: clients behind one proxy, or on a unix socket, are one.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from contextvars import ContextVar
from types import TracebackType
from typing import Self

# While at least so many calls wait, those that arrive are let in first: a call is known by its key only then.
_MANY = 16
# After so many turns of the event loop without a call, none is arriving; each is a few microseconds if nothing happens.
_NONE_ARRIVING = 16
# And one is taken up for so many that arrive, or a steady flood would let nobody on.
_ARRIVALS_PER_CALL = 8

_PARTY: ContextVar[str] = ContextVar("party", default="")
_ARRIVED_AT: ContextVar[float | None] = ContextVar("arrived_at", default=None)


def set_party(party: str) -> None:
    """Note whose call this task serves."""
    _PARTY.set(party)


def get_party() -> str:
    """Whose call this task serves; empty if it serves none."""
    return _PARTY.get()


def get_arrived_at() -> float:
    """When the call that this task serves began to wait for its turn, by `time.monotonic`; now if it did not.

    What a client waits for includes that.
    """
    arrived_at = _ARRIVED_AT.get()
    return time.monotonic() if arrived_at is None else arrived_at


class _Waiting:
    """Futures that wait to be set: one of each party in turn, and by arrival within a party."""

    def __init__(self) -> None:
        self._parties: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self) -> asyncio.Future[None]:
        """A future for the running task's party; if it is cancelled, it waits no more."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parties.setdefault(get_party(), deque()).append(future)
        self._num_waiting += 1
        future.add_done_callback(self._note_done)
        return future

    def set_next(self) -> bool:
        """Set the next future; False if none waits."""
        while self._parties:
            party, futures = self._parties.popitem(last=False)
            while futures and (future := futures.popleft()):
                if not future.done():
                    future.set_result(None)
                    if futures:
                        self._parties[party] = futures
                    return True
        return False

    def _note_done(self, _: asyncio.Future[None]) -> None:
        self._num_waiting -= 1


class Slots:
    """A number of slots, as of a semaphore, for which parties wait by turns.

    Invariant: while a task waits, all slots are taken.
    """

    def __init__(self, num_slots: int) -> None:
        """All are free."""
        self._num_free = num_slots
        self._waiting = _Waiting()

    async def __aenter__(self) -> Self:
        if self._num_free:
            self._num_free -= 1
            return self
        future = self._waiting.add()
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():
                # It has just got a slot.
                self._release()
            raise
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        if not self._waiting.set_next():
            self._num_free += 1


class CallTurns:
    """Takes up the calls of a server: at most one in each turn of the event loop, by turns between parties.

    So what a flood makes the loop do between two of its timers is bounded, and beside a flood a call of another party
    is taken up as soon as it has arrived. A call that arrives while none waits is taken up at once.
    """

    def __init__(self) -> None:
        self._waiting = _Waiting()
        self._is_looking = False
        # Arrivals since the last look, and those for which no call was taken up yet.
        self._num_new = 0
        self._num_unpaid = 0
        self._num_turns_without = 0

    async def wait(self) -> None:
        """Wait for the turn of the running task's party."""
        _ARRIVED_AT.set(time.monotonic())
        self._num_new += 1
        if self._is_looking:
            await self._waiting.add()
        else:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Once in each turn of the loop, as long as calls wait or have just arrived."""
        if self._num_new:
            self._num_unpaid += self._num_new
            self._num_new = self._num_turns_without = 0
        else:
            self._num_turns_without += 1
        is_free = len(self._waiting) < _MANY or self._num_turns_without >= _NONE_ARRIVING
        if is_free or self._num_unpaid >= _ARRIVALS_PER_CALL:
            self._num_unpaid = 0
            self._is_looking = self._waiting.set_next()
        if self._is_looking:
            asyncio.get_running_loop().call_soon(self._look)

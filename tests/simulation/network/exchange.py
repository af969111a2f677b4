"""One `Exchange` stream between a replica and a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from random import Random

from lockstep.internal.v1 import exchange_pb2
from shared.errors import ServiceError
from tests.simulation.faults import Fault, FaultMix
from tests.simulation.network.clock import Clock
from tests.simulation.network.network import Pipe, Trouble

_TROUBLE = Trouble(Fault.MESSAGE_LOST, Fault.MESSAGE_REPEATED, Fault.MESSAGE_REORDERED, Fault.MESSAGE_LATE)
_NOTICE_S = (0.0, 0.3)
# The scheduler may notice only after its replica has reconnected.
_LATE_NOTICE_S = (0.0, 3.0)
_STALLS_S = (1.0, 4.0, 8.0, 20.0)
# The number of messages that the transport accepts for a replica that does not read.
_NUM_BUFFERED = (0, 1, 4)
# A replica that does not read for this long loses its stream, after at most one heartbeat of a running scheduler and
# the time that the scheduler gives it to read the final error.
MAX_UNREAD_S = 5.0
MAX_CLOSE_S = 2.5


@dataclass(frozen=True, slots=True)
class Ends:
    """The callbacks of the two ends of a stream."""

    on_request: Callable[[bytes], None]
    on_response: Callable[[bytes], None]
    on_unread: Callable[[], None]
    """Called when the replica has read nothing for so long that the stream should be closed."""
    on_scheduler_notice: Callable[[], None]
    on_replica_notice: Callable[[], None]
    is_answering: Callable[[], bool]
    """Whether the scheduler sends heartbeats."""


class ExchangeStream:
    """Carries requests up and outputs down. When it breaks, each end notices at its own time.

    For the scheduler's handler it plays the context of the call and the source of requests. A write completes when the
    transport accepts the message; while the replica is not reading, the transport soon accepts none.
    """

    def __init__(self, scheduler_id: str, clock: Clock, rng: Random, mix: FaultMix, *, ends: Ends) -> None:
        self.scheduler_id = scheduler_id
        # Its number in the replica's ledger.
        self.ledger_number = 0
        self.is_broken = False
        # The handler's task in the scheduler's process.
        self.task: asyncio.Task[None] | None = None
        self._arrived: asyncio.Queue[exchange_pb2.ExchangeRequest] = asyncio.Queue()
        self._num_buffered = 0
        self._num_blocked_writes = 0
        self._is_blocked = False
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._ends = ends
        self._up: Pipe[bytes] = Pipe(clock, rng, mix, _TROUBLE, deliver=ends.on_request, on_loss=self.break_)
        self._down: Pipe[bytes] = Pipe(clock, rng, mix, _TROUBLE, deliver=ends.on_response, on_loss=self.break_)

    @property
    def is_answering(self) -> bool:
        """Whether heartbeats of the scheduler arrive."""
        return not self.is_broken and self._ends.is_answering()

    def send_request(self, request: exchange_pb2.ExchangeRequest) -> None:
        """Send a message from the replica."""
        self._up.send(request.SerializeToString())
        self._may_break()

    def take_request(self, payload: bytes) -> None:
        """Queue a message of the replica that has arrived at the scheduler."""
        self._arrived.put_nowait(exchange_pb2.ExchangeRequest.FromString(payload))

    async def requests(self) -> AsyncIterator[exchange_pb2.ExchangeRequest]:
        """Yield the messages of the replica, without end."""
        while True:
            yield await self._arrived.get()

    async def write(self, response: exchange_pb2.ExchangeResponse) -> None:
        """Send a message from the scheduler; the part of a `ServicerContext` that the handler uses."""
        if not self._down.is_held and self._mix.strikes(Fault.REPLICA_STALL, self._rng):
            self._down.hold(self._clock.now + self._rng.choice(_STALLS_S))
            self._num_buffered = self._rng.choice(_NUM_BUFFERED)
        if self._down.is_held:
            await self._wait_for_room()
        if not response.HasField("heartbeat"):
            # Heartbeats are not simulated any further: a replica that reads ignores them.
            self._down.send(response.SerializeToString())
            self._may_break()

    def on_end(self, task: asyncio.Task[None]) -> None:
        """End the stream: its handler has ended."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ServiceError):
            raise error
        self.break_(scheduler_notices=False)

    def break_(self, *, scheduler_notices: bool = True) -> None:
        """Break the stream; each end notices at its own time, the scheduler only if `scheduler_notices`."""
        if self.is_broken:
            return
        self.is_broken = True
        self._up.cut()
        self._down.cut()
        self._clock.after(self._rng.uniform(*_NOTICE_S), self._ends.on_replica_notice)
        if scheduler_notices:
            notice_s = self._rng.choice([_NOTICE_S, _LATE_NOTICE_S])
            self._clock.after(self._rng.uniform(*notice_s), self._ends.on_scheduler_notice)

    def _may_break(self) -> None:
        if self._mix.strikes(Fault.STREAM_BREAK, self._rng):
            self.break_()

    async def _wait_for_room(self) -> None:
        if self._num_buffered:
            self._num_buffered -= 1
            return
        self._num_blocked_writes += 1
        number, self._is_blocked = self._num_blocked_writes, True
        self._clock.after(MAX_UNREAD_S + MAX_CLOSE_S, lambda: self._check_read(number))
        try:
            await self._clock.sleep_until(self._down.held_until)
        finally:
            self._is_blocked = False

    def _check_read(self, number: int) -> None:
        if self._is_blocked and number == self._num_blocked_writes:
            self._ends.on_unread()

"""One `Exchange` stream between a replica and a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from random import Random

from lockstep.internal.v1 import exchange_pb2
from shared.errors import ServiceError
from tests.simulation.clock import Clock
from tests.simulation.faults import Fault, FaultMix
from tests.simulation.network import Pipe, Trouble

_TROUBLE = Trouble(Fault.MESSAGE_LOST, Fault.MESSAGE_REPEATED, Fault.MESSAGE_REORDERED, Fault.MESSAGE_LATE)
_NOTICE_S = (0.0, 0.3)
# A scheduler may not have noticed when its replica is back.
_LATE_NOTICE_S = (0.0, 3.0)
_STALLS_S = (1.0, 4.0, 8.0, 20.0)
# Messages that the transport takes of a replica that does not read.
_NUM_BUFFERED = (0, 1, 4)
# A replica that does not read for so long loses its stream, once a scheduler that runs has beaten and has waited for it
# to take its last words.
MAX_UNREAD_S = 5.0
MAX_CLOSE_S = 2.5


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ends of a stream: what each is handed, and how it learns that the stream is over.

    `on_unread` is told when the replica has taken nothing for too long, and the stream should be over.
    """

    on_request: Callable[[bytes], None]
    on_response: Callable[[bytes], None]
    on_unread: Callable[[], None]
    on_scheduler_notice: Callable[[], None]
    on_replica_notice: Callable[[], None]


class ExchangeStream:
    """Carries requests up and outputs down. When it breaks, either end notices at a time of its own.

    To the scheduler's handler it is the context of the call, and what requests are read from. A message is written when
    the transport takes it, which it does not for long while the replica reads nothing.
    """

    def __init__(self, scheduler_id: str, clock: Clock, rng: Random, mix: FaultMix, *, ends: Ends) -> None:
        self.scheduler_id = scheduler_id
        # What the replica's ledger calls it.
        self.ledger_number = 0
        self.is_broken = False
        # The handler, in the scheduler's process.
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

    def send_request(self, request: exchange_pb2.ExchangeRequest) -> None:
        """Send a message of the replica's."""
        self._up.send(request.SerializeToString())
        self._may_break()

    def take_request(self, payload: bytes) -> None:
        """A message of the replica's has come to the scheduler."""
        self._arrived.put_nowait(exchange_pb2.ExchangeRequest.FromString(payload))

    async def requests(self) -> AsyncIterator[exchange_pb2.ExchangeRequest]:
        """The messages of the replica, for as long as somebody asks."""
        while True:
            yield await self._arrived.get()

    async def write(self, response: exchange_pb2.ExchangeResponse) -> None:
        """Send a message of the scheduler's; this is the part of a `ServicerContext` that the handler uses."""
        if not self._down.is_held and self._mix.strikes(Fault.REPLICA_STALL, self._rng):
            self._down.hold(self._clock.now + self._rng.choice(_STALLS_S))
            self._num_buffered = self._rng.choice(_NUM_BUFFERED)
        if self._down.is_held:
            await self._wait_for_room()
        if not response.HasField("heartbeat"):
            # A replica that reads makes nothing of signs of life.
            self._down.send(response.SerializeToString())
            self._may_break()

    def on_end(self, task: asyncio.Task[None]) -> None:
        """The handler has ended, and with it the stream."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ServiceError):
            raise error
        self.break_(scheduler_notices=False)

    def break_(self, *, scheduler_notices: bool = True) -> None:
        """Nothing more comes over it in time."""
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

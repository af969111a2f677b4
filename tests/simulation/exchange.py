"""One `Exchange` stream between a replica and a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lockstep.internal.v1 import exchange_pb2
from services.scheduler.batch import Outputs
from services.scheduler.exchange_codec import encode_outputs
from tests.simulation.clock import Clock
from tests.simulation.faults import Fault, FaultMix
from tests.simulation.network import Pipe, Trouble

_TROUBLE = Trouble(Fault.MESSAGE_LOST, Fault.MESSAGE_REPEATED, Fault.MESSAGE_REORDERED, Fault.MESSAGE_LATE)
_NOTICE_S = (0.0, 0.3)
# A scheduler may not have noticed when its replica is back.
_LATE_NOTICE_S = (0.0, 3.0)


@dataclass(frozen=True, slots=True)
class Ends:
    """Who is at the two ends of a stream: what each is handed, and how it learns that the stream is over."""

    on_request: Callable[[bytes], None]
    on_response: Callable[[bytes], None]
    on_scheduler_notice: Callable[[], None]
    on_replica_notice: Callable[[], None]


class ExchangeStream:
    """Carries requests up and outputs down. When it breaks, either end notices at a time of its own."""

    def __init__(self, number: int, scheduler_id: str, clock: Clock, rng: Random, mix: FaultMix, *, ends: Ends) -> None:
        self.number = number
        self.scheduler_id = scheduler_id
        # What the replica's ledger calls it.
        self.ledger_number = 0
        self.is_broken = False
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

    def send_cell_info(self, exact_fingerprint: str) -> None:
        """Tell the replica that the cell serves, and by which exact numerics, if they are."""
        cell_info = exchange_pb2.CellInfo(exact_fingerprint=exact_fingerprint)
        response = exchange_pb2.ExchangeResponse(cell_info=cell_info)
        self._down.send(response.SerializeToString())

    def send_outputs(self, outputs: Outputs) -> None:
        """Send a step's outputs to the replica."""
        response = exchange_pb2.ExchangeResponse(outputs=encode_outputs(outputs))
        self._down.send(response.SerializeToString())
        self._may_break()

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

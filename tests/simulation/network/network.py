"""Streams between processes: ordered and lossless unless a fault strikes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from tests.simulation.faults import Fault, FaultMix
from tests.simulation.network.clock import Clock

Message = TypeVar("Message")

_DELAY_S = (0.0002, 0.002)
_LONG_DELAY_S = (0.0, 0.2)
_LATENESS_S = (0.0, 2.0)


@dataclass(frozen=True, slots=True)
class Trouble:
    """The faults that one direction of a stream is subject to; None means that it never has that one."""

    lost: Fault | None = None
    repeated: Fault | None = None
    reordered: Fault | None = None
    late: Fault | None = None


class Pipe(Generic[Message]):
    """One direction of a stream.

    A lost message breaks the stream a little later, since a transport does not continue after a gap. A message that is
    in transit when the stream is cut, or is sent by an end that has not noticed the cut, never arrives or arrives late,
    after the stream was replaced.
    """

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        mix: FaultMix,
        trouble: Trouble,
        *,
        deliver: Callable[[Message], None],
        on_loss: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._trouble = trouble
        self._deliver = deliver
        self._on_loss = on_loss
        self._is_cut = False
        self._detour_s = 0.0
        self.held_until = 0.0
        self._last_arrival = 0.0

    def send(self, message: Message) -> None:
        """Send a message; it arrives after all earlier ones, unless a fault reorders it."""
        if self._is_cut:
            self._arrive(message)
            return
        if self._strikes(self._trouble.lost):
            self._clock.after(self._rng.uniform(*_LONG_DELAY_S), self._on_loss)
            return
        begin = max(self._clock.now, self.held_until)
        arrival = max(self._last_arrival, begin + self._detour_s + self._rng.uniform(*_DELAY_S))
        if self._strikes(self._trouble.reordered):
            self._plan_arrival(arrival + self._rng.uniform(*_LONG_DELAY_S), message)
            return
        self._last_arrival = arrival
        self._plan_arrival(arrival, message)
        if self._strikes(self._trouble.repeated):
            self._plan_arrival(arrival + self._rng.choice([0.0, self._rng.uniform(*_LONG_DELAY_S)]), message)

    def delay(self, detour_s: float) -> None:
        """Make later messages take this much longer."""
        self._detour_s = detour_s

    def hold(self, until: float) -> None:
        """Deliver nothing sent from now on before `until`; the transport retransmits it then."""
        self.held_until = max(self.held_until, until)

    @property
    def is_held(self) -> bool:
        """Whether a message sent now would wait."""
        return self.held_until > self._clock.now

    def cut(self) -> None:
        """End the stream."""
        self._is_cut = True

    def _plan_arrival(self, when: float, message: Message) -> None:
        self._clock.at(when, lambda: self._arrive(message))

    def _arrive(self, message: Message) -> None:
        if not self._is_cut:
            self._deliver(message)
        elif self._strikes(self._trouble.late):
            self._clock.after(self._rng.uniform(*_LATENESS_S), lambda: self._deliver(message))

    def _strikes(self, fault: Fault | None) -> bool:
        return fault is not None and self._mix.strikes(fault, self._rng)

"""A simulated discovery: what a scheduler is told about endpoints that come and go."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from random import Random

from services.scheduler.cell.events import Endpoint
from tests.simulation.network.clock import Clock

OnFound = Callable[[tuple[Endpoint, ...]], None]
WhenRunning = Callable[[Callable[[], object]], None]

# How long an endpoint terminates, and how long it is gone.
_TERMINATES_S = (0.0, 6.0)
_GONE_S = (0.0, 0.05, 0.5, 3.0)


class SimulatedDiscovery:
    """Tells every scheduler which endpoints there are.

    The workers at a place are the same whichever endpoint has it, and live on when it is gone: their streams are what
    the scheduler has to close. Every endpoint that goes is followed by another, or returns.
    """

    def __init__(self, num_endpoints: int, clock: Clock, rng: Random) -> None:
        self._clock = clock
        self._rng = rng
        self._names = (f"pod-{number}" for number in itertools.count())
        self._endpoints = {name: Endpoint(name) for name in itertools.islice(self._names, num_endpoints)}
        self._listeners: list[OnFound] = []

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Those that there are now."""
        return tuple(self._endpoints.values())

    def add_listener(self, on_found: OnFound) -> None:
        """Tell of every change from now on."""
        self._listeners.append(on_found)

    def remove_listener(self, on_found: OnFound) -> None:
        """Take `add_listener` back."""
        self._listeners.remove(on_found)

    def disturb(self) -> None:
        """Let an endpoint go, at once or after it has terminated for a while."""
        staying = [name for name, endpoint in self._endpoints.items() if not endpoint.is_terminating]
        if not staying:
            return
        name = self._rng.choice(staying)
        if self._rng.random() < 0.5:
            self._remove(name)
            return
        self._endpoints[name] = Endpoint(name, is_ready=False, is_terminating=True)
        self._tell()
        self._clock.after(self._rng.uniform(*_TERMINATES_S), lambda: self._remove(name))

    def _remove(self, name: str) -> None:
        del self._endpoints[name]
        self._tell()
        next_name = name if self._rng.random() < 0.5 else next(self._names)
        self._clock.after(self._rng.choice(_GONE_S), lambda: self._add(next_name))

    def _add(self, name: str) -> None:
        self._endpoints[name] = Endpoint(name, is_ready=self._rng.random() < 0.5)
        self._tell()

    def _tell(self) -> None:
        for on_found in list(self._listeners):
            on_found(self.endpoints)


class HeardDiscovery:
    """Plays `Discovery`: what one process hears of a simulated one, when it is running."""

    def __init__(self, source: SimulatedDiscovery, when_running: WhenRunning) -> None:
        self._source = source
        self._when_running = when_running

    async def run(self, on_found: OnFound) -> None:
        """See `Discovery`."""

        def hear(endpoints: tuple[Endpoint, ...]) -> None:
            self._when_running(lambda: on_found(endpoints))

        self._source.add_listener(hear)
        try:
            on_found(self._source.endpoints)
            await asyncio.Event().wait()
        finally:
            self._source.remove_listener(hear)

"""Whether requests would be computed now, and whether balancers should send clients here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shared.network.health import Health
from shared.network.heartbeat import next_beat_at
from shared.network.probes import Probes

# Without a setting: twice what the workers' last start took, between these. The first, while no worker has told it.
_FACTOR = 2.0
_UNTOLD_S, _SHORTEST_S = 60.0, 10.0


class Readiness:
    """Keeps health and probes up to date.

                        workers lost            bridging time over     workers back
        health          NOT_SERVING                                    SERVING
        readiness       ready                   not ready              ready

    Health is `/health` and the empty name of `grpc.health.v1`: whether a request would be computed now. Readiness is
    `/readyz` and the service's own name: who gets traffic goes by it. All replicas of a cell lose their workers
    together, so an ordinary restart takes none of them out: their requests wait for its end.

    Invariant: a replica that has never been linked, or was asked to end, is neither healthy nor ready.
    """

    def __init__(
        self,
        health: Health,
        probes: Probes,
        *,
        why_not_computed: Callable[[], str | None],
        bridging_s: Callable[[], float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with `update`.

        Args:
            health: The gRPC server's.
            probes: Those of the process, whose obstacle this sets.
            why_not_computed: As `SchedulerClient`'s.
            bridging_s: How long the replica stays ready after requests were last computed.
            now: The time in seconds.
        """
        self._health = health
        self._probes = probes
        self._find_why_not_computed = why_not_computed
        self._bridging_s = bridging_s
        self._now = now
        self._computed_at: float | None = None
        self._told: tuple[bool, bool] = (False, False)

    async def update(self) -> None:
        """Look again; call it after each change of `why_not_computed`."""
        why_not, now = self._find_why_not_computed(), self._now()
        if why_not is None:
            self._computed_at = now
        is_bridged = self._computed_at is not None and now - self._computed_at < self._bridging_s()
        self._probes.set_obstacle(None if is_bridged else why_not)
        is_open = not self._probes.is_leaving
        told = (is_open and why_not is None, is_open and (why_not is None or is_bridged))
        if told != self._told:
            self._told = told
            is_computed, is_ready = told
            await self._health.set_serving(is_computed, are_services=is_ready)

    async def leave(self) -> None:
        """The process was asked to end."""
        self._probes.is_leaving = True
        await self.update()

    async def run(self) -> None:
        """Look again with each heartbeat until cancelled: a bridging time and a lease end without an event."""
        while True:
            now = self._now()
            await asyncio.sleep(next_beat_at(now) - now)
            await self.update()


def find_bridging_s(setting_s: float | None, start_s: float | None) -> float:
    """The setting, or else what fits the last start of the cell's workers, in seconds."""
    if setting_s is not None:
        return setting_s
    return _UNTOLD_S if start_s is None else max(_SHORTEST_S, _FACTOR * start_s)

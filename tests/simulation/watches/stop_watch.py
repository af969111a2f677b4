"""What must not happen while a whole cell is asked to end, derived independently."""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.faults import CALM, FaultMix
from tests.simulation.network.clock import Clock
from tests.simulation.parts.domain import SimulatedDomain
from tests.simulation.parts.replica import Replica
from tests.simulation.parts.scheduler import SchedulerProcess


class StopWatch:
    """Follows one planned stop of a cell: the answers of its draining replicas may finish, and then all processes end.

    Checks nothing if another fault may have ended something.
    """

    def __init__(
        self,
        clock: Clock,
        mix: FaultMix,
        *,
        drain_s: float,
        replicas: Sequence[Replica],
        scheduler: SchedulerProcess,
        domains: list[SimulatedDomain],
    ) -> None:
        """Begin now, before the first process is asked."""
        self._clock = clock
        self._mix = mix
        self._replicas = replicas
        self._scheduler = scheduler
        self._over_at = clock.now + drain_s
        self._num_deaths = {domain: domain.num_deaths for domain in domains}
        # A group that no scheduler has claimed yet has nothing to stay for.
        is_held = all(worker.is_held for domain in domains for worker in domain.workers.values())
        self._was_served = all(one.is_served for one in replicas) and scheduler.engine.is_ready and is_held

    def check_stay_over(self) -> None:
        """Check that no draining replica needs a process any more that is about to go, or has lost its stream."""
        if not self._is_calm or not self._was_served or self._clock.now >= self._over_at:
            return
        assert not any(one.has_requests for one in self._replicas if one.is_alive), (
            "a cell that was asked to end leaves answers unfinished"
        )

    def check_end(self) -> None:
        """Check that everything has ended, once each process has had its time."""
        assert not any(one.is_alive for one in self._replicas), "a replica does not end although it was asked to"
        if self._is_calm:
            assert not self._scheduler.is_alive, "a scheduler does not end although it was asked to"
            has_ended = all(domain.num_deaths > number for domain, number in self._num_deaths.items())
            assert has_ended, "workers do not end although they were asked to"

    @property
    def _is_calm(self) -> bool:
        return all(fault in CALM for fault, count in self._mix.counts.items() if count)

"""A simulated failure domain: the workers that stand and fall together."""

from __future__ import annotations

from functools import partial
from random import Random

from tests.simulation.clock import Clock
from tests.simulation.collective import Collective
from tests.simulation.faults import FaultMix
from tests.simulation.worker import SimulatedWorker
from tests.simulation.workload import CellSettings
from tests.support.cell_model import Oracle

_RESTART_S = (0.5, 3.0)
# A process whose link inside its domain breaks leaves; the launcher kills the rest after 2 s. Source: DESIGN section 7.
_EXITS_S = (0.0, 2.0)


class SimulatedDomain:
    """Its ranks' workers, and what supervises them: with one process all end, and all are started again."""

    def __init__(
        self, ranks: range, settings: CellSettings, clock: Clock, rng: Random, mix: FaultMix, *, oracle: Oracle
    ) -> None:
        self.num_deaths = 0
        self._clock = clock
        self._rng = rng
        self._collective = Collective(clock, ranks)
        self._is_ending = False
        self.workers = {
            rank: SimulatedWorker(
                rank,
                settings,
                clock,
                rng,
                mix,
                collective=self._collective,
                oracle=oracle,
                end_domain=partial(self.end, rank),
            )
            for rank in ranks
        }

    def end(self, first_rank: int) -> None:
        """A rank's process ends; those of the others follow, and all begin anew."""
        if self._is_ending:
            return
        self._is_ending = True
        self.num_deaths += 1
        self._collective.reset()
        self.workers[first_rank].end_process()
        for rank, worker in self.workers.items():
            if rank != first_rank:
                self._clock.after(self._rng.uniform(*_EXITS_S), worker.end_process)
        self._clock.after(_EXITS_S[1] + self._rng.uniform(*_RESTART_S), self._start)

    def _start(self) -> None:
        self._is_ending = False
        self._collective.reset()
        for worker in self.workers.values():
            worker.start_process()

"""A simulated failure domain: workers that end and restart together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from shared.ids import DpRank
from tests.simulation.faults import FaultMix
from tests.simulation.network.clock import Clock
from tests.simulation.parts.collective import Collective
from tests.simulation.parts.worker import SimulatedWorker
from tests.simulation.workload import CellSettings
from tests.support.scheduler.cell_model import Oracle

_RESTART_S = (0.5, 3.0)
# A process exits when a link inside its domain breaks; the launcher kills the rest after 2 s.
_EXITS_S = (0.0, 2.0)
# Until coupled leaders know that one of them was asked to end.
_HEARS_S = (0.0, 1.0)


class _Process(Protocol):
    """The operations of the launcher on a process."""

    def end_process(self) -> None: ...

    def start_process(self) -> None: ...

    def close(self) -> None: ...


class SimulatedDomain:
    """The workers of its ranks, the members of their groups, and their supervisor.

    When one process ends, all end and are started again.
    """

    def __init__(
        self,
        ranks: Sequence[DpRank],
        settings: CellSettings,
        clock: Clock,
        rng: Random,
        mix: FaultMix,
        *,
        oracle: Oracle,
    ) -> None:
        self.num_deaths = 0
        self._clock = clock
        self._rng = rng
        self._collective = Collective(clock, ranks, settings.tp_size)
        self._is_ending = False
        # It starts no sooner than this.
        self._returns_at = 0.0
        self.workers = {
            rank: SimulatedWorker(
                rank,
                settings,
                clock,
                rng,
                mix,
                collective=self._collective,
                oracle=oracle,
                end_domain=self.end,
                on_leaving=self._on_leaving,
            )
            for rank in ranks
        }
        self._processes: list[_Process] = []
        for worker in self.workers.values():
            self._processes += [worker, *worker.group.members]
        for process in self._processes:
            process.start_process()

    @property
    def num_sick_deaths(self) -> int:
        """The deaths of workers that could not compute, whatever they were given."""
        return sum(worker.num_sick_deaths for worker in self.workers.values())

    def end(self, process: _Process) -> None:
        """End a process; the others follow within 2 s, and all are restarted."""
        process.end_process()
        if self._is_ending:
            return
        self._is_ending = True
        self.num_deaths += 1
        self._collective.reset()
        for other in self._processes:
            if other is not process:
                self._clock.after(self._rng.uniform(*_EXITS_S), other.end_process)
        self._clock.after(_EXITS_S[1] + self._rng.uniform(*_RESTART_S), self._start)

    def restart(self) -> None:
        """Kill the processes; they are started again."""
        self.end(self._processes[0])

    def vanish(self, duration_s: float) -> None:
        """Kill the processes; nothing starts them again for so long."""
        self._returns_at = self._clock.now + duration_s
        self.restart()

    def ask(self, on_stay_over: Callable[[], None]) -> None:
        """Ask the leaders to end (SIGTERM), as everything else in the cell; see `SimulatedWorker.leave`."""
        for worker in self.workers.values():
            worker.leave(on_stay_over)

    def _on_leaving(self) -> None:
        """A leader was asked to end, and tells the others."""
        for worker in self.workers.values():
            self._clock.after(self._rng.uniform(*_HEARS_S), worker.leave)

    def close(self) -> None:
        """Release everything at the end of the run."""
        for process in self._processes:
            process.close()

    def _start(self) -> None:
        if self._clock.now < self._returns_at:
            self._clock.after(self._returns_at - self._clock.now, self._start)
            return
        self._is_ending = False
        self._collective.reset()
        for process in self._processes:
            process.start_process()

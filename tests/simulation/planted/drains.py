"""Bugs in planned stops that the simulation must detect."""

from __future__ import annotations

from services.scheduler.cell.cell import Cell
from services.scheduler.cell.domains.domain import Domain
from services.scheduler.cell.domains.drains import Drains
from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.server.replica_drains import ReplicaDrains
from services.worker.server.departure import Departure
from tests.simulation.faults import Fault
from tests.simulation.planted.planting import Patch, PlantedBug, planter

DRAIN_BUGS: list[PlantedBug] = []
_planted = planter(DRAIN_BUGS)


@_planted(Fault.WORKER_LEAVE, seed=70)
def _planned_stops_accuse(patch: Patch) -> None:
    """The requests in flight when a leaving worker's link breaks become suspects."""
    release = Cell.release

    def accuse(self: Cell, domain: Domain, now: float) -> list[Sequence]:
        in_flight = {request: None for rank in domain.ranks for request in rank.scheduler._running.in_flight_keys()}
        sequences = release(self, domain, now)
        self._quarantine.on_lost(domain, list(in_flight), now)
        return sequences

    patch.setattr(Cell, "release", accuse)


@_planted(Fault.WORKER_LEAVE)
def _planned_stops_are_losses(patch: Patch) -> None:
    """A planned stop counts as a lost epoch."""
    release = Cell.release

    def count(self: Cell, domain: Domain, now: float) -> list[Sequence]:
        self._counters.num_lost_epochs += 1
        return release(self, domain, now)

    patch.setattr(Cell, "release", count)


@_planted(Fault.WORKER_LEAVE, seed=9)
def _leaving_domains_get_new_sequences(patch: Patch) -> None:
    """New requests are placed on ranks that are about to stop."""
    patch.setattr(Domain, "is_draining", property(lambda _: False))
    patch.setattr(Drains, "check_integrity", lambda *_: None)


@_planted(Fault.RANK_DRAIN)
def _drained_ranks_get_new_sequences_when_they_are_attached_again(patch: Patch) -> None:
    """An operator's drain ends with the epoch."""
    end_epoch = Domain.end_epoch

    def forget(self: Domain, now: float) -> object:
        self.is_drained_by_operator = False
        return end_epoch(self, now)

    patch.setattr(Domain, "end_epoch", forget)


@_planted(Fault.WORKER_LEAVE, Fault.RANK_DRAIN)
def _drains_never_end(patch: Patch) -> None:
    """A leaving worker is kept until it ends by itself."""
    patch.setattr(Drains, "take_over", lambda *_: [])


@_planted(Fault.WORKER_LEAVE, Fault.RANK_DRAIN, seed=6)
def _no_sequence_may_finish(patch: Patch) -> None:
    """Sequences are moved at once, although they might finish in time."""
    make = Drains.__init__
    patch.setattr(Drains, "__init__", lambda self, _: make(self, 0.0))


@_planted(Fault.WORKER_LEAVE)
def _steps_in_flight_are_cut_off(patch: Patch) -> None:
    """A drain ends while steps are in flight, whose tokens are lost."""
    take_over = Drains.take_over

    def cut(self: Drains, now: float) -> list[Domain]:
        with patch.context() as inner:
            inner.setattr(Domain, "is_quiet", True)
            return take_over(self, now)

    patch.setattr(Drains, "take_over", cut)


@_planted(Fault.RANK_DRAIN)
def _undrained_ranks_stay_closed(patch: Patch) -> None:
    """Requests keep waiting although their rank was taken back."""
    patch.setattr(Cell, "undrain", lambda *_: None)


@_planted(Fault.PLANNED_STOP, seed=23)
def _schedulers_do_not_stay(patch: Patch) -> None:
    """A scheduler that is asked to end together with its replicas ends at once, and nothing finishes their answers."""

    async def stay(_: ReplicaDrains, __: float) -> None:
        return

    patch.setattr(ReplicaDrains, "stay", stay)


@_planted(Fault.PLANNED_STOP)
def _workers_do_not_hear_that_their_scheduler_stays(patch: Patch) -> None:
    """Workers leave although a replica that drains needs them."""
    patch.setattr(ReplicaDrains, "is_staying", False)


@_planted(Fault.PLANNED_STOP, Fault.STOPPED_DEATH)
def _workers_that_lose_their_scheduler_leave(patch: Patch) -> None:
    """A worker that was asked to end, and whose scheduler dies, ends at once: no model is loaded in a drain time."""
    lose_stream = Departure.lose_stream

    def leave(self: Departure) -> None:
        lose_stream(self)
        if self._end_at is not None:
            self._leave("its scheduler is lost")

    patch.setattr(Departure, "lose_stream", leave)


@_planted(Fault.PLANNED_STOP, Fault.STOPPED_DEATH)
def _schedulers_that_were_not_asked_do_not_stay(patch: Patch) -> None:
    """A scheduler that takes the place of one that died in a stop does not say that it stays while replicas drain."""
    is_staying = ReplicaDrains.__dict__["is_staying"].__get__
    patch.setattr(ReplicaDrains, "is_staying", property(lambda self: self._is_asked and is_staying(self)))


@_planted(Fault.PLANNED_STOP, seed=7)
def _schedulers_stay_for_replicas_that_have_ended(patch: Patch) -> None:
    """A scheduler that is asked to end waits for its drain time although nothing needs it."""
    patch.setattr(ReplicaDrains, "unlink", lambda *_: None)

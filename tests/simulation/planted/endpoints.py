"""Bugs in the places of endpoints that come and go, which the simulation must detect."""

from __future__ import annotations

from typing import Any

from services.scheduler.cell.cell import Cell
from services.scheduler.cell.domains.domain import Domain
from services.scheduler.cell.domains.drains import Drains
from services.scheduler.cell.events import Action, UnlinkDomain
from services.scheduler.cell.places import Places
from tests.simulation.faults import Fault
from tests.simulation.planted.planting import Patch, PlantedBug, planter

ENDPOINT_BUGS: list[PlantedBug] = []
_planted = planter(ENDPOINT_BUGS)


@_planted(Fault.ENDPOINT_GONE, seed=6)
def _endpoints_that_terminate_get_new_sequences(patch: Patch) -> None:
    """New requests are placed on workers whose endpoints are terminating or gone."""
    patch.setattr(Domain, "is_draining", property(lambda self: self.is_leaving or self.is_drained_by_operator))
    patch.setattr(Drains, "check_integrity", lambda *_: None)


@_planted(Fault.ENDPOINT_GONE, seed=5)
def _places_are_left_before_their_sequences_end(patch: Patch) -> None:
    """An endpoint that is gone loses its link while its workers still compute."""

    def close_ended(self: Places) -> list[Action]:
        self.has_withdrawn = False
        withdrawn = [place for place in self._taken() if place.domain.is_withdrawn]
        return [action for place in withdrawn for action in self._close(place)]

    patch.setattr(Places, "_close_ended", close_ended)
    patch.setattr(Places, "check_integrity", lambda *_: None)
    patch.setattr(Cell, "check_integrity", lambda *_: None)


@_planted(Fault.ENDPOINT_GONE, seed=5)
def _endpoints_that_return_are_still_emptied(patch: Patch) -> None:
    """An endpoint that is back before its place is vacant loses its sequences when the drain is over."""

    def restore(_: Cell, domain: Domain, _now: float) -> None:
        domain.is_withdrawn = False

    patch.setattr(Cell, "restore", restore)
    patch.setattr(Drains, "check_integrity", lambda *_: None)


@_planted(Fault.ENDPOINT_GONE, seed=9)
def _places_are_never_vacant_again(patch: Patch) -> None:
    """A place that an endpoint has left is given to no other, so that in the end nothing computes."""

    def close(self: Places, place: Any) -> list[Action]:
        actions: list[Action] = [UnlinkDomain(place.domain.number)] if place.is_linked else []
        place.is_linked = False
        return actions

    patch.setattr(Places, "_close", close)
    patch.setattr(Places, "check_integrity", lambda *_: None)

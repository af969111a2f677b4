"""Which endpoint has which DP rank while endpoints come and go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.cell.cell import Cell
from services.scheduler.cell.domains.domain import Domain
from services.scheduler.cell.events import Action, Endpoint, LinkDomain, UnlinkDomain


@dataclass(slots=True)
class _Place:
    """A domain of one rank, and the endpoint that has it."""

    domain: Domain
    address: str = ""
    """Empty while the domain is vacant."""
    is_linked: bool = False
    is_gone: bool = False
    """Whether discovery knows the endpoint no more."""


class Places:
    """Gives each endpoint the lowest free place, which it keeps until it is gone and its stream is closed.

        found                  terminating or gone                 its stream is closed
        |--- linked -----------|--- linked, drains ----------------|--- not linked ---| gone: the place is vacant

    The last set of endpoints counts until there is another. An endpoint that returns before its place is vacant has
    never been away. Readiness and zone only decide which endpoints come first when places are few: a stream says
    sooner and better whether workers can serve, and a standby must find the leading scheduler's workers, ready or
    not.

    Invariant: an address has at most one place; a place is vacant exactly when it has no address. A link that is not
    withdrawn has an endpoint that was found and is not terminating.
    """

    def __init__(self, cell: Cell, preferred_zone: str | None) -> None:
        """No endpoint is known yet; see `CellTopology.preferred_zone`."""
        self._cell = cell
        self._preferred_zone = preferred_zone
        self._places = [_Place(domain) for domain in cell.domains if domain.is_vacant]
        self._endpoints: tuple[Endpoint, ...] = ()
        self.has_withdrawn = False
        """Whether the link of a withdrawn place waits for its epoch to end."""

    @property
    def num_unplaced(self) -> int:
        """Endpoints that have no place because all are taken."""
        return len(self._unplaced())

    def update(self, endpoints: Iterable[Endpoint], now: float) -> list[Action]:
        """Take in the endpoints that discovery knows now."""
        self._endpoints = tuple(endpoints)
        found = {endpoint.address: endpoint for endpoint in self._endpoints}
        actions: list[Action] = []
        for place in self._taken():
            endpoint = found.get(place.address)
            place.is_gone = endpoint is None
            if endpoint is None or endpoint.is_terminating:
                self._cell.withdraw(place.domain, now)
            elif place.domain.is_withdrawn:
                self._cell.restore(place.domain, now)
                actions += self._link(place)
        return [*actions, *self._close_ended(), *self._fill()]

    def settle(self) -> list[Action]:
        """Close the links of withdrawn places whose epochs have ended; others may take what becomes vacant."""
        closed = self._close_ended()
        return [*closed, *self._fill()] if closed else []

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        addresses = [place.address for place in self._taken()]
        assert len(set(addresses)) == len(addresses), "an endpoint has two places"
        found = {endpoint.address for endpoint in self._endpoints if not endpoint.is_terminating}
        for place in self._places:
            domain = place.domain
            assert domain.is_vacant is not bool(place.address), "a place is vacant and has an endpoint, or neither"
            assert place.is_linked or domain.epoch is None, "an attached domain has no link"
            assert domain.is_vacant or domain.is_withdrawn is not (place.address in found), "a place missed a change"
            assert place.is_linked or domain.is_vacant or domain.is_withdrawn, "an endpoint was forgotten"
        assert not (self._unplaced() and any(place.domain.is_vacant for place in self._places)), "a place is left empty"

    def _taken(self) -> list[_Place]:
        return [place for place in self._places if place.address]

    def _unplaced(self) -> list[Endpoint]:
        """Endpoints without a place: those that are ready first, then those of the preferred zone.

        At last by address: with equal settings two schedulers begin with the same ones.
        """
        placed = {place.address for place in self._places}
        waiting = (one for one in self._endpoints if not one.is_terminating and one.address not in placed)
        return sorted(waiting, key=lambda one: (not one.is_ready, self._is_remote(one), one.address))

    def _is_remote(self, endpoint: Endpoint) -> bool:
        return self._preferred_zone is not None and endpoint.zone != self._preferred_zone

    def _link(self, place: _Place) -> list[Action]:
        if place.is_linked:
            return []
        place.is_linked = True
        return [LinkDomain(place.domain.number, place.address)]

    def _close_ended(self) -> list[Action]:
        withdrawn = [place for place in self._taken() if place.domain.is_withdrawn]
        actions: list[Action] = []
        for place in withdrawn:
            if place.domain.epoch is None:
                actions += self._close(place)
        self.has_withdrawn = any(place.is_linked for place in withdrawn)
        return actions

    def _close(self, place: _Place) -> list[Action]:
        actions: list[Action] = [UnlinkDomain(place.domain.number)] if place.is_linked else []
        place.is_linked = False
        if place.is_gone:
            place.address, place.is_gone = "", False
            place.domain.vacate()
        return actions

    def _fill(self) -> list[Action]:
        actions: list[Action] = []
        vacant = [place for place in self._places if place.domain.is_vacant]
        for place, endpoint in zip(vacant, self._unplaced(), strict=False):
            place.address, place.domain.is_vacant = endpoint.address, False
            actions += self._link(place)
        return actions

"""A breadth-first search through every state of the attach protocol within the bounds."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from services.scheduler.core.policy import CellTopology
from tests.simulation.attach.actors import ProtocolError
from tests.simulation.attach.fair_runs import find_dead_ends, find_fair_circles, find_origins
from tests.simulation.attach.messages import Bounds, State
from tests.simulation.attach.model import AttachModel


@dataclass(frozen=True, slots=True)
class Search:
    """The cell and the bounds of a search.

    From every state with at least `spare_epochs` and `spare_lives` left below the bounds, the cell must become served
    if no more faults happen.
    """

    topology: CellTopology
    bounds: Bounds
    spare_epochs: int
    spare_lives: int
    num_schedulers: int = 2

    def run(self) -> SearchResult:
        """Search all states.

        Raises:
            ProtocolError: See `AttachSearch.run`.
        """
        model = AttachModel(self.topology, self.bounds, num_schedulers=self.num_schedulers)
        return AttachSearch(model).run(spare_epochs=self.spare_epochs, spare_lives=self.spare_lives)


_COUPLED_GROUPS = CellTopology(2, is_coupled=True)
_OTHER_GROUPS = CellTopology(2)

# Two schedulers compete for two coupled groups, and each may restart once.
COUPLED = Search(_COUPLED_GROUPS, Bounds(max_epoch=3, max_steps=1, max_faults=0, max_lives=2), 2, 1)
# The same with one fault at any time; the bounds are too tight to check that the cell becomes served.
FAULTS = Search(_COUPLED_GROUPS, Bounds(max_epoch=2, max_steps=1, max_faults=1, max_lives=1), 2, 0)
# Successive schedulers hold two coupled groups; messages of dead ones arrive late.
SUCCESSION = Search(
    _COUPLED_GROUPS, Bounds(max_epoch=4, max_steps=1, max_faults=1, max_lives=3), 2, 1, num_schedulers=1
)
# Two schedulers compete for two uncoupled groups, so that each may get one.
SPLIT = Search(_OTHER_GROUPS, Bounds(max_epoch=2, max_steps=0, max_faults=0, max_lives=1), 1, 0)
# The same with room for an epoch more.
WIDE_SPLIT = Search(_OTHER_GROUPS, Bounds(max_epoch=3, max_steps=0, max_faults=0, max_lives=1), 2, 0)
# Successive schedulers hold two uncoupled groups.
HEIR = Search(_OTHER_GROUPS, Bounds(max_epoch=3, max_steps=0, max_faults=1, max_lives=2), 1, 1, num_schedulers=1)
# A scheduler and a group die together; the next scheduler must go above the other group's old epoch.
PAIR = Search(_OTHER_GROUPS, Bounds(max_epoch=3, max_steps=0, max_faults=2, max_lives=2), 1, 1, num_schedulers=1)
# Two schedulers compete for one group, with one fault.
ONE_GROUP = Search(CellTopology(1), Bounds(max_epoch=3, max_steps=1, max_faults=1, max_lives=2), 2, 1)
# The same with two faults: a holder is silent for a lease, and the scheduler that took its group dies. Both schedulers
# may die, so this does not check that the cell becomes served.
TAKEN_GROUP = Search(CellTopology(1), Bounds(max_epoch=3, max_steps=0, max_faults=2, max_lives=1), 4, 0)

SEARCHES = {
    "two schedulers, coupled groups": COUPLED,
    "one scheduler after the other": SUCCESSION,
    "two schedulers, groups that are not coupled": SPLIT,
    "two schedulers, one group, a fault": ONE_GROUP,
    "one scheduler after the other, groups that are not coupled, a fault": HEIR,
}
# Half a million states and more: minutes each.
WIDEST_SEARCHES = {
    "two schedulers, one group, two faults": TAKEN_GROUP,
    "two schedulers, coupled groups, a fault": FAULTS,
    "whatever dies together": PAIR,
    "two schedulers, groups that are not coupled, three epochs": WIDE_SPLIT,
}


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The size of a search without violations."""

    num_states: int
    num_moves: int


class AttachSearch:
    """Visits each state once, and records from where it was first reached.

    Moves that are not faults are kept as pairs of states, to check at the end from which states the cell becomes served
    without another fault.
    """

    def __init__(self, model: AttachModel) -> None:
        self._model = model
        self._numbers: dict[State, int] = {}
        self._states: list[State] = []
        # By state number: the state from which it was first reached, and whether the cell is served.
        self._origins = array("l")
        self._is_served = bytearray()
        self._froms, self._tos = array("l"), array("l")
        self._num_moves = 0

    def run(self, *, spare_epochs: int, spare_lives: int) -> SearchResult:
        """Search all states.

        Args:
            spare_epochs: The cell must become served from states with at least this many epochs left.
            spare_lives: The same for scheduler restarts.

        Raises:
            ProtocolError: A forbidden move or state; the message has the shortest way that leads there.
        """
        self._add(self._model.first_state(), 0)
        position = 0
        while position < len(self._states):
            self._expand(position)
            position += 1
        self._check_progress(spare_epochs, spare_lives)
        return SearchResult(len(self._states), self._num_moves)

    def _add(self, state: State, origin: int) -> int:
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
            self._origins.append(origin)
            self._is_served.append(self._model.is_served(state))
        return number

    def _expand(self, position: int) -> None:
        state = self._states[position]
        try:
            self._model.check(state)
            for move in self._model.moves(state):
                self._num_moves += 1
                number = self._add(move.state, position)
                if move.is_fault:
                    continue
                if self._is_served[position] and not self._is_served[number]:
                    raise ProtocolError(f"{move.subject} {move.what}, and the cell is no longer served")
                self._froms.append(position)
                self._tos.append(number)
        except ProtocolError as error:
            raise ProtocolError(f"{error}, after:\n{self._way_to(position)}") from None

    def _check_progress(self, spare_epochs: int, spare_lives: int) -> None:
        """Check that the cell can become served from every state with room, and must where one scheduler is alone."""
        served = {number for number, is_served in enumerate(self._is_served) if is_served}
        may_be_served = find_origins(served, self._edges())
        may_stay_unserved = self._find_unserved(served)
        for number, state in enumerate(self._states):
            if not self._model.has_room(state, num_epochs=spare_epochs, num_lives=spare_lives):
                continue
            if number not in may_be_served:
                raise ProtocolError(f"the cell is never served again, after:\n{self._way_to(number)}")
            if number in may_stay_unserved:
                raise ProtocolError(f"the only scheduler never serves the cell, after:\n{self._way_to(number)}")

    def _find_unserved(self, served: set[int]) -> set[int]:
        """The states from which some fair run, without faults and with at most one scheduler, never serves the cell."""
        alone = {number for number, state in enumerate(self._states) if self._model.is_alone(state)}
        unserved = alone - served
        edges = [(origin, number) for origin, number in self._edges() if origin in unserved and number in alone]
        circles = find_fair_circles(unserved, edges, self._moves_alone)
        return find_origins(find_dead_ends(unserved, edges) | circles, edges)

    def _moves_alone(self, number: int) -> Iterator[tuple[Hashable, int]]:
        for move in self._model.moves(self._states[number]):
            if not move.is_fault and self._model.is_alone(move.state):
                yield (move.what, move.subject), self._numbers[move.state]

    def _edges(self) -> Iterator[tuple[int, int]]:
        return zip(self._froms, self._tos, strict=True)

    def _way_to(self, number: int) -> str:
        lines: list[str] = []
        while number:
            origin = self._origins[number]
            state = self._states[number]
            move = next(move for move in self._model.moves(self._states[origin]) if move.state == state)
            lines.append(f"{move.subject} {move.what}")
            number = origin
        return "\n".join(reversed(lines))

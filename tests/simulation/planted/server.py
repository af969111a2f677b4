"""Bugs in the server around the engine that the simulation must detect: in its timer, its clients and its links."""

from __future__ import annotations

import pytest

from services.scheduler.cell.events import Event, TimePassed
from services.scheduler.server.cell_server import CellServer
from services.scheduler.server.client_link import ClientLink
from tests.simulation.faults import Fault
from tests.simulation.planted.planting import Patch, PlantedBug, planter

SERVER_BUGS: list[PlantedBug] = []
_planted = planter(SERVER_BUGS)


# The timer.


@_planted(Fault.WORKER_CRASH)
def _the_timer_is_not_armed_anew(patch: Patch) -> None:
    """An expired timer still counts as armed, so the engine is never woken again."""
    patch.setattr(CellServer, "_on_timer", lambda self: self.on_event(TimePassed()))


@_planted(Fault.DEADLINE, Fault.WORKER_HANG, seed=9)
def _the_timer_is_not_moved_forward(patch: Patch) -> None:
    """A timer armed for a heartbeat is not moved forward when a request's deadline is earlier."""
    arm_timer = CellServer._arm_timer

    def arm_once(self: CellServer) -> None:
        if self._timer is None:
            arm_timer(self)

    patch.setattr(CellServer, "_arm_timer", arm_once)


# Replicas.


@_planted()
def _replicas_that_came_first_learn_nothing_about_the_cell(patch: Patch) -> None:
    """A replica that connected before the workers attached never receives the cell info."""
    handle = CellServer._handle

    def keep_silent(self: CellServer, event: Event) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(CellServer, "_send_cell_info", lambda *_: None)
            handle(self, event)

    patch.setattr(CellServer, "_handle", keep_silent)


@_planted(Fault.STREAM_BREAK)
def _requests_outlive_their_stream(patch: Patch) -> None:
    """A replica whose stream ends is forgotten without notifying the engine."""

    def forget(self: CellServer, client: ClientLink) -> None:
        self.clients.pop(client.number, None)

    patch.setattr(CellServer, "disconnect", forget)


@_planted(Fault.REPLICA_STALL, seed=10)
def _replicas_get_no_signs_of_life(patch: Patch) -> None:
    """Heartbeats go to workers only, so a replica that does not read is never detected."""
    patch.setattr(ClientLink, "beat", lambda *_: None)


# Health.


@_planted()
def _health_stays_as_it_was(patch: Patch) -> None:
    """The health service is not updated when workers attach."""
    patch.setattr(CellServer, "_report_health", lambda *_: None)

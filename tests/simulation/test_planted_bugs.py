"""Each planted bug is detected within a few seeds of its own mix of faults."""

from __future__ import annotations

import pytest

from tests.simulation.planted_bugs import CELL_BUGS
from tests.simulation.planted_draft_bugs import DRAFT_BUGS
from tests.simulation.planted_drain_bugs import DRAIN_BUGS
from tests.simulation.planted_endpoint_bugs import ENDPOINT_BUGS
from tests.simulation.planted_group_bugs import GROUP_BUGS
from tests.simulation.planted_rank_bugs import RANK_BUGS
from tests.simulation.planted_request_bugs import REQUEST_BUGS
from tests.simulation.planted_server_bugs import SERVER_BUGS
from tests.simulation.planting import PlantedBug
from tests.simulation.simulation import SimulationError, simulate

BUGS = [*CELL_BUGS, *DRAFT_BUGS, *DRAIN_BUGS, *ENDPOINT_BUGS, *GROUP_BUGS, *RANK_BUGS, *REQUEST_BUGS, *SERVER_BUGS]
MAX_SEEDS = 50


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_seen(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(MAX_SEEDS):
        # Planted anew for each run, since a patch may keep state.
        with monkeypatch.context() as patch:
            bug.plant(patch)
            try:
                simulate(seed, bug.kinds)
            except SimulationError:
                return
    pytest.fail(f"{bug.name} survives {MAX_SEEDS} seeds: {bug.breaks}")

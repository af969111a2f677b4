"""Each planted bug is detected within a few seeds of its own mix of faults."""

from __future__ import annotations

import pytest

from tests.simulation.planted.drafts import DRAFT_BUGS
from tests.simulation.planted.drains import DRAIN_BUGS
from tests.simulation.planted.endpoints import ENDPOINT_BUGS
from tests.simulation.planted.groups import GROUP_BUGS
from tests.simulation.planted.planting import PlantedBug
from tests.simulation.planted.ranks import RANK_BUGS
from tests.simulation.planted.requests import REQUEST_BUGS
from tests.simulation.planted.server import SERVER_BUGS
from tests.simulation.planted.states import STATE_BUGS
from tests.simulation.planted.steps import CELL_BUGS
from tests.simulation.planted.tenants import TENANT_BUGS
from tests.simulation.simulation import SimulationError, simulate

BUGS = [
    *CELL_BUGS,
    *DRAFT_BUGS,
    *DRAIN_BUGS,
    *ENDPOINT_BUGS,
    *GROUP_BUGS,
    *RANK_BUGS,
    *REQUEST_BUGS,
    *SERVER_BUGS,
    *STATE_BUGS,
    *TENANT_BUGS,
]
MAX_SEEDS = 50


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_seen(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    # Should its own seed no longer show it, another one must.
    for seed in (bug.seed, *range(MAX_SEEDS)):
        # Planted anew for each run, since a patch may keep state.
        with monkeypatch.context() as patch:
            bug.plant(patch)
            try:
                simulate(seed, bug.kinds)
            except SimulationError as error:
                # Any other error is not what shows it: the patch itself may be wrong.
                if isinstance(error.__cause__, bug.raises):
                    return
    pytest.fail(f"{bug.name} survives {MAX_SEEDS} seeds: {bug.breaks}")

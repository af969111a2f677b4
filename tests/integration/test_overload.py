"""Floods of calls, watches and resets against a real cell: only OK and QUEUE_FULL, other calls unharmed.

`python -m tests.bench.overload` does the same with more calls.
"""

from __future__ import annotations

import pytest

from tests.support.cells.cell import Cell
from tests.support.clients.flood import flood_with_calls, flood_with_resets, flood_with_watches

pytestmark = pytest.mark.slow

# Above gRPC's soft limit, from which on it rejects at random.
NUM_CALLS = 1500
NUM_RESETS = 4000
# Above gRPC's hard limit.
NUM_WATCHES = 3500


@pytest.mark.parametrize("is_scheduler", [False, True], ids=["tokenizer", "scheduler"])
async def test_a_flood_of_calls_is_served_or_told_that_the_queue_is_full(tiny_cell: Cell, is_scheduler: bool) -> None:
    address = tiny_cell.scheduler_address if is_scheduler else tiny_cell.address
    outcomes = await flood_with_calls(address, NUM_CALLS, is_scheduler=is_scheduler)
    assert not outcomes.unexpected
    assert outcomes.counts.total() == NUM_CALLS


@pytest.mark.parametrize("is_scheduler", [False, True], ids=["tokenizer", "scheduler"])
async def test_streams_that_are_opened_and_reset_harm_no_neighbour(tiny_cell: Cell, is_scheduler: bool) -> None:
    address = tiny_cell.scheduler_address if is_scheduler else tiny_cell.address
    outcomes = await flood_with_resets(address, NUM_RESETS, is_scheduler=is_scheduler)
    assert not outcomes.unexpected
    assert outcomes.counts["OK"]


@pytest.mark.parametrize("is_scheduler", [False, True], ids=["tokenizer", "scheduler"])
async def test_health_watches_are_all_answered(tiny_cell: Cell, is_scheduler: bool) -> None:
    outcomes = await flood_with_watches(tiny_cell.scheduler_address if is_scheduler else tiny_cell.address, NUM_WATCHES)
    assert outcomes.counts == {"OK": NUM_WATCHES}

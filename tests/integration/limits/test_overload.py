"""Floods of calls, watches and resets against a real cell: only OK and QUEUE_FULL, other calls unharmed.

`python -m tests.bench.overload` does the same with more calls.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.client import connect
from tests.support.clients.flood import flood_with_calls, flood_with_posts, flood_with_resets, flood_with_watches
from tests.support.system.ports import free_port

pytestmark = pytest.mark.slow

# Above gRPC's soft limit, from which on it rejects at random.
NUM_CALLS = 1500
NUM_RESETS = 4000
# Requests that can run, and as many that can wait; twenty times as many come over HTTP at once.
NUM_SLOTS = 16
NUM_POSTS = 320
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


async def test_ten_times_too_many_posts_are_answered_or_told_when_to_retry(tiny_model: Path) -> None:
    limits = (f"--scheduler.max-num-seqs={NUM_SLOTS}", f"--scheduler.max-waiting-requests={NUM_SLOTS}")
    with start_cell(tiny_model, *limits, f"--http-listen=127.0.0.1:{free_port()}") as cell:
        async with connect(cell) as client, cell.http_session() as session:
            outcomes = await flood_with_posts(session, NUM_POSTS, max_tokens=64)
            state = await client.wait_until_idle()
    assert not outcomes.unexpected
    assert outcomes.counts.total() == NUM_POSTS
    # Only the queue's places are certain: all posts may come before the first step empties it.
    assert outcomes.counts["OK"] >= NUM_SLOTS
    assert outcomes.counts["QUEUE_FULL"]
    assert state.num_free_blocks == state.num_blocks

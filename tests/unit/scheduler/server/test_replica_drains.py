"""For which replicas a scheduler that was asked to end stays."""

from __future__ import annotations

import asyncio

import pytest

from services.scheduler.server.replica_drains import ReplicaDrains
from tests.support.system.patience import PATIENCE_S

# Far longer than any test.
FOREVER_S = 3600.0


class Drains:
    """Linked replicas, and what the workers were told."""

    def __init__(self, num_replicas: int = 2) -> None:
        self.told: list[bool] = []
        self.now = 0.0
        self.drains = ReplicaDrains(lambda: self.told.append(self.drains.is_staying), lambda: self.now)
        for replica in range(1, num_replicas + 1):
            self.drains.link(replica)

    async def begin_stay(self) -> asyncio.Task[None]:
        staying = asyncio.create_task(self.drains.stay(FOREVER_S))
        for _ in range(10):
            await asyncio.sleep(0)
        return staying


async def test_a_scheduler_that_was_not_asked_to_end_keeps_no_worker_while_a_replica_goes_on() -> None:
    state = Drains()
    state.drains.note(2, is_draining=False)
    state.drains.note(1, is_draining=True)
    assert not state.drains.is_staying
    assert state.told[-1] is False


async def test_a_scheduler_whose_replicas_all_drain_keeps_its_workers_until_they_are_gone() -> None:
    state = Drains()
    for replica in (1, 2):
        state.drains.note(replica, is_draining=True)
        assert state.drains.is_staying
    state.drains.unlink(1)
    assert state.drains.is_staying
    # A later message says nothing else.
    state.drains.note(2, is_draining=False)
    assert state.drains.is_staying
    state.drains.unlink(2)
    assert not state.drains.is_staying
    assert state.told[-1] is False


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_scheduler_that_has_just_started_keeps_its_workers_until_it_knows_its_replicas(is_asked: bool) -> None:
    state = Drains(num_replicas=0)
    if is_asked:
        assert (await state.begin_stay()).done()
    assert (state.drains.is_staying, state.drains.is_over) == (True, False)
    state.now = 3600.0
    assert (state.drains.is_staying, state.drains.is_over) == (False, True)


async def test_a_scheduler_is_over_once_its_last_replica_is_gone() -> None:
    state = Drains()
    state.drains.unlink(1)
    assert not state.drains.is_over
    state.drains.unlink(2)
    assert (state.drains.is_staying, state.drains.is_over) == (False, True)


async def test_a_scheduler_stays_until_no_replica_that_drains_is_linked_and_so_do_its_workers() -> None:
    state = Drains()
    state.drains.note(1, is_draining=True)
    staying = await state.begin_stay()
    state.drains.note(2, is_draining=True)
    assert state.drains.is_staying
    state.drains.unlink(1)
    assert state.drains.is_staying
    assert not staying.done()
    state.drains.unlink(2)
    await asyncio.wait_for(staying, PATIENCE_S)
    assert state.told == [True, False]


async def test_a_scheduler_does_not_stay_for_replicas_that_go_on() -> None:
    state = Drains()
    staying = await state.begin_stay()
    state.drains.note(1, is_draining=True)
    state.drains.note(2, is_draining=False)
    state.drains.unlink(1)
    await asyncio.wait_for(staying, PATIENCE_S)


async def test_a_scheduler_without_replicas_ends_at_once() -> None:
    state = Drains()
    for replica in (1, 2):
        state.drains.unlink(replica)
    assert (await state.begin_stay()).done()


async def test_what_a_replica_still_says_after_its_end_is_ignored() -> None:
    state = Drains()
    state.drains.unlink(1)
    state.drains.note(1, is_draining=True)
    state.drains.unlink(2)
    assert (await state.begin_stay()).done()

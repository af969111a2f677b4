"""A process that was asked to end stays for another one that needs it."""

from __future__ import annotations

import asyncio

import pytest

from shared.process.stay import Stay
from tests.support.system.patience import PATIENCE_S

# Far longer than any test.
FOREVER_S = 3600.0


async def turns() -> None:
    """Let tasks that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_is_needed_when_it_is_asked_stays_until_it_is_not_needed_any_more() -> None:
    stay = Stay()
    stay.note(is_needed=True)
    waiting = asyncio.create_task(stay.wait(FOREVER_S))
    await turns()
    assert not waiting.done()
    stay.note(is_needed=False)
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_it_may_be_said_a_moment_later_that_it_is_needed() -> None:
    stay = Stay()
    waiting = asyncio.create_task(stay.wait(FOREVER_S))
    await turns()
    stay.note(is_needed=True)
    await turns()
    assert not waiting.done()
    stay.note(is_needed=False)
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_what_nobody_can_need_ends_at_once() -> None:
    stay = Stay()
    stay.note(is_needed=False, may_be_needed=False)
    waiting = asyncio.create_task(stay.wait(FOREVER_S))
    await turns()
    assert waiting.done()


async def test_what_nobody_needs_in_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.process.stay.SAME_STOP_S", 0.01)
    await asyncio.wait_for(Stay().wait(FOREVER_S), PATIENCE_S)


async def test_no_stay_is_longer_than_its_limit() -> None:
    stay = Stay()
    stay.note(is_needed=True)
    await asyncio.wait_for(stay.wait(0.01), PATIENCE_S)

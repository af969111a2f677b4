"""Parties wait by turns, for slots and to have their calls taken up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.network.turns import CallTurns, Slots, get_arrived_at, get_party, set_party


async def run_as(party: str, work: Callable[[], Awaitable[None]]) -> None:
    set_party(party)
    await work()


async def test_slots_go_round_the_parties_that_wait() -> None:
    slots, order = Slots(1), list[str]()
    is_over = asyncio.Event()

    async def hold() -> None:
        async with slots:
            order.append(get_party())
            await is_over.wait()

    tasks = [asyncio.create_task(run_as(party, hold)) for party in "aaaabbc"]
    await asyncio.sleep(0)
    is_over.set()
    await asyncio.gather(*tasks)
    assert "".join(order) == "aabcaba"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30), st.integers(1, 3))
def test_every_task_that_is_not_cancelled_gets_a_slot_and_none_is_lost(
    tasks: list[tuple[str, bool]], num_slots: int
) -> None:
    async def run() -> None:
        slots, num_inside = Slots(num_slots), 0

        async def hold() -> None:
            nonlocal num_inside
            async with slots:
                num_inside += 1
                try:
                    assert num_inside <= num_slots
                    await asyncio.sleep(0)
                finally:
                    num_inside -= 1

        started = [(asyncio.create_task(run_as(party, hold)), is_cancelled) for party, is_cancelled in tasks]
        await asyncio.sleep(0)
        for task, is_cancelled in started:
            if is_cancelled:
                # Some of them have just been given a slot.
                await asyncio.sleep(0)
                task.cancel()
        results = await asyncio.gather(*(task for task, _ in started), return_exceptions=True)
        assert not [each for each in results if isinstance(each, AssertionError)]
        # All slots are free again.
        async with asyncio.timeout(30):
            for _ in range(num_slots):
                await slots.__aenter__()

    asyncio.run(run())


async def test_a_cancelled_task_that_has_just_got_a_slot_passes_it_on() -> None:
    slots = Slots(1)
    await slots.__aenter__()
    first, second = (asyncio.create_task(slots.__aenter__()) for _ in range(2))
    await asyncio.sleep(0)
    await slots.__aexit__(None, None, None)
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first


async def take_up(parties: str) -> str:
    """The order in which calls that have all arrived are taken up."""
    turns, order = CallTurns(), list[str]()

    async def call() -> None:
        await turns.wait()
        order.append(get_party())

    async with asyncio.timeout(30):
        await asyncio.gather(*(asyncio.create_task(run_as(party, call)) for party in parties))
    return "".join(order)


async def test_a_quiet_partys_call_is_next_however_many_wait() -> None:
    assert (await take_up("a" * 5000 + "q" + "a" * 100)).index("q") <= 2
    assert await take_up("aaaqbb") == "aaqbab"


async def test_one_call_is_taken_up_in_a_turn_of_the_loop() -> None:
    turns = CallTurns()
    num_in_turn = most = 0

    def begin_turn() -> None:
        nonlocal num_in_turn
        num_in_turn = 0
        asyncio.get_running_loop().call_soon(begin_turn)

    async def call() -> None:
        nonlocal num_in_turn, most
        await turns.wait()
        num_in_turn += 1
        most = max(most, num_in_turn)

    begin_turn()
    async with asyncio.timeout(30):
        await asyncio.gather(*(call() for _ in range(500)))
    # The first one is taken up at once.
    assert most <= 2


async def test_a_call_arrives_when_it_begins_to_wait() -> None:
    turns, arrivals = CallTurns(), list[float]()

    async def call() -> None:
        await turns.wait()
        arrivals.append(get_arrived_at())

    began_at = time.monotonic()
    tasks = [asyncio.create_task(call()) for _ in range(5)]
    await asyncio.sleep(0)
    all_wait_at = time.monotonic()
    await asyncio.gather(*tasks)
    assert all(began_at <= arrived_at <= all_wait_at for arrived_at in arrivals)
    # A task that serves no call.
    assert get_arrived_at() >= all_wait_at


async def test_calls_are_taken_up_beside_a_flood_that_never_ends() -> None:
    turns, num_taken = CallTurns(), 0

    async def call() -> None:
        nonlocal num_taken
        await turns.wait()
        num_taken += 1

    tasks = set[asyncio.Task[None]]()
    async with asyncio.timeout(30):
        while num_taken < 100:
            tasks.add(asyncio.create_task(call()))
            await asyncio.sleep(0)
    assert len(tasks) <= 100 * 16
    await asyncio.gather(*tasks)

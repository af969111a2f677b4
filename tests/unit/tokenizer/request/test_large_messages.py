"""Messages whose checks take long are checked beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.request.large_messages import checked
from services.tokenizer.text.encoding_pools import EncodingPool
from shared.network.turns import set_party

LARGE = tokenizer_pb2.Prompt(text="x" * 100_000)


@pytest.fixture
def pool() -> EncodingPool:
    return EncodingPool(1, "test")


@pytest.mark.parametrize(("num_bytes", "is_beside"), [(100, False), (100_000, True)])
async def test_only_a_large_message_is_checked_beside_the_loop(
    pool: EncodingPool, num_bytes: int, *, is_beside: bool
) -> None:
    message = tokenizer_pb2.Prompt(text="x" * num_bytes)
    thread = await checked(pool, message, threading.current_thread)
    assert (thread is not threading.current_thread()) == is_beside


async def test_a_refusal_is_passed_on(pool: EncodingPool) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await checked(pool, LARGE, lambda: int("x"))


async def test_another_party_does_not_wait_for_a_flood_of_large_messages(pool: EncodingPool) -> None:
    may_begin, order = threading.Event(), list[str]()

    def check(party: str) -> None:
        may_begin.wait()
        order.append(party)

    async def ask(party: str) -> None:
        set_party(party)
        await checked(pool, LARGE, partial(check, party))

    asking = [asyncio.create_task(ask(party)) for party in "a" * 100 + "q"]
    await asyncio.sleep(0)
    may_begin.set()
    await asyncio.gather(*asking)
    # One was in the thread, one waited for it in the executor, and one more is of the party whose turn it was.
    assert order.index("q") <= 3

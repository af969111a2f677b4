"""How long work holds the event loop, in the processor time of this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

MAX_HOLD_S = 0.05
# What disturbs a measurement disturbs one of them; work that holds the loop holds it each time.
_NUM_TRIES = 3


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


async def least_hold(
    make: Callable[[], Coroutine[Any, Any, T]], yardstick: Callable[[], object] = lambda: None
) -> tuple[float, T]:
    """The longest time between two turns of the loop during the work, as a share of what is allowed; and its result.

    Allowed are `MAX_HOLD_S`, or twice what the yardstick takes just before. Work that took longer is done again, and
    the least share counts.
    """
    least = float("inf")
    for _ in range(_NUM_TRIES):
        allowed_s = max(MAX_HOLD_S, 2 * cpu_s(yardstick))
        longest_s, result = await _longest_hold(make())
        least = min(least, longest_s / allowed_s)
        if least <= 1:
            break
    return least, result


async def _longest_hold(work: Coroutine[Any, Any, T]) -> tuple[float, T]:
    task = asyncio.create_task(work)
    longest_s, last = 0.0, time.process_time()
    while not task.done():
        await asyncio.wait([task], timeout=0.001)
        now = time.process_time()
        longest_s, last = max(longest_s, now - last), now
    return longest_s, task.result()

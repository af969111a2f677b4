"""Waiting for what can only be asked again and again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.support.system.patience import PATIENCE_S

_POLL_S = 0.02
_Answer = TypeVar("_Answer")


async def poll_until(
    ask: Callable[[], Awaitable[_Answer]], is_enough: Callable[[_Answer], object], *, num_eager: int = 0
) -> _Answer:
    """Ask until the answer is enough; returns it. Fails after five minutes.

    Args:
        ask: Gets an answer.
        is_enough: Whether that is the last one.
        num_eager: Questions without a pause after them, for what mostly takes a few turns of this event loop.
    """
    async with asyncio.timeout(PATIENCE_S):
        for number in itertools.count(1):
            answer = await ask()
            if is_enough(answer):
                break
            await asyncio.sleep(0 if number <= num_eager else _POLL_S)
    return answer

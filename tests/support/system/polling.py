"""Waiting for what can only be asked again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.support.system.patience import PATIENCE_S

_POLL_S = 0.02
_Answer = TypeVar("_Answer")


async def poll_until(ask: Callable[[], Awaitable[_Answer]], is_enough: Callable[[_Answer], object]) -> _Answer:
    """Ask until the answer is enough; returns it. Fails after five minutes."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await ask()
            if is_enough(answer):
                return answer
            await asyncio.sleep(_POLL_S)

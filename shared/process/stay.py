"""How long a process that was asked to end stays for another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from shared.process.lifecycle import SAME_STOP_S


class Stay:
    """Whether another process, which was asked to end together with this one, needs it to finish its answers.

    asked to end
    |--- up to 2 s: is it needed? ---|--- until it is not needed any more ---| end
    """

    def __init__(self) -> None:
        self.is_needed = False
        self._may_be_needed = True
        self._has_changed = asyncio.Event()

    def note(self, *, is_needed: bool, may_be_needed: bool = True) -> None:
        """Note what other processes say; `may_be_needed` is false if there is none that could need this one."""
        self.is_needed, self._may_be_needed = is_needed, may_be_needed
        self._has_changed.set()

    async def wait(self, limit_s: float) -> None:
        """Return once this process, which was asked to end now, can do so; at the latest after `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SAME_STOP_S):
                        await self._until(lambda: self.is_needed or not self._may_be_needed)
                await self._until(lambda: not self.is_needed)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._has_changed.clear()
            await self._has_changed.wait()

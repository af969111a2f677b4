"""How a service's process begins and ends: one event loop, a clean stop on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable

import uvloop

STOP_GRACE_S = 5.0


def run_service(main: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    """Run `main` on a uvloop event loop until it returns the process's exit code.

    The event it is passed is set by SIGTERM and SIGINT; `main` then stops what it serves and returns.
    """
    return uvloop.run(_with_signals(main))


def freeze_garbage() -> None:
    """Leave what exists now out of garbage collections: what start-up made lives as long as the process."""
    gc.collect()
    gc.freeze()


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await main(stop)

"""How a service's process begins and ends: one event loop, a clean stop on SIGTERM, SIGINT or SIGHUP."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable

import uvloop

STOP_GRACE_S = 5.0

# Collections of the middle generation before a full one.
_NEVER = 2**31 - 1


def run_service(main: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    """Run `main` on a uvloop event loop until it returns the process's exit code.

    The event it is passed is set by the stop signals; `main` then stops what it serves and returns.
    """
    return uvloop.run(_with_signals(main))


def stop_signals() -> list[signal.Signals]:
    """What asks a process to end: also its terminal when it goes, unless that is ignored, as `nohup` has it."""
    signals = [signal.SIGTERM, signal.SIGINT]
    return signals if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*signals, signal.SIGHUP]


def freeze_garbage() -> None:
    """Leave what exists now out of garbage collections: what start-up made lives as long as the process."""
    gc.collect()
    gc.freeze()


def hold_full_collections() -> None:
    """Have full collections only when asked for; young objects are collected as always.

    A full collection visits every object that lives: with hundreds of long sequences a pause of many steps, if it
    began inside one.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


async def collect_garbage_between_steps(is_idle: Callable[[], bool]) -> None:
    """Make full collections here, in turns of their own, and nowhere else, until cancelled.

    They wait for an idle moment, but no longer than ten minutes, since what lives long and refers to itself is freed
    by nothing else.
    """
    hold_full_collections()
    minutes = 0
    while True:
        await asyncio.sleep(60.0)
        minutes += 1
        if is_idle() or minutes >= 10:
            gc.collect()
            minutes = 0


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    return await main(stop)

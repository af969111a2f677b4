"""The start and end of a service's process."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Awaitable, Callable

import uvloop

SAME_STOP_S = 2.0
"""Stop signals that follow the first within this time belong to it: a service manager asks all processes of a cell to
end at once, and their launcher asks its own again."""

ANSWERS_CUT = 17
"""The exit code of a service that was asked to end, and ended answers that its clients were still getting."""

# gRPC's task for a call, which awaits that of the call's handler.
_CALL_TASK = "_schedule_rpc_coro"
_CALLS_END_S = 1.0

# A threshold, in collections of the middle generation, that is never reached.
_NEVER = 2**31 - 1


class StopRequest(asyncio.Event):
    """Set by the first stop signal: finish what is in flight, then end.

    `is_urgent` is set by a signal that comes more than `SAME_STOP_S` later: end now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        super().__init__()
        self.is_urgent = asyncio.Event()
        self._clock = clock
        self._asked_at = 0.0

    def on_signal(self) -> None:
        """Take in a stop signal."""
        now = self._clock()
        if not self.is_set():
            self._asked_at = now
            self.set()
        elif now - self._asked_at > SAME_STOP_S:
            self.is_urgent.set()


def run_service(main: Callable[[StopRequest], Awaitable[int]]) -> int:
    """Run `main` on uvloop until it returns the exit code.

    SIGTERM, SIGINT or SIGHUP sets the request that `main` receives; it then stops serving. Once `main` has returned,
    the process ignores them, so that one that comes while the interpreter ends does not replace the exit code.
    """
    return uvloop.run(_with_signals(main))


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a process to end; not SIGHUP if ignored, as under `nohup`."""
    signals = [signal.SIGTERM, signal.SIGINT]
    return signals if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*signals, signal.SIGHUP]


def ignore_stop_signals() -> None:
    """Ignore stop signals until the process has ended.

    The interpreter takes its handlers away when it ends: a signal that came then would replace the exit code.
    """
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


async def wait_for_handlers() -> None:
    """Wait, once the servers have stopped, until the handlers of their calls have ended; at most a second.

    gRPC cancels handlers without waiting for them. The end of the event loop would cancel its own tasks too, which it
    reports with tracebacks.
    """
    if calls := {task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == _CALL_TASK}:
        await asyncio.wait(calls, timeout=_CALLS_END_S)


def freeze_garbage() -> None:
    """Exempt all existing objects from garbage collection, for as long as the process lives."""
    gc.collect()
    gc.freeze()


def hold_full_collections() -> None:
    """Run full garbage collections only on request; younger generations as usual.

    A full collection visits every live object, which may pause a step for the length of many.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


async def collect_garbage_between_steps(is_idle: Callable[[], bool]) -> None:
    """Run full garbage collections here, between steps, and nowhere else, until cancelled.

    They run when the process is idle, but at least every ten minutes, to free old reference cycles.
    """
    hold_full_collections()
    minutes = 0
    while True:
        await asyncio.sleep(60.0)
        minutes += 1
        if is_idle() or minutes >= 10:
            gc.collect()
            minutes = 0


async def _with_signals(main: Callable[[StopRequest], Awaitable[int]]) -> int:
    stop = StopRequest()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.on_signal)
    exit_code = await main(stop)
    await wait_for_handlers()
    for number in stop_signals():
        loop.remove_signal_handler(number)
    ignore_stop_signals()
    return exit_code

"""An asyncio event loop in virtual time, for the parts of a process that are written for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import Context
from typing import Any, TypeVarTuple

from typing_extensions import override

from tests.simulation.network.clock import Clock

_Ts = TypeVarTuple("_Ts")


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks and tasks at their times on a simulated clock; it never blocks and has no sockets.

    Callbacks of a stopped process run when it is continued, those of a dead one never. Timers are background events and
    may be late; if something else runs in the process first, due timers run right after it. An unhandled exception ends
    the simulation.
    """

    def __init__(
        self,
        clock: Clock,
        when_running: Callable[[Callable[[], object]], None],
        wakes_at: Callable[[float], float],
    ) -> None:
        """Make the loop of a process.

        Args:
            when_running: Runs an action in the process, by `run_once` of this loop.
            wakes_at: Maps the time of a timer to when the process, if otherwise idle, runs it.
        """
        self._clock = clock
        self._when_running = when_running
        self._wakes_at = wakes_at
        self._ready: deque[asyncio.Handle] = deque()
        # A heap by time.
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._is_closed = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Make this the running loop of the thread."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    @override
    def time(self) -> float:
        return self._clock.now

    def run_once(self, action: Callable[[], object]) -> None:
        """Run an action, and then all timers that are due."""
        with self.running():
            action()
            while self._is_timer_due():
                _run(heapq.heappop(self._timers))

    @override
    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._is_closed:
            self._clock.at(self._clock.now, self._plan_turn)
        return handle

    @override
    def call_later(
        self, delay: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._clock.now + delay, callback, *args, context=context)

    @override
    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, handle)
        self._clock.at(when, lambda: self._on_timer_due(when), is_background=True)
        return handle

    @override
    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    @override
    def create_task(self, coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any) -> Any:
        task = asyncio.Task(coro, loop=self, **options)
        self._tasks.append(task)
        return task

    def close(self) -> None:
        """Cancel all tasks: the process has ended."""
        self._is_closed = True
        with self.running():
            for task in self._tasks:
                task.cancel()
            while self._ready:
                self._take_turn()

    @override
    def get_debug(self) -> bool:
        return False

    @override
    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if "exception" in context:
            raise context["exception"]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: the clock event stays planned and finds the handle cancelled."""

    def _plan_turn(self) -> None:
        self._when_running(self._take_turn)

    def _take_turn(self) -> None:
        _run(self._ready.popleft())

    def _is_timer_due(self) -> bool:
        return bool(self._timers) and self._timers[0].when() <= self._clock.now

    def _on_timer_due(self, when: float) -> None:
        if self._is_timer_due():
            self._clock.at(self._wakes_at(when), self._wake, is_background=True)

    def _wake(self) -> None:
        if self._is_timer_due():
            self._when_running(lambda: None)


def _run(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._run()

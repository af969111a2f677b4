"""An event loop in virtual time, for the parts of a process that are written for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import Context
from typing import Any, TypeVarTuple

from tests.simulation.clock import Clock

_Ts = TypeVarTuple("_Ts")


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks and tasks at their moments of a simulated clock; it waits for nothing and knows no sockets.

    What a process that is stopped or dead would do is done when it runs, or never. An exception that nobody awaits
    ends the simulation.
    """

    def __init__(self, clock: Clock, when_running: Callable[[Callable[[], object]], None]) -> None:
        """Make the loop of a process; `when_running` does something in it."""
        self._clock = clock
        self._when_running = when_running
        self._coroutines: list[Coroutine[Any, Any, Any] | Generator[Any, None, Any]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Be the loop that runs."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def time(self) -> float:
        """See `AbstractEventLoop`."""
        return self._clock.now

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See `AbstractEventLoop`."""
        return self.call_at(self._clock.now, callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `AbstractEventLoop`."""
        return self.call_at(self._clock.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `AbstractEventLoop`."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._clock.at(when, lambda: self._when_running(lambda: self._run(handle)))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """See `AbstractEventLoop`."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any) -> Any:
        """See `AbstractEventLoop`."""
        self._coroutines.append(coro)
        return asyncio.Task(coro, loop=self, **options)

    def close(self) -> None:
        """The process is gone: what its tasks wait for never comes, and some of them have not begun."""
        with self.running():
            for coro in self._coroutines:
                coro.close()

    def get_debug(self) -> bool:
        """See `AbstractEventLoop`."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """See `AbstractEventLoop`."""
        if "exception" in context:
            raise context["exception"]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays planned, and nothing comes of it."""

    def _run(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            with self.running():
                handle._run()

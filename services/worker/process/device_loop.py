"""The queue of device work: the RPC thread fills it, the main thread runs it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, TypeVar

from shared.errors import DrainingError

P = ParamSpec("P")
T = TypeVar("T")


class DeviceLoop:
    """Runs submitted jobs in order, on the thread that calls `run`. Both threads block when idle.

    Invariant: every submitted job's future completes, at the latest when `run` returns.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._is_stopping = False
        self._is_closed = False
        self._closing = threading.Lock()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._is_stopping

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue `function`. From any thread. Cancelling the future drops the job unless it is already running.

        Raises:
            DrainingError: the loop has ended.
        """
        job = _Job(lambda: function(*args, **kwargs))
        with self._closing:
            if self._is_closed:
                raise DrainingError("the worker is shutting down")
            self._jobs.put(job)
        return job.future

    def run(self) -> None:
        """Run jobs until `stop`; those still queued then fail with DrainingError."""
        while not self._is_stopping:
            if (job := self._jobs.get()) is not None:
                job.run()
            # Do not keep the last job's arrays alive while waiting.
            del job
        with self._closing:
            self._is_closed = True
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job.refuse()

    def stop(self) -> None:
        """Let `run` return after the current job. From any thread."""
        self._is_stopping = True
        self._jobs.put(None)


class _Job(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._function = function

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except Exception as error:  # noqa: BLE001 - passed on through the future
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def refuse(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(DrainingError("the worker is shutting down"))

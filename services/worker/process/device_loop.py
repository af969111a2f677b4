"""The queue of device work: the RPC thread fills it, the main thread runs it.

What is launched on a device of its own is finished on a third thread, which sleeps until the device has computed it:

    RPC thread     submits A and B                                   gets A's result
    main thread                     launches A, launches B
    finisher                                    sleeps ─── finishes A ┘ sleeps ─── finishes B
    device                                      computes A ──── computes B ───────
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from shared.errors import DrainingError

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Something launched. `finish` is called once, from any thread."""

    @property
    def is_computed(self) -> bool:
        """Whether `finish` returns at once, for certain."""

    def finish(self) -> T_co:
        """Wait for the device; the result, or what went wrong as an exception."""


class DeviceLoop:
    """Runs submitted jobs in order, on the thread that calls `run`. Both threads block when idle.

    Invariant: every submitted job's future completes, at the latest when `run` returns.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Call[Any] | Launch[Any] | None] = queue.SimpleQueue()
        self._is_stopping = False
        self._is_closed = False
        self._closing = threading.Lock()
        self._finisher = _Finisher()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._is_stopping

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue `function`. From any thread. Cancelling the future drops the job unless it is already running.

        Raises:
            DrainingError: the loop has ended.
        """
        return self.put(Call(partial(function, *args, **kwargs)))

    def put(self, job: Call[T] | Launch[T]) -> Future[T]:
        """Queue a job; the futures of launches complete in their order. From any thread. Raises as `submit`."""
        with self._closing:
            if self._is_closed:
                raise DrainingError("the worker is shutting down")
            self._jobs.put(job)
        return job.future

    def run(self) -> None:
        """Run jobs until `stop`; those still queued then fail with DrainingError, and what was launched is finished."""
        while not self._is_stopping:
            if (job := self._jobs.get()) is not None and job.future.set_running_or_notify_cancel():
                job.run(self._finisher)
            # Do not keep the last job's arrays alive while waiting.
            del job
        with self._closing:
            self._is_closed = True
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                _refuse(job.future)
        self._finisher.close()

    def stop(self) -> None:
        """Let `run` return after the current job. From any thread."""
        self._is_stopping = True
        self._jobs.put(None)


class _Finisher:
    """Finishes what was launched, in order. Belongs to the thread that launches.

    On its own thread, once there is something that was not computed by its launch.
    """

    def __init__(self) -> None:
        self._launched: queue.SimpleQueue[tuple[Pending[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, pending: Pending[T], future: Future[T]) -> None:
        """Complete `future` with the result of `pending`."""
        if self._thread is None:
            if pending.is_computed:
                _complete(future, pending.finish)
                return
            # A daemon: when the main thread fails, this one must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="finisher", daemon=True)
            self._thread.start()
        self._launched.put((pending, future))

    def close(self) -> None:
        """Return when everything is finished."""
        if self._thread is not None:
            self._launched.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (launched := self._launched.get()) is not None:
            pending, future = launched
            _complete(future, pending.finish)
            # Do not keep the last result's arrays alive while waiting.
            del launched, pending, future


@dataclass(slots=True)
class Call(Generic[T]):
    """A job that is done when its function returns."""

    function: Callable[[], T]
    future: Future[T] = field(default_factory=Future)

    def run(self, _: _Finisher) -> None:
        """Complete the future, which runs."""
        _complete(self.future, self.function)


@dataclass(slots=True)
class Launch(Generic[T]):
    """A job that is done when what its function has launched is finished."""

    function: Callable[[], Pending[T]]
    future: Future[T] = field(default_factory=Future)

    def run(self, finisher: _Finisher) -> None:
        """Launch, and let `finisher` complete the future, which runs."""
        try:
            pending = self.function()
        except Exception as error:  # noqa: BLE001 - passed on through the future
            pending = _Failed(error)
        finisher.add(pending, self.future)


class _Failed:
    """A launch that failed. Like others it is finished after those before it."""

    is_computed = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def finish(self) -> NoReturn:
        raise self._error


def _complete(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - passed on through the future
        future.set_exception(error)
    else:
        future.set_result(result)


def _refuse(future: Future[Any]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(DrainingError("the worker is shutting down"))

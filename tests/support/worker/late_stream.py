"""A stream whose device is a thread that computes as late as it may: what a GPU does to a host that is ahead of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from services.worker.forward.staging import HostArrays, PinnedStaging, Staging
from services.worker.runner.stream import EnqueuedWork, StagingPool


class LateStream:
    """Computes work in order on its own thread, each piece once it or a later one is waited for. See `Stream`.

    Staging is spoilt when it is given back, so that whatever still reads it goes wrong.
    """

    is_async = True

    def __init__(self, pool: StagingPool | None = None) -> None:
        """`pool` hands out staging; by default a correct one."""
        self.max_in_flight = 0
        self.num_computed = 0
        self._pool = pool or late_pool()
        self._claimed: list[Staging] = []
        self._in_use: dict[int, _LateWork] = {}
        self._queue: SimpleQueue[_LateWork | None] = SimpleQueue()
        self._num_enqueued = 0
        self._num_wanted = 0
        self._is_held = False
        self._changed = threading.Condition()
        # A daemon: a test that fails before `close` must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="late device", daemon=True)
        self._thread.start()

    @property
    def num_enqueued(self) -> int:
        """Pieces of work so far."""
        return self._num_enqueued

    def hold(self) -> None:
        """Begin no further work until `release`."""
        with self._changed:
            self._is_held = True

    def release(self) -> None:
        """Compute again."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def close(self) -> None:
        """Compute what was enqueued, and end the thread."""
        self.release()
        self.want(self._num_enqueued)
        self._queue.put(None)
        self._thread.join()

    def enqueue(self, work: Callable[[], None]) -> EnqueuedWork:
        """See `Stream`."""
        self._num_enqueued += 1
        late = _LateWork(self, self._num_enqueued, work)
        self._in_use |= {id(staging): late for staging in self._claimed}
        self._claimed.clear()
        self.max_in_flight = max(self.max_in_flight, self._num_enqueued - self.num_computed)
        self._queue.put(late)
        with self._changed:
            self._changed.notify_all()
        return late

    def synchronize(self) -> None:
        """See `Stream`."""
        self.enqueue(lambda: None).wait()

    def stage(self, arrays: HostArrays) -> Staging:
        """See `Stream`."""
        staging = self._pool.claim()
        staging.pack(arrays)
        give_back = staging.give_back

        def spoil(staging: PinnedStaging) -> None:
            assert self._in_use[id(staging)].is_done.is_set(), "staging is given back before its work was computed"
            staging._outgoing.numpy()[:] = 0xAB
            staging._incoming.numpy()[:] = 0xB3
            staging.give_back = give_back
            give_back(staging)

        staging.give_back = spoil
        self._claimed.append(staging)
        return staging

    def wait_until_enqueued(self, number: int) -> None:
        """Return when so much work was enqueued."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_enqueued >= number)

    def want(self, number: int) -> None:
        """The work of this number is waited for."""
        with self._changed:
            self._num_wanted = max(self._num_wanted, number)
            self._changed.notify_all()

    def _run(self) -> None:
        while (late := self._queue.get()) is not None:
            with self._changed:
                self._changed.wait_for(lambda: late.number <= self._num_wanted and not self._is_held)
            late.compute()
            self.num_computed += 1
            late.is_done.set()


def late_pool() -> StagingPool:
    """Staging for a device that is a thread."""
    return StagingPool(torch.device("cpu"), is_pinned=False)


class _LateWork:
    def __init__(self, stream: LateStream, number: int, work: Callable[[], None]) -> None:
        self.number = number
        self.is_done = threading.Event()
        self._stream = stream
        self._work = work
        self._error: Exception | None = None

    def compute(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._error = error

    def wait(self) -> int:
        self._stream.want(self.number)
        self.is_done.wait()
        if self._error is not None:
            raise self._error
        return self.number

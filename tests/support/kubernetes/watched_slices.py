"""A watch of EndpointSlices in a thread of the test process, and what it says."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.scheduler.cell.events import Endpoint
from services.scheduler.discovery.slice_watch import SliceWatch
from services.scheduler.discovery.watch_messages import WatchMessage, WatchTask
from tests.support.kubernetes.endpoint_slices import SERVICE
from tests.support.kubernetes.kube_api import NAMESPACE
from tests.support.system.patience import PATIENCE_S


class _OverError(Exception):
    """The test is over."""


class WatchedSlices:
    """The messages of a watch; see `watch_slices`."""

    def __init__(self) -> None:
        self._messages: queue.Queue[WatchMessage] = queue.Queue()
        self._is_over = False

    def wait_for(self, *endpoints: Endpoint) -> None:
        """Wait until the watch says that there are these; fails after five minutes."""
        while self.next_message().found() != endpoints:
            pass

    def wait_for_problem(self, text: str) -> None:
        """Wait until the watch reports a problem; fails after five minutes."""
        while text not in self.next_message().problem:
            pass

    def next_message(self) -> WatchMessage:
        """Wait for any message; fails after five minutes."""
        return self._messages.get(timeout=PATIENCE_S)

    def end(self) -> None:
        """Let the watch end with its next message."""
        self._is_over = True

    def run(self, task: WatchTask) -> None:
        """Watch until `end`."""
        with suppress(_OverError):
            SliceWatch(task, self._take).run()

    def _take(self, message: WatchMessage) -> None:
        if self._is_over:
            raise _OverError
        self._messages.put(message)


def watch_task(
    api_server: str, account: Path, *, period_s: float = 30.0, namespace: str = NAMESPACE, service: str = SERVICE
) -> WatchTask:
    """What to watch, by the port's name `grpc`."""
    return WatchTask(
        api_server=api_server,
        service_account=str(account),
        namespace=namespace,
        service=service,
        port="grpc",
        period_s=period_s,
        parent_pid=os.getpid(),
    )


@contextmanager
def watch_slices(task: WatchTask) -> Iterator[WatchedSlices]:
    """Watch in a thread, which ends with the first message after the block."""
    watched = WatchedSlices()
    thread = threading.Thread(target=watched.run, args=(task,), daemon=True)
    thread.start()
    try:
        yield watched
    finally:
        watched.end()

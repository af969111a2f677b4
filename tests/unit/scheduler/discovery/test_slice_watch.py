"""The list and watch against a fake API server: what goes wrong on the way, and that nothing is missed.

The failures of the `kubernetes` package's own informer and of routers that watch pods are among them.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.scheduler.cell.events import Endpoint
from services.scheduler.discovery.slice_watch import SliceWatch
from services.scheduler.discovery.watch_messages import WatchMessage, WatchTask
from tests.support.endpoint_slices import SERVICE, SLICES, endpoint, make_slice, write_service_account
from tests.support.kube_api import NAMESPACE, KubeApi, run_kube_api
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

A, B = Endpoint("10.0.0.1:50053"), Endpoint("10.0.0.2:50053")


class _OverError(Exception):
    """The test is over."""


class Watched:
    """A watch in a thread of its own, and what it sent."""

    def __init__(self, api: KubeApi, directory: Path, period_s: float) -> None:
        self.api = api
        self._messages: queue.Queue[WatchMessage] = queue.Queue()
        self._is_over = False
        task = WatchTask(
            api_server=api.url,
            service_account=str(directory),
            namespace=NAMESPACE,
            service=SERVICE,
            port="grpc",
            period_s=period_s,
            parent_pid=os.getpid(),
        )
        self.thread = threading.Thread(target=self._run, args=(SliceWatch(task, self._send),))

    def end(self) -> None:
        """Let the thread end with its next message."""
        self._is_over = True

    def wait_for(self, *endpoints: Endpoint) -> None:
        """Wait until the watch says that there are these; fails after five minutes."""
        while self._next().found() != endpoints:
            pass

    def wait_for_problem(self, text: str) -> None:
        """Wait until the watch reports a problem; fails after five minutes."""
        while text not in self._next().problem:
            pass

    def wait_for_any(self) -> None:
        """Wait for any message; fails after five minutes."""
        self._next()

    def _next(self) -> WatchMessage:
        return self._messages.get(timeout=PATIENCE_S)

    def _send(self, message: WatchMessage) -> None:
        if self._is_over:
            raise _OverError
        self._messages.put(message)

    @staticmethod
    def _run(watch: SliceWatch) -> None:
        with pytest.raises(_OverError):
            watch.run()


@contextmanager
def watching(tmp_path: Path, period_s: float = 30.0) -> Iterator[Watched]:
    """Watch a service of one endpoint, which has been found."""
    with run_kube_api(free_port()) as api:
        api.store.create(SLICES, make_slice("one", [endpoint("10.0.0.1")]))
        watched = Watched(api, write_service_account(tmp_path), period_s)
        watched.thread.start()
        try:
            watched.wait_for(A)
            yield watched
        finally:
            watched.end()
    watched.thread.join(PATIENCE_S)


def test_changes_arrive_while_the_watch_is_open(tmp_path: Path) -> None:
    with watching(tmp_path) as watched:
        store = watched.api.store
        store.create(SLICES, make_slice("other", [endpoint("10.0.0.9")], service="other"))
        store.create(SLICES, make_slice("two", [endpoint("10.0.0.2")]))
        watched.wait_for(A, B)
        store.replace(SLICES, make_slice("two", [endpoint("10.0.0.2", ready=False, terminating=True)]))
        watched.wait_for(A, Endpoint(B.address, is_ready=False, is_terminating=True))
        store.delete(SLICES, "two")
        watched.wait_for(A)
        # A change of its label takes a slice away like a deletion (vllm-project/router #279).
        store.replace(SLICES, make_slice("one", [endpoint("10.0.0.1")], service="other"))
        watched.wait_for()
        assert [request.verb for request in watched.api.requests] == ["list", "watch"]
        assert watched.api.requests[1].resource_version == "101"


def test_a_delete_during_a_disconnect_is_not_missed(tmp_path: Path) -> None:
    # production-stack #1091: a plain watch keeps the endpoint for ever.
    with watching(tmp_path) as watched:
        watched.api.faults.status = 503
        watched.api.cut_connections()
        watched.api.store.delete(SLICES, "one")
        watched.wait_for_problem("503")
        watched.api.faults.status = None
        watched.wait_for()


def test_a_delete_that_the_watch_loses_is_found_by_the_next_list(tmp_path: Path) -> None:
    with watching(tmp_path, period_s=1.0) as watched:
        watched.api.faults.loses_deletes = True
        watched.api.store.delete(SLICES, "one")
        watched.wait_for()


@pytest.mark.parametrize("code", [410, 504])
def test_a_version_that_the_server_does_not_know_means_a_new_list(tmp_path: Path, code: int) -> None:
    # production-stack #999, and servers that lag.
    with watching(tmp_path) as watched:
        watched.api.faults.error_event = code
        watched.api.cut_connections()
        watched.api.store.delete(SLICES, "one")
        watched.api.store.compact()
        watched.wait_for_problem(str(code))
        watched.api.faults.error_event = None
        watched.api.store.create(SLICES, make_slice("two", [endpoint("10.0.0.2")]))
        watched.wait_for(B)


def test_a_half_open_connection_is_noticed(tmp_path: Path) -> None:
    # The library's informer is blind for ever.
    with watching(tmp_path, period_s=1.0) as watched:
        watched.api.faults.is_half_open = True
        watched.api.faults.loses_deletes = True
        watched.api.store.delete(SLICES, "one")
        watched.wait_for()


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with watching(tmp_path, period_s=1.0) as watched:
        watched.api.faults.hangs = True
        watched.wait_for_problem("Read")
        watched.api.faults.hangs = False
        watched.api.wake()
        watched.wait_for(A)


@pytest.mark.parametrize("fault", ["status", "watch_status", "closes_watches"])
def test_a_storm_of_errors_makes_few_requests(tmp_path: Path, fault: str) -> None:
    # The library's informer sends 18 requests per second when a watch answers 500.
    with watching(tmp_path) as watched:
        api = watched.api
        setattr(api.faults, fault, True if fault == "closes_watches" else 500)
        api.cut_connections()
        began_at, num_before = time.monotonic(), len(api.requests)
        while len(rounds := [one for one in api.requests[num_before:] if one.verb == "list"]) < 3:
            watched.wait_for_any()
        # Each round has a list, and between two there is at least half of 0.5 and of 1 s.
        assert rounds[2].at - began_at > 0.25 + 0.5


def test_what_the_role_forbids_is_said(tmp_path: Path) -> None:
    with watching(tmp_path) as watched:
        rule = watched.api.role["rules"][0]
        watched.api.role = {"rules": [rule | {"verbs": ["list"]}]}
        watched.api.cut_connections()
        watched.wait_for_problem('403 Forbidden: endpointslices.discovery.k8s.io is forbidden: User "scheduler" cannot')


def test_a_rotated_token_is_read_again(tmp_path: Path) -> None:
    with watching(tmp_path) as watched:
        (tmp_path / "token").write_text("old", encoding="utf-8")
        watched.api.cut_connections()
        watched.wait_for_problem("401")
        write_service_account(tmp_path)
        watched.wait_for(A)

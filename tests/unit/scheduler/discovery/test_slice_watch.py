"""The list and watch against a fake API server: what goes wrong on the way, and that nothing is missed.

The failures of the `kubernetes` package's own informer and of routers that watch pods are among them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.scheduler.cell.events import Endpoint
from tests.support.kubernetes.endpoint_slices import SLICES, endpoint, make_slice, write_service_account
from tests.support.kubernetes.kube_api import KubeApi, run_kube_api
from tests.support.kubernetes.watched_slices import WatchedSlices, watch_slices, watch_task
from tests.support.system.ports import free_port

A, B = Endpoint("10.0.0.1:50053"), Endpoint("10.0.0.2:50053")


@contextmanager
def watching(tmp_path: Path, period_s: float = 30.0) -> Iterator[tuple[KubeApi, WatchedSlices]]:
    """Watch a service of one endpoint, which has been found."""
    with run_kube_api(free_port()) as api:
        api.store.create(SLICES, make_slice("one", [endpoint("10.0.0.1")]))
        with watch_slices(watch_task(api.url, write_service_account(tmp_path), period_s=period_s)) as watched:
            watched.wait_for(A)
            yield api, watched


def test_changes_arrive_while_the_watch_is_open(tmp_path: Path) -> None:
    with watching(tmp_path) as (api, watched):
        store = api.store
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
        assert [request.verb for request in api.requests] == ["list", "watch"]
        assert api.requests[1].resource_version == "101"


def test_a_delete_during_a_disconnect_is_not_missed(tmp_path: Path) -> None:
    # production-stack #1091: a plain watch keeps the endpoint for ever.
    with watching(tmp_path) as (api, watched):
        api.faults.status = 503
        api.cut_connections()
        api.store.delete(SLICES, "one")
        watched.wait_for_problem("503")
        api.faults.status = None
        watched.wait_for()


def test_a_delete_that_the_watch_loses_is_found_by_the_next_list(tmp_path: Path) -> None:
    with watching(tmp_path, period_s=1.0) as (api, watched):
        api.faults.loses_deletes = True
        api.store.delete(SLICES, "one")
        watched.wait_for()


@pytest.mark.parametrize("code", [410, 504])
def test_a_version_that_the_server_does_not_know_means_a_new_list(tmp_path: Path, code: int) -> None:
    # production-stack #999, and servers that lag.
    with watching(tmp_path) as (api, watched):
        api.faults.error_event = code
        api.cut_connections()
        api.store.delete(SLICES, "one")
        api.store.compact()
        watched.wait_for_problem(str(code))
        api.faults.error_event = None
        api.store.create(SLICES, make_slice("two", [endpoint("10.0.0.2")]))
        watched.wait_for(B)


def test_a_half_open_connection_is_noticed(tmp_path: Path) -> None:
    # The library's informer is blind for ever.
    with watching(tmp_path, period_s=1.0) as (api, watched):
        api.faults.is_half_open = True
        api.faults.loses_deletes = True
        api.store.delete(SLICES, "one")
        watched.wait_for()


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with watching(tmp_path, period_s=1.0) as (api, watched):
        api.faults.hangs = True
        watched.wait_for_problem("Read")
        api.faults.hangs = False
        api.wake()
        watched.wait_for(A)


@pytest.mark.parametrize(
    "fault",
    [
        "status",
        pytest.param("watch_status", marks=pytest.mark.slow),
        pytest.param("closes_watches", marks=pytest.mark.slow),
    ],
)
def test_a_storm_of_errors_makes_few_requests(tmp_path: Path, fault: str) -> None:
    # The library's informer sends 18 requests per second when a watch answers 500.
    with watching(tmp_path) as (api, watched):
        setattr(api.faults, fault, True if fault == "closes_watches" else 500)
        api.cut_connections()
        began_at, num_before = time.monotonic(), len(api.requests)
        while len(rounds := [one for one in api.requests[num_before:] if one.verb == "list"]) < 3:
            watched.next_message()
        # Each round has a list, and between two there is at least half of 0.5 and of 1 s.
        assert rounds[2].at - began_at > 0.25 + 0.5


def test_a_list_does_not_end_the_problem_of_a_watch(tmp_path: Path) -> None:
    with watching(tmp_path) as (api, watched):
        assert watched.next_message().is_watched
        api.faults.watch_status = 500
        api.cut_connections()
        watched.wait_for_problem("500")
        listed = watched.next_message()
        assert (listed.found(), listed.is_watched) == ((A,), False)
        assert "500" in watched.next_message().problem


def test_what_the_role_forbids_is_said(tmp_path: Path) -> None:
    with watching(tmp_path) as (api, watched):
        rule = api.role["rules"][0]
        api.role = {"rules": [rule | {"verbs": ["list"]}]}
        api.cut_connections()
        watched.wait_for_problem('403 Forbidden: endpointslices.discovery.k8s.io is forbidden: User "scheduler" cannot')


@pytest.mark.slow
def test_a_rotated_token_is_read_again(tmp_path: Path) -> None:
    with watching(tmp_path) as (api, watched):
        (tmp_path / "token").write_text("old", encoding="utf-8")
        api.cut_connections()
        watched.wait_for_problem("401")
        write_service_account(tmp_path)
        watched.wait_for(A)

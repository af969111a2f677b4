"""The messages of the watching process are checked before anything uses them."""

from __future__ import annotations

import pytest

from services.scheduler.cell.events import Endpoint
from services.scheduler.discovery.last_seen import LastSeen
from services.scheduler.discovery.watch_messages import WatchMessage


def test_endpoints_survive_the_pipe() -> None:
    endpoints = (Endpoint("10.0.0.1:1", is_ready=False), Endpoint("[fd00::1]:1", is_terminating=True, zone="eu-1a"))
    line = WatchMessage.of(endpoints).line()
    assert line.count(b"\n") == 1
    assert WatchMessage.model_validate_json(line).found() == endpoints


def test_no_endpoints_differ_from_a_problem() -> None:
    assert WatchMessage.model_validate_json(WatchMessage.of(()).line()).found() == ()
    assert WatchMessage.model_validate_json(WatchMessage(problem="403").line()).found() is None


@pytest.mark.parametrize(
    "line",
    [
        '{"endpoints": [{"address": "nowhere", "is_ready": true, "is_terminating": false}]}',
        '{"endpoints": [{"address": "10.0.0.1:1", "is_ready": 1, "is_terminating": false}]}',
        '{"endpoints": [{"address": "10.0.0.1:1"}]}',
        '{"endpoints": [{"address": "10.0.0.1:1", "is_ready": true, "is_terminating": false, "zone": 1}]}',
        '{"endpoints": [], "more": 1}',
        '{"endpoints": ',
        "[]",
    ],
)
def test_a_malformed_message_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="validation error"):
        WatchMessage.model_validate_json(line)


def test_an_address_that_occurs_twice_is_refused() -> None:
    message = WatchMessage.of((Endpoint("10.0.0.1:1"), Endpoint("10.0.0.1:1", is_ready=False)))
    with pytest.raises(ValueError, match="occurs twice"):
        message.found()


def test_a_report_that_says_the_same_is_only_noted() -> None:
    found: list[tuple[Endpoint, ...]] = []
    last_seen = LastSeen(0.0)
    for now, endpoints in enumerate([(), (Endpoint("10.0.0.1:1"),), (Endpoint("10.0.0.1:1"),)]):
        last_seen.note(endpoints, float(now), found.append)
    assert found == [(), (Endpoint("10.0.0.1:1"),)]
    assert last_seen.seen_at == 2.0

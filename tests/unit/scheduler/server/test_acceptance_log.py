"""One log line per 1000 draft tokens."""

from __future__ import annotations

import logging

import pytest

from services.scheduler.core.policy import SchedulerCounters
from services.scheduler.server.acceptance_log import AcceptanceLog


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int, float]]:
    """The figures of each line."""
    return [
        (record.num_draft_tokens, record.num_accepted_tokens, record.acceptance_rate)  # type: ignore[attr-defined]
        for record in caplog.records
    ]


def test_one_line_is_logged_per_thousand_draft_tokens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    counters = SchedulerCounters()
    log = AcceptanceLog(counters)
    for num_drafted, num_accepted in ((999, 600), (1004, 603), (1004, 603), (2003, 700), (2004, 703)):
        counters.num_draft_tokens, counters.num_accepted_tokens = num_drafted, num_accepted
        log.on_event()
    assert lines(caplog) == [(1004, 603, 0.601), (1000, 100, 0.1)]


def test_a_worker_that_drafts_nothing_logs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = AcceptanceLog(SchedulerCounters(num_draft_tokens=5000))
    log.on_event()
    assert lines(caplog) == []

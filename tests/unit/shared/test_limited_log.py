"""Log lines that clients can cause."""

from __future__ import annotations

import logging

import pytest

from shared.limited_log import PERIOD_S, LimitedLog


def test_a_line_of_a_kind_comes_once_a_minute_and_says_how_often_it_happened(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = LimitedLog(logging.getLogger("test"), lambda: now)
    for now in (0.0, 1.0, PERIOD_S - 0.1, PERIOD_S, PERIOD_S + 1.0):  # noqa: B007 - the log looks at it
        log.warning("bad", kind="a", cause="a")
    log.warning("bad", kind="b", cause="b")
    log.warning("worse")
    lines = [(one.message, vars(one).get("cause"), vars(one)["num_times"]) for one in caplog.records]
    assert lines == [("bad", "a", 1), ("bad", "a", 3), ("bad", "b", 1), ("worse", None, 1)]

from __future__ import annotations

import io
import logging

import pytest

from services.worker.process.loading_progress import LoggedProgress, ProgressBar, make_progress

PARTS = [0.0, 0.004, 0.04, 0.11, 0.19, 0.55, 0.999, 1.0, 1.0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_has_one_line_per_ten_percent(caplog: pytest.LogCaptureFixture) -> None:
    progress = LoggedProgress()
    with caplog.at_level(logging.INFO, "services.worker"):
        for part in PARTS:
            progress(part)
        progress.close()
    assert [record.__dict__["percent"] for record in caplog.records] == [0, 11, 55, 99, 100]


def test_a_bar_is_redrawn_for_each_percent_and_leaves_the_line(caplog: pytest.LogCaptureFixture) -> None:
    terminal = Terminal()
    progress = make_progress(terminal, log_format="text")
    for part in PARTS:
        progress(part)
    progress.close()
    _, *drawn = terminal.getvalue().split("\r")
    assert [int(text.split()[-2]) for text in drawn] == [0, 4, 11, 19, 55, 99, 100]
    assert drawn[4].startswith("loading weights [" + "#" * 22 + " " * 18 + "]")
    assert len({len(text) for text in drawn[:-1]}) == 1
    assert drawn[-1].endswith("100 %\n")
    assert not caplog.records


def test_a_bar_that_was_never_drawn_leaves_no_line() -> None:
    terminal = Terminal()
    ProgressBar(terminal).close()
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(("stream", "log_format"), [(io.StringIO(), "text"), (Terminal(), "json")])
def test_without_a_terminal_progress_is_logged(stream: io.StringIO, log_format: str) -> None:
    assert isinstance(make_progress(stream, log_format=log_format), LoggedProgress)

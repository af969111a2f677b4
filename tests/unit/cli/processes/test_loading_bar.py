"""One progress bar for all workers that are loading."""

from __future__ import annotations

from services.cli.processes.loading_bar import LoadingBar


def line(percent: int) -> bytes:
    return f"12:00:01 INFO worker: loading weights percent={percent}".encode()


def test_the_bar_shows_the_slowest_worker_and_disappears_when_all_have_loaded() -> None:
    shown: list[str] = []
    bar = LoadingBar(shown.append)

    assert all(bar.take(name, line(percent)) for name, percent in [("a", 0), ("b", 10), ("a", 50), ("b", 100)])
    assert [int(text.split()[-2]) for text in shown] == [0, 0, 10, 50]
    assert shown[-1] == f"loading weights [{'#' * 20:40}]  50 %"
    assert bar.take("a", line(100))
    assert shown[-1] == ""


def test_a_worker_that_has_ended_does_not_hold_up_the_bar() -> None:
    shown: list[str] = []
    bar = LoadingBar(shown.append)
    bar.drop("a")
    assert shown == []
    bar.take("a", line(30))
    bar.drop("a")
    assert shown[-1] == ""


def test_a_removed_bar_does_not_reappear() -> None:
    shown: list[str] = []
    bar = LoadingBar(shown.append)
    bar.take("a", line(30))
    bar.end()
    assert shown[-1] == ""
    assert bar.take("a", line(40))
    assert shown[-1] == ""


def test_other_lines_do_not_affect_the_bar() -> None:
    shown: list[str] = []
    bar = LoadingBar(shown.append)
    for other in (
        b"",
        b"12:00:01 INFO worker: serving",
        b"x " + line(3),
        b'{"message": "loading weights", "percent": 3}',
    ):
        assert not bar.take("a", other)
    assert shown == []

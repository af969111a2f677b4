"""Which line of a process's output says why it ended."""

from __future__ import annotations

import pytest

from services.cli.processes.last_problem import LastProblem


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", None),
        ("12:00:01 INFO worker: settings a=1\n12:00:02 WARNING worker: slow", None),
        ("12:00:01 ERROR worker: cannot listen error=x\n12:00:02 INFO worker: stopped\n", "cannot listen error=x"),
        ("usage: x [-h]\n         [--y]\nx: error: unrecognized arguments: --z", "unrecognized arguments: --z"),
        ("error: --a (or A): must be b", "--a (or A): must be b"),
        ('Traceback (most recent call last):\n  File "x", line 1\nValueError: no\n\n', "ValueError: no"),
        ('{"level": "INFO", "message": "stopped"}', None),
        ('{"level": "ERROR", "message": "bad"}\n{"level": "INFO"}', '{"level": "ERROR", "message": "bad"}'),
        ("{ not JSON", "{ not JSON"),
        ("[1]\n{}", "{}"),
        ("x" * 5000, "x" * 1000),
    ],
)
def test_the_last_line_that_reports_a_problem_is_kept(output: str, words: str | None) -> None:
    last_problem = LastProblem()
    for line in output.split("\n"):
        last_problem.add(line.encode())

    assert last_problem.text == words


def test_invalid_utf8_is_harmless() -> None:
    last_problem = LastProblem()
    last_problem.add(b"\xff!")

    assert last_problem.text == "\ufffd!"

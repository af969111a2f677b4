"""Pseudo-terminals: a test is the person in front of one."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NUM_ROWS = 24
NUM_COLUMNS = 120


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """A pseudo-terminal's two ends, the person's and the program's, of `NUM_ROWS` rows and `NUM_COLUMNS` columns."""
    person, program = _open_terminal()
    try:
        yield person, program
    finally:
        os.close(person)
        os.close(program)


@contextmanager
def program_in_terminal(start: Callable[[int], subprocess.Popen[str]]) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The person's end of a terminal, and the program in it, which is killed at the end.

    Args:
        start: Starts the program, with the terminal's other end as its stdin, stdout and stderr.
    """
    person, program = _open_terminal()
    try:
        with start(program) as process:
            # Once the program ends, reading fails instead of waiting.
            os.close(program)
            try:
                yield person, process
            finally:
                process.kill()
    finally:
        os.close(person)


def read_until(person: int, text: str) -> str:
    """Read until `text` has come; returns all that has."""
    seen = ""
    while text not in seen:
        try:
            seen += os.read(person, 4096).decode()
        except OSError:
            # The program has ended, and with it the terminal's other end.
            raise AssertionError(f"{text!r} has not come: {seen!r}") from None
    return seen


def shown_lines(seen: str) -> list[str]:
    """What is left on the screen of what a program has written, if it only ever erases the line it is in.

    An empty last line is left out: the cursor is there.
    """
    lines = [line.rstrip("\r").rpartition("\x1b[K")[2].rpartition("\r")[2] for line in seen.split("\n")]
    return lines if lines[-1] else lines[:-1]


def _open_terminal() -> tuple[int, int]:
    person, program = pty.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", NUM_ROWS, NUM_COLUMNS, 0, 0))
    return person, program

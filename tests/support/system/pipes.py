"""Pipes whose reader does not read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """A full pipe: its read end, and its write end, on which every write blocks."""
    reader, writer = os.pipe()
    try:
        fill(writer)
        yield reader, writer
    finally:
        for fd in (reader, writer):
            # The test may have closed it.
            with contextlib.suppress(OSError):
                os.close(fd)


def fill(writer: int) -> None:
    """Fill a pipe."""
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n" * 4096)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n")
    os.set_blocking(writer, True)


def read_lines(reader: int) -> list[str]:
    """Read the non-empty lines of a pipe until all writers have closed it."""
    with open(reader, encoding="utf-8", closefd=False) as file:
        return [line.rstrip("\n") for line in file if line.strip()]

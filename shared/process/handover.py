"""How a process that waits, with its imports done, learns which service it is: over a socket that is its stdin.

launcher                     process
   | <------- WAITS ---------- |   its imports are done
   | -- flags, in one line --> |   perhaps earlier
   | <------- TAKES ---------- |
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence

WAITS = b"w"
"""What the process says once its imports are done."""
TAKES = b"t"
"""What it says once it has its flags."""


def take_link() -> socket.socket:
    """The socket that this process was started with as its stdin, which is empty from then on.

    Raises:
        OSError: stdin is no socket, since no launcher started this process.
    """
    link = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return link


def wait_for_flags(link: socket.socket) -> list[str] | None:
    """Say that this process waits, and return the flags of the service that it is to be; closes the socket.

    Returns:
        None if the launcher has ended, or has no use for the process.
    """
    with link, link.makefile("rb") as told:
        _say(link, WAITS)
        try:
            flags: list[str] = json.loads(told.readline())
        except (OSError, ValueError):
            return None
        _say(link, TAKES)
    return flags


def encode_flags(flags: Sequence[str]) -> bytes:
    """The line that the launcher sends."""
    # Bytes of a path that are no text are escaped, and arrive as they would in a command line.
    return f"{json.dumps(list(flags))}\n".encode()


def _say(link: socket.socket, word: bytes) -> None:
    # A launcher that does not wait for it may have closed its end already.
    with contextlib.suppress(OSError):
        link.sendall(word)

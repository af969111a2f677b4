"""Ports for services under test."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that the kernel gives to connections, and to whoever listens and names none.
_FIRST, _END = 20_000, 32_000
# At least as many as there are test processes side by side.
_STRIDE = 16

_number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = itertools.cycle(range(_FIRST + _number % _STRIDE, _END, _STRIDE))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on.

    A service takes seconds to start: until then nobody else is given it, here or in another process of this test run.
    """
    return next(port for port in _ports if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

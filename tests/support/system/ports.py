"""Ports for services under test."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import tempfile
from pathlib import Path
from typing import IO

# Below the kernel's ephemeral port range.
_FIRST, _END = 20_000, 32_000
# At least the number of parallel test processes.
_STRIDE = 16

_number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = itertools.cycle(range(_FIRST + _number % _STRIDE, _END, _STRIDE))
# A lock for each port allocated by this process, held until it ends.
_port_to_lock: dict[int, IO[bytes]] = {}


def free_port() -> int:
    """A free port of 127.0.0.1.

    The port stays reserved for this process, here and in other test runs, since a service takes seconds to start
    listening. If two cells were to use one port, the second would take the other's tokenizer for its own.
    """
    return next(port for port in _ports if _try_lock(port) and _is_free(port))


def _try_lock(port: int) -> bool:
    """Reserve the port for this process; returns False if another process holds it."""
    if port in _port_to_lock:
        return True
    # One file per user, since a file of another user could not be opened.
    lock = (Path(tempfile.gettempdir()) / f"lockstep-test-port-{os.getuid()}-{port}").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return False
    _port_to_lock[port] = lock
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

"""Whether a server can listen on an address, and if not, why: gRPC does not say."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

from shared.network.addresses import split_address

MAX_SOCKET_PATH_BYTES = 107
"""The longest path of a unix socket. Source: unix(7), `sun_path` without its final null byte."""


def refuse_taken_socket(path: str) -> None:
    """Fail if a server listens at `path`: a new one would silently replace its socket, as it may a dead server's.

    Raises:
        RuntimeError: one is listening there, or the path cannot be used; the message says which.
    """
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise RuntimeError(f"the path has {num_bytes} bytes, and that of a socket at most {MAX_SOCKET_PATH_BYTES}")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            result = probe.connect_ex(path)
        except (OSError, ValueError) as error:
            raise RuntimeError(str(error)) from error
    # EAGAIN: a server is listening, but its backlog is full.
    if result in (0, errno.EAGAIN):
        raise RuntimeError(os.strerror(errno.EADDRINUSE))


def check_can_listen(address: str, listeners: ExitStack) -> None:
    """Check that a server could listen on `unix:PATH` or `HOST:PORT`; a port stays taken until `listeners` are closed.

    Raises:
        RuntimeError: the address is in use or not usable; the message says why, without the address.
    """
    try:
        if address.startswith("unix:"):
            _check_socket_path(address.removeprefix("unix:"))
        else:
            _try_to_listen(address, listeners)
    except (OSError, ValueError) as error:
        raise RuntimeError(reason_of_failure(error)) from error


def listen_on_both_families(port: int, *, backlog: int) -> socket.socket:
    """Listen on every interface, by IPv6 and IPv4: what `[::]` means to gRPC, where Python's servers take IPv6 alone.

    Raises:
        OSError: the port is taken, or there is no IPv6.
    """
    return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)


def reason_of_failure(error: Exception) -> str:
    """Why listening failed, without the address that the text of some errors repeats."""
    # gaierror has error numbers of its own.
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def _check_socket_path(path: str) -> None:
    refuse_taken_socket(path)
    with contextlib.suppress(FileNotFoundError):
        # A server replaces a dead one's socket, and nothing else.
        if not stat.S_ISSOCK(Path(path).lstat().st_mode):
            raise RuntimeError("the file is not a socket")
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(path)
        Path(path).unlink()


def _try_to_listen(address: str, listeners: ExitStack) -> None:
    """One success on a host name's addresses is enough, but none may be in use."""
    infos = socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    errors = []
    for family, _, _, _, socket_address in infos:
        try:
            listeners.enter_context(socket.create_server(socket_address, family=family))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            errors.append(error)
    if len(errors) == len(infos):
        raise errors[0]

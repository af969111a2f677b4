"""Messages between the service and its forked processes: JSON after its length in bytes."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")


def send_frame(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message; raises OSError."""
    # A template can write lone surrogates.
    payload = json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(connection: socket.socket) -> dict[str, Any] | None:
    """Receive a message; None if the other side has closed the connection. Raises OSError."""
    header = receive_bytes(connection, _LENGTH.size)
    if header is None:
        return None
    payload = receive_bytes(connection, _LENGTH.unpack(header)[0])
    if payload is None:
        return None
    message: dict[str, Any] = json.loads(payload.decode(errors="surrogatepass"))
    return message


def receive_bytes(connection: socket.socket, num_bytes: int) -> bytearray | None:
    """Receive what follows a message; None if the other side has closed the connection. Raises OSError."""
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        num_received = connection.recv_into(rest)
        if not num_received:
            return None
        rest = rest[num_received:]
    return data

"""What a forked process does: it reads bodies for one connection, within limits that the kernel holds.

A request is a frame with the reader's name, its arguments, the CPU seconds that it may take and the body's size, and
then the body. An answer is a frame, and then as many bytes of the request that was read as it says.
"""

from __future__ import annotations

import gc
import socket
from typing import Any

from services.tokenizer.forks.frames import receive_bytes, receive_frame, send_frame
from services.tokenizer.forks.memory_limit import MemoryLimit
from services.tokenizer.http.reading.crossing import pack
from services.tokenizer.http.reading.parsing import parse_body
from services.tokenizer.http.reading.readers import READERS
from services.tokenizer.http.refusals import HttpError, invalid_field
from services.tokenizer.trial_limits import limit_cpu

MAX_MEMORY_BYTES = 1024 * 1024 * 1024
"""Memory above what is mapped when the process begins; a body of 4 MiB takes up to 300 MiB parsed."""


def serve_bodies(connection: socket.socket) -> None:
    """Answer until the connection is closed, or an answer says that it `is_last`. Limits this process for good."""
    memory = MemoryLimit(MAX_MEMORY_BYTES)
    # Collections while millions of values are made would take longer than making them.
    gc.disable()
    while (request := receive_frame(connection)) is not None:
        data = receive_bytes(connection, request["num_bytes"])
        if data is None:
            return
        limit_cpu(request["cpu_s"])
        try:
            packed = pack(_read(data, request))
            answer: dict[str, Any] = {}
        except HttpError as error:
            packed, answer = b"", {"refusal": _refusal(error)}
        except MemoryError:
            packed, answer = b"", {"refusal": _refusal(invalid_field(None, "reading the body takes too much memory"))}
        except Exception as error:  # noqa: BLE001 - the service logs its type, and answers without its text
            packed, answer = b"", {"failure": type(error).__name__}
        del data
        limit_cpu(0.0)
        gc.collect()
        is_last = memory.is_half_used
        send_frame(connection, {**answer, "num_bytes": len(packed), "is_last": is_last})
        connection.sendall(packed)
        if is_last:
            return


def _read(data: bytearray, request: dict[str, Any]) -> object:
    return READERS[request["reader"]](parse_body(data), **request["arguments"])


def _refusal(error: HttpError) -> dict[str, Any]:
    return {
        "status": error.status,
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "headers": error.headers,
    }

"""The service's side of the processes in which large bodies are read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
from collections.abc import Mapping
from typing import Any

from services.tokenizer.forks.forking_process import ForkingProcess
from services.tokenizer.http.reading.crossing import unpack
from services.tokenizer.http.refusals import HttpError, invalid_field
from services.tokenizer.trial_limits import cpu_problem, wall_clock_s, was_out_of_cpu
from shared.errors import InternalError, QueueFullError

logger = logging.getLogger(__name__)

_MODULE = "services.tokenizer.http.reading.read_process"
# A body of 4 MiB takes a second or two, whatever is in it.
_CPU_S = 20.0
_RETRY_DELAY_S = 1.0
_LENGTH = struct.Struct("!I")


class BodyReaders:
    """Reads bodies in forked processes, each one at a time.

    The process that forks them starts with `warm_up` or the first body, and again, should it end.

    A body whose call is cancelled is read no longer.
    """

    def __init__(self, cpu_s: float = _CPU_S) -> None:
        """`cpu_s` are the seconds of CPU time that a body may take."""
        self._cpu_s = cpu_s
        self._server: ForkingProcess | None = None
        self._idle: list[socket.socket] = []

    async def read(self, reader: str, arguments: Mapping[str, Any], data: bytes) -> Any:
        """What a reader makes of a body.

        Args:
            reader: The name of one in `readers`.
            arguments: Its further arguments, values of JSON.
            data: The body.

        Raises:
            HttpError: the reader refuses it, or it takes too much memory or CPU time.
            QueueFullError: the machine has no process or no time for it.
            InternalError: the reader failed.
        """
        head = {"reader": reader, "arguments": dict(arguments), "cpu_s": self._cpu_s, "num_bytes": len(data)}
        try:
            if self._idle:
                # It may have been killed since its last answer.
                with contextlib.suppress(ConnectionError):
                    return await self._ask(self._idle.pop(), head, data)
            return await self._ask(self._connect(), head, data)
        except OSError as error:
            logger.warning("a large body cannot be read", extra={"error": str(error)})
            raise QueueFullError("reading the body took too long", retry_delay_s=_RETRY_DELAY_S) from None

    def warm_up(self) -> None:
        """Start the process that forks, without waiting: it imports for half a second before it does."""
        try:
            self._server = self._server or self._start()
        except OSError as error:
            # The first body tries again.
            logger.warning("the process that reads bodies cannot be started", extra={"error": str(error)})

    def close(self) -> None:
        """End the processes."""
        while self._idle:
            self._idle.pop().close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _connect(self) -> socket.socket:
        if self._server is not None:
            try:
                return self._server.connect()
            except OSError as error:
                logger.warning("the server of reading processes is replaced", extra={"error": str(error)})
                self._server.close()
        self._server = self._start()
        return self._server.connect()

    def _start(self) -> ForkingProcess:
        return ForkingProcess(_MODULE, {"OPENBLAS_NUM_THREADS": "1"})

    async def _ask(self, connection: socket.socket, head: dict[str, Any], data: bytes) -> Any:
        """Raises ConnectionError if the process was killed, and TimeoutError if it hangs."""
        connection.setblocking(False)
        answer: dict[str, Any] = {}
        try:
            async with asyncio.timeout(wall_clock_s(self._cpu_s)):
                answer, packed = await _exchange(connection, head, data)
        finally:
            # Closing kills it; also if this call is cancelled.
            if answer.get("is_last", True):
                connection.close()
            else:
                self._idle.append(connection)
        if "ended" in answer:
            raise self._failure(answer["ended"])
        if "refusal" in answer:
            raise HttpError(**answer["refusal"])
        if "failure" in answer:
            logger.error("reading a body failed", extra={"error_type": answer["failure"]})
            raise InternalError("internal error")
        return unpack(packed)

    def _failure(self, code: int) -> Exception:
        if was_out_of_cpu(code):
            return invalid_field(None, f"the body cannot be read: {cpu_problem(self._cpu_s)}")
        return ConnectionError(f"the reading process ended with {code}")


async def _exchange(connection: socket.socket, head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytearray]:
    loop = asyncio.get_running_loop()
    payload = json.dumps(head).encode()
    # If the process has ended, its last message says how.
    with contextlib.suppress(ConnectionError):
        await loop.sock_sendall(connection, _LENGTH.pack(len(payload)) + payload)
        await loop.sock_sendall(connection, data)
    size = await _receive(connection, _LENGTH.size)
    answer: dict[str, Any] = json.loads(await _receive(connection, _LENGTH.unpack(size)[0]))
    return answer, await _receive(connection, answer.get("num_bytes", 0))


async def _receive(connection: socket.socket, num_bytes: int) -> bytearray:
    loop = asyncio.get_running_loop()
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        num_received = await loop.sock_recv_into(connection, rest)
        if not num_received:
            raise ConnectionError("the reading process was killed")
        rest = rest[num_received:]
    return data

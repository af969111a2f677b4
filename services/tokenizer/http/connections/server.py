"""The HTTP server: listens, and stops when its streams have ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from services.tokenizer.http.connections.connection import Connection, Connections
from services.tokenizer.http.connections.limits import HttpLimits
from services.tokenizer.http.connections.tls_listener import TlsListener
from shared.network.addresses import is_any_host_of_both_families, split_address
from shared.network.listening import listen_on_both_families, reason_of_failure, refuse_taken_socket
from shared.network.tls import Certificates

logger = logging.getLogger(__name__)

_CLOSE_S = 0.5
_BACKLOG = 1024


@dataclass(slots=True)
class HttpServer:
    """A running server."""

    runner: web.AppRunner
    listener: asyncio.Server | TlsListener

    @property
    def addresses(self) -> list[object]:
        """What it listens on."""
        return [each.getsockname() for each in self.listener.sockets]

    async def stop(self) -> None:
        """Close the listener, then the connections; requests that are still open are ended."""
        self.listener.close()
        await self.runner.cleanup()


async def serve_http(
    address: str, app: web.Application, *, certificates: Certificates | None, limits: HttpLimits
) -> HttpServer:
    """Serve `app`.

    Args:
        address: unix:PATH or HOST:PORT; port 0 chooses a free one.
        app: The routes.
        certificates: For TLS, which a unix socket never has.
        limits: Those of its connections.

    Raises:
        RuntimeError: the address is in use or not usable.
    """
    # A client that leaves a request whose answer is not streamed would otherwise go unnoticed.
    runner = web.AppRunner(app, handle_signals=False, handler_cancellation=True, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    server, connections = runner.server, Connections(limits)
    assert server is not None, "the runner is set up"
    try:
        listener = await _listen(address, lambda: Connection(server, connections), certificates, limits.head_s)
    except (OSError, RuntimeError, ValueError) as error:
        await runner.cleanup()
        raise RuntimeError(f"--http-listen: {address}: {reason_of_failure(error)}") from error
    http = HttpServer(runner, listener)
    logger.info("serving HTTP", extra={"addresses": http.addresses})
    return http


async def _listen(
    address: str, make: Callable[[], Connection], certificates: Certificates | None, handshake_s: float
) -> asyncio.Server | TlsListener:
    loop = asyncio.get_running_loop()
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        refuse_taken_socket(path)
        return await loop.create_unix_server(make, path, backlog=_BACKLOG)
    host, port = split_address(address)
    if certificates is None and is_any_host_of_both_families(host):
        listener = listen_on_both_families(port, backlog=_BACKLOG)
        return await loop.create_server(make, sock=listener, backlog=_BACKLOG)
    if certificates is None:
        return await loop.create_server(make, host, port, backlog=_BACKLOG)
    return TlsListener(await _bind(host, port), make, certificates.make_http_context(), handshake_s)


async def _bind(host: str, port: int) -> list[socket.socket]:
    """Listen on each address of a host, as `create_server` does, and on `::` by IPv4 too."""
    if is_any_host_of_both_families(host):
        listener = listen_on_both_families(port, backlog=_BACKLOG)
        listener.setblocking(False)
        return [listener]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
            for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found)
        ]
        stack.pop_all()
    for each in sockets:
        each.setblocking(False)
    return sockets

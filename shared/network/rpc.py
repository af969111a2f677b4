"""Servers and channels: all are made here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc

from shared.network.access import (
    HEALTH_METHODS,
    find_served_methods,
    identify_by_key,
)
from shared.network.addresses import is_local
from shared.network.call_interceptor import CallInterceptor, OnRefusal
from shared.network.listening import check_can_listen, refuse_taken_socket
from shared.network.reflection import serve_reflection
from shared.network.tls import Certificates, Role, TrustedAuthority
from shared.tenants.client_keys import ClientKeys

# Clients' messages have the library's default limit of 4 MiB. Inside a cell, a step with many long block tables is
# larger.
INTERNAL_MESSAGE_BYTES = 64 * 1024 * 1024
# Inside a cell, HTTP/2 pings detect a peer whose process is stopped, or that the network has lost, while a call is
# open, whatever that call is waiting for. Keepalive sends the pings, and the ping timeout closes the connection:
# without that timeout a stopped peer goes unnoticed. The services' own heartbeats, where they exist, are faster.
_KEEPALIVE_MS = 5_000
_PING_TIMEOUT_MS = 10_000
# For a connection attempt that gets no answer; gRPC's default of 20 s would outlast most partitions.
_CONNECT_TIMEOUT_MS = 3_000

METADATA_SOFT_BYTES = 8 * 1024
METADATA_HARD_BYTES = 16 * 1024

# Calls that have arrived but that the event loop has not accepted yet. gRPC's default limits (1000, enforced at random,
# and 3000) end calls of a burst, and unrelated ones, with a bare CANCELLED.
MAX_PENDING_CALLS = 20_000
# How long they may wait for that; a client's deadline decides earlier. After gRPC's 30 s, as a burst takes on a busy
# machine, they would end with a bare CANCELLED too.
_MAX_PENDING_S = 24 * 60 * 60
# Calls served at once; we refuse calls above this with a reason and a retry delay.
MAX_OPEN_CALLS = 16_384
MAX_CONNECTIONS = 8192
"""Connections of a client port; as each may have many calls, few clients need more than one."""
MAX_CELL_CONNECTIONS = 1024
"""Connections of a cell port."""
# A client connects again with its next call. Within the cell, links are never idle for so long.
_MAX_IDLE_MS = 300_000
_HANDSHAKE_MS = 10_000


_KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    # Do not limit pings while no messages are sent.
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a channel with TLS."""

    certificates: Certificates | TrustedAuthority
    """This end's own, which name its role; a client of a client port has none that does."""
    role: Role
    """What the other end's certificate must name."""


def make_peer(certificates: Certificates | None, role: Role) -> Peer | None:
    """The peer to be dialled by a service with these certificates; without them, None."""
    return None if certificates is None else Peer(certificates, role)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server refuses or ends."""

    max_open_calls: int = MAX_OPEN_CALLS
    """More at once are refused with QUEUE_FULL; with clients' keys, a tenant's with TENANT_LIMIT beyond four times what
    they leave to others.
    """
    max_connections: int = MAX_CELL_CONNECTIONS
    """More at once are closed before they say anything; those that shake hands count, for at most 10 s."""
    max_connection_age_s: float | None = None
    """A connection older than this, within 10 %, takes no new calls and ends after its open ones."""
    client_keys: ClientKeys | None = None
    """On a client port, calls without one of these are refused, but for health; None means that none needs a key."""
    on_refusal: OnRefusal = lambda _method, _reason: None


class Servicer(Protocol):
    """Can add its methods to a server."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register them."""


def make_server(
    address: str,
    servicers: Sequence[Servicer],
    *,
    internal: bool = False,
    service_names: Sequence[str] = (),
    certificates: Certificates | None = None,
    limits: ServerLimits = ServerLimits(),
) -> grpc.aio.Server:
    """Create a server that listens on `address`; it is not started yet.

    Args:
        address: unix:PATH or HOST:PORT; port 0 chooses a free one.
        internal: Whether it is a cell port, whose messages may be large; else it is a client port. Each serves only its
            own methods, whatever the servicers have.
        service_names: What reflection lists besides health; empty turns it off.
        certificates: For TLS. On a cell port it is mutual, and peers may call what their role may; on a client port it
            is mutual if they have an authority of clients. None means no TLS. A unix socket has none in any case: its
            file's permissions say who may connect, and peers have no roles.
        limits: On connections and calls, and who may make these.

    Raises:
        RuntimeError: the address is in use or not usable.
    """
    options: list[tuple[str, int]] = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_metadata_size", METADATA_SOFT_BYTES),
        ("grpc.absolute_max_metadata_size", METADATA_HARD_BYTES),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", _MAX_PENDING_S),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ]
    if limits.max_connection_age_s is not None:
        options.append(("grpc.max_connection_age_ms", round(limits.max_connection_age_s * 1000)))
    if not internal:
        # Clients and their proxies ping idle connections as often as they like; the default closes such a connection.
        options += [("grpc.http2.max_ping_strikes", 0), ("grpc.max_connection_idle_ms", _MAX_IDLE_MS)]
    else:
        options += [
            ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
            ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
            *_KEEPALIVE_OPTIONS,
        ]
    if address.startswith("unix:"):
        certificates = None
    methods = find_served_methods(on_cell_port=internal, has_tls=certificates is not None)
    role_of = None if certificates is None else certificates.role_of
    identify = None if limits.client_keys is None or internal else partial(identify_by_key, limits.client_keys)
    interceptor = CallInterceptor(
        methods,
        limits.max_open_calls,
        role_of,
        identify,
        counted=HEALTH_METHODS if internal else methods,
        on_refusal=limits.on_refusal,
    )
    server = grpc.aio.server(interceptors=[interceptor], options=options)
    for servicer in servicers:
        servicer.add_to(server)
    if service_names:
        serve_reflection(server, service_names)
    credentials = None if certificates is None else certificates.server_credentials(on_cell_port=internal)
    try:
        _add_port(server, address, credentials)
    except RuntimeError as error:
        raise RuntimeError(f"cannot listen on {address}: {error}") from error
    return server


def make_channel(address: str, *, internal: bool = False, peer: Peer | None = None) -> grpc.aio.Channel:
    """Open a channel to one of our servers, with its own connection.

    Retries are off: only the owner of the state can decide what may be repeated. A proxy is used only to leave the
    machine and the cell.

    Args:
        address: unix:PATH or HOST:PORT.
        internal: Whether it connects processes of the cell.
        peer: What must answer, by TLS; None means no TLS. A unix socket has none in any case.
    """
    options: list[tuple[str, int | str]] = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    if internal or _is_local(address):
        # gRPC would use the one of `http_proxy`.
        options.append(("grpc.enable_http_proxy", 0))
    if internal:
        options += [
            ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
            ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),
            ("grpc.max_reconnect_backoff_ms", 1000),
            *_KEEPALIVE_OPTIONS,
        ]
    if peer is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    name = peer.certificates.name_of(peer.role)
    if name is not None:
        # Addresses change; the role's name does not.
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(address, peer.certificates.channel_credentials(), options=options)


def _add_port(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> None:
    if address.startswith("unix:"):
        refuse_taken_socket(address.removeprefix("unix:"))
    try:
        if credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, credentials)
    except RuntimeError:
        # Its message does not say why.
        with ExitStack() as listeners:
            check_can_listen(address, listeners)
        raise


def _is_local(target: str) -> bool:
    """False for what only gRPC's resolvers understand."""
    try:
        return is_local(target)
    except ValueError:
        return False

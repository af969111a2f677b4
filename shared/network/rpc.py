"""Servers and channels, all made here, and the one place where errors become gRPC statuses."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc
from typing_extensions import override

from shared.errors import (
    InternalError,
    NotSupportedError,
    QueueFullError,
    ServiceError,
    TenantLimitError,
)
from shared.network.access import (
    CLIENT_METHODS,
    HEALTH_METHODS,
    check_access,
    find_client,
    find_served_methods,
    identify_by_key,
    set_caller,
)
from shared.network.addresses import is_local
from shared.network.listening import check_can_listen, refuse_taken_socket
from shared.network.message_reader import MessageReader
from shared.network.reflection import serve_reflection
from shared.network.response_writer import call_is_over
from shared.network.statuses import STATUS_DETAILS_KEY, StatusError, to_status
from shared.network.tls import Certificates, Role, TrustedAuthority
from shared.network.turns import CallTurns, set_party
from shared.tenants.client_keys import ANY_CLIENT, Client, ClientKeys
from shared.tenants.fair_room import FairRoom

logger = logging.getLogger(__name__)


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
_RETRY_DELAY_S = 1.0
# If its health check were refused, the launcher would consider the process dead.
_NEVER_REFUSED = frozenset({"/grpc.health.v1.Health/Check"})


_KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    # Do not limit pings while no messages are sent.
    ("grpc.http2.max_pings_without_data", 0),
)

RoleOf = Callable[[grpc.aio.ServicerContext], Role | None]
Identify = Callable[[grpc.aio.ServicerContext], Client]
OnRefusal = Callable[[str, str], None]
"""Called, in the event loop, with the method and the reason of a call that ended before its handler saw it."""

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


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


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns exceptions into statuses; unknown ones become INTERNAL and are logged, both without their text.

    Before that it refuses methods of other ports, calls of peers that may not make them, calls above the limit, and
    messages that cannot be read. An interceptor sees no peer, and gRPC parses a message before its handler does: so
    messages arrive here as bytes, and are read after the peer was checked. Handlers then find who calls in
    `get_caller`.
    """

    def __init__(
        self,
        methods: Set[str],
        max_open_calls: int,
        role_of: RoleOf | None = None,
        identify: Identify | None = None,
        *,
        counted: Set[str],
        on_refusal: OnRefusal,
    ) -> None:
        """Serve calls that may be made.

        Args:
            methods: The port's.
            max_open_calls: See `ServerLimits`.
            role_of: Finds the role of a call's peer; None means that peers have none.
            identify: Finds the client that makes a call, by its key; None means that calls need none.
            counted: See `MessageReader`.
            on_refusal: See `OnRefusal`.
        """
        self._methods = methods
        self._max_open_calls = max_open_calls
        self._role_of = role_of
        self._identify = identify
        self._on_refusal = on_refusal
        self._reader = MessageReader(counted, on_refusal)
        self._open_calls = FairRoom(max_open_calls, capacity=max_open_calls)
        self._num_open_calls = 0
        self._turns = CallTurns()

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        handler = await continuation(handler_call_details) if method in self._methods else None
        if handler is None:
            # gRPC answers UNIMPLEMENTED.
            return None
        # Exactly one of the four is set; the factory that created the handler has the same name.
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None:
                read = self._reader.make_read(method, handler.request_deserializer, is_stream=handler.request_streaming)
                take_turn = self._turns.wait if method in CLIENT_METHODS else None
                guarded = _guard(behavior, method, partial(self._open_call, method), read, take_turn)
                make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
                return make_handler(guarded, None, handler.response_serializer)
        return handler

    @contextmanager
    def _open_call(self, method: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        try:
            party = self._check_call(method, context)
        except ServiceError as error:
            self._on_refusal(method, error.reason)
            raise
        self._num_open_calls += 1
        try:
            with self._open_calls.enter(party):
                yield
        finally:
            self._num_open_calls -= 1

    def _check_call(self, method: str, context: grpc.aio.ServicerContext) -> str:
        """Returns whose call it is: the tenant, or without keys the address."""
        if self._role_of is not None:
            check_access(method, self._role_of(context))
        identify = self._identify
        client = ANY_CLIENT if identify is None else find_client(method, partial(identify, context))
        set_caller(client)
        party = _address_of(context.peer()) if client is ANY_CLIENT else client.tenant.name
        set_party(party)
        if method in _NEVER_REFUSED:
            return party
        if self._num_open_calls >= self._max_open_calls:
            raise QueueFullError(
                "too many calls are open", retry_delay_s=_RETRY_DELAY_S, max_calls=self._max_open_calls
            )
        if client is not ANY_CLIENT and not self._open_calls.has_room(party, 1):
            raise TenantLimitError(
                "too many calls of the tenant are open",
                retry_delay_s=_RETRY_DELAY_S,
                limit="open_calls",
                value=self._open_calls.size_of(party),
            )
        return party


def _guard(
    behavior: Callable[..., Any],
    method: str,
    open_call: Callable[[grpc.aio.ServicerContext], AbstractContextManager[None]],
    read: Callable[[Any], Awaitable[Any]],
    take_turn: Callable[[], Awaitable[None]] | None,
) -> Callable[..., Any]:
    """Turns the errors of a servicer's method into statuses.

    `open_call` refuses or counts a call; `take_turn`, if given, waits until it may be taken up; `read` reads its
    messages.
    """
    if inspect.isasyncgenfunction(behavior):

        async def guarded_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                with open_call(context):
                    if take_turn is not None:
                        await take_turn()
                    async for response in behavior(await read(request), context):
                        yield response
            except Exception as error:  # noqa: BLE001 - this is the RPC boundary
                await _abort(context, method, error)

        return guarded_stream

    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            with open_call(context):
                if take_turn is not None:
                    await take_turn()
                return await behavior(await read(request), context)
        except Exception as error:  # noqa: BLE001 - this is the RPC boundary
            await _abort(context, method, error)

    return guarded


def _address_of(peer: str) -> str:
    """A peer's address without its port; all that are on a unix socket have the same."""
    return "unix" if peer.startswith("unix") else peer.rpartition(":")[0]


async def _abort(context: grpc.aio.ServicerContext, method: str, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):
        raise call_is_over() from error
    if isinstance(error, StatusError):
        status = error.status
    elif isinstance(error, ServiceError):
        status = to_status(error)
    elif _is_unimplemented(context, error):
        status = to_status(NotSupportedError("this release does not implement the method", method=method))
    else:
        logger.error("unexpected error", extra={"method": method}, exc_info=without_text(error))
        status = to_status(InternalError("internal error"))
    details = ((STATUS_DETAILS_KEY, status.SerializeToString()),)
    try:
        await context.abort(_STATUS_CODES[status.code], status.message, details)
    except grpc.aio.InternalError as gone:
        raise call_is_over() from gone


class _UntoldError(Exception):
    """Stands in the log for an exception whose text may quote a request."""


def without_text(error: Exception) -> BaseException:
    """Where an exception was raised, and of which type."""
    return _UntoldError(type(error).__qualname__).with_traceback(error.__traceback__)


def _is_unimplemented(context: grpc.aio.ServicerContext, error: Exception) -> bool:
    """The generated base class sets UNIMPLEMENTED before it raises."""
    return isinstance(error, NotImplementedError) and context.code() is grpc.StatusCode.UNIMPLEMENTED

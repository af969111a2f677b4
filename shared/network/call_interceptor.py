"""What each call passes before its handler: access, limits, turns, and the way back of errors."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import grpc
from typing_extensions import override

from shared.errors import (
    InternalError,
    NotSupportedError,
    QueueFullError,
    ServiceError,
    TenantLimitError,
)
from shared.network.access import CLIENT_METHODS, check_access, find_client, set_caller
from shared.network.message_reader import MessageReader
from shared.network.response_writer import call_is_over
from shared.network.statuses import STATUS_DETAILS_KEY, StatusError, to_status
from shared.network.tls import Role
from shared.network.turns import CallTurns, set_party
from shared.tenants.client_keys import ANY_CLIENT, Client
from shared.tenants.fair_room import FairRoom

logger = logging.getLogger(__name__)

_RETRY_DELAY_S = 1.0
# If its health check were refused, the launcher would consider the process dead.
_NEVER_REFUSED = frozenset({"/grpc.health.v1.Health/Check"})
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}

RoleOf = Callable[[grpc.aio.ServicerContext], Role | None]
Identify = Callable[[grpc.aio.ServicerContext], Client]
OnRefusal = Callable[[str, str], None]
"""Called, in the event loop, with the method and the reason of a call that ended before its handler saw it."""


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

"""Which port serves which method, and in a cell with TLS which roles may call it.

A client port serves clients, which have no certificate but may need a key; a cell port serves the cell's own processes
and its operators.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import grpc

from shared.errors import PermissionDeniedError, UnauthenticatedError
from shared.network.tls import Role
from shared.tenants.client_keys import ANY_CLIENT, Client, ClientKeys

# On client ports, for everybody that has a key where keys are needed.
CLIENT_METHODS = frozenset(
    {
        "/lockstep.v1.TokenizerService/Generate",
        "/lockstep.v1.TokenizerService/Complete",
        "/lockstep.v1.TokenizerService/Score",
        "/lockstep.v1.TokenizerService/Embed",
        "/lockstep.v1.TokenizerService/Tokenize",
        "/lockstep.v1.TokenizerService/Detokenize",
        "/lockstep.v1.TokenizerService/RenderChat",
        "/lockstep.v1.TokenizerService/GetModelInfo",
        "/lockstep.v1.SchedulerService/Generate",
        "/lockstep.v1.SchedulerService/Abort",
    }
)
# On every port, for everybody that can connect, without a key.
HEALTH_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
    }
)
# On cell ports.
METHOD_TO_ROLES = {
    # A tokenizer asks for operators of its HTTP port.
    "/lockstep.v1.SchedulerService/GetState": frozenset({Role.OPERATOR, Role.TOKENIZER}),
    # A gateway that routes by prefix is one of the cell's operators. No client may call it: to one that knows a prompt
    # and its salt, the hashes say whether others sent it lately.
    "/lockstep.v1.SchedulerService/SubscribeKvEvents": frozenset({Role.OPERATOR}),
    "/lockstep.v1.SchedulerAdminService/Drain": frozenset({Role.OPERATOR}),
    "/lockstep.v1.SchedulerAdminService/FlushPrefixCache": frozenset({Role.OPERATOR}),
    "/lockstep.v1.SchedulerAdminService/Undrain": frozenset({Role.OPERATOR}),
    "/lockstep.internal.v1.ExchangeService/Exchange": frozenset({Role.TOKENIZER}),
    "/lockstep.internal.v1.WorkerService/Attach": frozenset({Role.SCHEDULER}),
    "/lockstep.internal.v1.WorkerService/Execute": frozenset({Role.SCHEDULER}),
    "/lockstep.internal.v1.WorkerService/Profile": frozenset({Role.OPERATOR}),
    "/lockstep.internal.v1.WorkerService/Restart": frozenset({Role.SCHEDULER}),
    "/lockstep.internal.v1.GroupService/Join": frozenset({Role.WORKER}),
    "/lockstep.internal.v1.GroupService/Meet": frozenset({Role.WORKER}),
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": frozenset({Role.OPERATOR}),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset({Role.OPERATOR}),
}
_REFLECTION_METHODS = frozenset(method for method in METHOD_TO_ROLES if method.startswith("/grpc.reflection."))


def find_served_methods(*, on_cell_port: bool, has_tls: bool) -> frozenset[str]:
    """The methods that a port may serve; all others are UNIMPLEMENTED there.

    Reflection is for operators; a client port with TLS cannot tell them from clients.
    """
    if on_cell_port:
        return HEALTH_METHODS | METHOD_TO_ROLES.keys()
    return HEALTH_METHODS | CLIENT_METHODS | (frozenset() if has_tls else _REFLECTION_METHODS)


def check_access(method: str, role: Role | None) -> None:
    """Check that a peer of this role may call the method; None means a peer without a role.

    Raises:
        UnauthenticatedError: only roles may, and the peer has none.
        PermissionDeniedError: other roles may, or none: the method is in no table.
    """
    if method in CLIENT_METHODS or method in HEALTH_METHODS:
        return
    roles = METHOD_TO_ROLES.get(method, frozenset())
    if role is None:
        raise UnauthenticatedError("the method needs a certificate that names a role", method=method)
    if role not in roles:
        raise PermissionDeniedError(f"role {role.value} may not call the method", method=method, role=role.value)


def find_client(method: str, identify: Callable[[], Client]) -> Client:
    """Who calls a method of a client port that needs keys; any client where the method needs none.

    Args:
        method: The method.
        identify: Finds out who the peer is, by its key.

    Raises:
        UnauthenticatedError: by `identify`.
        PermissionDeniedError: the method is for operators, and the key is none of theirs.
    """
    if method in HEALTH_METHODS:
        return ANY_CLIENT
    client = identify()
    if not client.is_operator and method not in CLIENT_METHODS:
        raise PermissionDeniedError("the method needs the key of an operator", method=method)
    return client


def identify_by_key(client_keys: ClientKeys, context: grpc.aio.ServicerContext) -> Client:
    """Who makes a call, by the key in its metadata.

    Raises:
        UnauthenticatedError: the call has no key that is known, or more than one.
    """
    values: dict[str, list[str]] = {"authorization": [], "x-api-key": []}
    for name, value in context.invocation_metadata() or ():
        if name in values:
            values[name].append(value)
    return client_keys.identify(values["authorization"], values["x-api-key"])


# Each call is served by a task, and so in a context, of its own. There is no default: code that runs in no call would
# otherwise act for a client without limits.
_CALLER: ContextVar[Client] = ContextVar("caller")


def set_caller(client: Client) -> None:
    """Note who makes the call that this task serves, once that is known."""
    _CALLER.set(client)


def get_caller() -> Client:
    """Who makes the call that this task serves.

    Raises:
        LookupError: it serves none.
    """
    return _CALLER.get()

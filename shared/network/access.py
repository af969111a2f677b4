"""Which port serves which method, and in a cell with TLS which roles may call it.

A client port serves clients, which have no certificate; a cell port serves the cell's own processes and its operators.
"""

from __future__ import annotations

from shared.errors import PermissionDeniedError, UnauthenticatedError
from shared.network.tls import Role

# On client ports, for everybody.
CLIENT_METHODS = frozenset(
    {
        "/lockstep.v1.TokenizerService/Generate",
        "/lockstep.v1.TokenizerService/Complete",
        "/lockstep.v1.TokenizerService/Tokenize",
        "/lockstep.v1.TokenizerService/Detokenize",
        "/lockstep.v1.TokenizerService/RenderChat",
        "/lockstep.v1.TokenizerService/GetModelInfo",
        "/lockstep.v1.SchedulerService/Generate",
        "/lockstep.v1.SchedulerService/Abort",
    }
)
# On every port, for everybody that can connect.
HEALTH_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
    }
)
# On cell ports.
METHOD_TO_ROLES = {
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

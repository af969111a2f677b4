"""Who may call which method of which port, with every kind of key and certificate, over real servers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.internal.v1 import exchange_pb2_grpc, worker_pb2_grpc
from lockstep.v1 import scheduler_pb2_grpc, tokenizer_pb2_grpc
from shared.network.access import CLIENT_METHODS, HEALTH_METHODS, METHOD_TO_ROLES
from shared.network.health import Health
from shared.network.rpc import ServerLimits, make_server
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.network.tls import Certificates, Role
from shared.tenants.client_keys import ClientKeys
from tests.support.cells.certificates import DOMAIN, Authority, Issued, write_files
from tests.support.clients.key_files import key_line, write_keys
from tests.support.system.ports import free_port

METHODS = sorted(CLIENT_METHODS | HEALTH_METHODS | METHOD_TO_ROLES.keys())
REFLECTION = {method for method in METHOD_TO_ROLES if method.startswith("/grpc.reflection.")}
KEYS = {"no key": None, "an unknown key": "sk-unknown", "a key": "sk-one", "an operator's key": "sk-operator"}
# They say nothing there.
KEYS_OF_CELL = ("no key", "an operator's key")
SERVED, NOT_SERVED, NOT_CONNECTED = "served", "not served", "not connected"

SERVICES, CLIENTS = Authority("of services"), Authority("of clients")
# The ports are a scheduler's, which shows this.
OWN = SERVICES.issue_role(Role.SCHEDULER)
CERTIFICATES: dict[str, Issued | None] = {
    "none": None,
    "a client's": CLIENTS.issue(),
    "no role's": SERVICES.issue(dns=[f"guest.{DOMAIN}"], uris=[f"spiffe://{DOMAIN}/guest"]),
    **{role.value: SERVICES.issue_role(role) for role in Role},
    "scheduler": OWN,
}


@dataclasses.dataclass(frozen=True)
class Port:
    """A port of a service whose clients need keys."""

    is_cell: bool
    has_tls: bool
    needs_certificates: bool = False


CLIENT, CLIENT_WITH_TLS, CLIENT_WITH_CA = Port(False, False), Port(False, True), Port(False, True, True)
CELL, CELL_WITH_TLS = Port(True, False), Port(True, True)


class Everything:
    """Has each method of each service; those that may be called say that they are not implemented."""

    def add_to(self, server: grpc.aio.Server) -> None:
        for module in (tokenizer_pb2_grpc, scheduler_pb2_grpc, exchange_pb2_grpc, worker_pb2_grpc):
            for name in dir(module):
                if name.endswith("Servicer"):
                    getattr(module, f"add_{name}_to_server")(getattr(module, name)(), server)


def connects(port: Port, shown: str) -> bool:
    """Whether a peer that shows this certificate has a connection."""
    if not port.has_tls:
        return shown == "none"
    if port.is_cell:
        return shown not in ("none", "a client's")
    return not port.needs_certificates or shown in ("a client's", "scheduler")


def expected(port: Port, shown: str, key: str, method: str) -> str:
    """What becomes of a call."""
    if not connects(port, shown):
        return NOT_CONNECTED
    if method in HEALTH_METHODS:
        return SERVED
    if port.is_cell:
        return _expected_of_cell(port, shown, method)
    if method not in CLIENT_METHODS and (method not in REFLECTION or port.has_tls):
        return NOT_SERVED
    if key in ("no key", "an unknown key"):
        return "UNAUTHENTICATED"
    return SERVED if method in CLIENT_METHODS or key == "an operator's key" else "PERMISSION_DENIED"


def _expected_of_cell(port: Port, shown: str, method: str) -> str:
    if method not in METHOD_TO_ROLES:
        return NOT_SERVED
    if not port.has_tls:
        return SERVED
    if shown == "no role's":
        return "UNAUTHENTICATED"
    return SERVED if Role(shown) in METHOD_TO_ROLES[method] else "PERMISSION_DENIED"


@asynccontextmanager
async def serving(port: Port, tmp_path: Path) -> AsyncIterator[str]:
    keys = write_keys(tmp_path / "keys", key_line("sk-one"), key_line("sk-operator", "ops", is_operator=True))
    files = write_files(tmp_path / "tls", OWN, SERVICES)
    if port.needs_certificates:
        files = dataclasses.replace(files, client_authority=tmp_path / "clients.crt")
        (tmp_path / "clients.crt").write_bytes(CLIENTS.pem)
    address = f"127.0.0.1:{free_port()}"
    server = make_server(
        address,
        [Everything(), Health(())],
        internal=port.is_cell,
        service_names=("lockstep.v1.SchedulerService",),
        certificates=Certificates(files, Role.SCHEDULER) if port.has_tls else None,
        limits=ServerLimits(client_keys=ClientKeys(keys)),
    )
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def open_channel(address: str, port: Port, shown: Issued | None) -> grpc.aio.Channel:
    if not port.has_tls:
        return grpc.aio.insecure_channel(address)
    own = () if shown is None else (shown.key, shown.certificate)
    options = [("grpc.ssl_target_name_override", f"scheduler.{DOMAIN}"), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(SERVICES.pem, *own), options)


async def outcome(channel: grpc.aio.Channel, method: str, key: str | None) -> str:
    """What becomes of a call with an empty message; on the wire one message is a stream too."""
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    call: Any = channel.unary_stream(method)(b"", metadata=metadata)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        reason = reason_of(status_from_rpc_error(error))
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return NOT_CONNECTED
        if error.code() is grpc.StatusCode.UNIMPLEMENTED and reason is None:
            return NOT_SERVED
        return reason if reason in ("UNAUTHENTICATED", "PERMISSION_DENIED") else SERVED
    finally:
        call.cancel()
    return SERVED


@pytest.mark.parametrize("port", [CLIENT, CLIENT_WITH_TLS, CLIENT_WITH_CA, CELL, CELL_WITH_TLS])
async def test_each_method_is_for_those_that_it_should_be_for(port: Port, tmp_path: Path) -> None:
    found, table = {}, {}
    async with serving(port, tmp_path) as address, AsyncExitStack() as stack:
        for shown in certificates_at(port):
            channel = await stack.enter_async_context(open_channel(address, port, CERTIFICATES[shown]))
            # Each attempt of a peer without a connection takes a handshake.
            methods = METHODS if connects(port, shown) else [*HEALTH_METHODS][:1]
            for key, method in itertools.product(KEYS_OF_CELL if port.is_cell else KEYS, methods):
                found[shown, key, method] = await outcome(channel, method, KEYS[key])
                table[shown, key, method] = expected(port, shown, key, method)
    assert found == table


def certificates_at(port: Port) -> Collection[str]:
    """What peers show: everything where somebody looks at it."""
    if not port.has_tls:
        return ("none",)
    return CERTIFICATES if port.is_cell or port.needs_certificates else ("none", "a client's", "operator")

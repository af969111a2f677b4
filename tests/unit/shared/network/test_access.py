"""Every method of every service has a rule for who may call it."""

from __future__ import annotations

import dataclasses

import pytest
from grpc_health.v1 import health_pb2

from lockstep.internal.v1 import exchange_pb2, worker_pb2
from lockstep.v1 import scheduler_pb2, tokenizer_pb2
from shared.errors import PermissionDeniedError, UnauthenticatedError
from shared.network.access import (
    CLIENT_METHODS,
    HEALTH_METHODS,
    METHOD_TO_ROLES,
    check_access,
    find_client,
    find_served_methods,
    get_caller,
)
from shared.network.tls import Role
from shared.tenants.client_keys import ANY_CLIENT, Client
from shared.tenants.tenant import Tenant

FILES = (tokenizer_pb2, scheduler_pb2, exchange_pb2, worker_pb2, health_pb2)
REFLECTION = {method for method in METHOD_TO_ROLES if method.startswith("/grpc.reflection.")}


def test_the_tables_have_every_method_and_no_other() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods | REFLECTION == CLIENT_METHODS | HEALTH_METHODS | METHOD_TO_ROLES.keys()
    assert len(methods | REFLECTION) == len(CLIENT_METHODS) + len(HEALTH_METHODS) + len(METHOD_TO_ROLES)


@pytest.mark.parametrize("has_tls", [False, True])
def test_only_health_is_on_both_ports_and_without_tls_reflection(has_tls: bool) -> None:
    client, cell = (find_served_methods(on_cell_port=on_cell_port, has_tls=has_tls) for on_cell_port in (False, True))
    assert client & cell == HEALTH_METHODS | (frozenset() if has_tls else REFLECTION)
    assert client | cell == CLIENT_METHODS | HEALTH_METHODS | METHOD_TO_ROLES.keys()


@pytest.mark.parametrize("method", METHOD_TO_ROLES)
def test_a_method_is_for_its_roles_alone(method: str) -> None:
    for role in Role:
        if role in METHOD_TO_ROLES[method]:
            check_access(method, role)
        else:
            with pytest.raises(PermissionDeniedError):
                check_access(method, role)
    with pytest.raises(UnauthenticatedError):
        check_access(method, None)


@pytest.mark.parametrize("role", [None, *Role])
def test_an_open_method_is_for_everybody(role: Role | None) -> None:
    for method in CLIENT_METHODS | HEALTH_METHODS:
        check_access(method, role)


def test_a_method_that_no_table_has_is_refused() -> None:
    with pytest.raises(PermissionDeniedError):
        check_access("/lockstep.v1.TokenizerService/Unheard", Role.OPERATOR)


def test_with_keys_health_alone_is_open_and_reflection_is_for_operators() -> None:
    def refuse() -> Client:
        raise UnauthenticatedError("no key")

    client = dataclasses.replace(ANY_CLIENT, tenant=Tenant("a"))
    operator = dataclasses.replace(client, is_operator=True)
    for method in find_served_methods(on_cell_port=False, has_tls=False):
        if method in HEALTH_METHODS:
            assert find_client(method, refuse) == ANY_CLIENT
            continue
        with pytest.raises(UnauthenticatedError):
            find_client(method, refuse)
        assert find_client(method, lambda: operator) == operator
        if method in REFLECTION:
            with pytest.raises(PermissionDeniedError):
                find_client(method, lambda: client)
        else:
            assert find_client(method, lambda: client) == client


def test_what_serves_no_call_has_no_caller() -> None:
    with pytest.raises(LookupError):
        get_caller()

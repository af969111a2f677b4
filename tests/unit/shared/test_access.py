"""Every method of every service has a rule for who may call it."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2

from lockstep.internal.v1 import exchange_pb2, worker_pb2
from lockstep.v1 import scheduler_pb2, tokenizer_pb2
from shared.access import METHOD_TO_ROLES, OPEN_METHODS, check_access
from shared.errors import PermissionDeniedError, UnauthenticatedError
from shared.tls import Role

FILES = (tokenizer_pb2, scheduler_pb2, exchange_pb2, worker_pb2, health_pb2)
REFLECTION = {method for method in METHOD_TO_ROLES if method.startswith("/grpc.reflection.")}


def test_the_tables_have_every_method_and_no_other() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods | REFLECTION == OPEN_METHODS | METHOD_TO_ROLES.keys()
    assert not OPEN_METHODS & METHOD_TO_ROLES.keys()


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
    for method in OPEN_METHODS:
        check_access(method, role)


def test_a_method_that_no_table_has_is_refused() -> None:
    with pytest.raises(PermissionDeniedError):
        check_access("/lockstep.v1.TokenizerService/Unheard", Role.OPERATOR)

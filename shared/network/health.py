"""The standard health service."""

from __future__ import annotations

import os

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio

ALL_SERVICES = ""

_SERVING, _NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
# A process returns this metadata only if it names its own id: if the port was taken, another process answers the call.
_PROCESS_KEY = "lockstep-process"


class Health:
    """The health of one server: not serving until `set_serving`.

    The empty service name means the whole server. A launcher asks by it whether a process answers, and restarts it for
    no answer, never for NOT_SERVING.
    """

    def __init__(self, service_names: tuple[str, ...]) -> None:
        self._names = (ALL_SERVICES, *service_names)
        self._servicer = _Servicer(self._names)
        self._is_serving = False
        self._followers: list[Health] = []

    @property
    def is_serving(self) -> bool:
        """The whole server's current status."""
        return self._is_serving

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve `grpc.health.v1.Health` on `server`."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def make_follower(self, service_names: tuple[str, ...]) -> Health:
        """The health of another server of this process, which follows this one."""
        follower = Health(service_names)
        self._followers.append(follower)
        return follower

    async def set_serving(self, serving: bool, *, are_services: bool | None = None) -> None:
        """Set the statuses, and notify watching clients.

        Args:
            serving: The whole server's.
            are_services: That of its services; the server's if None.
        """
        self._is_serving = serving
        for name in self._names:
            is_serving = serving if name == ALL_SERVICES or are_services is None else are_services
            await self._servicer.set(name, _SERVING if is_serving else _NOT_SERVING)
        for follower in self._followers:
            await follower.set_serving(serving, are_services=are_services)


class _Servicer(aio.HealthServicer):  # type: ignore[misc]
    """Unlike the library's, not serving from the start."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self._server_status = dict.fromkeys(names, _NOT_SERVING)

    async def Check(  # noqa: N802 - the RPC's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        identity = _identity(os.getpid())
        if identity in (context.invocation_metadata() or ()):
            context.set_trailing_metadata((identity,))
        return await super().Check(request, context)


async def ask_process(channel: grpc.aio.Channel, pid: int, timeout_s: float) -> bool | None:
    """Check the health of a process on this machine, waiting until it listens.

    Returns:
        Whether it is serving; None if it does not answer in time, or another process does.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    identity = _identity(pid)
    call = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True, metadata=(identity,))
    try:
        response = await call
        is_answer = identity in tuple(await call.trailing_metadata())
    except grpc.aio.AioRpcError:
        return None
    return response.status == _SERVING if is_answer else None


def _identity(pid: int) -> tuple[str, str]:
    return _PROCESS_KEY, str(pid)

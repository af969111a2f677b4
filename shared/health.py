"""The standard health service: every server has one, and says through it when it can be used."""

from __future__ import annotations

import os

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio

ALL_SERVICES = ""

# Who asks with the id of a process gets it back from that process only: on a port that was taken another one answers.
_PROCESS_KEY = "lockstep-process"


class Health:
    """The health of one server: not serving until told otherwise.

    The empty service name stands for the whole server; each service has its own entry of the same value.
    """

    def __init__(self, service_names: tuple[str, ...]) -> None:
        self._names = (ALL_SERVICES, *service_names)
        self._servicer = _Servicer(self._names)
        self._is_serving = False
        self._followers: list[Health] = []

    @property
    def is_serving(self) -> bool:
        """What clients are told now."""
        return self._is_serving

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve `grpc.health.v1.Health` on `server`."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def make_follower(self, service_names: tuple[str, ...]) -> Health:
        """The health of another server of this process, with services of its own: it says what this one says."""
        follower = Health(service_names)
        self._followers.append(follower)
        return follower

    async def set_serving(self, serving: bool) -> None:
        """Tell clients, watching ones at once."""
        self._is_serving = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)
        for follower in self._followers:
            await follower.set_serving(serving)


class _Servicer(aio.HealthServicer):  # type: ignore[misc]
    """The library's servicer; but that one begins by saying that the whole server serves."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self._server_status = dict.fromkeys(names, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def Check(  # noqa: N802 - the RPC's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        identity = _identity(os.getpid())
        if identity in (context.invocation_metadata() or ()):
            context.set_trailing_metadata((identity,))
        return await super().Check(request, context)


async def ask_process(channel: grpc.aio.Channel, pid: int, timeout_s: float) -> bool | None:
    """Ask a process of this machine for its health, and wait until it listens.

    Args:
        channel: To where it is to listen.
        pid: Its process id.
        timeout_s: For how long to wait.

    Returns:
        Whether it says that it serves; None when it does not answer in time, or another process does.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    identity = _identity(pid)
    call = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True, metadata=(identity,))
    try:
        response = await call
        is_answer = identity in tuple(await call.trailing_metadata())
    except grpc.aio.AioRpcError:
        return None
    return response.status == health_pb2.HealthCheckResponse.SERVING if is_answer else None


def _identity(pid: int) -> tuple[str, str]:
    return _PROCESS_KEY, str(pid)


async def wait_until_serving(channel: grpc.aio.Channel) -> None:
    """Return once the server behind `channel` says that it serves; until then it may be absent.

    Raises:
        grpc.aio.AioRpcError: it has no health service.
    """
    while True:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        try:
            async for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
        finally:
            watch.cancel()

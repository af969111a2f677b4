"""Explains that a command called the wrong service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TOKENIZER = "lockstep.v1.TokenizerService"
SCHEDULER = "lockstep.v1.SchedulerService"
# Only on the cell port.
ADMIN = "lockstep.v1.SchedulerAdminService"

_DEADLINE_S = 5.0

# In this order: the scheduler's cell port has a part of the clients' service too.
_SERVICE_TO_NAME = {
    TOKENIZER: "the tokenizer's address",
    ADMIN: "the scheduler's cell address",
    SCHEDULER: "the scheduler's address for clients",
    "lockstep.internal.v1.WorkerService": "a worker's address",
}
_SERVICE_TO_ADVICE = {
    TOKENIZER: "`lockstep chat` and `lockstep generate` ask the tokenizer, which is at --listen of `lockstep serve`; "
    "without --target they find the cell running here",
    ADMIN: "`lockstep top` asks the scheduler, at its --cell-listen; without --target it finds the cell running here",
}


class WrongServiceError(Exception):
    """The message says which service answers, and where the right one is."""


@contextlib.asynccontextmanager
async def explain_wrong_service(channel: grpc.aio.Channel, target: str, service: str) -> AsyncIterator[None]:
    """Explain a failed call of `service` if another one answers at `target`.

    Raises:
        WrongServiceError: another one does.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        other = await _find_other(channel, service)
        if other is None:
            raise
        raise WrongServiceError(f"{target} is {_SERVICE_TO_NAME[other]}: {_SERVICE_TO_ADVICE[service]}") from None


async def _find_other(channel: grpc.aio.Channel, service: str) -> str | None:
    """A known service that the server offers instead of `service`."""
    health = health_pb2_grpc.HealthStub(channel)
    for name in (service, *_SERVICE_TO_NAME):
        with contextlib.suppress(grpc.aio.AioRpcError):
            await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=_DEADLINE_S)
            return None if name == service else name
    return None

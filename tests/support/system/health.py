"""A single health check of a server."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.system.patience import PATIENCE_S


async def check_health(channel: grpc.aio.Channel) -> bool:
    """Whether the server reports SERVING; False if it does not answer."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

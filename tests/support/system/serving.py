"""Waits for a server to be up."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


async def wait_until_serving(channel: grpc.aio.Channel) -> None:
    """Return once the server is serving; until then it may be unreachable.

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

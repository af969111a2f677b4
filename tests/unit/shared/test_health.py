"""A server says through the standard health service when it can be used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.health import Health, check_health, wait_until_serving
from shared.rpc import make_channel, make_server


async def test_a_server_is_not_serving_until_it_says_so(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'x'}"
    health = Health(("some.Service",))
    server = make_server(address, [health])
    await server.start()
    async with make_channel(address) as channel:
        assert not await check_health(channel, timeout_s=10)

        await health.set_serving(True)
        assert await check_health(channel, timeout_s=10)
        assert health.is_serving
        response = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="some.Service")
        )
        assert response.status == health_pb2.HealthCheckResponse.SERVING

        await health.set_serving(False)
        assert not await check_health(channel, timeout_s=10)
    await server.stop(None)


async def test_a_server_that_is_absent_is_not_serving(tmp_path: Path) -> None:
    async with make_channel(f"unix:{tmp_path / 'x'}") as channel:
        assert not await check_health(channel, timeout_s=10)


async def test_waiting_spans_a_server_that_comes_late_and_gets_ready_later(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'x'}"
    async with make_channel(address, internal=True) as channel:
        waiting = asyncio.create_task(wait_until_serving(channel))
        while channel.get_state(try_to_connect=True) != grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            await channel.wait_for_state_change(channel.get_state())
        health = Health(())
        server = make_server(address, [health])
        await server.start()
        while channel.get_state() != grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(channel.get_state())
        assert not waiting.done()

        await health.set_serving(True)

        await waiting
        await server.stop(None)


async def test_waiting_for_a_server_without_a_health_service_fails(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'x'}"
    server = make_server(address, [])
    await server.start()
    async with make_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wait_until_serving(channel)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)

"""A server reports through the standard health service when it is ready."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.network.health import Health, ask_process
from shared.network.rpc import Servicer, make_channel, make_server
from tests.support.system.health import check_health
from tests.support.system.patience import PATIENCE_S
from tests.support.system.serving import wait_until_serving


@asynccontextmanager
async def running_server(address: str, *servicers: Servicer) -> AsyncIterator[None]:
    server = make_server(address, servicers)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def wait_for_state(channel: grpc.aio.Channel, wanted: grpc.ChannelConnectivity) -> None:
    while (state := channel.get_state(try_to_connect=True)) != wanted:
        await channel.wait_for_state_change(state)


async def test_a_server_is_not_serving_until_it_is_set_to_serving(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'x'}"
    health = Health(("some.Service",))
    async with running_server(address, health), make_channel(address) as channel:
        assert not await check_health(channel)

        await health.set_serving(True)
        assert await check_health(channel)
        assert health.is_serving

        await health.set_serving(False)
        assert not await check_health(channel)


async def test_each_service_has_the_servers_health(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'x'}"
    health = Health(("some.Service",))
    request = health_pb2.HealthCheckRequest(service="some.Service")
    async with running_server(address, health), make_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await health.set_serving(True)
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_process_is_identified_only_by_its_own_answer(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'x'}"
    health = Health(())
    async with make_channel(address) as channel:
        assert await ask_process(channel, os.getpid(), 0.01) is None
        async with running_server(address, health):
            assert await ask_process(channel, os.getpid(), PATIENCE_S) is False
            await health.set_serving(True)
            assert await ask_process(channel, os.getpid(), PATIENCE_S) is True
            assert await ask_process(channel, os.getppid(), PATIENCE_S) is None


async def test_an_absent_server_is_not_serving(tmp_path: Path) -> None:
    async with make_channel(f"unix:{tmp_path / 'x'}") as channel:
        assert not await check_health(channel)


async def test_waiting_covers_a_server_that_starts_late_and_becomes_ready_later(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'x'}"
    health = Health(())
    async with make_channel(address, internal=True) as channel:
        waiting = asyncio.create_task(wait_until_serving(channel))
        await wait_for_state(channel, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        async with running_server(address, health):
            await wait_for_state(channel, grpc.ChannelConnectivity.READY)
            assert not waiting.done()

            await health.set_serving(True)

            await waiting


async def test_waiting_for_a_server_without_a_health_service_fails(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'x'}"
    async with running_server(address), make_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wait_until_serving(channel)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED

"""The services on each of the scheduler's listeners."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

import grpc
import pytest

from lockstep.internal.v1 import exchange_pb2_grpc
from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.scheduler.scheduler_shell import running_cell
from tests.support.system.serving import wait_until_serving


async def code_of(call: Awaitable[object]) -> grpc.StatusCode:
    """The status code with which a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    code: grpc.StatusCode = error.value.code()
    return code


async def test_direct_clients_reach_neither_exchange_nor_admin_nor_the_state(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        exchange = exchange_pb2_grpc.ExchangeServiceStub(cell.channel).Exchange()
        admin = scheduler_pb2_grpc.SchedulerAdminServiceStub(cell.channel)
        assert await code_of(exchange.read()) is grpc.StatusCode.UNIMPLEMENTED
        request = scheduler_pb2.FlushPrefixCacheRequest()
        assert await code_of(admin.FlushPrefixCache(request)) is grpc.StatusCode.UNIMPLEMENTED
        state = cell.scheduler.GetState(scheduler_pb2.GetStateRequest())
        assert await code_of(state) is grpc.StatusCode.UNIMPLEMENTED


async def test_the_cells_listener_accepts_no_direct_calls(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(cell.cell_channel)
        request = scheduler_pb2.SchedulerServiceGenerateRequest()
        assert await code_of(scheduler.Generate(request).read()) is grpc.StatusCode.UNIMPLEMENTED
        assert await code_of(scheduler.Abort(scheduler_pb2.AbortRequest())) is grpc.StatusCode.UNIMPLEMENTED


async def test_both_listeners_report_the_same_health(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        for channel in (cell.channel, cell.cell_channel):
            await wait_until_serving(channel)

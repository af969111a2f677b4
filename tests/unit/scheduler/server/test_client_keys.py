"""What a direct client's key decides on the scheduler's client port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.v1 import common_pb2, scheduler_pb2
from services.scheduler.cell.events import AbortRequest, Event
from services.scheduler.core.batch.sequence import Priority
from services.scheduler.server.direct_clients import DirectClients, resolve_request
from shared.file_state import file_state
from shared.ids import RequestHandle
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.request.limits import ModelLimits
from shared.tenants.client_keys import Client
from shared.tenants.tenant import DEFAULT_TENANT, Tenant
from tests.support.clients.key_files import key_line, write_keys
from tests.support.clients.token_client import PROMPT, error_of, seeded
from tests.support.scheduler.scheduler_shell import Cell, running_cell

LIMITS = ModelLimits(context_length=512, logits_width=1000, num_pool_tokens=512)
KEY = (("x-api-key", "one"),)


@asynccontextmanager
async def keyed_cell(tmp_path: Path, **fields: Any) -> AsyncIterator[Cell]:
    """A scheduler that takes one key, with these fields."""
    keys = write_keys(tmp_path / "keys", key_line("one", "a", **fields))
    async with running_cell(tmp_path, client_keys=keys) as cell:
        await cell.wait_until_ready()
        yield cell


async def refusal(call: Any) -> tuple[str, str | None]:
    error = await error_of(call)
    return error.code().name, reason_of(status_from_rpc_error(error))


async def test_direct_calls_need_a_key_and_those_of_the_cell_port_do_not(tmp_path: Path) -> None:
    async with keyed_cell(tmp_path) as cell:
        for metadata in ((), (("authorization", "Bearer other"),)):
            call = cell.scheduler.Generate(seeded(PROMPT), metadata=metadata)
            assert await refusal(call) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cell.scheduler.Abort(scheduler_pb2.AbortRequest(request_id="a"), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        responses = [response async for response in cell.scheduler.Generate(seeded(PROMPT), metadata=KEY)]
        assert responses[-1].HasField("usage")
        assert (await cell.state()).ready


async def test_a_call_looks_at_the_file_of_keys_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with keyed_cell(tmp_path) as cell:
        looked_at: list[Path] = []

        def look(path: Path) -> Any:
            looked_at.append(path)
            return file_state(path)

        monkeypatch.setattr("shared.tenants.client_keys.file_state", look)
        [response async for response in cell.scheduler.Generate(seeded(PROMPT), metadata=KEY)]
        assert len(looked_at) == 1
        await cell.scheduler.Abort(scheduler_pb2.AbortRequest(request_id="a"), metadata=KEY)
        assert len(looked_at) == 2


async def test_priority_and_choices_are_limited_by_the_key(tmp_path: Path) -> None:
    async with keyed_cell(tmp_path, max_in_flight=2, max_priority="LOW") as cell:
        request = seeded(PROMPT)
        request.priority = common_pb2.PRIORITY_NORMAL
        assert (await refusal(cell.scheduler.Generate(request, metadata=KEY)))[1] == "PERMISSION_DENIED"
        request = seeded(PROMPT)
        request.sampling.n = 3
        assert (await refusal(cell.scheduler.Generate(request, metadata=KEY)))[1] == "INVALID_REQUEST"


def test_a_submission_has_the_clients_tenant_and_its_priority() -> None:
    tenant = Tenant("a", 2.0, max_in_flight=3)
    client = Client(tenant, common_pb2.PRIORITY_LOW)
    submission = resolve_request(RequestHandle(1), seeded(PROMPT), LIMITS, client=client)
    assert (submission.tenant, submission.priority) == (tenant, Priority.LOW)
    assert resolve_request(RequestHandle(1), seeded(PROMPT), LIMITS).tenant == DEFAULT_TENANT


async def test_an_abort_names_the_clients_tenant() -> None:
    events: list[Event] = []
    direct_clients = DirectClients(lambda: LIMITS, events.append)
    request = scheduler_pb2.AbortRequest(request_id="x")
    direct_clients.abort(request, Client(Tenant("a"), common_pb2.PRIORITY_LOW))
    direct_clients.abort(request)
    assert events == [AbortRequest("x", "a"), AbortRequest("x", "default")]

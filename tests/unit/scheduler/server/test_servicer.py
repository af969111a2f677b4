"""Calls of operators to the scheduler, over real gRPC."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from lockstep.internal.v1 import worker_pb2
from lockstep.v1 import scheduler_pb2
from tests.support.clients.token_client import Response, generate_tokens, read_to_end, seeded
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.gated_worker import GatedWorker
from tests.support.scheduler.scheduler_shell import Cell, running_cell

PROMPT = [5] * 40


async def flush(cell: Cell) -> int:
    """Flush the prefix cache; returns the reported number of blocks."""
    response = await cell.admin.FlushPrefixCache(scheduler_pb2.FlushPrefixCacheRequest())
    num_blocks: int = response.num_blocks
    return num_blocks


async def num_cached_tokens(cell: Cell) -> int:
    """The number of cached prompt tokens that a request reports."""
    completion = await generate_tokens(cell.scheduler, seeded(PROMPT, max_tokens=2))
    assert completion.finish is not None
    return completion.finish.usage.num_cached_tokens


async def test_a_flushed_cache_is_empty(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        assert [await num_cached_tokens(cell) for _ in range(2)] == [0, 32]
        assert await flush(cell) == 2
        assert (await cell.state()).num_cached_blocks == 0
        assert await num_cached_tokens(cell) == 0


async def test_an_empty_cache_can_be_flushed(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        assert await flush(cell) == 0
        await cell.wait_until_ready()
        assert await flush(cell) == 0


async def test_a_request_in_flight_survives_a_flush_and_its_blocks_are_not_shared(tmp_path: Path) -> None:
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until_ready()
        worker.gate.clear()
        call = cell.scheduler.Generate(seeded(PROMPT, max_tokens=20))
        await call.read()
        await flush(cell)
        worker.gate.set()
        responses: list[Response] = []
        await read_to_end(call, responses)
        tokens = [token_id for response in responses for token_id in response.token_ids]
        assert tokens == expected_completion(PROMPT, 0, 20)
        assert await num_cached_tokens(cell) == 0


async def test_steps_are_reported_by_rank_and_kind(tmp_path: Path) -> None:
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker, enable_mixed_steps=True) as cell:
        await cell.wait_until_ready()
        worker.gate.clear()
        first = cell.scheduler.Generate(seeded([1], max_tokens=400))
        await first.read()
        second = asyncio.create_task(generate_tokens(cell.scheduler, seeded([2], max_tokens=2)))
        await cell.wait_until(lambda state: state.num_waiting + state.num_running == 2)
        worker.gate.set()
        await second
        first.cancel()
        await cell.wait_until_free()
        state = await cell.state()
    [rank] = state.rank_steps
    kinds = [worker_pb2.StepKind.Name(request.kind) for request in cell.worker.requests]
    assert rank.num_prefill_steps == kinds.count("STEP_KIND_PREFILL") == 1
    assert rank.num_mixed_steps == kinds.count("STEP_KIND_MIXED") == 1
    assert rank.num_decode_steps == kinds.count("STEP_KIND_DECODE") > 0
    assert (state.num_prefill_steps, state.num_decode_steps) == (2, rank.num_decode_steps)


async def test_integrity_is_checked_once_per_idle_period_despite_heartbeats(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        await generate_tokens(cell.scheduler, seeded([1], max_tokens=2))
        await cell.wait_until(lambda _: cell.server.idle_check.num_checks)
        num_heard = cell.worker.num_heard
        await cell.wait_until(lambda _: cell.worker.num_heard > num_heard + 4)
        assert (cell.server.idle_check.num_checks, cell.server.idle_check.num_failures) == (1, 0)


async def test_lost_epochs_are_counted(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        assert (await cell.state()).num_lost_epochs == 0
        cell.worker.lose_link_at = 2
        await generate_tokens(cell.scheduler, seeded([1], max_tokens=9))
        assert (await cell.state()).num_lost_epochs == 1


async def test_the_state_tells_what_happened_and_when_and_what_each_tenant_has(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        before = time.time()
        await cell.wait_until_ready()
        await cell.admin.Drain(scheduler_pb2.DrainRequest(dp_rank=0))
        waiting = cell.scheduler.Generate(seeded([1], max_tokens=2))
        await cell.wait_until(lambda state: state.num_waiting)
        state = await cell.state()
        waiting.cancel()
    attached, draining = state.events
    assert (attached.number, attached.kind, [*attached.dp_ranks]) == (1, scheduler_pb2.CellEvent.KIND_ATTACHED, [0])
    assert not attached.HasField("duration")
    assert (draining.number, draining.kind) == (2, scheduler_pb2.CellEvent.KIND_DRAINING)
    assert draining.reason == "an operator asked for it"
    times = [event.time.ToMilliseconds() / 1000 for event in (attached, draining, state)]
    assert before - 0.1 < times[0] <= times[1] <= times[2] < time.time() + 0.1
    assert [(tenant.name, tenant.num_waiting, tenant.num_in_flight) for tenant in state.tenants] == [("default", 1, 1)]

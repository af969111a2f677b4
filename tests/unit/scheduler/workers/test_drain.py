"""Planned stops over real gRPC: workers that say that they are leaving, and ranks that an operator drains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from lockstep.v1 import scheduler_pb2
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.clients.token_client import generate_tokens, seeded
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.gated_worker import GatedWorker
from tests.support.scheduler.scheduler_shell import Cell, running_cell
from tests.support.scheduler.worker_peer import WorkerPeer
from tests.support.system.patience import PATIENCE_S


async def until_unlinked(cell: Cell) -> None:
    """Return when no replica is linked."""
    while cell.server.clients:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)


async def wait_until_attached(cell: Cell) -> None:
    await cell.wait_until(lambda state: all(rank.is_attached for rank in state.rank_steps))


async def test_a_worker_that_is_leaving_is_drained_and_its_stream_closed(tmp_path: Path) -> None:
    leaving, other = GatedWorker(is_open=True), WorkerPeer()
    async with running_cell(tmp_path, leaving, other) as cell:
        await wait_until_attached(cell)
        leaving.gate.clear()
        # On equal terms the first rank is preferred.
        begun = asyncio.create_task(generate_tokens(cell.scheduler, seeded([1, 5], max_tokens=9)))
        await cell.wait_until(lambda state: state.rank_steps[0].num_running)
        leaving.ledger.is_leaving = True
        await cell.wait_until(lambda state: state.rank_steps[0].is_draining)
        later = await generate_tokens(cell.scheduler, seeded([2, 5], max_tokens=9))
        assert later.token_ids == expected_completion([2, 5], 0, 9)
        assert (await cell.state()).rank_steps[0].num_running == 1
        leaving.gate.set()
        assert (await begun).token_ids == expected_completion([1, 5], 0, 9)
        await cell.wait_until(lambda state: not state.rank_steps[0].is_attached)
        # It claims it again once it has been restarted.
        leaving.ledger.is_leaving = False
        await wait_until_attached(cell)
        state = await cell.state()
        assert not any(rank.is_draining for rank in state.rank_steps)
        assert (state.num_lost_epochs, state.num_suspects, state.num_recoveries) == (0, 0, 0)
    assert (leaving.num_last_words, other.num_last_words) == (1, 0)
    assert leaving.attaches[0].drain_time.seconds == 30


async def test_workers_hear_a_last_word_when_the_scheduler_ends_after_its_last_replica(tmp_path: Path) -> None:
    async with running_cell(tmp_path, WorkerPeer(), WorkerPeer()) as cell:
        await wait_until_attached(cell)
        # A replica may be on its way to a scheduler that has just started.
        await cell.server.release_workers()
        replica = cell.exchange()
        assert (await replica.read()).HasField("cell_info")
        await cell.server.release_workers()
        assert [worker.num_last_words for worker in cell.workers] == [0, 0]
        replica.cancel()
        await asyncio.wait_for(until_unlinked(cell), PATIENCE_S)
        await cell.server.release_workers()
        assert [worker.num_last_words for worker in cell.workers] == [1, 1]


async def test_a_link_that_the_scheduler_gives_up_ends_without_a_last_word(tmp_path: Path) -> None:
    worker = WorkerPeer()
    async with running_cell(tmp_path, worker, worker_silence_s=1.0) as cell:
        await wait_until_attached(cell)
        worker.is_silent = True
        await cell.wait_until(lambda state: state.num_lost_epochs)
        worker.is_silent = False
        await wait_until_attached(cell)
    assert worker.num_last_words == 0


async def test_an_operator_drains_a_rank_and_takes_it_back(tmp_path: Path) -> None:
    async with running_cell(tmp_path, WorkerPeer(), WorkerPeer()) as cell:
        await wait_until_attached(cell)
        for _ in range(2):
            await cell.admin.Drain(scheduler_pb2.DrainRequest(dp_rank=0))
        assert [rank.is_draining for rank in (await cell.state()).rank_steps] == [True, False]
        for number in range(3):
            await generate_tokens(cell.scheduler, seeded([number, 5], max_tokens=3))
        assert (not cell.workers[0].requests, not cell.workers[1].requests) == (True, False)
        for _ in range(2):
            await cell.admin.Undrain(scheduler_pb2.UndrainRequest(dp_rank=0))
        await generate_tokens(cell.scheduler, seeded([9, 5], max_tokens=3))
        assert cell.workers[0].requests


@pytest.mark.parametrize("rank", [None, 2])
async def test_a_rank_that_does_not_exist_cannot_be_drained(tmp_path: Path, rank: int | None) -> None:
    async with running_cell(tmp_path, WorkerPeer(), WorkerPeer()) as cell:
        for call in (
            cell.admin.Drain(scheduler_pb2.DrainRequest(dp_rank=rank)),
            cell.admin.Undrain(scheduler_pb2.UndrainRequest(dp_rank=rank)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert reason_of(status_from_rpc_error(error.value)) == "INVALID_REQUEST"

"""A cell of several DP ranks over real gRPC: attach, loss, restart, and competing schedulers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from lockstep.internal.v1 import worker_pb2
from services.scheduler.cell.domains import attach, attach_events, scheduler_claim
from shared.errors import StaleEpochError
from shared.network.heartbeat import LEASE_S
from tests.support.clients.token_client import error_of, generate_tokens, seeded
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.gated_worker import GatedWorker
from tests.support.scheduler.scheduler_shell import Cell, running_cell
from tests.support.scheduler.worker_peer import WorkerPeer
from tests.support.system.patience import PATIENCE_S


async def wait_until_attached(cell: Cell) -> None:
    """Wait until every rank is attached."""
    await cell.wait_until(lambda state: all(rank.is_attached for rank in state.rank_steps))


def step_keys(worker: WorkerPeer) -> list[tuple[int, int, int]]:
    """The epoch, id and kind of each of a worker's steps."""
    return [(request.epoch, request.step_id, request.kind) for request in worker.requests]


async def test_uncoupled_ranks_share_the_requests_and_step_independently(tmp_path: Path) -> None:
    async with running_cell(tmp_path, WorkerPeer(), WorkerPeer()) as cell:
        await wait_until_attached(cell)
        prompts = [[number, 5] for number in range(1, 5)]
        answers = await asyncio.gather(
            *(generate_tokens(cell.scheduler, seeded(prompt, max_tokens=9)) for prompt in prompts)
        )
        assert [answer.token_ids for answer in answers] == [expected_completion(prompt, 0, 9) for prompt in prompts]
        # A step that was sent ahead is still on its way.
        await cell.wait_until_free()
        state = await cell.state()
    assert [rank.num_dummy_steps for rank in state.rank_steps] == [0, 0]
    for rank, worker in zip(state.rank_steps, cell.workers, strict=True):
        assert len(worker.requests) == rank.num_prefill_steps + rank.num_decode_steps > 0
        assert not any(request.num_tokens_across_dp for request in worker.requests)
        assert rank.num_blocks == worker.num_blocks


async def test_coupled_ranks_run_the_same_steps_under_one_epoch(tmp_path: Path) -> None:
    async with running_cell(tmp_path, WorkerPeer(), WorkerPeer(), coupled=True) as cell:
        await wait_until_attached(cell)
        answer = await generate_tokens(cell.scheduler, seeded([1, 2, 3], max_tokens=9))
        assert answer.token_ids == expected_completion([1, 2, 3], 0, 9)
        await cell.wait_until_free()
        state = await cell.state()
    busy, idle = sorted(cell.workers, key=lambda worker: worker.requests[0].is_dummy)
    assert step_keys(busy) == step_keys(idle)
    assert all(step.is_dummy for step in idle.requests)
    assert sorted(busy.requests[0].num_tokens_across_dp) == [1, 3]
    assert sum(rank.num_dummy_steps for rank in state.rank_steps) == len(idle.requests)


async def test_a_lost_uncoupled_rank_leaves_its_work_to_the_other(tmp_path: Path) -> None:
    lost, other = GatedWorker(is_open=True), GatedWorker(is_open=True)
    async with running_cell(tmp_path, lost, other) as cell:
        await wait_until_attached(cell)
        lost.lose_link_at = 3
        prompts = [[number, 5] for number in range(1, 5)]
        answers = await asyncio.gather(
            *(generate_tokens(cell.scheduler, seeded(prompt, max_tokens=30)) for prompt in prompts)
        )
        assert [answer.token_ids for answer in answers] == [expected_completion(prompt, 0, 30) for prompt in prompts]
        resumed = [answer.finish for answer in answers if answer.finish and answer.finish.HasField("recovery")]
        assert {finish.recovery.resume_count for finish in resumed} == {1}
        assert 0 < len(resumed) < len(answers)
        state = await cell.state()
        assert (state.num_lost_epochs, len(other.attaches)) == (1, 1)


async def test_a_coupled_domain_is_lost_and_attached_as_a_whole(tmp_path: Path) -> None:
    async with running_cell(tmp_path, WorkerPeer(), WorkerPeer(), coupled=True) as cell:
        await wait_until_attached(cell)
        first, second = cell.workers
        first.lose_link_at = 4
        answer = await generate_tokens(cell.scheduler, seeded([1, 2, 3], max_tokens=9))
        assert answer.token_ids == expected_completion([1, 2, 3], 0, 9)
        assert answer.finish is not None
        assert answer.finish.recovery.resume_count == 1
        assert first.requests[-1].epoch == second.requests[-1].epoch > 1
        assert len(first.restarts) == len(second.restarts)


async def test_if_one_of_two_coupled_groups_restarted_alone_both_are_restarted(tmp_path: Path) -> None:
    async with running_cell(tmp_path, WorkerPeer(), WorkerPeer(), coupled=True) as cell:
        await wait_until_attached(cell)
        await generate_tokens(cell.scheduler, seeded([1, 2, 3], max_tokens=3))
        first, second = cell.workers
        first.ledger = type(first.ledger)()
        await cell.wait_until(lambda _: first.restarts and second.restarts)
        assert [len(first.restarts), len(second.restarts)] == [1, 1]
        answer = await generate_tokens(cell.scheduler, seeded([5], max_tokens=3))
        assert answer.token_ids == expected_completion([5], 0, 3)


async def test_a_stuck_group_is_restarted(tmp_path: Path) -> None:
    worker = WorkerPeer()
    worker.response.is_stuck = True
    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until(lambda _: worker.restarts)
        assert worker.restarts[0] == worker_pb2.RestartRequest(epoch=1, scheduler_instance_id="instance")
        assert not (await cell.state()).ready
        worker.response.is_stuck = False
        await cell.wait_until_ready()


class SlowToRestart(WorkerPeer):
    """A stuck group that, once its gate is open, refuses the requested restart and is no longer stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.response.is_stuck = True
        self.is_asked = asyncio.Event()
        self.gate = asyncio.Event()

    async def Restart(
        self, request: worker_pb2.RestartRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.RestartResponse:
        self.is_asked.set()
        await self.gate.wait()
        self.response.is_stuck = False
        raise StaleEpochError("the caller does not hold the group under this epoch", epoch=1)


async def test_a_group_is_offered_the_next_epoch_once_it_has_answered_or_refused_its_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "RETRY_DELAY_S", 0.0)
    worker = SlowToRestart()
    async with running_cell(tmp_path, worker) as cell:
        await worker.is_asked.wait()
        # After this many answers from a server in the same loop, an offer that was sent would have arrived.
        for _ in range(50):
            await cell.state()
        assert len(worker.attaches) == 1
        worker.gate.set()
        await cell.wait_until_ready()
        assert len(worker.attaches) == 2


@pytest.mark.parametrize("kind", [attach_events.RetryDue, attach_events.Accepted])
async def test_a_bug_in_the_attach_protocol_ends_the_scheduler(
    kind: type[attach_events.AttachEvent],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    on_event = attach.DomainAttach.on_event

    def fail(self: attach.DomainAttach, event: attach_events.AttachEvent, now: float) -> list[attach_events.Command]:
        if isinstance(event, kind):
            raise ValueError("planted")
        return on_event(self, event, now)

    worker = WorkerPeer()
    worker.response.is_stuck = True
    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until(lambda _: worker.restarts)
        monkeypatch.setattr(attach.DomainAttach, "on_event", fail)
        async with asyncio.timeout(PATIENCE_S):
            await cell.server.failed.wait()
    assert "the scheduler exits: a bug" in caplog.text
    assert "ValueError: planted" in caplog.text


async def test_a_cell_is_ready_with_its_first_rank(tmp_path: Path) -> None:
    missing = GatedWorker()
    async with running_cell(tmp_path, WorkerPeer(), missing) as cell:
        await cell.wait_until_ready()
        assert [rank.is_attached for rank in (await cell.state()).rank_steps] == [True, False]
        answer = await generate_tokens(cell.scheduler, seeded([5], max_tokens=3))
        assert answer.token_ids == expected_completion([5], 0, 3)
        missing.gate.set()
        await wait_until_attached(cell)


async def test_groups_that_disagree_are_not_used(tmp_path: Path) -> None:
    other = WorkerPeer()
    other.response.context_length = 7
    async with running_cell(tmp_path, WorkerPeer(), other, coupled=True) as cell:
        await cell.wait_until(lambda _: len(other.attaches) > 1)
        assert not (await cell.state()).ready
        other.response.context_length = 512
        await wait_until_attached(cell)


async def test_a_silent_worker_is_dropped_and_attached_again(tmp_path: Path) -> None:
    async with running_cell(tmp_path, worker_silence_s=1.0) as cell:
        await cell.wait_until_ready()
        cell.worker.is_silent = True
        await cell.wait_until(lambda state: state.num_lost_epochs == 1)
        cell.worker.is_silent = False
        await cell.wait_until_ready()
        assert cell.worker.attaches[-1].epoch > 1


async def test_an_idle_worker_gets_heartbeats(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        num_heard = cell.worker.num_heard
        await cell.wait_until(lambda _: cell.worker.num_heard > num_heard + 1)
        assert cell.worker.ledger.heard_at > 0


async def test_a_scheduler_whose_worker_was_claimed_by_another_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_claim, "LEASE_S", 0.1)
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        call = cell.scheduler.Generate(seeded([1], max_tokens=500))
        await call.read()
        # The lease has run out by the worker's clock.
        cell.worker.ledger.offer(9, "successor", time.monotonic() + LEASE_S + 1)
        cell.worker.ledger.on_heartbeat(1000, 9, "successor", time.monotonic() + PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            await cell.server.failed.wait()
        num_steps = len(cell.worker.requests)
        error = await error_of(cell.scheduler.Generate(seeded([1]), timeout=1))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (len(cell.worker.requests), len(cell.worker.attaches)) == (num_steps, 1)


async def test_a_scheduler_that_never_held_a_worker_waits_until_its_holder_is_gone(tmp_path: Path) -> None:
    worker = WorkerPeer()
    worker.ledger.offer(5, "holder", time.monotonic())
    worker.ledger.on_heartbeat(1000, 5, "holder", time.monotonic())
    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until(lambda _: worker.num_refused)
        assert not (await cell.state()).ready
        worker.ledger.end_stream(1000)
        await cell.wait_until_ready()
        assert worker.attaches[-1].epoch > 5


class RefusingWorker(WorkerPeer):
    """Its first stream gets headers and then an error."""

    num_refusals = 0

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> None:
        if not self.num_refusals:
            self.num_refusals += 1
            await context.send_initial_metadata(())
            await asyncio.sleep(0.1)
            raise StaleEpochError("the epoch was superseded", epoch=1)
        await super().Execute(request_iterator, context)


async def test_a_domain_whose_stream_is_refused_was_never_attached(tmp_path: Path) -> None:
    worker = RefusingWorker()
    async with running_cell(tmp_path, worker) as cell:
        await wait_until_attached(cell)
        answer = await generate_tokens(cell.scheduler, seeded([1, 2, 3], max_tokens=9))
        assert answer.token_ids == expected_completion([1, 2, 3], 0, 9)
        assert (worker.num_refusals, (await cell.state()).num_lost_epochs) == (1, 0)

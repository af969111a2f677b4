"""A group that was asked to end: the scheduler learns of it, drains the group, and the process ends."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from lockstep.internal.v1 import worker_pb2
from lockstep.internal.v1.introduction_pb2 import Introduction
from shared.wire import introduce_self
from tests.support.worker.worker_service import Worker, attach_request, error_of, prefill_of, read, request, rest_of
from tests.support.worker.worker_steps import decode_step, heartbeat_request


def leave(worker: Worker) -> None:
    worker.end.leave("asked to end")
    worker.servicer.leave()


async def read_leaving(call: Any) -> None:
    """Read until the worker says that it is leaving."""
    while not (await call.read()).heartbeat.is_leaving:
        pass


async def test_a_group_without_a_scheduler_ends_at_once(worker: Worker) -> None:
    leave(worker)
    assert worker.end.stopping.is_set()


async def test_a_group_whose_stream_has_ended_ends_at_once(worker: Worker) -> None:
    await worker.attach(1, drain_s=30.0)
    await worker.run(prefill_of())
    leave(worker)
    assert worker.end.stopping.is_set()


async def test_a_held_group_says_that_it_is_leaving_and_runs_steps_until_its_stream_is_closed(worker: Worker) -> None:
    await worker.attach(1, drain_s=30.0)
    call = await worker.execute()
    await call.write(request(prefill_of()))
    await read(call)
    leave(worker)
    await read_leaving(call)
    for step_id in (2, 3):
        await call.write(request(decode_step(step_id=step_id)))
        assert (await read(call)).step_id == step_id
    assert not worker.end.stopping.is_set()
    await call.done_writing()
    await rest_of(call)
    await worker.end.stopping.wait()


@pytest.mark.parametrize("epoch", [0, 2])
async def test_a_group_that_is_leaving_refuses_every_claim(worker: Worker, epoch: int) -> None:
    await worker.attach(1, drain_s=30.0)
    call = await worker.execute()
    await call.write(request(prefill_of()))
    await read(call)
    leave(worker)
    await read_leaving(call)
    code, reason, _ = await error_of(worker.attach(epoch, "one"))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")


async def test_a_cancelled_stream_ends_a_group_that_is_leaving_too(worker: Worker) -> None:
    await worker.attach(1, drain_s=30.0)
    call = await worker.execute()
    await call.write(request(prefill_of()))
    await read(call)
    leave(worker)
    call.cancel()
    await worker.end.stopping.wait()


async def test_a_group_held_by_a_scheduler_that_does_not_drain_ends_at_once(worker: Worker) -> None:
    await worker.attach(1)
    call = await worker.execute()
    await call.write(request(prefill_of()))
    await read(call)
    leave(worker)
    assert worker.end.stopping.is_set()


async def test_a_group_that_its_scheduler_does_not_drain_in_time_ends_by_itself(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.server.departure._DRAIN_MARGIN_S", 0.0)
    await worker.attach(1, drain_s=0.01)
    call = await worker.execute()
    await call.write(request(prefill_of()))
    await read(call)
    leave(worker)
    await worker.end.stopping.wait()


def heartbeat(
    *, is_staying: bool = False, is_last: bool = False, epoch: int = 1, scheduler: str = "one"
) -> worker_pb2.StepRequest:
    """A heartbeat of the scheduler that holds the group."""
    message = heartbeat_request(epoch, scheduler)
    message.heartbeat.is_staying, message.heartbeat.is_last = is_staying, is_last
    return message


async def test_a_group_whose_scheduler_stays_says_that_it_is_leaving_when_it_does_not_stay_any_more(
    worker: Worker,
) -> None:
    await worker.attach(1, drain_s=600.0)
    call = await worker.execute()
    await call.write(request(prefill_of()))
    await read(call)
    leave(worker)
    await call.write(heartbeat(is_staying=True))
    for step_id in (2, 3):
        await call.write(request(decode_step(step_id=step_id)))
        message = await call.read()
        while not message.step_id:
            assert not message.heartbeat.is_leaving
            message = await call.read()
        assert message.step_id == step_id
    assert not worker.end.stopping.is_set()
    await call.write(heartbeat(is_staying=False))
    await read_leaving(call)
    await call.done_writing()
    await rest_of(call)
    await worker.end.stopping.wait()


async def test_a_group_whose_scheduler_stays_ends_with_its_stream(worker: Worker) -> None:
    await worker.attach(1, drain_s=600.0)
    call = await worker.execute()
    await call.write(request(prefill_of()))
    await read(call)
    leave(worker)
    await call.write(heartbeat(is_staying=True))
    await call.done_writing()
    await rest_of(call)
    await worker.end.stopping.wait()


async def attach(worker: Worker, epoch: int = 1, scheduler: str = "one") -> Any:
    """Attach a scheduler that says last words, and open its stream; returns the call once the worker has heard it."""
    claim = attach_request(epoch, scheduler, drain_s=600.0)
    claim.introduction.CopyFrom(Introduction(**introduce_self().encode()))
    await worker.stub.Attach(claim)
    call = await worker.execute(epoch, scheduler)
    await call.write(request(prefill_of(), epoch))
    await read(call)
    return call


async def lose(worker: Worker, call: Any) -> None:
    """Break the stream without a word; returns once the worker has noticed."""
    call.cancel()
    while worker.servicer._has_streams:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_asked_first", [True, False])
async def test_a_group_whose_scheduler_has_died_waits_for_the_next_one_and_serves_it(
    worker: Worker, is_asked_first: bool
) -> None:
    first = await attach(worker)
    if is_asked_first:
        leave(worker)
    await lose(worker, first)
    if not is_asked_first:
        leave(worker)
    assert not worker.end.stopping.is_set()
    second = await attach(worker, 2, "two")
    await second.write(heartbeat(is_staying=True, epoch=2, scheduler="two"))
    await second.write(request(decode_step(step_id=2), 2))
    assert (await read(second)).step_id == 2
    await second.write(heartbeat(epoch=2, scheduler="two"))
    await read_leaving(second)
    await second.write(heartbeat(is_last=True, epoch=2, scheduler="two"))
    await second.done_writing()
    await rest_of(second)
    await worker.end.stopping.wait()


async def test_a_group_that_has_said_that_it_leaves_can_be_claimed_again_when_its_scheduler_dies(
    worker: Worker,
) -> None:
    first = await attach(worker)
    leave(worker)
    await first.write(heartbeat(is_staying=True))
    await first.write(heartbeat(is_staying=False))
    await read_leaving(first)
    await lose(worker, first)
    second = await attach(worker, 2, "two")
    assert not worker.end.stopping.is_set()
    second.cancel()


@pytest.mark.parametrize("is_asked_first", [True, False])
async def test_a_group_that_has_heard_a_last_word_waits_for_no_scheduler(worker: Worker, is_asked_first: bool) -> None:
    call = await attach(worker)
    if is_asked_first:
        leave(worker)
    await call.write(heartbeat(is_last=True))
    await call.done_writing()
    await rest_of(call)
    while worker.servicer._has_streams:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    if not is_asked_first:
        assert not worker.end.stopping.is_set()
        leave(worker)
    assert worker.end.stopping.is_set()


async def test_a_last_word_is_forgotten_with_the_next_claim(worker: Worker) -> None:
    call = await attach(worker)
    await call.write(heartbeat(is_last=True))
    await call.done_writing()
    await rest_of(call)
    second = await attach(worker, 2, "two")
    await lose(worker, second)
    leave(worker)
    assert not worker.end.stopping.is_set()


async def test_a_group_whose_next_scheduler_does_not_come_ends_when_the_drain_time_is_over(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.server.departure._DRAIN_MARGIN_S", 0.01 - 600.0)
    await lose(worker, await attach(worker))
    leave(worker)
    assert not worker.end.stopping.is_set()
    await worker.end.stopping.wait()

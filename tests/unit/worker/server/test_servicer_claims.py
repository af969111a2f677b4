"""Claims on a worker: epochs, streams that end, and steps that do not return."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from torch import Tensor

from lockstep.internal.v1 import worker_pb2
from services.worker.forward.forward_context import get_forward_context
from services.worker.models.loader import LoadedModel
from services.worker.models.registry import CausalLM
from services.worker.process.exits import ExitCode
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.worker.worker_runner import WrappedModel, generate_alone, make_runner
from tests.support.worker.worker_service import (
    PROMPTS,
    Worker,
    attach_request,
    error_of,
    prefill_of,
    read,
    request,
    rest_of,
)
from tests.support.worker.worker_steps import decode_step


async def test_an_epoch_that_is_not_above_the_workers_own_is_stale(worker: Worker) -> None:
    code, reason, values = await error_of(worker.attach(0))
    assert (code, reason, values["epoch"]) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", "0")
    await worker.attach(5, "one")
    for epoch in (1, 5):
        code, reason, values = await error_of(worker.attach(epoch, "two"))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
        assert (values["epoch"], values["holder"]) == ("5", "")
    await worker.attach(6, "two")


async def test_an_open_stream_keeps_another_scheduler_out_until_it_ends(worker: Worker) -> None:
    await worker.attach(1, "one")
    call = await worker.execute()
    await call.write(request(prefill_of()))
    await read(call)
    code, reason, values = await error_of(worker.attach(2, "two"))
    assert (code, reason, values["holder"]) == (grpc.StatusCode.FAILED_PRECONDITION, "GROUP_HELD", "one")
    await call.done_writing()
    assert await rest_of(call) == []
    await worker.attach(2, "two")


async def test_epoch_0_asks_for_the_holder_of_the_group_and_changes_nothing(worker: Worker) -> None:
    await worker.attach(3, "one")
    call = await worker.execute(3, "one")
    await call.write(request(prefill_of(), epoch=3))
    await read(call)
    code, reason, values = await error_of(worker.attach(0, "two"))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
    assert (values["epoch"], values["holder"]) == ("3", "one")
    await call.write(request(decode_step(step_id=2), epoch=3))
    assert (await read(call)).step_id == 2
    await call.done_writing()
    assert await rest_of(call) == []
    _, _, values = await error_of(worker.attach(0, "two"))
    assert (values["epoch"], values["holder"]) == ("3", "")


async def test_a_schedulers_own_new_epoch_supersedes_its_open_stream(worker: Worker) -> None:
    await worker.attach(1)
    call = await worker.execute()
    await call.write(request(prefill_of()))
    await read(call)
    response = await worker.attach(2)
    assert (response.last_step_epoch, response.last_step_id) == (1, 1)
    _, reason, values = await error_of(read(call))
    assert (reason, values["epoch"]) == ("STALE_EPOCH", "2")
    await worker.run(prefill_of(), epoch=2)


async def test_a_claim_superseded_before_the_device_was_ready_is_refused(
    worker: Worker, hold_device: Callable[[], threading.Event]
) -> None:
    release = hold_device()
    first = asyncio.create_task(worker.attach(1))
    await wait_until_claimed(worker, 1)
    call = await worker.execute()
    second = asyncio.create_task(worker.attach(2))
    await wait_until_claimed(worker, 2)
    release.set()
    assert (await second).last_step_id == 0
    for superseded in (first, read(call)):
        _, reason, values = await error_of(superseded)
        assert (reason, values["epoch"]) == ("STALE_EPOCH", "2")


async def test_only_one_stream_runs_the_steps_of_an_epoch(worker: Worker) -> None:
    await worker.attach(1)
    first, second = await worker.execute(), worker.stub.Execute()
    await first.write(request(prefill_of()))
    await read(first)
    await second.write(request(decode_step(step_id=2)))
    _, reason, _ = await error_of(read(second))
    assert reason == "GROUP_HELD"
    await first.write(request(decode_step(step_id=2)))
    assert (await read(first)).step_id == 2


async def test_a_stale_schedulers_stream_does_not_end_the_current_claim(worker: Worker) -> None:
    await worker.attach(1, "old")
    await worker.attach(2, "new")
    _, reason, _ = await error_of(read(await worker.execute(1, "old")))
    assert reason == "STALE_EPOCH"
    assert len(await worker.run(prefill_of(), epoch=2, scheduler="new")) == 1


async def test_the_end_of_its_stream_ends_the_epoch(worker: Worker) -> None:
    await worker.attach(1)
    await worker.run(prefill_of())
    _, reason, _ = await error_of(read(worker.stub.Execute()))
    assert reason == "STALE_EPOCH"


class GatedModel(WrappedModel):
    """Once it `is_armed`, a forward pass waits at its beginning until `release` is set."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model)
        self.num_passes = 0
        self.is_armed = False
        self.entered = threading.Event()
        self.release = threading.Event()

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        self.num_passes += 1
        if self.is_armed:
            self.entered.set()
            self.release.wait()
        return super().forward(token_ids, positions)


async def stop_in_the_second_step(call: Any, model: GatedModel) -> None:
    """Send three steps, and wait until the device is in the second one."""
    await call.write(request(prefill_of()))
    await read(call)
    model.is_armed = True
    for step_id in (2, 3):
        await call.write(request(decode_step(step_id=step_id)))
    await asyncio.to_thread(model.entered.wait)


async def test_when_a_stream_is_cancelled_the_launched_step_returns_and_the_others_are_dropped(
    loading_worker: Worker, loaded: LoadedModel
) -> None:
    model = GatedModel(loaded.model)
    worker = loading_worker
    worker.open(make_runner(replace(loaded, model=model)))
    await worker.attach(1, "one")
    call = await worker.execute()
    await stop_in_the_second_step(call, model)
    model.is_armed = False
    call.cancel()
    # Once the worker has seen the end of the stream, it accepts the other scheduler's claim, and answers it when the
    # launched step has returned.
    attach = asyncio.create_task(attach_when_free(worker, 2, "two"))
    await wait_until_claimed(worker, 2)
    assert not attach.done()
    model.release.set()
    assert (await attach).last_step_id == 3
    tokens = await worker.run(prefill_of(), epoch=2, scheduler="two")
    assert tokens == [[generate_alone(loaded, prompt, 1)[0] for prompt in PROMPTS]]


async def test_an_attach_cancels_the_steps_that_have_not_begun(loading_worker: Worker, loaded: LoadedModel) -> None:
    model = GatedModel(loaded.model)
    worker = loading_worker
    worker.open(make_runner(replace(loaded, model=model)))
    await worker.attach(1)
    call = await worker.execute()
    await stop_in_the_second_step(call, model)
    attach = asyncio.create_task(worker.attach(2))
    await wait_until_claimed(worker, 2)
    model.release.set()
    await attach
    # The third never ran.
    assert model.num_passes == 2
    _, reason, values = await error_of(read(call))
    assert (reason, values["epoch"]) == ("STALE_EPOCH", "2")


class SlowModel(GatedModel):
    """While it is armed, a pass makes progress until it is released."""

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if self.is_armed:
            self.entered.set()
            while not self.release.wait(0.001):
                get_forward_context().progress.num_layers += 1
        return super().forward(token_ids, positions)


@pytest.mark.parametrize("stuck_s", [0.3])
async def test_a_step_that_makes_progress_is_not_stuck(
    loading_worker: Worker, loaded: LoadedModel, stuck_s: float
) -> None:
    model = SlowModel(loaded.model)
    worker = loading_worker
    worker.open(make_runner(replace(loaded, model=model)))
    await worker.attach(1)
    call = await worker.execute()
    await stop_in_the_second_step(call, model)
    attach = asyncio.create_task(worker.attach(2))
    await asyncio.wait([attach], timeout=3 * stuck_s)
    assert not attach.done()
    model.release.set()
    assert not (await attach).is_stuck


@pytest.mark.parametrize("stuck_s", [0.05])
async def test_a_worker_whose_step_does_not_return_reports_that_it_is_stuck_and_holds_the_epoch(
    worker: Worker, hold_device: Callable[[], threading.Event]
) -> None:
    await worker.attach(1)
    await worker.run(prefill_of())
    release = hold_device()
    response = await attach_when_free(worker, 2, "one")
    assert (response.is_stuck, response.num_blocks) == (True, 64)
    _, reason, values = await error_of(worker.attach(2, "two"))
    assert (reason, values["epoch"]) == ("STALE_EPOCH", "2")
    release.set()
    # The stuck step may return after all.
    assert len(await worker.run(prefill_of(), epoch=2)) == 1


@pytest.mark.parametrize("stuck_s", [0.05])
async def test_without_a_launched_step_an_attach_may_take_long(
    worker: Worker, hold_device: Callable[[], threading.Event], stuck_s: float
) -> None:
    release = hold_device()
    attach = asyncio.create_task(worker.attach(1))
    await wait_until_claimed(worker, 1)
    await asyncio.wait([attach], timeout=5 * stuck_s)
    release.set()
    assert not (await attach).is_stuck


async def test_only_the_epochs_holder_may_restart_the_process(worker: Worker) -> None:
    await worker.attach(3, "one")
    for epoch, scheduler in ((2, "one"), (3, "two")):
        restart = worker_pb2.RestartRequest(epoch=epoch, scheduler_instance_id=scheduler)
        code, reason, values = await error_of(worker.stub.Restart(restart))
        assert (code, reason, values["epoch"]) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", "3")
    await worker.stub.Restart(worker_pb2.RestartRequest(epoch=3, scheduler_instance_id="one"))
    assert await worker.ended.get() is ExitCode.RESTART
    assert worker.ended.empty()


async def attach_when_free(worker: Worker, epoch: int, scheduler: str) -> worker_pb2.AttachResponse:
    while True:
        try:
            return await worker.attach(epoch, scheduler)
        except grpc.aio.AioRpcError as error:
            if reason_of(status_from_rpc_error(error)) != "GROUP_HELD":
                raise


async def wait_until_claimed(worker: Worker, epoch: int) -> None:
    """Return once the worker's epoch is `epoch`; its Attach may not have been answered yet."""
    values = {"epoch": ""}
    while values["epoch"] != str(epoch):
        _, _, values = await error_of(worker.attach(0))


async def test_a_cancelled_attach_leaves_the_epoch_claimed(
    worker: Worker, hold_device: Callable[[], threading.Event]
) -> None:
    release = hold_device()
    call = worker.stub.Attach(attach_request(4))
    await wait_until_claimed(worker, 4)
    call.cancel()
    release.set()
    assert len(await worker.run(prefill_of(), epoch=4)) == 1

"""A worker whose device computes after the launch, as a GPU does: what its scheduler sees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
from torch import Tensor

from services.worker.models.loader import LoadedModel
from services.worker.runner.model_runner import Execution
from tests.support.worker.late_stream import LateStream
from tests.support.worker.worker_runner import WrappedModel, generate_alone, make_runner
from tests.support.worker.worker_service import PROMPTS, Worker, error_of, prefill_of, read, request, rest_of
from tests.support.worker.worker_steps import decode_step, unpack


@pytest.fixture
def late() -> Iterator[LateStream]:
    stream = LateStream()
    yield stream
    stream.close()


@pytest.fixture
def late_worker(loading_worker: Worker, loaded: LoadedModel, late: LateStream) -> Worker:
    """A worker that is being served, on a late device."""
    loading_worker.open(make_runner(loaded, execution=Execution(stream=late)))
    return loading_worker


async def test_steps_are_answered_in_order_with_the_tokens_of_a_plain_loop(
    late_worker: Worker, loaded: LoadedModel
) -> None:
    await late_worker.attach(1)
    tokens = await late_worker.run(prefill_of(), *(decode_step(step_id=step_id) for step_id in range(2, 9)))
    rows = [list(row) for row in zip(*tokens, strict=True)]
    assert rows == [generate_alone(loaded, prompt, 8) for prompt in PROMPTS]


async def test_steps_are_launched_while_the_device_computes_nothing(late_worker: Worker, late: LateStream) -> None:
    await late_worker.attach(1)
    call = await late_worker.execute()
    late.hold()
    for step in (prefill_of(), decode_step(step_id=2), decode_step(step_id=3)):
        await call.write(request(step))
    await asyncio.to_thread(late.wait_until_enqueued, 4)
    assert late.num_computed == 1
    late.release()
    await call.done_writing()
    assert [result.step_id for result in await rest_of(call)] == [1, 2, 3]


async def test_a_claim_waits_for_what_was_launched_under_the_last_one(
    late_worker: Worker, late: LateStream, loaded: LoadedModel
) -> None:
    await late_worker.attach(1)
    call = await late_worker.execute()
    late.hold()
    await call.write(request(prefill_of()))
    await asyncio.to_thread(late.wait_until_enqueued, 2)
    claim = asyncio.create_task(late_worker.attach(2))
    # The claim synchronizes with the device.
    await asyncio.to_thread(late.wait_until_enqueued, 3)
    assert not claim.done()
    late.release()
    response = await claim
    assert (response.last_step_epoch, response.last_step_id) == (1, 1)
    assert await late_worker.run(prefill_of(), epoch=2) == [[generate_alone(loaded, one, 1)[0] for one in PROMPTS]]


async def test_a_failure_on_the_device_fails_the_step_after_those_before_it(
    loading_worker: Worker, loaded: LoadedModel, late: LateStream
) -> None:
    class FailingModel(WrappedModel):
        def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
            if len(token_ids) == len(PROMPTS):
                raise RuntimeError("an illegal address")
            return super().forward(token_ids, positions)

    broken = replace(loaded, model=FailingModel(loaded.model))
    loading_worker.open(make_runner(broken, execution=Execution(stream=late)))
    await loading_worker.attach(1)
    call = await loading_worker.execute()
    late.hold()
    await call.write(request(prefill_of()))
    await call.write(request(decode_step(step_id=2)))
    await asyncio.to_thread(late.wait_until_enqueued, 3)
    late.release()
    first = await read(call)
    assert (first.step_id, len(unpack(first.token_ids))) == (1, len(PROMPTS))
    code, _, _ = await error_of(read(call))
    assert code == grpc.StatusCode.INTERNAL

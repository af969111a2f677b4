from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from torch import Tensor

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from lockstep.v1 import common_pb2
from services.worker.device_loop import DeviceLoop
from services.worker.drafts import Drafting
from services.worker.loader import LoadedModel
from services.worker.model_runner import ModelRunner
from services.worker.models.registry import CausalLM
from services.worker.ngram_drafts import LookupProposer, NgramProposer
from services.worker.sampling_defaults import SamplingDefaults
from services.worker.servicer import WorkerServicer
from services.worker.step import Int32Column, Step
from shared.rpc import make_channel, make_server, reason_of, status_from_rpc_error
from tests.support.tiny_llama import write_tiny_llama
from tests.support.worker_runner import WrappedModel, generate_alone, load_exact, make_runner
from tests.support.worker_steps import column, decode_step, make_enter, pack, prefill_step, to_request, unpack

PROMPTS = ([5, 9, 2, 44, 17], [3], [8, 1, 60, 33, 21, 4, 4, 90, 12])
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_exact(write_tiny_llama(tmp_path_factory.mktemp("model"), changes={"num_hidden_layers": 2}))


@dataclass
class Worker:
    """A served worker, and the scheduler's end of the links to it."""

    device: DeviceLoop
    servicer: WorkerServicer
    channel: grpc.aio.Channel
    stub: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def attach(self, epoch: int, scheduler: str = "one", **sizes: int) -> worker_pb2.AttachResponse:
        """Claim the worker."""
        response: worker_pb2.AttachResponse = await self.stub.Attach(attach_request(epoch, scheduler, **sizes))
        return response

    async def run(self, *steps: Step, epoch: int = 1) -> list[list[int]]:
        """Send all steps at once, end the stream, and return each step's tokens."""
        call = self.stub.Execute()
        for step in steps:
            await call.write(request(step, epoch))
        await call.done_writing()
        return [unpack(result.token_ids) async for result in call]


class RightProposer(LookupProposer):
    """Knows what the model says to the first prompt."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._text = [*PROMPTS[0], *generate_alone(loaded, PROMPTS[0], 20)]

    def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        """See `LookupProposer.look_up`."""
        return column(self._text[len(token_ids) : len(token_ids) + max_tokens])


def attach_request(epoch: int, scheduler: str = "one", **sizes: int) -> worker_pb2.AttachRequest:
    defaults = {"block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    return worker_pb2.AttachRequest(epoch=epoch, scheduler_instance_id=scheduler, **(defaults | sizes))


def request(step: Step, epoch: int = 1) -> worker_pb2.StepRequest:
    return to_request(replace(step, epoch=epoch))


@pytest.fixture
def device() -> Iterator[DeviceLoop]:
    loop = DeviceLoop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.stop()
    thread.join()


@pytest.fixture
async def loading_worker(device: DeviceLoop, tmp_path: Path) -> AsyncIterator[Worker]:
    servicer = WorkerServicer(device)
    address = f"unix:{tmp_path / 'worker.sock'}"
    server = make_server(address, [servicer], internal=True)
    await server.start()
    async with make_channel(address, internal=True) as channel:
        yield Worker(device, servicer, channel)
    await server.stop(0)


@pytest.fixture
def worker(loading_worker: Worker, loaded: LoadedModel) -> Worker:
    loading_worker.servicer.set_runner(make_runner(loaded))
    return loading_worker


@pytest.fixture
def hold_device(device: DeviceLoop) -> Iterator[Callable[[], threading.Event]]:
    """Keep the device busy until the event returned is set."""
    holds: list[threading.Event] = []

    def hold() -> threading.Event:
        release = threading.Event()
        device.submit(release.wait)
        holds.append(release)
        return release

    yield hold
    for release in holds:
        release.set()


def blocks_of(row: int) -> list[int]:
    """Blocks for 24 tokens, different ones for each row."""
    return list(range(6 * row, 6 * row + 6))


def prefill_of(prompts: Sequence[Sequence[int]] = PROMPTS, *, step_id: int = 1) -> Step:
    return prefill_step(
        *(make_enter(row, prompt, blocks_of(row)) for row, prompt in enumerate(prompts)), step_id=step_id
    )


async def error_of(awaitable: Any) -> tuple[grpc.StatusCode, str | None, dict[str, str]]:
    """The code, reason and values with which a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error_info:
        await awaitable
    status = status_from_rpc_error(error_info.value)
    info = error_details_pb2.ErrorInfo()
    if status.details:
        status.details[0].Unpack(info)
    return error_info.value.code(), reason_of(status), dict(info.metadata)


async def test_attach_tells_what_the_worker_is(worker: Worker, loaded: LoadedModel) -> None:
    response = await worker.attach(7)
    runner = make_runner(loaded)
    assert response.model_digest == loaded.facts.model_digest
    assert response.context_length == loaded.facts.context_length
    assert response.logits_width == loaded.facts.logits_width
    assert tuple(response.eos_token_ids) == loaded.facts.eos_token_ids
    assert (response.num_blocks, response.ops_backend, response.last_step_id) == (64, "reference", 0)
    assert response.numerics_fingerprint == runner.numerics_fingerprint


async def test_attach_tells_what_the_worker_drafts(loading_worker: Worker, loaded: LoadedModel) -> None:
    loading_worker.servicer.set_runner(make_runner(loaded))
    response = await loading_worker.attach(1)
    assert (response.num_draft_tokens, response.needs_all_tokens) == (0, False)
    loading_worker.servicer.set_runner(make_runner(loaded, drafting=Drafting(NgramProposer(), 6)))
    response = await loading_worker.attach(2)
    assert (response.num_draft_tokens, response.needs_all_tokens) == (6, True)


async def test_attach_tells_what_requests_leave_to_the_model(loading_worker: Worker, loaded: LoadedModel) -> None:
    loading_worker.servicer.set_runner(make_runner(loaded))
    assert (await loading_worker.attach(1)).default_sampling == common_pb2.SamplingParams()
    defaults = SamplingDefaults(max_tokens=9, temperature=0.0, top_k=0, top_p=0.5, repetition_penalty=1.5)
    facts = replace(loaded.facts, sampling_defaults=defaults)
    loading_worker.servicer.set_runner(make_runner(replace(loaded, facts=facts)))
    # What is 0 is said.
    assert (await loading_worker.attach(2)).default_sampling == common_pb2.SamplingParams(
        max_tokens=9, temperature=0.0, top_k=0, top_p=0.5, repetition_penalty=1.5
    )


async def test_a_worker_that_drafts_gives_the_same_tokens_in_fewer_steps(
    loading_worker: Worker, loaded: LoadedModel
) -> None:
    loading_worker.servicer.set_runner(make_runner(loaded, drafting=Drafting(RightProposer(loaded), 4)))
    await loading_worker.attach(1)
    call = loading_worker.stub.Execute()
    for step in (prefill_of(PROMPTS[:1]), *(decode_step(step_id=step_id) for step_id in range(2, 5))):
        await call.write(request(step))
    await call.done_writing()
    results = [result async for result in call]
    assert [unpack(result.counts) if result.HasField("counts") else None for result in results] == [None, [3], [5], [5]]
    assert [result.num_draft_tokens for result in results] == [0, 2, 4, 4]
    tokens = [token_id for result in results for token_id in unpack(result.token_ids)]
    assert tokens == generate_alone(loaded, PROMPTS[0], 14)


async def test_a_worker_that_loads_is_not_ready(loading_worker: Worker) -> None:
    code, reason, _ = await error_of(loading_worker.attach(1))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")


async def test_an_epoch_that_is_not_above_the_workers_own_is_stale(worker: Worker) -> None:
    code, reason, values = await error_of(worker.attach(0))
    assert (code, reason, values["epoch"]) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", "0")
    await worker.attach(5, "one")
    for epoch in (1, 5):
        code, reason, values = await error_of(worker.attach(epoch, "two"))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
        assert (values["epoch"], values["holder"]) == ("5", "one")
    await worker.attach(6, "two")


@pytest.mark.parametrize("name", ["block_size", "max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, 2**32 - 1])
async def test_a_size_out_of_range_is_refused_and_claims_nothing(worker: Worker, name: str, value: int) -> None:
    code, reason, _ = await error_of(worker.attach(1, "one", **{name: value}))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    await worker.attach(1)


async def test_steps_give_the_tokens_of_a_plain_loop_over_the_model(worker: Worker, loaded: LoadedModel) -> None:
    await worker.attach(1)
    tokens = await worker.run(prefill_of(), *(decode_step(step_id=step_id) for step_id in range(2, 9)))
    rows = [list(row) for row in zip(*tokens, strict=True)]
    assert rows == [generate_alone(loaded, prompt, 8) for prompt in PROMPTS]


async def test_results_come_in_the_order_of_steps_and_tell_the_device_time(worker: Worker) -> None:
    await worker.attach(3)
    call = worker.stub.Execute()
    for step in (prefill_of(), decode_step(step_id=2), decode_step(step_id=3)):
        await call.write(request(step, 3))
    results = [await call.read() for _ in range(3)]
    assert [(result.epoch, result.step_id) for result in results] == [(3, 1), (3, 2), (3, 3)]
    assert all(result.device_time_us > 0 for result in results)
    assert all(result.not_finite_rows == b"" for result in results)


async def test_a_stream_stands_before_it_has_a_result(worker: Worker) -> None:
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.initial_metadata()
    assert not call.done()


async def test_a_step_without_a_claim_is_stale(worker: Worker) -> None:
    _, reason, _ = await error_of(worker.run(prefill_of()))
    assert reason == "STALE_EPOCH"


@pytest.mark.parametrize("epoch", [0, 1, 3, 2**64 - 1])
async def test_a_step_of_another_epoch_is_stale(worker: Worker, epoch: int) -> None:
    await worker.attach(2)
    _, reason, values = await error_of(worker.run(prefill_of(), epoch=epoch))
    assert (reason, values["epoch"]) == ("STALE_EPOCH", "2")


@pytest.mark.parametrize("step_ids", [(0,), (2,), (1, 1), (1, 3), (1, 0)])
async def test_step_ids_count_from_one_without_gaps(worker: Worker, step_ids: tuple[int, ...]) -> None:
    await worker.attach(1)
    first, *others = step_ids
    steps = [prefill_of(step_id=first), *(decode_step(step_id=step_id) for step_id in others)]
    _, reason, _ = await error_of(worker.run(*steps))
    assert reason == "STEP_MISMATCH"


async def test_a_mismatch_comes_after_the_results_of_the_steps_before_it(worker: Worker) -> None:
    await worker.attach(1)
    call = worker.stub.Execute()
    for step in (prefill_of(), decode_step(step_id=2), decode_step(step_id=9)):
        await call.write(request(step))
    assert [(await call.read()).step_id for _ in range(2)] == [1, 2]
    _, reason, _ = await error_of(call.read())
    assert reason == "STEP_MISMATCH"


HOSTILE = {
    "kind unset": {"kind": worker_pb2.STEP_KIND_UNSPECIFIED},
    "kind unknown": {"kind": 77},
    "half a number": {"leave_slots": b"\0\0\0\0\0"},
    "slot far out of range": {"leave_slots": pack([2**31 - 1])},
    "negative slot": {"decode_slots": pack([-1])},
    "block far out of range": {"append_slots": pack([0]), "append_block_ids": pack([2**31 - 1])},
    "negative block": {"append_slots": pack([0]), "append_block_ids": pack([-(2**31)])},
    "appends without blocks": {"append_slots": pack([0] * 1000)},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE.keys())
async def test_hostile_columns_end_the_epoch_and_leave_the_worker_usable(
    worker: Worker, loaded: LoadedModel, changes: dict[str, Any]
) -> None:
    await worker.attach(1)
    fields: dict[str, Any] = {"epoch": 1, "step_id": 2, "kind": worker_pb2.STEP_KIND_DECODE} | changes
    call = worker.stub.Execute()
    await call.write(request(prefill_of()))
    await call.write(worker_pb2.StepRequest(**fields))
    await call.read()
    code, reason, _ = await error_of(call.read())
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STEP_MISMATCH")
    assert (await worker.attach(2)).last_step_id == 1
    assert await worker.run(prefill_of(), epoch=2) == [[generate_alone(loaded, prompt, 1)[0] for prompt in PROMPTS]]


async def test_an_open_stream_keeps_another_scheduler_out_until_it_ends(worker: Worker) -> None:
    await worker.attach(1, "one")
    call = worker.stub.Execute()
    await call.initial_metadata()
    code, reason, values = await error_of(worker.attach(2, "two"))
    assert (code, reason, values["holder"]) == (grpc.StatusCode.FAILED_PRECONDITION, "GROUP_HELD", "one")
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    await worker.attach(2, "two")


async def test_a_schedulers_own_new_epoch_supersedes_its_open_stream(worker: Worker) -> None:
    await worker.attach(1)
    call = worker.stub.Execute()
    await call.write(request(prefill_of()))
    await call.read()
    assert (await worker.attach(2)).last_step_id == 1
    _, reason, values = await error_of(call.read())
    assert (reason, values["epoch"]) == ("STALE_EPOCH", "2")
    await worker.run(prefill_of(), epoch=2)


async def test_a_claim_superseded_before_the_device_was_ready_is_told_so(
    worker: Worker, hold_device: Callable[[], threading.Event]
) -> None:
    release = hold_device()
    first = asyncio.create_task(worker.attach(1))
    await wait_until_claimed(worker, 1)
    call = worker.stub.Execute()
    second = asyncio.create_task(worker.attach(2))
    await wait_until_claimed(worker, 2)
    release.set()
    assert (await second).last_step_id == 0
    for superseded in (first, call.read()):
        _, reason, values = await error_of(superseded)
        assert (reason, values["epoch"]) == ("STALE_EPOCH", "2")


async def test_only_one_stream_runs_the_steps_of_an_epoch(worker: Worker) -> None:
    await worker.attach(1)
    first, second = worker.stub.Execute(), worker.stub.Execute()
    await first.write(request(prefill_of()))
    await first.read()
    await second.write(request(decode_step(step_id=2)))
    _, reason, _ = await error_of(second.read())
    assert reason == "GROUP_HELD"
    await first.write(request(decode_step(step_id=2)))
    assert (await first.read()).step_id == 2


async def test_a_stale_schedulers_stream_does_not_end_the_present_claim(worker: Worker) -> None:
    await worker.attach(1, "old")
    await worker.attach(2, "new")
    _, reason, _ = await error_of(worker.run(prefill_of(), epoch=1))
    assert reason == "STALE_EPOCH"
    assert len(await worker.run(prefill_of(), epoch=2)) == 1


async def test_the_end_of_its_stream_ends_the_epoch(worker: Worker) -> None:
    await worker.attach(1)
    await worker.run(prefill_of())
    _, reason, _ = await error_of(worker.run(decode_step(step_id=2)))
    assert reason == "STALE_EPOCH"


class GatedModel(WrappedModel):
    """Once it `is_armed`, a forward pass waits at its beginning until `release` is set."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model)
        self.is_armed = False
        self.entered = threading.Event()
        self.release = threading.Event()

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if self.is_armed:
            self.entered.set()
            self.release.wait()
        return super().forward(token_ids, positions)


async def test_when_a_stream_is_cancelled_the_launched_step_returns_and_the_others_are_dropped(
    loading_worker: Worker, loaded: LoadedModel
) -> None:
    model = GatedModel(loaded.model)
    worker = loading_worker
    worker.servicer.set_runner(make_runner(replace(loaded, model=model)))
    await worker.attach(1, "one")
    call = worker.stub.Execute()
    await call.write(request(prefill_of()))
    await call.read()
    model.is_armed = True
    for step_id in (2, 3):
        await call.write(request(decode_step(step_id=step_id)))
    await asyncio.to_thread(model.entered.wait)
    model.is_armed = False
    call.cancel()
    # Once the worker has seen the end of the stream it takes the other scheduler's claim, and answers it when the
    # launched step has returned.
    attach = asyncio.create_task(attach_when_free(worker, 2, "two"))
    await wait_until_claimed(worker, 2)
    assert not attach.done()
    model.release.set()
    assert (await attach).last_step_id == 2
    assert await worker.run(prefill_of(), epoch=2) == [[generate_alone(loaded, prompt, 1)[0] for prompt in PROMPTS]]


async def attach_when_free(worker: Worker, epoch: int, scheduler: str) -> worker_pb2.AttachResponse:
    while True:
        try:
            return await worker.attach(epoch, scheduler)
        except grpc.aio.AioRpcError as error:
            if reason_of(status_from_rpc_error(error)) != "GROUP_HELD":
                raise


async def wait_until_claimed(worker: Worker, epoch: int) -> None:
    """Return when the worker's epoch is `epoch`, though its Attach may not have been answered."""
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


class MineModel(WrappedModel):
    """Fails when it reads the last token of its vocabulary."""

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if bool((token_ids == self.logits_width - 1).any()):
            raise RuntimeError("secret: stepped on a mine")
        return super().forward(token_ids, positions)


async def test_a_failing_step_is_logged_and_told_without_its_cause_and_the_worker_lives_on(
    loading_worker: Worker, loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    mine = loaded.facts.logits_width - 1
    runner: ModelRunner = make_runner(replace(loaded, model=MineModel(loaded.model)))
    loading_worker.servicer.set_runner(runner)
    await loading_worker.attach(1)
    call = loading_worker.stub.Execute()
    # The second step is in the device's queue already when the first one fails.
    for step in (prefill_of([[1, mine]]), decode_step(step_id=2)):
        await call.write(request(step))
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as error_info:
        await call.read()
    assert error_info.value.code() is grpc.StatusCode.INTERNAL
    assert "mine" not in str(error_info.value)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == ["step failed"]
    assert "stepped on a mine" in caplog.text
    await loading_worker.attach(2)
    assert await loading_worker.run(prefill_of(), epoch=2) == [
        [generate_alone(loaded, prompt, 1)[0] for prompt in PROMPTS]
    ]

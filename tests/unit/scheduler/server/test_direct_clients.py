"""Direct clients over real gRPC: what they receive, and that they do not affect their neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.core.results.outputs import Outputs, RequestEnd
from services.scheduler.server.direct_clients import RESPONSES_PER_TURN, DirectClients
from shared.errors import NotReadyError
from shared.ids import RequestHandle
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.request.limits import ModelLimits
from tests.support.clients.narrow_channel import WINDOW_BYTES, open_narrow_channel
from tests.support.clients.token_client import (
    PROMPT,
    Request,
    Response,
    endless,
    error_of,
    generate_tokens,
    prompt_request,
    read_to_end,
    reason,
    seeded,
)
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EOS, token_bytes
from tests.support.scheduler.gated_worker import GatedWorker
from tests.support.scheduler.scheduler_shell import Cell, running_cell
from tests.support.scheduler.worker_peer import WorkerPeer, column


@asynccontextmanager
async def gated_cell(tmp_path: Path) -> AsyncIterator[tuple[Cell, GatedWorker]]:
    """A ready cell and its worker, whose gate is open at first; at the end all blocks must be free."""
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until_ready()
        yield cell, worker
        worker.gate.set()
        await cell.wait_until_free()


def submit_prompt(**fields: Any) -> exchange_pb2.ExchangeRequest:
    """A replica's message that submits the prompt."""
    submit = exchange_pb2.Submit(prompt_token_ids=token_bytes(PROMPT), top_p=1.0, **fields)
    return exchange_pb2.ExchangeRequest(submits=[submit])


async def test_a_direct_call_gets_the_resolved_request_then_its_tokens_then_its_finish(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        request = seeded(PROMPT, request_id="mine", max_tokens=9, seed=5)
        completion = await generate_tokens(cell.scheduler, request)
    accepted = Response.Accepted(request_id="mine", num_prompt_tokens=3, max_tokens=9, seed=5, weights_digest="weights")
    assert completion.accepted == accepted
    assert completion.token_ids == expected_completion(PROMPT, 5, 9)
    assert completion.finish == Response.Finish(
        reason=common_pb2.FINISH_REASON_MAX_TOKENS,
        usage=common_pb2.Usage(num_prompt_tokens=3, num_completion_tokens=9),
    )


async def test_absent_fields_are_drawn_or_resolved_and_echoed(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        sampling = common_pb2.SamplingParams(ignore_eos=True)
        request = Request(prompt_token_ids=PROMPT, sampling=sampling)
        first, second = [await generate_tokens(cell.scheduler, request) for _ in range(2)]
    assert first.accepted.request_id != second.accepted.request_id
    assert first.accepted.seed != second.accepted.seed
    # The rest of the context of 512.
    assert first.accepted.max_tokens == 509
    assert first.token_ids == expected_completion(PROMPT, first.accepted.seed, 509)


async def test_a_stop_token_is_reported_and_counts(tmp_path: Path) -> None:
    tokens = expected_completion(PROMPT, 0, 6)
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        request = seeded(PROMPT, max_tokens=20, stop_token_ids=[tokens[5]])
        completion = await generate_tokens(cell.scheduler, request)
    assert (completion.reason, completion.token_ids) == ("STOP_TOKEN", tokens)
    assert completion.finish is not None
    assert completion.finish.stop_token_id == tokens[5]
    assert completion.finish.usage.num_completion_tokens == 6


async def test_eos_ends_a_call_and_is_part_of_its_tokens(tmp_path: Path) -> None:
    prompt = next([start] for start in range(1000) if EOS in expected_completion([start], 0, 50))
    tokens = expected_completion(prompt, 0, 50)
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        completion = await generate_tokens(cell.scheduler, seeded(prompt, max_tokens=50, ignore_eos=False))
    assert (completion.reason, completion.token_ids) == ("EOS", tokens[: tokens.index(EOS) + 1])


async def test_cached_prompt_tokens_are_reported(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        request = seeded([5] * 40, max_tokens=2)
        usages = []
        for _ in range(2):
            completion = await generate_tokens(cell.scheduler, request)
            assert completion.finish is not None
            usages.append(completion.finish.usage.num_cached_tokens)
    assert usages == [0, 32]


async def test_many_calls_share_steps_and_a_replica_still_gets_one_message_per_step(tmp_path: Path) -> None:
    num_calls = 3 * RESPONSES_PER_TURN
    async with running_cell(tmp_path) as cell:
        replica = cell.exchange()
        await replica.read()
        requests = [seeded([number], seed=number, max_tokens=12) for number in range(num_calls)]
        await replica.write(submit_prompt(handle=1, request_id="r", max_tokens=30, ignore_eos=True))
        completions = await asyncio.gather(*(generate_tokens(cell.scheduler, request) for request in requests))
        counts = []
        tokens: list[int] = []
        while len(tokens) < 30:
            outputs = (await replica.read()).outputs
            counts.append(len(column(outputs.handles)))
            tokens += column(outputs.token_ids)
        state = await cell.state()
    for number, completion in enumerate(completions):
        assert completion.token_ids == expected_completion([number], number, 12)
    assert tokens == expected_completion(PROMPT, 0, 30)
    assert counts == [1] * 30
    assert state.num_decode_steps < 12 * num_calls / 2


async def test_a_slow_reader_gets_the_accumulated_tokens_in_one_response(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        may_continue = asyncio.Event()
        responses: list[Response] = []

        async def write(response: Response) -> None:
            responses.append(response)
            await may_continue.wait()

        request = seeded(PROMPT, max_tokens=40)
        slow = asyncio.create_task(cell.server.direct_clients.generate(request, write))
        # The slow reader delays neither its neighbour nor its own sequence.
        neighbour = await generate_tokens(cell.scheduler, seeded([9], max_tokens=60))
        assert neighbour.token_ids == expected_completion([9], 0, 60)
        await cell.wait_until_free()
        may_continue.set()
        await slow
    assert [len(response.token_ids) for response in responses] == [0, 40]
    assert list(responses[1].token_ids) == expected_completion(PROMPT, 0, 40)
    assert responses[1].HasField("finish")


def one_token_each(num_calls: int, index: int) -> Outputs:
    """A step in which every call gets one token, all at the same index."""
    handles = np.arange(1, num_calls + 1, dtype=np.uint32)
    return Outputs(handles, np.full(num_calls, index, np.int32), np.full(num_calls, 100 + index, np.int32))


async def test_an_answer_is_not_resumed_with_other_weights(tmp_path: Path) -> None:
    async with gated_cell(tmp_path) as (cell, worker):
        request = seeded(PROMPT, max_tokens=2)
        responses: list[Response] = []
        await read_to_end(cell.scheduler.Generate(request), responses)
        assert responses[0].accepted.weights_digest == worker.response.weights_digest == "weights"
        request.weights_digest = "weights"
        await generate_tokens(cell.scheduler, request)
        request.weights_digest = "others"
        error = await error_of(cell.scheduler.Generate(request))
        assert (error.code(), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "MODEL_CHANGED")


async def test_few_responses_are_sent_per_loop_iteration_and_waiting_ones_accumulate_tokens() -> None:
    limits = ModelLimits(context_length=512, logits_width=1000, num_pool_tokens=512)
    direct_clients = DirectClients(lambda: limits, lambda _: None)
    num_calls = 3 * RESPONSES_PER_TURN
    sent: list[list[int]] = []

    async def write(response: Response) -> None:
        if not response.HasField("accepted"):
            sent.append(list(response.token_ids))

    calls = [asyncio.create_task(direct_clients.generate(endless(), write)) for _ in range(num_calls)]
    await asyncio.sleep(0)
    for index in range(2):
        direct_clients.deliver(one_token_each(num_calls, index))
    num_sent = []
    while len(sent) < num_calls:
        await asyncio.sleep(0)
        num_sent.append(len(sent))
    # Other callbacks of the loop run in between.
    assert max(after - before for before, after in pairwise([0, *num_sent])) == RESPONSES_PER_TURN
    assert sent == [[100, 101]] * num_calls
    ends = [RequestEnd(RequestHandle(handle), error=NotReadyError("")) for handle in range(1, num_calls + 1)]
    direct_clients.deliver(Outputs.only_ends(ends))
    assert all(isinstance(end, NotReadyError) for end in await asyncio.gather(*calls, return_exceptions=True))


async def test_a_client_that_stops_reading_loses_its_answer_and_its_neighbour_does_not(tmp_path: Path) -> None:
    # A context that takes much longer than the answer may be unread.
    worker = WorkerPeer(num_blocks=4096, context_length=65_536)
    async with (
        running_cell(tmp_path, worker, max_unread_s=0.2) as cell,
        open_narrow_channel(f"unix:{tmp_path}/scheduler") as channel,
    ):
        await cell.wait_until_ready()
        request = seeded(PROMPT, request_id="unread", max_tokens=65_000)
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(request)
        neighbour = await generate_tokens(cell.scheduler, seeded([9], max_tokens=400))
        assert neighbour.token_ids == expected_completion([9], 0, 400)
        await cell.wait_until_free()
        responses: list[Response] = []
        # Once it reads again, it gets the error.
        error = await error_of(call, responses)
        assert (error.code(), reason(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_TOO_SLOW")
        tokens = [token_id for response in responses for token_id in response.token_ids]
        assert tokens == expected_completion(PROMPT, 0, len(tokens))


async def test_tokens_held_back_by_a_blocked_write_are_sent_in_one_response(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell, open_narrow_channel(f"unix:{tmp_path}/scheduler") as channel:
        await cell.wait_until_ready()
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(endless())
        await cell.wait_until(lambda state: state.num_finished)
        responses = [response async for response in call]
    tokens = [token_id for response in responses for token_id in response.token_ids]
    assert tokens == expected_completion(PROMPT, 0, 500)
    # All tokens that did not fit in the window arrived with the finish.
    assert len(responses[-1].token_ids) > 500 - WINDOW_BYTES
    assert responses[-1].HasField("finish")


async def test_without_a_worker_a_call_is_refused(tmp_path: Path) -> None:
    worker = GatedWorker()
    async with running_cell(tmp_path, worker) as cell:
        error = await error_of(cell.scheduler.Generate(endless()))
        assert (error.code(), reason(error)) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
        retry_info = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry_info) for detail in status_from_rpc_error(error).details)
        assert retry_info.retry_delay.ToSeconds() == 1
        worker.gate.set()


async def test_a_lost_worker_pauses_a_call(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        cell.worker.lose_link_at = 4
        completion = await generate_tokens(cell.scheduler, seeded(PROMPT, max_tokens=9))
        assert completion.token_ids == expected_completion(PROMPT, 0, 9)
        assert cell.worker.requests[-1].epoch > 1


async def test_a_request_id_in_flight_is_refused_before_it_is_accepted(tmp_path: Path) -> None:
    async with gated_cell(tmp_path) as (cell, worker):
        worker.gate.clear()
        first = cell.scheduler.Generate(endless("same"))
        await first.read()
        second = cell.scheduler.Generate(endless("same"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.read()
        error = caught.value
        assert (error.code(), reason(error)) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
        first.cancel()


@pytest.mark.parametrize("ends_by", ["cancel", "deadline"])
async def test_a_call_that_ends_early_frees_its_blocks(tmp_path: Path, ends_by: str) -> None:
    async with gated_cell(tmp_path) as (cell, worker):
        worker.gate.clear()
        call = cell.scheduler.Generate(endless(), timeout=3.0 if ends_by == "deadline" else None)
        await call.read()
        assert (await cell.state()).num_used_blocks == 1
        if ends_by == "cancel":
            call.cancel()
        else:
            assert (await error_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        while (await cell.state()).num_running:
            pass
        worker.gate.set()
        await cell.wait_until_free()
        # Only the steps in flight at depth 2 ran.
        assert len(worker.requests) == 2


async def test_a_deadline_that_passes_while_its_call_is_cancelled_loses_no_step(tmp_path: Path) -> None:
    worker = GatedWorker(is_open=True)
    worker.num_blocks = 8
    loop = asyncio.get_running_loop()

    def wait_until_passed() -> None:
        while loop.time() <= passed_at:
            pass

    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until_ready()
        worker.gate.clear()
        runs = asyncio.create_task(generate_tokens(cell.scheduler, seeded([1] * 80, max_tokens=1)))
        await cell.wait_until(lambda state: state.num_used_blocks)
        accepted = asyncio.Event()

        async def write(_: Response) -> None:
            accepted.set()

        large = asyncio.create_task(
            cell.server.direct_clients.generate(seeded([2] * 90, max_tokens=1), write, time_left_s=1.0)
        )
        await accepted.wait()
        passed_at = loop.time() + 1.0
        # It waits for the large request, whose end lets its step be sent.
        small = asyncio.create_task(generate_tokens(cell.scheduler, seeded([3], max_tokens=2)))
        await cell.wait_until(lambda state: state.num_waiting == 2)
        # The loop is busy until the deadline has passed, and the call's callback runs before the engine's timer.
        loop.call_soon(wait_until_passed)
        large.cancel()
        await asyncio.wait([large])
        worker.gate.set()
        assert (await small).token_ids == expected_completion([3], 0, 2)
        assert (await runs).token_ids == expected_completion([1] * 80, 0, 1)
        assert not cell.server.failed.is_set()


async def test_a_call_superseded_by_a_replicas_request_gets_an_error(tmp_path: Path) -> None:
    async with gated_cell(tmp_path) as (cell, worker):
        replica = cell.exchange()
        await replica.read()
        worker.gate.clear()
        call = cell.scheduler.Generate(endless("same"))
        await call.read()
        await replica.write(submit_prompt(handle=1, request_id="same", max_tokens=2, attempt=2))
        error = await error_of(call)
        assert (error.code(), reason(error)) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")


async def test_a_refused_later_call_leaves_the_earlier_one_alone(tmp_path: Path) -> None:
    async with gated_cell(tmp_path) as (cell, worker):
        worker.gate.clear()
        call = cell.scheduler.Generate(endless("same"))
        responses = [await call.read()]
        refused = endless("same")
        refused.determinism = common_pb2.DETERMINISM_EXACT
        refused.choices_so_far.add(token_ids=expected_completion(PROMPT, 0, 1))
        error = await error_of(cell.scheduler.Generate(refused))
        assert (error.code(), reason(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "EXACT_UNAVAILABLE")
        worker.gate.set()
        await read_to_end(call, responses)
    tokens = [token_id for response in responses for token_id in response.token_ids]
    assert tokens == expected_completion(PROMPT, 0, 500)


async def test_abort_ends_a_call_after_its_tokens(tmp_path: Path) -> None:
    async with gated_cell(tmp_path) as (cell, worker):
        call = cell.scheduler.Generate(endless("mine"))
        assert (await call.read()).accepted.request_id == "mine"
        tokens = list((await call.read()).token_ids)
        worker.gate.clear()
        await cell.scheduler.Abort(scheduler_pb2.AbortRequest(request_id="mine"))
        responses: list[Response] = []
        error = await error_of(call, responses)
        assert (error.code(), reason(error)) == (grpc.StatusCode.CANCELLED, "ABORTED_BY_CALL")
        for response in responses:
            tokens += response.token_ids
        assert tokens == expected_completion(PROMPT, 0, len(tokens))
        assert len(tokens) < 500


async def test_abort_ends_a_replicas_request(tmp_path: Path) -> None:
    async with gated_cell(tmp_path) as (cell, worker):
        replica = cell.exchange()
        await replica.read()
        worker.gate.clear()
        await replica.write(submit_prompt(handle=4, request_id="theirs", max_tokens=500))
        while not (await cell.state()).num_running:
            pass
        await cell.scheduler.Abort(scheduler_pb2.AbortRequest(request_id="theirs"))
        (end,) = (await replica.read()).outputs.ends
        assert (end.handle, reason_of(end.error)) == (4, "ABORTED_BY_CALL")
        assert end.error.code == grpc.StatusCode.CANCELLED.value[0]


async def test_aborting_an_unknown_id_succeeds_and_aborting_an_invalid_one_is_refused(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.scheduler.Abort(scheduler_pb2.AbortRequest(request_id="unknown"))
        for request_id in ("", "a b", "x" * 65):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await cell.scheduler.Abort(scheduler_pb2.AbortRequest(request_id=request_id))
            assert (error.value.code(), reason(error.value)) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_REQUEST",
            )


@pytest.mark.parametrize(
    ("request_message", "code", "expected_reason"),
    [
        (prompt_request([]), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (prompt_request([2**31 + 1]), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (prompt_request([2**32 - 1]), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (prompt_request([1] * 512), grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG"),
        (prompt_request([1], max_tokens=512), grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED"),
        (prompt_request([1], stop_token_ids=[2**32 - 1]), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (prompt_request([1], request_id="a b"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    ],
)
async def test_a_bad_request_reaches_no_worker(
    tmp_path: Path, request_message: Request, code: grpc.StatusCode, expected_reason: str
) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        error = await error_of(cell.scheduler.Generate(request_message))
        assert (error.code(), reason(error)) == (code, expected_reason)
        assert cell.worker.requests == []

"""Direct calls for several choices and for log-probabilities."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.v1 import common_pb2, scheduler_pb2
from services.scheduler.core.batch.sequence import Finish, FinishReason
from services.scheduler.core.results.outputs import RequestEnd
from services.scheduler.server.direct_clients import DirectClients, resolve_request
from services.scheduler.server.token_stream import MAX_ENTRIES, TokenStream
from shared.ids import RequestHandle
from shared.request.limits import ModelLimits
from shared.request.sampling_params import SamplingOptions
from shared.step.logprobs import Logprobs
from tests.support.clients.token_client import (
    Request,
    Response,
    endless,
    error_of,
    generate_token_choices,
    generate_tokens,
    reason,
    seeded,
)
from tests.support.scheduler.cell_model import expected_completion, logprobs_of
from tests.support.scheduler.engine_driver import token_bytes
from tests.support.scheduler.gated_worker import GatedWorker
from tests.support.scheduler.scheduler_shell import Cell, running_cell
from tests.support.scheduler.worker_peer import WorkerPeer

PROMPT = list(range(100, 140))
LIMITS = ModelLimits(context_length=512, logits_width=1000, num_pool_tokens=512)


def read_position(position: common_pb2.PositionLogprobs) -> tuple[tuple[int, ...], tuple[tuple[int, float], ...]]:
    """The ranks of a position's token and of the requested ones, and its entries: its own, requested, likeliest."""
    assert [entry.rank for entry in position.top] == list(range(1, len(position.top) + 1))
    own = position.token, *position.requested
    entries = tuple((entry.token_id, entry.logprob) for entry in (*own, *position.top))
    return tuple(entry.rank for entry in own), entries


def scores(tokens: list[int], start: int, num_top: int, requested: tuple[int, ...] = ()) -> list[Any]:
    """The expected log-probabilities of tokens from a position on."""
    expected = [logprobs_of(token_id, position, num_top, requested) for position, token_id in enumerate(tokens, start)]
    return [(one.ranks, one.entries) for one in expected]


async def responses_to(cell: Cell, request: Request) -> list[Response]:
    """All responses of a call but the first."""
    return [response async for response in cell.scheduler.Generate(request)][1:]


async def test_choices_stream_side_by_side_and_the_usage_counts_their_prompt_once(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        responses = await responses_to(cell, seeded(PROMPT, n=3, max_tokens=9))
        again = await generate_token_choices(cell.scheduler, seeded(PROMPT, n=3, max_tokens=9))
        await cell.wait_until_free()
    for choice in range(3):
        pieces = [response for response in responses if response.choice == choice]
        tokens = [token_id for piece in pieces for token_id in piece.token_ids]
        assert tokens == expected_completion(PROMPT, 0, 9, choice) == again[choice].token_ids
        assert [piece.HasField("finish") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        usage = common_pb2.Usage(num_prompt_tokens=40, num_completion_tokens=9, num_cached_tokens=32 if choice else 0)
        assert pieces[-1].finish.usage == usage
    assert [response.HasField("usage") for response in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[-1].usage == common_pb2.Usage(num_prompt_tokens=40, num_completion_tokens=27)
    # Not one whole choice after the other.
    assert [response.choice for response in responses] != sorted(response.choice for response in responses)


async def test_a_call_continues_the_unfinished_choices(tmp_path: Path) -> None:
    completions = [expected_completion(PROMPT, 0, 9, choice) for choice in range(3)]
    request = seeded(PROMPT, n=3, max_tokens=9)
    request.choices_so_far.add(token_ids=completions[0], is_finished=True)
    request.choices_so_far.add(token_ids=completions[1][:4])
    request.choices_so_far.add()
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        choices = await generate_token_choices(cell.scheduler, request)
        last = (await responses_to(cell, request))[-1]
    assert {choice: completion.token_ids for choice, completion in choices.items()} == {
        1: completions[1][4:],
        2: completions[2],
    }
    assert choices[1].finish is not None
    assert choices[1].finish.usage.num_completion_tokens == 9
    assert last.usage.num_completion_tokens == 27


async def test_a_cancelled_call_frees_every_choice(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        request = endless()
        request.sampling.n = 4
        call = cell.scheduler.Generate(request)
        for _ in range(10):
            await call.read()
        call.cancel()
        await cell.wait_until_free()
        assert (await cell.state()).num_finished == 4


async def test_an_abort_ends_a_call_once_after_the_tokens_of_all_choices(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        request = endless("several")
        request.sampling.n = 3
        call = cell.scheduler.Generate(request)
        responses = [await call.read() for _ in range(10)]
        await cell.scheduler.Abort(scheduler_pb2.AbortRequest(request_id="several"))
        error = await error_of(call, responses)
        await cell.wait_until_free()
    assert reason(error) == "ABORTED_BY_CALL"
    for choice in range(3):
        tokens = [token_id for response in responses if response.choice == choice for token_id in response.token_ids]
        assert tokens == expected_completion(list(request.prompt_token_ids), 0, len(tokens), choice)
    assert not any(response.HasField("usage") for response in responses)


async def test_accumulated_tokens_are_sent_in_one_response_per_choice(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        may_continue = asyncio.Event()
        responses: list[Response] = []

        async def write(response: Response) -> None:
            responses.append(response)
            await may_continue.wait()

        slow = asyncio.create_task(cell.server.direct_clients.generate(seeded(PROMPT, n=3, max_tokens=40), write))
        await cell.wait_until(lambda state: state.num_finished == 3)
        may_continue.set()
        await slow
    assert [(response.choice, len(response.token_ids)) for response in responses[1:]] == [(0, 40), (1, 40), (2, 40)]


async def test_tokens_and_prompts_get_their_log_probabilities(tmp_path: Path) -> None:
    async with running_cell(tmp_path, max_num_batched_tokens=16, max_num_seqs=8) as cell:
        await cell.wait_until_ready()
        request = seeded(PROMPT, n=2, max_tokens=9, num_logprobs=3, num_prompt_logprobs=0)
        plain = asyncio.create_task(generate_tokens(cell.scheduler, seeded(PROMPT, max_tokens=20)))
        choices = await generate_token_choices(cell.scheduler, request)
        assert (await plain).logprobs == []
    for choice, completion in choices.items():
        tokens = expected_completion(PROMPT, 0, 9, choice)
        assert [read_position(position) for position in completion.logprobs] == scores(tokens, 40, 3)
    assert [read_position(position) for position in choices[0].prompt_logprobs] == scores(PROMPT[1:], 1, 0)
    assert choices[1].prompt_logprobs == []


@pytest.mark.parametrize("num_logprobs", [None, 2])
async def test_requested_tokens_have_their_log_probabilities(tmp_path: Path, num_logprobs: int | None) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        request = seeded(PROMPT, max_tokens=9, num_logprobs=num_logprobs, logprob_token_ids=[7, 300, 7])
        completion = await generate_tokens(cell.scheduler, request)
    [first, *_] = completion.logprobs
    assert [entry.token_id for entry in first.requested] == [7, 300, 7]
    expected = scores(expected_completion(PROMPT, 0, 9), 40, num_logprobs or 0, (7, 300, 7))
    assert [read_position(position) for position in completion.logprobs] == expected


async def test_accumulated_log_probabilities_are_sent_in_pieces_of_half_a_millisecond() -> None:
    stream = TokenStream(num_prompt_tokens=1, num_tokens=[0], open_choices=[0])
    [choice] = stream.choices
    numbers = np.arange(1, 101, dtype=np.int32)
    entries = np.arange(2100, dtype=np.int32)
    logprobs = Logprobs(numbers, numbers, np.full(100, 21, np.int32), entries, entries.astype(np.float32))
    first, second = logprobs.select(np.arange(101) < 31), logprobs.after(80)
    assert first is not None
    assert second is not None
    stream.prompt_logprobs = [first, second]
    choice.logprobs, choice.token_ids = list(logprobs.positions()), list(range(100))
    choice.end = RequestEnd(RequestHandle(1), 100, Finish(FinishReason.MAX_TOKENS))
    stream.wake()
    responses = [response async for response in stream.responses()]
    size = MAX_ENTRIES // 21
    assert [len(response.prompt_logprobs) for response in responses] == [size, 30 - size, 20, 0, 0, 0, 0, 0]
    assert [len(response.logprobs) for response in responses] == [0, 0, 0, size, size, size, size, 4]
    assert [token_id for response in responses for token_id in response.token_ids] == list(range(100))
    assert [response.HasField("finish") for response in responses] == [False] * 7 + [True]


async def test_prompt_log_probabilities_precede_the_first_token_even_if_they_arrive_during_a_write() -> None:
    stream = TokenStream(num_prompt_tokens=1, num_tokens=[0], open_choices=[0])
    one = np.ones(1, np.int32)
    logprobs = Logprobs(one, one, one, one, np.zeros(1, np.float32))
    stream.prompt_logprobs.append(logprobs)
    stream.wake()
    responses = stream.responses()
    await anext(responses)
    stream.prompt_logprobs.append(logprobs)
    stream.choices[0].token_ids.append(5)
    assert [len((await anext(responses)).prompt_logprobs) for _ in range(2)] == [1, 0]


async def test_absent_fields_get_the_models_defaults(tmp_path: Path) -> None:
    worker = WorkerPeer()
    worker.default_sampling.MergeFrom(common_pb2.SamplingParams(temperature=0.75, top_k=9, repetition_penalty=1.5))
    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until_ready()
        cell_info = (await cell.exchange().read()).cell_info
        open_request = Request(prompt_token_ids=PROMPT, sampling=common_pb2.SamplingParams(top_k=5, max_tokens=1))
        await generate_tokens(cell.scheduler, open_request)
        [enter] = worker.requests[0].enters
    assert cell_info.default_sampling == worker.default_sampling
    assert (enter.temperature, enter.top_k, enter.options.repetition_penalty) == (0.75, 5, 1.5)


async def test_calls_have_handles_for_all_their_choices(tmp_path: Path) -> None:
    worker = GatedWorker(is_open=True)
    async with running_cell(tmp_path, worker) as cell:
        await cell.wait_until_ready()
        requests = [seeded([number], n=1 + number % 3, max_tokens=5) for number in range(9)]
        answers = await asyncio.gather(*(generate_token_choices(cell.scheduler, request) for request in requests))
    for number, choices in enumerate(answers):
        expected = {choice: expected_completion([number], 0, 5, choice) for choice in range(1 + number % 3)}
        assert {choice: completion.token_ids for choice, completion in choices.items()} == expected


def test_a_submission_carries_the_rarer_options_and_the_choices_so_far() -> None:
    request = seeded(PROMPT, n=2, max_tokens=9, min_tokens=3, num_logprobs=0)
    request.choices_so_far.add(token_ids=[7], is_finished=True)
    request.choices_so_far.add()
    submission = resolve_request(RequestHandle(5), request, LIMITS)
    assert (submission.n, submission.attempt, submission.open_choices) == (2, 2, [1])
    assert [so_far.output for so_far in submission.choices_so_far] == [token_bytes([7]), b""]
    assert submission.params.options == SamplingOptions(min_tokens=3, num_logprobs=0)
    del request.choices_so_far[:]
    assert resolve_request(RequestHandle(5), request, LIMITS).attempt == 1


async def test_handles_start_over_before_they_run_out() -> None:
    events: list[Any] = []
    direct_clients = DirectClients(lambda: LIMITS, events.append)
    direct_clients._next_handle = RequestHandle(2**32 - 10)

    async def write(_: Response) -> None:
        pass

    request = endless()
    request.sampling.n = 8
    calls = [asyncio.create_task(direct_clients.generate(request, write)) for _ in range(3)]
    await asyncio.sleep(0)
    handles = [event.submissions[0].handle for event in events]
    assert max(handles) + 7 < 2**32
    assert all(abs(first - second) >= 8 for first in handles for second in handles if first is not second)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)

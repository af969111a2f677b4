"""Token ids in and out, on the real model, as seen by a client that tokenizes itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from lockstep.v1 import common_pb2, scheduler_pb2, tokenizer_pb2
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.cells.cell import Cell
from tests.support.clients.client import Client, connect, text_request, token_request
from tests.support.clients.token_client import (
    Request,
    generate_token_choices,
    generate_tokens,
    prompt_request,
    read_to_end,
)

VOCABULARY = 49_152
CONTEXT = 8_192


@dataclass(frozen=True)
class Case:
    """A request that must be refused."""

    name: str
    request: Request
    reason: str = "INVALID_REQUEST"


def with_stop_sequences(*sequences: list[int]) -> Request:
    request = prompt_request([5])
    for token_ids in sequences:
        request.sampling.stop_token_sequences.add(token_ids=token_ids)
    return request


def with_output(token_ids: list[int], **sampling: Any) -> Request:
    request = prompt_request([5], **sampling)
    request.choices_so_far.add(token_ids=token_ids)
    return request


CASES = [
    Case("no prompt", Request()),
    Case("B01 no token ids", prompt_request([])),
    Case("B02 id of the logits width", prompt_request([VOCABULARY])),
    Case("B03 largest uint32", prompt_request([2**32 - 1])),
    Case("B04 bad id in the middle", prompt_request([5, 2**31 - 1, 5])),
    Case("B05 prompt of the whole context", prompt_request([5] * CONTEXT), "PROMPT_TOO_LONG"),
    Case("B07 four million ids", prompt_request([5] * 4_000_000), "PROMPT_TOO_LONG"),
    Case("B11 max_tokens 0", prompt_request([5], max_tokens=0)),
    Case("B12 largest max_tokens", prompt_request([5], max_tokens=2**32 - 1), "CONTEXT_EXCEEDED"),
    Case("B13 max_tokens of the context", prompt_request([5], max_tokens=CONTEXT), "CONTEXT_EXCEEDED"),
    Case("B15 negative temperature", prompt_request([5], temperature=-0.1)),
    Case("B16 temperature NaN", prompt_request([5], temperature=math.nan)),
    Case("B17 temperature infinite", prompt_request([5], temperature=math.inf)),
    Case("temperature above 2", prompt_request([5], temperature=2.01)),
    Case("B19 top_p 0", prompt_request([5], top_p=0.0)),
    Case("B20 top_p above 1", prompt_request([5], top_p=1.0000002)),
    Case("top_p NaN", prompt_request([5], top_p=math.nan)),
    Case("top_k above the logits width", prompt_request([5], top_k=VOCABULARY + 1)),
    Case("B34 stop token id", prompt_request([5], stop_token_ids=[VOCABULARY])),
    Case("65 stop token ids", prompt_request([5], stop_token_ids=range(65))),
    Case("empty stop sequence", with_stop_sequences([])),
    Case("long stop sequence", with_stop_sequences([1] * 33)),
    Case("nine stop sequences", with_stop_sequences(*[[1]] * 9)),
    Case("bad id in a stop sequence", with_stop_sequences([1, 2**32 - 1])),
    Case("unknown priority", Request(prompt_token_ids=[5], priority=4)),  # type: ignore[arg-type]
    Case("cache salt above 64 bytes", Request(prompt_token_ids=[5], cache_salt="é" * 33)),
    Case("output without a seed", with_output([5], max_tokens=9)),
    Case("output without max_tokens", with_output([5], seed=1)),
    Case("output of max_tokens", with_output([5] * 9, max_tokens=9, seed=1)),
    Case("bad id in an output", with_output([5, VOCABULARY], max_tokens=9, seed=1)),
    Case("request id with a space", prompt_request([5], request_id="a b")),
    Case("empty request id", prompt_request([5], request_id="")),
    Case("long request id", prompt_request([5], request_id="x" * 65)),
]


async def encode(client: Client, text: str) -> list[int]:
    return list((await client.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text=text))).token_ids)


def assert_same(
    positions: Sequence[common_pb2.PositionLogprobs], others: Sequence[common_pb2.PositionLogprobs]
) -> None:
    """Compare log-probabilities approximately: their last digits depend on the batch."""
    entries, other_entries = (
        [entry for position in side for entry in (position.token, *position.requested, *position.top)]
        for side in (positions, others)
    )
    assert [(one.token_id, one.rank) for one in entries] == [(one.token_id, one.rank) for one in other_entries]
    assert [one.logprob for one in entries] == pytest.approx([one.logprob for one in other_entries], abs=1e-2)


async def refusal(client: Client, request: Request, deadline_s: float | None = None) -> tuple[grpc.StatusCode, Any]:
    """Send a request that must fail; returns its status and reason."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate_tokens(client.scheduler, request, deadline_s=deadline_s)
    return error.value.code(), reason_of(status_from_rpc_error(error.value))


async def test_tokens_are_those_of_the_text_door(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        prompt = await encode(client, "The three largest cities of France are")
        by_text = await client.generate(token_request(prompt, max_tokens=40))
        by_tokens = await generate_tokens(client.scheduler, prompt_request(prompt, max_tokens=40))
    assert by_tokens.token_ids == by_text.token_ids
    assert (by_tokens.reason, by_tokens.accepted.max_tokens) == (by_text.reason, 40)
    assert by_tokens.finish is not None
    assert by_tokens.finish.usage.num_prompt_tokens == by_tokens.accepted.num_prompt_tokens == len(prompt)
    assert by_tokens.finish.usage.num_completion_tokens == len(by_tokens.token_ids)


async def test_a_seed_means_the_same_at_both_doors(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        prompt = await encode(client, "Once upon a time")
        sampling: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "seed": 2**63 + 1}
        by_text = await client.generate(token_request(prompt, **sampling))
        by_tokens = await generate_tokens(client.scheduler, prompt_request(prompt, **sampling))
    assert by_tokens.token_ids == by_text.token_ids
    assert by_tokens.accepted.seed == 2**63 + 1


async def test_choices_and_log_probabilities_are_those_of_the_text_door(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        prompt = await encode(client, "Once upon a time there was a fox who")
        sampling: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 11, "n": 3}
        sampling.update(num_logprobs=2, num_prompt_logprobs=1, logprob_token_ids=[prompt[0], 300])
        by_text = await client.generate_choices(token_request(prompt, **sampling))
        by_tokens = await generate_token_choices(client.scheduler, prompt_request(prompt, **sampling))
    for choice, completion in by_tokens.items():
        same = by_text.choices[0, choice]
        assert completion.token_ids == same.token_ids
        assert_same(completion.logprobs, same.logprobs)
        assert [position.token.token_id for position in completion.logprobs] == completion.token_ids
    assert len({tuple(completion.token_ids) for completion in by_tokens.values()}) == 3
    positions = by_tokens[0].prompt_logprobs
    assert [position.token.token_id for position in positions] == prompt[1:]
    assert_same(positions, by_text.choices[0, 0].prompt_logprobs)


async def test_requested_tokens_have_the_values_that_they_have_among_the_likeliest(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        prompt = await encode(client, "The capital of France is")
        likeliest = await client.generate(token_request(prompt, max_tokens=6, num_logprobs=20))
        wanted = [entry.token_id for entry in likeliest.logprobs[3].top[4:8]]
        answer = await client.generate(token_request(prompt, max_tokens=6, logprob_token_ids=wanted))
    assert answer.token_ids == likeliest.token_ids
    assert [position.token.token_id for position in answer.logprobs] == answer.token_ids
    assert not any(position.top for position in answer.logprobs)
    assert {tuple(entry.token_id for entry in position.requested) for position in answer.logprobs} == {tuple(wanted)}
    expected = likeliest.logprobs[3].top[4:8]
    requested = answer.logprobs[3].requested
    assert [(entry.rank, entry.text) for entry in requested] == [(entry.rank, entry.text) for entry in expected]
    assert [entry.logprob for entry in requested] == pytest.approx([entry.logprob for entry in expected], abs=1e-3)


async def test_what_is_absent_is_resolved_as_at_the_text_door(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        by_text = client.tokenizer.Generate(token_request([10, 20, 30]))
        by_tokens = client.scheduler.Generate(prompt_request([10, 20, 30]))
        accepted = [(await call.read()).accepted for call in (by_text, by_tokens)]
        by_text.cancel()
        by_tokens.cancel()
        await client.wait_until_idle()
    assert [facts.max_tokens for facts in accepted] == [4_096, 4_096]
    assert accepted[0].seed != accepted[1].seed
    assert accepted[0].request_id != accepted[1].request_id


async def test_stop_tokens_and_stop_sequences_end_the_answer(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        prompt = await encode(client, "The capital of France is")
        whole = await generate_tokens(client.scheduler, prompt_request(prompt, max_tokens=24))
        stop_token = next(token for token in whole.token_ids[3:] if token not in whole.token_ids[:3])
        index = whole.token_ids.index(stop_token)
        request = prompt_request(prompt, max_tokens=24, stop_token_ids=[stop_token])
        by_token = await generate_tokens(client.scheduler, request)
        request = prompt_request(prompt, max_tokens=24)
        request.sampling.stop_token_sequences.add(token_ids=whole.token_ids[index - 1 : index + 1])
        by_sequence = await generate_tokens(client.scheduler, request)
    assert (by_token.reason, by_sequence.reason) == ("STOP_TOKEN", "STOP_SEQUENCE")
    assert by_token.token_ids == by_sequence.token_ids == whole.token_ids[: index + 1]
    assert by_token.finish is not None
    assert by_token.finish.stop_token_id == stop_token


async def test_every_bad_request_is_refused_while_a_neighbour_streams(real_cell: Cell) -> None:
    story = prompt_request([10, 20, 30], max_tokens=60, ignore_eos=True)
    async with connect(real_cell) as client:
        alone = await generate_tokens(client.scheduler, story)
        before = await client.wait_until_idle()
        neighbour = asyncio.create_task(generate_tokens(client.scheduler, story))
        for case in CASES:
            expected = (grpc.StatusCode.INVALID_ARGUMENT, case.reason)
            assert await refusal(client, case.request) == expected, case.name
        assert (await neighbour).token_ids == alone.token_ids
        after = await client.wait_until_idle()
    assert after.num_free_blocks == after.num_blocks
    # None of them reached the engine.
    assert after.num_finished == before.num_finished + 1


async def test_a_cancelled_call_frees_its_blocks_and_its_neighbour_goes_on(real_cell: Cell) -> None:
    neighbour_request = prompt_request([10, 20, 30], max_tokens=20)
    async with connect(real_cell) as client:
        alone = await generate_tokens(client.scheduler, neighbour_request)
        before = await client.wait_until_idle()
        neighbour = asyncio.create_task(generate_tokens(client.scheduler, neighbour_request))
        call = client.scheduler.Generate(prompt_request([40, 50], max_tokens=4_000, ignore_eos=True))
        await call.read()
        await call.read()
        call.cancel()
        assert (await neighbour).token_ids == alone.token_ids
        after = await client.wait_until_idle()
    assert after.num_decode_steps - before.num_decode_steps < 100


async def test_a_deadline_that_passes_ends_the_call_and_frees_its_blocks(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        before = await client.wait_until_idle()
        request = prompt_request([40, 50], max_tokens=4_000, ignore_eos=True)
        code, _ = await refusal(client, request, deadline_s=0.5)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        after = await client.wait_until_idle()
    assert after.num_decode_steps - before.num_decode_steps < 3_999


@pytest.mark.parametrize("door", ["text", "tokens"])
async def test_abort_ends_a_stream_of_either_door(real_cell: Cell, door: str) -> None:
    async with connect(real_cell) as client:
        sampling: dict[str, Any] = {"max_tokens": 4_000, "ignore_eos": True}
        if door == "text":
            text = text_request("Count to a million:", **sampling)
            text.request_id = "to-abort"
            call = client.tokenizer.Generate(text)
        else:
            call = client.scheduler.Generate(prompt_request([10, 20, 30], request_id="to-abort", **sampling))
        await call.read()
        await call.read()
        await client.scheduler.Abort(scheduler_pb2.AbortRequest(request_id="to-abort"))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_to_end(call, [])
        assert error.value.code() is grpc.StatusCode.CANCELLED
        assert reason_of(status_from_rpc_error(error.value)) == "ABORTED_BY_CALL"
        await client.wait_until_idle()
        # Its id is free again, and aborting it once more is not an error.
        await client.scheduler.Abort(scheduler_pb2.AbortRequest(request_id="to-abort"))
        again = prompt_request([10, 20, 30], request_id="to-abort", max_tokens=2)
        assert len((await generate_tokens(client.scheduler, again)).token_ids) == 2


async def test_an_id_in_flight_is_refused_at_the_other_door(real_cell: Cell) -> None:
    text = text_request("Count to a million:", max_tokens=4_000, ignore_eos=True)
    text.request_id = "the-same-id"
    async with connect(real_cell) as client:
        call = client.tokenizer.Generate(text)
        await call.read()
        await call.read()
        expected = (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
        assert await refusal(client, prompt_request([5], request_id="the-same-id")) == expected
        call.cancel()
        await client.wait_until_idle()

"""Bad input gets its status and reason, and another request's stream continues unharmed.

Values that the protocol cannot express, such as a negative uint32, have no case. The ranges of sampling parameters are
in tests/unit/shared/request/test_limits.py; those here show that a refusal reaches the client.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from lockstep.v1 import tokenizer_pb2
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.cells.cell import Cell
from tests.support.cells.narrow_cell import NarrowCell
from tests.support.clients.client import Client, chat_request, connect, text_request, token_request

VOCABULARY = 49_152
CONTEXT = 8_192


@dataclass(frozen=True)
class Case:
    """A request that must be refused."""

    name: str
    make: Callable[[], tokenizer_pb2.GenerateRequest]
    reason: str | None = "INVALID_REQUEST"
    field: str | None = None
    detail: str | None = None
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    text: str | None = None


def text(**changes: Any) -> Callable[[], tokenizer_pb2.GenerateRequest]:
    return lambda: text_request("Hello", **changes)


def with_stop(*stop: str) -> Callable[[], tokenizer_pb2.GenerateRequest]:
    return lambda: tokenizer_pb2.GenerateRequest(text="Hello", stop=stop)


def with_field(**fields: Any) -> Callable[[], tokenizer_pb2.GenerateRequest]:
    return lambda: tokenizer_pb2.GenerateRequest(**{"text": "Hello", **fields})


def chat_of(*messages: tokenizer_pb2.ChatMessage) -> Callable[[], tokenizer_pb2.GenerateRequest]:
    return lambda: tokenizer_pb2.GenerateRequest(chat=tokenizer_pb2.Chat(messages=messages))


def stop_sequence(*token_ids: int) -> Callable[[], tokenizer_pb2.GenerateRequest]:
    def make() -> tokenizer_pb2.GenerateRequest:
        request = text_request("Hello")
        request.sampling.stop_token_sequences.add(token_ids=token_ids)
        return request

    return make


USER = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content="x")

CASES = [
    Case("no prompt", tokenizer_pb2.GenerateRequest, field="prompt"),
    Case("B01 no token ids", lambda: token_request([]), detail="PROMPT_EMPTY"),
    Case("B02 id of the logits width", lambda: token_request([VOCABULARY]), detail="TOKEN_ID_OUT_OF_RANGE"),
    Case("B03 largest uint32", lambda: token_request([2**32 - 1]), detail="TOKEN_ID_OUT_OF_RANGE"),
    Case("B04 bad id in the middle", lambda: token_request([5, 2**31 - 1, 5]), field="[1]"),
    Case("B05 prompt of the whole context", lambda: token_request([5] * CONTEXT), "PROMPT_TOO_LONG"),
    Case("B07 four million ids", lambda: token_request([5] * 4_000_000), None),
    Case("B08 empty text", lambda: text_request(""), detail="PROMPT_EMPTY"),
    Case("text of 3.5 MB", lambda: text_request("x" * 3_500_000), "REQUEST_TOO_LARGE"),
    Case("B10 text of 10 MB", lambda: text_request("x" * 10_000_000), None, code=grpc.StatusCode.RESOURCE_EXHAUSTED),
    Case("text beyond the context", lambda: text_request("word " * 10_000), "PROMPT_TOO_LONG"),
    Case("B11 max_tokens 0", text(max_tokens=0), field="sampling.max_tokens"),
    Case("B12 largest max_tokens", text(max_tokens=2**32 - 1), "CONTEXT_EXCEEDED"),
    Case("B13 max_tokens of the context", text(max_tokens=CONTEXT), "CONTEXT_EXCEEDED"),
    Case("B16 temperature NaN", text(temperature=math.nan), detail="NOT_FINITE"),
    Case("B31 empty stop string", with_stop(""), field="stop[0]"),
    Case("B32 many stop strings", with_stop(*["x"] * 500_000), field="stop"),
    Case("B33 long stop string", with_stop("x" * 10_240), field="stop[0]"),
    Case("stop strings of 2 KiB in all", with_stop(*["x" * 256] * 8), field="stop"),
    Case("B34 stop token id", text(stop_token_ids=[VOCABULARY]), field="sampling.stop_token_ids[0]"),
    Case("bad id in a stop sequence", stop_sequence(1, VOCABULARY), detail="TOKEN_ID_OUT_OF_RANGE"),
    Case("unknown priority", with_field(priority=4), field="priority"),
    Case("cache salt above 64 bytes", with_field(cache_salt="é" * 33), field="cache_salt"),
    Case(
        "B42 another model",
        with_field(model="../../etc/passwd"),
        "MODEL_NOT_FOUND",
        code=grpc.StatusCode.NOT_FOUND,
        text='the model "../../etc/passwd" is not served here',
    ),
    Case("no messages", chat_of(), field="chat.messages"),
    Case("too many messages", chat_of(*[USER] * 1_025), field="chat.messages"),
    Case("B44 unknown role", chat_of(tokenizer_pb2.ChatMessage(role=99, content="x")), field="chat.messages[0].role"),  # type: ignore[arg-type]
    Case("no role", chat_of(tokenizer_pb2.ChatMessage(content="x")), field="chat.messages[0].role"),
    Case(
        "message above 512 KiB",
        chat_of(tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content="x" * 600_000)),
        field="chat.messages[0].content",
    ),
    Case("request id with a space", with_field(request_id="a b"), field="request_id"),
    Case("empty request id", with_field(request_id=""), field="request_id"),
    Case("long request id", with_field(request_id="x" * 65), field="request_id"),
]


async def refusal(client: Client, request: tokenizer_pb2.GenerateRequest, deadline_s: float | None = None) -> Any:
    """Send a request that must fail, before or after being accepted; returns its error."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.generate(request, deadline_s=deadline_s)
    return error.value


def violations(error: grpc.aio.AioRpcError) -> list[Any]:
    """The field violations of an error."""
    bad_request = error_details_pb2.BadRequest()
    for detail in status_from_rpc_error(error).details:
        if detail.Unpack(bad_request):
            return list(bad_request.field_violations)
    return []


def check(case: Case, error: grpc.aio.AioRpcError) -> None:
    assert error.code() is case.code, f"{case.name}: {error.code()} {error.details()}"
    if case.reason is not None:
        assert reason_of(status_from_rpc_error(error)) == case.reason, case.name
    if case.field is not None:
        assert any(case.field in violation.field for violation in violations(error)), f"{case.name}: {error.details()}"
    if case.detail is not None:
        assert case.detail in [violation.reason for violation in violations(error)], case.name
    if case.text is not None:
        assert case.text in (error.details() or ""), case.name
    assert "Traceback" not in (error.details() or "")


async def test_every_bad_request_is_refused_while_a_neighbour_streams(real_cell: Cell) -> None:
    story = text_request("Once upon a time", max_tokens=80, ignore_eos=True)
    pids = {role: process.pid for role, process in real_cell.role_to_process.items()}
    async with connect(real_cell) as client:
        alone = await client.generate(story)
        before = await client.wait_until_idle()
        neighbour = asyncio.create_task(client.generate(story))
        for case in CASES:
            check(case, await refusal(client, case.make()))
        assert (await neighbour).token_ids == alone.token_ids
        after = await client.wait_until_idle()
    assert after.num_free_blocks == after.num_blocks
    # None of them reached the scheduler.
    assert after.num_finished == before.num_finished + 1
    assert {role: process.pid for role, process in real_cell.role_to_process.items()} == pids
    assert all(process.is_running() for process in real_cell.role_to_process.values())


async def test_all_violations_are_told_together(real_cell: Cell) -> None:
    request = text_request("Hello", temperature=3.0, top_p=0.0, max_tokens=0)
    request.stop.append("")
    async with connect(real_cell) as client:
        error = await refusal(client, request)
    assert {violation.field for violation in violations(error)} == {
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_tokens",
        "stop[0]",
    }


async def test_the_largest_prompt_and_the_smallest_temperature_are_served(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        tiny, greedy = await client.generate_all(
            text_request("The capital of France is", temperature=temperature, max_tokens=8)
            for temperature in (1e-30, 0.0)
        )
        assert tiny.token_ids == greedy.token_ids


async def test_a_request_id_in_flight_is_refused(real_cell: Cell) -> None:
    request = text_request("Once upon a time", max_tokens=4000, ignore_eos=True)
    request.request_id = "the-same"
    async with connect(real_cell) as client:
        first = client.tokenizer.Generate(request)
        await first.read()
        error = await refusal(client, request)
        first.cancel()
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert reason_of(status_from_rpc_error(error)) == "DUPLICATE_REQUEST"
        await client.wait_until_idle()


async def test_a_deadline_that_has_passed_costs_no_step(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        before = await client.wait_until_idle()
        error = await refusal(client, text_request("word " * 2_000, max_tokens=50), deadline_s=0.001)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        after = await client.wait_until_idle()
    assert (after.num_prefill_steps, after.num_decode_steps) == (before.num_prefill_steps, before.num_decode_steps)


async def test_bad_ids_and_texts_are_refused_by_the_other_methods_too(real_cell: Cell) -> None:
    async with connect(real_cell) as client:
        for call, code in (
            (client.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=[VOCABULARY])), "INVALID_REQUEST"),
            (client.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="x" * 3_500_000)), "REQUEST_TOO_LARGE"),
            (client.tokenizer.RenderChat(tokenizer_pb2.RenderChatRequest()), "INVALID_REQUEST"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert reason_of(status_from_rpc_error(error.value)) == code


async def test_a_prompt_that_the_pool_can_never_hold_is_refused(narrow_cell: NarrowCell) -> None:
    async with connect(narrow_cell.cell) as client:
        error = await refusal(client, token_request([5] * 356, max_tokens=29))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(status_from_rpc_error(error)) == "KV_CAPACITY_EXCEEDED"
        completion = await client.generate(token_request([5] * 356, max_tokens=28, ignore_eos=True))
        assert len(completion.token_ids) == 28
        # Without `max_tokens`, a request may use the remaining space of the pool.
        unlimited = await client.generate(token_request([5] * 356, ignore_eos=True))
        assert unlimited.accepted.max_tokens == 28


async def test_messages_that_make_the_template_fail_are_refused(narrow_cell: NarrowCell) -> None:
    async with connect(narrow_cell.cell) as client:
        error = await refusal(client, chat_request(("user", "something forbidden")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(status_from_rpc_error(error)) == "INVALID_REQUEST"
        await client.generate(chat_request(("user", "something else"), max_tokens=2))


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_again(narrow_cell: NarrowCell) -> None:
    async with connect(narrow_cell.cell) as client:
        running = asyncio.create_task(client.generate(token_request([5], max_tokens=380, ignore_eos=True)))
        await client.wait_until(lambda state: state.num_running)
        waiting = asyncio.create_task(client.generate(token_request([6], max_tokens=2, ignore_eos=True)))
        await client.wait_until(lambda state: state.num_waiting)
        error = await refusal(client, token_request([7], max_tokens=2))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = status_from_rpc_error(error)
        assert reason_of(status) == "QUEUE_FULL"
        retry_info = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry_info) for detail in status.details)
        assert retry_info.retry_delay.ToMilliseconds() > 0
        assert len((await running).token_ids) == 380
        assert len((await waiting).token_ids) == 2

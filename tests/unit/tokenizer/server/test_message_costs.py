"""No message of a call costs more than its parse again, and none holds the interpreter: many of anything, at any depth.

HTTP's bodies are in `test_body_costs`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import MAX_MESSAGE_BYTES, MAX_VALUES, MAX_VARIABLES_BYTES, check_chat
from shared.errors import InvalidRequestError, Violation
from shared.network.message_reader import MAX_UNCOUNTED_BYTES
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.clients.many_fields import methods
from tests.support.clients.message_costs import CHECKS, all_messages, read
from tests.support.tokenizer.held_loop import MAX_HOLD_S, cpu_s, least_hold
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service

NUM_FLAT_IDS = 680_000
MIB = 2**20
# As large as a client's message can be.
MAX_BYTES = 4 * MIB - 64
# What a process has beside the message, and what its pages round up to.
SLACK_BYTES, SLACK_S = 24 * MIB, 0.05
# What any message takes, that of packed numbers most.
MAX_TAKEN_BYTES = 64 * MIB
SAMPLES = [pytest.param(53, id="sample"), pytest.param(1, id="all", marks=pytest.mark.proof)]


def test_every_method_is_called_and_every_one_that_checks_is_checked() -> None:
    called = {method for method, *_ in all_messages()}
    assert called == methods().keys()
    assert CHECKS.keys() < called
    assert len(all_messages()) >= 500


@pytest.mark.process
@pytest.mark.parametrize("every", SAMPLES)
def test_reading_takes_at_most_the_parse_again_and_linear_time(every: int) -> None:
    command = [sys.executable, "-m", "tests.support.clients.message_costs", str(MAX_BYTES), str(every)]
    paths = {"PYTHONPATH": ":".join(sys.path)}
    costs = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=paths).stdout)
    assert len(costs) >= 10
    assert not [each for each in costs if each["read"] > min(2 * each["parsed"] + SLACK_BYTES, MAX_TAKEN_BYTES)]
    assert not [each for each in costs if each["whole_s"] > 3 * each["half_s"] + SLACK_S]


def test_a_message_that_is_not_counted_holds_the_loop_shortly() -> None:
    for method, kind, name, make in all_messages():
        data = make(MAX_UNCOUNTED_BYTES)
        # What disturbs a measurement disturbs one of them.
        taken_s = min(cpu_s(lambda: read(method, kind, data)) for _ in range(3))  # noqa: B023 - called at once
        assert taken_s <= MAX_HOLD_S, (method, name)


@pytest.fixture
async def reflecting(tmp_path: Path, model_dir: Path) -> AsyncIterator[Service]:
    async with run_tokenizer_service(model_dir, tmp_path, reflection=True) as running:
        await running.link()
        yield running


@pytest.mark.parametrize("every", SAMPLES)
async def test_no_message_holds_the_interpreter(reflecting: Service, every: int) -> None:
    sampled = [each for each in all_messages() if "SchedulerService" not in each[0]][::every]
    for method, _, name, make in sampled:
        ask = partial(_ask, reflecting.channel, method, make(MAX_BYTES))
        held, status = await least_hold(ask, read_flat_list)
        assert held <= 1, (method, name)
        assert status is None or reason_of(status) is not None, (method, name, status)


def read_flat_list() -> None:
    data = tokenizer_pb2.DetokenizeRequest(token_ids=[12345] * NUM_FLAT_IDS).SerializeToString()
    np.array(tokenizer_pb2.DetokenizeRequest.FromString(data).token_ids, np.uint32)


async def _ask(channel: grpc.aio.Channel, method: str, data: bytes) -> Any:
    """The status if the call is refused. A copy or two of the message, by the client, are among what is measured."""
    call = channel.stream_stream(method)(iter([data]))
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return status_from_rpc_error(error)
    call.cancel()
    return None


async def test_too_many_fields_are_refused_by_name(service: Service) -> None:
    # The message in which two million others were parsed before any limit saw them.
    messages = b"\x0a\x00" * (2 * MIB - 64)
    size = len(messages)
    prefix = bytes((0x0A, size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14 & 0x7F | 0x80, size >> 21))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.channel.unary_unary("/lockstep.v1.TokenizerService/RenderChat")(prefix + messages)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status, found = status_from_rpc_error(refused.value), error_details_pb2.BadRequest()
    assert reason_of(status) == "INVALID_REQUEST"
    assert status.details[1].Unpack(found)
    [violation] = found.field_violations
    assert (violation.field, violation.reason) == ("chat.messages", "OUT_OF_RANGE")


def test_a_large_conversation_is_taken() -> None:
    calls = [tokenizer_pb2.ToolCall(id="1", name="f", arguments='{"a": [1, 2, {"b": "c, d"}]}')] * 8
    turns = [
        tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content="x" * 1000),
        tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_ASSISTANT, tool_calls=calls),
    ]
    message = tokenizer_pb2.RenderChatRequest(chat=tokenizer_pb2.Chat(messages=turns * 512))
    method = "/lockstep.v1.TokenizerService/RenderChat"
    read(method, methods()[method], message.SerializeToString())
    assert len(check_chat(message.chat).messages) == 1024


def json_of(item: str, num_bytes: int) -> str:
    return '{"a":[' + ",".join([item] * ((num_bytes - 10) // (len(item) + 1))) + "]}"


ITEMS = ("[]", "{}", "1", "1.5", '""', '"a"', '{"a":1}', "[[[[[[[]]]]]]]", "[1.5,1.5]")


def chat_of(field: str, item: str) -> tokenizer_pb2.Chat:
    """A conversation whose JSON in a field has as many values as there is room for."""
    user = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER)
    if field == "template_variables":
        return tokenizer_pb2.Chat(messages=[user], template_variables=json_of(item, MAX_VARIABLES_BYTES))
    text = json_of(item, MAX_MESSAGE_BYTES - 100)
    if field == "parameters":
        return tokenizer_pb2.Chat(messages=[user], tools=[tokenizer_pb2.Tool(name="f", parameters=text)])
    calls = [tokenizer_pb2.ToolCall(name="f", arguments=text)]
    turn = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_ASSISTANT, tool_calls=calls)
    return tokenizer_pb2.Chat(messages=[user, *[turn] * 5])


@pytest.mark.parametrize("field", ["arguments", "parameters", "template_variables"])
async def test_many_values_of_json_are_refused_by_name_and_hold_nothing(service: Service, field: str) -> None:
    refused = list[Violation]()
    for item in ITEMS:
        chat = chat_of(field, item)
        data = tokenizer_pb2.RenderChatRequest(chat=chat).SerializeToString()
        ask = partial(_ask, service.channel, "/lockstep.v1.TokenizerService/RenderChat", data)
        held, _ = await least_hold(ask, read_flat_list)
        assert held <= 1, item
        try:
            check_chat(chat)
        except InvalidRequestError as error:
            refused.append(error.violations[0])
    assert (not refused) is (field == "template_variables")
    for each in refused:
        assert field in each.field
        assert each.description.endswith(f"must have at most {MAX_VALUES} values")


def test_values_are_not_counted_in_strings() -> None:
    code = "[" * 100_000 + "{,}" * 50_000 + '"' * 1000
    call = tokenizer_pb2.ToolCall(name="f", arguments=json.dumps({"code": code, "values": list(range(1000))}))
    turn = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_ASSISTANT, tool_calls=[call])
    [read_turn] = check_chat(tokenizer_pb2.Chat(messages=[turn])).messages
    assert read_turn.tool_calls[0].arguments == {"code": code, "values": list(range(1000))}

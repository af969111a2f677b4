"""With `single_tool_call`, the first call ends the choice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.clients.client import Completion, read_answer
from tests.support.models.tiny_tokenizer import IM_END_ID
from tests.support.tokenizer.exchange_peer import Row, make_end
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service

CHAT = tokenizer_pb2.Chat(
    messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "hi"}],
    tools=[{"name": "look", "parameters": '{"type": "object", "properties": {"a": {"type": "string"}}}'}],
    single_tool_call=True,
)
CALL = '<tool_call>{"name": "look", "arguments": {"a": "b"}}</tool_call>'
REPLY = f"So:{CALL} and {CALL}"


@pytest.fixture
async def service(tools_model_dir: Path, tmp_path: Path) -> AsyncIterator[Service]:
    async with run_tokenizer_service(tools_model_dir, tmp_path, reply_parser="hermes") as service:
        await service.link()
        yield service


def check(choice: Completion) -> None:
    assert (choice.text, choice.reason) == ("So:", "EOS")
    assert [call.arguments for call in choice.tool_calls] == ['{"a": "b"}']
    assert choice.finish is not None
    assert not choice.finish.HasField("stop_token_id")
    assert choice.finish.usage.num_completion_tokens == len(choice.token_ids)


@pytest.mark.parametrize("run_length", [1, 7, 1000])
async def test_the_choice_ends_with_the_token_that_completes_the_call(
    service: Service, tokenizer: Tokenizer, run_length: int
) -> None:
    token_ids = tokenizer.encode(REPLY).ids
    call = service.stub.Generate(tokenizer_pb2.GenerateRequest(chat=CHAT))
    sent = await service.peer.submits.get()
    for start in range(0, len(token_ids), run_length):
        service.peer.send(Row(sent.handle, start, token_ids[start : start + run_length]))
    # The cell goes on until it is told.
    stop_at = await service.peer.stop_ats.get()
    [choice] = (await read_answer(call)).choices.values()
    check(choice)
    assert stop_at.num_tokens == len(choice.token_ids)
    assert tokenizer.decode(choice.token_ids).startswith(f"So:{CALL}")
    assert not tokenizer.decode(choice.token_ids[:-1]).startswith(f"So:{CALL}")


@pytest.mark.parametrize("reason", [common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_MAX_TOKENS])
async def test_the_call_ends_the_choice_even_if_the_cell_had_ended_it(
    service: Service, tokenizer: Tokenizer, reason: common_pb2.FinishReason
) -> None:
    token_ids = [*tokenizer.encode(REPLY).ids, IM_END_ID]
    call = service.stub.Generate(tokenizer_pb2.GenerateRequest(chat=CHAT))
    sent = await service.peer.submits.get()
    service.peer.send(Row(sent.handle, 0, token_ids), ends=[make_end(sent.handle, reason, len(token_ids))])
    [choice] = (await read_answer(call)).choices.values()
    check(choice)


async def test_a_stop_string_before_the_call_ends_the_choice(service: Service, tokenizer: Tokenizer) -> None:
    call = service.stub.Generate(tokenizer_pb2.GenerateRequest(chat=CHAT, stop=["o:"]))
    sent = await service.peer.submits.get()
    service.peer.send(Row(sent.handle, 0, tokenizer.encode(REPLY).ids))
    [choice] = (await read_answer(call)).choices.values()
    assert (choice.text, choice.reason, choice.tool_calls) == ("S", "STOP_STRING", [])


async def test_without_a_call_nothing_changes(service: Service, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("Hi").ids
    call = service.stub.Generate(tokenizer_pb2.GenerateRequest(chat=CHAT))
    sent = await service.peer.submits.get()
    end = make_end(sent.handle, common_pb2.FINISH_REASON_MAX_TOKENS, len(token_ids))
    service.peer.send(Row(sent.handle, 0, token_ids), ends=[end])
    [choice] = (await read_answer(call)).choices.values()
    assert (choice.text, choice.reason) == ("Hi", "MAX_TOKENS")

"""Stop strings end what the client sees as text: not reasoning, markup or the arguments of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.clients.client import Completion, read_answer
from tests.support.tokenizer.exchange_peer import Row, make_end
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service

CHAT = tokenizer_pb2.Chat(
    messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "hi"}],
    tools=[{"name": "look", "parameters": '{"type": "object", "properties": {"a": {"type": "string"}}}'}],
)
CALL = '<tool_call>{"name": "look", "arguments": {"a": "Question: b"}}</tool_call>'
HERMES = f"<think>Question: what?</think>An answer. Question: next{CALL}"
HARMONY = (
    "<|channel|>analysis<|message|>the final word<|end|><|start|>assistant<|channel|>final<|message|>One final word."
)


async def serve(
    service: Service,
    tokenizer: Tokenizer,
    reply: str,
    *stops: str,
    run_length: int = 1,
    reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_MAX_TOKENS,
    **fields: Any,
) -> tuple[Completion, list[int]]:
    """The choice of a chat with this reply, which arrives in runs of tokens; also the reply's tokens."""
    token_ids = tokenizer.encode(reply).ids
    call = service.stub.Generate(tokenizer_pb2.GenerateRequest(chat=CHAT, stop=stops, **fields))
    sent = await service.peer.submits.get()
    for start in range(0, len(token_ids), run_length):
        service.peer.send(Row(sent.handle, start, token_ids[start : start + run_length]))
    service.peer.send(ends=[make_end(sent.handle, reason, len(token_ids))])
    [choice] = (await read_answer(call)).choices.values()
    return choice, token_ids


def tokens_up_to(tokenizer: Tokenizer, reply: str, end: str) -> int:
    """How many of the reply's tokens there are up to the one that completes `end`."""
    size = reply.index(end) + len(end)
    return next(count for count, (_, stop) in enumerate(tokenizer.encode(reply).offsets, 1) if stop >= size)


@pytest.mark.parametrize("run_length", [1, 7, 1000])
async def test_a_stop_string_in_reasoning_or_arguments_ends_nothing(
    tools_model_dir: Path, tmp_path: Path, tokenizer: Tokenizer, run_length: int
) -> None:
    async with run_tokenizer_service(tools_model_dir, tmp_path, reply_parser="hermes") as service:
        await service.link()
        reply = HERMES.replace(" Question: next", "")
        choice, token_ids = await serve(service, tokenizer, reply, "Question:", run_length=run_length)
        stopped, _ = await serve(service, tokenizer, HERMES, "Question:", run_length=run_length)
    assert (choice.reasoning, choice.text, choice.token_ids) == ("Question: what?", "An answer.", token_ids)
    assert [call.arguments for call in choice.tool_calls] == ['{"a": "Question: b"}']
    assert choice.reason == "MAX_TOKENS"
    # The second one in the reply is the first one in the text.
    num_tokens = tokens_up_to(tokenizer, HERMES, ". Question:")
    assert (stopped.reasoning, stopped.text, stopped.reason) == ("Question: what?", "An answer. ", "STOP_STRING")
    assert stopped.finish is not None
    assert len(stopped.token_ids) == stopped.finish.usage.num_completion_tokens == num_tokens
    assert not stopped.tool_calls


@pytest.mark.parametrize("run_length", [1, 1000])
async def test_a_stop_string_in_markup_leaves_no_markup(
    tools_model_dir: Path, tmp_path: Path, tokenizer: Tokenizer, run_length: int
) -> None:
    async with run_tokenizer_service(tools_model_dir, tmp_path, reply_parser="harmony") as service:
        await service.link()
        choice, _ = await serve(service, tokenizer, HARMONY, "final", run_length=run_length)
        kept, _ = await serve(service, tokenizer, HARMONY, "final", run_length=run_length, include_stop=True)
    assert (choice.reasoning, choice.text, choice.reason) == ("the final word", "One ", "STOP_STRING")
    assert (kept.reasoning, kept.text, kept.reason) == ("the final word", "One final", "STOP_STRING")


async def test_a_stop_string_ends_raw_text_wherever_it_is(
    tools_model_dir: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_tokenizer_service(tools_model_dir, tmp_path, reply_parser="hermes") as service:
        await service.link()
        choice, _ = await serve(service, tokenizer, HERMES, "Question:", raw_text=True)
    assert (choice.text, choice.reason) == ("<think>", "STOP_STRING")


async def test_a_stop_string_that_only_the_end_releases_still_ends_the_text(
    tools_model_dir: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_tokenizer_service(tools_model_dir, tmp_path, reply_parser="hermes") as service:
        await service.link()
        # It may begin a call until the reply has ended.
        choice, token_ids = await serve(service, tokenizer, "Hi<tool", "<tool", reason=common_pb2.FINISH_REASON_EOS)
    assert (choice.text, choice.reason, choice.token_ids) == ("Hi", "STOP_STRING", token_ids)


async def test_a_call_after_a_stop_string_is_not_made(
    tools_model_dir: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with run_tokenizer_service(tools_model_dir, tmp_path, reply_parser="hermes") as service:
        await service.link()
        # "ab" only ends the text once it is known that "xabcd" is not there.
        choice, _ = await serve(service, tokenizer, f"xab{CALL}", "ab", "xabcd", run_length=1000)
    assert (choice.text, choice.reason, choice.tool_calls) == ("x", "STOP_STRING", [])

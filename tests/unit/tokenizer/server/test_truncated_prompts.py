"""`truncate_prompt_tokens` keeps the end of a prompt, however long it was."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2, tokenizer_pb2
from shared.request.limits import TOKEN_DTYPE
from tests.support.clients.client import read_answer
from tests.support.models.tiny_tokenizer import CONTEXT_LENGTH
from tests.support.tokenizer.exchange_peer import Row, make_end
from tests.support.tokenizer.tokenizer_service import NUM_POOL_TOKENS, Service

Request = tokenizer_pb2.GenerateRequest

TEXT = "The quick brown fox jumps over the lazy dog. " * 50
SHORT_CHAT = tokenizer_pb2.Chat(messages=[{"role": tokenizer_pb2.ROLE_USER, "content": "lazy dog. "}])
CHAT = tokenizer_pb2.Chat(messages=[{"role": tokenizer_pb2.ROLE_USER, "content": TEXT}])


async def answer_to(service: Service, request: tokenizer_pb2.GenerateRequest) -> tuple[list[int], Any]:
    """The prompt that the cell got, and the answer's first choice."""
    call = service.stub.Generate(request)
    sent = await service.peer.submits.get()
    service.peer.send(Row(sent.handle, 0, [70]), ends=[make_end(sent.handle, common_pb2.FINISH_REASON_MAX_TOKENS, 1)])
    answer = await read_answer(call)
    return np.frombuffer(sent.prompt_token_ids, TOKEN_DTYPE).tolist(), answer.choices[0, 0]


@pytest.mark.parametrize("kept", [1, 10, NUM_POOL_TOKENS - 1])
async def test_the_last_tokens_of_any_prompt_are_kept(service: Service, tokenizer: Tokenizer, kept: int) -> None:
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > CONTEXT_LENGTH
    rendered = await service.stub.RenderChat(tokenizer_pb2.RenderChatRequest(chat=SHORT_CHAT))
    prompts = [
        (Request(text=TEXT), ids),
        (Request(tokens={"token_ids": ids}), ids),
        # Both chats end alike.
        (Request(chat=CHAT), list(rendered.token_ids)),
    ]
    for request, expected in prompts:
        request.truncate_prompt_tokens, request.sampling.max_tokens = kept, 1
        sent, choice = await answer_to(service, request)
        assert len(sent) == kept
        assert sent[-10:] == expected[-min(kept, 10) :]
        assert choice.finish.usage.num_prompt_tokens == kept


async def test_a_shorter_prompt_stays_as_it_is(service: Service, tokenizer: Tokenizer) -> None:
    for kept in (2, 100, 2**32 - 1):
        sent, choice = await answer_to(service, Request(text="The fox", truncate_prompt_tokens=kept, echo=True))
        ids = tokenizer.encode("The fox").ids
        assert sent == ids[-kept:]
        assert choice.text.startswith("The fox" if kept >= len(ids) else tokenizer.decode(ids[-kept:]))


async def test_the_echo_is_what_is_kept(service: Service, tokenizer: Tokenizer) -> None:
    sent, choice = await answer_to(service, Request(text=TEXT, truncate_prompt_tokens=5, echo=True))
    assert choice.text == tokenizer.decode([*sent, 70])


@pytest.mark.parametrize(("kept", "named"), [(0, "truncate_prompt_tokens"), (10_000, "256"), (None, "256")])
async def test_a_prompt_that_is_still_too_long_is_refused(service: Service, kept: int | None, named: str) -> None:
    call = service.stub.Generate(Request(text=TEXT, truncate_prompt_tokens=kept))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_answer(call)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert named in (caught.value.details() or "")

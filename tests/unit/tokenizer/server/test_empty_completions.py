"""`max_tokens: 0` asks for what is known of the prompt alone."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.clients.client import read_answer
from tests.support.tokenizer.exchange_peer import Position, PromptRow, Row, make_end
from tests.support.tokenizer.tokenizer_service import Service

Request = tokenizer_pb2.GenerateRequest


async def test_a_prompt_is_echoed_with_its_logprobs_and_no_completion(service: Service, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The fox").ids
    sampling = {"max_tokens": 0, "num_prompt_logprobs": 0, "num_logprobs": 1, "n": 2}
    call = service.stub.Generate(Request(text="The fox", echo=True, sampling=sampling))
    sent = await service.peer.submits.get()
    # The cell computes one token.
    assert sent.max_tokens == 1
    known = [Position(1, [(token_id, -0.5)]) for token_id in ids[1:]]
    service.peer.send(prompts=[PromptRow(sent.handle, 1, known)])
    service.peer.send(
        Row(sent.handle, 0, [70], logprobs=[Position(1, [(70, -0.1), (71, -2.0)])]),
        Row(sent.handle + 1, 0, [71], logprobs=[Position(1, [(71, -0.1), (70, -2.0)])]),
        ends=[
            make_end(sent.handle, common_pb2.FINISH_REASON_EOS, 1, stop_token_id=70),
            make_end(sent.handle + 1, common_pb2.FINISH_REASON_MAX_TOKENS, 1),
        ],
    )
    answer = await read_answer(call)
    for choice in answer.choices.values():
        assert (choice.text, choice.token_ids, choice.logprobs, choice.reason) == ("The fox", [], [], "MAX_TOKENS")
        assert choice.finish is not None
        assert not choice.finish.HasField("stop_token_id")
        assert choice.finish.usage.num_completion_tokens == 0
    first = answer.choices[0, 0]
    assert first.accepted.max_tokens == 0
    assert [place.token.token_id for place in first.prompt_logprobs] == ids[1:]
    assert answer.usage == common_pb2.Usage(num_prompt_tokens=len(ids))


@pytest.mark.parametrize("sampling", [{"max_tokens": 0}, {"max_tokens": 0, "num_logprobs": 1}])
async def test_without_anything_to_tell_of_the_prompt_it_is_refused(service: Service, sampling: dict[str, Any]) -> None:
    call = service.stub.Generate(Request(text="The fox", sampling=sampling))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_answer(call)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens" in (caught.value.details() or "")

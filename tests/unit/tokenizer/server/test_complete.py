"""`Complete`: the stream of `Generate` as one answer. The test plays the scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.answer.whole_answer import MAX_ANSWER_BYTES, WholeAnswer
from shared.errors import NumericError, RequestTooLargeError
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.models.tiny_tokenizer import IM_END_ID
from tests.support.tokenizer.exchange_peer import Position, PromptRow, Row, make_end, make_error_end
from tests.support.tokenizer.tokenizer_service import Service

HELLO = tokenizer_pb2.GenerateRequest(text="The fox")
EOS, MAX_TOKENS = common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_MAX_TOKENS


def complete(service: Service, request: tokenizer_pb2.GenerateRequest, **options: Any) -> Any:
    return service.stub.Complete(tokenizer_pb2.CompleteRequest(request=request), **options)


async def test_all_choices_of_all_prompts_are_in_one_answer(service: Service, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer_pb2.Prompt(text="The fox"), tokenizer_pb2.Prompt(text="The dog")]
    request = tokenizer_pb2.GenerateRequest(
        request_id="r", prompts={"prompts": prompts}, sampling=common_pb2.SamplingParams(n=2), echo=True
    )
    call = complete(service, request)
    ids = tokenizer.encode(" jumps").ids
    for _ in prompts:
        submit = await service.peer.submits.get()
        # The handles of a request's choices follow its own.
        for handle in (submit.handle + 1, submit.handle):
            for index, token_id in enumerate(ids):
                service.peer.send(Row(handle, index, [token_id]))
            end = make_end(handle, EOS, len(ids) + 1, stop_token_id=IM_END_ID)
            service.peer.send(Row(handle, len(ids), [IM_END_ID]), ends=[end])
    answer = await call
    assert [prompt.accepted.request_id for prompt in answer.prompts] == ["r-0", "r-1"]
    texts = [(choice.prompt, choice.choice, choice.text) for choice in answer.choices]
    assert texts == [(p, c, text) for p, text in enumerate(("The fox jumps", "The dog jumps")) for c in (0, 1)]
    for choice in answer.choices:
        assert list(choice.token_ids) == [*ids, IM_END_ID]
        assert (choice.finish.reason, choice.finish.stop_token_id) == (EOS, IM_END_ID)
        assert choice.finish.HasField("ttft")
        assert choice.finish.HasField("mean_tpot")
    assert answer.usage.num_completion_tokens == 4 * (len(ids) + 1)
    assert answer.usage.num_prompt_tokens == sum(len(tokenizer.encode(prompt.text).ids) for prompt in prompts)


async def test_an_answer_has_its_log_probabilities(service: Service) -> None:
    sampling = common_pb2.SamplingParams(num_logprobs=0, num_prompt_logprobs=0, max_tokens=2)
    call = complete(service, tokenizer_pb2.GenerateRequest(tokens={"token_ids": [70, 71]}, sampling=sampling))
    submit = await service.peer.submits.get()
    service.peer.send(prompts=[PromptRow(submit.handle, 1, [Position(1, [(71, -0.5)])])])
    for index in range(2):
        row = Row(submit.handle, index, [72 + index], logprobs=[Position(1, [(72 + index, -0.5)])])
        service.peer.send(row, ends=[make_end(submit.handle, MAX_TOKENS, 2)] if index else [])
    answer = await call
    assert [place.token.token_id for place in answer.prompts[0].prompt_logprobs] == [71]
    assert [place.token.token_id for place in answer.choices[0].logprobs] == [72, 73]


@pytest.mark.parametrize(
    ("request_message", "code", "reason"),
    [
        (tokenizer_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (tokenizer_pb2.GenerateRequest(text="1" * 300), grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG"),
        (tokenizer_pb2.GenerateRequest(text="x", model="other"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    ],
)
async def test_what_generate_refuses_is_refused(
    service: Service, request_message: tokenizer_pb2.GenerateRequest, code: grpc.StatusCode, reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await complete(service, request_message)
    assert (caught.value.code(), reason_of(status_from_rpc_error(caught.value))) == (code, reason)


async def test_an_error_of_the_cell_ends_the_call(service: Service) -> None:
    call = complete(service, HELLO)
    submit = await service.peer.submits.get()
    end = make_error_end(submit.handle, NumericError("the logits were not finite", step=4))
    service.peer.send(Row(submit.handle, 0, [70]), ends=[end])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert status_from_rpc_error(caught.value) == end.error


async def test_a_cancelled_call_aborts_its_request(service: Service) -> None:
    call = complete(service, HELLO)
    submit = await service.peer.submits.get()
    call.cancel()
    assert await service.peer.aborts.get() == submit.handle
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_passed_deadline_aborts_the_request(service: Service) -> None:
    call = complete(service, HELLO, timeout=2)
    submit = await service.peer.submits.get()
    assert await service.peer.aborts.get() == submit.handle
    assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def begun_answer() -> WholeAnswer:
    answer = WholeAnswer()
    asyncio.run(answer.write(tokenizer_pb2.GenerateResponse(accepted=tokenizer_pb2.Accepted(request_id="r"))))
    return answer


def test_pieces_of_tool_calls_and_reasoning_are_joined() -> None:
    answer = begun_answer()
    deltas = [
        [{"index": 0, "id": "c1", "name": "look", "arguments": '{"a"'}],
        [{"index": 0, "arguments": ": 1}"}, {"index": 1, "id": "c2", "name": "tell", "arguments": "{"}],
        [{"index": 1, "arguments": "}"}],
    ]
    for tool_calls in deltas:
        asyncio.run(answer.write(tokenizer_pb2.GenerateResponse(reasoning="so ", tool_calls=tool_calls)))
    [choice] = answer.message().choices
    assert choice.reasoning == "so so so "
    joined = [(call.id, call.name, call.arguments) for call in choice.tool_calls]
    assert joined == [("c1", "look", '{"a": 1}'), ("c2", "tell", "{}")]


def test_an_answer_that_exceeds_a_message_is_refused_as_soon_as_it_does() -> None:
    answer = begun_answer()
    piece = tokenizer_pb2.GenerateResponse(text="x" * (MAX_ANSWER_BYTES // 4))
    for _ in range(3):
        asyncio.run(answer.write(piece))
    with pytest.raises(RequestTooLargeError):
        asyncio.run(answer.write(piece))

"""Calls that come, or are being prepared, while the cell has no scheduler: at a hand-over all replicas see that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from lockstep.v1 import tokenizer_pb2
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.tokenizer.exchange_peer import Row, make_end
from tests.support.tokenizer.http_client import MAX_TOKENS, MESSAGES, HttpService, run_http_service
from tests.support.tokenizer.tokenizer_service import Service, read_rest

CHAT = tokenizer_pb2.Chat(messages=[tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content="hi")])
HELLO = tokenizer_pb2.GenerateRequest(text="The fox")
# A grammar that no other test compiles: its cache is cold.
COLD = tokenizer_pb2.GenerateRequest(text="The fox", structured_output={"regex": "(gap|hole){2,9}"})

# What needs no scheduler, once the cell is known.
CHECKED: dict[str, Callable[[Service], Awaitable[Any]]] = {
    "Tokenize": lambda service: service.stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="The fox")),
    "Detokenize": lambda service: service.stub.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=[70])),
    "RenderChat": lambda service: service.stub.RenderChat(tokenizer_pb2.RenderChatRequest(chat=CHAT)),
    "GetModelInfo": lambda service: service.stub.GetModelInfo(tokenizer_pb2.GetModelInfoRequest()),
}
PROMPT, CHAT_BODY = {"prompt": "The fox"}, {"messages": MESSAGES}
ANSWERED: dict[str, Any] = {
    "/v1/models": None,
    "/v1/models/tiny": None,
    "/tokenize": PROMPT,
    "/detokenize": {"tokens": [70]},
    "/v1/completions/render": PROMPT,
    "/v1/chat/completions/render": CHAT_BODY,
    "/v1/messages/count_tokens": CHAT_BODY | {"model": "tiny"},
}
COMPUTED: dict[str, Any] = {
    "/v1/completions": PROMPT,
    "/v1/chat/completions": CHAT_BODY,
    "/v1/messages": CHAT_BODY | {"model": "tiny", "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
}


async def lose_scheduler(service: Service) -> None:
    service.peer.end_stream()
    await service.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)


async def answer_all(service: Service, num_requests: int) -> list[int]:
    """Link to the next scheduler, which gets and ends this many requests; returns their attempts."""
    await service.link()
    attempts = []
    for _ in range(num_requests):
        submit = await service.peer.submits.get()
        attempts.append(submit.attempt)
        service.peer.send(Row(submit.handle, 0, [70]), ends=[make_end(submit.handle, MAX_TOKENS, 1)])
    return attempts


async def test_what_needs_no_scheduler_is_answered_and_what_is_computed_waits(model_dir: Path, tmp_path: Path) -> None:
    async with run_http_service(model_dir, tmp_path) as http:
        service = http.service
        await lose_scheduler(service)
        for method, call in CHECKED.items():
            assert await call(service), method
        for path, body in ANSWERED.items():
            answer = await (http.get(path) if body is None else http.post(path, body))
            assert (answer.status, path) == (200, path), answer.body
        waiting = [
            asyncio.create_task(http.post(path, body | {"stream": is_streamed}))
            for path, body in COMPUTED.items()
            for is_streamed in (False, True)
        ]
        complete = service.stub.Complete(tokenizer_pb2.CompleteRequest(request=HELLO))
        generate = service.stub.Generate(HELLO)
        assert (await generate.read()).HasField("accepted")
        attempts = await answer_all(service, len(waiting) + 2)
        assert attempts == [1] * len(attempts)
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200] * len(waiting)
        await complete
        assert (await read_rest(generate))[1] == [70]


async def test_a_scheduler_that_goes_while_a_call_is_prepared_is_waited_for(service: Service) -> None:
    call = service.stub.Complete(tokenizer_pb2.CompleteRequest(request=COLD))
    await lose_scheduler(service)
    assert await answer_all(service, 1) == [1]
    assert (await call).choices[0].token_ids == [70]


async def test_a_call_waits_within_its_deadline(http: HttpService) -> None:
    await lose_scheduler(http.service)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await http.service.stub.Complete(tokenizer_pb2.CompleteRequest(request=HELLO), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    answer = await http.post("/v1/completions", {**PROMPT, "timeout_s": 0.1})
    assert answer.status == 504
    assert http.service.peer.submits.empty()


async def test_after_the_time_that_requests_wait_for_a_scheduler_a_call_is_refused(
    model_dir: Path, tmp_path: Path
) -> None:
    async with run_http_service(model_dir, tmp_path, scheduler_lost_s=0.0, num_schedulers=1) as http:
        await lose_scheduler(http.service)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await http.service.stub.Complete(tokenizer_pb2.CompleteRequest(request=HELLO))
        assert reason_of(status_from_rpc_error(caught.value)) == "SCHEDULER_LOST"
        answer = await http.post("/v1/completions", PROMPT)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "scheduler_lost")

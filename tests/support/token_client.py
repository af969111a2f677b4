"""A client of the scheduler's token door that collects whole answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from lockstep.v1 import common_pb2, scheduler_pb2
from shared.rpc import reason_of, status_from_rpc_error
from tests.support.client import greedy

PROMPT = [1, 2, 3]
Request = scheduler_pb2.SchedulerServiceGenerateRequest
Response = scheduler_pb2.SchedulerServiceGenerateResponse


@dataclass
class TokenCompletion:
    """A whole answer: the tokens of all responses joined."""

    accepted: Response.Accepted
    token_ids: list[int] = field(default_factory=list)
    finish: Response.Finish | None = None

    @property
    def reason(self) -> str:
        """The finish reason's name without its prefix."""
        assert self.finish is not None
        return common_pb2.FinishReason.Name(self.finish.reason).removeprefix("FINISH_REASON_")


async def generate_tokens(scheduler: Any, request: Request, *, deadline_s: float | None = None) -> TokenCompletion:
    """Send one request by a stub of SchedulerService and collect its answer.

    Raises:
        grpc.aio.AioRpcError: the request failed.
    """
    completion: TokenCompletion | None = None
    async for response in scheduler.Generate(request, timeout=deadline_s):
        if completion is None:
            completion = TokenCompletion(response.accepted)
        else:
            assert not response.HasField("accepted"), "accepted twice"
        assert completion.finish is None, "a response behind the last one"
        completion.token_ids += response.token_ids
        if response.HasField("finish"):
            completion.finish = response.finish
    assert completion is not None
    assert completion.finish is not None, "the stream ended without a finish"
    return completion


async def read_to_end(call: Any, responses: list[Any]) -> None:
    """Read what is left of a call's responses.

    Raises:
        grpc.aio.AioRpcError: the call failed; what came before is in `responses`.
    """
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)


def prompt_request(prompt_token_ids: list[int], *, request_id: str | None = None, **sampling: Any) -> Request:
    """A request for a prompt of token ids, greedy unless said otherwise."""
    return Request(request_id=request_id, prompt_token_ids=prompt_token_ids, sampling=greedy(**sampling))


def seeded(prompt: list[int], **changes: Any) -> Request:
    """A request whose tokens `expected_completion` knows."""
    return prompt_request(prompt, **{"seed": 0, "ignore_eos": True, **changes})


def endless(request_id: str | None = None) -> Request:
    """A request that runs for as long as a test needs it."""
    return seeded(PROMPT, request_id=request_id, max_tokens=500)


async def error_of(call: Any, responses: list[Response] | None = None) -> grpc.aio.AioRpcError:
    """The error that a call must end with, behind any responses."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_to_end(call, [] if responses is None else responses)
    return error.value


def reason(error: grpc.aio.AioRpcError) -> str | None:
    """The stable reason of a call's error."""
    return reason_of(status_from_rpc_error(error))

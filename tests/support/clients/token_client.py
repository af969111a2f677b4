"""A client of the scheduler's token-level `Generate` that collects whole answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from lockstep.v1 import common_pb2, scheduler_pb2
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.clients.client import greedy

PROMPT = [1, 2, 3]
Request = scheduler_pb2.SchedulerServiceGenerateRequest
Response = scheduler_pb2.SchedulerServiceGenerateResponse


@dataclass
class TokenCompletion:
    """A whole choice, joined from all its responses. `accepted` and `prompt_logprobs` belong to the request."""

    accepted: Response.Accepted
    token_ids: list[int] = field(default_factory=list)
    finish: Response.Finish | None = None
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """The finish reason's name without its prefix."""
        assert self.finish is not None
        return common_pb2.FinishReason.Name(self.finish.reason).removeprefix("FINISH_REASON_")

    def add(self, response: Response) -> None:
        """Add the choice's next response."""
        assert self.finish is None, "a response after the last one"
        assert len(response.logprobs) in (0, len(response.token_ids)), "log-probabilities do not match the tokens"
        assert not (response.prompt_logprobs and self.token_ids), "prompt log-probabilities after the first token"
        self.token_ids += response.token_ids
        self.logprobs += response.logprobs
        self.prompt_logprobs += response.prompt_logprobs
        if response.HasField("finish"):
            self.finish = response.finish


async def generate_tokens(scheduler: Any, request: Request, *, deadline_s: float | None = None) -> TokenCompletion:
    """Send one request for one choice through a stub of SchedulerService and collect its answer.

    Raises:
        grpc.aio.AioRpcError: The request failed.
    """
    [completion] = (await generate_token_choices(scheduler, request, deadline_s=deadline_s)).values()
    return completion


async def generate_token_choices(
    scheduler: Any, request: Request, *, deadline_s: float | None = None
) -> dict[int, TokenCompletion]:
    """Send one request and collect the choices that had not finished before, by number.

    Raises:
        grpc.aio.AioRpcError: The request failed.
    """
    accepted: Response.Accepted | None = None
    choices: dict[int, TokenCompletion] = {}
    usage = None
    async for response in scheduler.Generate(request, timeout=deadline_s):
        assert usage is None, "a response after the last one"
        assert (accepted is None) == response.HasField("accepted"), "accepted must come first, exactly once"
        if accepted is None:
            accepted = response.accepted
            assert response == Response(accepted=accepted), "a response with more than accepted"
            continue
        choices.setdefault(response.choice, TokenCompletion(accepted)).add(response)
        usage = response.usage if response.HasField("usage") else None
    assert usage is not None, "the stream ended without the usage"
    assert all(choice.finish is not None for choice in choices.values()), "the stream ended without a finish"
    return dict(sorted(choices.items()))


async def read_to_end(call: Any, responses: list[Any]) -> None:
    """Append the rest of a call's responses to `responses`.

    Raises:
        grpc.aio.AioRpcError: The call failed; the responses before that are in `responses`.
    """
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)


def prompt_request(prompt_token_ids: list[int], *, request_id: str | None = None, **sampling: Any) -> Request:
    """A request for a prompt of token ids, greedy by default."""
    return Request(request_id=request_id, prompt_token_ids=prompt_token_ids, sampling=greedy(**sampling))


def seeded(prompt: list[int], **changes: Any) -> Request:
    """A request whose answer `expected_completion` computes."""
    return prompt_request(prompt, **{"seed": 0, "ignore_eos": True, **changes})


def endless(request_id: str | None = None) -> Request:
    """A request that runs longer than any test needs."""
    return seeded(PROMPT, request_id=request_id, max_tokens=500)


async def error_of(call: Any, responses: list[Response] | None = None) -> grpc.aio.AioRpcError:
    """The error with which a call must end, after any responses, which are appended to `responses`."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_to_end(call, [] if responses is None else responses)
    return error.value


def reason(error: grpc.aio.AioRpcError) -> str | None:
    """The reason code of a call's error."""
    return reason_of(status_from_rpc_error(error))

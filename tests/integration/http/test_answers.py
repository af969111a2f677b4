"""A request means over HTTP what it means over gRPC: the answers are equal, streamed and not, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.clients.client import Client, connect
from tests.support.clients.http_answers import (
    CHAT,
    HttpAnswer,
    HttpChoice,
    HttpUsage,
    Position,
    listed,
    post_streamed,
    post_whole,
)
from tests.support.clients.http_requests import (
    TwinRequest,
    requests_for_the_prompt_alone,
    requests_without_limits,
    twin_requests,
)
from tests.support.models.tool_caller import write_tool_caller
from tests.support.system.ports import free_port

NUM_REQUESTS = 100
BATCH = 8
FINISH_REASONS = {"EOS": "stop", "STOP_TOKEN": "stop", "STOP_STRING": "stop", "MAX_TOKENS": "length"}


@asynccontextmanager
async def both_doors(cell: Cell) -> AsyncIterator[tuple[Client, aiohttp.ClientSession]]:
    """Connect to a cell by gRPC and by HTTP."""
    async with connect(cell) as client, cell.http_session() as session:
        yield client, session


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """A cell whose answers depend only on the request, with a model that is given tools."""
    model_dir = write_tool_caller(tmp_path_factory.mktemp("caller"), num_layers=1, context_length=512)
    with start_http_cell(model_dir) as cell:
        yield cell


def start_http_cell(model_dir: Path) -> Any:
    return start_cell(model_dir, REFERENCE, f"--http-listen=127.0.0.1:{free_port()}")


async def compare(cell: Cell, requests: Sequence[TwinRequest]) -> list[HttpAnswer]:
    """Send each request in four ways; the answers must be equal. Returns one answer to each."""
    gate = asyncio.Semaphore(BATCH)
    differences: list[str] = []
    async with both_doors(cell) as (client, session):

        async def ask(request: TwinRequest) -> HttpAnswer:
            async with gate:
                streamed, whole, http_streamed, http_whole = await asyncio.gather(
                    client.generate_choices(request.message),
                    client.tokenizer.Complete(tokenizer_pb2.CompleteRequest(request=request.message)),
                    post_streamed(session, request.path, request.streamed_body),
                    post_whole(session, request.path, request.body),
                )
            expected = told_of(request, streamed.choices, streamed.usage, first_logprobs(streamed.choices))
            choices = {(choice.prompt, choice.choice): choice for choice in whole.choices}
            of_prompts = [prompt.prompt_logprobs for prompt in whole.prompts]
            completed = told_of(request, choices, whole.usage, of_prompts)
            without_prompt = replace(expected, prompt_logprobs={})
            for name, answer, due in (
                ("Complete", completed, expected),
                ("whole", http_whole, expected),
                ("streamed", http_streamed, without_prompt),
            ):
                if answer is not completed and has_prompt_in_logprobs(request):
                    drop_first_tokens(answer)
                differences.extend(f"{name}: {difference}\n{request}" for difference in find_differences(answer, due))
            assert prompt_ids(http_whole) == prompt_ids(http_streamed)
            return http_whole

        answers = await asyncio.gather(*(ask(request) for request in requests))
    assert not differences, f"{len(differences)} differences, the first:\n{differences[0]}"
    return answers


def drop_first_tokens(answer: HttpAnswer) -> None:
    """Drop the first token of each prompt, which has no probability, and which gRPC leaves out."""
    for choice in answer.choices.values():
        assert choice.logprobs
        text, *rest = choice.logprobs.pop(0)
        assert rest == [None, None, ()]
        # Special tokens are not in the text.
        assert text == "<|im_start|>" or (text and choice.text.startswith(text))


def find_differences(answer: HttpAnswer, expected: HttpAnswer) -> list[str]:
    """The fields that differ, apart from the prompts' ids, which gRPC does not return."""
    found = []
    assert answer.usage is not None
    assert expected.usage is not None
    # What is cached depends on the requests before.
    found += difference("usage", replace(answer.usage, cached=0), replace(expected.usage, cached=0))
    for name in ("prompt_logprobs", "seed", "num_resumes", "is_exact"):
        found += difference(name, getattr(answer, name), getattr(expected, name))
    found += difference("choices", sorted(answer.choices), sorted(expected.choices))
    for index, choice in answer.choices.items():
        for name in ("text", "reasoning", "calls", "token_ids", "finish_reason", "stop_reason", "logprobs"):
            due = getattr(expected.choices[index], name)
            found += difference(f"choice {index}, {name}", getattr(choice, name), due)
    return found


def difference(name: str, value: Any, expected: Any) -> list[str]:
    return [] if value == expected else [f"{name}: {value!r} instead of {expected!r}"]


def first_logprobs(choices: Any) -> list[Any]:
    return [choice.prompt_logprobs for (_, number), choice in choices.items() if number == 0]


def told_of(request: TwinRequest, choices: Any, usage: Any, of_prompts: Sequence[Any]) -> HttpAnswer:
    """What the HTTP API must tell of an answer by gRPC."""
    sampling = request.message.sampling
    answer = HttpAnswer(
        usage=HttpUsage(
            usage.num_prompt_tokens,
            usage.num_completion_tokens,
            usage.num_cached_tokens,
            usage.num_reasoning_tokens,
        ),
        seed=sampling.seed,
    )
    for (prompt, number), choice in choices.items():
        index = prompt * request.num_choices + number
        answer.choices[index] = told_of_choice(request, choice, of_prompts[prompt])
        if "prompt_logprobs" in request.body and (request.path != CHAT or index == 0):
            answer.prompt_logprobs[index] = [None, *map(by_id, of_prompts[prompt])]
    return answer


def told_of_choice(request: TwinRequest, choice: Any, of_prompt: Any) -> HttpChoice:
    reason = common_pb2.FinishReason.Name(choice.finish.reason).removeprefix("FINISH_REASON_")
    finish_reason = FINISH_REASONS[reason]
    logprobs = None
    if {"logprobs", "logprob_token_ids"} & request.body.keys():
        logprobs = [position_of(request, position) for position in choice.logprobs]
    if has_prompt_in_logprobs(request):
        logprobs = [position_of(request, position) for position in (*of_prompt, *choice.logprobs)]
    return HttpChoice(
        text=choice.text,
        reasoning=choice.reasoning,
        calls=[(call.name, call.arguments) for call in choice.tool_calls],
        token_ids=list(choice.token_ids),
        logprobs=logprobs,
        finish_reason="tool_calls" if choice.tool_calls and finish_reason == "stop" else finish_reason,
        stop_reason=stop_reason(reason, choice.finish),
    )


def stop_reason(reason: str, finish: tokenizer_pb2.Finish) -> str | int | None:
    if reason == "STOP_STRING":
        return finish.stop_string
    return finish.stop_token_id if reason == "STOP_TOKEN" else None


def position_of(request: TwinRequest, position: common_pb2.PositionLogprobs) -> Position:
    token = position.token
    entries = [(entry.text, entry.logprob) for entry in (*position.top, *position.requested, token)]
    token_bytes = (token.raw_bytes or token.text.encode()) if request.path == CHAT else None
    return token.text, token.logprob, token_bytes, listed(entries)


def by_id(position: common_pb2.PositionLogprobs) -> dict[str, Any]:
    """A position of vLLM's `prompt_logprobs`."""
    return {
        str(entry.token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.text}
        for entry in (*position.top, position.token)
    }


def has_prompt_in_logprobs(request: TwinRequest) -> bool:
    return bool(request.body.get("echo")) and request.body.get("logprobs") is not None


def prompt_ids(answer: HttpAnswer) -> dict[int, list[int] | None]:
    return {index: choice.prompt_ids for index, choice in answer.choices.items()}


async def test_answers_are_those_of_grpc(cell: Cell) -> None:
    requests = twin_requests(NUM_REQUESTS, max_tokens=12, has_tools=True)
    answers = await compare(cell, requests)
    choices = [choice for answer in answers for choice in answer.choices.values()]
    # The requests ask for everything, and get it.
    assert {choice.finish_reason for choice in choices} == {"stop", "length", "tool_calls"}
    assert {type(choice.stop_reason) for choice in choices} == {type(None), int, str}
    for name in ("text", "reasoning", "calls", "logprobs", "prompt_ids"):
        assert any(getattr(choice, name) for choice in choices), name
    assert any(answer.prompt_logprobs for answer in answers)
    assert len(answers) >= NUM_REQUESTS


async def test_cached_tokens_are_told(cell: Cell) -> None:
    [request] = [*requests_for_the_prompt_alone()][:1]
    text = "A prompt of several blocks that nobody else sends. " * 4
    body = {**request.body, "prompt": text, "logprobs": None, "max_tokens": 2}
    async with both_doors(cell) as (_, session):
        first = await post_whole(session, request.path, body)
        again = [await post_whole(session, request.path, body), await post_streamed(session, request.path, body)]
    assert first.usage is not None
    assert first.usage.cached == 0
    cached = {answer.usage.cached for answer in again if answer.usage is not None}
    assert len(cached) == 1
    assert 0 < cached.pop() < first.usage.prompt


async def test_what_a_request_leaves_out_means_what_the_api_says(cell: Cell) -> None:
    chat, completion = await compare(cell, requests_without_limits())
    assert chat.choices[0].finish_reason == completion.choices[0].finish_reason == "length"
    assert len(completion.choices[0].token_ids) == 16


async def test_a_prompt_alone_has_its_log_probabilities(cell: Cell) -> None:
    for answer in await compare(cell, requests_for_the_prompt_alone()):
        for choice in answer.choices.values():
            assert choice.token_ids == []
            assert choice.logprobs
            assert len(choice.logprobs) == len(choice.prompt_ids or ()) - 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.proof), pytest.param(27, marks=pytest.mark.slow)], ids=["all", "some"]
)
async def test_answers_of_the_real_model_are_those_of_grpc(real_model: Path, step: int) -> None:
    """On this backend every token reads all weights, so all requests take minutes."""
    requests = twin_requests(NUM_REQUESTS, max_tokens=6, has_tools=False)
    with start_http_cell(real_model) as cell:
        answers = await compare(cell, requests[::step])
    assert len(answers) >= NUM_REQUESTS // step

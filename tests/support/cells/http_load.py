"""Requests of a load, sent as streams over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from lockstep.v1 import common_pb2, tokenizer_pb2
from tests.support.cells.cell import Cell
from tests.support.cells.chaos import RETRY_S, ChoiceFacts, LostError, Peace, Told, chaos_cell
from tests.support.clients.client import Client
from tests.support.clients.http_answers import (
    COMPLETION,
    AnswerStream,
    HttpAnswer,
    RefusedError,
    open_stream,
    read_pieces,
)
from tests.support.system.ports import free_port

# Fields with one name in both forms.
_SAME_NAMES = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


class HttpAsker:
    """Sends requests as completions that are streamed; see `Asker`. What streams cannot return is not asked for."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def ask(self, request: tokenizer_pb2.GenerateRequest, note_response: Callable[[], None]) -> Told:
        """See `Asker`."""
        while True:
            stream = AnswerStream(COMPLETION)
            try:
                async with open_stream(self._session, COMPLETION, body_of(request)) as response:
                    async for piece in read_pieces(response):
                        note_response()
                        stream.add(piece)
            except RefusedError as error:
                if (error.status, error.code) != (503, "not_ready"):
                    raise LostError(str(error)) from error
                await asyncio.sleep(RETRY_S)
                continue
            except (aiohttp.ClientError, ConnectionError) as error:
                raise LostError(str(error)) from error
            answer = stream.complete()
            assert answer.is_exact
            return Told(_facts_of(answer), answer.num_resumes)


def body_of(request: tokenizer_pb2.GenerateRequest) -> dict[str, Any]:
    """The JSON of a request of `mixed_requests`, without log-probabilities of the prompt."""
    sampling = request.sampling
    given = {field.name for field, _ in sampling.ListFields()}
    body: dict[str, Any] = {name: getattr(sampling, name) for name in _SAME_NAMES if name in given}
    body |= {"prompt": list(request.tokens.token_ids), "return_token_ids": True}
    body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if request.stop:
        body["stop"] = list(request.stop)
    if sampling.HasField("num_logprobs"):
        body["logprobs"] = sampling.num_logprobs
    if request.HasField("structured_output"):
        body["structured_outputs"] = {"regex": request.structured_output.regex}
    if request.determinism == common_pb2.DETERMINISM_EXACT:
        body["determinism"] = "exact"
    return body


@asynccontextmanager
async def http_chaos_cell(model_dir: Path, *flags: str) -> AsyncIterator[tuple[Cell, Client, aiohttp.ClientSession]]:
    """See `chaos_cell`; it also serves HTTP."""
    async with (
        chaos_cell(model_dir, f"--http-listen=127.0.0.1:{free_port()}", *flags) as (cell, client),
        cell.http_session() as session,
    ):
        yield cell, client, session


async def learn_over_http(model_dir: Path, requests: Sequence[tokenizer_pb2.GenerateRequest]) -> Peace:
    """Record the answer to each request in an undisturbed cell."""
    async with http_chaos_cell(model_dir) as (_, _, session):
        asker = HttpAsker(session)
        told = await asyncio.gather(*(asker.ask(request, lambda: None) for request in requests))
    return Peace(requests, [answer.facts for answer in told])


def _facts_of(answer: HttpAnswer) -> dict[tuple[int, int], ChoiceFacts]:
    assert answer.usage is not None
    facts = {}
    for index, choice in answer.choices.items():
        stop = choice.stop_reason
        facts[0, index] = ChoiceFacts(
            token_ids=tuple(choice.token_ids),
            text=choice.text,
            reason=choice.finish_reason or "",
            stop=(stop if isinstance(stop, int) else 0, stop if isinstance(stop, str) else ""),
            num_tokens=(answer.usage.prompt, answer.usage.completion),
            logprobs=tuple(repr(position).encode() for position in choice.logprobs or ()),
            prompt_logprobs=(),
        )
    assert answer.usage.completion == sum(len(choice.token_ids) for choice in answer.choices.values())
    return facts

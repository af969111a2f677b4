"""A client of the HTTP API over a unix socket, and the requests that a fake scheduler answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2
from tests.support.tokenizer.exchange_peer import Row, make_end
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service

MAX_TOKENS = common_pb2.FINISH_REASON_MAX_TOKENS
MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass
class Answer:
    """An answer of the HTTP API."""

    status: int
    headers: Any
    body: bytes

    @property
    def value(self) -> Any:
        """Its JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error in it."""
        return self.value["error"]

    @property
    def pieces(self) -> list[Any]:
        """The JSON of its events, without the last one, which must be [DONE]."""
        *events, last = events_of(self.body)
        assert last == "[DONE]"
        return [json.loads(event) for event in events]


def events_of(body: bytes) -> list[str]:
    """The data of a stream's events, without comments."""
    blocks = body.decode().split("\n\n")
    assert blocks[-1] == ""
    return [block.removeprefix("data: ") for block in blocks[:-1] if not block.startswith(":")]


def named_events_of(body: bytes) -> list[Any]:
    """The JSON of a stream's events, each of which must be named as its `type` says."""
    blocks = [block for block in body.decode().split("\n\n") if block and not block.startswith(":")]
    events = []
    for block in blocks:
        name, _, data = block.partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    return events


@dataclass
class HttpService:
    """A service, and a client of its HTTP API."""

    service: Service
    session: aiohttp.ClientSession
    tasks: list[asyncio.Task[Answer]] = field(default_factory=list)

    async def get(self, path: str, **options: Any) -> Answer:
        """GET."""
        return await self._ask("GET", path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> Answer:
        """POST a JSON value."""
        return await self._ask("POST", path, json=body, **options)

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        """Any request."""
        return await self._ask(method, path, **options)

    async def begin(
        self, path: str, body: Any, *, num_prompts: int = 1, **options: Any
    ) -> tuple[asyncio.Task[Answer], list[exchange_pb2.Submit]]:
        """Start a request; returns its answer, and the submits that the scheduler received."""
        task = asyncio.create_task(self.post(path, body, **options))
        self.tasks.append(task)
        return task, [await self.submit_of(task) for _ in range(num_prompts)]

    async def submit_of(self, task: asyncio.Task[Answer]) -> exchange_pb2.Submit:
        """The next submit; fails with the answer if the request was refused."""
        submit = asyncio.create_task(self.service.peer.submits.get())
        await asyncio.wait([submit, task], return_when=asyncio.FIRST_COMPLETED)
        if not submit.done():
            submit.cancel()
            answer = await task
            raise AssertionError(f"refused: {answer.status} {answer.body!r}")
        return submit.result()

    async def answer(
        self, path: str, body: Any, token_ids: Sequence[int], *, reason: common_pb2.FinishReason = MAX_TOKENS
    ) -> Answer:
        """The answer to a request for one choice with these tokens."""
        task, [sent] = await self.begin(path, body)
        self.send(sent, token_ids, reason)
        return await task

    def send(
        self, sent: exchange_pb2.Submit, token_ids: Sequence[int], reason: common_pb2.FinishReason = MAX_TOKENS
    ) -> None:
        """Have the scheduler send all tokens of a request's first choice."""
        self.service.peer.send(Row(sent.handle, 0, token_ids), ends=[make_end(sent.handle, reason, len(token_ids))])

    async def _ask(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, f"http://localhost{path}", **options) as response:
            return Answer(response.status, response.headers, await response.read())


@asynccontextmanager
async def run_http_service(model_dir: Path, socket_dir: Path, **settings: Any) -> AsyncIterator[HttpService]:
    """Run a service that is linked to its cell, with its HTTP API on a unix socket unless settings say otherwise."""
    path = f"{socket_dir}/http.sock"
    settings = {"http_listen": f"unix:{path}", **settings}
    async with run_tokenizer_service(model_dir, socket_dir, **settings) as service:
        await service.link()
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
            yield HttpService(service, session)

"""Clients that leave, and services that go, as OpenAI's library for Python sees them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from functools import partial
from typing import Any

import openai

from tests.clients.openai_python.asking import QUESTION, connect, error_of, say
from tests.clients.openai_python.load import begin_endless, is_healthy, wait_until, wait_until_idle


def ask(client: openai.OpenAI, cell: Any) -> Any:
    """A short answer."""
    return client.chat.completions.create(model=cell.model, messages=say(QUESTION), max_completion_tokens=2)


def check_closed_stream(narrow: Any) -> None:
    """A stream that is closed frees its place."""
    stream = begin_endless(narrow)
    next(iter(stream))
    wait_until(narrow, running=1)
    stream.close()
    wait_until_idle(narrow)
    assert ask(connect(narrow), narrow).usage.completion_tokens == 2


def check_client_timeout(narrow: Any) -> None:
    """A client that gives up an answer which is not streamed frees its place."""
    client = connect(narrow)
    endless = partial(client.chat.completions.create, model=narrow.model, messages=say(QUESTION), timeout=2)
    error_of(openai.APITimeoutError, partial(endless, extra_body={"ignore_eos": True}))
    wait_until_idle(narrow)
    assert ask(client, narrow).usage.completion_tokens == 2


async def check_cancelled_task(narrow: Any) -> None:
    """A task that is cancelled frees its place, streamed or not."""
    async with openai.AsyncOpenAI(base_url=narrow.base_url, api_key="none", max_retries=0) as client:
        create = partial(client.chat.completions.create, model=narrow.model, messages=say(QUESTION))
        for is_streamed in (False, True):

            async def consume(is_streamed: bool = is_streamed) -> None:
                answer = await create(stream=is_streamed, extra_body={"ignore_eos": True})
                async for _ in answer:
                    pass

            task = asyncio.create_task(consume())
            await asyncio.to_thread(wait_until, narrow, running=1)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until_idle, narrow)
        assert (await create(max_completion_tokens=2)).usage.completion_tokens == 2


def check_lost_scheduler(narrow: Any) -> None:
    """Without a scheduler requests are refused with 503; the library's retries last until it is back."""

    def revive(response: Any) -> None:
        statuses.append(response.status_code)
        os.kill(narrow.scheduler_pid, signal.SIGCONT)

    statuses: list[int] = []
    http_client = openai.DefaultHttpxClient(event_hooks={"response": [revive]})
    retrying = connect(narrow, max_retries=1000, http_client=http_client)
    os.kill(narrow.scheduler_pid, signal.SIGSTOP)
    try:
        while is_healthy(narrow):
            pass
        error = error_of(openai.InternalServerError, partial(ask, connect(narrow), narrow))
        # The cell is unhealthy before the link to the scheduler has ended: the request may still be sent there.
        assert error.code in ("not_ready", "scheduler_lost")
        assert (error.status_code, error.type) == (503, "server_error")
        assert {"retry-after", "retry-after-ms"} <= set(error.response.headers)
        assert ask(retrying, narrow).usage.completion_tokens == 2
    finally:
        os.kill(narrow.scheduler_pid, signal.SIGCONT)
    assert statuses[0] == 503
    assert statuses[-1] == 200
    wait_until_idle(narrow)


def check_draining(ending: Any) -> None:
    """While a service stops, its streams go on and new requests are refused with 503."""
    stream = begin_endless(ending)
    pieces = iter(stream)
    next(pieces)
    kept = connect(ending)
    assert ask(kept, ending).usage.completion_tokens == 2
    os.kill(ending.launcher_pid, signal.SIGTERM)
    while is_healthy(ending):
        pass
    # One on a connection that it has, and one on a new connection.
    for client in (kept, connect(ending)):
        error = error_of(openai.InternalServerError, partial(ask, client, ending))
        assert (error.status_code, error.code) == (503, "draining")
        assert error.response.headers["connection"] == "close"
    assert all(next(pieces).choices[0].finish_reason is None for _ in range(10))
    stream.close()

"""A real Envoy, configured as the file for HTTP beside the chart says, in front of two tokenizers of a cell."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shared.network.tls import Role
from tests.support.cells.cell import Cell, held_work, start_cell
from tests.support.cells.envoy import Envoy, EnvoyConfig, start_envoy
from tests.support.cells.tls_cell import start_tls_cell
from tests.support.clients.client import Client, connect
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import start_service
from tests.support.tokenizer.http_client import Answer

pytestmark = [pytest.mark.process, pytest.mark.slow]

MAX_WAITING = 4
CHAT = "/v1/chat/completions"
# The tiny model's own end would make answers of any length.
SHORT = {"messages": [{"role": "user", "content": "The fox"}], "max_tokens": 5, "ignore_eos": True, "seed": 7}
# Above what Envoy keeps of a body for another attempt by default.
LARGE = {**SHORT, "user": "u" * 1_500_000}


@dataclass
class Fronted:
    """A cell with two tokenizers, whose HTTP ports an Envoy may be in front of.

    Attributes:
        cell: The cell; its own tokenizer is the first.
        tokenizers: The HTTP ports of both.
        second: The process of the second.
        folder: For Envoy's configuration.
    """

    cell: Cell
    tokenizers: list[str]
    second: subprocess.Popen[bytes]
    folder: Path

    def config(self) -> EnvoyConfig:
        """An Envoy's configuration, to be changed."""
        return EnvoyConfig(self.tokenizers, protocol="http")

    @asynccontextmanager
    async def run(self, config: EnvoyConfig) -> AsyncIterator[tuple[Envoy, Caller, Client]]:
        """An Envoy with both tokenizers healthy, a caller of it, and a client of the cell itself."""
        async with aiohttp.ClientSession() as session, connect(self.cell) as client:
            for address in self.tokenizers:
                await Caller(session, f"http://{address}").wait_until_serving()
            with start_envoy(config, self.folder) as envoy:
                await envoy.wait_for_healthy(*self.tokenizers)
                yield envoy, Caller(session, f"http://{envoy.address}"), client


@dataclass
class Caller:
    """Calls an HTTP API at a URL."""

    session: aiohttp.ClientSession
    url: str

    async def ask(self, body: Any, **options: Any) -> Answer:
        """Ask for a chat's next message."""
        async with self.session.post(f"{self.url}{CHAT}", json=body, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def wait_until_serving(self) -> None:
        """Wait until requests can be served; fails after five minutes."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    if (await self.get("/health")).status == HTTPStatus.OK:
                        return
                await asyncio.sleep(0.02)

    async def get(self, path: str) -> Answer:
        """GET."""
        async with self.session.get(f"{self.url}{path}") as response:
            return Answer(response.status, response.headers, await response.read())


@pytest.fixture
def fronted(tiny_model: Path, tmp_path: Path) -> Iterator[Fronted]:
    with ExitStack() as stack:
        tokenizers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        waiting = f"--scheduler.max-waiting-requests={MAX_WAITING}"
        cell = stack.enter_context(start_cell(tiny_model, f"--http-listen={tokenizers[0]}", waiting))
        listen = (f"--listen=127.0.0.1:{free_port()}", f"--http-listen={tokenizers[1]}")
        flags = (f"--model-dir={tiny_model}", f"--scheduler={cell.cell_address}", *listen)
        yield Fronted(cell, tokenizers, stack.enter_context(start_service("tokenizer", *flags)), tmp_path)


async def test_answers_and_errors_are_those_of_the_tokenizer(fronted: Fronted) -> None:
    async with fronted.run(fronted.config()) as (envoy, caller, _):
        direct = Caller(caller.session, f"http://{fronted.tokenizers[0]}")
        mine = {"X-Request-Id": "mine"}
        for body in (SHORT, {**SHORT, "stream": True}, {**SHORT, "top_p": 7}, {**SHORT, "model": "other"}):
            answer, expected = [await each.ask(body, headers=mine) for each in (caller, direct)]
            assert (answer.status, text_of(answer)) == (expected.status, text_of(expected))
            assert answer.headers["x-request-id"] == "mine"
        assert (await caller.get("/metrics")).status == HTTPStatus.NOT_FOUND
        assert await envoy.stat("upstream_rq_retry") == 0


def text_of(answer: Answer) -> object:
    """What of an answer does not depend on when it was made."""
    if answer.status != HTTPStatus.OK:
        return answer.error
    if answer.headers["Content-Type"].startswith("text/event-stream"):
        return "".join(choice["delta"].get("content", "") for piece in answer.pieces for choice in piece["choices"])
    return answer.value["choices"]


async def test_a_stream_begins_at_once_and_leaves_the_queue_with_its_client(fronted: Fronted) -> None:
    async with fronted.run(fronted.config()) as (_, caller, client), held_work(fronted.cell.cell_address):
        # The status and the first bytes come although no token has.
        async with caller.session.post(f"{caller.url}{CHAT}", json={**SHORT, "stream": True}) as response:
            assert response.status == HTTPStatus.OK
            await client.wait_until(lambda state: state.num_waiting == 1)
            response.close()
        await client.wait_until(lambda state: state.num_waiting == 0)


async def test_what_a_draining_tokenizer_refuses_goes_to_the_other(fronted: Fronted) -> None:
    config = fronted.config()
    # Envoy does not notice that it drains.
    config.health_check.update(interval="3600s", no_traffic_interval="3600s")
    async with fronted.run(config) as (envoy, caller, client):
        second = Caller(caller.session, f"http://{fronted.tokenizers[1]}")
        async with held_work(fronted.cell.cell_address):
            stream = asyncio.create_task(second.ask({**SHORT, "stream": True}))
            await client.wait_until(lambda state: state.num_waiting == 1)
            fronted.second.send_signal(signal.SIGTERM)
            while (await second.get("/health")).status != HTTPStatus.SERVICE_UNAVAILABLE:
                pass
            refused = await second.ask(SHORT)
            # In turn to both, so that one or more of them to the one that drains.
            calls = [asyncio.create_task(caller.ask(LARGE)) for _ in range(MAX_WAITING - 1)]
            await client.wait_until(lambda state: state.num_waiting == 1 + len(calls))
        assert (refused.status, refused.headers["Connection"]) == (HTTPStatus.SERVICE_UNAVAILABLE, "close")
        assert [answer.status for answer in await asyncio.gather(*calls)] == [HTTPStatus.OK] * len(calls)
        assert await envoy.stat("upstream_rq_retry_success") >= 1
        assert (await stream).pieces
        assert await asyncio.to_thread(fronted.second.wait) == 0
        # What goes to the one that has ended gets no connection, or loses the one that was kept.
        for _ in range(4):
            assert (await caller.ask(SHORT)).status == HTTPStatus.OK


async def test_overload_ejects_no_tokenizer_and_is_for_the_client_to_repeat(fronted: Fronted) -> None:
    config = fronted.config()
    # As gateways have it that count errors, but at once.
    detection = {"consecutive_5xx": 1, "base_ejection_time": "3600s", "max_ejection_percent": 100}
    config.cluster["outlier_detection"] = detection
    async with fronted.run(config) as (envoy, caller, client):
        async with held_work(fronted.cell.cell_address):
            waiting = [asyncio.create_task(caller.ask(SHORT)) for _ in range(MAX_WAITING)]
            await client.wait_until(lambda state: state.num_waiting == MAX_WAITING)
            for _ in range(4):
                refused = await caller.ask(SHORT)
                assert (refused.status, refused.error["code"]) == (HTTPStatus.TOO_MANY_REQUESTS, "server_overloaded")
                assert int(refused.headers["Retry-After"]) >= 1
        assert await envoy.stat("upstream_rq_retry") == 0
        assert {answer.status for answer in await asyncio.gather(*waiting)} == {HTTPStatus.OK}
        # What our file leaves out, and why: a client alone makes such an error.
        async with held_work(fronted.cell.cell_address):
            late = await caller.ask({**SHORT, "timeout_s": 0.2})
        assert late.status == HTTPStatus.GATEWAY_TIMEOUT
        async with asyncio.timeout(PATIENCE_S):
            while not (num_ejections := await envoy.stat("outlier_detection.ejections_enforced_total")):
                pass
        # Errors are counted in their order, so none of the others had ejected anyone.
        assert num_ejections == 1


async def test_envoy_expects_the_tokenizers_own_certificate(tiny_model: Path, tmp_path: Path) -> None:
    with start_tls_cell(tiny_model, tmp_path) as cell:
        config = EnvoyConfig([cell.http_address], cell.files(Role.TOKENIZER), protocol="http")
        with start_envoy(config, tmp_path) as envoy:
            await envoy.wait_for_healthy(cell.http_address)
            async with aiohttp.ClientSession() as session:
                answer = await Caller(session, f"http://{envoy.address}").ask(SHORT)
            assert (answer.status, answer.value["usage"]["completion_tokens"]) == (HTTPStatus.OK, 5)

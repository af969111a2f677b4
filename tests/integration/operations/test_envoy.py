"""A real Envoy, configured as the file beside the chart says, in front of two tokenizers of a cell."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from lockstep.v1 import tokenizer_pb2
from shared.network.rpc import make_channel
from shared.network.statuses import status_from_rpc_error
from shared.network.tls import Role
from tests.support.cells.cell import Cell, held_work, start_cell
from tests.support.cells.envoy import Envoy, EnvoyConfig, start_envoy
from tests.support.cells.tls_cell import start_tls_cell
from tests.support.clients.client import Client, connect, text_request, token_request
from tests.support.system.ports import free_port
from tests.support.system.processes import start_service

pytestmark = pytest.mark.process

MAX_CONNECTION_AGE_S = 1
NUM_CALLS = 100
SHORT = token_request([3, 1, 4], max_tokens=5, ignore_eos=True)


@dataclass
class Fronted:
    """A cell with two tokenizers and an Envoy: what clients call is the Envoy.

    Attributes:
        cell: The cell; its own tokenizer is the first.
        tokenizers: Where the tokenizers listen.
        second: The process of the second.
        envoy: The Envoy.
    """

    cell: Cell
    tokenizers: list[str]
    second: subprocess.Popen[bytes]
    envoy: Envoy

    @property
    def address(self) -> str:
        """Where clients call."""
        return self.envoy.address

    @property
    def scheduler_address(self) -> str:
        """See `Cell`."""
        return self.cell.scheduler_address

    @property
    def cell_address(self) -> str:
        """See `Cell`."""
        return self.cell.cell_address

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[Client, Client]]:
        """A client of the Envoy, and one of the first tokenizer itself, once both tokenizers get calls."""
        await self.envoy.wait_for_healthy(*self.tokenizers)
        async with connect(self) as client, connect(self.cell) as direct:
            yield client, direct


@pytest.fixture
def fronted(tiny_model: Path, tmp_path: Path) -> Iterator[Fronted]:
    """Connections to the tokenizers are pinged and renewed all the time."""
    age = f"--max-connection-age-s={MAX_CONNECTION_AGE_S}"
    with ExitStack() as stack:
        cell = stack.enter_context(start_cell(tiny_model, age))
        tokenizers = [cell.address, f"127.0.0.1:{free_port()}"]
        flags = (f"--model-dir={tiny_model}", f"--scheduler={cell.cell_address}", f"--listen={tokenizers[1]}", age)
        second = stack.enter_context(start_service("tokenizer", *flags))
        config = EnvoyConfig(tokenizers)
        config.keepalive["interval"] = "0.05s"
        envoy = stack.enter_context(start_envoy(config, tmp_path))
        yield Fronted(cell, tokenizers, second, envoy)


@pytest.mark.slow
async def test_answers_errors_and_cancelled_calls_are_those_of_the_tokenizer(fronted: Fronted) -> None:
    async with fronted.connect() as (client, direct):
        request = text_request("The fox", max_tokens=40, ignore_eos=True)
        answer, expected = await client.generate(request), await direct.generate(request)
        assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
        whole = [await each.tokenizer.Complete(complete(request)) for each in (client, direct)]
        assert len({response.choices[0].text for response in whole}) == 1
        await check_refusals(client, direct)
        await check_cancel(client, fronted.cell_address)


def complete(request: tokenizer_pb2.GenerateRequest) -> tokenizer_pb2.CompleteRequest:
    return tokenizer_pb2.CompleteRequest(request=request)


async def check_refusals(client: Client, direct: Client) -> None:
    """A refused request has the same code, message and details, which are trailers."""
    wrong = text_request("The fox", max_tokens=0, top_p=7.0)
    statuses = []
    for each in (client, direct):
        for call in (each.tokenizer.Complete(complete(wrong)), each.tokenizer.Generate(wrong).read()):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            statuses.append(status_from_rpc_error(refused.value))
    assert len({status.SerializeToString(deterministic=True) for status in statuses}) == 1
    assert len(statuses[0].details) == 2


async def check_cancel(client: Client, cell_address: str) -> None:
    """A call that its client cancels leaves the scheduler's queue; its first response has come before."""
    async with held_work(cell_address):
        call = client.tokenizer.Generate(SHORT)
        assert (await call.read()).HasField("accepted")
        await client.wait_until(lambda state: state.num_waiting == 1)
        call.cancel()
        await client.wait_until(lambda state: state.num_waiting == 0)


@pytest.mark.slow
async def test_no_call_fails_while_connections_are_renewed_and_a_tokenizer_drains(fronted: Fronted) -> None:
    async with fronted.connect() as (client, _):
        while await fronted.envoy.stat("upstream_cx_close_notify") < 2:
            await client.generate_all([SHORT] * 4)
        async with held_work(fronted.cell_address):
            calls = [asyncio.create_task(client.generate(SHORT)) for _ in range(4)]
            await client.wait_until(lambda state: state.num_waiting == len(calls))
            fronted.second.send_signal(signal.SIGTERM)
            while await fronted.envoy.healthy() != {fronted.tokenizers[0]}:
                if len(calls) < NUM_CALLS:
                    calls.append(asyncio.create_task(client.generate(SHORT)))
        assert {answer.reason for answer in await asyncio.gather(*calls)} == {"MAX_TOKENS"}
        assert await asyncio.to_thread(fronted.second.wait) == 0


@pytest.mark.slow
async def test_envoy_expects_the_tokenizers_own_certificate(tiny_model: Path, tmp_path: Path) -> None:
    with start_tls_cell(tiny_model, tmp_path) as cell:
        config = EnvoyConfig([cell.address], cell.files(Role.TOKENIZER))
        with start_envoy(config, tmp_path) as envoy:
            await envoy.wait_for_healthy(cell.address)
            async with cell.connect() as direct, grpc.aio.insecure_channel(envoy.address) as channel:
                client = Client(channel, channel, channel)
                assert (await client.generate(SHORT)).token_ids == (await direct.generate(SHORT)).token_ids
        elsewhere = replace(cell.files(Role.TOKENIZER), trust_domain="elsewhere.example")
        with start_envoy(EnvoyConfig([cell.address], elsewhere), tmp_path) as envoy:
            while not await envoy.stat("ssl.fail_verify_san"):
                assert not await envoy.healthy()


@pytest.mark.proof
@pytest.mark.parametrize("limit", ["timeout", "idle_timeout"])
async def test_a_call_that_waits_is_cut_unless_its_route_has_no_limit(
    fronted: Fronted, tmp_path: Path, limit: str
) -> None:
    configs = {name: EnvoyConfig(fronted.tokenizers) for name in ("endless", "limited")}
    for config in configs.values():
        # Instead of 5 minutes; the other limit is 15 s.
        config.manager["stream_idle_timeout"] = "1s"
    del configs["limited"].route[limit]
    async with AsyncExitStack() as stack:
        clients = {}
        for name, config in configs.items():
            envoy = stack.enter_context(start_envoy(config, make_folder(tmp_path / name)))
            await envoy.wait_for_healthy(*fronted.tokenizers)
            channel = await stack.enter_async_context(make_channel(envoy.address))
            clients[name] = Client(channel, channel, channel)
        operator, _ = await stack.enter_async_context(fronted.connect())
        async with held_work(fronted.cell_address):
            waiting = asyncio.create_task(clients["endless"].generate(SHORT))
            with pytest.raises(grpc.aio.AioRpcError) as cut:
                await clients["limited"].generate(SHORT)
            assert cut.value.code() == grpc.StatusCode.INTERNAL
            # The call that was cut has left the queue.
            await operator.wait_until(lambda state: state.num_waiting == 1)
        assert (await waiting).reason == "MAX_TOKENS"


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path

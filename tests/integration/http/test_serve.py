"""`lockstep serve` with the HTTP API: its address, names and TLS, with clients' certificates, and how it drains."""

from __future__ import annotations

import asyncio
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from shared.network.rpc import Peer, make_channel
from shared.network.tls import Role, TrustedAuthority
from tests.support.cells.cell import REFERENCE, popen_lockstep, start_cell
from tests.support.cells.certificates import DOMAIN, Authority, write_files
from tests.support.cells.tls_cell import tls_flags
from tests.support.clients.client import connect
from tests.support.clients.http_answers import CHAT, COMPLETION, HttpAnswer, RefusedError, post_streamed, post_whole
from tests.support.models.tool_caller import write_tool_caller
from tests.support.system.ports import free_port

HEALTH = "/grpc.health.v1.Health/Check"
NUM_STREAMS = 4
NUM_TOKENS = 300
LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
SHORT = {"prompt": [5], "max_tokens": 1}


async def test_names_and_tls_over_the_real_processes(tiny_model: Path, tmp_path: Path) -> None:
    authority = Authority()
    clients = Authority("of clients")
    files = write_files(tmp_path, authority.issue_role(Role.TOKENIZER), authority)
    own = write_files(tmp_path / "client", clients.issue(), clients)
    address = f"127.0.0.1:{free_port()}"
    # The launcher needs a certificate too, to ask whether the tokenizer serves.
    flags = (f"--http-listen={address}", "--tokenizer.served-model-name=ada,bob", f"--client-ca={own.authority}")
    trusting = ssl.create_default_context(cadata=authority.pem.decode())
    with start_cell(tiny_model, *flags, *tls_flags(files)) as cell:
        trust = (f"--target={cell.address}", f"--tls-ca={files.authority}", f"--trust-domain={DOMAIN}")
        assert run_generate(*trust, f"--tls-cert={own.certificate}", f"--tls-key={own.key}") == 0
        stranger = Peer(TrustedAuthority(files.authority, DOMAIN), Role.TOKENIZER)
        async with make_channel(cell.address, peer=stranger) as channel:
            assert await channel.unary_unary(HEALTH)(b"").code() is grpc.StatusCode.UNAVAILABLE
        assert f", HTTP on {address}, " in cell.ready_line
        async with aiohttp.ClientSession() as session:
            options: dict[str, Any] = {"ssl": trusting, "server_hostname": f"{Role.TOKENIZER.value}.{DOMAIN}"}

            async def ask(method: str, path: str, **fields: Any) -> tuple[int, Any]:
                async with session.request(method, f"https://{address}{path}", **fields, **options) as response:
                    return response.status, await response.json()

            _, models = await ask("GET", "/v1/models")
            assert [(model["id"], model["root"]) for model in models["data"]] == [
                ("ada", tiny_model.name),
                ("bob", tiny_model.name),
            ]
            messages = [{"role": "user", "content": "hi"}]
            for body in ({}, {"model": "ada"}, {"model": "bob"}):
                status, answer = await ask("POST", CHAT, json={"messages": messages, "max_tokens": 2, **body})
                assert (status, answer["model"]) == (200, "ada")
            status, refused = await ask("POST", CHAT, json={"messages": messages, "model": "eve"})
            assert (status, refused["error"]["code"], refused["error"]["param"]) == (404, "model_not_found", "model")
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"https://{address}/ping")
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{address}/ping")


def run_generate(*flags: str) -> int:
    """The exit code of `lockstep generate`."""
    with popen_lockstep("generate", "hello", "--max-tokens=2", *flags, stderr=subprocess.PIPE) as process:
        process.communicate()
    return process.returncode


async def test_a_cell_that_drains_ends_its_streams_and_refuses_others(tmp_path: Path) -> None:
    model_dir = write_tool_caller(tmp_path / "model", num_layers=1)
    flags = (REFERENCE, f"--http-listen=127.0.0.1:{free_port()}", "--drain-s=3600")
    with start_cell(model_dir, *flags) as cell:
        async with cell.http_session() as session:
            before = await read_streams(session)
            streams = asyncio.create_task(read_streams(session))
            async with connect(cell) as client:
                await client.wait_until(lambda state: state.num_running == NUM_STREAMS)
            cell.launcher.send_signal(signal.SIGTERM)
            refusal = await refusal_of(session)
            assert not streams.done()
            after = await streams
        assert cell.wait() == 0
    assert (refusal.status, refusal.code) == (503, "draining")
    assert refusal.headers["Connection"] == "close"
    assert int(refusal.headers["Retry-After"]) >= 1
    for answer, expected in zip(after, before, strict=True):
        assert answer.choices == expected.choices
        assert len(answer.choices[0].token_ids) == NUM_TOKENS


async def read_streams(session: aiohttp.ClientSession) -> list[HttpAnswer]:
    bodies = [{"prompt": [5, number], **LONG} for number in range(10, 10 + NUM_STREAMS)]
    return await asyncio.gather(*(post_streamed(session, COMPLETION, body) for body in bodies))


async def refusal_of(session: aiohttp.ClientSession) -> RefusedError:
    """The error with which a request is refused once the cell drains."""
    while True:
        try:
            await post_whole(session, COMPLETION, SHORT)
        except RefusedError as error:
            return error

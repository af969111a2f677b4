"""Who may call which method and route of a cell with clients' keys; and what becomes of the keys."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil
import pytest

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from services.tokenizer.http.connections.clients import Audience
from services.tokenizer.http.route_table import NOT_SUPPORTED, ROUTES, STATE_ROUTE
from shared.network.access import CLIENT_METHODS, HEALTH_METHODS, METHOD_TO_ROLES
from shared.network.rpc import make_channel
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.cells.cell import Cell, popen_lockstep, start_cell
from tests.support.clients.client import greedy, read_answer
from tests.support.clients.key_files import key_line, write_keys
from tests.support.system.ports import free_port
from tests.support.system.scraping import get

# No log may have what is in all of them.
CANARY = "Zqxcanary7vjk"
KEY, OPERATOR, WITHDRAWN, UNKNOWN = (f"sk-{CANARY}-{name}" for name in ("one", "operator", "withdrawn", "unknown"))
CALLERS = {"no key": None, "unknown key": UNKNOWN, "key": KEY, "operator's key": OPERATOR}
HASHES = [sha256(key.encode()).hexdigest() for key in (KEY, OPERATOR, WITHDRAWN, UNKNOWN)]
LINES = (key_line(KEY, "a"), key_line(OPERATOR, "ops", is_operator=True))
REFLECTION = {method for method in METHOD_TO_ROLES if method.startswith("/grpc.reflection.")}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the keys."""
    return write_keys(tmp_path_factory.mktemp("keys") / "keys", *LINES)


@pytest.fixture(scope="module")
def keyed(tiny_model: Path, keys_file: Path) -> Iterator[Cell]:
    """A cell that needs keys on all its client ports, and logs all it can."""
    flags = [f"--{role}.manage-listen=127.0.0.1:0" for role in ("tokenizer", "scheduler")]
    http = f"--http-listen=127.0.0.1:{free_port()}"
    with start_cell(
        tiny_model, f"--client-keys={keys_file}", http, "--reflection", "--log-level=debug", *flags
    ) as cell:
        yield cell


def metadata_of(key: str | None, *, as_bearer: bool = True) -> tuple[tuple[str, str], ...]:
    """A call's metadata with a key, in one of the two places."""
    if key is None:
        return ()
    return (("authorization", f"Bearer {key}"),) if as_bearer else (("x-api-key", key),)


def expected_reason(method: str, caller: str) -> str | None:
    """Why a call that may not be made fails; None if it may."""
    if method in HEALTH_METHODS:
        return None
    if method not in CLIENT_METHODS | REFLECTION:
        return "unimplemented"
    if caller in ("no key", "unknown key"):
        return "UNAUTHENTICATED"
    return "PERMISSION_DENIED" if method in REFLECTION and caller == "key" else None


async def reason_to_refuse(channel: grpc.aio.Channel, method: str, key: str | None, *, as_bearer: bool) -> str | None:
    """Why an empty message is refused, as far as keys are concerned; on the wire one message is a stream too."""
    call = channel.unary_stream(method)(b"", metadata=metadata_of(key, as_bearer=as_bearer))
    failure = None
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        failure = error
    call.cancel()
    if failure is None:
        return None
    assert CANARY not in f"{failure.details()} {failure.debug_error_string()} {failure.trailing_metadata()}"
    reason = reason_of(status_from_rpc_error(failure))
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED and reason is None:
        return "unimplemented"
    return reason if reason in ("UNAUTHENTICATED", "PERMISSION_DENIED") else None


@pytest.mark.parametrize("service", ["tokenizer", "scheduler"])
async def test_each_method_takes_the_keys_that_it_should(keyed: Cell, service: str) -> None:
    own = f"/lockstep.v1.{service.title()}Service/"
    methods = {name for name in CLIENT_METHODS | METHOD_TO_ROLES.keys() if name.startswith(own) or name in REFLECTION}
    table = {(method, caller) for method in methods | HEALTH_METHODS for caller in CALLERS}
    address = keyed.address if service == "tokenizer" else keyed.scheduler_address
    async with make_channel(address) as channel:
        found = {
            (method, caller): await reason_to_refuse(channel, method, CALLERS[caller], as_bearer=len(method) % 2 == 0)
            for method, caller in table
        }
    assert found == {(method, caller): expected_reason(method, caller) for method, caller in table}


def routes() -> Iterator[tuple[str, str]]:
    """All routes, with some that there are not."""
    yield from ((route.method, route.path.format(id="tiny")) for route in ROUTES)
    yield from (("POST", path) for path in NOT_SUPPORTED)
    yield from (("GET", "/v2"), ("GET", "/v1/chat/completions"))
    yield from (("POST", "/health"), ("GET", "/health/x"), ("OPTIONS", "/v1/models"))


def paths_for(audience: Audience) -> set[str]:
    """The routes for an audience."""
    return {route.path for route in ROUTES if route.audience is audience}


async def test_each_route_takes_the_keys_that_it_should(keyed: Cell) -> None:
    for_operators, for_everybody = paths_for(Audience.OPERATORS), paths_for(Audience.EVERYBODY)
    async with keyed.http_session() as session:
        for method, path in routes():
            for caller, key in CALLERS.items():
                headers = dict(metadata_of(key, as_bearer=len(path) % 2 == 0))
                async with session.request(
                    method, path, headers=headers, json={} if method == "POST" else None
                ) as answer:
                    text = await answer.text()
                place = (method, path, caller, answer.status)
                assert CANARY not in f"{answer.headers} {text}", place
                if path in for_operators and caller == "key":
                    assert answer.status == 403, place
                    assert json.loads(text)["error"]["code"] == "permission_denied"
                elif caller in ("key", "operator's key") or (method == "GET" and path in for_everybody):
                    assert answer.status not in (401, 403), place
                    assert path != "/metrics" or answer.status == 404
                    assert path not in for_operators or (answer.status == 200 and "numWaiting" in text)
                else:
                    assert answer.status == 401, place
                    error = json.loads(text)["error"]
                    # Ollama's clients read a text.
                    is_refused = "key" in error if path.startswith("/api/") else error["type"] == "authentication_error"
                    assert is_refused, place
                    assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_a_withdrawn_key_ends_new_calls_and_no_stream(keyed: Cell, keys_file: Path) -> None:
    write_keys(keys_file, *LINES, key_line(WITHDRAWN, "a"))
    request = tokenizer_pb2.GenerateRequest(text="Hello", sampling=greedy(max_tokens=400, ignore_eos=True))
    body = {"prompt": "Hello", "stream": True, "max_tokens": 400, "ignore_eos": True}
    metadata = metadata_of(WITHDRAWN)
    async with make_channel(keyed.address) as channel, keyed.http_session() as session:
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        call = stub.Generate(request, metadata=metadata)
        assert (await call.read()).HasField("accepted")
        async with session.post("/v1/completions", json=body, headers=dict(metadata)) as stream:
            await stream.content.readline()
            write_keys(keys_file, *LINES)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_answer(stub.Generate(request, metadata=metadata))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            async with session.get("/v1/models", headers=dict(metadata)) as answer:
                assert answer.status == 401
            assert (await stream.text()).endswith("data: [DONE]\n\n")
        tokens = 0
        while (response := await call.read()) is not grpc.aio.EOF:
            tokens += len(response.token_ids)
        assert tokens == 400


async def test_the_id_of_another_tenants_request_says_nothing_and_ends_nothing(keyed: Cell) -> None:
    long = scheduler_pb2.SchedulerServiceGenerateRequest(prompt_token_ids=[5], request_id="same")
    long.sampling.CopyFrom(greedy(max_tokens=450, ignore_eos=True))
    short = scheduler_pb2.SchedulerServiceGenerateRequest(prompt_token_ids=[5], request_id="same")
    short.sampling.CopyFrom(greedy(max_tokens=2))
    abort = scheduler_pb2.AbortRequest(request_id="same")
    async with make_channel(keyed.scheduler_address) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.Generate(long, metadata=metadata_of(KEY))
        await call.read()
        await stub.Abort(abort, metadata=metadata_of(OPERATOR))
        # Served after that abort, and under the same id.
        answer = [response async for response in stub.Generate(short, metadata=metadata_of(OPERATOR))]
        assert answer[-1].HasField("usage")
        while (response := await call.read()) is not grpc.aio.EOF:
            last = response
        assert last.usage.num_completion_tokens == 450


def test_a_command_sends_the_key_in_its_file(keyed: Cell, tmp_path: Path) -> None:
    path, target = tmp_path / "key", f"--target={keyed.address}"

    def run(key: str, *flags: str, stdin: str = "") -> tuple[int, str]:
        path.write_text(f"{key}\n", encoding="ascii")
        with popen_lockstep(*flags, target, "--max-tokens=2", stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            _, stderr = process.communicate(stdin)
        assert CANARY not in stderr
        return process.returncode, stderr

    assert run(KEY, "generate", f"--key-file={path}", "Hello") == (0, "")
    assert run(KEY, "chat", f"--key-file={path}", stdin="Hello\n") == (0, "")
    status, stderr = run("", "generate", "Hello")
    assert (status, "needs a key" in stderr, "--key-file" in stderr) == (1, True, True)
    status, stderr = run(UNKNOWN, "chat", f"--key-file={path}", stdin="Hello\n")
    assert (status, "does not know the key in --key-file" in stderr) == (1, True)
    status, stderr = run(f"{KEY} {KEY}", "generate", f"--key-file={path}", "Hello")
    assert (status, f"--key-file {path}: must have one line" in stderr) == (2, True)


async def test_no_key_shows_anywhere(keyed: Cell, keys_file: Path) -> None:
    """Runs last: it sees what the other tests have left."""
    async with make_channel(keyed.address) as channel, aiohttp.ClientSession() as session:
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        request = tokenizer_pb2.GenerateRequest(text="Hello", sampling=greedy(max_tokens=2))
        await read_answer(stub.Generate(request, metadata=metadata_of(KEY)))
        odd = [("authorization", f"Basic {CANARY}"), ("authorization", CANARY), ("x-api-key", CANARY * 50)]
        for name, value in [*odd, ("x-api-key", f"{CANARY} {CANARY}")]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_answer(stub.Generate(request, metadata=((name, value),)))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert CANARY not in f"{caught.value.details()} {caught.value.trailing_metadata()}"
            async with session.get(f"http://{keyed.http_address}/v1/models", headers={name: value}) as answer:
                assert (answer.status, CANARY in await answer.text()) == (401, False)
    for bad in (f'{{"sha256": "{CANARY}", "tenant": "a"}}', f'{{"{CANARY}": 1}}', f"{CANARY}{{"):
        write_keys(keys_file, *LINES, bad)
        pages = "".join([(await get(address, "/metrics")).body for address in management_addresses(keyed)])
        assert "lockstep_client_keys_stale 1.0" in pages
        assert not any(secret in pages for secret in (CANARY, *HASHES))
    write_keys(keys_file, *LINES)
    state = await read_state_during_a_request(keyed)
    processes = [psutil.Process(keyed.launcher.pid), *keyed.find_processes().values()]
    shown = [(process.name(), process.cmdline(), process.environ()) for process in processes]
    log = keyed.log()
    assert log.count("changed client keys are not used") == 6, "each of two services, for each bad file"
    for text in (log, state, str(shown)):
        assert not any(secret in text for secret in (CANARY, *HASHES))


async def read_state_during_a_request(cell: Cell) -> str:
    """The state, on the cell's port and over HTTP, while a request is there whose every text is the canary."""
    body = {"prompt": CANARY, "stream": True, "max_tokens": 400, "ignore_eos": True, "cache_salt": CANARY}
    headers = dict(metadata_of(KEY))
    async with (
        make_channel(cell.cell_address, internal=True) as channel,
        cell.http_session() as session,
        session.post("/v1/completions", json=body, headers=headers) as stream,
    ):
        await stream.content.readline()
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        told = await stub.GetState(scheduler_pb2.GetStateRequest())
        assert told.num_running == 1
        async with session.get(STATE_ROUTE, headers=dict(metadata_of(OPERATOR))) as answer:
            assert answer.status == 200
            return f"{told} {await answer.text()}"


def management_addresses(cell: Cell) -> list[str]:
    """The addresses of the tokenizer and the scheduler."""
    ports = re.findall(r"serving metrics and probes .*'127.0.0.1', (\d+)", cell.log())
    assert len(ports) == 2
    return [f"127.0.0.1:{port}" for port in ports]

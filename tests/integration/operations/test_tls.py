"""A cell whose services talk over TCP with TLS, as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import grpc
import pytest

from lockstep.v1 import scheduler_pb2
from shared.network.rpc import Peer, make_channel
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.network.tls import Role, TrustedAuthority
from tests.support.cells.cell import popen_lockstep
from tests.support.cells.certificates import DOMAIN, Authority, Issued, write_files
from tests.support.cells.tls_cell import TlsCell, start_tls_cell, tls_flags
from tests.support.clients.client import token_request
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import start_service

PROMPT = [3, 1, 4, 1, 5]
NUM_STREAMS = 100
LONG = 450
NUM_HANDSHAKES = 600
NUM_STRANGERS = 3
POLL_S = 0.05

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, None)
UNAUTHENTICATED = (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
PERMISSION_DENIED = (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")


@pytest.fixture(scope="module")
def cell(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCell]:
    """A cell of two workers; tests may renew its certificates."""
    with start_tls_cell(tiny_model, tmp_path_factory.mktemp("certificates")) as cell:
        yield cell


def credentials(authority: Authority, issued: Issued | None, key: bytes | None = None) -> grpc.ChannelCredentials:
    """Credentials that no check of ours has seen; `key` replaces the certificate's own."""
    if issued is None:
        return grpc.ssl_channel_credentials(authority.pem)
    return grpc.ssl_channel_credentials(authority.pem, key or issued.key, issued.certificate)


def signed_elsewhere(authority: Authority) -> grpc.ChannelCredentials:
    return credentials(authority, Authority("another authority").issue_role(Role.OPERATOR))


def expired(authority: Authority) -> grpc.ChannelCredentials:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    return credentials(authority, authority.issue_role(Role.OPERATOR, expires_at=yesterday))


def of_no_role(authority: Authority) -> grpc.ChannelCredentials:
    return credentials(authority, authority.issue(dns=[f"guest.{DOMAIN}"], uris=[f"spiffe://{DOMAIN}/guest"]))


def without_uri(authority: Authority) -> grpc.ChannelCredentials:
    return credentials(authority, authority.issue(dns=[f"operator.{DOMAIN}"]))


def with_another_key(authority: Authority) -> grpc.ChannelCredentials:
    return credentials(authority, authority.issue_role(Role.OPERATOR), authority.issue_role(Role.OPERATOR).key)


async def refusal(address: str, server: Role, method: str, own: grpc.ChannelCredentials | None) -> object:
    """The code and reason with which a call of a method is refused; `own` is None for plaintext."""
    options = [("grpc.ssl_target_name_override", f"{server.value}.{DOMAIN}")]
    channel = grpc.aio.insecure_channel(address) if own is None else grpc.aio.secure_channel(address, own, options)
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method)(b"")
    return caught.value.code(), reason_of(status_from_rpc_error(caught.value))


STRANGERS: dict[str, tuple[Callable[[Authority], grpc.ChannelCredentials | None], object]] = {
    "plaintext": (lambda _: None, UNAVAILABLE),
    "no certificate": (lambda authority: credentials(authority, None), UNAVAILABLE),
    "another authority": (signed_elsewhere, UNAVAILABLE),
    "expired": (expired, UNAVAILABLE),
    "the key of another certificate": (with_another_key, UNAVAILABLE),
    "a name that is no role": (of_no_role, UNAUTHENTICATED),
    "no URI": (without_uri, UNAUTHENTICATED),
    "a worker": (lambda authority: credentials(authority, authority.issue_role(Role.WORKER)), PERMISSION_DENIED),
}


async def test_strangers_are_refused_and_disturb_nothing(cell: TlsCell) -> None:
    presented = {name: present(cell.authority) for name, (present, _) in STRANGERS.items()}
    expected = {name: outcome for name, (_, outcome) in STRANGERS.items()}
    request = token_request(PROMPT, max_tokens=LONG, ignore_eos=True)
    doors = (
        (cell.cell_address, Role.SCHEDULER, "/lockstep.v1.SchedulerService/GetState"),
        (cell.leader_address, Role.WORKER, "/lockstep.internal.v1.WorkerService/Attach"),
    )
    async with cell.connect() as client:
        undisturbed = await client.generate(request)
        neighbour = asyncio.create_task(client.generate(request))
        await client.wait_until(lambda state: state.num_running)
        for door in doors:
            refusals = await asyncio.gather(*(refusal(*door, own) for own in presented.values()))
            assert dict(zip(presented, refusals, strict=True)) == expected
        assert (await neighbour).token_ids == undisturbed.token_ids
        assert (await client.state()).num_lost_epochs == 0


async def test_handshakes_at_the_same_time_end_no_process(cell: TlsCell) -> None:
    await serve_one(cell)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    for address in (cell.address, cell.http_address, cell.scheduler_address, cell.cell_address, cell.leader_address):
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(partial(shake_hands, context), [address] * NUM_HANDSHAKES))
    await serve_one(cell)


def test_failed_handshakes_do_not_fill_the_log_of_a_service_without_a_launcher(tmp_path: Path) -> None:
    authority, log = Authority(), tmp_path / "log"
    files = write_files(tmp_path, authority.issue_role(Role.SCHEDULER), authority)
    address, cell_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    flags = (f"--listen={address}", f"--cell-listen={cell_address}", f"--workers=127.0.0.1:{free_port()}")
    with start_service("scheduler", *flags, *tls_flags(files), log=log) as process:
        while "scheduler: serving" not in log.read_text(encoding="utf-8"):
            assert process.poll() is None
            time.sleep(POLL_S)
        for _ in range(NUM_STRANGERS):
            host, port = cell_address.rsplit(":", 1)
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                # Until the server gives up.
                while connection.recv(1024):
                    pass
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert "ssl_transport_security" not in log.read_text(encoding="utf-8")


def shake_hands(context: ssl.SSLContext, address: str) -> None:
    """Connect without a certificate, as any stranger can, and leave."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection, contextlib.suppress(OSError):
        context.wrap_socket(connection).close()


async def test_client_ports_serve_clients_and_nothing_else(cell: TlsCell) -> None:
    await serve_one(cell)
    client = credentials(cell.authority, cell.client_authority.issue())
    methods = ("/lockstep.internal.v1.ExchangeService/Exchange", "/lockstep.v1.SchedulerService/GetState")
    # A direct client needs a certificate, which no role's is.
    doors = (
        (cell.address, Role.TOKENIZER, credentials(cell.authority, None)),
        (cell.scheduler_address, Role.SCHEDULER, client),
    )
    for address, role, own in doors:
        for method in methods:
            assert await refusal(address, role, method, own) == (grpc.StatusCode.UNIMPLEMENTED, None)
    operator = credentials(cell.authority, cell.authority.issue_role(Role.OPERATOR))
    for own in (credentials(cell.authority, None), operator):
        assert await refusal(cell.scheduler_address, Role.SCHEDULER, methods[1], own) == UNAVAILABLE
    assert await refusal(cell.cell_address, Role.SCHEDULER, methods[1], client) == UNAVAILABLE
    async with cell.connect() as connected:
        request = scheduler_pb2.SchedulerServiceGenerateRequest(prompt_token_ids=PROMPT)
        request.sampling.max_tokens = 2
        assert [response async for response in connected.scheduler.Generate(request)][-1].HasField("finish")


async def test_the_commands_take_certificates(cell: TlsCell) -> None:
    async with cell.connect():
        pass
    operator, domain = cell.files(Role.OPERATOR), f"--trust-domain={DOMAIN}"
    top = run_command("top", "--once", f"--target={cell.cell_address}", *tls_flags(operator))
    assert (top.returncode, top.stderr) == (0, "")
    assert top.stdout.startswith(f"scheduler {cell.cell_address}: ready")
    flags = (f"--target={cell.address}", f"--tls-ca={operator.authority}", domain, "--max-tokens=2")
    generate = run_command("generate", "hello", *flags)
    assert (generate.returncode, generate.stderr) == (0, "")
    refused = run_command("top", "--once", f"--target={cell.cell_address}")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: UNAVAILABLE: ")


def run_command(*args: str) -> subprocess.CompletedProcess[str]:
    with popen_lockstep(*args) as process:
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


@pytest.mark.slow
async def test_no_stream_breaks_by_two_rotations_and_garbage_between(cell: TlsCell) -> None:
    first, second = cell.authority, Authority("the next authority")
    async with cell.connect() as client:
        requests = [token_request([*PROMPT, number], max_tokens=LONG, ignore_eos=True) for number in range(NUM_STREAMS)]
        streams = asyncio.create_task(client.generate_all(requests))
        await client.wait_until(lambda state: state.num_running == NUM_STREAMS)
        cell.renew(first, second)
        await serve_one(cell)
        cell.spoil()
        await serve_one(cell)
        cell.renew(second, first)
        await serve_one(cell)
        # The servers' certificates are those of the second authority.
        for authority, code in ((second, None), (first, grpc.StatusCode.UNAVAILABLE)):
            assert await health_code(cell, authority) is code
        assert (await client.state()).num_running == NUM_STREAMS
        for completion in await streams:
            assert (completion.reason, len(completion.token_ids)) == ("MAX_TOKENS", LONG)
            assert completion.finish is not None
            assert completion.finish.recovery.resume_count == 0


@pytest.mark.slow
async def test_links_made_after_a_rotation_use_the_new_certificates(cell: TlsCell) -> None:
    async with cell.connect() as client:
        stream = asyncio.create_task(client.generate(token_request(PROMPT, max_tokens=LONG, ignore_eos=True)))
        await client.wait_until(lambda state: state.num_running)
        # What the former authority has signed is good for nothing now.
        cell.renew(Authority("another authority"))
        cell.restart_scheduler()
        assert len((await stream).token_ids) == LONG
        await serve_one(cell)


async def serve_one(cell: TlsCell) -> None:
    """Serve a request over new connections."""
    async with cell.connect() as client:
        await client.generate(token_request(PROMPT, max_tokens=1))
        await client.state()


async def health_code(cell: TlsCell, trusted: Authority) -> grpc.StatusCode | None:
    """The code with which a client that trusts one authority fails at the tokenizer's port; None if it is served."""
    path = cell.files(Role.OPERATOR).authority.with_name("one.crt")
    path.write_bytes(trusted.pem)
    async with make_channel(cell.address, peer=Peer(TrustedAuthority(path, DOMAIN), Role.TOKENIZER)) as channel:
        try:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        except grpc.aio.AioRpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return None

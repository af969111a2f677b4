"""TLS between services: which peers are accepted, what they may call, and how certificates are renewed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from shared.network.health import Health
from shared.network.rpc import Peer, make_channel, make_server
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.network.tls import Certificates, Role, TlsError, TrustedAuthority
from shared.process.metrics import TlsCollector
from tests.support.cells.certificates import DOMAIN, Authority, Issued, write_files
from tests.support.system.ports import free_port

AUTHORITY = Authority()


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers `Restart`, and repeats the ids of steps."""

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Restart(self, request: Any, context: Any) -> worker_pb2.RestartResponse:
        return worker_pb2.RestartResponse()

    async def Execute(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.StepResult]:
        async for request in request_iterator:
            yield worker_pb2.StepResult(step_id=request.step_id)


def certificates(folder: Path, role: Role, issuer: Authority = AUTHORITY) -> Certificates:
    """A service's certificate of `issuer`, which it trusts beside `AUTHORITY`."""
    return Certificates(write_files(folder, issuer.issue_role(role), *{AUTHORITY, issuer}), role)


@asynccontextmanager
async def serving(own: Certificates, *, internal: bool = True) -> AsyncIterator[str]:
    address = f"localhost:{free_port()}"
    server = make_server(address, [Worker(), Health(())], internal=internal, certificates=own)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def restart(address: str, peer: Peer | None) -> None:
    async with make_channel(address, internal=True, peer=peer) as channel:
        await worker_pb2_grpc.WorkerServiceStub(channel).Restart(worker_pb2.RestartRequest())


async def refusal(address: str, peer: Peer | None) -> tuple[grpc.StatusCode, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await restart(address, peer)
    return caught.value.code(), reason_of(status_from_rpc_error(caught.value))


def open_channel_with(address: str, issued: Issued) -> grpc.aio.Channel:
    """A channel of a client whose own checks would have refused its certificate."""
    credentials = grpc.ssl_channel_credentials(AUTHORITY.pem, issued.key, issued.certificate)
    return grpc.aio.secure_channel(address, credentials, [("grpc.ssl_target_name_override", f"worker.{DOMAIN}")])


async def test_a_peer_whose_role_may_call_a_method_is_served(tmp_path: Path) -> None:
    scheduler = certificates(tmp_path / "scheduler", Role.SCHEDULER)
    async with serving(certificates(tmp_path / "worker", Role.WORKER)) as address:
        await restart(address, Peer(scheduler, Role.WORKER))


@pytest.mark.parametrize("role", [Role.TOKENIZER, Role.WORKER, Role.OPERATOR])
async def test_a_role_that_may_not_call_a_method_is_refused(tmp_path: Path, role: Role) -> None:
    async with serving(certificates(tmp_path / "worker", Role.WORKER)) as address:
        peer = Peer(certificates(tmp_path / "peer", role), Role.WORKER)
        assert await refusal(address, peer) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")


async def test_a_message_of_a_peer_that_is_refused_is_not_parsed(tmp_path: Path) -> None:
    async with serving(certificates(tmp_path / "worker", Role.WORKER)) as address:
        peer = Peer(certificates(tmp_path / "peer", Role.TOKENIZER), Role.WORKER)
        async with make_channel(address, internal=True, peer=peer) as channel:
            call = channel.unary_unary("/lockstep.internal.v1.WorkerService/Restart")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"\xff not a message")
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_certificate_without_a_role_is_unauthenticated(tmp_path: Path) -> None:
    nameless = AUTHORITY.issue(dns=[f"scheduler.{DOMAIN}"])
    async with (
        serving(certificates(tmp_path / "worker", Role.WORKER)) as address,
        open_channel_with(address, nameless) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerServiceStub(channel).Restart(worker_pb2.RestartRequest())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_strangers_get_no_connection(tmp_path: Path) -> None:
    other = Authority("another authority")
    own = certificates(tmp_path / "worker", Role.WORKER)
    signed_elsewhere = certificates(tmp_path / "other", Role.SCHEDULER, other)
    yesterday = datetime.now(UTC) - timedelta(days=1)
    expired = AUTHORITY.issue_role(Role.SCHEDULER, expires_at=yesterday)
    async with serving(own) as address, open_channel_with(address, expired) as old:
        for peer in (None, Peer(signed_elsewhere, Role.WORKER)):
            code, _ = await refusal(address, peer)
            assert code is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerServiceStub(old).Restart(worker_pb2.RestartRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # None of them disturbed those that may call.
        await restart(address, Peer(certificates(tmp_path / "scheduler", Role.SCHEDULER), Role.WORKER))


async def test_a_server_of_another_role_or_authority_is_not_called(tmp_path: Path) -> None:
    scheduler = certificates(tmp_path / "scheduler", Role.SCHEDULER)
    async with serving(certificates(tmp_path / "worker", Role.WORKER)) as address:
        assert (await refusal(address, Peer(scheduler, Role.SCHEDULER)))[0] is grpc.StatusCode.UNAVAILABLE
    foreign = Authority("another authority")
    async with serving(certificates(tmp_path / "foreign", Role.WORKER, foreign)) as address:
        assert (await refusal(address, Peer(scheduler, Role.WORKER)))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_client_port_asks_for_no_certificate_and_serves_only_its_own_methods(tmp_path: Path) -> None:
    async with serving(certificates(tmp_path / "worker", Role.WORKER), internal=False) as address:
        credentials = grpc.ssl_channel_credentials(AUTHORITY.pem)
        options = [("grpc.ssl_target_name_override", f"worker.{DOMAIN}")]
        async with grpc.aio.secure_channel(address, credentials, options) as channel:
            health = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await health(b"") == b"\x08\x02"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await worker_pb2_grpc.WorkerServiceStub(channel).Restart(worker_pb2.RestartRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_unix_socket_has_neither_tls_nor_roles(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    own = certificates(tmp_path / "worker", Role.WORKER)
    server = make_server(address, [Worker()], internal=True, certificates=own)
    await server.start()
    for peer in (None, Peer(certificates(tmp_path / "peer", Role.TOKENIZER), Role.WORKER)):
        await restart(address, peer)
    await server.stop(None)


async def test_a_client_without_a_certificate_checks_the_servers_role_or_its_address(tmp_path: Path) -> None:
    files = write_files(tmp_path / "worker", AUTHORITY.issue_role(Role.WORKER), AUTHORITY)
    health = "/grpc.health.v1.Health/Check"
    async with serving(Certificates(files, Role.WORKER), internal=False) as address:
        peer = Peer(TrustedAuthority(files.authority, DOMAIN), Role.WORKER)
        async with make_channel(address, peer=peer) as channel:
            assert await channel.unary_unary(health)(b"") == b"\x08\x02"
        # The certificate does not name localhost.
        async with make_channel(address, peer=Peer(TrustedAuthority(files.authority, None), Role.WORKER)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(health)(b"")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_renewed_files_are_used_by_new_connections_and_break_no_stream(tmp_path: Path) -> None:
    own = certificates(tmp_path / "worker", Role.WORKER)
    scheduler = certificates(tmp_path / "scheduler", Role.SCHEDULER)
    successor = Authority("the next authority")
    async with serving(own) as address, make_channel(address, internal=True, peer=Peer(scheduler, Role.WORKER)) as old:
        stream = worker_pb2_grpc.WorkerServiceStub(old).Execute()
        await stream.write(worker_pb2.StepRequest(step_id=1))
        assert (await stream.read()).step_id == 1
        for folder, role in (("worker", Role.WORKER), ("scheduler", Role.SCHEDULER)):
            write_files(tmp_path / folder, successor.issue_role(role), successor)
        await restart(address, Peer(scheduler, Role.WORKER))
        await stream.write(worker_pb2.StepRequest(step_id=2))
        assert (await stream.read()).step_id == 2
        stream.cancel()


async def test_files_that_do_not_fit_leave_the_last_good_ones_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = certificates(tmp_path / "worker", Role.WORKER)
    scheduler = Peer(certificates(tmp_path / "scheduler", Role.SCHEDULER), Role.WORKER)
    async with serving(own) as address:
        for key in (b"garbage", AUTHORITY.issue_role(Role.WORKER).key):
            (tmp_path / "worker" / "tls.key").write_bytes(key)
            with caplog.at_level(logging.WARNING):
                await asyncio.gather(*(restart(address, scheduler) for _ in range(5)))
        assert own.num_failed_reads == 2
        assert sum("not used" in record.message for record in caplog.records) == 2
        write_files(tmp_path / "worker", AUTHORITY.issue_role(Role.WORKER), AUTHORITY)
        await restart(address, scheduler)
        assert own.num_failed_reads == 2


def test_renewed_files_whose_authority_does_not_cover_the_certificate_are_not_used(tmp_path: Path) -> None:
    own = certificates(tmp_path, Role.WORKER)
    expires_at, later = own.expires_at, datetime(2090, 1, 1, tzinfo=UTC)
    successor = Authority("the next authority")
    renewed = successor.issue_role(Role.WORKER, expires_at=later)
    write_files(tmp_path, renewed, AUTHORITY)
    assert (own.expires_at, own.num_failed_reads) == (expires_at, 1)
    write_files(tmp_path, renewed, AUTHORITY, successor)
    assert (own.expires_at, own.num_failed_reads) == (later, 1)
    # The last step of a change of authority.
    write_files(tmp_path, renewed, successor)
    assert (own.expires_at, own.num_failed_reads) == (later, 1)


def test_a_scrape_reads_changed_files_and_reports_the_expiry_of_those_in_use(tmp_path: Path) -> None:
    expiries = [datetime(2090 + year, 1, 1, tzinfo=UTC) for year in range(2)]
    issued = [AUTHORITY.issue_role(Role.WORKER, expires_at=expires_at) for expires_at in expiries]
    registry = CollectorRegistry()
    registry.register(TlsCollector(Certificates(write_files(tmp_path, issued[0], AUTHORITY), Role.WORKER)))

    def scrape() -> tuple[float | None, float | None]:
        expiry = registry.get_sample_value("lockstep_tls_certificate_expiry_timestamp_seconds")
        return registry.get_sample_value("lockstep_tls_failed_reads_total"), expiry

    assert scrape() == (0, expiries[0].timestamp())
    (tmp_path / "tls.crt").write_bytes(b"garbage")
    assert [scrape(), scrape()] == [(1, expiries[0].timestamp())] * 2
    write_files(tmp_path, issued[1], AUTHORITY)
    assert scrape() == (1, expiries[1].timestamp())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tls.crt", b"garbage", "--tls-cert .*: no certificate in PEM"),
        ("tls.key", b"garbage", "--tls-key .*: not an unencrypted private key"),
        ("tls.key", AUTHORITY.issue().key, "--tls-key .* is not the key of --tls-cert"),
        ("ca.crt", b"", "--tls-ca .*: no certificate in PEM"),
    ],
)
def test_unusable_files_are_refused_at_start(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    files = write_files(tmp_path, AUTHORITY.issue_role(Role.WORKER), AUTHORITY)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TlsError, match=message):
        Certificates(files, Role.WORKER)


@pytest.mark.parametrize(
    ("issued", "message"),
    [
        (AUTHORITY.issue(), f"lacks the DNS name worker.{DOMAIN}"),
        (AUTHORITY.issue(dns=[f"worker.{DOMAIN}"]), f"lacks the URI spiffe://{DOMAIN}/worker"),
        (AUTHORITY.issue_role(Role.SCHEDULER), f"lacks the DNS name worker.{DOMAIN}"),
        (AUTHORITY.issue_role(Role.WORKER, expires_at=datetime(2020, 1, 1, tzinfo=UTC)), "expired at 2020-01-01"),
    ],
)
def test_a_certificate_that_is_not_the_roles_is_refused_at_start(tmp_path: Path, issued: Issued, message: str) -> None:
    with pytest.raises(TlsError, match=message):
        Certificates(write_files(tmp_path, issued, AUTHORITY), Role.WORKER)


@pytest.mark.parametrize("name", ["another authority", "test authority"])
def test_a_certificate_that_its_own_authority_does_not_cover_is_refused_at_start(tmp_path: Path, name: str) -> None:
    # The second has the name of the right authority, but another key.
    issued = Authority(name).issue_role(Role.WORKER)
    with pytest.raises(TlsError, match=f"--tls-ca .* does not cover --tls-cert .*, whose issuer is CN={name}"):
        Certificates(write_files(tmp_path, issued, AUTHORITY), Role.WORKER)


async def test_a_certificate_is_covered_by_way_of_the_intermediate_ones_in_its_file(tmp_path: Path) -> None:
    upper = Authority("upper", AUTHORITY)
    lower = Authority("lower", upper)
    issued = lower.issue_role(Role.WORKER)
    with pytest.raises(TlsError, match="does not cover"):
        Certificates(write_files(tmp_path, Issued(issued.certificate + lower.pem, issued.key), AUTHORITY), Role.WORKER)
    # One that signed none of the others, and those of the chain in an order that is not theirs.
    chain = b"".join([issued.certificate, Authority().pem, upper.pem, lower.pem])
    own = Certificates(write_files(tmp_path / "worker", Issued(chain, issued.key), AUTHORITY), Role.WORKER)
    async with serving(own) as address:
        await restart(address, Peer(certificates(tmp_path / "scheduler", Role.SCHEDULER), Role.WORKER))


@pytest.mark.parametrize("trusts", ["itself", "its issuer"])
def test_a_certificate_is_covered_by_itself_or_by_an_issuer_that_is_no_root(tmp_path: Path, trusts: str) -> None:
    lower = Authority("lower", AUTHORITY)
    issued = lower.issue_role(Role.WORKER)
    files = write_files(tmp_path, issued, lower)
    if trusts == "itself":
        files.authority.write_bytes(issued.certificate)
    assert Certificates(files, Role.WORKER).expires_at > datetime.now(UTC)


def test_a_missing_file_is_refused_at_start(tmp_path: Path) -> None:
    files = write_files(tmp_path, AUTHORITY.issue_role(Role.WORKER), AUTHORITY)
    files.key.unlink()
    with pytest.raises(TlsError, match=r"--tls-key .*: No such file"):
        Certificates(files, Role.WORKER)

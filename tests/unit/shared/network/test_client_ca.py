"""Certificates of clients: whom a client port lets in, and how their authority is replaced."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.network.health import Health
from shared.network.rpc import Peer, make_channel, make_server
from shared.network.tls import Certificates, Role, TlsError, TlsFiles, TrustedAuthority
from tests.support.cells.certificates import DOMAIN, Authority, Issued, write_files
from tests.support.system.ports import free_port

SERVICES, CLIENTS = Authority("of services"), Authority("of clients")
OWN = SERVICES.issue_role(Role.TOKENIZER)


def expired(authority: Authority) -> Issued:
    return authority.issue(expires_at=datetime.now(UTC) - timedelta(days=1))


def by_way_of_another(authority: Authority) -> Issued:
    lower = Authority("lower", authority)
    issued = lower.issue()
    return Issued(issued.certificate + lower.pem, issued.key)


# What a peer may show, and whether a client port and a cell port let it in.
SHOWN: dict[str, tuple[Callable[[], Issued | None], bool, bool]] = {
    "nothing": (lambda: None, False, False),
    "a client's": (CLIENTS.issue, True, False),
    "a client's, by way of an intermediate one": (lambda: by_way_of_another(CLIENTS), True, False),
    "an expired one": (lambda: expired(CLIENTS), False, False),
    "a stranger's": (Authority("of clients").issue, False, False),
    "a role's": (lambda: SERVICES.issue_role(Role.OPERATOR), False, True),
    "the service's own": (lambda: OWN, True, True),
    "a client's with another key": (lambda: Issued(CLIENTS.issue().certificate, CLIENTS.issue().key), False, False),
}


def write(folder: Path, own: Issued = OWN, authority: Authority = CLIENTS) -> TlsFiles:
    """The files of a tokenizer whose clients need certificates."""
    files = write_files(folder, own, SERVICES)
    return dataclasses.replace(files, client_authority=replace(folder / "clients.crt", authority.pem))


def replace(path: Path, data: bytes) -> Path:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    return new.replace(path)


@asynccontextmanager
async def serving(own: Certificates, *, internal: bool = False) -> AsyncIterator[str]:
    address = f"127.0.0.1:{free_port()}"
    server = make_server(address, [Health(())], internal=internal, certificates=own)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def open_channel(address: str, shown: Issued | None) -> grpc.aio.Channel:
    own = () if shown is None else (shown.key, shown.certificate)
    credentials = grpc.ssl_channel_credentials(SERVICES.pem, *own)
    return grpc.aio.secure_channel(address, credentials, [("grpc.ssl_target_name_override", f"tokenizer.{DOMAIN}")])


async def is_served(address: str, shown: Issued | None) -> bool:
    """Whether a peer that shows this over a new connection is served; if not, it has none."""
    async with open_channel(address, shown) as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return bool(code is grpc.StatusCode.OK)


@pytest.mark.parametrize("internal", [False, True])
async def test_a_port_lets_in_whose_certificate_its_own_authority_has_signed(tmp_path: Path, internal: bool) -> None:
    async with serving(Certificates(write(tmp_path), Role.TOKENIZER), internal=internal) as address:
        found = {name: await is_served(address, make()) for name, (make, _, _) in SHOWN.items()}
    assert found == {name: on_cell if internal else on_client for name, (_, on_client, on_cell) in SHOWN.items()}


async def test_a_replaced_authority_decides_on_new_connections_alone(tmp_path: Path) -> None:
    files, successor = write(tmp_path), Authority("the next of clients")
    old, new = CLIENTS.issue(), successor.issue()
    async with serving(Certificates(files, Role.TOKENIZER)) as address, open_channel(address, old) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await call.read()
        write(tmp_path, authority=successor)
        assert [await is_served(address, shown) for shown in (old, new)] == [False, True]
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert not call.done()
        call.cancel()


async def test_an_authority_that_cannot_be_read_is_reported_once_and_holds_up_no_other_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, client, later = write(tmp_path), CLIENTS.issue(), datetime(2090, 1, 1, tzinfo=UTC)
    own = Certificates(files, Role.TOKENIZER)
    assert files.client_authority is not None
    with caplog.at_level(logging.WARNING):
        async with serving(own) as address:
            for _ in range(2):
                files.client_authority.write_bytes(b"garbage")
                assert await is_served(address, client)
            assert own.num_failed_reads == sum("not used" in record.message for record in caplog.records) >= 1
            write_files(tmp_path, SERVICES.issue_role(Role.TOKENIZER, expires_at=later), SERVICES)
            assert (await is_served(address, client), own.expires_at) == (True, later)
            # The service's own is no longer the one that it was.
            assert not await is_served(address, OWN)


async def test_no_new_configuration_is_made_while_the_files_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC frees the former one, which another handshake may be about to use."""
    made: list[object] = []
    make = grpc.ssl_server_certificate_configuration

    def count(*args: object) -> object:
        made.append(args)
        return make(*args)

    monkeypatch.setattr(grpc, "ssl_server_certificate_configuration", count)
    async with serving(Certificates(write(tmp_path), Role.TOKENIZER)) as address:
        for _ in range(3):
            assert await is_served(address, CLIENTS.issue())
            write(tmp_path)
    assert len(made) == 1


@pytest.mark.parametrize(("data", "message"), [(b"", "no certificate in PEM"), (None, "No such file")])
def test_an_unusable_authority_is_refused_at_start(tmp_path: Path, data: bytes | None, message: str) -> None:
    files = dataclasses.replace(write(tmp_path), client_authority=tmp_path / "none")
    if data is not None:
        (tmp_path / "none").write_bytes(data)
    with pytest.raises(TlsError, match=f"--client-ca .*: {message}"):
        Certificates(files, Role.TOKENIZER)


async def test_a_client_without_a_role_shows_its_certificate(tmp_path: Path) -> None:
    shown = write_files(tmp_path / "client", CLIENTS.issue(), SERVICES)
    own = TrustedAuthority(shown.authority, DOMAIN, certificate=shown.certificate, key=shown.key)
    async with (
        serving(Certificates(write(tmp_path / "tokenizer"), Role.TOKENIZER)) as address,
        make_channel(address, peer=Peer(own, Role.TOKENIZER)) as channel,
    ):
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    shown.key.write_bytes(CLIENTS.issue().key)
    with pytest.raises(TlsError, match=r"--tls-key .* is not the key of --tls-cert"):
        TrustedAuthority(shown.authority, DOMAIN, certificate=shown.certificate, key=shown.key)

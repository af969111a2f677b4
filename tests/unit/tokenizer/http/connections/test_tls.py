"""The HTTP API with the certificate of the gRPC port."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from aiohttp import web
from cryptography import x509

from services.tokenizer.http.connections.limits import HttpLimits
from services.tokenizer.http.connections.server import serve_http
from services.tokenizer.http.connections.tls_listener import MAX_HANDSHAKES
from shared.network.tls import Certificates, Role
from tests.support.cells.certificates import DOMAIN, Authority, Issued, write_files
from tests.support.system.ports import free_port
from tests.support.tokenizer.http_client import run_http_service
from tests.support.tokenizer.raw_http import connect


def tls_settings(tmp_path: Path, authority: Authority) -> dict[str, Any]:
    files = write_files(tmp_path / "tls", authority.issue_role(Role.TOKENIZER), authority)
    return {
        "tls_cert": files.certificate,
        "tls_key": files.key,
        "tls_ca": files.authority,
        "trust_domain": files.trust_domain,
    }


async def ask_ping(port: int, context: ssl.SSLContext, host: str = "127.0.0.1") -> tuple[bytes, bytes]:
    """Ask for /ping; returns the answer, which is empty if the connection is closed, and the server's certificate."""
    name = f"{Role.TOKENIZER.value}.{DOMAIN}"
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    writer.write(b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return answer, certificate


async def served_certificate(port: int, context: ssl.SSLContext, host: str = "127.0.0.1") -> int:
    """The serial number of the certificate of a server that answers."""
    answer, certificate = await ask_ping(port, context, host)
    assert answer.startswith(b"HTTP/1.1 200 ")
    return x509.load_der_x509_certificate(certificate).serial_number


async def test_any_address_of_ipv6_is_any_of_ipv4_too(model_dir: Path, tmp_path: Path) -> None:
    authority, port = Authority(), free_port()
    settings = tls_settings(tmp_path, authority)
    context = ssl.create_default_context(cadata=authority.pem.decode())
    async with run_http_service(model_dir, tmp_path, http_listen=f"[::]:{port}", **settings):
        assert await served_certificate(port, context, "::1") == await served_certificate(port, context, "127.0.0.1")


async def test_a_handshake_that_does_not_end_ends_its_connection(model_dir: Path, tmp_path: Path) -> None:
    authority, address = Authority(), f"127.0.0.1:{free_port()}"
    limits = HttpLimits(head_s=0.05)
    settings = tls_settings(tmp_path, authority)
    async with run_http_service(model_dir, tmp_path, http_listen=address, http_limits=limits, **settings):
        # A record of a greeting of which most is missing, and no byte at all.
        for begun in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b""):
            async with connect(address) as client:
                await client.send(begun)
                assert (await client.read_to_end()).statuses == []


async def test_the_oldest_of_too_many_handshakes_ends_its_connection(model_dir: Path, tmp_path: Path) -> None:
    authority, port = Authority(), free_port()
    settings = tls_settings(tmp_path, authority)
    context = ssl.create_default_context(cadata=authority.pem.decode())
    address = f"127.0.0.1:{port}"
    async with run_http_service(model_dir, tmp_path, http_listen=address, **settings), AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connect(address)) for _ in range(MAX_HANDSHAKES + 3)]
        assert await served_certificate(port, context)
        # One has made room for the client that was served.
        for client in silent[:4]:
            assert (await client.read_to_end()).statuses == []
        for client in silent[4:]:
            assert await client.send(b"\x16")


async def test_new_connections_get_the_renewed_certificate(model_dir: Path, tmp_path: Path) -> None:
    authority, port = Authority(), free_port()
    settings = tls_settings(tmp_path, authority)
    context = ssl.create_default_context(cadata=authority.pem.decode())
    async with run_http_service(model_dir, tmp_path, http_listen=f"127.0.0.1:{port}", **settings):
        first = await served_certificate(port, context)
        assert await served_certificate(port, context) == first
        write_files(tmp_path / "tls", authority.issue_role(Role.TOKENIZER), authority)
        assert await served_certificate(port, context) != first


async def test_a_client_may_show_a_certificate_which_its_authority_must_have_signed(tmp_path: Path) -> None:
    services, clients, successor = Authority(), Authority("of clients"), Authority("the next of clients")
    path = tmp_path / "clients.crt"
    path.write_bytes(clients.pem)
    own = services.issue_role(Role.TOKENIZER)
    files = dataclasses.replace(write_files(tmp_path / "tls", own, services), client_authority=path)
    # Those that show none, one of each authority, and the service's own.
    shown = (None, clients.issue(), successor.issue(), Authority("of clients").issue(), own)
    contexts = [showing(services, issued, tmp_path) for issued in shown]
    app = web.Application()
    app.add_routes([web.get("/ping", answer_ping)])
    port = free_port()
    certificates = Certificates(files, Role.TOKENIZER)
    http = await serve_http(f"127.0.0.1:{port}", app, certificates=certificates, limits=HttpLimits())
    assert [await is_served(port, context) for context in contexts] == [True, True, False, False, True]
    # The last good files of the service stay in use beside the new one.
    files.certificate.write_bytes(b"garbage")
    path.write_bytes(successor.pem)
    assert [await is_served(port, context) for context in contexts] == [True, False, True, False, True]
    assert certificates.num_failed_reads == 1
    await http.stop()


async def answer_ping(_request: web.Request) -> web.Response:
    return web.Response()


def showing(trusted: Authority, issued: Issued | None, folder: Path) -> ssl.SSLContext:
    """What a client that shows a certificate connects with."""
    context = ssl.create_default_context(cadata=trusted.pem.decode())
    if issued is not None:
        files = write_files(folder / "client", issued, trusted)
        context.load_cert_chain(files.certificate, files.key)
    return context


async def is_served(port: int, context: ssl.SSLContext) -> bool:
    """Whether a client's connection lasts until it has an answer."""
    try:
        answer, _ = await ask_ping(port, context)
    except (ssl.SSLError, ConnectionError):
        return False
    return answer.startswith(b"HTTP/1.1 200 ")

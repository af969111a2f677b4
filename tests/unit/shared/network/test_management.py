"""The management port over real sockets: its answers, and its resistance to misbehaving clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from shared.network.management import MAX_CONNECTIONS, MAX_REQUEST_BYTES, REQUEST_TIMEOUT_S, serve_management
from shared.network.probes import Probes


@asynccontextmanager
async def serving(
    tmp_path: Path, *, request_timeout_s: float = REQUEST_TIMEOUT_S, probes: Probes | None = None
) -> AsyncIterator[Path]:
    """A page with one gauge of value 7, on a socket."""
    registry = CollectorRegistry()
    Gauge("answer", "What is asked for.", registry=registry).set(7)
    path = tmp_path / "metrics"
    probes = probes or Probes("nothing")
    server = await serve_management(f"unix:{path}", registry, probes, request_timeout_s=request_timeout_s)
    assert server is not None
    async with server:
        yield path


async def exchange(path: Path, request: bytes) -> tuple[str, dict[str, str], str]:
    """Send bytes and read to the end; returns the status line, the headers and the body."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(request)
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    status, *lines = head.split("\r\n")
    return status, dict(line.split(": ", 1) for line in lines), body


async def test_a_get_is_answered_with_the_page_in_prometheus_format(tmp_path: Path) -> None:
    async with serving(tmp_path) as path:
        request = b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text\r\n\r\n"
        status, headers, body = await exchange(path, request)
    assert status == "HTTP/1.1 200 OK"
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert headers["Content-Length"] == str(len(body))
    assert headers["Connection"] == "close"
    (family,) = text_string_to_metric_families(body)
    assert (family.name, family.documentation, family.samples[0].value) == ("answer", "What is asked for.", 7.0)


@pytest.mark.parametrize("path", ["/metrics", "/livez", "/readyz", "/startupz"])
async def test_a_head_is_answered_like_a_get_without_the_body(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path) as address:
        status, headers, body = await exchange(address, f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = await exchange(address, f"HEAD {path} HTTP/1.1\r\n\r\n".encode())
    assert body
    assert answer == (status, headers, "")


async def test_a_process_whose_work_is_stuck_does_not_live(tmp_path: Path) -> None:
    answers = iter((None, "it is stuck"))
    async with serving(tmp_path, probes=Probes("nothing", stuck=lambda: next(answers))) as path:
        for expected in ("200 ok", "503 it is stuck"):
            status, _, body = await exchange(path, b"GET /livez HTTP/1.1\r\n\r\n")
            assert f"{status.split()[1]} {body.strip()}" == expected


async def test_probes_follow_a_process_through_its_life(tmp_path: Path) -> None:
    probes = Probes("the weights are loading")

    async def ask() -> list[str]:
        answers = [await exchange(path, f"GET {name} HTTP/1.1\r\n\r\n".encode()) for name in names]
        return [f"{status.split()[1]} {body.strip()}" for status, _, body in answers]

    names = ("/livez", "/startupz", "/readyz")
    async with serving(tmp_path, probes=probes) as path:
        assert await ask() == ["200 ok", "503 the weights are loading", "503 the weights are loading"]
        probes.set_waiting("the others have not joined")
        assert await ask() == ["200 ok", "503 the others have not joined", "503 the others have not joined"]
        probes.set_started()
        assert await ask() == ["200 ok", "200 ok", "200 ok"]
        probes.set_obstacle("not linked to a scheduler")
        assert await ask() == ["200 ok", "200 ok", "503 not linked to a scheduler"]
        probes.set_obstacle(None)
        probes.is_leaving = True
        assert await ask() == ["200 ok", "200 ok", "503 leaving"]


async def test_without_an_address_nothing_is_served() -> None:
    assert await serve_management(None, CollectorRegistry(), Probes("nothing")) is None


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", "404 Not Found"),
        (b"GET /metricsx HTTP/1.1", "404 Not Found"),
        (b"GET /readyz/ HTTP/1.1", "404 Not Found"),
        (b"HEAD /debug/pprof HTTP/1.1", "404 Not Found"),
        (b"POST /metrics HTTP/1.1", "405 Method Not Allowed"),
        (b"DELETE /readyz HTTP/1.1", "405 Method Not Allowed"),
        (b"GET /metrics HTTP/2", "400 Bad Request"),
        (b"GET /metrics", "400 Bad Request"),
        (b"\x16\x03\x01", "400 Bad Request"),
        (b"", "400 Bad Request"),
    ],
)
async def test_anything_else_is_refused(tmp_path: Path, request_line: bytes, status: str) -> None:
    async with serving(tmp_path) as path:
        status_line, headers, body = await exchange(path, request_line + b"\r\nHost: a\r\n\r\n")
    assert (status_line, body) == (f"HTTP/1.1 {status}", "")
    assert headers.get("Allow") == ("GET, HEAD" if status.startswith("405") else None)


async def test_an_endless_request_is_refused_at_its_size_limit(tmp_path: Path) -> None:
    async with serving(tmp_path) as path:
        status, _, _ = await exchange(path, b"GET /metrics HTTP/1.1\r\nX: ".ljust(MAX_REQUEST_BYTES + 4, b"x"))
    assert status == "HTTP/1.1 431 Request Header Fields Too Large"


async def test_a_silent_client_is_disconnected(tmp_path: Path) -> None:
    async with serving(tmp_path, request_timeout_s=0.05) as path:
        reader, writer = await asyncio.open_unix_connection(path)
        assert await reader.read() == b""
        writer.close()


async def test_a_client_that_disconnects_affects_no_other(tmp_path: Path) -> None:
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    async with serving(tmp_path) as path:
        for half in (b"", b"GET /met"):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(half)
            writer.close()
            await writer.wait_closed()
        status, _, _ = await exchange(path, b"GET /metrics HTTP/1.0\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    assert problems == []


async def test_connections_are_served_concurrently(tmp_path: Path) -> None:
    async with serving(tmp_path) as path:
        _, silent = await asyncio.open_unix_connection(path)
        status, _, _ = await exchange(path, b"GET /metrics HTTP/1.1\r\n\r\n")
        silent.close()
    assert status == "HTTP/1.1 200 OK"


async def test_too_many_connections_close_the_oldest_and_never_keep_a_probe_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as path:
        silent = [await asyncio.open_unix_connection(path) for _ in range(MAX_CONNECTIONS + 1)]
        assert await silent[0][0].read() == b""
        status, _, _ = await exchange(path, b"GET /livez HTTP/1.1\r\n\r\n")
        assert status == "HTTP/1.1 200 OK"
        assert await silent[1][0].read() == b""
        reader, writer = silent[-1]
        writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        for _, each in silent:
            each.close()


def on_socket(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/taken"


def on_port(tmp_path: Path) -> str:
    return "127.0.0.1:0"


@pytest.mark.parametrize("address_of", [on_socket, on_port])
async def test_a_taken_address_is_named(tmp_path: Path, address_of: Callable[[Path], str]) -> None:
    address = address_of(tmp_path)
    first = await serve_management(address, CollectorRegistry(), Probes("nothing"))
    assert first is not None
    async with first:
        name = first.sockets[0].getsockname()
        taken = address if isinstance(name, str) else f"127.0.0.1:{name[1]}"
        with pytest.raises(RuntimeError, match=f"--manage-listen: {taken}: "):
            await serve_management(taken, CollectorRegistry(), Probes("nothing"))


async def test_a_dead_servers_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "metrics"))
    async with serving(tmp_path) as path:
        status, _, _ = await exchange(path, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"

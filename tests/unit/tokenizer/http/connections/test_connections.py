"""What clients do wrong below the level of requests, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.http.connections.limits import HttpLimits
from tests.support.system.ports import free_port
from tests.support.tokenizer.http_client import MESSAGES, HttpService, run_http_service

CHAT = "/v1/chat/completions"
POST = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def exchange(http: HttpService, data: str) -> tuple[str, str]:
    """Send bytes on a connection of their own; returns head and body of what comes until it is closed."""
    path = http.service.http_address.removeprefix("unix:")
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data.encode("latin-1"))
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head, body


async def test_a_client_that_leaves_an_unstreamed_request_frees_it(http: HttpService) -> None:
    task, [sent] = await http.begin(CHAT, {"messages": MESSAGES})
    task.cancel()
    assert await http.service.peer.aborts.get() == sent.handle


async def test_a_client_that_leaves_a_stream_frees_it(http: HttpService) -> None:
    task, [sent] = await http.begin(CHAT, {"messages": MESSAGES, "stream": True})
    task.cancel()
    assert await http.service.peer.aborts.get() == sent.handle


@pytest.mark.parametrize(
    "head", ["SECRET\r\n\r\n", "GET / HTTP/1.1\r\nSECRET\r\n\r\n", "GET / HTTP/1.1\r\nContent-Length: SECRET\r\n\r\n"]
)
async def test_a_bad_head_is_answered_in_json_and_quoted_nowhere(
    http: HttpService, caplog: pytest.LogCaptureFixture, head: str
) -> None:
    answered, body = await exchange(http, head)
    assert answered.startswith(("HTTP/1.1 400 ", "HTTP/1.0 400 "))
    assert "application/json" in answered
    assert "Server: lockstep" in answered
    assert '"code":"invalid_request"' in body
    assert "SECRET" not in answered + body + caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "rest",
    [
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        "Content-Length: +2\r\n\r\n{}",
        "Content-Length: -2\r\n\r\n{}",
        "Transfer-Encoding: identity, chunked, identity\r\n\r\n{}",
        "Transfer-Encoding: chunked\r\n\r\nSECRET\r\n",
        "Content-Length : 2\r\n\r\n{}",
        "Bad Name: 2\r\n\r\n",
        "Folded: a\r\n b\r\n\r\n",
        "Zero: \0\r\n\r\n",
    ],
)
async def test_a_body_whose_length_is_not_certain_is_refused(
    http: HttpService, caplog: pytest.LogCaptureFixture, rest: str
) -> None:
    answered, body = await exchange(http, POST + rest)
    assert answered.partition(" ")[2].startswith("400 ")
    assert '"code":"invalid_request"' in body
    assert "SECRET" not in answered + body + caplog.text


async def test_an_unknown_expectation_is_refused_in_json(http: HttpService) -> None:
    answered, body = await exchange(http, f"{POST}Connection: close\r\nExpect: SECRET\r\nContent-Length: 2\r\n\r\n{{}}")
    assert answered.startswith("HTTP/1.1 417 ")
    assert "application/json" in answered
    assert "SECRET" not in answered + body


async def test_a_second_request_in_the_same_bytes_is_a_request_of_its_own(http: HttpService) -> None:
    ping = "GET /ping HTTP/1.1\r\nHost: localhost\r\n"
    answered, body = await exchange(http, f"{ping}\r\n{ping}Connection: close\r\n\r\n")
    assert (answered + body).count("HTTP/1.1 200 ") == 2


async def test_a_long_header_line_is_refused(http: HttpService) -> None:
    answered, body = await exchange(http, f"GET / HTTP/1.1\r\nX-Long: {'x' * 9000}\r\n\r\n")
    assert " 431 " in answered
    assert '"code":"head_too_large"' in body


async def test_endless_headers_are_refused(http: HttpService) -> None:
    answered, _ = await exchange(http, "GET / HTTP/1.1\r\n" + "".join(f"X-{n}: x\r\n" for n in range(500)))
    assert " 400 " in answered


@pytest.mark.parametrize("begun", ["", "GET / HT", "GET / HTTP/1.1\r\nHost: loc"])
async def test_a_slow_head_is_refused(model_dir: Path, tmp_path: Path, begun: str) -> None:
    async with run_http_service(model_dir, tmp_path, http_limits=HttpLimits(head_s=0.05)) as http:
        answered, _ = await exchange(http, begun)
        assert answered.startswith("HTTP/1.1 408 ")


async def test_a_slow_body_is_refused(model_dir: Path, tmp_path: Path) -> None:
    async with run_http_service(model_dir, tmp_path, http_limits=HttpLimits(body_s=0.05, lingering_s=0.0)) as http:
        answered, body = await exchange(http, f"{POST}Content-Length: 100\r\n\r\n{{")
        assert answered.startswith("HTTP/1.1 408 ")
        assert '"code":"request_timeout"' in body


async def test_a_body_that_is_too_large_is_refused_before_it_comes(http: HttpService) -> None:
    answered, body = await exchange(http, f"{POST}Content-Length: 5000000\r\n\r\n")
    assert answered.startswith("HTTP/1.1 413 ")
    assert '"code":"request_too_large"' in body


async def test_a_body_of_chunks_is_refused_when_it_becomes_too_large(http: HttpService) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(80):
            yield b" " * 64 * 1024

    answer = await http.ask("POST", CHAT, data=chunks(), headers={"Content-Type": "application/json"})
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json", "Content-Encoding": "br"},
        {"Content-Type": "application/json; charset=latin-1"},
    ],
)
async def test_another_form_of_body_is_refused(http: HttpService, headers: dict[str, str]) -> None:
    answer = await http.ask("POST", CHAT, data=b"{}", headers=headers)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


async def test_connections_above_the_limit_are_refused(model_dir: Path, tmp_path: Path) -> None:
    async with run_http_service(model_dir, tmp_path, max_http_connections=1) as http:
        task, [sent] = await http.begin(CHAT, {"messages": MESSAGES})
        answered, body = await exchange(http, "")
        assert answered.startswith("HTTP/1.1 429 ")
        assert '"code":"server_overloaded"' in body
        http.send(sent, [70])
        assert (await task).status == 200


@asynccontextmanager
async def run_on_loopback(model_dir: Path, tmp_path: Path, port: int, **settings: Any) -> AsyncIterator[HttpService]:
    async with run_http_service(model_dir, tmp_path, http_listen=f"127.0.0.1:{port}", **settings) as http:
        yield http


async def status_for(port: int, host: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /ping HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def test_a_loopback_listener_answers_to_its_own_names_only(model_dir: Path, tmp_path: Path) -> None:
    port = free_port()
    async with run_on_loopback(model_dir, tmp_path, port, http_allowed_hosts=("chat.test",)):
        hosts = {"localhost": 200, f"127.0.0.1:{port}": 200, "[::1]:1": 200, "chat.test:9": 200, "evil.test": 403}
        assert {host: await status_for(port, host) for host in hosts} == hosts


async def test_pages_of_allowed_origins_only_may_read_answers(model_dir: Path, tmp_path: Path) -> None:
    async with run_http_service(model_dir, tmp_path, cors_origin=("https://chat.test",)) as http:
        for origin, allowed in (("https://chat.test", "https://chat.test"), ("https://evil.test", None)):
            answer = await http.get("/v1/models", headers={"Origin": origin})
            assert answer.headers.get("Access-Control-Allow-Origin") == allowed
        ask = {"Origin": "https://chat.test", "Access-Control-Request-Headers": "content-type"}
        preflight = await http.ask("OPTIONS", CHAT, headers=ask)
        assert (preflight.status, preflight.headers["Access-Control-Allow-Headers"]) == (204, "content-type")
        assert (await http.ask("OPTIONS", CHAT, headers={"Origin": "https://evil.test"})).status == 405


@pytest.mark.parametrize(
    "head",
    [
        # The target's host is the request's, whatever the Host header says (RFC 9112, section 3.2.2).
        "GET http://evil.test/ping HTTP/1.1\r\nHost: localhost",
        "GET http://localhost@evil.test/ping HTTP/1.1\r\nHost: localhost",
        "GET /ping HTTP/1.1\r\nHost:",
        "GET /ping HTTP/1.0",
        "GET /ping HTTP/1.1\r\nHost: localhost.evil.test",
        "GET /ping HTTP/1.1\r\nHost: localhost@evil.test",
        "GET /ping HTTP/1.1\r\nHost: evil.test@localhost",
        "GET /ping HTTP/1.1\r\nHost: localhost:80@evil.test",
        "GET /ping HTTP/1.1\r\nHost: localhost, evil.test",
        "GET /ping HTTP/1.1\r\nHost: localhost/evil.test",
        "GET /ping HTTP/1.1\r\nHost: [::1].evil.test",
        "GET /ping HTTP/1.1\r\nHost: 0.0.0.0",
    ],
)
async def test_a_host_that_only_looks_like_ours_is_refused(model_dir: Path, tmp_path: Path, head: str) -> None:
    async with run_http_service(model_dir, tmp_path, http_allowed_hosts=("localhost", "::1")) as http:
        answered, body = await exchange(http, f"{head}\r\nConnection: close\r\n\r\n")
        assert (answered.split()[1], '"code":"host_not_allowed"' in body) == ("403", True)
        assert "--http-allowed-hosts" in body


@pytest.mark.parametrize(
    "head",
    [
        "GET http://localhost:1/ping HTTP/1.1\r\nHost: evil.test",
        "GET /ping HTTP/1.1\r\nHost: LocalHost:8000",
        "GET /ping HTTP/1.1\r\nHost: localhost.",
        "GET /ping HTTP/1.1\r\nHost: localhost:",
        "GET /ping HTTP/1.1\r\nHost: [::1]:8000",
    ],
)
async def test_our_host_may_be_written_in_several_ways(model_dir: Path, tmp_path: Path, head: str) -> None:
    async with run_http_service(model_dir, tmp_path, http_allowed_hosts=("localhost", "::1")) as http:
        answered, _ = await exchange(http, f"{head}\r\nConnection: close\r\n\r\n")
        assert answered.split()[1] == "200"


async def test_a_preflight_repeats_only_names_of_headers(model_dir: Path, tmp_path: Path) -> None:
    async with run_http_service(model_dir, tmp_path, cors_origin=("https://chat.test",)) as http:
        head = f"OPTIONS {CHAT} HTTP/1.1\r\nHost: localhost\r\nOrigin: https://chat.test\r\nConnection: close\r\n"
        answered, _ = await exchange(http, f"{head}Access-Control-Request-Headers: a\xff<b>\r\n\r\n")
        assert answered.split()[1] == "204"
        assert "Allow-Headers" not in answered

"""Bodies whose bytes do not come as their heads say."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from services.tokenizer.http.connections.limits import MAX_HEAD_BYTES, HttpLimits
from tests.support.tokenizer.http_client import MESSAGES, HttpService, run_http_service
from tests.support.tokenizer.raw_http import RawClient, connect, exchange
from tests.unit.tokenizer.http.connections.test_hostile_heads import CHAT, HOST, LAST_PING, POST, texts_of

CHUNKED = f"{POST}Transfer-Encoding: chunked\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def begin(client: RawClient, head: str) -> None:
    """Send a head, and wait until the body is awaited."""
    await client.send(f"{head}Expect: 100-continue\r\n\r\n")
    await client.read_until(CONTINUE)


@pytest.mark.parametrize(
    "chunk",
    [
        "SECRET\r\n",
        "0x2\r\n{}\r\n",
        "+2\r\n{}\r\n",
        "-2\r\n{}\r\n",
        "fffffffffffffffff\r\n{}",
        "2\n{}\n0\n\n",
        "2 \r\n{}\r\n",
        "2;a\n{}\r\n",
        "2\r\n{}0\r\n\r\n",
        "2\r\n{}SECRET\r\n",
        "2\r\n{}\r\n0\r\nSECRET\r\n\r\n",
        "2\r\n{}\r\n0\r\nX : SECRET\r\n\r\n",
    ],
)
async def test_a_bad_chunk_ends_its_request_at_once(
    http: HttpService, caplog: pytest.LogCaptureFixture, chunk: str
) -> None:
    caplog.set_level(logging.INFO)
    async with connect(http.service.http_address) as client:
        await begin(client, CHUNKED)
        await client.send(chunk)
        answer = await client.read_to_end()
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert "SECRET" not in answer.text + texts_of(caplog)


@pytest.mark.parametrize(
    ("start", "more"),
    [("1;", "x" * 8000), ("1\r\n{\r\n0\r\n", "X: y\r\n" * 1000), ("1\r\n{\r\n0\r\nX: ", "x" * 8000), ("", "0" * 8000)],
    ids=["an endless extension", "endless trailers", "an endless trailer", "an endless chunk size"],
)
async def test_what_surrounds_chunks_is_bounded(http: HttpService, start: str, more: str) -> None:
    task, [sent] = await http.begin(CHAT, {"messages": MESSAGES, "stream": True})
    async with connect(http.service.http_address) as client:
        await begin(client, CHUNKED)
        await client.send(start)
        num_sent = 0
        while await client.send(more):
            num_sent += len(more)
        answer = await client.read_to_end()
    # What was on its way may cost the client the answer, but not the end.
    assert answer.statuses in ([400], [])
    http.send(sent, [70])
    assert (await task).pieces


@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_small_chunks_are_a_body(http: HttpService, size: int) -> None:
    text = '{"messages": [{"role": "user", "content": "' + "x" * 20_000 + '"}]}'
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    async with connect(http.service.http_address) as client:
        await begin(client, f"{CHUNKED}Connection: close\r\n")
        await client.send("".join(f"{len(part):x}\r\n{part}\r\n" for part in parts) + "0\r\n\r\n")
        answer = await client.read_to_end()
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_extensions_and_trailers_are_ignored(http: HttpService) -> None:
    chunks = '1;a=b;c="d"\r\n{\r\n1;e\r\n}\r\n0\r\nX: y\r\n\r\n'
    answer = await exchange(http.service.http_address, f"{CHUNKED}Connection: close\r\n\r\n{chunks}")
    assert (answer.status, answer.error["param"]) == (400, "messages")


@pytest.mark.parametrize("sizes", [["7fffffffffffffff"], ["400001"], ["200000", "200001"]])
async def test_large_chunks_are_refused_once_they_are_too_much(http: HttpService, sizes: list[str]) -> None:
    async with connect(http.service.http_address) as client:
        await begin(client, CHUNKED)
        for size in sizes:
            await client.send(f"{size}\r\n")
            for _ in range(min(int(size, 16) // 65536 + 1, 65)):
                if not await client.send(" " * 65536):
                    break
            await client.send("\r\n")
        answer = await client.read_to_end()
    # Where a chunk is longer than it says, it is a bad chunk.
    assert answer.statuses in ([413], [400], [])


async def test_a_length_that_is_too_small_leaves_a_bad_head(http: HttpService) -> None:
    answer = await exchange(http.service.http_address, f"{POST}Content-Length: 1\r\n\r\n{{}}{LAST_PING}")
    assert set(answer.statuses) == {400}


async def test_a_length_that_is_too_large_takes_the_next_head_for_the_body(http: HttpService) -> None:
    body = f"{{}}{LAST_PING}"
    answer = await exchange(http.service.http_address, f"{POST}Content-Length: {len(body)}\r\n\r\n{body}{LAST_PING}")
    assert (answer.statuses, "Extra data" in answer.text) == ([400, 200], True)


async def test_a_body_that_ends_early_is_no_request(http: HttpService) -> None:
    async with connect(http.service.http_address) as client:
        await begin(client, f"{POST}Content-Length: 100\r\n")
        await client.send('{"messages": [{"role": "user", "content": "hi"}]}')
    task, _ = await http.begin(CHAT, {"messages": MESSAGES})
    task.cancel()
    # The other request was the only one that reached the scheduler.
    assert http.service.peer.submits.empty()


async def test_a_slow_body_ends_however_often_a_byte_comes(model_dir: Path, tmp_path: Path) -> None:
    limits = HttpLimits(body_s=0.2, lingering_s=0.0)
    async with (
        run_http_service(model_dir, tmp_path, http_limits=limits) as http,
        connect(http.service.http_address) as client,
    ):
        await begin(client, CHUNKED)
        while await client.send("1\r\n \r\n"):
            pass
        answer = await client.read_to_end()
        assert answer.statuses in ([408], [])


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"POST {CHAT} HTTP/1.1\r\nHost: evil.test\r\nContent-Type: application/json\r\nContent-Length: 9\r\n", 403),
        (f"{POST}Content-Length: 4194305\r\n", 413),
        (f"POST {CHAT} HTTP/1.1\r\n{HOST}Content-Type: text/plain\r\nContent-Length: 9\r\n", 415),
        (f"{POST}Content-Encoding: br\r\nContent-Length: 9\r\n", 415),
    ],
)
async def test_a_body_that_would_be_refused_is_not_asked_for(
    model_dir: Path, tmp_path: Path, head: str, status: int
) -> None:
    settings = {"http_allowed_hosts": ("localhost",), "http_limits": HttpLimits(lingering_s=0.0)}
    async with run_http_service(model_dir, tmp_path, **settings) as http:
        answer = await exchange(http.service.http_address, f"{head}Expect: 100-continue\r\nConnection: close\r\n\r\n")
        assert answer.status == status


async def test_an_older_client_that_expects_something_is_not_told_to_go_on(http: HttpService) -> None:
    head = POST.replace("HTTP/1.1", "HTTP/1.0")
    answer = await exchange(http.service.http_address, f"{head}Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{{}}")
    assert answer.status == 400


async def test_bodies_that_nobody_asked_for_are_dropped(http: HttpService, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ping = f"GET /ping HTTP/1.1\r\n{HOST}"
    sound = await exchange(http.service.http_address, f"{ping}Content-Length: 6\r\n\r\nSECRET{LAST_PING}")
    assert sound.statuses == [200, 200]
    async with connect(http.service.http_address) as client:
        await client.send(f"{ping}Transfer-Encoding: chunked\r\n\r\n")
        await client.read_until(b"\r\n\r\n")
        await client.send("SECRET\r\n")
        assert (await client.read_to_end()).statuses in ([400], [])
    assert "unexpected error" not in caplog.text
    assert "SECRET" not in texts_of(caplog)


async def test_surroundings_of_many_requests_are_not_added_up(http: HttpService) -> None:
    body = '{"messages": 1}'
    request = f"{CHUNKED}\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    async with connect(http.service.http_address) as client:
        for _ in range(2 * MAX_HEAD_BYTES // len(request)):
            assert await client.send(request)
            assert b" 400 " in await client.read_until(b"}}")

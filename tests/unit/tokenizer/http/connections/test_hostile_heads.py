"""Heads that no client of good will sends: each has its status, and nothing of it is logged."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from services.tokenizer.http.connections.limits import MAX_HEAD_BYTES, HttpLimits
from tests.support.tokenizer.http_client import MESSAGES, HttpService, run_http_service
from tests.support.tokenizer.raw_http import connect, exchange

CHAT = "/v1/chat/completions"
HOST = "Host: localhost\r\n"
PING = f"GET /ping HTTP/1.1\r\n{HOST}"
LAST_PING = f"{PING}Connection: close\r\n\r\n"
POST = f"POST {CHAT} HTTP/1.1\r\n{HOST}Content-Type: application/json\r\n"
TWO_BYTES = "Content-Length: 2\r\n\r\n{}"
CHUNKS = "\r\n2\r\n{}\r\n0\r\n\r\n"

REFUSED = {
    "HTTP/0.9": "GET /SECRET\r\n\r\n",
    "HTTP/2 preface": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "HTTP/2.0": f"GET /SECRET HTTP/2.0\r\n{HOST}\r\n",
    "HTTP/1.2": f"GET /SECRET HTTP/1.2\r\n{HOST}\r\n",
    "TLS": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03SECRET",
    "bare line feeds": "GET /SECRET HTTP/1.1\nHost: localhost\n\n",
    "one bare line feed": "GET /SECRET HTTP/1.1\r\nHost: localhost\n\r\n",
    "a bare carriage return": "GET /SECRET HTTP/1.1\r\nHost: localhost\rX: SECRET\r\n\r\n",
    "tabs in the request line": f"GET\t/SECRET\tHTTP/1.1\r\n{HOST}\r\n",
    "a method in lower case": f"get /SECRET HTTP/1.1\r\n{HOST}\r\n",
    "an unknown method": f"SECRET / HTTP/1.1\r\n{HOST}\r\n",
    "no target": f"GET  HTTP/1.1\r\n{HOST}\r\n",
    "a relative target": f"GET SECRET HTTP/1.1\r\n{HOST}\r\n",
    "a target that is no URL": f"GET http://[::1/SECRET HTTP/1.1\r\n{HOST}\r\n",
    "a target's port that is none": f"GET http://localhost:99999/SECRET HTTP/1.1\r\n{HOST}\r\n",
    "a target that is not UTF-8": f"GET /v1/models/\xff\xfeSECRET HTTP/1.1\r\n{HOST}\r\n",
    "no host": "GET /SECRET HTTP/1.1\r\n\r\n",
    "two hosts": f"GET /SECRET HTTP/1.1\r\n{HOST}{HOST}\r\n",
    "two types": f"{POST}Content-Type: SECRET\r\n{TWO_BYTES}",
    "a folded first header": f"GET /SECRET HTTP/1.1\r\n {HOST}\r\n",
    "a folded header": f"{PING}X: a\r\n\tSECRET\r\n\r\n",
    "a header without a name": f"{PING}: SECRET\r\n\r\n",
    "a header without a colon": f"{PING}SECRET\r\n\r\n",
    "whitespace before a colon": f"{PING}X : SECRET\r\n\r\n",
    "a control character in a name": f"{PING}X\x01Y: SECRET\r\n\r\n",
    "a control character in a value": f"{PING}X: SECRET\x01\r\n\r\n",
    "a delete character in a value": f"{PING}X: SECRET\x7f\r\n\r\n",
    "a zero in a value": f"{PING}X: SECRET\0\r\n\r\n",
    "a zero in a name": f"{PING}X\0: SECRET\r\n\r\n",
    "length and chunks": f"{POST}Content-Length: 13\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nSECRET",
    "chunks and length": f"{POST}Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n8\r\nSECRET!!\r\n0\r\n\r\n",
    "two lengths": f"{POST}Content-Length: 2\r\n{TWO_BYTES}",
    "a list of lengths": f"{POST}Content-Length: 2, 2\r\n\r\n{{}}",
    "a length in hexadecimal": f"{POST}Content-Length: 0x2\r\n\r\n{{}}",
    "a length with an underscore": f"{POST}Content-Length: 1_0\r\n\r\n{{}}",
    "a length with a space": f"{POST}Content-Length: 2 2\r\n\r\n{{}}",
    "an empty length": f"{POST}Content-Length:\r\n\r\n{{}}",
    "a length beyond 64 bits": f"{POST}Content-Length: 99999999999999999999999\r\n\r\n{{}}",
    "two encodings, the last one none": f"{POST}Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n{CHUNKS}",
    "an encoding that only looks like chunks": f"{POST}Transfer-Encoding: xchunked\r\n{CHUNKS}",
    "a vertical tab before the encoding": f"{POST}Transfer-Encoding: \x0bchunked\r\n{CHUNKS}",
    "a quoted encoding": f'{POST}Transfer-Encoding: "chunked"\r\n{CHUNKS}',
    "chunks twice": f"{POST}Transfer-Encoding: chunked, chunked\r\n{CHUNKS}",
    "101 headers": f"{PING}{''.join(f'X-{number}: SECRET' + chr(13) + chr(10) for number in range(101))}\r\n",
}


def texts_of(caplog: pytest.LogCaptureFixture) -> str:
    """All that was logged, fields included."""
    return repr([vars(record) for record in caplog.records])


@pytest.mark.parametrize("head", REFUSED.values(), ids=REFUSED)
async def test_a_head_that_cannot_be_trusted_is_refused(
    http: HttpService, caplog: pytest.LogCaptureFixture, head: str
) -> None:
    caplog.set_level(logging.INFO)
    answer = await exchange(http.service.http_address, head)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert "SECRET" not in answer.text + texts_of(caplog)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("OPTIONS * HTTP/1.1", 404),
        ("TRACE /ping HTTP/1.1", 405),
        ("CONNECT localhost:80 HTTP/1.1", 404),
        ("CONNECT /ping HTTP/1.1", 404),
        ("GET //evil.test/ping HTTP/1.1", 404),
        ("GET /v1/models/%ff%00%0d%0aX:SECRET HTTP/1.1", 404),
        ("GET /v1/models/../../ping HTTP/1.1", 404),
        ("GET /ping;x HTTP/1.1", 404),
    ],
)
async def test_a_target_that_is_no_route_is_an_error_in_json(
    http: HttpService, caplog: pytest.LogCaptureFixture, line: str, status: int
) -> None:
    caplog.set_level(logging.INFO)
    answer = await exchange(http.service.http_address, f"{line}\r\n{HOST}Connection: close\r\n\r\n")
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    assert "SECRET" not in answer.text + texts_of(caplog)


@pytest.mark.parametrize("method", ["CONNECT localhost:80", "GET /ping", "HEAD /nope", "HEAD /v1/models"])
async def test_what_follows_is_a_request_of_its_own_whatever_a_head_asks_for(http: HttpService, method: str) -> None:
    asked = f"{method} HTTP/1.1\r\n{HOST}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    answer = await exchange(http.service.http_address, asked + LAST_PING)
    assert len(answer.statuses) == 2
    assert answer.statuses[1] == 200
    # An answer to HEAD has no body, which would be taken for the next answer.
    assert not method.startswith("HEAD") or answer.body.startswith("HTTP/1.1 200 ")


ENDLESS: dict[str, tuple[Callable[[int], str], int]] = {
    "small lines": (lambda number: f"X-{number}: x\r\n" * 500, 400),
    "large lines": (lambda number: f"X-{number}: {'x' * 8000}\r\n", 431),
    "one line": (lambda number: "GET /" * (number == 0) + "x" * 8000, 431),
    "one value": (lambda number: "X: " * (number == 0) + "x" * 8000, 431),
    "empty lines": (lambda _: "\r\n" * 4000, 431),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_an_endless_head_is_refused_while_other_streams_go_on(http: HttpService, name: str) -> None:
    task, [sent] = await http.begin(CHAT, {"messages": MESSAGES, "stream": True})
    make, status = ENDLESS[name]
    start = "" if name in ("one line", "empty lines") else "GET /ping HTTP/1.1\r\n"
    answer = await exchange(http.service.http_address, (start * (n == 0) + make(n) for n in itertools.count()))
    # The bytes that were on their way may cost the client the answer, but not the end.
    if answer.statuses:
        assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    http.send(sent, [70])
    assert (await task).pieces


async def test_a_head_is_bounded_as_a_whole(http: HttpService) -> None:
    lines = f"X: {'x' * 8000}\r\n"
    below = (MAX_HEAD_BYTES - len(LAST_PING)) // len(lines)
    head = f"GET /ping HTTP/1.1\r\nConnection: close\r\n{HOST}"
    assert (await exchange(http.service.http_address, f"{head}{lines * below}\r\n")).status == 200
    answer = await exchange(http.service.http_address, f"{head}{lines * (below + 1)}")
    assert (answer.status, answer.error["code"]) == (431, "head_too_large")


def head_of(num_bytes: int, end: str) -> str:
    """A head for /ping that ends with `end`; its lines fill up `num_bytes`."""
    head, line = f"GET /ping HTTP/1.1\r\n{HOST}", f"X: {'x' * 4000}\r\n"
    num_left = num_bytes - len(head) - len(end)
    filled = line * (num_left // len(line) - 1)
    rest = num_left - len(filled) - len("X: \r\n")
    first = rest // 2
    lines = f"X: {'x' * first}\r\nX: {'x' * (rest - first - len('X: ') - 2)}\r\n"
    return head + filled + lines + end


@pytest.mark.parametrize("num_pieces", [1, 7])
@pytest.mark.parametrize("before", ["nothing", "a head", "a body", "chunks"])
async def test_a_whole_head_above_the_limit_is_refused_wherever_it_begins_and_however_it_comes(
    http: HttpService, before: str, num_pieces: int
) -> None:
    end = "Connection: close\r\n\r\n"
    tokenize = f"POST /tokenize HTTP/1.1\r\n{HOST}Content-Type: application/json\r\n"
    body = '{"prompt": "The fox"}'
    first = {
        "nothing": "",
        "a head": f"{PING}\r\n",
        "a body": f"{tokenize}Content-Length: {len(body)}\r\n\r\n{body}",
        "chunks": f"{tokenize}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n",
    }[before]
    slack = 0 if before == "nothing" else 4096
    for num_bytes, is_allowed in ((MAX_HEAD_BYTES, True), (MAX_HEAD_BYTES + slack + 1, False), (84_000, False)):
        data = first + head_of(num_bytes, end)
        assert len(data) == len(first) + num_bytes
        size = -(-len(data) // num_pieces)
        answer = await exchange(http.service.http_address, (data[at : at + size] for at in range(0, len(data), size)))
        # What is refused behind a request that is being answered ends the connection.
        expected = [200] * (before != "nothing") + ([200] if is_allowed else [431])
        allowed_ends = [expected] if is_allowed else [expected, expected[:-1], []]
        assert answer.statuses in allowed_ends, (num_bytes, answer.statuses)


CODINGS = ("gzip, chunked", "gzip,chunked", "deflate , chunked", "GZIP, chunked", "x-none, chunked")


@pytest.mark.parametrize("coding", CODINGS)
async def test_a_transfer_that_is_coded_by_more_than_chunks_is_not_implemented(http: HttpService, coding: str) -> None:
    answer = await exchange(http.service.http_address, f"{POST}Transfer-Encoding: {coding}\r\n{CHUNKS}{LAST_PING}")
    assert (answer.statuses, answer.error["code"]) == ([501], "not_supported")


@pytest.mark.parametrize("start", ["GET /ping HTTP/1.1\r\n", ""], ids=["endless", "bad"])
async def test_a_head_that_comes_behind_a_request_is_bounded_too(http: HttpService, start: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    async with connect(http.service.http_address) as client:
        await client.send(f"{POST}Content-Length: {len(body)}\r\n\r\n{body.decode()}")
        sent = await http.service.peer.submits.get()
        await client.send(start)
        while await client.send(f"X: {'x' * 8000}\r\n"):
            pass
    # Closed, and so its request is aborted.
    assert await http.service.peer.aborts.get() == sent.handle


async def test_a_slow_head_is_refused_on_a_connection_that_was_used(model_dir: Path, tmp_path: Path) -> None:
    async with (
        run_http_service(model_dir, tmp_path, http_limits=HttpLimits(head_s=0.05)) as http,
        connect(http.service.http_address) as client,
    ):
        await client.send(f"{PING}\r\n")
        await client.read_until(b"\r\n\r\n")
        await client.send("GET /ping HT")
        answer = await client.read_to_end()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")


async def test_a_head_that_trickles_is_refused(model_dir: Path, tmp_path: Path) -> None:
    async with (
        run_http_service(model_dir, tmp_path, http_limits=HttpLimits(head_s=0.2)) as http,
        connect(http.service.http_address) as client,
    ):
        await client.send("GET /ping HTTP/1.1\r\nX: ")
        # The time begins with the first byte, however often another one comes.
        while await client.send("x"):  # noqa: ASYNC110 - the pace of the attack
            await asyncio.sleep(0.02)
        answer = await client.read_to_end()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("given", ["", "a b", "a\tb", "x" * 129, "\xff", "\xe2\x80\xa8", "%0d%0aSet-Cookie:SECRET x"])
async def test_an_id_that_could_change_an_answer_or_a_log_is_replaced(
    http: HttpService, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    caplog.set_level(logging.INFO)
    head = f"POST {CHAT} HTTP/1.1\r\n{HOST}X-Request-Id: {given}\r\nOrigin: {given}\r\nConnection: close\r\n"
    answer = await exchange(http.service.http_address, f"{head}Content-Type: application/json\r\n{TWO_BYTES}")
    [own] = re.findall(r"(?i)\r\nx-request-id: ([^\r]*)\r\n", answer.text)
    assert re.fullmatch(r"[0-9a-f]{32}", own)
    assert "SECRET" not in answer.text + texts_of(caplog)
    assert not given or given not in answer.text

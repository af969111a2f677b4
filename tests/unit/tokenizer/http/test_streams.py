"""When streams begin, and how they end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.http.streams import event_stream
from shared.errors import NumericError, QueueFullError
from tests.support.tokenizer.exchange_peer import Position, Row, make_end, make_error_end
from tests.support.tokenizer.http_client import MAX_TOKENS, MESSAGES, HttpService, events_of, run_http_service

CHAT = "/v1/chat/completions"
POST = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def stream(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "stream": True, **fields}


async def test_a_refusal_by_the_scheduler_is_a_status(http: HttpService) -> None:
    task, [sent] = await http.begin(CHAT, stream())
    http.service.peer.send(ends=[make_error_end(sent.handle, QueueFullError("full", retry_delay_s=2))])
    answer = await task
    assert (answer.status, answer.error["code"], answer.error["type"]) == (
        429,
        "server_overloaded",
        "rate_limit_error",
    )
    assert (answer.headers["Retry-After"], answer.headers["retry-after-ms"]) == ("2", "2000")


async def test_the_status_line_waits_for_the_first_token_only_so_long(
    http: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "FIRST_TOKEN_S", 0.05)
    monkeypatch.setattr(event_stream, "COMMENT_S", 0.05)
    async with http.session.post(f"http://localhost{CHAT}", json=stream()) as response:
        # There are headers and comments although there is no token.
        assert response.status == 200
        assert [await response.content.readline() for _ in range(4)] == [b":\n", b"\n", b":\n", b"\n"]
        sent = await http.service.peer.submits.get()
        http.send(sent, [70])
        assert events_of(await response.read())[-1] == "[DONE]"


async def test_a_late_error_is_an_event_and_the_end(http: HttpService) -> None:
    task, [sent] = await http.begin(CHAT, stream())
    http.service.peer.send(Row(sent.handle, 0, [70]))
    http.service.peer.send(ends=[make_error_end(sent.handle, NumericError("not finite"))])
    answer = await task
    *_, last = events_of(answer.body)
    assert answer.status == 200
    assert json.loads(last)["error"] == {
        "message": "not finite",
        "type": "server_error",
        "param": None,
        "code": "numeric_error",
    }


async def test_a_request_may_take_only_its_time(http: HttpService) -> None:
    task, [sent] = await http.begin(CHAT, {"messages": MESSAGES, "timeout_s": 0.3})
    answer = await task
    assert (answer.status, answer.error["code"]) == (504, "deadline_passed")
    assert answer.headers["x-should-retry"] == "false"
    assert await http.service.peer.aborts.get() == sent.handle


async def test_a_stream_whose_time_is_over_ends_with_an_error(http: HttpService) -> None:
    task, [sent] = await http.begin(CHAT, stream(timeout_s=0.5))
    http.service.peer.send(Row(sent.handle, 0, [70]))
    *_, last = events_of((await task).body)
    assert json.loads(last)["error"]["code"] == "deadline_passed"


async def test_streams_go_on_while_the_service_drains_and_new_ones_are_refused(http: HttpService) -> None:
    task, [sent] = await http.begin(CHAT, stream())
    http.service.peer.send(Row(sent.handle, 0, [70]))
    http.service.stop.on_signal()
    while (refused := await http.post(CHAT, stream(messages=[]))).status != 503:
        pass
    assert (refused.error["code"], refused.headers["Connection"]) == ("draining", "close")
    http.service.peer.send(Row(sent.handle, 1, [71]), ends=[make_end(sent.handle, MAX_TOKENS, 2)])
    assert (await task).pieces[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_client_that_reads_nothing_loses_its_stream(model_dir: Path, tmp_path: Path) -> None:
    async with run_http_service(model_dir, tmp_path, max_unread_s=0.2) as http:
        _, writer = await asyncio.open_unix_connection(http.service.http_address.removeprefix("unix:"))
        body = json.dumps(stream(logprobs=True, top_logprobs=20, n=8))
        writer.write(f"{POST}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        sent = await http.service.peer.submits.get()
        aborted = asyncio.create_task(http.service.peer.aborts.get())
        position = Position(1, [(70, -0.5)] * 21)
        # More than the sockets' buffers hold.
        for index in range(150):
            rows = [Row(sent.handle + number, index, [70], logprobs=[position]) for number in range(8)]
            http.service.peer.send(*rows)
            await asyncio.wait([aborted], timeout=0.01)
        assert sent.handle <= await aborted < sent.handle + 8
        writer.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_pieces_that_come_one_by_one_are_framed_as_the_version_says(http: HttpService, version: str) -> None:
    reader, writer = await asyncio.open_unix_connection(http.service.http_address.removeprefix("unix:"))
    body = json.dumps(stream())
    head = POST.replace("HTTP/1.1", f"HTTP/{version}").replace("\r\n", "\r\nConnection: close\r\n", 1)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    sent = await http.service.peer.submits.get()
    data = b""
    for index in range(3):
        http.service.peer.send(Row(sent.handle, index, [70 + index]))
        data += await reader.readuntil(b"}]}\n\n")
    http.service.peer.send(Row(sent.handle, 3, [73]), ends=[make_end(sent.handle, MAX_TOKENS, 4)])
    _, _, answered = (data + await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    if version == "1.1":
        answered = _join_chunks(answered)
    events = [json.loads(event) for event in events_of(answered)[:-1]]
    texts = [event["choices"][0]["delta"].get("content") for event in events]
    assert texts == ["", "d", "e", "f", "g"]


def _join_chunks(data: bytes) -> bytes:
    """The body in chunks, which must be complete."""
    joined = b""
    while True:
        size, _, rest = data.partition(b"\r\n")
        chunk, data = rest[: int(size, 16)], rest[int(size, 16) :]
        assert data.startswith(b"\r\n")
        joined, data = joined + chunk, data.removeprefix(b"\r\n")
        if not chunk:
            assert data == b""
            return joined

"""What a client's key decides over both APIs, with the scheduler played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.connections.limits import HttpLimits
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.clients.client import read_answer
from tests.support.clients.key_files import key_line, write_keys
from tests.support.system.scraping import scrape
from tests.support.tokenizer.exchange_peer import Row, make_end
from tests.support.tokenizer.http_client import MESSAGES, HttpService, run_http_service

Request = tokenizer_pb2.GenerateRequest
CHATS = "/v1/chat/completions"
LIMITS = {"weight": 2, "max_in_flight": 3, "max_waiting_tokens": 50}
LINES = (
    key_line("one", "a", **LIMITS),
    key_line("low", "b", max_priority="LOW"),
    key_line("high", "c", max_priority="HIGH"),
)


@pytest.fixture
async def keyed(model_dir: Path, tmp_path: Path) -> AsyncIterator[HttpService]:
    """A service whose clients need keys; its management port is the socket `manage`."""
    keys, manage = write_keys(tmp_path / "keys", *LINES), f"unix:{tmp_path}/manage"
    async with run_http_service(model_dir, tmp_path, client_keys=keys, manage_listen=manage) as running:
        yield running


def bearer(key: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {key}"),)


async def refusal(call: Any) -> tuple[str, str | None, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_answer(call)
    status = status_from_rpc_error(caught.value)
    return caught.value.code().name, reason_of(status), status.message


async def submit_of(http: HttpService, key: str, **fields: Any) -> exchange_pb2.Submit:
    """What the scheduler gets of a request that is then answered."""
    call = http.service.stub.Generate(Request(text="hi", **fields), metadata=bearer(key))
    sent = await http.service.peer.submits.get()
    http.service.peer.send(Row(sent.handle, 0, [70]), ends=[make_end(sent.handle, common_pb2.FINISH_REASON_EOS, 1)])
    await read_answer(call)
    return sent


async def test_a_tenants_open_requests_over_http_leave_room_for_others(model_dir: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", *LINES)
    body = {"model": "tiny", "prompt": "hi"}
    limits = HttpLimits(max_connections=10)
    async with run_http_service(model_dir, tmp_path, client_keys=keys, http_limits=limits) as http:

        async def ask(key: str) -> tuple[int, str | None]:
            async with http.session.post(
                "http://localhost/v1/completions", json=body, headers={"X-Api-Key": key}
            ) as answer:
                is_error = answer.status != HTTPStatus.OK
                return answer.status, (await answer.json())["error"]["code"] if is_error else None

        loud = [asyncio.create_task(ask("one")) for _ in range(8)]
        sent = [await http.service.peer.submits.get() for _ in loud]
        assert await ask("one") == (HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_exceeded")
        quiet = asyncio.create_task(ask("high"))
        sent.append(await http.service.peer.submits.get())
        assert sent[-1].tenant.name == "c"
        for each in sent:
            end = make_end(each.handle, common_pb2.FINISH_REASON_EOS, 1)
            http.service.peer.send(Row(each.handle, 0, [70]), ends=[end])
        assert {status for status, _ in await asyncio.gather(quiet, *loud)} == {HTTPStatus.OK}


async def test_the_scheduler_gets_the_tenant_of_the_key_over_both_apis(keyed: HttpService) -> None:
    tenant = exchange_pb2.Tenant(name="a", **LIMITS)
    assert (await submit_of(keyed, "one")).tenant == tenant
    headers = {"x-api-key": "one"}
    task, [sent] = await keyed.begin(CHATS, {"messages": MESSAGES}, headers=headers)
    keyed.send(sent, [70])
    assert ((await task).status, sent.tenant) == (200, tenant)


async def test_a_request_without_a_priority_has_at_most_that_of_its_key(keyed: HttpService) -> None:
    assert (await submit_of(keyed, "one")).priority == common_pb2.PRIORITY_NORMAL
    assert (await submit_of(keyed, "low")).priority == common_pb2.PRIORITY_LOW
    assert (await submit_of(keyed, "high", priority="PRIORITY_HIGH")).priority == common_pb2.PRIORITY_HIGH


async def test_a_priority_above_the_keys_is_denied(keyed: HttpService) -> None:
    call = keyed.service.stub.Generate(Request(text="hi", priority="PRIORITY_HIGH"), metadata=bearer("one"))
    assert (await refusal(call))[:2] == ("PERMISSION_DENIED", "PERMISSION_DENIED")
    body = {"messages": MESSAGES, "priority": -1}
    answer = await keyed.post(CHATS, body, headers={"Authorization": "Bearer one"})
    assert (answer.status, answer.error["code"], answer.error["type"]) == (403, "permission_denied", "permission_error")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "hi", "sampling": {"n": 4}}, "sampling.n"),
        ({"prompts": {"prompts": [{"text": "hi"}] * 2}, "sampling": {"n": 2}}, "prompts.prompts"),
    ],
)
async def test_more_choices_than_may_be_in_flight_are_refused_at_once(
    keyed: HttpService, fields: dict[str, Any], field: str
) -> None:
    status, reason, message = await refusal(keyed.service.stub.Generate(Request(**fields), metadata=bearer("one")))
    assert (status, reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert message.startswith(f"{field}: must be at most 3 with this key")


async def test_two_tenants_may_have_requests_of_the_same_id_but_one_may_not(keyed: HttpService) -> None:
    request, stub = Request(text="hi", request_id="same"), keyed.service.stub
    calls = [stub.Generate(request, metadata=bearer(key)) for key in ("one", "low")]
    sent = [await keyed.service.peer.submits.get() for _ in calls]
    assert {(each.request_id, each.tenant.name) for each in sent} == {("same", "a"), ("same", "b")}
    code, reason, _ = await refusal(stub.Generate(request, metadata=bearer("one")))
    assert (code, reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST")
    for each in sent:
        keyed.service.peer.send(
            Row(each.handle, 0, [70]), ends=[make_end(each.handle, common_pb2.FINISH_REASON_EOS, 1)]
        )
    for call in calls:
        await read_answer(call)


async def test_a_message_without_a_known_key_is_not_parsed_and_counts_as_a_failure(
    keyed: HttpService, tmp_path: Path
) -> None:
    call = keyed.service.channel.unary_stream("/lockstep.v1.TokenizerService/Generate")(b"\xff no message")
    assert (await refusal(call))[:2] == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    answer = await keyed.ask("POST", CHATS, data=b"no JSON", headers={"Content-Type": "text/plain"})
    assert (answer.status, answer.error["code"], answer.error["type"]) == (
        401,
        "invalid_api_key",
        "authentication_error",
    )
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    samples = [sample for metric in await scrape(tmp_path / "manage") for sample in metric.samples]
    counts = {sample.labels["reason"]: sample.value for sample in samples if sample.name.endswith("_failure_total")}
    assert {reason: count for reason, count in counts.items() if count} == {"UNAUTHENTICATED": 2}


async def test_a_client_that_awaits_approval_is_refused_before_it_sends_its_body(keyed: HttpService) -> None:
    answer = await keyed.post(CHATS, {"messages": MESSAGES}, expect100=True, headers={"x-api-key": "unknown"})
    assert answer.status == 401


async def test_two_different_keys_are_refused_over_both_apis(keyed: HttpService) -> None:
    metadata = (*bearer("one"), ("x-api-key", "low"))
    assert (await refusal(keyed.service.stub.Generate(Request(text="hi"), metadata=metadata)))[0] == "UNAUTHENTICATED"
    headers = {"Authorization": "Bearer one", "x-api-key": "low"}
    assert (await keyed.get("/v1/models", headers=headers)).status == 401
    headers["x-api-key"] = "one"
    assert (await keyed.get("/v1/models", headers=headers)).status == 200


async def test_metrics_are_on_the_management_port_alone_and_the_api_is_described_so(keyed: HttpService) -> None:
    assert (await keyed.get("/metrics")).status == 401
    assert (await keyed.get("/metrics", headers={"x-api-key": "one"})).status == 404
    description = (await keyed.get("/openapi.json", headers={"x-api-key": "one"})).value
    assert "/metrics" not in description["paths"]
    open_paths = {
        path for path, methods in description["paths"].items() if methods.get("get", {}).get("security") == []
    }
    assert open_paths == {path for path in description["paths"] if (await keyed.get(path)).status == 200}


async def test_a_browser_may_ask_without_a_key_whether_its_page_may_send_one(model_dir: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", *LINES)
    async with run_http_service(model_dir, tmp_path, client_keys=keys, cors_origin=("https://a.example",)) as http:
        headers = {"Origin": "https://a.example", "Access-Control-Request-Headers": "authorization"}
        answer = await http.ask("OPTIONS", CHATS, headers=headers)
        assert (answer.status, answer.headers["Access-Control-Allow-Headers"]) == (204, "authorization")
        answer = await http.post(CHATS, {}, headers={"Origin": "https://a.example"})
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (401, "https://a.example")


async def test_without_keys_a_key_that_comes_is_ignored(model_dir: Path, tmp_path: Path) -> None:
    async with run_http_service(model_dir, tmp_path) as http:
        for headers in ({"Authorization": "Bearer EMPTY", "x-api-key": "other"}, {"Authorization": "Basic x"}):
            assert (await http.get("/v1/models", headers=headers)).status == 200
        assert not (await submit_of(http, "EMPTY", priority="PRIORITY_HIGH")).HasField("tenant")

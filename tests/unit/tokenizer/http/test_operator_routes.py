"""The cell's state over HTTP, for operators, with the scheduler played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import jsonschema
import pytest
from google.protobuf.json_format import Parse

from lockstep.v1 import scheduler_pb2
from services.tokenizer.http.route_table import STATE_ROUTE
from tests.support.clients.key_files import key_line, write_keys
from tests.support.system.ports import free_port
from tests.support.tokenizer.http_client import HttpService, run_http_service

OPERATOR = {"Authorization": "Bearer operator"}
State = scheduler_pb2.GetStateResponse


@pytest.fixture
async def keyed(model_dir: Path, tmp_path: Path) -> AsyncIterator[HttpService]:
    """A service whose clients need keys, one of which is an operator's."""
    keys = write_keys(tmp_path / "keys", key_line("one"), key_line("operator", "ops", is_operator=True))
    async with run_http_service(model_dir, tmp_path, client_keys=keys) as http:
        yield http


async def test_operators_get_what_the_scheduler_tells(keyed: HttpService) -> None:
    rank = scheduler_pb2.RankSteps(dp_rank=0, num_decode_steps=2**60)
    keyed.service.peer.state = State(instance_id="a", ready=True, num_running=3, rank_steps=[rank])
    answer = await keyed.get(STATE_ROUTE, headers=OPERATOR)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    assert Parse(answer.body, State()) == keyed.service.peer.state
    value = answer.value
    assert (value["ready"], value["numWaiting"], value["rankSteps"][0]["numDecodeSteps"]) == (True, 0, str(2**60))
    description = (await keyed.get("/openapi.json", headers=OPERATOR)).value
    responses = description["paths"][STATE_ROUTE]["get"]["responses"]
    schema = responses["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(value, schema | {"components": description["components"]})
    assert {"403", "503"} <= responses.keys()


async def test_others_get_nothing_and_the_scheduler_is_not_asked(keyed: HttpService) -> None:
    for headers, expected in (
        ({}, (401, "invalid_api_key")),
        ({"x-api-key": "unknown"}, (401, "invalid_api_key")),
        ({"x-api-key": "one"}, (403, "permission_denied")),
    ):
        answer = await keyed.get(STATE_ROUTE, headers=headers)
        assert (answer.status, answer.error["code"]) == expected
        assert (await keyed.ask("HEAD", STATE_ROUTE, headers=headers)).status == expected[0]
    assert keyed.service.peer.states_asked.empty()


# What proxies, balancers, tunnels and content networks add; and what clients on this machine may send by themselves.
OF_PROXIES = (
    "Forwarded",
    "Via",
    "X-Forwarded-For",
    "x-forwarded-host",
    "X-Forwarded-Proto",
    "X-Forwarded-Port",
    "X-Forwarded-Prefix",
    "X-Forwarded-Client-Cert",
    "X-Real-IP",
    "X-Original-Host",
    "X-Original-Forwarded-For",
    "X-Client-IP",
    "X-Cluster-Client-Ip",
    "True-Client-IP",
    "CF-Connecting-IP",
    "CF-Ray",
    "CDN-Loop",
    "Fastly-Client-IP",
    "Fly-Client-IP",
    "X-Envoy-External-Address",
    "X-Amzn-Trace-Id",
    "X-Azure-ClientIP",
    "X-Appengine-User-Ip",
    "X-Cloud-Trace-Context",
    "Tailscale-User-Login",
    "X-Scheme",
)
OF_CLIENTS = ("X-Request-Id", "X-Api-Key", "X-Stainless-Lang", "X-Client-Request-Id", "Traceparent", "Origin")


async def test_without_keys_this_machine_alone_gets_it_and_no_tenants_names(model_dir: Path, tmp_path: Path) -> None:
    port = free_port()
    settings = {"http_listen": f"127.0.0.1:{port}", "http_allowed_hosts": ("chat.test",)}
    root = f"http://127.0.0.1:{port}"
    async with run_http_service(model_dir, tmp_path, **settings) as http, aiohttp.ClientSession(root) as session:
        http.service.peer.state = State(num_running=3, tenants=[scheduler_pb2.TenantState(name="someone")])
        for headers, is_local in (
            ({}, True),
            ({"Host": "localhost"}, True),
            ({"Host": "chat.test"}, False),
            *(({name: "x"}, False) for name in OF_PROXIES),
            *(({name: "x"}, True) for name in OF_CLIENTS),
        ):
            async with session.get(STATE_ROUTE, headers=headers) as answer:
                assert answer.status == (200 if is_local else 404), headers
                value = await answer.json()
            if is_local:
                assert (value["numRunning"], value["tenants"]) == (3, [])
            async with session.get("/openapi.json", headers=headers) as answer:
                assert (STATE_ROUTE in (await answer.json())["paths"]) is is_local
            async with session.get("/", headers=headers) as answer:
                assert f'data-needs-key="false" data-has-state="{str(is_local).lower()}"' in await answer.text()


async def test_without_keys_a_socket_whose_clients_may_be_anywhere_has_no_state(http: HttpService) -> None:
    assert (await http.get(STATE_ROUTE, headers=OPERATOR)).status == 404
    assert STATE_ROUTE not in (await http.get("/openapi.json")).value["paths"]
    assert http.service.peer.states_asked.empty()


async def test_while_no_scheduler_answers_the_state_is_not_ready(keyed: HttpService) -> None:
    peer = keyed.service.peer
    peer.may_tell.clear()
    asking = asyncio.create_task(keyed.get(STATE_ROUTE, headers=OPERATOR))
    await peer.states_asked.get()
    peer.end_stream()
    answers = [await asking]
    while (await keyed.get("/health")).status == 200:
        pass
    answers.append(await keyed.get(STATE_ROUTE, headers=OPERATOR))
    for answer in answers:
        assert (answer.status, answer.error["code"]) == (503, "not_ready")
        assert {"Retry-After", "retry-after-ms"} <= set(answer.headers)

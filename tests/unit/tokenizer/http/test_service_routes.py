"""The routes that say what is served."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.models.tiny_tokenizer import CONTEXT_LENGTH
from tests.support.tokenizer.http_client import MESSAGES, HttpService, run_http_service


async def test_the_model_is_listed_with_its_length(http: HttpService) -> None:
    [model] = (await http.get("/v1/models")).value["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", CONTEXT_LENGTH)
    assert (await http.get("/v1/models/tiny")).value == model
    missing = await http.get("/v1/models/other")
    assert (missing.status, missing.error["code"], missing.error["param"]) == (404, "model_not_found", "model")


async def test_clients_send_names_of_their_own(model_dir: Path, tmp_path: Path) -> None:
    async with run_http_service(model_dir, tmp_path, served_model_name=("gpt-4o", "team/model")) as http:
        assert [model["id"] for model in (await http.get("/v1/models")).value["data"]] == ["gpt-4o", "team/model"]
        assert (await http.get("/v1/models/team/model")).value["id"] == "team/model"
        body = {"model": "team/model", "messages": MESSAGES}
        assert (await http.post("/v1/chat/completions/render", body)).value["model"] == "gpt-4o"
        assert (await http.answer("/v1/chat/completions", body, [70])).value["model"] == "gpt-4o"


async def test_health_is_the_link_and_ping_the_process(http: HttpService) -> None:
    assert [(await http.get(path)).status for path in ("/health", "/ping", "/version")] == [200] * 3
    http.service.peer.end_stream()
    while (answer := await http.get("/health")).status == 200:
        pass
    assert (answer.status, answer.error["code"]) == (503, "not_ready")
    assert {"Retry-After", "retry-after-ms"} <= set(answer.headers)
    assert (await http.get("/ping")).status == 200


async def test_other_apis_are_refused_by_name(http: HttpService) -> None:
    answer = await http.post("/v1/moderations", {})
    assert (answer.status, answer.error["code"]) == (501, "not_supported")
    assert answer.headers["x-should-retry"] == "false"
    assert "/v1/moderations" in answer.error["message"]


async def test_other_paths_and_methods_have_their_statuses(http: HttpService) -> None:
    missing, method = await http.get("/v2"), await http.get("/v1/chat/completions")
    assert (missing.status, missing.error["code"]) == (404, "not_found")
    assert (method.status, method.error["code"], method.headers["Allow"]) == (405, "method_not_allowed", "POST")


async def test_metrics_are_those_of_the_management_port(http: HttpService) -> None:
    assert b"lockstep_scheduler_linked 1.0" in (await http.get("/metrics")).body


async def test_the_api_is_described(http: HttpService) -> None:
    description = (await http.get("/openapi.json")).value
    schemas = description["components"]["schemas"]
    body = description["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    fields = schemas[body["schema"]["$ref"].removeprefix("#/components/schemas/")]
    assert fields["required"] == ["messages"]
    assert {"string", "array"} <= {kind.get("type") for kind in fields["properties"]["stop"]["anyOf"]}
    references = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(description)))
    assert references <= set(schemas)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "The fox"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "model": "tiny"}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_no_proxy_may_change_or_keep_a_stream(http: HttpService, path: str, body: dict[str, object]) -> None:
    answer = await http.answer(path, {**body, "stream": True}, [70])
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["Cache-Control"] == "no-cache, no-transform"

"""Answers have the form that the API's description gives them."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from services.tokenizer.http.openapi import make_openapi
from tests.support.tokenizer.http_client import MESSAGES, Answer, HttpService

DESCRIPTION = make_openapi("1")


def check(path: str, method: str, answer: Answer) -> None:
    """Status, type and body are described."""
    responses = DESCRIPTION["paths"][path][method]["responses"]
    content = responses[str(answer.status)].get("content", {})
    media_type = answer.headers.get("Content-Type", "").partition(";")[0]
    assert media_type in content or (not answer.body and not content), (answer.status, media_type)
    if media_type == "application/json":
        schema = content[media_type]["schema"] | {"components": DESCRIPTION["components"]}
        jsonschema.validate(answer.value, schema)


@pytest.mark.parametrize("path", DESCRIPTION["paths"])
def test_every_schema_is_valid_and_every_reference_leads_somewhere(path: str) -> None:
    for operation in DESCRIPTION["paths"][path].values():
        for response in operation["responses"].values():
            for media_type, described in response.get("content", {}).items():
                if media_type == "text/event-stream":
                    assert described == {}
                    continue
                schema = described["schema"] | {"components": DESCRIPTION["components"]}
                jsonschema.Draft202012Validator.check_schema(schema)
                with pytest.raises(jsonschema.ValidationError):
                    jsonschema.validate(1, schema)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"stream": True},
    ],
)
async def test_a_chat(http: HttpService, fields: dict[str, Any]) -> None:
    answer = await http.answer("/v1/chat/completions", {"messages": MESSAGES, **fields}, [70, 71])
    check("/v1/chat/completions", "post", answer)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1, "return_token_ids": True}, {"stream": True}])
async def test_a_completion(http: HttpService, fields: dict[str, Any]) -> None:
    answer = await http.answer("/v1/completions", {"prompt": "hi", **fields}, [70, 71])
    check("/v1/completions", "post", answer)


@pytest.mark.parametrize("fields", [{}, {"generate": False}, {"stream": True}])
async def test_a_response(http: HttpService, fields: dict[str, Any]) -> None:
    body = {"input": "hi", **fields}
    probes = "generate" in fields
    answer = await (http.post("/v1/responses", body) if probes else http.answer("/v1/responses", body, [70, 71]))
    check("/v1/responses", "post", answer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/render", {"messages": MESSAGES}),
        ("/v1/completions/render", {"prompt": ["hi", [70]]}),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/detokenize", {"tokens": [70]}),
        ("/v1/chat/completions", {"messages": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "model": "other"}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 10_000}),
    ],
)
async def test_another_post(http: HttpService, path: str, body: dict[str, Any]) -> None:
    check(path, "post", await http.post(path, body))
    check(path, "post", await http.ask("POST", path, data=b"{}", headers={"Content-Type": "text/plain"}))


@pytest.mark.parametrize("path", [path for path in DESCRIPTION["paths"] if "get" in DESCRIPTION["paths"][path]])
async def test_a_get(http: HttpService, path: str) -> None:
    check(path, "get", await http.get(path.format(id="tiny")))
    if "{id}" in path:
        check(path, "get", await http.get(path.format(id="other")))

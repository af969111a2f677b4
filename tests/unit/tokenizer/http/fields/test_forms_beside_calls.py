"""A form beside a tool that must be called binds nothing: the call wins, and the form is named; `auto` keeps it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.tokenizer.http_client import HttpService, run_http_service

SCHEMA = {"type": "object", "properties": {"formed": {"type": "integer"}}, "required": ["formed"]}
ARGUMENTS = {"type": "object", "properties": {"argued": {"type": "integer"}}, "required": ["argued"]}
USER = [{"role": "user", "content": "hi"}]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "tools": [{"type": "function", "function": {"name": "find", "parameters": ARGUMENTS}}]},
    RESPONSES: {"input": "hi", "tools": [{"type": "function", "name": "find", "parameters": ARGUMENTS}]},
    MESSAGES: {"messages": USER, "max_tokens": 8, "tools": [{"name": "find", "input_schema": ARGUMENTS}]},
}
MUST: Mapping[str, list[Any]] = {
    CHAT: ["required", {"type": "function", "function": {"name": "find"}}],
    RESPONSES: ["required", {"type": "function", "name": "find"}],
    MESSAGES: [{"type": "any"}, {"type": "tool", "name": "find"}],
}
FORMS: list[tuple[str, dict[str, Any], str]] = [
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA, "strict": True}}},
        "response_format.json_schema.schema",
    ),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"structured_outputs": {"regex": "formed"}}, "structured_outputs.regex"),
    (CHAT, {"structured_outputs": {"choice": ["formed"]}}, "structured_outputs.choice"),
    (CHAT, {"structured_outputs": {"grammar": 'start: "formed"'}}, "structured_outputs.grammar"),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA, "strict": True}}},
        "text.format.schema",
    ),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
    (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format.schema",
    ),
]


@pytest.fixture
async def http(brief_model_dir: Path, tmp_path: Path) -> AsyncIterator[HttpService]:
    async with run_http_service(brief_model_dir, tmp_path, reply_parser="hermes") as running:
        yield running


@pytest.mark.parametrize(("route", "form", "named"), FORMS, ids=[f"{route} {name}" for route, _, name in FORMS])
async def test_a_call_that_must_be_made_wins_over_a_form(
    http: HttpService, route: str, form: dict[str, Any], named: str
) -> None:
    for choice in MUST[route]:
        task, [sent] = await http.begin(route, {**BODIES[route], **form, "model": "tiny", "tool_choice": choice})
        http.send(sent, [70])
        answer = await task
        assert (answer.status, answer.headers.get("x-lockstep-ignored")) == (200, named)
        assert "argued" in sent.options.grammar
        assert "formed" not in sent.options.grammar


@pytest.mark.parametrize(("route", "form", "named"), FORMS, ids=[f"{route} {name}" for route, _, name in FORMS])
async def test_a_form_holds_beside_tools_that_may_be_called(
    http: HttpService, route: str, form: dict[str, Any], named: str
) -> None:
    choice = {"type": "auto"} if route == MESSAGES else "auto"
    task, [sent] = await http.begin(route, {**BODIES[route], **form, "model": "tiny", "tool_choice": choice})
    http.send(sent, [70])
    answer = await task
    assert answer.status == 200
    assert named not in (answer.headers.get("x-lockstep-ignored") or "")
    assert sent.options.grammar

"""A thinking switch that the template never reads is named on every route, unless it asks for what is done anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.chat.template_switches import unread_variables
from services.tokenizer.http.anthropic.request import read_messages_request
from services.tokenizer.http.openai.chat_request import read_chat_request
from services.tokenizer.http.openai_responses.request import read_response_request
from services.tokenizer.json.json_values import read_json_object
from tests.support.tokenizer.family_templates import TEMPLATES
from tests.support.tokenizer.http_client import MESSAGES, run_http_service
from tests.support.tokenizer.same_prompt import load

DOORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (read_chat_request, {"messages": MESSAGES}),
    "/v1/responses": (read_response_request, {"input": "hi"}),
    "/v1/messages": (read_messages_request, {"messages": MESSAGES, "max_tokens": 1}),
}
# What clients write, with the switch in it and an effort if there is one.
WRITTEN: list[tuple[dict[str, Any], bool | None, str | None]] = [
    ({"thinking": {"type": "enabled"}}, True, None),
    ({"thinking": {"type": "adaptive"}}, True, None),
    ({"thinking": {"type": "disabled"}}, False, None),
    ({"enable_thinking": True}, True, None),
    ({"enable_thinking": False}, False, None),
    ({"reasoning": {"enabled": True}}, True, None),
    ({"reasoning": {"enabled": False}}, False, None),
    ({"reasoning": {"effort": "high"}}, True, "high"),
    ({"reasoning": {"effort": "none"}}, False, None),
    ({"reasoning_effort": "low"}, True, "low"),
    ({"reasoning_effort": "none"}, False, None),
]


def field_of(body: dict[str, Any]) -> str:
    """The name of the field in a body with one."""
    [(name, value)] = body.items()
    inner = next(iter(value)) if isinstance(value, dict) else ""
    return f"{name}.{inner}" if name == "reasoning" else name


def named(api: Any, read: frozenset[str], *, reasons: bool) -> list[str]:
    variables = read_json_object(api.message.chat.template_variables or "{}")
    names = unread_variables(variables, read, reasons=reasons)
    return list(dict.fromkeys(field for name in names for field in api.options.variable_fields[name]))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("route", DOORS)
def test_every_route_names_the_same_switches(route: str, name: str) -> None:
    reader, body = DOORS[route]
    read = load(TEMPLATES[name]).variables
    has_switch = bool(read & {"enable_thinking", "thinking"})
    for fields, is_on, effort in WRITTEN:
        api = reader(body | fields, "r")
        for reasons in (False, True):
            is_lost = not has_switch and is_on is not reasons
            is_lost = is_lost or (effort is not None and "reasoning_effort" not in read)
            assert named(api, read, reasons=reasons) == ([field_of(fields)] if is_lost else []), (fields, reasons)


@pytest.mark.parametrize("route", DOORS)
def test_a_variable_by_its_own_name_is_named_by_that(route: str) -> None:
    reader, body = DOORS[route]
    if route == "/v1/messages":
        api = reader(body | {"output_config": {"effort": "max"}}, "r")
        assert named(api, frozenset({"thinking"}), reasons=True) == ["output_config.effort"]
    api = reader(body | {"chat_template_kwargs": {"enable_thinking": True, "depth": 3}}, "r")
    assert named(api, frozenset(), reasons=False) == [
        "chat_template_kwargs.enable_thinking",
        "chat_template_kwargs.depth",
    ]
    api = reader(body | {"chat_template_kwargs": {"enable_thinking": False}}, "r")
    assert named(api, frozenset(), reasons=False) == []


async def test_the_header_names_what_a_model_cannot_do(model_dir: Path, tmp_path: Path) -> None:
    async with run_http_service(model_dir, tmp_path) as http:
        for route, (_, body) in DOORS.items():
            for fields, is_on, _ in WRITTEN:
                task, [sent] = await http.begin(route, body | fields)
                http.send(sent, [70])
                header = (await task).headers.get("x-lockstep-ignored")
                assert header == (field_of(fields) if is_on else None), (route, fields)

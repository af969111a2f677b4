"""Custom tools of a chat, whose input is a text, over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from lockstep.v1 import common_pb2
from services.tokenizer.http.openapi import make_openapi
from tests.support.models.tiny_tokenizer import IM_END_ID
from tests.support.tokenizer.exchange_peer import Row, make_end, read_column
from tests.support.tokenizer.http_client import MESSAGES, HttpService, run_http_service

CHAT, RENDER, RESPONSES = "/v1/chat/completions", "/v1/chat/completions/render", "/v1/responses"
EOS = common_pb2.FINISH_REASON_EOS
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SH = {"type": "custom", "custom": {"name": "sh"}}
REPLY = (
    'So:<tool_call>{"name": "look", "arguments": {"a": "b"}}</tool_call>\n'
    '<tool_call>{"name": "sh", "arguments": {"input": "ls \\"é\\"\\n"}}</tool_call>'
)
INPUT = 'ls "é"\n'


@pytest.fixture
async def http(brief_model_dir: Path, tmp_path: Path) -> AsyncIterator[HttpService]:
    async with run_http_service(brief_model_dir, tmp_path, reply_parser="hermes") as running:
        yield running


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, **fields}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "sh", "format": form}}


def joined_calls(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that the deltas of the only choice make."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        for delta in piece["choices"][0]["delta"].get("tool_calls", []):
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append({name: value for name, value in delta.items() if name != "index"})
                continue
            call = calls[delta["index"]]
            [(kind, news)] = [(name, value) for name, value in delta.items() if name != "index"]
            [(argument, text)] = news.items()
            assert kind == call["type"]
            call[kind] = call[kind] | {argument: call[kind][argument] + text}
    return calls


async def test_calls_have_their_input_whole_and_streamed(http: HttpService, tokenizer: Tokenizer) -> None:
    body = chat(tools=[LOOK, SH])
    ids = [*tokenizer.encode(REPLY).ids, IM_END_ID]
    whole = (await http.answer(CHAT, body, ids, reason=EOS)).value
    answers = make_openapi("1")["components"]
    jsonschema.validate(whole, {"$ref": "#/components/schemas/ChatAnswer", "components": answers})
    [choice] = whole["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("So:", "tool_calls")
    function, custom = choice["message"]["tool_calls"]
    assert function == {
        "id": function["id"],
        "type": "function",
        "function": {"name": "look", "arguments": '{"a": "b"}'},
    }
    assert custom == {"id": custom["id"], "type": "custom", "custom": {"name": "sh", "input": INPUT}}

    task, [sent] = await http.begin(CHAT, body | {"stream": True})
    for index, token_id in enumerate(ids):
        ends = [make_end(sent.handle, EOS, len(ids))] if index == len(ids) - 1 else []
        http.service.peer.send(Row(sent.handle, index, [token_id]), ends=ends)
    pieces = (await task).pieces
    calls = joined_calls(pieces)
    assert [call | {"id": ""} for call in calls] == [function | {"id": ""}, custom | {"id": ""}]
    assert pieces[-1]["choices"][0]["finish_reason"] == "tool_calls"
    inputs = [
        delta["custom"]["input"]
        for piece in pieces
        for delta in piece["choices"][0]["delta"].get("tool_calls", [])
        if "custom" in delta
    ]
    assert len(inputs) > 2
    assert all(inputs[1:])


async def test_calls_and_results_come_back_as_in_responses(http: HttpService) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "sh", "input": INPUT}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    items = [
        *MESSAGES,
        {"type": "custom_tool_call", "call_id": "c", "name": "sh", "input": INPUT},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    form = {"type": "grammar", "syntax": "regex", "definition": "l."}
    bodies = [
        (CHAT, {"messages": messages, "tools": [grammar("regex", "l.")]}),
        (RESPONSES, {"input": items, "tools": [{"type": "custom", "name": "sh", "format": form}]}),
    ]
    prompts = []
    for path, body in bodies:
        task, [sent] = await http.begin(path, body)
        http.send(sent, [70])
        assert (await task).status == 200
        prompts.append(list(read_column(sent.prompt_token_ids)))
    assert prompts[0] == prompts[1]
    shown = (await http.post(RENDER, bodies[0][1])).value["prompts"][0]["prompt"]
    assert "[sh{'input': 'ls \"é\"\\n'}]" in shown or '[sh{"input": "ls \\"é\\"\\n"}]' in shown


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "custom", "custom": {"name": "sh"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [SH]}},
    ],
)
@pytest.mark.parametrize(
    ("syntax", "definition", "is_held"),
    [
        ("regex", "[ab]+c", True),
        ("lark", 'start: /[ab]+/ "c"', True),
        ("lark", 'start: "a" start?', False),
        ("lark", "start: /(?=a)/", False),
    ],
)
async def test_a_call_that_must_be_made_has_its_form_if_it_is_a_regular_expression(
    http: HttpService, choice: Any, syntax: str, definition: str, is_held: bool
) -> None:
    task, [sent] = await http.begin(CHAT, chat(tools=[grammar(syntax, definition)], tool_choice=choice))
    http.send(sent, [70])
    assert (await task).headers.get("x-lockstep-ignored") == (None if is_held else "tools[0].custom.format")
    assert ("[ab]" in sent.options.grammar) == is_held


async def test_a_form_that_calls_may_not_have_is_named(http: HttpService) -> None:
    text = {"type": "custom", "custom": {"name": "say", "format": {"type": "text"}}}
    named = {"type": "function", "function": {"name": "look"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [SH, named]}}
    task, [sent] = await http.begin(
        CHAT, chat(tools=[text, grammar("regex", "a"), LOOK], tool_choice=allowed, stream=True)
    )
    http.send(sent, [70])
    assert (await task).headers["x-lockstep-ignored"] == "tools[1].custom.format"


def call_of(**call: Any) -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "c", **call}]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "name": "sh"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        ({"tools": [LOOK, {"type": "custom", "custom": {"name": "a b"}}]}, "tools[1].custom.name"),
        ({"tools": [SH, SH]}, "tools[1].custom.name"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "sh", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "sh", "format": {"type": "json"}}}]},
            "tools[0].custom.format.type",
        ),
        ({"tools": [grammar("gbnf", "a")]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [grammar("regex", "(")], "tool_choice": "required"}, "tools"),
        ({"tools": [SH], "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": [SH], "tool_choice": {"type": "custom", "function": {"name": "sh"}}}, "tool_choice"),
        ({"tools": [SH], "tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "tool_choice"),
        (
            {
                "tools": [SH],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [SH, {"type": "custom", "function": {"name": "sh"}}]},
                },
            },
            "tool_choice.allowed_tools.tools[1]",
        ),
        (call_of(type="custom"), "messages[1].tool_calls[0].custom"),
        (call_of(type="custom", custom={"name": "sh"}), "messages[1].tool_calls[0].custom.input"),
        (call_of(type="custom", custom={"name": "", "input": ""}), "messages[1].tool_calls[0].custom.name"),
        (call_of(), "messages[1].tool_calls[0].function"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_name(http: HttpService, fields: dict[str, Any], param: str) -> None:
    answer = await http.post(CHAT, chat() | fields)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_request", param)

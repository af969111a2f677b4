"""What requests of Messages are in a chat of the cell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.anthropic.request import (
    CountTokensFields,
    MessagesFields,
    read_count_request,
    read_messages_request,
)
from services.tokenizer.http.errors import http_error
from services.tokenizer.http.fields.api_request import ApiRequest
from services.tokenizer.http.fields.thinking_signatures import make_signature
from services.tokenizer.http.refusals import HttpError
from services.tokenizer.request.checks import check_request
from shared.errors import ServiceError
from shared.request.limits import ModelLimits
from tests.support.tokenizer.http_client import MESSAGES

LIMITS = ModelLimits(context_length=256, logits_width=420, num_pool_tokens=200)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"name": "look", "description": "Look.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
OTHER = {"type": "custom", "name": "find", "input_schema": {}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
SYSTEM, USER, ASSISTANT, RESULT = (
    tokenizer_pb2.ROLE_SYSTEM,
    tokenizer_pb2.ROLE_USER,
    tokenizer_pb2.ROLE_ASSISTANT,
    tokenizer_pb2.ROLE_TOOL,
)


def read(**fields: Any) -> ApiRequest:
    body: dict[str, Any] = {"max_tokens": 9, "messages": MESSAGES, **fields}
    return read_messages_request(body, "r")


def chat_of(*turns: tuple[str, Any], **fields: Any) -> list[tuple[int, str]]:
    """The roles and contents of the cell's messages."""
    messages = [{"role": role, "content": content} for role, content in turns]
    return [(each.role, each.content) for each in read(messages=messages, **fields).message.chat.messages]


def text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def refused(**fields: Any) -> HttpError:
    with pytest.raises(HttpError) as error:
        read(**fields)
    return error.value


def test_a_request_of_every_field_becomes_a_chat() -> None:
    api = read(
        model="tiny",
        system=[text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "high"},
        metadata={"user_id": "me"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        stream=True,
        seed=5,
    )
    chat, sampling = api.message.chat, api.message.sampling
    assert [(each.role, each.content) for each in chat.messages] == [(SYSTEM, "Be brief.\nBe kind."), (USER, "hi")]
    [tool] = chat.tools
    assert (tool.name, tool.description, json.loads(tool.parameters)) == ("look", "Look.", SCHEMA)
    assert (chat.tool_name, chat.single_tool_call) == ("look", True)
    assert (list(api.message.stop), sampling.top_k, sampling.seed) == (["END"], 7, 5)
    assert not sampling.HasField("max_tokens")
    assert (api.default_max_tokens, api.options.max_tokens, api.options.is_streamed) == (9, 9, True)
    assert json.loads(chat.template_variables) == {
        "enable_thinking": True,
        "thinking": True,
        "thinking_budget": 2048,
        "reasoning_effort": "high",
    }
    # No budget ends the reasoning, and everything else has its effect.
    assert sorted(api.ignored) == ["metadata", "service_tier", "thinking.budget_tokens"]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("x-anthropic-billing-header: cc_version=2.1.332.b0a; cc_entrypoint=sdk-cli;", []),
        ("x-anthropic-billing-header: cc_version=2;\nBe brief.", [(SYSTEM, "Be brief.")]),
        ([text("x-anthropic-billing-header: cc_version=1;"), text("Be brief.")], [(SYSTEM, "Be brief.")]),
        ("Say x-anthropic-billing-header: 1", [(SYSTEM, "Say x-anthropic-billing-header: 1")]),
    ],
)
def test_claude_codes_attribution_does_not_reach_the_prompt(system: Any, expected: list[Any]) -> None:
    assert chat_of(("user", "hi"), system=system) == [*expected, (USER, "hi")]


def test_neighbours_of_one_role_are_one_message_and_systems_stay_where_they_are() -> None:
    turns = [("user", [text("a")]), ("user", "b"), ("system", "now"), ("assistant", "c"), ("assistant", "d")]
    expected = [(USER, "a\nb"), (SYSTEM, "now"), (ASSISTANT, "c\nd"), (USER, "e")]
    assert chat_of(*turns, ("user", "e")) == expected


def test_calls_results_and_thoughts_come_back() -> None:
    call = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"a": "b"}}
    hidden = {"type": "thinking", "thinking": "", "signature": make_signature("so")}
    foreign = {"type": "thinking", "thinking": "hm", "signature": "EqQBCgIYAhIM"}
    results = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": [text("x"), text("y")]},
        {"type": "tool_result", "tool_use_id": "call_2", "is_error": True, "content": "no"},
        {"type": "tool_result", "tool_use_id": "call_3"},
    ]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [hidden, foreign, text("I look."), call]},
        {"role": "user", "content": [*results, text("And?")]},
    ]
    _, assistant, *rest = read(messages=messages).message.chat.messages
    assert (assistant.reasoning, assistant.content) == ("so\nhm", "I look.")
    [made] = assistant.tool_calls
    assert (made.id, made.name, json.loads(made.arguments)) == ("call_1", "look", {"a": "b"})
    assert [(each.role, each.content, each.tool_call_id) for each in rest] == [
        (RESULT, "x\ny", "call_1"),
        (RESULT, "Error:\nno", "call_2"),
        (RESULT, "", "call_3"),
        (USER, "And?", ""),
    ]


def test_what_other_servers_did_is_left_out_and_named() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        text("Found."),
    ]
    api = read(messages=[*MESSAGES, {"role": "assistant", "content": blocks}, *MESSAGES], tools=[TOOL, SEARCH])
    assert [each.content for each in api.message.chat.messages] == ["hi", "Found.", "hi"]
    assert [tool.name for tool in api.message.chat.tools] == ["look"]
    for name in ("messages[1].content[0]", "messages[1].content[1]", "messages[1].content[2]", "tools[1]"):
        assert name in api.ignored


def test_a_deferred_tool_is_offered_once_the_chat_names_it() -> None:
    deferred = {**TOOL, "defer_loading": True}
    assert not read(tools=[deferred]).message.chat.tools
    found = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "look"}]}
    addition = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "look"}}
    for role, part in (("user", found), ("system", addition)):
        api = read(tools=[deferred], messages=[*MESSAGES, {"role": role, "content": [part]}])
        assert [tool.name for tool in api.message.chat.tools] == ["look"]
    defined = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": OTHER}}
    for tools, names in (([TOOL], ["look", "find"]), ([OTHER, TOOL], ["look", "find"])):
        api = read(tools=tools, messages=[*MESSAGES, {"role": "system", "content": [defined, defined]}])
        assert [tool.name for tool in api.message.chat.tools] == names


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ("auto", tokenizer_pb2.TOOL_MODE_AUTO),
        ("any", tokenizer_pb2.TOOL_MODE_REQUIRED),
        ("none", tokenizer_pb2.TOOL_MODE_NONE),
    ],
)
def test_tool_choices(choice: str, mode: int) -> None:
    api = read(tools=[{**TOOL, "strict": True}], tool_choice={"type": choice})
    assert api.message.chat.tool_mode == mode
    # A grammar holds only the arguments of calls that must be made.
    assert ("tools[0].strict" in api.ignored) == (choice != "any")


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_an_answer_may_have_a_form(field: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    api = read(**{field: {"format": form} if field == "output_config" else form})
    assert json.loads(api.message.structured_output.json_schema) == SCHEMA
    assert not api.message.structured_output.strict


def test_the_last_message_of_the_assistant_is_continued() -> None:
    assert read(messages=[*MESSAGES, {"role": "assistant", "content": "It"}]).message.chat.continue_final_message
    assert not read().message.chat.continue_final_message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"max_tokens": None}, "max_tokens", ""),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", ""),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]", "an image"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]", "a document"),
        ({"system": [{"type": "image"}]}, "system[0]", "an image"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "required"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "required"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name", "client"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice", "client"),
        ({"mcp_servers": [{}]}, "mcp_servers", "not supported"),
        ({"thinking": {"type": "fast"}}, "thinking.type", ""),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(**fields)
    assert (error.status, error.param) == (400, param)
    assert words in error.message


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("sampling.top_p", "top_p"),
        ("stop[1]", "stop_sequences[1]"),
        ("chat.messages[0].content", "system"),
        ("chat.messages[1].content", "messages[0]"),
        ("chat.messages[3].tool_calls[0].name", "messages[2]"),
        ("chat.messages", "messages"),
        ("chat.tools[0].parameters", "tools[1].input_schema"),
        ("chat.tool_name", "tool_choice"),
        ("chat.template_variables", "thinking"),
        ("structured_output.json_schema", "output_config.format.schema"),
        ("prompt", "messages"),
    ],
)
def test_fields_have_their_names_of_this_api(field: str, name: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    api = read(system="Be brief.", messages=messages, tools=[SEARCH, TOOL], output_config=form)
    assert api.names(field) == name


VALUES: list[Any] = [
    True, 0, -1, 2**32, 1.5, 1e308, "", "x", "\0", [], [[]], [0], ["x"], [None], {}, {"x": 1}, {"type": "x"},
    {"type": "tool"}, {"type": "enabled"}, {"type": "json_schema", "schema": 1}, [{"role": "user"}], [{"type": "text"}],
    [{"role": "user", "content": [{"type": "tool_use"}]}], [{"role": "user", "content": [{"type": "tool_result"}]}],
    [{"type": "custom", "name": "", "input_schema": {"type": "array"}}],
]  # fmt: skip


@pytest.mark.parametrize("name", MessagesFields.model_fields)
def test_a_field_of_any_value_is_read_or_refused_by_its_name(name: str) -> None:
    readers = [read_messages_request, *([read_count_request] if name in CountTokensFields.model_fields else [])]
    for value in VALUES:
        for reader in readers:
            body = {"messages": MESSAGES, "max_tokens": 9, "tools": [TOOL], name: value}
            try:
                api = reader(body, "r")
                check_request(api.message, model_name="tiny", limits=LIMITS)
            except HttpError as error:
                problem = error
            except ServiceError as error:
                problem = http_error(error, api.names)
            else:
                continue
            assert problem.status == 400
            assert problem.param is not None
            assert problem.param.split(".")[0].split("[")[0] in (name, "messages", "tool_choice")

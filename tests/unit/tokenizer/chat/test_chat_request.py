from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import json_format

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import chat_text_bytes, check_chat, read_chat
from services.tokenizer.chat.conversation import Conversation, Message, Tool, ToolCall, ToolMode
from services.tokenizer.text_size import MAX_TEXT_BYTES
from shared.errors import InvalidRequestError, RequestTooLargeError, Violation
from shared.network.statuses import to_status

USER = {"role": "ROLE_USER", "content": "Hi"}
TOOL = {"name": "look_up", "description": "Looks words up.", "parameters": '{"type": "object"}'}


def chat_of(*messages: dict[str, Any], **fields: Any) -> tokenizer_pb2.Chat:
    """A chat with these messages, or one user message if there are none."""
    return json_format.ParseDict({"messages": list(messages) or [USER], **fields}, tokenizer_pb2.Chat())


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "ROLE_ASSISTANT", **fields}


def calling(**call: Any) -> dict[str, Any]:
    return assistant(toolCalls=[{"name": "look_up", **call}])


def refused(chat: tokenizer_pb2.Chat) -> list[str]:
    """The fields of a chat that must be refused."""
    with pytest.raises(InvalidRequestError) as caught:
        check_chat(chat)
    assert {violation.reason for violation in caught.value.violations} == {"OUT_OF_RANGE"}
    return [violation.field for violation in caught.value.violations]


def test_messages_have_role_names() -> None:
    roles = ["ROLE_SYSTEM", "ROLE_USER", "ROLE_ASSISTANT", "ROLE_TOOL"]
    conversation = check_chat(chat_of(*({"role": role, "content": "x"} for role in roles)))
    names = ("system", "user", "assistant", "tool")
    assert conversation == Conversation(tuple(Message(name, "x") for name in names))


def test_a_chats_fields_are_read() -> None:
    conversation = check_chat(
        chat_of(
            {**USER, "name": "Ada"},
            assistant(reasoning="Hm.", toolCalls=[{"id": "c1", "name": "look_up", "arguments": '{"word": ["é"]}'}]),
            {"role": "ROLE_TOOL", "content": "A letter.", "toolCallId": "c1", "name": "look_up"},
            tools=[TOOL, {"name": "now"}],
            templateVariables='{"enable_thinking": false}',
        )
    )
    call = ToolCall("c1", "look_up", {"word": ["é"]})
    assert conversation.messages == (
        Message("user", "Hi", name="Ada"),
        Message("assistant", "", (call,), reasoning="Hm."),
        Message("tool", "A letter.", tool_call_id="c1", name="look_up"),
    )
    assert conversation.tools == (
        Tool("look_up", "Looks words up.", {"type": "object"}),
        Tool("now", "", {"type": "object", "properties": {}}),
    )
    assert conversation.variables == {"enable_thinking": False}
    assert conversation.tool_mode is ToolMode.AUTO


@pytest.mark.parametrize(
    ("fields", "mode", "offered", "callable_names"),
    [
        ({}, ToolMode.AUTO, 2, []),
        ({"toolMode": "TOOL_MODE_AUTO"}, ToolMode.AUTO, 2, []),
        ({"toolMode": "TOOL_MODE_NONE"}, ToolMode.NONE, 0, []),
        ({"toolMode": "TOOL_MODE_REQUIRED"}, ToolMode.REQUIRED, 2, ["look_up", "now"]),
        ({"toolName": "now"}, ToolMode.REQUIRED, 2, ["now"]),
        ({"toolMode": "TOOL_MODE_AUTO", "toolName": "now"}, ToolMode.REQUIRED, 2, ["now"]),
        ({"allowedToolNames": ["now"]}, ToolMode.AUTO, 2, []),
        ({"toolMode": "TOOL_MODE_REQUIRED", "allowedToolNames": ["now"]}, ToolMode.REQUIRED, 2, ["now"]),
        ({"toolName": "now", "allowedToolNames": ["look_up", "now"]}, ToolMode.REQUIRED, 2, ["now"]),
    ],
)
def test_the_tool_mode_determines_the_offered_and_the_callable_tools(
    fields: dict[str, Any], mode: ToolMode, offered: int, callable_names: list[str]
) -> None:
    conversation = check_chat(chat_of(tools=[TOOL, {"name": "now"}], **fields))
    assert conversation.tool_mode is mode
    assert len(conversation.offered_tools) == offered
    assert [tool.name for tool in conversation.callable_tools] == callable_names


@pytest.mark.parametrize("text", ['{"a": ', "[1]", "no", "{} {}"])
def test_arguments_that_are_no_object_stay_text_if_asked_for(text: str) -> None:
    conversation = check_chat(chat_of(USER, calling(arguments=text), keepInvalidArguments=True))
    assert conversation.messages[1].tool_calls == (ToolCall("", "look_up", text),)
    kept = check_chat(chat_of(USER, calling(arguments='{"a": 1}'), keepInvalidArguments=True))
    assert kept.messages[1].tool_calls == (ToolCall("", "look_up", {"a": 1}),)


def test_a_call_without_arguments_has_an_empty_object() -> None:
    conversation = check_chat(chat_of(USER, calling()))
    assert conversation.messages[1].tool_calls == (ToolCall("", "look_up", {}),)


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (tokenizer_pb2.Chat(), "messages"),
        (chat_of(*[USER] * 1025), "messages"),
        (chat_of({"content": "x"}), "messages[0].role"),
        (chat_of({"role": 77, "content": "x"}), "messages[0].role"),
        (chat_of(USER, {**USER, "content": "é" * 2**18 + "x"}), "messages[1].content"),
        (chat_of(assistant(reasoning="x" * (2**19 + 1))), "messages[0].reasoning"),
        (chat_of({**USER, "name": "é" * 129}), "messages[0].name"),
        (chat_of({**USER, "reasoning": "x"}), "messages[0].reasoning"),
        (chat_of({**USER, "toolCallId": "x"}), "messages[0].tool_call_id"),
        (chat_of(assistant(toolCallId="x")), "messages[0].tool_call_id"),
        (chat_of({"role": "ROLE_TOOL", "toolCallId": "x" * 257}), "messages[0].tool_call_id"),
        (chat_of({**USER, "toolCalls": [{"name": "x"}]}), "messages[0].tool_calls"),
        (chat_of(assistant(toolCalls=[{"name": "x"}] * 129)), "messages[0].tool_calls"),
        (chat_of(assistant(toolCalls=[{"name": "x"}, {}])), "messages[0].tool_calls[1].name"),
        (chat_of(calling(name="x" * 257)), "messages[0].tool_calls[0].name"),
        (chat_of(calling(id="x" * 257)), "messages[0].tool_calls[0].id"),
        (chat_of(calling(arguments="{")), "messages[0].tool_calls[0].arguments"),
        (chat_of(calling(arguments="[1]")), "messages[0].tool_calls[0].arguments"),
        (chat_of(calling(arguments='{"a": NaN}')), "messages[0].tool_calls[0].arguments"),
        (chat_of(calling(arguments='{"a": "\\ud800"}')), "messages[0].tool_calls[0].arguments"),
        (chat_of(calling(arguments='{"a":' * 65 + "1" + "}" * 65)), "messages[0].tool_calls[0].arguments"),
        (chat_of(calling(arguments='{"a":' * 90_000)), "messages[0].tool_calls[0].arguments"),
        (chat_of(calling(arguments=f'{{"a": "{"x" * 2**19}"}}')), "messages[0].tool_calls[0].arguments"),
        (chat_of(tools=[{"name": f"t{number}"} for number in range(129)]), "tools"),
        (chat_of(tools=[{"name": "t", "description": "x" * 2**19}]), "tools"),
        (chat_of(tools=[{}]), "tools[0].name"),
        (chat_of(tools=[{"name": "x" * 65}]), "tools[0].name"),
        (chat_of(tools=[{"name": "a b"}]), "tools[0].name"),
        (chat_of(tools=[{"name": "a\n"}]), "tools[0].name"),
        (chat_of(tools=[TOOL, TOOL]), "tools[1].name"),
        (chat_of(tools=[{"name": "t", "parameters": "x"}]), "tools[0].parameters"),
        (chat_of(tools=[{"name": "t", "parameters": "true"}]), "tools[0].parameters"),
        (chat_of(tools=[{"name": "t", "parameters": '{"type": "string"}'}]), "tools[0].parameters"),
        (chat_of(tools=[TOOL], toolMode=9), "tool_mode"),
        (chat_of(toolMode="TOOL_MODE_REQUIRED"), "tool_mode"),
        (chat_of(toolName="look_up"), "tool_name"),
        (chat_of(tools=[TOOL], toolName="look"), "tool_name"),
        (chat_of(tools=[TOOL], toolName="look_up", toolMode="TOOL_MODE_NONE"), "tool_name"),
        (chat_of(tools=[TOOL], allowedToolNames=["look_up", "x"]), "allowed_tool_names[1]"),
        (chat_of(allowedToolNames=["look_up"]), "allowed_tool_names[0]"),
        (
            chat_of(tools=[TOOL], allowedToolNames=["look_up"], toolMode="TOOL_MODE_NONE"),
            "allowed_tool_names",
        ),
        (
            chat_of(tools=[TOOL, {**TOOL, "name": "now"}], allowedToolNames=["look_up"], toolName="now"),
            "tool_name",
        ),
        (
            chat_of(
                USER, {"role": "ROLE_ASSISTANT", "content": "A"}, continueFinalMessage=True, omitGenerationPrompt=True
            ),
            "omit_generation_prompt",
        ),
        (chat_of(templateVariables="x"), "template_variables"),
        (chat_of(templateVariables="[]"), "template_variables"),
        (chat_of(templateVariables=json.dumps({"a": "x" * 2**16})), "template_variables"),
        *(
            (chat_of(templateVariables=json.dumps({name: "x"})), "template_variables")
            for name in (
                "messages",
                "tools",
                "add_generation_prompt",
                "continue_final_message",
                "chat_template",
                "conversations",
                "return_assistant_tokens_mask",
                "bos_token",
                "eos_token",
                "self",
                "__class__",
                "",
                "a b",
            )
        ),
    ],
)
def test_a_bad_field_is_named(chat: tokenizer_pb2.Chat, field: str) -> None:
    assert refused(chat) == [f"chat.{field}"]


def test_violations_are_prefixed_with_the_field_of_the_chat() -> None:
    violations: list[Violation] = []
    read_chat(tokenizer_pb2.Chat(), violations, field="prompts.prompts[3].chat")
    assert [violation.field for violation in violations] == ["prompts.prompts[3].chat.messages"]


def test_all_bad_fields_are_named_together_without_their_contents() -> None:
    chat = chat_of(
        {"role": 9, "content": "secret"},
        calling(name="secret" * 99, arguments="secret"),
        tools=[{"name": "secret!", "parameters": "secret"}],
        toolName="secret",
        templateVariables='{"secret": ',
    )
    with pytest.raises(InvalidRequestError) as caught:
        check_chat(chat)
    assert {violation.field for violation in caught.value.violations} == {
        "chat.messages[0].role",
        "chat.messages[1].tool_calls[0].name",
        "chat.messages[1].tool_calls[0].arguments",
        "chat.tools[0].name",
        "chat.tools[0].parameters",
        "chat.tool_name",
        "chat.template_variables",
    }
    assert "secret" not in str(to_status(caught.value))


def test_a_chat_full_of_errors_is_not_read_to_its_end() -> None:
    violations: list[Violation] = []
    read_chat(chat_of(*[{"toolCalls": [{}] * 128}] * 1024), violations)
    assert len(violations) < 1000


def test_all_text_of_a_chat_counts() -> None:
    chat = chat_of(
        {**USER, "content": "é", "name": "1"},
        {"role": "ROLE_TOOL", "toolCallId": "1"},
        assistant(reasoning="1", toolCalls=[{"id": "1", "name": "1", "arguments": "{}"}]),
        tools=[{"name": "1", "description": "1", "parameters": "{}"}],
        toolName="1",
        templateVariables="{}",
    )
    assert chat_text_bytes(chat) == 2 + 1 + 1 + 1 + 4 + 4 + 1 + 2


def test_a_chat_beyond_the_limit_is_too_large() -> None:
    chat = chat_of(*[{**USER, "content": "x" * 2**19}] * 6)
    assert chat_text_bytes(chat) == MAX_TEXT_BYTES
    check_chat(chat)
    chat.messages[0].content = chat.messages[0].content[1:]
    chat.tools.add(name="ab")
    with pytest.raises(RequestTooLargeError):
        check_chat(chat)

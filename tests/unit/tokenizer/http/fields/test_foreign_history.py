"""What conversations have that other providers, their tools and their libraries have left there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.anthropic.request import read_messages_request
from services.tokenizer.http.openai.chat_request import read_chat_request
from services.tokenizer.http.openai_responses.request import read_response_request
from services.tokenizer.http.refusals import HttpError
from tests.support.tokenizer.http_client import MESSAGES as SAID

MESSAGES: list[Any] = [*SAID]
ASSISTANT, USER = tokenizer_pb2.ROLE_ASSISTANT, tokenizer_pb2.ROLE_USER

FOREIGN: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "file_search_call", "id": "1", "queries": ["x"], "results": [{"text": "x"}]},
    {"type": "code_interpreter_call", "id": "1", "code": "x", "outputs": [{"type": "logs", "logs": "x"}]},
    {"type": "image_generation_call", "id": "1", "result": "x"},
    {"type": "computer_call", "id": "1", "call_id": "1", "action": {"type": "wait"}, "pending_safety_checks": []},
    {"type": "computer_call_output", "call_id": "1", "output": {"type": "computer_screenshot", "image_url": "x"}},
    {"type": "local_shell_call", "id": "1", "call_id": "1", "action": {"type": "exec", "command": ["ls"], "env": {}}},
    {"type": "local_shell_call_output", "id": "1", "output": "x"},
    {"type": "shell_call", "call_id": "1", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "1", "output": [{"stdout": "x", "stderr": "", "outcome": {}}]},
    {"type": "apply_patch_call", "call_id": "1", "operation": {"type": "delete_file", "path": "x"}},
    {"type": "apply_patch_call_output", "call_id": "1", "status": "completed", "output": "x"},
    {"type": "mcp_list_tools", "id": "1", "server_label": "x", "tools": [{"name": "x", "input_schema": {}}]},
    {"type": "mcp_approval_request", "id": "1", "arguments": "{}", "name": "x", "server_label": "x"},
    {"type": "mcp_approval_response", "approval_request_id": "1", "approve": True},
    {"type": "mcp_call", "id": "1", "arguments": "{}", "name": "x", "server_label": "x", "output": "x", "error": None},
    {"type": "tool_search_call", "arguments": {"x": 1}, "execution": "server"},
    {"type": "tool_search_output", "tools": [{"name": "x"}]},
    {"type": "compaction", "encrypted_content": "opaque"},
    {"type": "compaction_trigger"},
    {"type": "program", "code": "x"},
    {"type": "program_output", "result": "x"},
]


@pytest.mark.parametrize("item", FOREIGN, ids=[item["type"] for item in FOREIGN])
def test_an_item_of_another_provider_is_skipped_and_named(item: Any) -> None:
    answer: Any = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]}
    api = read_response_request({"input": [{"role": "user", "content": "a"}, item, answer]}, "r")
    assert api.ignored == ["input[1]"]
    found = [(message.role, message.content) for message in api.message.chat.messages]
    assert found == [(USER, "a"), (ASSISTANT, "b")]


def test_an_item_of_no_kind_is_refused() -> None:
    with pytest.raises(HttpError, match=r"input\[0\]\.type"):
        read_response_request({"input": [{"type": "hologram"}]}, "r")


def test_arguments_may_be_an_object() -> None:
    call: Any = {"type": "function_call", "call_id": "1", "name": "f", "arguments": {"a": "é"}}
    [message] = read_response_request({"input": [call]}, "r").message.chat.messages
    assert json.loads(message.tool_calls[0].arguments) == {"a": "é"}


@pytest.mark.parametrize(
    "content",
    [
        "a\nb",
        ["a", "b"],
        [{"type": "text", "text": "a"}, "b"],
        [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}],
        [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}],
    ],
)
def test_parts_that_are_text_are_read_by_every_route(content: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": content}]
    apis = [
        read_chat_request({"messages": messages}, "r"),
        read_messages_request({"messages": messages, "max_tokens": 1}, "r"),
    ]
    if content == "a\nb" or "" not in [part.get("text") for part in content if isinstance(part, dict)]:
        apis.append(read_response_request({"input": messages}, "r"))
    assert [[message.content for message in api.message.chat.messages] for api in apis] == [["a\nb"]] * len(apis)


DOCUMENTS: list[dict[str, Any]] = [
    {"type": "document", "title": "t", "source": {"type": "text", "data": "a"}},
    {"type": "document", "title": "t", "source": {"type": "content", "content": "a"}},
    {"type": "document", "title": "t", "source": {"type": "content", "content": [{"type": "text", "text": "a"}]}},
    {"type": "document", "title": "t", "content": [{"type": "text", "text": "a"}]},
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_of_text_is_read(document: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": [document, {"type": "text", "text": "b"}]}]
    for api in (
        read_messages_request({"messages": messages, "max_tokens": 1}, "r"),
        read_chat_request({"messages": messages}, "r"),
    ):
        assert [message.content for message in api.message.chat.messages] == ["t\na\nb"]
        assert api.ignored == []


IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
PDF: dict[str, Any] = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}


@pytest.mark.parametrize(("part", "kind"), [(IMAGE, "an image"), (PDF, "a document")])
@pytest.mark.parametrize("reader", [read_messages_request, read_chat_request])
def test_a_picture_in_a_result_is_a_line_of_text_and_named(part: Any, kind: str, reader: Any) -> None:
    call = {"type": "tool_use", "id": "c", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [part, {"type": "text", "text": "b"}]}
    messages: list[Any] = [*MESSAGES, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    api = reader({"messages": messages, "max_tokens": 1}, "r")
    content = api.message.chat.messages[-1].content
    assert content == f"[This is {kind}, which cannot be shown here.]\nb"
    assert "messages[2].content[0].content[0]" in api.ignored
    with pytest.raises(HttpError):
        reader({"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}, "r")


def test_a_picture_in_a_result_of_openais_is_a_line_of_text_too() -> None:
    line = "[This is an image, which cannot be shown here.]"
    call: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    image: Any = {"type": "image_url", "image_url": {"url": "data:x"}}
    messages: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [image]},
    ]
    api = read_chat_request({"messages": messages}, "r")
    assert api.message.chat.messages[-1].content == line
    assert "messages[2].content[0]" in api.ignored
    output: list[Any] = [{"type": "input_image", "image_url": "data:x"}]
    api = read_response_request({"input": [{"type": "function_call_output", "call_id": "1", "output": output}]}, "r")
    assert api.message.chat.messages[-1].content == line
    assert "input[0].output[0]" in api.ignored


def test_reasoning_and_texts_keep_their_order() -> None:
    blocks: list[Any] = [
        {"type": "thinking", "thinking": "r1", "signature": ""},
        {"type": "text", "text": "t1"},
        {"type": "thinking", "thinking": "r2", "signature": ""},
        {"type": "text", "text": "t2"},
    ]
    items: list[Any] = [
        item
        for number in ("1", "2")
        for item in (
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": f"r{number}"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": f"t{number}"}]},
        )
    ]
    turns: list[Any] = [*MESSAGES, {"role": "assistant", "content": blocks}, *MESSAGES]
    separate: list[Any] = [{"role": "assistant", "content": blocks[:2]}, {"role": "assistant", "content": blocks[2:]}]
    apis = [
        read_messages_request({"messages": turns, "max_tokens": 1}, "r"),
        read_messages_request({"messages": [*MESSAGES, *separate, *MESSAGES], "max_tokens": 1}, "r"),
        read_chat_request({"messages": turns}, "r"),
        read_response_request({"input": [*MESSAGES, *items, *MESSAGES]}, "r"),
    ]
    for api in apis:
        found = [(message.reasoning, message.content) for message in api.message.chat.messages]
        assert found == [("", "hi"), ("r1", "t1"), ("r2", "t2"), ("", "hi")]

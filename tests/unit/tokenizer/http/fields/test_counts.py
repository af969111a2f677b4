"""Bodies with many of something are refused before they are read, by the field that has too many."""

from __future__ import annotations

from typing import Any

import pytest

from services.tokenizer.http.anthropic.request import read_count_request, read_messages_request
from services.tokenizer.http.fields.counts import MAX_OBJECTS
from services.tokenizer.http.openai.chat_request import read_chat_request
from services.tokenizer.http.openai.completion_request import read_completion_request
from services.tokenizer.http.openai_responses.request import read_response_request
from services.tokenizer.http.refusals import HttpError
from tests.support.tokenizer.http_client import MESSAGES

TEXT = {"type": "text", "text": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"function": {"name": "f", "arguments": "{}"}}
USER, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
# Neighbours of one role would be one message.
TURNS = [REPLY, USER]
WHOLE = f"at most {MAX_OBJECTS} messages, parts, calls and tools"


@pytest.mark.parametrize(
    ("read", "body", "param", "words"),
    [
        (read_chat_request, {"messages": MESSAGES * 1025}, "messages", "at most 1024 items"),
        (read_chat_request, {"messages": MESSAGES, "tools": [TOOL] * 129}, "tools", "at most 128 items"),
        (
            read_chat_request,
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]},
            "messages[0].tool_calls",
            "at most 128 items",
        ),
        (read_chat_request, {"messages": MESSAGES, "stop": ["a"] * 9}, "stop", "at most 8 items"),
        (read_chat_request, {"messages": [{"role": "user", "content": [TEXT] * MAX_OBJECTS}]}, "messages", WHOLE),
        (read_messages_request, {"messages": MESSAGES * (MAX_OBJECTS + 1), "max_tokens": 9}, "messages", WHOLE),
        (read_count_request, {"messages": MESSAGES, "system": [TEXT] * MAX_OBJECTS}, "system", WHOLE),
        (read_response_request, {"input": MESSAGES * (MAX_OBJECTS + 1)}, "input", WHOLE),
        (
            read_response_request,
            {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": [TOOL] * MAX_OBJECTS}]},
            "tools",
            WHOLE,
        ),
        (read_messages_request, {"messages": TURNS * 513, "max_tokens": 9}, "messages", "1 to 1024 messages"),
        (read_count_request, {"messages": [USER, *TURNS * 512]}, "messages", "1 to 1024 messages"),
        (read_response_request, {"input": TURNS * 513}, "input", "1 to 1024 messages"),
        (read_response_request, {"instructions": "x", "input": TURNS * 512}, "input", "1 to 1024 messages"),
        (read_completion_request, {"prompt": ["a"] * 65}, "prompt", "at most 64 prompts"),
        (read_completion_request, {"prompt": "a", "structured_outputs": {"choice": ["a"] * 1025}}, None, "1024 items"),
    ],
)
def test_too_many_are_refused_by_the_fields_name(
    read: Any, body: dict[str, Any], param: str | None, words: str
) -> None:
    with pytest.raises(HttpError, match=words) as refused:
        read(body, request_id="r")
    assert refused.value.status == 400
    assert refused.value.param == param or param is None


def test_as_many_as_are_allowed_are_read() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [TEXT] * (MAX_OBJECTS - 1)}]}
    assert read_chat_request(body, "r").message.chat.messages[0].content.count("a") == MAX_OBJECTS - 1


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_messages_request, {"messages": TURNS * 512, "max_tokens": 9}),
        (read_count_request, {"messages": TURNS * 512}),
        (read_response_request, {"input": TURNS * 512}),
        (read_response_request, {"instructions": "x", "input": [REPLY, *TURNS * 511]}),
    ],
)
def test_as_many_messages_as_a_chat_may_have_are_read(read: Any, body: dict[str, Any]) -> None:
    assert len(read(body, request_id="r").message.chat.messages) == 1024


@pytest.mark.parametrize(
    ("read", "body", "expected"),
    [
        (read_messages_request, {"messages": MESSAGES * 1000, "max_tokens": 9}, "\n".join(["hi"] * 1000)),
        (
            read_response_request,
            {"instructions": "x", "input": [{"role": "developer", "content": "y"}] * 1000},
            "\n\n".join(["x", *["y"] * 1000]),
        ),
    ],
)
def test_neighbours_are_one_message_that_holds_no_older_text(read: Any, body: dict[str, Any], expected: str) -> None:
    # A message of protobuf whose text is replaced keeps the old ones until it ends: the size of its arena is not told,
    # but a text that grew by a thousand joins would be as long as their sum there.
    [message] = read(body, request_id="r").message.chat.messages
    assert message.content == expected


def test_a_later_tool_takes_the_place_of_one_of_its_name() -> None:
    tools = [{"type": "function", "name": name, "description": "old"} for name in ("a", "b", "c")]
    later = [{"type": "function", "name": "b", "description": "new"}]
    body: dict[str, Any] = {"input": [{"type": "additional_tools", "tools": later}, *MESSAGES], "tools": tools}
    chat = read_response_request(body, "r").message.chat
    assert [(tool.name, tool.description) for tool in chat.tools] == [("a", "old"), ("c", "old"), ("b", "new")]

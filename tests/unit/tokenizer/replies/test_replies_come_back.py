"""What we answer, we accept: any reply is parsed, is accepted as history, and its template renders it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import check_chat
from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.deepseek_v32_template import DEEPSEEK_V32_TEMPLATE
from services.tokenizer.chat.generic_tools_template import with_generic_tools
from services.tokenizer.chat.template_features import find_features
from services.tokenizer.chat.template_rendering import render_template
from services.tokenizer.json.json_values import read_json_object
from services.tokenizer.replies import REPLY_PARSERS, ReasoningPart, TextPart
from tests.support.models.tiny_tokenizer import CHATML
from tests.support.tokenizer.call_templates import CALLS_AS_OBJECTS, CALLS_AS_TEXT, ONE_CALL, SHORT_IDS, SINGLE_CALLS
from tests.support.tokenizer.chat_templates import local_template
from tests.support.tokenizer.kimi_templates import KIMI_K25
from tests.support.tokenizer.replies import parse
from tests.support.tokenizer.reply_texts import HOSTILE_STRINGS, HOSTILE_VALUES, LOOK, call_text, reply_text

FAMILIES = tuple(sorted(name for name in REPLY_PARSERS if name != "none"))
# How the published templates of a family take calls.
TEMPLATES = {
    "deepseek_v3": CALLS_AS_TEXT,
    "deepseek_v32": DEEPSEEK_V32_TEMPLATE,
    "generic": with_generic_tools(CHATML, "system"),
    "harmony": ONE_CALL,
    "kimi_k2": KIMI_K25,
    "llama3_json": SINGLE_CALLS,
    "mistral": SHORT_IDS,
}
SPECIAL_TOKENS = {"bos_token": "<s>"}

HOSTILE_TEXTS = (
    "Hi",
    "\n",
    " ",
    "\x00",
    "\u2028",
    "\ufffd",
    "é😀",
    "{",
    "}",
    "[",
    "<",
    "</think>",
    "<think>",
    "{{ x }}",
)
TEXTS = st.lists(st.sampled_from(HOSTILE_TEXTS), max_size=4).map("".join)
STRINGS = st.lists(st.sampled_from(HOSTILE_STRINGS), min_size=1, max_size=3).map("".join)
CALLS = st.lists(st.tuples(STRINGS, st.sampled_from(HOSTILE_VALUES)), max_size=2)


@cache
def template_of(name: str) -> ChatTemplate:
    source = TEMPLATES.get(name, CALLS_AS_OBJECTS)
    features = find_features(lambda fields: render_template(source, SPECIAL_TOKENS, fields), None)
    return local_template(source, SPECIAL_TOKENS, features=features)


def check_reply(name: str, reasoning: str, text: str, calls: list[tuple[str, str]], size: int) -> None:
    """Parse a reply that arrives in pieces, and send it back."""
    reply = reply_text(name, reasoning, text, [call_text(name, *call) for call in calls])
    pieces = [reply[start : start + size] for start in range(0, len(reply), size)]
    parts = parse(name, pieces, tools=[LOOK])
    assert parts == parse(name, [reply], tools=[LOOK])
    message = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_ASSISTANT)
    messages: list[Any] = [{"role": tokenizer_pb2.ROLE_USER, "content": "hi"}, message]
    for part in parts:
        if isinstance(part, TextPart):
            message.content += part.text
        elif isinstance(part, ReasoningPart):
            message.reasoning += part.text
        else:
            read_json_object(part.arguments)
            call_id = f"call_{part.index}"
            message.tool_calls.add(id=call_id, name=part.name, arguments=part.arguments)
            messages.append({"role": tokenizer_pb2.ROLE_TOOL, "content": "x", "tool_call_id": call_id})
    conversation = check_chat(tokenizer_pb2.Chat(messages=messages))
    template = template_of(name)
    assert template.render(template.fields(conversation)).count('"n"') >= len(message.tool_calls)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=50)
@given(reasoning=TEXTS, text=TEXTS, calls=CALLS, size=st.integers(1, 40))
def test_any_reply_comes_back(name: str, reasoning: str, text: str, calls: list[tuple[str, str]], size: int) -> None:
    check_reply(name, reasoning, text, calls, size)


@pytest.mark.proof
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=1000)
@given(reasoning=TEXTS, text=TEXTS, calls=CALLS, size=st.integers(1, 40))
def test_many_more_come_back(name: str, reasoning: str, text: str, calls: list[tuple[str, str]], size: int) -> None:
    check_reply(name, reasoning, text, calls, size)

"""Feeds replies to their parsers in pieces, cut in every way, and joins the parsed parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from services.tokenizer.chat.conversation import Tool
from services.tokenizer.replies import ReasoningPart, ReplyPart, ReplySetting, TextPart, ToolCallPart, make_reply_parser
from services.tokenizer.replies.openings import opening_of

TEXT, NUMBER = {"type": "string"}, {"type": "number"}


def tool(name: str, **properties: Any) -> Tool:
    """A tool with arguments of the given schemas."""
    return Tool(name, "", {"type": "object", "properties": properties})


WEATHER = tool("get_weather", city=TEXT, unit=TEXT, days={"type": "integer"}, hourly={"type": "boolean"}, at={})
TOOLS = (WEATHER, tool("search", query=TEXT, limit=NUMBER), tool("get_time"))


def call_part(name: str, arguments: str, index: int = 0) -> ToolCallPart:
    """An expected whole tool call, without its id."""
    return ToolCallPart(index, "", name, arguments)


def joined(parts: Iterable[ReplyPart]) -> list[ReplyPart]:
    """Merge consecutive parts that belong together; call ids are checked and removed."""
    whole: list[ReplyPart] = []
    ids: set[str] = set()
    for part in parts:
        match (whole[-1] if whole else None), part:
            case TextPart(before), TextPart(text):
                whole[-1] = TextPart(before + text)
            case ReasoningPart(before), ReasoningPart(text):
                whole[-1] = ReasoningPart(before + text)
            case ToolCallPart(index, _, name, before), ToolCallPart(same, "", "", text) if index == same:
                whole[-1] = ToolCallPart(index, "", name, before + text)
            case _, ToolCallPart(index, call_id, name, arguments):
                assert re.fullmatch(f"call_[0-9a-f]{{24}}|functions.{re.escape(name)}:[0-9]+", call_id), "no id"
                assert call_id not in ids
                ids.add(call_id)
                whole.append(ToolCallPart(index, "", name, arguments))
            case _:
                whole.append(part)
    return whole


def parse(
    name: str,
    pieces: Sequence[str],
    *,
    tools: Sequence[Tool] = TOOLS,
    prompt_text: str = "",
    is_cut: bool = False,
    **setting: Any,
) -> list[ReplyPart]:
    """Parse a reply that arrives in these pieces; `setting` as in `ReplySetting`."""
    opening = opening_of(name, prompt_text)
    parser = make_reply_parser(name, ReplySetting(tuple(tools), opening, **setting))
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*parts, *parser.finish(is_cut=is_cut)])


def parse_every_way(name: str, text: str, **setting: Any) -> list[ReplyPart]:
    """Parse a reply, and check that the parts do not depend on where it is cut."""
    whole = parse(name, [text], **setting)
    assert parse(name, list(text), **setting) == whole
    for position in range(1, len(text)):
        assert parse(name, [text[:position], "", text[position:]], **setting) == whole
    for size in (2, 3, 5, 8, 13):
        starts = [*range(0, len(text), size), len(text)]
        assert parse(name, [text[start:end] for start, end in pairwise(starts)], **setting) == whole
    return whole

"""What a model writes that is nearly a call is one, in every family; and what only looks like one is text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.tokenizer.replies import (
    REPLY_PARSERS,
    ReplyPart,
    ReplySetting,
    TextPart,
    ToolCallPart,
    make_reply_parser,
)
from services.tokenizer.replies.parser import MAX_HELD_LENGTH
from tests.support.tokenizer.call_spellings import CITY, FAMILIES, calls, texts
from tests.support.tokenizer.replies import NUMBER, TEXT, parse, parse_every_way, tool

WEATHER = tool(
    "get_weather",
    city=TEXT,
    unit=TEXT,
    days={"type": "integer"},
    hourly={"type": ["boolean", "null"]},
    tags={"type": "array"},
    extra={"type": "object"},
    at={},
)
OFFERED = (WEATHER, tool("search", query=TEXT, limit=NUMBER), tool("get_time"))
CALLS = [pytest.param(name, *spelling[1:], id=f"{name}-{spelling[0]}") for name in FAMILIES for spelling in calls(name)]
SHOWN = [pytest.param(name, *spelling[1:], id=f"{name}-{spelling[0]}") for name in FAMILIES for spelling in texts(name)]


def made(parts: list[ReplyPart]) -> list[tuple[str, Any]]:
    """The calls of a reply that has nothing else."""
    assert all(isinstance(part, ToolCallPart) for part in parts), parts
    return [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCallPart)]


def test_every_parser_has_its_spellings() -> None:
    assert FAMILIES.keys() == REPLY_PARSERS.keys()
    assert all(list(calls(name)) for name in FAMILIES if name != "none")
    assert all(list(texts(name)) for name in FAMILIES)


@pytest.mark.parametrize(("name", "reply", "expected"), CALLS)
def test_nearly_json_makes_a_call(name: str, reply: str, expected: list[tuple[str, str]]) -> None:
    read = [(called, json.loads(arguments)) for called, arguments in expected]
    assert made(parse_every_way(name, reply, tools=OFFERED)) == read


@pytest.mark.parametrize(("name", "reply", "text"), SHOWN)
def test_what_only_shows_a_call_is_text(name: str, reply: str, text: str) -> None:
    assert parse_every_way(name, reply, tools=OFFERED) == [TextPart(text)]


@pytest.mark.parametrize(("name", "reply", "_"), CALLS)
def test_without_tools_it_is_text(name: str, reply: str, _: object) -> None:
    assert parse(name, list(reply), tools=()) == parse(name, [reply], tools=())
    assert not any(isinstance(part, ToolCallPart) for part in parse(name, [reply], tools=()))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "none"])
def test_a_call_that_was_cut_off_is_not_completed(name: str) -> None:
    family = FAMILIES[name]
    assert family is not None
    replies = [family.call("get_weather", CITY), family.call("get_time", "null")]
    replies += [family.pairs("get_weather", {"city": "Aix"})] if family.pairs else []
    for reply in replies:
        for end in range(1, len(reply)):
            parts = parse(name, [reply[:end]], tools=OFFERED, is_cut=True)
            assert parse(name, list(reply[:end]), tools=OFFERED, is_cut=True) == parts
            shown = "".join(part.text for part in parts if isinstance(part, TextPart))
            called = [part for part in parts if isinstance(part, ToolCallPart)]
            assert called or shown == reply[:end]
            # Only what the whole text before its end says completes it.
            is_whole = all(part.arguments.endswith("}") for part in called)
            assert not is_whole or parse(name, [reply], tools=OFFERED) == parts or not called


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "none"])
def test_a_parser_holds_no_more_than_it_says(name: str) -> None:
    family = FAMILIES[name]
    assert family is not None
    opening = family.call("get_weather", "\0").partition("\0")[0]
    quoted = []
    if family.pairs is not None:
        # After the value, what may be the call's end, and may be quoted.
        opening_of_value, _, end = family.pairs("get_weather", {"city": "\0"}).partition("\0")
        quoted = [(opening_of_value + end.replace(family.omitted[0], ""), filler) for filler in ("x", " ", "<")]
    for begin, filler in (
        *quoted,
        (opening + '{"city": "x",', " "),
        (opening, " "),
        (opening, "\n"),
        (opening[:12], " "),
        (opening[:12], '"x'),
        ("[", " "),
        ("```json\n", " "),
    ):
        parser = make_reply_parser(name, ReplySetting(OFFERED))
        length, passed_on = 0, 0
        for piece in (begin, *[filler * 512] * (2 * MAX_HELD_LENGTH // 512)):
            length += len(piece)
            for part in parser.feed(piece):
                passed_on += len(part.arguments if isinstance(part, ToolCallPart) else part.text)
        # Blanks after a comma mean nothing, and are not passed on.
        assert passed_on >= length - MAX_HELD_LENGTH - len(opening) - 2 * 512 or begin.endswith(","), (begin, filler)
        assert len(parser._reader.text) <= MAX_HELD_LENGTH + len(begin) + 2 * 512, (begin, filler)

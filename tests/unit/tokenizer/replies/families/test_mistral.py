"""Replies as Mistral's models write them, by their templates and the documentation of their tokenizers."""

from __future__ import annotations

import pytest

from services.tokenizer.replies import ReasoningPart, ReplyPart, TextPart
from tests.support.tokenizer.replies import call_part, parse_every_way

LISTED = '{"name": "get_time", "arguments": {}, "id": "VvvODy9mT"}'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("This is a test.", [TextPart("This is a test.")]),
        ("[THINK]Hm.[/THINK]So.", [ReasoningPart("Hm."), TextPart("So.")]),
        # Mistral Nemo, Mistral Large 2411.
        (
            f'[TOOL_CALLS] [{{"name": "search", "arguments": {{"query": "a"}}}}, {LISTED}]',
            [call_part("search", '{"query": "a"}'), call_part("get_time", "{}", 1)],
        ),
        (f"[TOOL_CALLS]{LISTED}", [call_part("get_time", "{}")]),
        # Later models.
        (
            'So:\n[TOOL_CALLS]search[ARGS]{"query": "]["}[TOOL_CALLS]get_time[ARGS]{}',
            [TextPart("So:"), call_part("search", '{"query": "]["}'), call_part("get_time", "{}", 1)],
        ),
        ("[TOOL_CALLS]get_time[CALL_ID]VvvODy9mT[ARGS]{}", [call_part("get_time", "{}")]),
        # Where special tokens were left out.
        ('[TOOL_CALLS]search{"query": "a"}', [call_part("search", '{"query": "a"}')]),
        (
            '[THINK]Hm.[/THINK][TOOL_CALLS]search[ARGS]{"query": "a"}',
            [ReasoningPart("Hm."), call_part("search", '{"query": "a"}')],
        ),
        # No call.
        ("[TOOL_CALLS]", [TextPart("[TOOL_CALLS]")]),
        ("[TOOL_CALLS][TOOL_CALLS]get_time[ARGS]{}", [TextPart("[TOOL_CALLS]"), call_part("get_time", "{}")]),
        ("[TOOL_CALLS]get_time[ARGS]x", [TextPart("[TOOL_CALLS]get_time[ARGS]x")]),
        # Cut off.
        ('[TOOL_CALLS]search[ARGS]{"query": "a', [call_part("search", '{"query": "a')]),
        ('[TOOL_CALLS][{"name": "search", "arguments": {"query": "a"}}', [call_part("search", '{"query": "a"}')]),
    ],
)
def test_a_reply_is_split_into_its_parts(text: str, parts: list[ReplyPart]) -> None:
    assert parse_every_way("mistral", text) == parts

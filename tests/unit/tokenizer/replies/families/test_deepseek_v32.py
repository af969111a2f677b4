"""Replies as DeepSeek-V3.2 writes them, by its published encoding."""

from __future__ import annotations

import pytest

from services.tokenizer.replies import ReasoningPart, ReplyPart, TextPart
from tests.support.tokenizer.replies import call_part, parse_every_way


def invoke(name: str, *parameters: str) -> str:
    lines = "\n".join(parameters)
    return f'<｜DSML｜invoke name="{name}">\n{lines}\n</｜DSML｜invoke>'


def parameter(name: str, value: str, *, is_string: bool = True) -> str:
    kind = "true" if is_string else "false"
    return f'<｜DSML｜parameter name="{name}" string="{kind}">{value}</｜DSML｜parameter>'


def calls(*invocations: str) -> str:
    return "\n".join(("<｜DSML｜function_calls>", *invocations, "</｜DSML｜function_calls>"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("This is a test.", [TextPart("This is a test.")]),
        (
            "<think>Hm.</think>So:\n\n"
            + calls(invoke("get_weather", parameter("city", "北\n京"), parameter("days", "3", is_string=False))),
            [ReasoningPart("Hm."), TextPart("So:"), call_part("get_weather", '{"city": "北\\n京", "days": 3}')],
        ),
        (
            calls(invoke("get_time"), invoke("search", parameter("query", '"2025"'))),
            [call_part("get_time", "{}"), call_part("search", '{"query": "\\"2025\\""}', 1)],
        ),
        # A string whatever the tool's schema says; otherwise the schema decides what JSON cannot be.
        (
            calls(invoke("get_weather", parameter("days", "3"), parameter("city", "5", is_string=False))),
            [call_part("get_weather", '{"days": "3", "city": "5"}')],
        ),
        # No call, or something after its arguments.
        (calls(), [TextPart(calls())]),
        ("<｜DSML｜function_calls> x", [TextPart("<｜DSML｜function_calls> x")]),
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_time">x',
            [TextPart('<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_time">x')],
        ),
    ],
)
def test_a_reply_is_split_into_its_parts(text: str, parts: list[ReplyPart]) -> None:
    assert parse_every_way("deepseek_v32", text) == parts


def test_a_call_that_is_cut_off_has_the_arguments_that_have_arrived() -> None:
    text = calls(invoke("search", parameter("query", "ab"))).partition("</｜DSML｜p")[0]
    assert parse_every_way("deepseek_v32", text, is_cut=True) == [call_part("search", '{"query": "ab')]

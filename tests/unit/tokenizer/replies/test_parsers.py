"""Properties of the parsers of all families."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.config import TokenizerSettings
from services.tokenizer.replies import (
    REPLY_PARSERS,
    ReasoningPart,
    ReplySetting,
    TextPart,
    ToolCallPart,
    choose_reply_parser,
    make_reply_parser,
)
from tests.support.tokenizer.replies import TOOLS, parse

NAMES = sorted(REPLY_PARSERS)

# Fragments of valid and invalid replies that fit together often enough.
FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "get_weather",
    "city",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "function",
    "```json",
    "```",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions.",
    "get_weather:0",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|python_tag|>",
    "<|start|>assistant",
    "<|channel|>",
    "analysis",
    "commentary",
    "final",
    " to=functions.get_weather",
    "<|constrain|>json",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    '{"name": "get_weather", ',
    '"arguments": ',
    '"parameters": ',
    '{"city": "Aix',
    '"}',
    "}",
    "{",
    "}; ",
    "[1, 2.5e",
    "]",
    "\\u00e9",
    "\\",
    '"',
    "true",
    "nul",
    ",",
    ":",
    "\n",
    " ",
    "text",
    "é",
]
REPLIES = st.lists(st.sampled_from(FRAGMENTS) | st.text('<|｜>{}[]"\\ tan1-e\n', max_size=4), max_size=14).map("".join)


def cut(text: str, positions: list[int]) -> list[str]:
    ends = sorted({position % (len(text) + 1) for position in positions})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("name", NAMES)
@given(text=REPLIES, positions=st.lists(st.integers(0, 200), max_size=12))
def test_the_parts_do_not_depend_on_the_cuts(name: str, text: str, positions: list[int]) -> None:
    assert parse(name, cut(text, positions)) == parse(name, [text]) == parse(name, list(text))


@pytest.mark.parametrize("name", NAMES)
@given(text=REPLIES)
def test_text_without_calls_is_returned_to_the_last_character(name: str, text: str) -> None:
    # Reasoning is at the beginning; harmony's messages lose their headers.
    text = "x" + text.replace("<|message|>", "")
    parts = parse(name, list(text))
    if not any(isinstance(part, ToolCallPart) for part in parts):
        assert parts == [TextPart(text)]


@pytest.mark.parametrize("name", NAMES)
@given(text=REPLIES)
def test_arguments_are_json_or_a_prefix_of_it(name: str, text: str) -> None:
    for part in parse(name, list(text)):
        if isinstance(part, ToolCallPart) and part.arguments:
            assert part.arguments.startswith("{")
            assert _is_json_beginning(part.arguments)


def _is_json_beginning(text: str) -> bool:
    """Whether a text is a prefix of JSON: closing what it left open makes it valid, or it was cut within a word."""
    try:
        json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        # The decoder reports an open string at its beginning.
        return error.pos >= len(text) - 6 or error.msg.startswith(("Unterminated string", "Invalid \\escape"))
    return True


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text("abc <{|｜\n", max_size=30))
def test_text_without_markup_is_text(name: str, text: str) -> None:
    assert parse(name, list(text)) == ([TextPart(text)] if text else [])


@pytest.mark.parametrize("name", NAMES)
@given(text=REPLIES)
def test_without_tools_there_are_no_calls(name: str, text: str) -> None:
    assert not any(isinstance(part, ToolCallPart) for part in parse(name, list(text), tools=()))


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_is_sent_at_once(name: str) -> None:
    parser = make_reply_parser(name, ReplySetting(TOOLS))
    assert parser.feed("Hello") == [TextPart("Hello")]
    assert parser.feed(" there") == [TextPart(" there")]
    assert parser.feed("") == parser.finish() == []


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_reply_has_no_parts(name: str) -> None:
    assert make_reply_parser(name, ReplySetting(TOOLS)).finish() == []


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        (
            "hermes",
            ['<tool_call>\n{"name": "get_weather", "arg', 'uments": {"ci', 'ty": "A', 'ix"', ", ", '"days": 1', "2}"],
        ),
        ("llama3_json", ['{"name": "get_weather", "para', 'meters": {"ci', 'ty": "A', 'ix"', ", ", '"days": 1', "2}"]),
        (
            "deepseek_v3",
            [
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n",
                '{"ci',
                'ty": "A',
                'ix"',
                ", ",
                '"days": 1',
                "2}",
            ],
        ),
        (
            "kimi_k2",
            [
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>",
                '{"ci',
                'ty": "A',
                'ix"',
                ", ",
                '"days": 1',
                "2}",
            ],
        ),
        (
            "harmony",
            [
                "<|channel|>commentary to=functions.get_weather<|message|>",
                '{"ci',
                'ty": "A',
                'ix"',
                ", ",
                '"days": 1',
                "2}",
            ],
        ),
    ],
)
def test_arguments_are_sent_as_they_arrive(name: str, pieces: list[str]) -> None:
    parser = make_reply_parser(name, ReplySetting(TOOLS))
    assert parser.feed(pieces[0]) == []
    streamed = [part.arguments for piece in pieces[1:] for part in parser.feed(piece) if isinstance(part, ToolCallPart)]
    # A comma waits for what follows it, which may be the end, and a number for its own end.
    assert streamed == ['{"ci', 'ty": "A', 'ix"', ', "days": ', "12}"]


def test_a_call_begins_with_its_name_and_id() -> None:
    parser = make_reply_parser("hermes", ReplySetting(TOOLS))
    (first,) = parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city"')
    (second,) = parser.feed(': "Aix"')
    assert isinstance(first, ToolCallPart)
    assert isinstance(second, ToolCallPart)
    assert (first.index, first.name, first.arguments) == (0, "get_weather", '{"city"')
    assert first.id.startswith("call_")
    assert second == ToolCallPart(0, "", "", ': "Aix"')


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_needed_only_if_the_markup_consists_of_them(name: str) -> None:
    markup = REPLY_PARSERS[name].markup
    assert not make_reply_parser(name, ReplySetting(special_tokens=frozenset({"<|eot|>"}))).needs_special_tokens
    assert make_reply_parser(name, ReplySetting(special_tokens=markup | {"<|eot|>"})).needs_special_tokens == bool(
        markup
    )


@pytest.mark.parametrize("name", [name for name in NAMES if REPLY_PARSERS[name].markup])
@given(st.lists(st.sampled_from(["<|eot|>", "<|e", "ot|>", "a", "<|", "|>"]), max_size=8))
def test_special_tokens_without_meaning_are_dropped_from_text(name: str, fragments: list[str]) -> None:
    special_tokens = REPLY_PARSERS[name].markup | {"<|eot|>"}
    text = "".join(fragments)
    parts = parse(name, list(text), special_tokens=special_tokens)
    assert parts == parse(name, [text], special_tokens=special_tokens)
    assert "".join(part.text for part in parts if isinstance(part, TextPart)) == text.replace("<|eot|>", "")


def test_special_tokens_that_the_client_requested_are_kept() -> None:
    assert parse("harmony", ["<|channel|>final<|message|>a<|eot|>b<|return|>"]) == [TextPart("a<|eot|>b")]


@pytest.mark.parametrize("name", NAMES)
def test_a_long_reply_costs_no_more_per_character(name: str) -> None:
    """Held text is not searched again with every piece."""
    opening = {
        "hermes": '<tool_call>{"arguments": {"city": "',
        "generic": '{"arguments": {"city": "',
        "glm4": "<tool_call>get_weather<arg_key>days</arg_key><arg_value>",
    }.get(name, "")

    def seconds(num_pieces: int) -> float:
        parser = make_reply_parser(name, ReplySetting(TOOLS))
        parser.feed(opening)
        began = time.process_time()
        for _ in range(num_pieces):
            parser.feed("word <")
        return time.process_time() - began

    seconds(100)
    assert seconds(20_000) < 100 * max(seconds(1000), 1e-3)


QWEN3 = "{% if '</think>' in content %}{% endif %}<tool_call>{{ tool_call.name }}</tool_call>"


@pytest.mark.parametrize(
    ("architecture", "template", "name"),
    [
        ("Qwen3ForCausalLM", QWEN3, "hermes"),
        ("LlamaForCausalLM", QWEN3, "hermes"),
        ("LlamaForCausalLM", "{{ '<|python_tag|>' }}", "llama3_json"),
        ("LlamaForCausalLM", "<|im_start|>{{ content }}<|im_end|>", "none"),
        ("Qwen2ForCausalLM", "<｜tool▁calls▁begin｜> <think>", "deepseek_v3"),
        ("DeepseekV3ForCausalLM", "{{ content }}", "deepseek_v3"),
        ("GptOssForCausalLM", "<|channel|>", "harmony"),
        ("DeepseekV3ForCausalLM", "<think></think><|tool_calls_section_begin|><|im_middle|>", "kimi_k2"),
        ("DeepseekV3ForCausalLM", "<|im_user|>user<|im_middle|>{{ content }}<|im_end|>", "kimi_k2"),
        ("KimiK25ForConditionalGeneration", "{{ content }}", "kimi_k2"),
        ("Glm4MoeForCausalLM", "<tool_call>{{ name }}<arg_key>", "glm4"),
        ("Qwen3MoeForCausalLM", "<tool_call>\n<function={{ name }}>", "qwen3_coder"),
        ("LlamaForCausalLM", '<|start_header_id|>{"name": function name, "parameters": {} }', "llama3_json"),
        ("LlamaForCausalLM", "<|start_header_id|>{{ content }}", "none"),
        ("MistralForCausalLM", "[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("MistralForCausalLM", "[THINK]{{ content }}[/THINK]", "mistral"),
        ("MistralForCausalLM", "[INST]{{ content }}[/INST]", "none"),
        ("DeepseekV32ForCausalLM", "<think><｜DSML｜function_calls>", "deepseek_v32"),
        ("Qwen3ForCausalLM", "<think>", "hermes"),
        ("Qwen3ForCausalLM", "{{ content }}", "hermes"),
        ("Qwen3ForCausalLM", None, "none"),
        ("", "{{ content }}", "none"),
    ],
)
def test_the_parser_is_chosen_by_what_the_template_writes(architecture: str, template: str | None, name: str) -> None:
    assert choose_reply_parser(architecture, template) == name


def test_each_parser_can_be_configured() -> None:
    field = TokenizerSettings.model_fields["reply_parser"]
    assert set(get_args(field.annotation)) == {"auto", *REPLY_PARSERS}
    assert TokenizerSettings(model_dir=Path("x")).reply_parser == "auto"


def test_reasoning_that_never_ends_is_reasoning() -> None:
    assert parse("hermes", list("<think>\nHm, <tool_call>{")) == [ReasoningPart("Hm, <tool_call>{")]

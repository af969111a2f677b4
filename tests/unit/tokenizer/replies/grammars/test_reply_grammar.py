"""Grammars of forced calls: every text that they allow must be read as calls by the family's own parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from services.tokenizer.chat.conversation import Tool
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.replies.grammars.call_grammars import GrammarRequest
from services.tokenizer.replies.grammars.lark import search_pattern
from services.tokenizer.replies.grammars.reply_grammar import reply_grammar
from services.tokenizer.replies.openings import THINK_MARKUP, opening_of
from shared.errors import InvalidRequestError
from tests.support.tokenizer.call_walks import FAMILIES, calls_in, token_ids, walk
from tests.support.tokenizer.replies import parse, tool

V3_TEMPLATE, V31_TEMPLATE = "```json", ""

DIGIT: JsonObject = {"type": "integer", "minimum": 0, "maximum": 9}
PLAN = tool(
    "plan.trip-2",
    city={"type": "string", "minLength": 1, "maxLength": 5},
    days=DIGIT,
    unit={"enum": ["c", "f<"]},
    code={"type": "string", "pattern": "^a/[0-9]{2}$"},
    stops={"type": "array", "items": {"$ref": "#/$defs/stop"}, "maxItems": 2},
)
PLAN.parameters["required"] = ["city", "code"]
PLAN.parameters["$defs"] = {"stop": {"type": "boolean"}}
TOOLS = (PLAN, tool("now"))


def request(
    tools: tuple[Tool, ...] = TOOLS,
    *,
    one_call: bool = False,
    prompt: str = "",
    template: str = V31_TEMPLATE,
    has_markup: bool = True,
    **form: bool,
) -> Callable[[str], GrammarRequest]:
    """What a family's grammar depends on."""
    ids = token_ids(has_markup=has_markup)

    def make(name: str) -> GrammarRequest:
        opening = opening_of(name, prompt, template_text=template, token_texts=ids)
        return GrammarRequest(tools, one_call, opening, template, ids, **form)

    return make


def tool_call_grammar(name: str, make: Callable[[str], GrammarRequest]) -> str:
    """The grammar of a family's calls."""
    return reply_grammar(name, make(name)).source


def fits(arguments: dict[str, Any]) -> bool:
    """Whether these are valid arguments of `PLAN`."""
    known: dict[str, Callable[[Any], bool]] = {
        "city": lambda value: isinstance(value, str) and 1 <= len(value) <= 5,
        "days": lambda value: isinstance(value, int) and 0 <= value <= 9,
        "unit": lambda value: value in ("c", "f<"),
        "code": lambda value: re.fullmatch("a/[0-9]{2}", value) is not None,
        "stops": lambda value: len(value) <= 2 and all(isinstance(stop, bool) for stop in value),
    }
    return {"city", "code"} <= arguments.keys() <= known.keys() and all(
        known[name](value) for name, value in arguments.items()
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("name", "has_markup", "template"),
    [
        *((name, True, V31_TEMPLATE) for name in FAMILIES),
        ("deepseek_v3", True, V3_TEMPLATE),
        # The markup of gpt-oss always consists of tokens.
        *((name, False, V31_TEMPLATE) for name in FAMILIES if name != "harmony"),
    ],
)
def test_texts_of_the_grammar_are_calls_that_fit_their_schemas(
    name: str, has_markup: bool, template: str, seed: int
) -> None:
    grammar = tool_call_grammar(name, request(template=template, has_markup=has_markup))
    calls = calls_in(parse(name, [walk(grammar, seed, has_markup=has_markup)], tools=TOOLS))
    assert calls
    for call in calls:
        arguments = json.loads(call.arguments)
        assert fits(arguments) if call.name == PLAN.name else (call.name, arguments) == ("now", {})


@pytest.mark.parametrize("name", FAMILIES)
def test_one_call_is_exactly_one_call_of_that_tool(name: str) -> None:
    grammar = tool_call_grammar(name, request(TOOLS[1:], one_call=True))
    for seed in range(5):
        (call,) = calls_in(parse(name, [walk(grammar, seed)], tools=TOOLS))
        assert (call.name, call.arguments) == ("now", "{}")


def test_a_forced_generic_call_is_one() -> None:
    grammar = tool_call_grammar("generic", request(one_call=False))
    for seed in range(20):
        assert len(calls_in(parse("generic", [walk(grammar, seed)], tools=TOOLS, has_grammar=True))) == 1


@pytest.mark.parametrize("has_markup", [True, False])
@pytest.mark.parametrize("name", ["hermes", "generic", "deepseek_v3", "kimi_k2", "glm4"])
def test_reasoning_that_the_prompt_opened_comes_before_the_calls(name: str, has_markup: bool) -> None:
    prompt = "assistant\n<think>\n"
    grammar = tool_call_grammar(name, request(prompt=prompt, has_markup=has_markup))
    text = walk(grammar, 1, has_markup=has_markup, begin="Hm. {}\n</think>")
    assert text.startswith("Hm. {}\n</think>" + THINK_MARKUP[name].separator)
    assert calls_in(parse(name, [text], tools=TOOLS, prompt_text=prompt))


def test_a_reasoning_model_may_think_unless_the_prompt_closed_the_reasoning() -> None:
    free = request(template="<think>")
    closed = request(template="<think>", prompt="<think>\n\n</think>\n\n")
    assert "<think>" in tool_call_grammar("hermes", free)
    assert "<think>" not in tool_call_grammar("hermes", closed)


def test_gpt_oss_may_think_first() -> None:
    texts = [walk(tool_call_grammar("harmony", request()), seed) for seed in range(8)]
    channels = {re.match(r"<\|channel\|>(\w+)", text) and text[len("<|channel|>") :][:8] for text in texts}
    assert channels == {"analysis", "commenta"}
    assert all(calls_in(parse("harmony", [text], tools=TOOLS)) for text in texts)


def test_a_model_without_a_call_format_cannot_be_forced() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tool_call_grammar("none", request())
    assert [violation.field for violation in caught.value.violations] == ["chat.tool_mode"]


@pytest.mark.parametrize("has_markup", [True, False])
@pytest.mark.parametrize("between", ["", "\n"])
def test_glm_writes_calls_on_one_line_or_on_many(between: str, has_markup: bool) -> None:
    pairs = (f"<arg_key>{key}</arg_key>{between}<arg_value>" for key in ("city", "code"))
    begin = f"<tool_call>plan.trip-2{between}{f'Rome</arg_value>{between}'.join(pairs)}a/"
    text = walk(tool_call_grammar("glm4", request(has_markup=has_markup)), 1, has_markup=has_markup, begin=begin)
    first, *_ = calls_in(parse("glm4", [text], tools=TOOLS))
    assert fits(json.loads(first.arguments))
    assert json.loads(first.arguments)["city"] == "Rome"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array"},
        {"properties": {"a": {"not": {"type": "string"}}}},
        {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"allOf": [{"properties": {"a": {"uniqueItems": True}}}]},
    ],
)
def test_schemas_that_no_grammar_holds_are_refused(name: str, schema: JsonObject) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tool_call_grammar(name, request((Tool("t", "", schema),)))
    assert [violation.field for violation in caught.value.violations] == ["chat.tools"]


@pytest.mark.parametrize("name", ["glm4", "qwen3_coder", "deepseek_v32"])
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a"},
        {"$ref": "#"},
        {"properties": {"a": False}, "required": ["a"]},
        {"oneOf": [{"required": ["a"]}, {"required": ["a"], "properties": {"b": {}}}]},
        {"minProperties": 1, "properties": {"a": {}}},
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(3)]},
    ],
)
def test_roots_that_no_list_of_arguments_holds_are_refused(name: str, schema: JsonObject) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tool_call_grammar(name, request((Tool("t", "", schema),)))
    assert [violation.field for violation in caught.value.violations] == ["chat.tools"]


@pytest.mark.parametrize("name", FAMILIES)
def test_options_for_the_library_are_refused(name: str) -> None:
    schema = tool("t", a={"type": "object", "x-guidance": {"lenient": True}})
    with pytest.raises(InvalidRequestError) as caught:
        tool_call_grammar(name, request((schema,)))
    assert [violation.reason for violation in caught.value.violations] == ["GRAMMAR_INVALID"]


def test_additional_arguments_are_allowed_only_if_the_schema_says_so() -> None:
    closed, opened = tool("t", a=DIGIT), Tool("t", "", {"type": "object", "additionalProperties": DIGIT})
    assert '"additionalProperties": false' in tool_call_grammar("hermes", request((closed,)))
    assert '"additionalProperties": false' not in tool_call_grammar("hermes", request((opened,)))


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("b", ["b", "abc", "a\nb"], ["", "a"]),
        ("^b", ["b", "bc"], ["ab"]),
        ("b$", ["b", "ab"], ["bc"]),
        ("^b$", ["b"], ["ab", "bc"]),
        ("^a|b$", ["a", "b"], ["c"]),
        (r"b\$", ["b$c", "ab$"], ["b"]),
    ],
)
def test_a_schemas_pattern_may_match_anywhere(pattern: str, matches: list[str], others: list[str]) -> None:
    whole = re.compile(search_pattern(pattern))
    assert all(whole.fullmatch(text) for text in matches)
    assert not any(whole.fullmatch(text) for text in others)

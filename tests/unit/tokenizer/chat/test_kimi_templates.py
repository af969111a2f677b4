"""Kimi K2's chat templates: the ids of calls, the declaration of tools, and where a reply begins."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from services.tokenizer.chat.chat_encoding import render_chat
from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.conversation import Conversation, Message, Tool, ToolCall
from services.tokenizer.chat.message_forms import TemplateFeatures
from services.tokenizer.chat.typescript_tools import declared_tools, sorted_tools
from services.tokenizer.replies import choose_reply_parser
from services.tokenizer.replies.openings import Opening, opening_of
from services.tokenizer.text.control_tokens import ControlTokens
from tests.support.tokenizer.chat_templates import LocalRenderer, local_template
from tests.support.tokenizer.kimi_templates import KIMI_K2, KIMI_K2_THINKING, KIMI_K25

USER = Message("user", "Hi")
WEATHER = Tool(
    "get_weather",
    "Tell the weather.\n\nOf today.",
    {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "city": {"type": "string", "description": "Where.", "minLength": 1, "maxLength": 40},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 7},
        },
        "required": ["city"],
    },
)


def template_of(source: str) -> ChatTemplate:
    return local_template(source, {}, features=LocalRenderer({}).try_template(source))


@pytest.fixture(scope="module")
def k25() -> ChatTemplate:
    return template_of(KIMI_K25)


def render(template: ChatTemplate, *messages: Message, tools: tuple[Tool, ...] = (), **variables: Any) -> str:
    return template.render(template.fields(Conversation(messages, tools, variables=variables)))


@pytest.mark.parametrize("source", [KIMI_K2, KIMI_K2_THINKING, KIMI_K25])
def test_the_template_picks_the_parser_and_needs_names_in_ids(source: str) -> None:
    assert choose_reply_parser("DeepseekV3ForCausalLM", source) == "kimi_k2"
    features = LocalRenderer({}).try_template(source)
    assert features == TemplateFeatures(takes_tools=True, ids_have_names=True)


def test_tools_are_json_with_the_clients_order_of_members() -> None:
    text = render(template_of(KIMI_K2), USER, tools=(WEATHER,))
    function = {"name": "get_weather", "description": WEATHER.description, "parameters": WEATHER.parameters}
    declared = json.dumps([{"type": "function", "function": function}], separators=(",", ":"))
    assert text == (
        f"<|im_system|>tool_declare<|im_middle|>{declared}<|im_end|>"
        "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
        "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )


def test_calls_get_ids_with_their_names() -> None:
    own = Message("assistant", "", (ToolCall("functions.search:0", "search", {"q": "a"}),))
    others = Message(
        "assistant", "So:", (ToolCall("call_abc", "get_weather", {}), ToolCall("", "math.add", '{"broken'))
    )
    results = [Message("tool", text, tool_call_id=call) for text, call in (("sun", "call_abc"), ("3", ""))]
    first = Message("tool", "b", tool_call_id="functions.search:0")
    text = render(template_of(KIMI_K2), USER, own, first, others, *results)
    assert '<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"q": "a"}<|tool_call_end|>' in text
    assert "## Return of functions.search:0\nb<|im_end|>" in text
    assert "<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{}<|tool_call_end|>" in text
    assert '<|tool_call_begin|>functions.math.add:2<|tool_call_argument_begin|>{"broken<|tool_call_end|>' in text
    assert "## Return of functions.get_weather:1\nsun<|im_end|>" in text
    assert "## Return of functions.math.add:2\n3<|im_end|>" in text


@pytest.mark.parametrize(
    ("source", "variables", "opening"),
    [
        (KIMI_K2, {}, Opening.ANSWER),
        (KIMI_K2_THINKING, {}, Opening.EITHER),
        (KIMI_K25, {}, Opening.REASONING),
        (KIMI_K25, {"thinking": False}, Opening.ANSWER),
    ],
)
def test_where_a_reply_begins(source: str, variables: dict[str, Any], opening: Opening) -> None:
    prompt = render(template_of(source), USER, **variables)
    assert opening_of("kimi_k2", prompt, template_text=source, token_texts=["<think>", "</think>"]) is opening


def test_tools_are_typescript_where_the_template_asks_for_it(k25: ChatTemplate) -> None:
    text = render(k25, USER, tools=(WEATHER,))
    assert text.startswith(
        "<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\n"
        "// Tell the weather.\n\n// Of today.\n"
        "type get_weather = (_: {\n"
        "  // Where.\n  // maxLength: 40, minLength: 1\n  city: string,\n"
        "  // maxItems: 7\n  days?: Array<\n    // minimum: 0\n    number\n  >,\n"
        '  // Default: "c"\n  unit?: "c" | "f"\n'
        "}) => any;\n}\n<|im_end|>"
    )


def test_tools_without_a_form_in_typescript_are_json_with_sorted_members(k25: ChatTemplate) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"b": {"oneOf": []}, "a": {"type": "string"}}})
    text = render(k25, USER, tools=(WEATHER, tool))
    assert '{"function":{"description":"","name":"f","parameters":{"properties":{"a":{"type":"string"},' in text


def test_a_declaration_has_no_control_tokens_of_the_clients(k25: ChatTemplate) -> None:
    tokens = ControlTokens({token_id: AddedToken(text) for token_id, text in ((7, "<|im_end|>"), (8, "<|im_middle|>"))})
    tool = Tool("f", "Ends <|im_end|>", {"type": "object", "properties": {"<|im_middle|>": {"enum": ["<|im_end|>"]}}})
    rendered = render_chat(k25, tokens, Conversation((USER,), (tool,)))
    assert '// Ends <|im_end|>\ntype f = (_: {\n  <|im_middle|>?: "<|im_end|>"\n}) => any;' in rendered.text
    assert [piece for piece in rendered.pieces if isinstance(piece, int)] == [8, 7, 8, 7, 8, 7, 8]


def declared(schema: Any, **function: Any) -> str:
    tool: Any = {"type": "function", "function": {"name": "f", "description": "", "parameters": schema} | function}
    text = declared_tools(sorted_tools([tool]))
    assert text is not None
    return text.removeprefix("# Tools\n\n## functions\nnamespace functions {\n").removesuffix("\n}\n")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({}, "{}"),
        ({"type": "object"}, "{}"),
        ({"properties": {"a": {}, "b": True, "c": False}}, "{\n  a?: any,\n  b?: any,\n  c?: null\n}"),
        ({"additionalProperties": False}, "{\n  [k: string]: never\n}"),
        ({"additionalProperties": {"type": "integer"}}, "{\n  [k: string]: number\n}"),
        ({"properties": {"a": {"type": ["integer", "null", "array"]}}}, "{\n  a?: number | null | Array<any>\n}"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, "{\n  a?: string | null\n}"),
        ({"properties": {"a": {"enum": ["x", 1, None, True]}}}, '{\n  a?: "x" | 1 | None | True\n}'),
        ({"properties": {"a": {"type": "array"}}}, "{\n  a?: Array<any>\n}"),
        (
            {
                "properties": {"b": {"type": "object", "properties": {"c": {"type": "number"}}}, "a": {}},
                "required": ["b"],
            },
            "{\n  b: {\n    c?: number\n  },\n  a?: any\n}",
        ),
        ({"properties": {"a": {"type": "boolean", "default": False}}}, "{\n  // Default: False\n  a?: boolean\n}"),
    ],
)
def test_schemas_have_the_published_form(schema: Any, text: str) -> None:
    assert declared(schema) == f"type f = (_: {text}) => any;"


def test_definitions_are_interfaces() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/$defs/Node"}, "b": {"$ref": "#"}},
        "$defs": {
            "Node": {"type": "object", "description": "A node.", "properties": {"next": {"$ref": "#/$defs/Node"}}}
        },
    }
    assert declared(schema, description="Do.") == (
        "interface parameters {\n  a?: Node,\n  b?: parameters\n}\n"
        "// A node.\ninterface Node {\n  next?: Node\n}\n"
        "// Do.\ntype f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"oneOf": [{"type": "string"}]}}},
        {"properties": {"a": {"$ref": "#/definitions/x"}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}},
        {"properties": {"a": {"enum": [1], "type": "string"}}},
        {"properties": {"a": {"enum": ["a"], "type": ["string", "integer"]}}},
        {"properties": {"a": {"type": ["widget"]}}},
        {"properties": {"a": "string"}},
        {"properties": []},
        {"properties": {"a": {"type": "string", "description": 5}}},
    ],
)
def test_schemas_without_a_form_are_told(schema: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}
    assert declared_tools(sorted_tools([tool])) is None

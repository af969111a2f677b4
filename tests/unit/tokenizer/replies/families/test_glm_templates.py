"""GLM-4.7's and GLM-5's templates select the parser of GLM-4.5, which reads what they teach the models to write."""

from __future__ import annotations

import pytest

from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.conversation import Conversation, Message, Tool, ToolCall
from services.tokenizer.chat.template_features import find_features
from services.tokenizer.chat.template_rendering import render_template
from services.tokenizer.json.json_values import JsonObject, read_json_object
from services.tokenizer.replies import ReasoningPart, TextPart, ToolCallPart, choose_reply_parser
from services.tokenizer.replies.openings import Opening, opening_of, reasons
from tests.support.tokenizer.chat_templates import local_template
from tests.support.tokenizer.glm_templates import GLM_47, GLM_52
from tests.support.tokenizer.replies import parse, parse_every_way

TEMPLATES = {"glm-4.7": GLM_47, "glm-5.2": GLM_52}
ARCHITECTURES = (
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "Glm4vMoeForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
)
TOOL = Tool(
    "book",
    "Book a table.",
    {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "seats": {"type": "integer"},
            "dishes": {"type": "array", "items": {"type": "string"}},
            "note": {"type": ["string", "null"]},
        },
    },
)
USER = Message("user", "A table, please.")
ARGUMENTS: JsonObject = {"place": "Chez 北\n<b>", "seats": 3, "dishes": ["a", 'b"'], "note": None}
THOUGHTS, TEXT = "Three seats.", "I book it."


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    source = TEMPLATES[request.param]
    features = find_features(lambda fields: render_template(source, {}, fields), None)
    return local_template(source, {}, features=features)


def rendered(template: ChatTemplate, *messages: Message, **variables: bool) -> str:
    return template.render(template.fields(Conversation(messages, (TOOL,), variables=dict(variables))))


def written(template: ChatTemplate, *calls: ToolCall) -> str:
    """What the template writes of a turn of the assistant, without what it opens the turn with."""
    before = rendered(template, USER)
    results = [Message("tool", "done", tool_call_id=call.id, name=call.name) for call in calls]
    text = rendered(template, USER, Message("assistant", TEXT, calls, reasoning=THOUGHTS), *results)
    assert text.startswith(before)
    return text.removeprefix(before).partition("<|observation|>")[0]


def calls_of(parts: list[object]) -> list[tuple[str, JsonObject]]:
    return [(part.name, read_json_object(part.arguments)) for part in parts if isinstance(part, ToolCallPart)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_template_selects_the_parser(template: ChatTemplate, architecture: str) -> None:
    assert template.takes_tools
    assert choose_reply_parser(architecture, template.text) == "glm4"
    # As does the architecture, where a template of somebody's own writes no calls.
    assert choose_reply_parser(architecture, "{{ messages[0].content }}") == "glm4"


def test_the_prompt_says_whether_the_reply_begins_with_reasoning(template: ChatTemplate) -> None:
    vocabulary = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert reasons("glm4", template.text, vocabulary)
    for variables, opening in (
        ({}, Opening.REASONING),
        ({"enable_thinking": True}, Opening.REASONING),
        ({"enable_thinking": False}, Opening.ANSWER),
    ):
        prompt = rendered(template, USER, **variables)
        assert opening_of("glm4", prompt, template_text=template.text, token_texts=vocabulary) is opening


@pytest.mark.parametrize("between", ["", "\n", " ", "\n    "])
def test_a_turn_as_the_template_writes_it_is_read_back(template: ChatTemplate, between: str) -> None:
    calls = (ToolCall("call_0", "book", ARGUMENTS), ToolCall("call_1", "book", {}))
    text = written(template, *calls)
    assert text == (
        f"{THOUGHTS}</think>{TEXT}<tool_call>book<arg_key>place</arg_key><arg_value>Chez 北\n<b></arg_value>"
        "<arg_key>seats</arg_key><arg_value>3</arg_value>"
        '<arg_key>dishes</arg_key><arg_value>["a", "b\\""]</arg_value>'
        "<arg_key>note</arg_key><arg_value>null</arg_value></tool_call><tool_call>book</tool_call>"
    )
    # As GLM-4.5 writes calls, and other models.
    for markup in ("<arg_key>", "<arg_value>", "</tool_call>"):
        text = text.replace(markup, between + markup)
    prompt = rendered(template, USER)
    parts = parse("glm4", list(text), tools=[TOOL], prompt_text=prompt)
    assert parts == parse("glm4", [text], tools=[TOOL], prompt_text=prompt)
    assert parts[:2] == [ReasoningPart(THOUGHTS), TextPart(TEXT)]
    assert calls_of([*parts]) == [("book", ARGUMENTS), ("book", {})]


def test_without_reasoning_the_reply_is_the_answer_at_once(template: ChatTemplate) -> None:
    text = f"{TEXT}<tool_call>book<arg_key>seats</arg_key><arg_value>3</arg_value></tool_call>"
    prompt = rendered(template, USER, enable_thinking=False)
    parts = parse("glm4", [text], tools=[TOOL], prompt_text=prompt)
    assert parts[0] == TextPart(TEXT)
    assert calls_of([*parts]) == [("book", {"seats": 3})]
    assert parse_every_way("glm4", text, tools=(TOOL,))[0] == TextPart(TEXT)

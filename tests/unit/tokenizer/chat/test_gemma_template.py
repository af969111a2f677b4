"""Gemma 3's chat template: what it renders, and what is refused with a reason."""

from __future__ import annotations

import pytest

from services.tokenizer.chat.chat_encoding import render_chat
from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.conversation import Conversation, Message, Tool, ToolCall
from services.tokenizer.replies import choose_reply_parser
from services.tokenizer.text.control_tokens import ControlTokens
from shared.errors import InvalidRequestError
from tests.support.tokenizer.chat_templates import LocalRenderer, local_template
from tests.support.tokenizer.gemma_template import GEMMA_TEMPLATE

SYSTEM, USER = Message("system", "Be brief."), Message("user", " Hi ")
REPLY, MORE = Message("assistant", "Hello. "), Message("user", "Why?")
ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."
BOS = {"bos_token": "<bos>"}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    """The template after its trial."""
    features = LocalRenderer(BOS).try_template(GEMMA_TEMPLATE)
    return local_template(GEMMA_TEMPLATE, BOS, features=features)


def render(template: ChatTemplate, *messages: Message, opens_turn: bool = True, tools: tuple[Tool, ...] = ()) -> str:
    return template.render(template.fields(Conversation(messages, tools)), opens_turn=opens_turn)


def refusal(template: ChatTemplate, *messages: Message, tools: tuple[Tool, ...] = ()) -> tuple[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        render(template, *messages, tools=tools)
    [violation] = caught.value.violations
    return violation.field, violation.description


def test_replies_are_plain_text() -> None:
    assert choose_reply_parser("Gemma3ForCausalLM", GEMMA_TEMPLATE) == "none"


def test_turns_alternate_and_the_assistant_is_the_model(template: ChatTemplate) -> None:
    turns = "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
    turns += "<start_of_turn>user\nWhy?<end_of_turn>\n"
    assert render(template, USER, REPLY, MORE) == f"<bos>{turns}<start_of_turn>model\n"
    assert render(template, USER, REPLY, MORE, opens_turn=False) == f"<bos>{turns}"


def test_a_system_message_is_the_beginning_of_the_first_users_turn(template: ChatTemplate) -> None:
    expected = "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert render(template, SYSTEM, USER) == expected


def test_a_reply_is_continued_where_it_ends(template: ChatTemplate) -> None:
    conversation = Conversation((USER, REPLY), continues_final=True)
    rendered = render_chat(template, ControlTokens({}), conversation)
    assert rendered.text.endswith("<start_of_turn>model\nHello. ")


@pytest.mark.parametrize(
    "messages",
    [
        (USER, MORE),
        (REPLY,),
        (SYSTEM, REPLY),
        (USER, REPLY, REPLY),
    ],
)
def test_other_orders_are_refused_in_the_templates_words(template: ChatTemplate, messages: tuple[Message, ...]) -> None:
    description = f"the chat template rejected the messages: {ALTERNATE}"
    assert refusal(template, *messages) == ("chat.messages", description)


def test_two_system_messages_are_one(template: ChatTemplate) -> None:
    joined = Message("system", f"{SYSTEM.content}\n\n{SYSTEM.content}")
    assert render(template, SYSTEM, SYSTEM, USER) == render(template, joined, USER)


def test_calls_that_would_be_left_out_are_refused(template: ChatTemplate) -> None:
    call = Message("assistant", "", (ToolCall("c", "look_up", {}),))
    field, description = refusal(template, USER, call, Message("tool", "A word.", tool_call_id="c"))
    assert field == "chat.messages[1].tool_calls"
    assert description == "must have no calls: the model's chat template shows none; leave them and their results out"


def test_a_system_message_that_no_turn_would_hold_is_refused(template: ChatTemplate) -> None:
    field, description = refusal(template, SYSTEM)
    assert field == "chat.messages"
    assert description == "must have a user's message: the model's chat template leaves a system message alone out"


def test_tools_are_refused(template: ChatTemplate) -> None:
    assert not template.takes_tools
    field, description = refusal(template, USER, tools=(Tool("look_up"),))
    assert (field, description) == ("chat.tools", "must be empty: the model's chat template takes no tools")

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from services.tokenizer.chat.chat_encoding import render_chat
from services.tokenizer.chat.chat_template import ChatTemplate, load_chat_template
from services.tokenizer.chat.conversation import Conversation, Message, Tool, ToolCall
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.request.prompts import PromptEncoder
from services.tokenizer.text.encoder import Encoder
from services.tokenizer.text.model_tokenizer import load_tokenizer
from shared.errors import InvalidRequestError
from tests.support.models.tiny_tokenizer import (
    ENDOFTEXT,
    IM_END,
    IM_START,
    TOOLS_CHATML,
    tiny_tokenizer,
    write_tiny_tokenizer,
)
from tests.support.tokenizer.chat_templates import local_template

# Every part of a conversation appears somewhere, including the fields that templates inspect.
TEMPLATE = """\
{%- if tools %}<|im_start|>tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}{{ ' ' ~ m.name if m.name is defined else '' }}
{%- if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}
{%- if m.reasoning_content is defined %}({{ m.reasoning_content | trim }}){% endif %}
{%- for call in m.tool_calls or [] %}{{ call.id }}{{ call.function.name }}
{%- set arguments = call.function.arguments %}{{ arguments | tojson }}{% endfor %}
{{- m.tool_call_id or '' }}<|im_end|>
{% endfor %}{{ style or '' }}<|im_start|>assistant
"""

SPECIAL = [IM_START, IM_END, ENDOFTEXT]
USER = Message("user", "Hi")
TOOL = Tool("look_up", "Looks words up.", {"type": "object", "properties": {"word": {"type": "string"}}})
CHATS = [
    Conversation((USER,)),
    Conversation((Message("system", "Be brief."), USER)),
    Conversation((USER, Message("assistant", "Hello!"), Message("user", "12345 你好 😀\n\n  def f(): pass"))),
    Conversation((Message("user", ""), Message("assistant", ""), Message("user", " \t"))),
    Conversation((Message("user", "{{ 7 * 7 }} {% raw %} }}"),)),
    Conversation((Message("user", "a < b <|im_ <| \ue000"), Message("assistant", "<think>x</think>y"))),
    Conversation(
        (
            USER,
            Message("assistant", "", (ToolCall("c1", "look_up", {"word": "naïve <b>"}),), reasoning=" Hm.\n"),
            Message("tool", "simple", tool_call_id="c1", name="look_up"),
        ),
        (TOOL,),
        variables={"style": "brief"},
    ),
]


@cache
def reference(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module", params=[TOOLS_CHATML, TEMPLATE], ids=["chatml", "tools"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer with a template."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(path, chat_template=request.param)
    return path


@cache
def encoder() -> Encoder:
    return Encoder(tiny_tokenizer())


@cache
def template_of(directory: Path) -> ChatTemplate:
    template = load_chat_template(load_tokenizer(directory), timeout_s=60.0)
    assert template is not None
    return template


def transformers_fields(conversation: Conversation) -> dict[str, Any]:
    fields = local_template("", {}).fields(conversation)
    return {"conversation": fields.pop("messages"), "tools": fields.pop("tools"), **fields}


@pytest.mark.parametrize("chat", CHATS)
async def test_text_and_ids_equal_those_of_transformers(directory: Path, chat: Conversation) -> None:
    prompts = PromptEncoder(encoder(), template_of(directory))
    text, token_ids = await prompts.render_chat(chat, 10_000)
    fields = transformers_fields(chat)
    tokenizer = reference(directory)
    assert text == tokenizer.apply_chat_template(**fields, add_generation_prompt=True, tokenize=False)
    assert token_ids.tolist() == tokenizer.apply_chat_template(**fields, add_generation_prompt=True)["input_ids"]


async def test_a_turn_that_is_not_opened_is_rendered_as_by_transformers(directory: Path) -> None:
    prompts = PromptEncoder(encoder(), template_of(directory))
    chat = Conversation((USER,), opens_turn=False)
    text, _ = await prompts.render_chat(chat, 10_000)
    assert text == reference(directory).apply_chat_template(
        **transformers_fields(chat), add_generation_prompt=False, tokenize=False
    )


@pytest.mark.parametrize("content", ["The sky", "a\n b", "é <think>x", "1", "Hi", "a <|im_ b"])
async def test_a_continued_message_is_rendered_as_by_transformers(directory: Path, content: str) -> None:
    prompts = PromptEncoder(encoder(), template_of(directory))
    chat = Conversation((USER, Message("assistant", content)), continues_final=True)
    text, token_ids = await prompts.render_chat(chat, 10_000)
    fields = transformers_fields(chat)
    tokenizer = reference(directory)
    assert text == tokenizer.apply_chat_template(**fields, continue_final_message=True, tokenize=False)
    assert text.endswith(content)
    assert token_ids.tolist() == tokenizer.apply_chat_template(**fields, continue_final_message=True)["input_ids"]


async def test_a_continued_message_cannot_write_control_tokens(directory: Path) -> None:
    prompts = PromptEncoder(encoder(), template_of(directory))
    text, token_ids = await prompts.render_chat(
        Conversation((USER, Message("assistant", f"a{IM_END} b ")), continues_final=True), 10_000
    )
    assert text.endswith(f"a{IM_END} b ")
    spelled = encoder().encode(f"a{IM_END} b ", add_special_tokens=False).tolist()
    assert token_ids.tolist()[-len(spelled) :] == spelled
    assert tiny_tokenizer().token_to_id(IM_END) not in spelled


async def test_reasoning_is_continued_where_the_template_shows_it() -> None:
    shows = "{% for m in messages %}<{{ m.role }}>{{ '<think>' ~ m.thinking if m.thinking }}{{ m.content }}{% endfor %}"
    chat = Conversation((USER, Message("assistant", "", reasoning="Hm. ")), continues_final=True)
    text, _ = await PromptEncoder(encoder(), local_template(shows, {})).render_chat(chat, 10_000)
    assert text == "<user>Hi<assistant><think>Hm. "
    hides = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="does not show what is to be continued"):
        await PromptEncoder(encoder(), local_template(hides, {})).render_chat(chat, 10_000)


CONTENTS = st.lists(
    st.text(max_size=10) | st.sampled_from(["<|", "<|im_", "|>", " ", "\n", "</think>", "1"]), max_size=4
)
HARMLESS = CONTENTS.map("".join).filter(lambda text: not any(token in text for token in SPECIAL))
OBJECTS: st.SearchStrategy[JsonObject] = st.dictionaries(HARMLESS, HARMLESS | st.booleans() | st.integers(), max_size=2)


@st.composite
def harmless_chats(draw: st.DrawFn) -> Conversation:
    call = ToolCall(draw(HARMLESS), draw(HARMLESS), draw(OBJECTS))
    messages = (
        Message("user", draw(HARMLESS), name=draw(HARMLESS)),
        Message("assistant", draw(HARMLESS), (call,), reasoning=draw(HARMLESS)),
        Message("tool", draw(HARMLESS), tool_call_id=draw(HARMLESS)),
    )
    return Conversation(messages, (Tool("t", draw(HARMLESS), draw(OBJECTS)),), variables={"style": draw(HARMLESS)})


@given(harmless_chats())
def test_the_ids_of_any_harmless_chat_equal_those_of_transformers(directory: Path, chat: Conversation) -> None:
    rendered = render_chat(template_of(directory), encoder().control_tokens, chat)
    expected = reference(directory).apply_chat_template(**transformers_fields(chat), add_generation_prompt=True)
    assert encoder().encode_pieces(rendered.pieces).tolist() == expected["input_ids"]


def control_ids(token_ids: list[int]) -> list[int]:
    return [token_id for token_id in token_ids if encoder().tokenizer.id_to_token(token_id) in SPECIAL]


def hostile_chat(text: str) -> Conversation:
    """A chat with a text in every field."""
    arguments: JsonObject = {text: [text, {"deep": text}]}
    return Conversation(
        (
            Message("user", text, name=text),
            Message("assistant", text, (ToolCall(text, text, arguments),), reasoning=text),
            Message("tool", text, tool_call_id=text),
        ),
        (Tool("t", text, {"type": "object", "properties": {text: {"description": text}}}),),
        variables={"style": text},
    )


@given(
    st.lists(st.sampled_from([*SPECIAL, "x", "<|im_", "start|>", "<|", "\ue000", "</think>", " "]), max_size=6).map(
        "".join
    )
)
def test_no_text_of_a_chat_becomes_a_control_token(directory: Path, text: str) -> None:
    template = template_of(directory)
    ids = []
    for each in (text, "x"):
        rendered = render_chat(template, encoder().control_tokens, hostile_chat(each))
        ids.append(control_ids(encoder().encode_pieces(rendered.pieces).tolist()))
    assert ids[0] == ids[1]


def test_text_that_looks_like_a_control_token_is_kept() -> None:
    template = local_template("{{ messages[0].content }}<|im_end|>", {})
    chat = Conversation((Message("user", f"a {IM_START} b <|im_"),))
    rendered = render_chat(template, encoder().control_tokens, chat)
    assert rendered.text == f"a {IM_START} b <|im_{IM_END}"
    token_ids = encoder().encode_pieces(rendered.pieces)
    assert encoder().decode(token_ids, skips_special_tokens=False) == rendered.text
    assert encoder().decode(token_ids) == f"a {IM_START} b <|im_"


def test_special_tokens_that_a_template_uses_by_name_stay_whole() -> None:
    template = local_template("{{ bos_token }}{{ messages[0].content }}", {"bos_token": IM_START})
    rendered = render_chat(template, encoder().control_tokens, Conversation((Message("user", IM_START),)))
    assert control_ids(encoder().encode_pieces(rendered.pieces).tolist()) == [1]

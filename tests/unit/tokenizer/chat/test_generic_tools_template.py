"""Tools for templates that take none: nothing changes without them, and what is rendered is read as what it was."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.chat.chat_template import ChatTemplate, load_chat_template
from services.tokenizer.chat.conversation import Conversation, Message, Tool, ToolCall
from services.tokenizer.chat.generic_tools_template import GENERIC_MARK, TOOL_ROLES, with_generic_tools
from services.tokenizer.replies import TextPart, ToolCallPart, choose_reply_parser
from services.tokenizer.request.reply_parsers import lacks_tools
from services.tokenizer.text.model_tokenizer import load_tokenizer
from shared.errors import InvalidRequestError
from tests.support.models.tiny_tokenizer import CHATML, write_tiny_tokenizer
from tests.support.tokenizer.call_templates import CALLS_AS_OBJECTS
from tests.support.tokenizer.chat_templates import make_local_renderer
from tests.support.tokenizer.gemma_template import GEMMA_TEMPLATE
from tests.support.tokenizer.replies import parse
from tests.support.tokenizer.reply_texts import HOSTILE_STRINGS
from tests.support.tokenizer.same_prompt import load

# As Llama 2's: strict turns, and the system's text in the first one.
LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}\
{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}\
{% if loop.index0 == 0 and system %}{% set content = '<<SYS>>' + system + '<</SYS>>' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ '<s>[INST] ' + content + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content + ' </s>' }}{% endif %}\
{% endfor %}"""
# As Gemma 2's, and as those that say nothing of a system at all.
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
IGNORED_SYSTEM = (
    "\n  {% for m in messages %}{% if m.role != 'system' %}\n<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
# By a macro, with the calls' own branch that is never reached without tools.
MACRO = """
 {%- macro turn(m) -%}
<{{ m.role }}>{{ m.content }}{% if 'tool_calls' in m %}{{ m.tool_calls[0] }}{% endif %}
 {%- endmacro %}
   {% for m in messages %}
{{ turn(m) }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}
   {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}
"""
SOURCES = {
    "ChatML": CHATML,
    "Gemma 3": GEMMA_TEMPLATE,
    "Llama 2": LLAMA_2,
    "no system": NO_SYSTEM,
    "ignored system": IGNORED_SYSTEM,
    "macro": MACRO,
}
ROLE_OF = dict.fromkeys(SOURCES, "system") | {"no system": "user", "ignored system": "user"}

TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"a": {"type": "string"}}})
USER = Message("user", "Where?")
CALLING = Message("assistant", "I look.", (ToolCall("1", "look", {"a": 'x"é'}), ToolCall("2", "find", {})))
RESULTS = (Message("tool", "in Aix", tool_call_id="1"), Message("tool", "nowhere", tool_call_id="2"))


def with_tools(name: str) -> ChatTemplate:
    """The template with generic tools, in the role's message that it shows."""
    return load(with_generic_tools(SOURCES[name], ROLE_OF[name]))


def render(template: ChatTemplate, *messages: Message, tools: tuple[Tool, ...] = ()) -> str:
    return template.render(template.fields(Conversation(messages, tools)))


TEXTS = st.sampled_from(("", "Hi", "\n a \n", "<tool_call>", "{{ x }}", "é"))
TURNS = st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=3)


@pytest.mark.parametrize("role", TOOL_ROLES)
@pytest.mark.parametrize("name", SOURCES)
def test_a_chat_without_tools_is_rendered_as_ever(name: str, role: str) -> None:
    plain, generic = load(SOURCES[name]), load(with_generic_tools(SOURCES[name], role))

    @settings(max_examples=20)
    @given(st.booleans(), TURNS, TEXTS)
    def run(has_system: bool, turns: list[tuple[str, str, str]], last: str) -> None:
        messages = [Message("system", "Be brief.")] if has_system and name != "no system" else []
        for question, answer, reasoning in turns:
            messages += [Message("user", question), Message("assistant", answer, reasoning=reasoning)]
        messages.append(Message("user", last))
        assert render(generic, *messages) == render(plain, *messages)

    run()
    assert generic.variables - {"tools"} == plain.variables - {"tools"}
    assert generic.digest != plain.digest


@pytest.mark.parametrize("name", SOURCES)
def test_tools_calls_and_results_are_shown_once_and_in_their_order(name: str) -> None:
    text = render(with_tools(name), USER, CALLING, *RESULTS, Message("user", "Thanks"), tools=(TOOL, Tool("find")))
    marks = ('"name": "look"', '"name": "find"', "I look.", '"a": "x\\"é"', "in Aix", "nowhere", "Thanks")
    places = [text.index(mark) for mark in marks]
    # A user's message that lists the tools has its own text after them.
    assert places == sorted(places)
    assert text.count("<tools>") == 1
    assert text.count("<tool_response>\n") == 2


@pytest.mark.parametrize("name", SOURCES)
def test_the_history_has_calls_though_no_tools_are_offered_any_more(name: str) -> None:
    text = render(with_tools(name), USER, CALLING, *RESULTS)
    assert "<tools>" not in text
    assert text.count('<tool_call>\n{"name": ') == 2


@pytest.mark.parametrize("name", sorted(SOURCES.keys() - {"no system"}))
def test_a_system_s_own_instructions_are_kept(name: str) -> None:
    text = render(with_tools(name), Message("system", "Be brief."), USER, tools=(TOOL,))
    assert "<tools>" in text
    # One that ignores them without tools does so with them.
    assert ("Be brief." in text) is (name != "ignored system")


def test_tools_of_a_user_s_message_come_before_its_text_and_after_a_system_s() -> None:
    system = Message("system", "Be brief.")
    template = load(with_generic_tools(CHATML, "user"))
    text = render(template, system, USER, Message("assistant", "A"), USER, tools=(TOOL,))
    assert text.index("Be brief.") < text.index("<tools>") < text.index("Where?")
    assert text.count("<tools>") == 1
    assert render(template, system, tools=(TOOL,)).count("<tools>") == 1


def test_reasoning_and_malformed_arguments_of_a_call_are_kept() -> None:
    message = Message("assistant", "", (ToolCall("1", "look", '{"a": '),), reasoning="Hm.")
    text = render(with_tools("macro"), USER, message)
    assert "(Hm.)" in text
    assert '<tool_call>\n{"name": "look", "arguments": {"a": }\n</tool_call>' in text


STRINGS = st.lists(st.sampled_from(HOSTILE_STRINGS), max_size=3).map("".join)
VALUES = st.dictionaries(st.sampled_from(("a", "b")), STRINGS | st.integers() | st.none() | st.lists(st.booleans()))


@settings(max_examples=50)
@given(content=st.sampled_from(("", "I look.", "a\nb")), calls=st.lists(VALUES, min_size=1, max_size=3))
def test_the_parser_reads_what_is_rendered(content: str, calls: list[dict[str, Any]]) -> None:
    made = tuple(ToolCall(str(index), "look", values) for index, values in enumerate(calls))
    text = render(with_tools("ChatML"), USER, Message("assistant", content, made))
    reply = text.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    parts = parse("generic", [reply], tools=[TOOL])
    said = "".join(part.text for part in parts if isinstance(part, TextPart))
    read = [json.loads(part.arguments) for part in parts if isinstance(part, ToolCallPart)]
    assert (said.strip(), read) == (content, calls)


@pytest.mark.parametrize("name", SOURCES)
def test_a_template_that_lacks_tools_gets_them_where_it_shows_them(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=SOURCES[name])
    with caplog.at_level(logging.INFO):
        template = load_chat_template(
            load_tokenizer(tmp_path), timeout_s=60.0, make_renderer=make_local_renderer, lacks_tools=lambda _: True
        )
    assert template is not None
    assert template.takes_tools
    assert template.text == with_generic_tools(SOURCES[name], ROLE_OF[name])
    (record,) = [each for each in caplog.records if "takes no tools" in each.getMessage()]
    assert record.__dict__["role"] == ROLE_OF[name]


def test_a_template_that_shows_no_message_of_ours_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = "{{ messages[-1].content[:20] }}"
    write_tiny_tokenizer(tmp_path, chat_template=source)
    template = load_chat_template(
        load_tokenizer(tmp_path), timeout_s=60.0, make_renderer=make_local_renderer, lacks_tools=lambda _: True
    )
    assert template is not None
    assert (template.text, template.takes_tools) == (source, False)
    assert "cannot show tools in any message" in caplog.text
    with pytest.raises(InvalidRequestError, match="takes no tools"):
        template.fields(Conversation((USER,), (TOOL,)))


@pytest.mark.parametrize(
    ("source", "architecture", "is_lacking"),
    [
        (CHATML, "LlamaForCausalLM", True),
        (f"{CHATML}{{% if false %}}<think>{{% endif %}}", "Qwen2ForCausalLM", True),
        # It lists tools, but its calls are in no known format.
        ("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + CHATML, "GraniteForCausalLM", True),
        (CALLS_AS_OBJECTS + "<tool_call>", "Qwen3ForCausalLM", False),
        (f"{CHATML}{{% if false %}}[THINK]{{% endif %}}", "MistralForCausalLM", False),
    ],
)
def test_a_model_lacks_tools_if_it_lists_none_or_has_no_known_calls(
    source: str, architecture: str, is_lacking: bool
) -> None:
    assert lacks_tools(architecture, load(source)) is is_lacking


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM"])
def test_generic_tools_are_read_by_the_generic_parser_whatever_else_the_template_has(architecture: str) -> None:
    for source in (CHATML, f"{CHATML}<think><|python_tag|>"):
        assert choose_reply_parser(architecture, with_generic_tools(source, "system")) == "generic"
        assert GENERIC_MARK not in source

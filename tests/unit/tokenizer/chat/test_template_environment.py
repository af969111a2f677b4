"""Our sandbox beside transformers': every template gives the same text, or is refused for the same reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from services.tokenizer.chat.template_environment import render
from tests.support.tokenizer.family_templates import TEMPLATES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "é<": [1, 2.5, None, True]}}}
MESSAGES: list[Any] = [
    {"role": "system", "content": "s & <b> 'q' \"d\""},
    {"role": "user", "content": " ü 你好\n\n{{ x }}{% y %} 😀 "},
    {"role": "assistant", "content": "a", "reasoning": "r", "tool_calls": [TOOL]},
    {"role": "user", "content": [{"type": "text", "text": "t"}]},
]
SNIPPETS = [
    # What the sandbox adds to jinja2.
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ 'é<&' | tojson(True) }}",
    "{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}{{ 'é' | tojson(ensure_ascii=False) }}",
    "{{ messages | tojson(allow_nan=False) }}",
    "{{ raise_exception('no: ' ~ messages[0].content) }}",
    "{{ raise_exception(message='no') }}{{ raise_exception() }}",
    "{{ strftime_now('%Y') }}{{ strftime_now(format='%%') }}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ loop.index }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "a{% generation %}b{% set x = 1 %}{{ x }}{% endgeneration %}c{{ x }}",
    "{% set ns = namespace(a=1) %}{% generation %}{% set ns.a = 2 %}{% endgeneration %}{{ ns.a }}",
    "{%- generation -%} b {%- endgeneration -%}",
    "{% generation %}never ends",
    "{{ dict(a=1, b=2) }}{{ dict([('x', 1)]) }}{{ dict.fromkeys(['a'], 1) }}",
    "{{ dict.__class__ }}",
    "{{ dict.mro() }}",
    "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.b }}",
    "{% set ns = namespace(self=1) %}{{ ns.self }}{{ namespace({'b': 2}).b }}",
    "{{ namespace(_a=1) }}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ namespace(a=1).__init__ }}",
    # How it trims, and what it refuses.
    "  {% if true %}\n  x\n  {% endif %}\n\ny\n",
    "{% for m in messages %}\n    {{ m.role }}\n{% endfor %}\n",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{% set _ = [].append(1) %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ ''['format'].__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ '%s' % messages[0].role }}{{ '{0.__class__}'.format(1) }}",
    "{{ range(3) | list }}",
    "{{ range(10**6) }}",
    "{% include 'x' %}",
    "{% do messages %}",
    "{% trans %}x{% endtrans %}",
    "{{ unclosed",
    "{{ x | no_such_filter }}",
    "{{ no_such_function() }}",
    "{{ missing.attribute }}",
    "{{ 1 / 0 }}",
    "{{ 'a' + 1 }}",
    # What it is given.
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ pad_token is defined }}",
    "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ source }}{{ enable_thinking }}",
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.reasoning }}{{ m | list }}{% endfor %}",
    "{{ messages[3].content is string }}{{ messages[3].content is mapping }}{{ messages[3].content[0].text }}",
    "{{ messages | map(attribute='role') | unique | list }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list }}",
    "{{ messages[1].content.strip().split('\n') }}{{ messages[1].content | trim | upper | e }}",
    "{{ tools | length }}{{ (tools | first).function.parameters.items() | list }}",
    "{{ self }}",
    "{% macro f(x) %}[{{ x }}{{ caller() if caller else '' }}]{% endmacro %}{{ f(1) }}{% call f(2) %}c{% endcall %}",
]
VARIABLES: dict[str, Any] = {"enable_thinking": False, "source": "s", "x": [1, {"a": None}]}


def outcome(run: Any) -> tuple[str, str]:
    """The text, or what was raised, with a template's own words."""
    try:
        return "text", run()
    except Exception as error:  # noqa: BLE001 - a template can raise anything
        return type(error).__name__, str(error) if type(error) is TemplateError else ""


def assert_equal(source: str, /, messages: Any, tools: Any, **variables: Any) -> None:
    def theirs() -> str:
        rendered: Any = render_jinja_template([messages], tools, None, source, **SPECIAL, **variables)
        return str(rendered[0][0])

    def ours() -> str:
        return render(source, messages=messages, tools=tools, **SPECIAL, **variables)

    assert outcome(ours) == outcome(theirs)


@pytest.mark.parametrize("source", SNIPPETS)
def test_what_the_sandbox_gives_and_refuses_is_transformers(source: str) -> None:
    for tools in (None, [], [TOOL]):
        for opens in (True, False):
            assert_equal(source, MESSAGES, tools, add_generation_prompt=opens, **VARIABLES)


TEXTS = st.text(max_size=8) | st.sampled_from(
    ["<s>", "</think>", "{{ 1 }}", "\n", " ", "é&<'\"", "\x00\u2028", "<|im_end|>"]
)
CALLS = st.lists(st.fixed_dictionaries({"id": TEXTS, "function": st.just({"name": "f", "arguments": {"a": "<é"}})}))
MESSAGE_LISTS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS | st.none()},
        optional={"tool_calls": CALLS, "reasoning_content": TEXTS, "thinking": TEXTS | st.none(), "name": TEXTS},
    ),
    max_size=4,
)


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@given(messages=MESSAGE_LISTS, tools=st.none() | st.just([TOOL]), opens=st.booleans(), thinks=st.booleans())
@settings(max_examples=10, deadline=None)
def test_templates_of_all_families_render_as_with_transformers(
    source: str, messages: Any, tools: Any, opens: bool, thinks: bool
) -> None:
    assert_equal(source, messages, tools, add_generation_prompt=opens, enable_thinking=thinks)


@pytest.mark.parametrize(("messages", "tools", "documents"), [(["x"], None, None), ([], ["x"], None), ([], None, [1])])
def test_what_is_no_object_is_refused(messages: Any, tools: Any, documents: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        render_jinja_template([messages], tools, documents, "x")
    with pytest.raises(TypeError, match="must be objects"):
        render("x", messages=messages, tools=tools, documents=documents)

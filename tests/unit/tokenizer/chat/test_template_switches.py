"""Which switches and variables of a chat have an effect, by the template of every family."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.tokenizer.chat.template_rendering import read_variables
from services.tokenizer.chat.template_switches import unread_variables
from tests.support.tokenizer.family_templates import TEMPLATES
from tests.support.tokenizer.same_prompt import Turn, load, over_grpc, prompt

ON, OFF = ({"enable_thinking": value, "thinking": value} for value in (True, False))
# What no template but those reads.
READ = {
    "GLM 4.7": {"enable_thinking", "clear_thinking"},
    "GLM 5.2": {"enable_thinking", "clear_thinking", "reasoning_effort"},
    "Kimi K2.5": {"thinking"},
    "DeepSeek V3.2": {"enable_thinking", "thinking"},
    "system first": {"enable_thinking"},
}
ASKED: dict[str, Any] = {
    "enable_thinking": False,
    "thinking": False,
    "reasoning_effort": "high",
    "thinking_budget": 7,
    "clear_thinking": False,
    "made_up": "x",
}


def unread(variables: dict[str, Any], read: set[str], *, reasons: bool) -> list[str]:
    return list(unread_variables(variables, read, reasons=reasons))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_variable_that_is_not_read_changes_no_prompt(name: str) -> None:
    template = load(TEMPLATES[name])
    assert template.variables & ASKED.keys() == READ.get(name, set())
    turns = [Turn("user", "Q?"), Turn("assistant", "A.", reasoning="Hm."), Turn("user", "And?")]
    plain = over_grpc(["Rule."], turns, has_tools=False, thinks=None)
    text = prompt(template, plain)
    for variable, value in ASKED.items():
        if variable in template.variables:
            continue
        for given in (value, not value):
            plain.template_variables = json.dumps({variable: given})
            assert prompt(template, plain) == text, variable


@pytest.mark.parametrize("reasons", [True, False])
@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_either_name_of_the_switch_is_enough(switch: str, reasons: bool) -> None:
    for variables in (ON, OFF):
        assert unread(variables, {switch}, reasons=reasons) == []
        assert unread({switch: variables[switch]}, {switch}, reasons=reasons) == []


def test_a_switch_that_nobody_reads_may_ask_for_what_is_done_anyway() -> None:
    assert unread(OFF, set(), reasons=False) == []
    assert unread(ON, set(), reasons=True) == []
    assert unread(ON, set(), reasons=False) == ["enable_thinking", "thinking"]
    assert unread(OFF, set(), reasons=True) == ["enable_thinking", "thinking"]


def test_what_is_no_switch_or_has_another_name_is_named() -> None:
    assert unread({"thinking": True}, {"enable_thinking"}, reasons=True) == ["thinking"]
    assert unread({"enable_thinking": True, "thinking": False}, {"thinking"}, reasons=True) == ["enable_thinking"]
    assert unread({"enable_thinking": "no"}, set(), reasons=False) == ["enable_thinking"]
    assert unread(ON | {"reasoning_effort": "low", "x": None}, {"thinking"}, reasons=True) == ["reasoning_effort", "x"]


def test_variables_are_found_behind_defaults_branches_and_macros() -> None:
    source = (
        "{%- set thinking = thinking | default(false) -%}"
        "{%- macro show(m) -%}{{ m.content if m.role == kind else '' }}{%- endmacro -%}"
        "{%- for m in messages -%}{%- if false -%}{{ hidden }}{%- endif -%}{{ show(m) }}{%- break -%}{%- endfor -%}"
        "{%- generation -%}{%- set own = 1 -%}{{ own }}{{ 'quoted' }}{# commented #}{%- endgeneration -%}"
    )
    assert {"thinking", "kind", "hidden", "messages"} <= set(read_variables(source))
    assert not {"own", "m", "quoted", "commented"} & set(read_variables(source))

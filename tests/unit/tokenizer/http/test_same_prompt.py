"""A conversation that all doors can express has one prompt over gRPC and the three APIs, or is refused by all alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.support.tokenizer.family_templates import TEMPLATES
from tests.support.tokenizer.same_prompt import (
    DOORS,
    OPTIONS,
    Turn,
    check,
    conversations,
    load,
    over_grpc,
    prompt,
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_door_has_the_same_prompt_or_the_same_reason(name: str) -> None:
    template = load(TEMPLATES[name])

    @settings(max_examples=12)
    @given(conversations(), OPTIONS)
    def run(conversation: tuple[list[str], list[Turn]], options: dict[str, Any]) -> None:
        check(template, conversation, **options)

    run()


@pytest.mark.proof
@pytest.mark.parametrize("name", TEMPLATES)
def test_many_conversations_have_the_same_prompt_by_every_door(name: str) -> None:
    template = load(TEMPLATES[name])

    @settings(max_examples=2000, deadline=None)
    @given(conversations(), OPTIONS)
    def run(conversation: tuple[list[str], list[Turn]], options: dict[str, Any]) -> None:
        check(template, conversation, **options)

    run()


def test_what_is_said_before_a_call_is_kept_by_a_template_that_drops_it() -> None:
    turns = [Turn("user", "Question?"), Turn("assistant", "Before.", 1), Turn("user", "And?")]
    assert "Before." in prompt(load(TEMPLATES["calls alone"]), over_grpc([], turns, has_tools=True, thinks=None))


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "Gemma 3"])
def test_calls_in_a_history_are_shown_though_no_tools_are_offered_any_more(name: str) -> None:
    turns = [Turn("user", "Question?"), Turn("assistant", "", 1), Turn("user", "And?")]
    found = {prompt(load(TEMPLATES[name]), door([], turns, has_tools=False, thinks=None)) for door in DOORS}
    assert len(found) == 1
    assert "w0" in found.pop()


@pytest.mark.parametrize("door", DOORS)
def test_calls_under_a_template_without_any_are_refused(door: Any) -> None:
    turns = [Turn("user", "Question?"), Turn("assistant", "", 1), Turn("user", "And?")]
    found = prompt(load(TEMPLATES["Gemma 3"]), door([], turns, has_tools=False, thinks=None))
    assert found == (
        "refused: must have no calls: the model's chat template shows none; leave them and their results out"
    )

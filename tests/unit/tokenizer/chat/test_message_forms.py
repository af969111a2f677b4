from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.tokenizer.chat.conversation import Message, ToolCall
from services.tokenizer.chat.message_forms import TemplateFeatures, message_fields

USER = Message("user", "Hi")
FIRST, SECOND = ToolCall("c1", "look_up", {"word": "a"}), ToolCall("c2", "now", {})
BOTH = Message("assistant", "So:", (FIRST, SECOND), reasoning="Hm.")


def result(call_id: str, content: str = "x") -> Message:
    return Message("tool", content, tool_call_id=call_id)


def shown(features: TemplateFeatures, *messages: Message) -> list[Any]:
    """Each message as its role's first letter, its texts, and the ids of its calls and of what it answers."""
    fields: list[Any] = message_fields(messages, features, lambda value: value)
    return [
        (
            each["role"][0],
            each["content"],
            each.get("reasoning_content", ""),
            [call.get("id", "") for call in each.get("tool_calls", [])] or each.get("tool_call_id", ""),
        )
        for each in fields
    ]


@pytest.mark.parametrize(
    ("results", "ids"),
    [
        ([result("c1"), result("c2")], ["c1", "c1", "c2", "c2"]),
        ([result("c2"), result("c1")], ["c1", "c1", "c2", "c2"]),
        ([result("c2")], ["c1", "c2", "c2"]),
        ([], ["c1", "c2"]),
        ([result(""), result("")], ["c1", "", "c2", ""]),
        ([result("c2"), result("")], ["c1", "", "c2", "c2"]),
        ([result("c1"), result("c1"), result("c3")], ["c1", "c1", "c2", "c1", "c3"]),
    ],
)
def test_each_call_of_a_message_gets_a_message_of_its_own_with_its_result(
    results: list[Message], ids: list[str]
) -> None:
    features = TemplateFeatures(one_call_per_message=True)
    fields = shown(features, USER, BOTH, *results, USER)
    assert [each[3][0] if isinstance(each[3], list) else each[3] for each in fields[1:-1]] == ids
    assert [each[1:3] for each in fields if each[0] == "a"] == [("So:", "Hm."), ("", "")]
    assert fields[0] == fields[-1] == ("u", "Hi", "", "")


def test_a_single_call_stays_as_it_is() -> None:
    single = replace(BOTH, tool_calls=(FIRST,))
    features = TemplateFeatures(one_call_per_message=True)
    assert shown(features, USER, single, result("c9")) == shown(TemplateFeatures(), USER, single, result("c9"))


def test_content_may_be_joined_to_the_reasoning_of_calls_or_come_before_them() -> None:
    calls = ["c1", "c2"]
    joined = shown(TemplateFeatures(content_is_reasoning=True), BOTH, Message("assistant", "Yes.", reasoning="Hm."))
    assert joined == [("a", "", "Hm.\n\nSo:", calls), ("a", "Yes.", "Hm.", "")]
    apart = TemplateFeatures(content_is_apart=True, empty_content_is_none=True)
    assert shown(apart, BOTH) == [("a", "So:", "", ""), ("a", None, "Hm.", calls)]


def test_ids_become_named_ones_that_no_other_call_has() -> None:
    own = Message("assistant", "", (ToolCall("functions.now:1", "now", {}), ToolCall("functions.now:0", "look_up", {})))
    fields = shown(
        TemplateFeatures(ids_have_names=True), BOTH, result("c2"), result(""), own, result("functions.now:1")
    )
    assert fields[0][3] == ["functions.look_up:0", "functions.now:2"]
    assert [each[3] for each in fields[1:3]] == ["functions.now:2", "functions.look_up:0"]
    assert fields[3][3] == ["functions.now:1", "functions.look_up:3"]
    assert fields[4][3] == "functions.now:1"


def test_ids_become_short_ones_that_still_belong_together() -> None:
    unnamed = Message("assistant", "", (ToolCall("", "now", {}), ToolCall("abcdefgh9", "now", {})))
    fields = shown(
        TemplateFeatures(ids_are_short=True), BOTH, result("c2"), result("c1"), unnamed, result(""), result("abcdefgh9")
    )
    first, second = fields[0][3]
    assert [each[3] for each in fields[1:3]] == [second, first]
    third, fourth = fields[3][3]
    assert [each[3] for each in fields[4:]] == [third, fourth] == [third, "abcdefgh9"]
    assert {len(each) for each in (first, second, third)} == {9}
    assert len({first, second, third}) == 3


def test_a_later_systems_text_is_at_the_end_of_the_users() -> None:
    system, reply = Message("system", "Be brief."), Message("assistant", "Yes.")
    late = Message("system", "Now.")
    features = TemplateFeatures(system_comes_first=True)
    messages = (system, USER, late, USER, reply, USER, USER, reply, late, USER)
    assert [each[:2] for each in shown(features, *messages)] == [
        ("s", "Be brief."),
        ("u", "Hi\n\nNow.\n\nHi"),
        ("a", "Yes."),
        ("u", "Hi"),
        ("u", "Hi"),
        ("a", "Yes."),
        ("u", "Now.\n\nHi"),
    ]
    assert shown(features, system, USER, reply) == shown(TemplateFeatures(), system, USER, reply)

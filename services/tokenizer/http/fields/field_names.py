"""The names that the fields of a `GenerateRequest` have in the JSON of the HTTP API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

_MESSAGE = re.compile(r"^chat\.messages\[(\d+)\]")
_PLACED = re.compile(r"^chat\.(messages|tools)\[(\d+)\]")
_CALLED = re.compile(r"^(tools\[\d+\]|messages\[\d+\]\.tool_calls\[\d+\])\.function\.(\w+)(.*)")
# What a custom tool or a call of one has in the place of a function's fields.
_CUSTOM_FIELDS = {"parameters": "format", "arguments": "input"}
# Applied in this order; what follows a name, such as an index, stays.
_CHAT_RULES = (
    (r"^chat\.(tool_mode|tool_name|allowed_tool_names).*", r"tool_choice"),
    (r"^chat\.tools\[(\d+)\]\.", r"tools[\1].function."),
    (r"^chat\.messages\[(\d+)\]\.tool_calls\[(\d+)\]\.(name|arguments)", r"messages[\1].tool_calls[\2].function.\3"),
    (r"^chat\.template_variables", "chat_template_kwargs"),
    (r"^chat\.single_tool_call", "parallel_tool_calls"),
    (r"^chat\.omit_generation_prompt", "add_generation_prompt"),
    (r"^chat\.", ""),
    (r"^(chat|prompt)$", "messages"),
)
_COMPLETION_RULES = (
    (r"^prompts\.prompts\[(\d+)\]\.(text|prompt|tokens\.token_ids)", r"prompt[\1]"),
    (r"^prompts\.prompts", "prompt"),
    (r"^(text|prompt|tokens\.token_ids)", "prompt"),
)
_MESSAGES_RULES = (
    (r"^(chat|prompt|chat\.continue_final_message)$", "messages"),
    (r"^chat\.(tool_mode|tool_name)$", "tool_choice"),
    (r"^chat\.single_tool_call$", "tool_choice.disable_parallel_tool_use"),
    (r"^chat\.template_variables", "thinking"),
    (r"^chat\.", ""),
    (r"^(tools\[.*)\.parameters", r"\1.input_schema"),
    (r"^stop\b", "stop_sequences"),
)
_RESPONSES_RULES = (
    (r"^(chat|prompt|chat\.messages)$", "input"),
    (r"^chat\.(tool_mode|tool_name|allowed_tool_names).*", "tool_choice"),
    (r"^chat\.template_variables", "chat_template_kwargs"),
    (r"^chat\.single_tool_call", "parallel_tool_calls"),
    (r"^chat\.", ""),
    (r"^sampling\.num_logprobs", "top_logprobs"),
)
_RULES = (
    (r"^sampling\.num_prompt_logprobs", "prompt_logprobs"),
    (r"^sampling\.num_logprobs", "logprobs"),
    (r"^sampling\.", ""),
    (r"^include_stop$", "include_stop_str_in_output"),
)


class FieldNames:
    """Names fields for one route and request."""

    def __init__(
        self, *, is_chat: bool, given: Mapping[str, str], num_messages: Sequence[int] = (), custom: Sequence[str] = ()
    ) -> None:
        """Name none yet.

        Args:
            is_chat: Whether the request is a chat.
            given: The names that depend on the request, by the beginnings of the message's; the first counts.
            num_messages: How many messages of the cell each message of the request has become; one if not given.
            custom: Where custom tools and calls of them are in the request.
        """
        self._given = given
        self._places = [place for place, count in enumerate(num_messages) for _ in range(count)]
        self._custom = custom
        self._rules = (*(_CHAT_RULES if is_chat else _COMPLETION_RULES), *_RULES)

    def __call__(self, field: str) -> str:
        """The name in the request's JSON."""
        if (given := _given_name(self._given, field)) is not None:
            return given
        field = _MESSAGE.sub(self._place, field)
        for pattern, name in self._rules:
            field = re.sub(pattern, name, field)
        return _CALLED.sub(self._called, field)

    def _called(self, match: re.Match[str]) -> str:
        if match[1] not in self._custom:
            return match[0]
        # What is inside of them are the cell's.
        renamed = _CUSTOM_FIELDS.get(match[2])
        return f"{match[1]}.custom.{match[2]}{match[3]}" if renamed is None else f"{match[1]}.custom.{renamed}"

    def _place(self, match: re.Match[str]) -> str:
        index = int(match[1])
        return f"chat.messages[{self._places[index] if index < len(self._places) else index}]"


def _given_name(given: Mapping[str, str], field: str) -> str | None:
    """The name of a field whose beginning is given; None if none is."""
    for beginning, name in given.items():
        if field.startswith(beginning):
            return name + field.removeprefix(beginning)
    return None


class PlacedNames:
    """Names fields of a request whose messages and tools are not those of the cell one by one."""

    own_rules: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init__(self, message_places: Sequence[str], tool_places: Sequence[str], given: Mapping[str, str]) -> None:
        """`given` is as in `FieldNames`; the places are those of the cell's messages and tools."""
        self._places = {"messages": message_places, "tools": tool_places}
        self._given = given

    def __call__(self, field: str) -> str:
        """The name in the request's JSON."""
        if (given := _given_name(self._given, field)) is not None:
            return given
        if (found := _PLACED.match(field)) and int(found[2]) < len(self._places[found[1]]):
            place = self._places[found[1]][int(found[2])]
            # What became of a message has no fields of the same names there.
            field = place if found[1] == "messages" else place + field[found.end() :]
        for pattern, name in (*self.own_rules, *_RULES):
            field = re.sub(pattern, name, field)
        return field


class MessagesNames(PlacedNames):
    """Names fields for a request of Anthropic's Messages."""

    own_rules = _MESSAGES_RULES


class ResponsesNames(PlacedNames):
    """Names fields for a request of OpenAI's Responses."""

    own_rules = _RESPONSES_RULES

"""The tools of Anthropic's Messages, and which of them the model may or must call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

from pydantic import model_validator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.fields.fields import EchoedFields, Fields
from services.tokenizer.http.refusals import invalid_field

_MODES = {
    "none": tokenizer_pb2.TOOL_MODE_NONE,
    "auto": tokenizer_pb2.TOOL_MODE_AUTO,
    "any": tokenizer_pb2.TOOL_MODE_REQUIRED,
    "tool": tokenizer_pb2.TOOL_MODE_REQUIRED,
}
# The type of a tool that the client defines.
_CUSTOM = (None, "custom")


class MessagesTool(EchoedFields):
    """A tool: the client's own, or one of Anthropic's, which only their servers and models know."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    strict: bool | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is the client's own."""
        return self.type in _CUSTOM


class MessagesToolChoice(Fields):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "tool" and not self.name:
            raise invalid_field("tool_choice.name", "is required")
        return self


class OfferedTools:
    """The tools that the model is shown: the client's own, and of those deferred the ones that the chat has named."""

    def __init__(self) -> None:
        self.ignored: list[str] = []
        """Names of what has no effect."""
        # In their order, by numbers that are not reused, with the names of their places.
        self._tools: dict[int, tuple[MessagesTool, str]] = {}
        # Numbers by name; of tools of one name, which the cell refuses, the first.
        self._numbers: dict[str, int] = {}
        self._num_offered = 0

    @property
    def places(self) -> list[str]:
        """The name of each tool's place in the request."""
        return [place for _, place in self._tools.values()]

    def add(self, tools: Sequence[MessagesTool], named: frozenset[str]) -> None:
        """Offer the request's tools; `named` are those that the chat refers to.

        Raises:
            HttpError: a tool lacks what it needs.
        """
        for index, tool in enumerate(tools):
            place = f"tools[{index}]"
            if not tool.is_own:
                self.ignored.append(place)
            elif not tool.defer_loading or tool.name in named:
                self._offer(tool, place)

    def define(self, tool: MessagesTool, place: str) -> None:
        """Offer a tool of the client's that a message defines, instead of one of the same name.

        Raises:
            HttpError: the tool lacks what it needs.
        """
        if tool.name in self._numbers:
            del self._tools[self._numbers.pop(tool.name)]
        self._offer(tool, place)

    def add_to(self, chat: tokenizer_pb2.Chat, choice: MessagesToolChoice | None) -> None:
        """Write the tools and the choice.

        Raises:
            HttpError: the choice needs a tool that is not offered.
        """
        for tool, _ in self._tools.values():
            parameters = json.dumps(tool.input_schema, ensure_ascii=False) if tool.input_schema else ""
            chat.tools.add(name=tool.name, description=tool.description or "", parameters=parameters)
        if choice is not None:
            self._choose(chat, choice)
        # A grammar holds the arguments of calls that must be made.
        if chat.tool_mode != tokenizer_pb2.TOOL_MODE_REQUIRED:
            self.ignored += self._not_held()

    def _offer(self, tool: MessagesTool, place: str) -> None:
        if tool.name is None:
            raise invalid_field(f"{place}.name", "is required")
        if tool.input_schema is None:
            raise invalid_field(f"{place}.input_schema", "is required")
        self._tools[self._num_offered] = (tool, place)
        self._numbers.setdefault(tool.name, self._num_offered)
        self._num_offered += 1

    def _choose(self, chat: tokenizer_pb2.Chat, choice: MessagesToolChoice) -> None:
        if choice.type == "tool" and choice.name not in self._numbers:
            raise invalid_field("tool_choice.name", "must be the name of one of the tools that the client defines")
        if choice.type == "any" and not self._tools:
            raise invalid_field("tool_choice", "needs a tool that the client defines")
        chat.tool_mode = _MODES[choice.type]
        chat.tool_name = choice.name or "" if choice.type == "tool" else ""
        chat.single_tool_call = bool(choice.disable_parallel_tool_use)

    def _not_held(self) -> Iterator[str]:
        for tool, place in self._tools.values():
            if tool.strict:
                yield f"{place}.strict"

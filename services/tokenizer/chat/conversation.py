"""Conversations as templates know them, once everything in them has been checked."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from services.tokenizer.json.json_values import JsonObject


class ToolMode(enum.Enum):
    """Whether the model calls tools: if it wants to, never, or at least once."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made earlier in a conversation; `id` is empty when the client gave none."""

    id: str
    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `role` as templates know it. What a message does not have is empty."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str = ""
    parameters: JsonObject = field(default_factory=lambda: {"type": "object", "properties": {}})


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat request asks the model to continue.

    Invariants: there is a message; `tool_name` is empty or one of the tools', and then the mode is REQUIRED; with
    REQUIRED there is a tool. With NONE there may be tools, of which the model is told nothing.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_mode: ToolMode = ToolMode.AUTO
    tool_name: str = ""
    variables: JsonObject = field(default_factory=dict)

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model is told of, and whose calls are read out of its reply."""
        return () if self.tool_mode is ToolMode.NONE else self.tools

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools of which one must be called; none of them unless the mode is REQUIRED."""
        if self.tool_mode is not ToolMode.REQUIRED:
            return ()
        return tuple(tool for tool in self.tools if self.tool_name in ("", tool.name))

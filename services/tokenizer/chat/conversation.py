"""Checked conversations, as chat templates see them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from services.tokenizer.json.json_values import JsonObject

FUNCTIONS = "functions."
"""How the id of a call begins for Kimi K2, which goes on with the tool's name, a colon, and an index that counts the
conversation's calls."""


class ToolMode(enum.Enum):
    """Whether the model calls tools: as it chooses, never, or at least once."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call earlier in the conversation."""

    id: str
    """Empty if the client gave none."""
    name: str
    arguments: JsonObject | str
    """A text where some model wrote something else than an object."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Fields that the client left out are empty."""

    role: str
    """The role's name in templates."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str = ""
    parameters: JsonObject = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments, an object."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation to continue.

    Invariants: at least one message. `tool_name` is empty, or an allowed tool's and the mode is REQUIRED, which needs a
    tool. NONE hides the tools from the model.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_mode: ToolMode = ToolMode.AUTO
    tool_name: str = ""
    variables: JsonObject = field(default_factory=dict)
    allowed_names: frozenset[str] = frozenset()
    """The tools that may be called, all of them if empty."""
    one_call: bool = False
    """Whether a tool call ends the reply."""
    continues_final: bool = False
    """Whether the reply goes on with the last message, which is the assistant's and has content or reasoning."""
    opens_turn: bool = True
    """Whether the prompt ends with the beginning of a reply, unless the last message is continued."""

    def ending_with(self, text: str) -> Conversation:
        """The same, with `text` at the end of what is continued."""
        last = self.messages[-1]
        if last.content:
            last = replace(last, content=last.content + text)
        else:
            last = replace(last, reasoning=last.reasoning + text)
        return replace(self, messages=(*self.messages[:-1], last))

    @property
    def call_ids(self) -> tuple[str, ...]:
        """The ids of all calls in the messages, empty where the client gave none."""
        return tuple(call.id for message in self.messages for call in message.tool_calls)

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """Tools shown to the model, whose calls are parsed."""
        return () if self.tool_mode is ToolMode.NONE else self.tools

    @property
    def allowed_tools(self) -> tuple[Tool, ...]:
        """Tools shown to the model that may be called."""
        allowed = self.allowed_names
        return tuple(tool for tool in self.offered_tools if not allowed or tool.name in allowed)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Tools of which one must be called; empty unless the mode is REQUIRED."""
        if self.tool_mode is not ToolMode.REQUIRED:
            return ()
        return tuple(tool for tool in self.allowed_tools if self.tool_name in ("", tool.name))

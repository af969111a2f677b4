"""The tools of a chat, and which of them the model may or must call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import MAX_TOOLS
from services.tokenizer.http.fields.custom_tools import InputFormat, custom_function
from services.tokenizer.http.fields.fields import EchoedFields, Fields, Several
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.json.json_values import JsonObject

_MODES = {
    "none": tokenizer_pb2.TOOL_MODE_NONE,
    "auto": tokenizer_pb2.TOOL_MODE_AUTO,
    "required": tokenizer_pb2.TOOL_MODE_REQUIRED,
    # Anthropic's name for it.
    "any": tokenizer_pb2.TOOL_MODE_REQUIRED,
}


class Function(EchoedFields):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputGrammar(Fields):
    """A grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Fields):
    """The form of a custom tool's input, as chats have it."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        if self.type == "grammar" and self.grammar is None:
            raise ValueError("needs grammar")
        return self

    @property
    def form(self) -> InputFormat:
        """The form, as Responses have it."""
        if self.type == "text" or self.grammar is None:
            return InputFormat(type="text")
        return InputFormat(type="grammar", syntax=self.grammar.syntax, definition=self.grammar.definition)


class CustomTool(EchoedFields):
    """A tool whose input is a text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class ChatTool(EchoedFields):
    """A tool: OpenAI's with a `function` or a `custom`, or Anthropic's with an `input_schema`."""

    type: str | None = None
    function: Function | None = None
    custom: CustomTool | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    @property
    def is_custom(self) -> bool:
        """Whether its input is a text; Anthropic's tools that a client defines may have that type, too."""
        return self.type == "custom" and (self.custom is not None or self.input_schema is None)

    @property
    def definition(self) -> Function | None:
        """What it is in OpenAI's form; None if it is another kind of tool."""
        if self.function is not None and self.type in (None, "function"):
            return self.function
        if self.name is not None and self.input_schema is not None:
            return Function(name=self.name, description=self.description, parameters=self.input_schema)
        return None


class NamedFunction(EchoedFields):
    """A tool's name."""

    name: str


class NamedTool(EchoedFields):
    """A tool that is referred to."""

    type: Literal["function", "custom"] | None = None
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self._named is None:
            raise ValueError(f"needs {self.type or 'function'}")
        return self

    @property
    def tool_name(self) -> str:
        """Its name."""
        return "" if self._named is None else self._named.name

    @property
    def _named(self) -> NamedFunction | None:
        return self.custom if self.type == "custom" else self.function


class AllowedTools(Fields):
    """Tools that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[Several[NamedTool], Field(max_length=MAX_TOOLS)]


class ToolChoice(Fields):
    """Which tool is called; a choice given as a word has it as its type."""

    type: Literal["none", "auto", "required", "any", "function", "custom", "tool", "allowed_tools"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    disable_parallel_tool_use: bool | None = None
    """Anthropic's opposite of `parallel_tool_calls`."""

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if self.type in ("function", "custom", "tool") and not self.tool_name:
            raise invalid_field("tool_choice", "needs the tool's name")
        if self.type == "allowed_tools" and self.allowed_tools is None:
            raise invalid_field("tool_choice", "needs allowed_tools")
        return self

    @property
    def tool_name(self) -> str:
        """The one tool that must be called; empty if there is none."""
        if self.type == "function" and self.function is not None:
            return self.function.name
        if self.type == "custom":
            return "" if self.custom is None else self.custom.name
        return self.name or "" if self.type in ("function", "tool") else ""


def _read_word(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


WordOrChoice = Annotated[ToolChoice, BeforeValidator(_read_word, json_schema_input_type=str | ToolChoice)]


def choose_tools(chat: tokenizer_pb2.Chat, choice: ToolChoice | None) -> None:
    """Say which tools may or must be called.

    Raises:
        HttpError: none of them may be.
    """
    if choice is None:
        return
    chat.single_tool_call |= bool(choice.disable_parallel_tool_use)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        chat.tool_mode = _MODES[choice.allowed_tools.mode]
        if not choice.allowed_tools.tools:
            raise invalid_field("tool_choice.allowed_tools.tools", "must name at least one tool")
        chat.allowed_tool_names.extend(tool.tool_name for tool in choice.allowed_tools.tools)
    elif choice.tool_name:
        chat.tool_name = choice.tool_name
    else:
        chat.tool_mode = _MODES[choice.type]


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """What the model is offered."""

    custom: list[tuple[str, str]]
    """The name of each custom tool, and where it is in the request."""
    not_held: list[str]
    """The fields with a form that the model may not keep to."""


def add_tools(chat: tokenizer_pb2.Chat, tools: Sequence[ChatTool]) -> OfferedTools:
    """Add the tools. A grammar holds the forms of calls that must be made, as far as it can.

    Args:
        chat: What they are added to; it says which of them must be called.
        tools: Those of the request.

    Raises:
        HttpError: a tool is neither a function nor a custom tool.
    """
    is_held = chat.tool_mode == tokenizer_pb2.TOOL_MODE_REQUIRED or bool(chat.tool_name)
    offered = OfferedTools([], [])
    for index, tool in enumerate(tools):
        if tool.is_custom:
            _add_custom(chat, tool, f"tools[{index}]", offered, is_held=is_held)
            continue
        function = tool.definition
        if function is None:
            raise invalid_field(f"tools[{index}]", "only functions and custom tools can be called")
        _add(chat, function.name, function.description or "", function.parameters or {})
        if function.strict and not is_held:
            offered.not_held.append(f"tools[{index}].function.strict")
    return offered


def _add_custom(chat: tokenizer_pb2.Chat, tool: ChatTool, place: str, offered: OfferedTools, *, is_held: bool) -> None:
    if tool.custom is None:
        raise invalid_field(f"{place}.custom", "is required")
    custom = tool.custom
    form = None if custom.format is None else custom.format.form
    function = custom_function(custom.description, form, is_held=is_held)
    _add(chat, custom.name, function.description, function.parameters)
    offered.custom.append((custom.name, place))
    if not function.keeps_form:
        offered.not_held.append(f"{place}.custom.format")


def _add(chat: tokenizer_pb2.Chat, name: str, description: str, parameters: JsonObject) -> None:
    schema = json.dumps(parameters, ensure_ascii=False) if parameters else ""
    chat.tools.add(name=name, description=description, parameters=schema)

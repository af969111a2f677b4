"""The tools of a chat, and which of them the model may or must call."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import MAX_TOOLS
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.http.requests.fields import EchoedFields, Fields, Several
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


class ChatTool(EchoedFields):
    """A tool: OpenAI's with a `function`, or Anthropic's with an `input_schema`."""

    type: str | None = None
    function: Function | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

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

    type: Literal["function"] | None = None
    function: NamedFunction


class AllowedTools(Fields):
    """Tools that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[Several[NamedTool], Field(max_length=MAX_TOOLS)]


class ToolChoice(Fields):
    """Which tool is called; a choice given as a word has it as its type."""

    type: Literal["none", "auto", "required", "any", "function", "tool", "allowed_tools"]
    function: NamedFunction | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    disable_parallel_tool_use: bool | None = None
    """Anthropic's opposite of `parallel_tool_calls`."""

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if self.type in ("function", "tool") and not self.tool_name:
            raise invalid_field("tool_choice", "needs the function's name")
        if self.type == "allowed_tools" and self.allowed_tools is None:
            raise invalid_field("tool_choice", "needs allowed_tools")
        return self

    @property
    def tool_name(self) -> str:
        """The one tool that must be called; empty if there is none."""
        if self.type == "function" and self.function is not None:
            return self.function.name
        return self.name or "" if self.type in ("function", "tool") else ""


def _read_word(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


WordOrChoice = Annotated[ToolChoice, BeforeValidator(_read_word, json_schema_input_type=str | ToolChoice)]


def add_tools(chat: tokenizer_pb2.Chat, tools: list[ChatTool], choice: ToolChoice | None) -> list[str]:
    """Add the tools and the choice; returns the names of the fields that have no effect.

    Raises:
        HttpError: a tool is no function.
    """
    not_held = []
    for index, tool in enumerate(tools):
        function = tool.definition
        if function is None:
            raise invalid_field(f"tools[{index}]", "only functions can be called")
        chat.tools.add(
            name=function.name,
            description=function.description or "",
            parameters=_schema(function.parameters or {}),
        )
        if function.strict:
            not_held.append(f"tools[{index}].function.strict")
    if choice is None:
        return not_held
    chat.single_tool_call |= bool(choice.disable_parallel_tool_use)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        chat.tool_mode = _MODES[choice.allowed_tools.mode]
        if not choice.allowed_tools.tools:
            raise invalid_field("tool_choice.allowed_tools.tools", "must name at least one tool")
        chat.allowed_tool_names.extend(tool.function.name for tool in choice.allowed_tools.tools)
    elif choice.tool_name:
        chat.tool_name = choice.tool_name
        return []
    else:
        chat.tool_mode = _MODES[choice.type]
    # A grammar holds the arguments of calls that must be made.
    return [] if chat.tool_mode == tokenizer_pb2.TOOL_MODE_REQUIRED else not_held


def _schema(parameters: JsonObject) -> str:
    return json.dumps(parameters, ensure_ascii=False) if parameters else ""

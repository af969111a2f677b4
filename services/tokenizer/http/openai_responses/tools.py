"""The tools of a request, and which of them the model may or must call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import MAX_TOOLS
from services.tokenizer.http.fields.custom_tools import InputFormat, custom_function
from services.tokenizer.http.fields.fields import EchoedFields, Several
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.json.json_values import JsonObject

_MODES = {
    "none": tokenizer_pb2.TOOL_MODE_NONE,
    "auto": tokenizer_pb2.TOOL_MODE_AUTO,
    "required": tokenizer_pb2.TOOL_MODE_REQUIRED,
}
_FUNCTION, _CUSTOM, _NAMESPACE = "function", "custom", "namespace"
# The namespace that OpenAI's models have all functions in.
_PLAIN_NAMESPACE = "functions"
_MAX_NAME_LENGTH = 64
_DIGEST_LENGTH = 8
# Types of tools that OpenAI's service or a client runs without a function; others may be a client's text.
_HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
)


class ResponseTool(EchoedFields):
    """A tool: a function, a custom tool, a namespace of both, or one of another type, which is skipped."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None
    tools: Several[ResponseTool] | None = None


class NamedTool(EchoedFields):
    """A tool that is referred to."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ResponseToolChoice(NamedTool):
    """Which tool is called; a choice given as a word has it as its type."""

    mode: Literal["auto", "required"] | None = None
    tools: Annotated[Several[NamedTool], Field(max_length=MAX_TOOLS)] | None = None


def _read_word(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


WordOrChoice = Annotated[
    ResponseToolChoice, BeforeValidator(_read_word, json_schema_input_type=str | ResponseToolChoice)
]


@dataclass(frozen=True, slots=True)
class ToolKind:
    """What the client calls a function that the model is offered."""

    name: str
    namespace: str | None
    is_custom: bool


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function as the model is told of it."""

    name: str
    description: str
    parameters: str
    place: str
    """Where it is in the request."""
    list_number: int
    """Which list of tools it is in."""


@dataclass(slots=True)
class OfferedTools:
    """What the model is offered."""

    kinds: dict[str, ToolKind] = field(default_factory=dict)
    """Kinds by the functions' names."""
    functions: dict[int, OfferedFunction] = field(default_factory=dict)
    """In their order, by ascending numbers."""
    first_numbers: dict[str, int] = field(default_factory=dict)
    """Numbers by the functions' names; of those of one name in one list, which the cell refuses, the first."""
    described: list[JsonObject] = field(default_factory=list)
    """The tools that were not skipped, as the client gave them."""
    not_held: list[str] = field(default_factory=list)
    """The fields with a form that the model may not keep to."""
    skipped: list[str] = field(default_factory=list)
    """Where tools of other types are."""
    skipped_types: set[str] = field(default_factory=set)
    """Their types, without a client's text."""

    @property
    def places(self) -> list[str]:
        """Where each function is in the request."""
        return [function.place for function in self.functions.values()]

    def add(self, function: OfferedFunction) -> None:
        """Offer a function, instead of one of its name of an earlier list."""
        first = self.first_numbers.get(function.name)
        if first is not None and self.functions[first].list_number < function.list_number:
            del self.functions[first], self.first_numbers[function.name]
        number = next(reversed(self.functions), -1) + 1
        self.functions[number] = function
        self.first_numbers.setdefault(function.name, number)


def function_name(name: str, namespace: str | None) -> str:
    """The name that the model knows a tool by."""
    if namespace in (None, "", _PLAIN_NAMESPACE):
        return name
    joined = f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"
    if len(joined) <= _MAX_NAME_LENGTH:
        return joined
    digest = hashlib.sha256(joined.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{joined[: _MAX_NAME_LENGTH - _DIGEST_LENGTH - 1]}_{digest}"


def add_tools(
    chat: tokenizer_pb2.Chat, lists: Sequence[tuple[str, Sequence[ResponseTool], Sequence[JsonObject]]]
) -> OfferedTools:
    """Add the tools. A grammar holds the forms of calls that must be made, as far as it can.

    A tool takes the place of one of the same name in an earlier list.

    Args:
        chat: What they are added to; it says which of them must be called.
        lists: Lists of tools: where each is in the request, its tools, and what they were read from.

    Raises:
        HttpError: a tool has no name.
    """
    offered = OfferedTools()
    is_held = chat.tool_mode == tokenizer_pb2.TOOL_MODE_REQUIRED or bool(chat.tool_name)
    for list_number, (place, tools, values) in enumerate(lists):
        for index, (tool, value) in enumerate(zip(tools, values, strict=True)):
            at = f"{place}[{index}]"
            if tool.type in (_FUNCTION, _CUSTOM, _NAMESPACE):
                offered.described.append(value)
            for inner, inner_at, namespace in _tools_of(tool, at):
                if inner.type in (_FUNCTION, _CUSTOM):
                    name = _given(inner.name, f"{inner_at}.name")
                    kind = ToolKind(name, namespace, is_custom=inner.type == _CUSTOM)
                    _add_function(offered, inner, kind, (inner_at, list_number), is_held=is_held)
                else:
                    offered.skipped.append(inner_at)
                    offered.skipped_types.add(next((kind for kind in _HOSTED if inner.type.startswith(kind)), "other"))
    for function in offered.functions.values():
        chat.tools.add(name=function.name, description=function.description, parameters=function.parameters)
    return offered


def _tools_of(tool: ResponseTool, at: str) -> Iterator[tuple[ResponseTool, str, str | None]]:
    """The tools in a namespace, or the tool alone: each, where it is in the request, and its namespace."""
    if tool.type != _NAMESPACE:
        yield tool, at, None
        return
    for index, inner in enumerate(tool.tools or ()):
        yield inner, f"{at}.tools[{index}]", _given(tool.name, f"{at}.name")


def _add_function(
    offered: OfferedTools, tool: ResponseTool, kind: ToolKind, at: tuple[str, int], *, is_held: bool
) -> None:
    """Offer a tool; `at` is where it is in the request, and the number of its list."""
    place, list_number = at
    name = function_name(kind.name, kind.namespace)
    description, parameters = tool.description or "", tool.parameters or {}
    if kind.is_custom:
        function = custom_function(tool.description, tool.format, is_held=is_held)
        description, parameters = function.description, function.parameters
        if not function.keeps_form:
            offered.not_held.append(f"{place}.format")
    elif tool.strict and not is_held:
        offered.not_held.append(f"{place}.strict")
    schema = json.dumps(parameters, ensure_ascii=False) if parameters else ""
    offered.kinds[name] = kind
    offered.add(OfferedFunction(name, description, schema, place, list_number))


def choose_tools(chat: tokenizer_pb2.Chat, choice: ResponseToolChoice | None) -> None:
    """Say which tools may or must be called.

    Raises:
        HttpError: a tool of another type must be called.
    """
    if choice is None:
        return
    if choice.type in _MODES:
        chat.tool_mode = _MODES[choice.type]
    elif choice.type in (_FUNCTION, _CUSTOM):
        chat.tool_name = function_name(_given(choice.name, "tool_choice.name"), choice.namespace)
    elif choice.type == "allowed_tools":
        chat.tool_mode = _MODES[_given(choice.mode, "tool_choice.mode")]
        chat.allowed_tool_names.extend(_allowed_names(choice.tools or ()))
        if not chat.allowed_tool_names:
            raise invalid_field("tool_choice.tools", "must have a function or a custom tool")
    else:
        raise invalid_field("tool_choice", "only functions and custom tools can be called")


def _allowed_names(tools: Sequence[NamedTool]) -> Iterator[str]:
    for index, tool in enumerate(tools):
        if tool.type in (_FUNCTION, _CUSTOM):
            yield function_name(_given(tool.name, f"tool_choice.tools[{index}].name"), tool.namespace)


def _given(text: str | None, place: str) -> str:
    if not text:
        raise invalid_field(place, "is required")
    return text

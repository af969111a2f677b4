"""Tools as TypeScript, which the templates of Kimi K2.5 and later get as `tools_ts_str` from code beside the model.

That code never runs here; its prompts are made without it, byte for byte.

Source: tool_declaration_ts.py, and `apply_chat_template` in tokenization_kimi.py, of moonshotai/Kimi-K2.5.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.tokenizer.json.json_values import JsonValue

VARIABLE = "tools_ts_str"

_INDENT = "  "
_SELF = "parameters"
"""The name of a tool's arguments, where their schema refers to itself."""
_DEFINITIONS = "#/$defs/"
# Types as a list of types has them.
_NAMED_TYPES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
# The keywords that are told in a comment, by a schema's type.
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


def sorted_tools(tools: Sequence[JsonValue]) -> list[JsonValue]:
    """The tools with the members of all objects in the order of their names."""
    return [_sorted(tool) for tool in tools]


def declared_tools(tools: Iterable[JsonValue]) -> str | None:
    """The declaration of tools whose members are sorted.

    None if a schema has what the declaration has no form for, such as `oneOf`: then the template writes JSON.
    """
    try:
        functions = [_Function(tool["function"]).text() for tool in tools if isinstance(tool, dict)]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return "\n".join(["# Tools\n\n## functions\nnamespace functions {", *functions, "}\n"]) if functions else None


def _sorted(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {name: _sorted(member) for name, member in sorted(value.items())}
    return [_sorted(each) for each in value] if isinstance(value, list) else value


class _Function:
    """One tool. Its methods raise AttributeError, KeyError, TypeError or ValueError for what has no form."""

    def __init__(self, function: Any) -> None:
        self._function: Mapping[str, Any] = function
        self._definitions: dict[str, Any] = {}
        self._refers_to_itself = False

    def text(self) -> str:
        name, description = self._function["name"], self._function["description"]
        schema = self._function.get("parameters") or {}
        arguments = self._object(schema, "")
        lines = []
        if is_recursive := self._refers_to_itself:
            fields = self._fields(schema, _INDENT).values()
            lines.append(f"interface {_SELF} {_braces(fields)}")
        # The definitions of the arguments; what they define themselves is left out.
        for defined, of_name in list(self._definitions.items()):
            if about := of_name.get("description", ""):
                lines.append(_comment(about))
            lines.append(f"interface {defined} {self._type(of_name, '')}")
        if description:
            lines.append(_comment(description))
        lines.append(f"type {name} = (_: {_SELF if is_recursive else arguments}) => any;")
        return "\n".join(lines)

    def _type(self, schema: Any, indent: str) -> str:  # noqa: PLR0911 - one for each kind of schema
        if isinstance(schema, bool) or schema == {}:
            return "null" if schema is False else "any"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join([self._type(each, indent) for each in schema["anyOf"]])
        if "enum" in schema:
            return _choices(schema)
        kind = schema["type"]
        if isinstance(kind, list):
            return " | ".join([_NAMED_TYPES[each] for each in kind])
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        return "number" if kind == "integer" else str(kind)

    def _reference(self, target: str) -> str:
        if target == "#":
            self._refers_to_itself = True
            return _SELF
        name = target.rsplit("/", maxsplit=1)[-1]
        if not target.startswith(_DEFINITIONS) or not isinstance(self._definitions[name], dict):
            raise ValueError(target)
        return name

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        self._definitions |= schema.get("$defs") or {}
        others = schema.get("additionalProperties")
        # In this order, since what is defined inside counts after it.
        of_others = None if others is None else self._type(others, indent + _INDENT)
        fields = self._fields(schema, indent + _INDENT)
        required = schema.get("required", [])
        lines = [fields[name] for name in sorted(fields, key=lambda name: (name not in required, name))]
        if of_others is not None:
            lines.append(f"{indent}{_INDENT}[k: string]: {'never' if others is False else of_others}")
        return _braces(lines, indent) if lines else "{}"

    def _fields(self, schema: Mapping[str, Any], indent: str) -> dict[str, str]:
        """Each property's lines, by its name and in the schema's order."""
        required = set(schema.get("required", []))
        return {
            name: f"{_comments(each, indent)}{_default(each, indent)}{indent}{name}{'' if name in required else '?'}: "
            f"{self._type(each, indent)}"
            for name, each in schema.get("properties", {}).items()
        }

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items = schema.get("items") or True
        comments = _comments(items, indent + _INDENT)
        if not comments:
            return f"Array<{self._type(items, indent)}>"
        return f"Array<\n{comments}{indent}{_INDENT}{self._type(items, indent + _INDENT)}\n{indent}>"


def _braces(lines: Iterable[str], indent: str = "") -> str:
    text = ",\n".join(lines)
    return f"{{\n{text}\n{indent}}}" if text else "{}"


def _choices(schema: Mapping[str, Any]) -> str:
    """The values of an `enum`, which must be of its type; null always may be."""
    values = schema["enum"]
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if len(kinds) > 2 or (len(kinds) == 2 and "null" not in kinds):
            raise ValueError(kinds)
        kind = next((each for each in kinds if each != "null"), "null")
        python_type = _PYTHON_TYPES.get(kind, object)
        if not all(each is None or isinstance(each, python_type) for each in values):
            raise ValueError(kind)
    return " | ".join([f'"{each}"' if isinstance(each, str) else str(each) for each in values])


def _comments(schema: Any, indent: str) -> str:
    """The lines above a type: its description, and what constrains it."""
    if isinstance(schema, bool):
        return ""
    description = schema.get("description", "")
    lines = [_comment(description, indent)] if description else []
    is_plain = not {"$ref", "anyOf", "enum"} & schema.keys() and isinstance(schema.get("type"), str)
    names = _CONSTRAINTS.get(schema["type"], ()) if is_plain else ()
    if told := ", ".join([f"{name}: {schema[name]}" for name in names if name in schema]):
        lines.append(f"{indent}// {told}")
    return "".join([f"{line}\n" for line in lines])


def _comment(text: str, indent: str = "") -> str:
    return "\n".join([f"{indent}// {line}" if line else "" for line in text.split("\n")])


def _default(schema: Any, indent: str) -> str:
    value = schema.get("default") if isinstance(schema, dict) else None
    if value is None:
        return ""
    text = repr(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)
    return f"{indent}// Default: {text}\n"

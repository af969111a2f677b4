"""Calls whose arguments are written one by one, each as plain text if its schema says string, otherwise as JSON.

Where a schema allows both, a value is JSON if that is of another type that is allowed.
"""

from __future__ import annotations

import json

from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.schema_types import type_of, types_of
from services.tokenizer.replies.json_repair import repaired
from services.tokenizer.replies.parser import ReplyParser
from services.tokenizer.replies.reader import Reading
from services.tokenizer.text.markers import Markers

TEXT = frozenset({"string"})


class UntypedCallParser(ReplyParser):
    """The base of their parsers."""

    def _put_key(self, key: str, *, is_first: bool) -> None:
        """Begin an argument."""
        self._put_arguments(f"{'{' if is_first else ', '}{json_text(key)}: ")

    def _end_object(self, end: str, *, is_empty: bool) -> None:
        """End the arguments, unless the reply has ended before their `end`."""
        if end:
            self._put_arguments("{}" if is_empty else "}")

    def _read_value(self, ends: Markers, types: frozenset[str] | None) -> Reading[bool]:
        """Read a value and the marker after it; False if the reply ends first.

        A value that can only be text is passed on as it arrives; `types` None means that nothing is known of it.
        """
        if types == TEXT:
            self._put_arguments('"')
            end = yield from self._pass_until(ends, lambda text: self._put_arguments(json_text(text)[1:-1]))
            self._put_arguments('"' if end else "")
        else:
            pieces: list[str] = []
            end = yield from self._pass_until(ends, pieces.append)
            self._put_arguments(_json_of("".join(pieces), types))
        self._reader.accept()
        return end is not None

    def _types(self, tool_name: str, key: str) -> frozenset[str] | None:
        """The types of an argument; None if nothing is known of them."""
        tool = self._tools.get(tool_name)
        properties = tool.parameters.get("properties") if tool else None
        schema = properties.get(key) if isinstance(properties, dict) else None
        return None if tool is None else types_of(schema, tool.parameters)


def takes_text(schema: JsonValue, root: JsonObject) -> bool:
    """Whether a schema, which is part of `root`, only allows strings."""
    return types_of(schema, root) == TEXT


def json_text(value: JsonValue) -> str:
    """A value in the style of chat templates."""
    return json.dumps(value, ensure_ascii=False)


def _json_of(text: str, types: frozenset[str] | None) -> str:
    """A value as JSON, with the model's own digits: text where that is a type and what it spells is none."""
    value = repaired(text.strip())
    try:
        kind = type_of(json.loads(value))
    except (ValueError, RecursionError):
        return json_text(text)
    is_other = types is not None and kind not in types and not (kind == "integer" and "number" in types)
    return json_text(text) if is_other and types is not None and "string" in types else value

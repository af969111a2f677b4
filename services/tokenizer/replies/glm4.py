"""GLM-4.5 and later: `<think>` first, then calls as a name and pairs of `<arg_key>` and `<arg_value>`.

A value is plain text if its schema says string, otherwise JSON; where its schema allows both, it is JSON if that is of
another type that is allowed.

Source: the chat template of zai-org/GLM-4.5.
"""

from __future__ import annotations

import json

from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.schema_types import type_of, types_of
from services.tokenizer.replies.json_repair import repaired
from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.parser import MAX_NAME_LENGTH, ReplyParser
from services.tokenizer.replies.reader import SPACE, Reading
from services.tokenizer.text.markers import NO_MARKERS, Markers

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
KEY_BEGIN, KEY_END = "<arg_key>", "</arg_key>"
VALUE_BEGIN, VALUE_END = "<arg_value>", "</arg_value>"

_TEXT = frozenset({"string"})
_OPENINGS = Markers(CALL_BEGIN, "\n" + CALL_BEGIN)
_NAME_ENDS = Markers(KEY_BEGIN, CALL_END)
_KEY_ENDS = Markers(KEY_END)
_VALUE_ENDS = Markers(VALUE_END)


class Glm4Parser(ReplyParser):
    """See the module docstring."""

    markup = frozenset(
        {"<think>", "</think>", CALL_BEGIN, CALL_END, KEY_BEGIN, KEY_END, VALUE_BEGIN, VALUE_END},
    )
    call_openings = _OPENINGS
    think_markup = THINK_MARKUP["glm4"]

    def _read(self) -> Reading[None]:
        yield from self._read_reasoning(self.think_markup, self._setting.opening)
        yield from self._read_text(_OPENINGS if self._tools else NO_MARKERS, self._read_call)

    def _read_call(self, _: str) -> Reading[None]:
        reader = self._reader
        name, end = yield from reader.until(_NAME_ENDS, max_length=MAX_NAME_LENGTH)
        name = name.strip()
        self._begin_call(name)
        arguments = "{"
        while end == KEY_BEGIN:
            key, _ = yield from reader.until(_KEY_ENDS, max_length=MAX_NAME_LENGTH)
            yield from reader.skip(SPACE)
            yield from reader.expect(VALUE_BEGIN)
            self._put_arguments(f"{arguments}{_json(key.strip())}: ")
            if not (yield from self._read_value(self._types(name, key.strip()))):
                return
            arguments = ", "
            end = yield from self._close(KEY_BEGIN, CALL_END)
        if end:
            self._put_arguments("{}" if arguments == "{" else "}")
        yield from reader.skip("\n")

    def _read_value(self, types: frozenset[str] | None) -> Reading[bool]:
        """False if the reply ends first. A value that can only be text is passed on as it arrives."""
        if types == _TEXT:
            self._put_arguments('"')
            end = yield from self._pass_until(_VALUE_ENDS, lambda text: self._put_arguments(_json(text)[1:-1]))
            self._put_arguments('"' if end else "")
        else:
            pieces: list[str] = []
            end = yield from self._pass_until(_VALUE_ENDS, pieces.append)
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
    return types_of(schema, root) == _TEXT


def _json(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_of(text: str, types: frozenset[str] | None) -> str:
    """A value as JSON, with the model's own digits: text where that is a type and what it spells is none."""
    value = repaired(text.strip())
    try:
        kind = type_of(json.loads(value))
    except (ValueError, RecursionError):
        return _json(text)
    is_other = types is not None and kind not in types and not (kind == "integer" and "number" in types)
    return _json(text) if is_other and types is not None and "string" in types else value

"""Calls whose arguments are written one by one, each as plain text if its schema says string, otherwise as JSON.

Where a schema allows both, a value is JSON if that is of another type that is allowed.
"""

from __future__ import annotations

import json

from services.tokenizer.json.json_values import JsonValue
from services.tokenizer.json.schema_types import type_of
from services.tokenizer.replies.argument_forms import ArgumentForms
from services.tokenizer.replies.json_calls import JsonCallParser
from services.tokenizer.replies.json_reading import read_value
from services.tokenizer.replies.json_repair import repaired
from services.tokenizer.replies.parser import ReplySetting
from services.tokenizer.replies.reader import SPACE, Reading, UnparsableError
from services.tokenizer.text.markers import Markers


class UntypedCallParser(JsonCallParser):
    """The base of their parsers."""

    def __init__(self, setting: ReplySetting) -> None:
        super().__init__(setting)
        self._forms: dict[str, ArgumentForms] = {}

    def _put_key(self, key: str, *, is_first: bool) -> None:
        """Begin an argument."""
        self._put_arguments(f"{'{' if is_first else ', '}{json_text(key)}: ")

    def _end_object(self, end: str, *, is_empty: bool) -> None:
        """End the arguments, unless the reply was cut off before their `end`."""
        if end or not self.was_cut:
            self._put_arguments("{}" if is_empty else "}")

    def _read_value(self, ends: Markers, types: frozenset[str] | None, *, is_text: bool) -> Reading[bool]:
        """Read a value and the marker after it; False if the reply is cut off first.

        Text is passed on as it arrives; `types` are those of the argument, None if nothing is known of them.
        """
        self._reader.accept()
        if is_text:
            self._put_arguments('"')
            end = yield from self._pass_until(ends, lambda text: self._put_arguments(json_text(text)[1:-1]))
            self._put_arguments('"' if end or not self.was_cut else "")
        else:
            value, end = yield from self._read_other(ends, types)
            self._put_arguments(value)
        self._reader.accept()
        return bool(end) or not self.was_cut

    def _read_other(self, ends: Markers, types: frozenset[str] | None) -> Reading[tuple[str, str | None]]:
        """Read JSON and the marker after it, which may also be in the JSON's strings; or text up to the first marker.

        JSON of more than `MAX_HELD_LENGTH` characters ends at the first marker too. Returns the value as JSON.
        """
        reader = self._reader
        try:
            yield from reader.skip(SPACE)
            yield from read_value(reader)
            yield from reader.skip(SPACE)
            value = _json_of(reader.read_since(0), types)
            _, end = yield from reader.until(ends, max_length=0)
        except UnparsableError:
            value = None
        if value is not None:
            return value, end
        reader.rewind()
        pieces: list[str] = []
        end_found = yield from self._pass_until(ends, pieces.append)
        text = "".join(pieces)
        return _json_of(text, types) or json_text(text), end_found

    def _forms_of(self, tool_name: str) -> ArgumentForms:
        if tool_name not in self._forms:
            self._forms[tool_name] = ArgumentForms(self._tools[tool_name].parameters)
        return self._forms[tool_name]


def json_text(value: JsonValue) -> str:
    """A value in the style of chat templates."""
    return json.dumps(value, ensure_ascii=False)


def _json_of(text: str, types: frozenset[str] | None) -> str | None:
    """What a value spells as JSON, with the model's own digits; None if it is text.

    It is text where that is a type and what it spells is none. Where text is none, Python's spelling counts too.
    """
    may_be_text = types is None or "string" in types
    for reads_python in (False,) if may_be_text else (False, True):
        value = repaired(text.strip(), reads_python=reads_python)
        try:
            kind = type_of(json.loads(value))
        except (ValueError, RecursionError):
            continue
        return None if may_be_text and types is not None and kind not in types else value
    return None

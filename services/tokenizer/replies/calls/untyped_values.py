"""Calls whose arguments are written one by one, each as plain text if its schema says string, otherwise as JSON.

Where a schema allows both, a value is JSON if that is of another type that is allowed.

A model may omit what closes a value. Text ends then at another tag, although it may also quote such tags, if the tag
- begins an argument that the tool names and the call does not have yet, or
- ends the call, and another call or the end of the reply follows, or no closing tag of a value comes after that.
What the text itself opens it closes, too. Until it is certain, at most `MAX_HELD_LENGTH` characters are held back;
after these, the tag was a quotation.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable
from typing import ClassVar

from services.tokenizer.json.json_values import JsonValue
from services.tokenizer.json.schema_types import type_of
from services.tokenizer.replies.calls.argument_forms import ArgumentForms
from services.tokenizer.replies.calls.json_calls import JsonCallParser
from services.tokenizer.replies.calls.value_tags import ValueTags
from services.tokenizer.replies.json_reading import read_value
from services.tokenizer.replies.json_repair import repaired
from services.tokenizer.replies.parser import MAX_HELD_LENGTH, ReplySetting
from services.tokenizer.replies.reader import SPACE, Reading, UnparsableError


class UntypedCallParser(JsonCallParser):
    """The base of their parsers."""

    tags: ClassVar[ValueTags]

    def __init__(self, setting: ReplySetting) -> None:
        super().__init__(setting)
        self._forms: dict[str, ArgumentForms] = {}
        # The arguments that the call has so far.
        self._keys: set[str] = set()

    @abc.abstractmethod
    def _read_key(self) -> Reading[str]:
        """Read the rest of an argument's tag, up to its value.

        Raises:
            UnparsableError: it is none.
        """

    def _put_key(self, key: str, *, is_first: bool) -> None:
        """Begin an argument."""
        self._keys = {key} if is_first else self._keys | {key}
        self._put_arguments(f"{'{' if is_first else ', '}{json_text(key)}: ")

    def _end_object(self, end: str, *, is_empty: bool) -> None:
        """End the arguments, unless the reply was cut off before their `end`."""
        if end or not self.was_cut:
            self._put_arguments("{}" if is_empty else "}")

    def _read_value(self, name: str, key: str, *, is_text: bool) -> Reading[bool]:
        """Read the value of the tool's argument `key` and the tag that closes it; False if the reply is cut off first.

        Text is passed on as it arrives.
        """
        self._reader.accept()
        if is_text:
            self._put_arguments('"')
            has_end = yield from self._pass_value(name, lambda text: self._put_arguments(json_text(text)[1:-1]))
            self._put_arguments('"' if has_end or not self.was_cut else "")
        else:
            value, has_end = yield from self._read_other(name, self._forms_of(name).types(key))
            self._put_arguments(value)
        self._reader.accept()
        return has_end or not self.was_cut

    def _read_other(self, name: str, types: frozenset[str] | None) -> Reading[tuple[str, bool]]:
        """Read JSON and the tag after it, which may also be in the JSON's strings; or text up to the first tag.

        JSON of more than `MAX_HELD_LENGTH` characters ends at the first tag too. Returns the value as JSON, and whether
        it ended before the reply.
        """
        reader = self._reader
        try:
            yield from reader.skip(SPACE)
            yield from read_value(reader)
            yield from reader.skip(SPACE)
            value = _json_of(reader.read_since(0), types)
            if not (yield from self._ends_json(types)):
                yield from reader.until(self.tags.ends, max_length=0)
        except UnparsableError:
            value = None
        if value is not None:
            return value, True
        reader.rewind()
        pieces: list[str] = []
        has_end = yield from self._pass_value(name, pieces.append)
        text = "".join(pieces)
        return _json_of(text, types) or json_text(text), has_end

    def _ends_json(self, types: frozenset[str] | None) -> Reading[bool]:
        """Whether another tag ends a value that is no text."""
        if self._setting.has_grammar or may_be_text(types):
            return False
        return (yield from self._reader.is_at(self.tags.others))

    def _pass_value(self, name: str, put: Callable[[str], None]) -> Reading[bool]:
        """Pass text on up to the tag that closes it, which is read, or to another one that ends it, which is not.

        False if the reply ends first.
        """
        reader, tags = self._reader, self.tags
        markers = tags.ends if self._setting.has_grammar else tags.every
        num_open = 0
        while (found := (yield from self._pass_until(markers, put))) is not None:
            tag = found.removeprefix("\n")
            if tags.closes(found):
                return True
            if tag in tags.openings:
                num_open += 1
            elif num_open:
                num_open -= tag in tags.closings
            elif tag == tags.argument:
                if (yield from self._begins_argument(name, begins_line=tag != found)):
                    reader.rewind()
                    return True
            elif (yield from self._pass_closing(put)):
                return True
            put(reader.accept())
        return False

    def _begins_argument(self, name: str, *, begins_line: bool) -> Reading[bool]:
        """Whether a tag of which the beginning has been read begins an argument that is not there yet."""
        reader = self._reader
        num_before = reader.num_read
        try:
            key = yield from self._read_key()
        except UnparsableError:
            return False
        is_apart = begins_line or not self.tags.has_lines or reader.read_since(num_before).endswith("\n")
        reader.position = reader.mark + num_before
        return is_apart and key not in self._keys and self._forms_of(name).is_named(key)

    def _pass_closing(self, put: Callable[[str], None]) -> Reading[bool]:
        """Decide whether a tag that has been read ends the value: True after the value's end.

        Where it does not, what is certain to be text is read.
        """
        reader, tags = self._reader, self.tags
        if not (yield from self._is_before_call()):
            max_length = max(0, MAX_HELD_LENGTH - reader.num_read)
            try:
                _, end = yield from reader.until_or_end(tags.ends, max_length=max_length)
            except UnparsableError:
                reader.position += max_length
                return False
            if end:
                reader.position -= len(end)
                put(reader.accept())
                reader.position += len(end)
                return True
            if self.was_cut:
                # What would have come after is not known.
                return False
        reader.rewind()
        return True

    def _is_before_call(self) -> Reading[bool]:
        """Whether a call begins after closing tags, which are skipped as far as there are any."""
        reader = self._reader
        try:
            yield from reader.skip(SPACE)
            while (yield from reader.one_of(*self.tags.closings)):
                yield from reader.skip(SPACE)
        except UnparsableError:
            return False
        return (yield from reader.is_at(self.tags.calls))

    def _forms_of(self, tool_name: str) -> ArgumentForms:
        if tool_name not in self._forms:
            self._forms[tool_name] = ArgumentForms(self._tools[tool_name].parameters)
        return self._forms[tool_name]


def may_be_text(types: frozenset[str] | None) -> bool:
    """Whether a value of one of these types may be a string."""
    return types is None or "string" in types


def json_text(value: JsonValue) -> str:
    """A value in the style of chat templates."""
    return json.dumps(value, ensure_ascii=False)


def _json_of(text: str, types: frozenset[str] | None) -> str | None:
    """What a value spells as JSON, with the model's own digits; None if it is text.

    It is text where that is a type and what it spells is none. Where text is none, Python's spelling counts too.
    """
    is_uncertain = may_be_text(types)
    for reads_python in (False,) if is_uncertain else (False, True):
        value = repaired(text.strip(), reads_python=reads_python)
        try:
            kind = type_of(json.loads(value))
        except (ValueError, RecursionError):
            continue
        return None if is_uncertain and types is not None and kind not in types else value
    return None

"""Llama 3: calls as JSON objects with "name" and "parameters", bare or after `<|python_tag|>`, separated by `;`.

Source: Meta's "Llama 3.1 model card and prompt formats", "JSON based tool calling".
"""

from __future__ import annotations

from services.tokenizer.replies.json_calls import JsonCallParser
from services.tokenizer.replies.reader import SPACE, Reading
from services.tokenizer.text.markers import NO_MARKERS, Markers

_PYTHON_TAG = "<|python_tag|>"
_OPENINGS = Markers("{", _PYTHON_TAG)


class Llama3JsonParser(JsonCallParser):
    """A bare object is a call only if it names an offered tool."""

    markup = frozenset({_PYTHON_TAG})

    def _read(self) -> Reading[None]:
        yield from self._read_text(_OPENINGS if self._tools else NO_MARKERS, self._read_calls)

    def _read_calls(self, opening: str) -> Reading[None]:
        reader = self._reader
        if opening == "{":
            reader.rewind()
        else:
            yield from reader.skip(SPACE)
        while True:
            yield from self._read_json_call(only_offered=opening == "{")
            yield from self._skip_after_call(SPACE + ";")
            next_character = yield from reader.peek()
            if next_character and next_character != "{":
                reader.rewind()
            if next_character != "{":
                return

"""Llama 3: calls as JSON objects with "name" and "parameters", bare or after `<|python_tag|>`, separated by `;`.

Models also write a list of them, and a code fence round a whole reply.

Source: Meta's "Llama 3.1 model card and prompt formats", "JSON based tool calling".
"""

from __future__ import annotations

from services.tokenizer.replies.calls.json_calls import JsonCallParser
from services.tokenizer.replies.calls.written_arguments import FENCE
from services.tokenizer.replies.reader import SPACE, Reading, UnparsableError
from services.tokenizer.text.markers import NO_MARKERS, Markers

_PYTHON_TAG = "<|python_tag|>"
_OPENINGS = Markers("{", "[", _PYTHON_TAG)


class Llama3JsonParser(JsonCallParser):
    """A bare object is a call only if it names an offered tool."""

    markup = frozenset({_PYTHON_TAG})

    def _read(self) -> Reading[None]:
        if self._tools and not self._setting.has_form:
            yield from self._try("", self._read_fenced_calls)
        yield from self._read_text(_OPENINGS if self._tools else NO_MARKERS, self._read_calls)

    def _read_calls(self, opening: str) -> Reading[None]:
        reader = self._reader
        if opening != _PYTHON_TAG:
            reader.rewind()
        yield from self._read_json_calls(is_bare=opening != _PYTHON_TAG)

    def _read_fenced_calls(self, _: str) -> Reading[None]:
        yield from self._reader.skip(SPACE)
        if (yield from self._reader.peek()) != FENCE[0]:
            raise UnparsableError
        yield from self._read_json_calls(is_bare=True)
        yield from self._reader.skip(SPACE)
        self._reader.accept()

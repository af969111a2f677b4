"""Tool calls as a JSON object with name and arguments."""

from __future__ import annotations

import json
from dataclasses import dataclass

from services.tokenizer.json.json_values import read_json_object
from services.tokenizer.replies.json_reading import read_object, read_string, read_value
from services.tokenizer.replies.json_repair import repaired
from services.tokenizer.replies.parser import ReplyParser
from services.tokenizer.replies.reader import Reading, UnparsableError

# Further members that a call may have when only its form distinguishes it from other JSON.
_OTHER_MEMBERS = ("type", "id")


@dataclass(slots=True)
class _JsonCall:
    only_offered: bool
    name: str | None = None
    arguments: str | None = None
    has_begun: bool = False


class JsonCallParser(ReplyParser):
    """Members may come in any order; arguments stream if the name comes first."""

    def _read_json_call(self, *, only_offered: bool) -> Reading[None]:
        """Read a call; with `only_offered` it must name an offered tool, since no markup sets it apart.

        Raises:
            TextEndedError, UnparsableError: it is not a call.
        """
        call = _JsonCall(only_offered)
        yield from read_object(self._reader, lambda name: self._read_member(_string(name), call))
        if not call.has_begun:
            if call.name is None or (only_offered and call.arguments is None):
                raise UnparsableError
            self._begin_call(call.name)
            self._put_arguments(call.arguments or "{}")
        self._reader.accept()

    def _read_member(self, member: str, call: _JsonCall) -> Reading[None]:
        if member == "name" and call.name is None:
            call.name = _string((yield from read_string(self._reader)))
            if call.only_offered and call.name not in self._tools:
                raise UnparsableError
        elif member in ("arguments", "parameters") and call.arguments is None:
            yield from self._read_call_arguments(call)
        elif call.only_offered and member not in _OTHER_MEMBERS:
            raise UnparsableError
        else:
            yield from read_value(self._reader)

    def _read_call_arguments(self, call: _JsonCall) -> Reading[None]:
        reader = self._reader
        character = yield from reader.peek()
        if character == "{" and call.name is not None:
            self._begin_call(call.name)
            call.has_begun = True
            call.arguments = ""
            yield from self._read_arguments()
        elif character == '"':
            # Some models write the object as a string.
            call.arguments = _object_text(_string((yield from read_string(reader))))
        else:
            before = reader.num_read
            yield from read_value(reader)
            call.arguments = _object_text(reader.read_since(before))


def _string(text: str) -> str:
    """A string that was read."""
    value: str = json.loads(repaired(text))
    return value


def _object_text(text: str) -> str:
    """Arguments as JSON; a model may also say that there are none."""
    text = repaired(text)
    if text.strip() in ("", "null"):
        return "{}"
    try:
        read_json_object(text)
    except ValueError:
        raise UnparsableError from None
    return text

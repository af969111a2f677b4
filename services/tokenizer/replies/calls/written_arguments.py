"""Reads the arguments of calls as JSON, also where a model nearly writes it.

written by the model                        read as
null, None, nothing, an empty code fence    {}
an object in a code fence                   the object
a string that is an object                  the object
one closing brace too many                  nothing
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from services.tokenizer.json.json_values import read_json_object
from services.tokenizer.replies.json_reading import read_value
from services.tokenizer.replies.json_repair import repaired
from services.tokenizer.replies.parser import ReplyParser
from services.tokenizer.replies.reader import SPACE, Reading, TextEndedError, UnparsableError
from services.tokenizer.text.markers import Markers

FENCE = "```"
_QUOTES = "\"'"
# The length of the word after a fence's beginning.
_MAX_WORD_LENGTH = 16
_NOTHING = re.compile(r"\s*(?:```\w*\s*)?(?:null|None)?\s*(?:```)?\s*")


class CallParser(ReplyParser):
    """The base of parsers whose calls have arguments in JSON."""

    def _read_whole_arguments(
        self, begin: Callable[[], object], ends: Markers, *, is_last: bool = False
    ) -> Reading[None]:
        """Read a call's arguments, after which one of `ends` or the end of the reply must come, which is not consumed.

        `begin` begins the call as soon as there are arguments. With `is_last`, no more of the call follows.

        Raises:
            TextEndedError, UnparsableError: they are none.
        """
        arguments = yield from self._read_object(ends, begin, is_last=is_last)
        if arguments is not None:
            begin()
            self._put_arguments(arguments)
        self._reader.accept()

    def _read_object(
        self, ends: Markers, begin: Callable[[], object] | None, *, is_last: bool = False
    ) -> Reading[str | None]:
        """As `_read_whole_arguments`; returns the arguments, or None if they were passed on after `begin`.

        Without `begin` they are not passed on.
        """
        reader = self._reader
        is_fenced = yield from self._skip_fence()
        yield from reader.skip(SPACE)
        character = yield from reader.peek()
        if character == "{" and begin is not None:
            begin()
            yield from self._read_arguments()
            if is_last:
                self._end_after_call()
            yield from self._skip_brace(ends)
            yield from self._end_fence(is_fenced)
            return None
        if character and character in "{" + _QUOTES:
            num_before = reader.num_read
            yield from read_value(reader)
            arguments = _object_text(reader.read_since(num_before))
            yield from self._skip_brace(ends)
        else:
            yield from reader.one_of("null", "None")
            arguments = "{}"
        yield from self._end_fence(is_fenced)
        yield from self._check_end(ends)
        return arguments

    def _skip_fence(self) -> Reading[bool]:
        """Skip blanks and the beginning of a code fence, if there is one; whether there was."""
        reader = self._reader
        yield from reader.skip(SPACE)
        if not (yield from reader.one_of(FENCE)):
            return False
        length = 0
        while (character := (yield from reader.peek())).isalnum() or character == "_":
            # It may also be the arguments.
            if length == 0 and (yield from reader.one_of("null", "None")):
                reader.position -= len("null")
                break
            if length == _MAX_WORD_LENGTH:
                raise UnparsableError
            reader.position += 1
            length += 1
        return True

    def _end_fence(self, is_fenced: bool) -> Reading[None]:
        if is_fenced:
            yield from self._reader.skip(SPACE)
            yield from self._reader.one_of(FENCE)

    def _skip_brace(self, ends: Markers) -> Reading[None]:
        """Skip a closing brace that is none of `ends`."""
        reader = self._reader
        num_before = reader.num_read
        yield from reader.skip(SPACE)
        if (yield from reader.is_at(ends)) or not (yield from reader.one_of("}")):
            reader.position = reader.mark + num_before

    def _check_end(self, ends: Markers) -> Reading[None]:
        yield from self._reader.skip(SPACE)
        if not (yield from self._reader.peek()):
            if self.was_cut:
                raise TextEndedError
        elif not (yield from self._reader.is_at(ends)):
            raise UnparsableError

    def _read_name(self, ends: Markers, *, max_length: int) -> Reading[str]:
        """Read what is before one of `ends`, which is not consumed, or before the end of a whole reply."""
        name, end = yield from self._reader.until_or_end(ends, max_length=max_length)
        if not end and self.was_cut:
            raise TextEndedError
        self._reader.position -= len(end)
        return name.strip()


def string_of(text: str) -> str:
    """A string that was read."""
    value: str = json.loads(repaired(text))
    return value


def _object_text(text: str) -> str:
    """Arguments as JSON, which may have been written as a string of it."""
    text = string_of(text) if text[0] in _QUOTES else text
    if _NOTHING.fullmatch(text):
        return "{}"
    text = repaired(text)
    try:
        read_json_object(text)
    except ValueError:
        raise UnparsableError from None
    return text

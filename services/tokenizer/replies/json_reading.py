"""Reads JSON from text that arrives in pieces, never beyond the first invalid character.

What models write instead of valid characters in strings, and of numbers, is read too, and Python's spelling of
constants and strings, and a comma after the last member; `json_repair` replaces it.

Source: RFC 8259, sections 2 to 7.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from services.tokenizer.json.json_values import NUMBER
from services.tokenizer.replies.reader import SPACE, Reading, TextEndedError, TextReader, UnparsableError

# What Python and JavaScript write for numbers that are none in JSON.
NOT_FINITE = ("NaN", "Infinity", "-Infinity")

# Python's spelling of JSON's words.
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

_MAX_DEPTH = 64
_MAX_NUMBER_LENGTH = 16 * 1024

_PLAIN_CHARACTERS = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]*")


def read_value(reader: TextReader, depth: int = 0) -> Reading[None]:
    """Read a value.

    Raises:
        TextEndedError: the text ends within it.
        UnparsableError: there is no valid value, or it is nested more than 64 levels deep.
    """
    if depth > _MAX_DEPTH:
        raise UnparsableError
    character = yield from reader.peek()
    if character == "{":
        yield from read_object(reader, lambda _: read_value(reader, depth + 1))
    elif character == "[":
        yield from _read_array(reader, depth)
    elif character and character in "\"'":
        yield from read_string(reader)
    elif character and character in "-0123456789" and not (yield from reader.one_of(*NOT_FINITE)):
        yield from _read_number(reader)
    elif character != "-":
        yield from reader.expect("true", "false", "null", *PYTHON_WORDS, *NOT_FINITE)


def read_object(reader: TextReader, read_member: Callable[[str], Reading[None]]) -> Reading[None]:
    """`read_member` reads each member's value, and gets its name as written, with quotes. Raises as `read_value`."""
    yield from reader.expect("{")
    yield from reader.skip(SPACE)
    if (yield from reader.one_of("}")):
        return
    while True:
        name = yield from read_string(reader)
        yield from reader.skip(SPACE)
        yield from reader.expect(":")
        yield from reader.skip(SPACE)
        yield from read_member(name)
        yield from reader.skip(SPACE)
        if (yield from reader.expect(",", "}")) == "}":
            return
        yield from reader.skip(SPACE)
        if (yield from reader.one_of("}")):
            return


def read_string(reader: TextReader) -> Reading[str]:
    """Returns the string as written, with quotes. Raises as `read_value`."""
    quote = yield from reader.expect('"', "'")
    pieces = [quote]
    while (character := (yield from reader.peek())) != quote:
        if match := _PLAIN_CHARACTERS[quote].match(reader.text, reader.position):
            pieces.append(match[0])
            reader.position = match.end()
        elif len(pair := (yield from reader.ahead(2))) == 2 and character:
            # A backslash and the character that it escapes; digits of \u are plain.
            pieces.append(pair)
            reader.position += 2
        else:
            raise TextEndedError
    reader.position += 1
    pieces.append(quote)
    return "".join(pieces)


def _read_array(reader: TextReader, depth: int) -> Reading[None]:
    yield from reader.expect("[")
    yield from reader.skip(SPACE)
    if (yield from reader.one_of("]")):
        return
    while True:
        yield from read_value(reader, depth + 1)
        yield from reader.skip(SPACE)
        if (yield from reader.expect(",", "]")) == "]":
            return
        yield from reader.skip(SPACE)
        if (yield from reader.one_of("]")):
            return


def _read_number(reader: TextReader) -> Reading[None]:
    """The number is only consumed once its end is known."""
    while (match := _NUMBER_CHARACTERS.match(reader.text, reader.position)) and match.end() == len(reader.text):
        if len(match[0]) > _MAX_NUMBER_LENGTH or not (yield from reader.wait()):
            break
    assert match is not None
    if len(match[0]) > _MAX_NUMBER_LENGTH:
        raise UnparsableError
    if not NUMBER.fullmatch(match[0]):
        raise TextEndedError if match.end() == len(reader.text) else UnparsableError
    reader.position = match.end()

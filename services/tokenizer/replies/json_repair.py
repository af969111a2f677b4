r"""Rewrites the JSON that models write into what RFC 8259 and UTF-8 allow, piece by piece.

A model writes a line break into a string as it is, half a surrogate pair, or a number that no double holds. What was
sent cannot be taken back, and what a client gets must be readable and must be accepted when it comes back:

    written by the model                 passed on
    a control character in a string      its escape
    a surrogate without its pair         \ufffd
    another character after a backslash  the backslash as a character
    NaN, Infinity, a number beyond 2**1024   null
    True, False, None                    true, false, null
    'a string between single quotes'     the string between double quotes
    a comma after the last member        nothing
"""

from __future__ import annotations

import json
import re

from services.tokenizer.json.json_values import NUMBER, is_beyond_double
from services.tokenizer.replies.json_reading import NOT_FINITE, PYTHON_WORDS

_PLAIN = re.compile(r"""[^"'\\\x00-\x1f]+""")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u([0-9a-fA-F]{4}))')
# The beginning of an escape, or a high surrogate's with perhaps the beginning of a low one's.
_UNFINISHED = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?\Z")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
# A comma, with as many of the blanks after it as are passed on.
_COMMA = re.compile(r",([ \t\r\n]{0,64})[ \t\r\n]*")
_REPLACEMENT = r"\ufffd"


class JsonRepair:
    """Takes a text that `json_reading` has read, cut anywhere. It is passed on as soon as its meaning is certain."""

    def __init__(self, *, reads_python: bool = True) -> None:
        """Without `reads_python`, what only Python allows stays as it is."""
        self._reads_python = reads_python
        self._words = PYTHON_WORDS if reads_python else {}
        self._quotes = "\"'" if reads_python else '"'
        # The quote of the string that has begun; empty outside strings.
        self._quote = ""
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece; returns what is certain."""
        text, self._held = self._held + text, ""
        pieces: list[str] = []
        position = 0
        while position < len(text):
            read = self._read_in_string if self._quote else self._read_outside
            piece, size = read(text, position)
            if not size:
                comma = _COMMA.fullmatch(text, position)
                self._held = "," + comma[1] if comma and not self._quote else text[position:]
                break
            pieces.append(piece)
            position += size
        return "".join(pieces)

    def finish(self) -> str:
        """The text has ended; returns the rest. One that was cut off ends as the model wrote it."""
        held, self._held = self._held, ""
        return held if self._quote else self._word(held)

    def _read_in_string(self, text: str, position: int) -> tuple[str, int]:
        """What to pass on, and how much of the text that was; nothing if more is needed to know."""
        if found := _PLAIN.match(text, position) or _PAIR.match(text, position):
            return found[0], len(found[0])
        if text[position] == self._quote:
            self._quote = ""
            return '"', 1
        if text[position] != "\\":
            return json.dumps(text[position])[1:-1], 1
        if self._quote == "'" and text.startswith("\\'", position):
            return "'", 2
        return ("", 0) if _UNFINISHED.match(text, position) else _escape(text, position)

    def _read_outside(self, text: str, position: int) -> tuple[str, int]:
        if self._reads_python and (comma := _COMMA.match(text, position)):
            return _comma(comma)
        word = _WORD.match(text, position)
        if word is None:
            if text[position] in self._quotes:
                self._quote = text[position]
                return '"', 1
            return text[position], 1
        return ("", 0) if word.end() == len(text) else (self._word(word[0]), len(word[0]))

    def _word(self, text: str) -> str:
        """A number or another word outside strings."""
        is_none = text in NOT_FINITE or (NUMBER.fullmatch(text) and is_beyond_double(text))
        return "null" if is_none else self._words.get(text, text)


def repaired(text: str, *, reads_python: bool = True) -> str:
    """A whole text, repaired."""
    repair = JsonRepair(reads_python=reads_python)
    return repair.push(text) + repair.finish()


def _comma(comma: re.Match[str]) -> tuple[str, int]:
    """What to pass on of a comma and the blanks after it, and their length; nothing where what follows is unknown."""
    if comma.end() == len(comma.string):
        return "", 0
    is_last = comma.string[comma.end()] in "]}"
    return (comma[1] if is_last else "," + comma[1]), len(comma[0])


def _escape(text: str, position: int) -> tuple[str, int]:
    """An escape that is not of a pair, and its length; or the backslash alone."""
    escape = _ESCAPE.match(text, position)
    if escape is None:
        return r"\\", 1
    is_half = escape[1] and 0xD800 <= int(escape[1], 16) <= 0xDFFF
    return (_REPLACEMENT if is_half else escape[0]), len(escape[0])

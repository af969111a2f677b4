"""Finds a client's pattern in a short text, where that costs little.

Python's expressions try again and again: a repeated group could take longer than the universe. So only patterns are
searched for that have no group with a quantifier and few repetitions; of any other one it is not known where it is.
"""

from __future__ import annotations

import functools
import re

# An escape, a class, a group's beginning, a quantifier, or any other character.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\)?(?:[*+?]|\{\d+(?:,\d*)?\})\??|.", re.DOTALL)
# An escape of a letter or digit: all but these may mean something else in Python.
_OTHER_ESCAPE = re.compile(r"\\(?![dwDW])[0-9A-Za-z]")
_MAX_LENGTH = 200
_MAX_REPETITIONS = 2
_MAX_TEXT_LENGTH = 512


def is_found(pattern: str, text: str) -> bool | None:
    """Whether a pattern, in JSON Schema's syntax, is found in a text; None where it would cost too much to know."""
    expression = _cheap(pattern)
    return None if expression is None or len(text) > _MAX_TEXT_LENGTH else expression.search(text) is not None


@functools.lru_cache(maxsize=256)
def _cheap(pattern: str) -> re.Pattern[str] | None:
    """None for a pattern that costs much, or that Python reads otherwise."""
    if len(pattern) > _MAX_LENGTH or "(?" in pattern.replace("(?:", ""):
        return None
    pieces = _PIECE.findall(pattern)
    if any((piece[0] == ")" and len(piece) > 1) or _OTHER_ESCAPE.match(piece) for piece in pieces):
        return None
    if sum(piece[0] in "*+?" or "," in piece[1:] for piece in pieces if piece[0] in "*+?{") > _MAX_REPETITIONS:
        return None
    try:
        return re.compile("".join(r"\Z" if piece == "$" else piece for piece in pieces), re.ASCII)
    except (re.error, RecursionError, OverflowError):
        return None

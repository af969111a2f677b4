"""Custom tools, whose input is a text, as functions of one string."""

from __future__ import annotations

import json
import re

INPUT = "input"
"""The function's only argument."""

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Whole characters of a JSON string (RFC 8259, section 7): a pair of surrogates is one.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*"
)


def input_arguments(text: str) -> str:
    """The arguments of a call with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class CustomInput:
    """Takes a call's arguments, a JSON text, in pieces, and gives the input in pieces.

    If they are anything but an object that begins with the input, they are themselves the input.
    """

    def __init__(self) -> None:
        # What has been taken and not given.
        self._held = ""
        self._is_inside = False
        self._is_over = False
        self._is_verbatim = False

    def push(self, arguments: str) -> str:
        """Take the next piece; returns the next piece of the input, possibly empty."""
        self._held += arguments
        if not self._is_inside and not self._is_verbatim:
            self._find_head()
        if self._is_over:
            self._held = ""
        if self._is_verbatim:
            text, self._held = self._held, ""
            return text
        return self._take() if self._is_inside else ""

    def _find_head(self) -> None:
        if head := _HEAD.match(self._held):
            self._held = self._held[head.end() :]
            self._is_inside = True
        else:
            self._is_verbatim = not f'{{"{INPUT}":"'.startswith("".join(self._held.split()))

    def _take(self) -> str:
        characters = _CHARACTERS.match(self._held)
        assert characters is not None, "it matches nothing, too"
        self._held = self._held[characters.end() :]
        self._is_over = self._is_over or self._held.startswith('"')
        text: str = json.loads(f'"{characters[0]}"', strict=False)
        return text

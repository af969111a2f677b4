"""Breaks lines between words, for a text that arrives in pieces and goes to a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

_TAB = 8


class WordWrap:
    """Returns what to write, piece by piece. A word is held back until it is complete, or fills a line."""

    def __init__(self, num_columns: Callable[[], int]) -> None:
        """`num_columns` returns the terminal's width, which may change."""
        self._num_columns = num_columns
        self._column = 0
        self._blanks = ""
        self._word = ""

    def add(self, piece: str) -> str:
        """Take in the next piece; returns what can be written by now."""
        return "".join(map(self._add_character, piece))

    def end(self) -> str:
        """The rest of the text; the next one begins in the first column."""
        rest = self._end_word() + self._blanks
        self._blanks, self._column = "", 0
        return rest

    def _add_character(self, character: str) -> str:
        if character == "\n":
            text = self._end_word()
            self._blanks, self._column = "", 0
            return text + "\n"
        if character.isspace():
            text = self._end_word()
            self._blanks += character
            return text
        # Between the characters of Chinese and Japanese a line may end anywhere.
        text = self._end_word() if _is_wide(character) else ""
        self._word += character
        is_complete = _is_wide(character) or _width(self._word) >= self._num_columns()
        return text + (self._end_word() if is_complete else "")

    def _end_word(self) -> str:
        if not self._word:
            return ""
        word, blanks, width = self._word, self._blanks, _width(self._word)
        self._word = self._blanks = ""
        before = self._column + sum(_TAB if blank == "\t" else 1 for blank in blanks)
        if self._column and before + width > self._num_columns():
            blanks, before = "\n", 0
        self._column = before + width
        return blanks + word


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


def _width(word: str) -> int:
    return sum(2 if _is_wide(character) else int(not unicodedata.combining(character)) for character in word)

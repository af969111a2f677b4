"""Finds any of many strings, at a cost independent of their number."""

from __future__ import annotations

import re

# A trie: maps each character to what may follow it, and "" to nothing where a string ends.
_Tree = dict[str, "_Tree"]


class Markers:
    """A set of strings to search for."""

    def __init__(self, *markers: str) -> None:
        self.pattern = re.compile(_source(_tree(markers)) if markers else "(?!)")
        self.max_length = max(map(len, markers), default=0)
        self._beginnings = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
        self._last_characters = frozenset(beginning[-1] for beginning in self._beginnings)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """The first marker at or after `start`; of several there, the longest."""
        return self.pattern.search(text, start)

    def may_continue(self, text: str) -> bool:
        """Whether a marker begins with this text, and is longer."""
        return text in self._beginnings or (not text and self.max_length > 0)

    def held_length(self, text: str, start: int) -> int:
        """Length of the longest end of `text[start:]` that may begin a marker; it must contain none."""
        if not text or text[-1] not in self._last_characters:
            return 0
        longest = min(self.max_length - 1, len(text) - start)
        return next((size for size in range(longest, 0, -1) if text[-size:] in self._beginnings), 0)


NO_MARKERS = Markers()


def _tree(strings: tuple[str, ...]) -> _Tree:
    tree: _Tree = {}
    for string in strings:
        node = tree
        for character in string:
            node = node.setdefault(character, {})
        node[""] = {}
    return tree


def _source(node: _Tree) -> str:
    """A regex for what may follow a node."""
    branches = [re.escape(character) + _source(child) for character, child in node.items() if character]
    if not branches:
        return ""
    if "" in node:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

"""The tags of families that write arguments one by one, of which a model may omit those that close a value."""

from __future__ import annotations

from collections.abc import Collection

from services.tokenizer.text.markers import Markers


class ValueTags:
    """The tags of one family."""

    def __init__(
        self, end: str, *, argument: str, closings: Collection[str], openings: Collection[str], has_lines: bool = False
    ) -> None:
        """Prepare to search for them.

        Args:
            end: What closes a value.
            argument: The beginning of the next argument's tag.
            closings: What ends a call, and what is around it.
            openings: What begins a call, and what is around it.
            has_lines: Whether a line break before the end belongs to that, not to the value; the tag of an argument is
                then the first or the last of its line.
        """
        self.argument = argument
        self.has_lines = has_lines
        self.closings = frozenset(closings)
        self.openings = frozenset(openings)
        self._ends = {end, "\n" + end} if has_lines else {end}
        self.ends = Markers(*self._ends)
        self.calls = Markers(*openings)
        others = (argument, *closings, *openings)
        self.others = Markers(*others)
        self.every = Markers(*self._ends, *others, *("\n" + tag for tag in others))

    def closes(self, tag: str) -> bool:
        """Whether the tag is what closes a value."""
        return tag in self._ends

"""Reading a text that comes in pieces, as if it were all there.

What reads is a generator: it takes what it needs, and yields when that has not come yet. So a parser reads like the
grammar of what it parses, and cannot tell how its text was cut.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import TypeVar

from services.tokenizer.text.markers import Markers

T = TypeVar("T")

# Yields while it waits for more text; returns what it has read.
Reading = Generator[None, None, T]

SPACE = " \t\r\n"


class UnparsableError(Exception):
    """The text is not what the markup before it announced."""


class TextEndedError(UnparsableError):
    """The text ended within what the markup before it announced."""


class TextReader:
    """A text that grows, and how far it has been read.

    Invariant: what stands before `mark` has been accounted for; what stands between `mark` and `position` has been
    read, and may still be given back.
    """

    def __init__(self) -> None:
        self.text = ""
        self.mark = 0
        self.position = 0
        self.is_complete = False

    def add(self, text: str) -> None:
        """Take more text in. What has been accounted for is forgotten: indices move, their distances do not."""
        self.text = self.text[self.mark :] + text
        self.position -= self.mark
        self.mark = 0

    def accept(self) -> str:
        """Account for what has been read, and return it."""
        taken = self.text[self.mark : self.position]
        self.mark = self.position
        return taken

    @property
    def num_read(self) -> int:
        """Characters that have been read and not accounted for."""
        return self.position - self.mark

    def read_since(self, num_read: int) -> str:
        """What has been read since that many characters had been; nothing was accounted for in between."""
        return self.text[self.mark + num_read : self.position]

    def rewind(self) -> None:
        """Read again what has not been accounted for."""
        self.position = self.mark

    def wait(self) -> Reading[bool]:
        """Wait for more text; False when there is none to come."""
        if self.is_complete:
            return False
        yield
        return True

    def ahead(self, size: int) -> Reading[str]:
        """The next `size` characters, not taken; fewer at the end of the text."""
        while len(self.text) - self.position < size and (yield from self.wait()):
            pass
        return self.text[self.position : self.position + size]

    def peek(self) -> Reading[str]:
        """The next character, not taken; empty at the end of the text."""
        if self.position < len(self.text):
            return self.text[self.position]
        return (yield from self.ahead(1))

    def skip(self, characters: str) -> Reading[None]:
        """Take characters for as long as they are of these."""
        while (character := (yield from self.peek())) and character in characters:
            self.position += 1

    def one_of(self, *markers: str) -> Reading[str]:
        """Take the marker that stands here; empty if none does."""
        while True:
            for marker in markers:
                if self.text.startswith(marker, self.position):
                    self.position += len(marker)
                    return marker
            if not self._may_begin(markers) or not (yield from self.wait()):
                return ""

    def expect(self, *markers: str) -> Reading[str]:
        """Take the marker that stands here.

        Raises:
            TextEndedError: the text ends before it can be told.
            UnparsableError: none does.
        """
        found = yield from self.one_of(*markers)
        if not found:
            raise TextEndedError if self._may_begin(markers) else UnparsableError
        return found

    def until(self, markers: Markers, *, max_length: int) -> Reading[tuple[str, str]]:
        """Take the text up to the first marker, and the marker.

        Raises:
            UnparsableError: none begins within `max_length` characters.
        """
        while True:
            match = markers.find(self.text, self.position)
            length = (match.start() if match else len(self.text) - markers.max_length) - self.position
            if length > max_length:
                raise UnparsableError
            if match:
                taken = self.text[self.position : match.start()]
                self.position = match.end()
                return taken, match[0]
            if not (yield from self.wait()):
                raise UnparsableError

    def _may_begin(self, markers: Collection[str]) -> bool:
        """Whether one of the markers may still come to stand here."""
        size = len(self.text) - self.position
        return any(size < len(marker) and marker.startswith(self.text[self.position :]) for marker in markers)

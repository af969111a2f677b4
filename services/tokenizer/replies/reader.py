"""Reads text that arrives in pieces as if all of it were there.

Reading functions are generators that yield while they wait for text, so a result cannot depend on how it was cut.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import TypeVar

from services.tokenizer.text.markers import Markers

T = TypeVar("T")

# Yields while it waits for more text; returns what was read.
Reading = Generator[None, None, T]

SPACE = " \t\r\n"


class UnparsableError(Exception):
    """The text does not match what the markup before it announced."""


class TextEndedError(UnparsableError):
    """The text ended before that was complete."""


class TextReader:
    """A growing text.

    Invariant: text before `mark` is accepted; from there to `position` it is read, but may still be given back.
    """

    max_read: int | None = None
    """How much may be read but not accepted before more is read; None if it may be any amount."""

    def __init__(self) -> None:
        self.text = ""
        self.mark = 0
        self.position = 0
        self.is_complete = False

    def add(self, text: str) -> None:
        """Append text, and drop accepted text, which shifts all indices equally."""
        self.text = self.text[self.mark :] + text
        self.position -= self.mark
        self.mark = 0

    def accept(self) -> str:
        """Accept what has been read; returns it."""
        taken = self.text[self.mark : self.position]
        self.mark = self.position
        return taken

    @property
    def num_read(self) -> int:
        """Characters read but not accepted."""
        return self.position - self.mark

    def read_since(self, num_read: int) -> str:
        """The text read since `num_read` had this value; nothing may be accepted in between."""
        return self.text[self.mark + num_read : self.position]

    def rewind(self) -> None:
        """Go back to the end of the accepted text."""
        self.position = self.mark

    def wait(self) -> Reading[bool]:
        """Wait for more text; False if the text is complete."""
        if self.is_complete:
            return False
        yield
        return True

    def ahead(self, size: int) -> Reading[str]:
        """The next `size` characters, not consumed; fewer at the end of the text."""
        while len(self.text) - self.position < size and (yield from self.wait()):
            pass
        return self.text[self.position : self.position + size]

    def peek(self) -> Reading[str]:
        """The next character, not consumed; empty at the end of the text.

        Raises:
            UnparsableError: more than `max_read` characters are read but not accepted.
        """
        if self.max_read is not None and self.num_read > self.max_read:
            raise UnparsableError
        if self.position < len(self.text):
            return self.text[self.position]
        return (yield from self.ahead(1))

    def skip(self, characters: str) -> Reading[None]:
        """Skip any of `characters`."""
        while (character := (yield from self.peek())) and character in characters:
            self.position += 1

    def one_of(self, *markers: str) -> Reading[str]:
        """Read the marker at this position; "" if there is none."""
        while True:
            for marker in markers:
                if self.text.startswith(marker, self.position):
                    self.position += len(marker)
                    return marker
            if not self._may_begin(markers) or not (yield from self.wait()):
                return ""

    def is_at(self, markers: Markers) -> Reading[bool]:
        """Whether there is a marker at this position, which is not consumed."""
        return bool((yield from self.next_of(markers)))

    def next_of(self, markers: Markers) -> Reading[str]:
        """The marker at this position, which is not consumed; empty if there is none."""
        while not (match := markers.pattern.match(self.text, self.position)):
            if not markers.may_continue(self.text[self.position :]) or not (yield from self.wait()):
                return ""
        return match[0]

    def expect(self, *markers: str) -> Reading[str]:
        """Read the marker at this position.

        Raises:
            TextEndedError: the text ends before a marker is complete.
            UnparsableError: there is no marker here.
        """
        found = yield from self.one_of(*markers)
        if not found:
            raise TextEndedError if self._may_begin(markers) else UnparsableError
        return found

    def until_or_end(self, markers: Markers, *, max_length: int) -> Reading[tuple[str, str]]:
        """As `until`; without a marker up to the end of the text, and an empty marker."""
        if found := (yield from self._found(markers, max_length)):
            return found
        begin, self.position = self.position, len(self.text)
        return self.text[begin:], ""

    def until(self, markers: Markers, *, max_length: int) -> Reading[tuple[str, str]]:
        """Read up to and including the first marker; returns the text before it, and the marker.

        Raises:
            UnparsableError: no marker begins within `max_length` characters.
        """
        if found := (yield from self._found(markers, max_length)):
            return found
        raise UnparsableError

    def _found(self, markers: Markers, max_length: int) -> Reading[tuple[str, str] | None]:
        """As `until`; None where the text ends first, of which nothing is read then."""
        # Characters in which no marker begins: a long text is not searched again for each of its pieces.
        num_searched = 0
        while True:
            match = markers.find(self.text, self.position + num_searched)
            length = (match.start() if match else len(self.text) - markers.max_length) - self.position
            if length > max_length:
                raise UnparsableError
            if match:
                taken = self.text[self.position : match.start()]
                self.position = match.end()
                return taken, match[0]
            num_searched = max(num_searched, length)
            if not (yield from self.wait()):
                return None

    def _may_begin(self, markers: Collection[str]) -> bool:
        """Whether more text could complete a marker here."""
        size = len(self.text) - self.position
        return any(size < len(marker) and marker.startswith(self.text[self.position :]) for marker in markers)

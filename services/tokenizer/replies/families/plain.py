"""Models that write plain text."""

from __future__ import annotations

from services.tokenizer.replies.parser import ReplyParser
from services.tokenizer.replies.reader import Reading
from services.tokenizer.text.markers import NO_MARKERS


class PlainParser(ReplyParser):
    """The whole reply is text."""

    def _read(self) -> Reading[None]:
        yield from self._pass_until(NO_MARKERS, self._put_text)

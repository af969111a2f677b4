"""Models whose templates take no tools, and list them as `generic_tools_template` says: calls are as Hermes' are.

A model that was never trained on the tags may leave them out, or write a code fence instead, so a reply may also begin
with a call that is bare.
"""

from __future__ import annotations

from services.tokenizer.replies.calls.written_arguments import FENCE
from services.tokenizer.replies.families.hermes import HermesParser
from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.reader import SPACE, Reading, UnparsableError
from services.tokenizer.text.markers import NO_MARKERS


class GenericParser(HermesParser):
    """A bare object is a call only if it names an offered tool and has no other members."""

    think_markup = THINK_MARKUP["generic"]

    def _read(self) -> Reading[None]:
        yield from self._read_reasoning(THINK_MARKUP["generic"], self._setting.opening)
        if self._tools and not self._setting.has_form:
            # What ended the reasoning is no text, if what comes is no call.
            self._reader.accept()
            yield from self._try("", self._read_bare_calls)
        yield from self._read_text(self.call_openings if self._tools else NO_MARKERS, self._read_calls)

    def _read_bare_calls(self, _: str) -> Reading[None]:
        yield from self._reader.skip(SPACE)
        if (yield from self._reader.peek()) not in ("{", "[", FENCE[0]):
            raise UnparsableError
        yield from self._read_json_calls(is_bare=True)
        yield from self._reader.skip(SPACE)
        self._reader.accept()

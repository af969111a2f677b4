"""gpt-oss: messages on the channels analysis, commentary and final; calls are addressed to `functions.NAME`.

Source: OpenAI's "OpenAI harmony response format", sections "Message format" and "Receiving tool calls".
"""

from __future__ import annotations

import re
from collections.abc import Callable

from services.tokenizer.replies.openings import Opening
from services.tokenizer.replies.parser import MAX_NAME_LENGTH, ReplyParser
from services.tokenizer.replies.reader import SPACE, Reading, UnparsableError
from services.tokenizer.text.markers import NO_MARKERS, Markers

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
FUNCTIONS = "functions."

# The model sometimes omits the start of a message.
_OPENINGS = Markers(START + "assistant", CHANNEL)
_HEADER_ENDS = Markers(MESSAGE)
_MESSAGE_ENDS = Markers(END, RETURN, CALL, START + "assistant", CHANNEL)

# The recipient comes before or after the channel, the content's type at the end.
_HEADER = re.compile(
    r"(?: to=(?P<first>[^\s<]+))?\s*<\|channel\|>(?P<channel>\w+)(?: to=(?P<second>[^\s<]+))?"
    r"\s*(?:<\|constrain\|>)?\w*\s*"
)


class HarmonyParser(ReplyParser):
    """Anything outside a channel, and a call of anything but a function, is text."""

    markup = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL})

    def _read(self) -> Reading[None]:
        if self._setting.opening is Opening.REASONING:
            yield from self._pass_analysis()
        elif self._setting.opening is Opening.ANSWER:
            yield from self._pass_answer()
        # The prompt ends with the start of the first message, so the reply may begin inside its header.
        if (yield from self._reader.one_of(" to=")):
            self._reader.rewind()
            yield from self._try("", self._read_message)
        yield from self._read_text(_OPENINGS, self._read_message)

    def _read_message(self, opening: str) -> Reading[None]:
        if opening == CHANNEL:
            self._reader.rewind()
        text, _ = yield from self._reader.until(_HEADER_ENDS, max_length=2 * MAX_NAME_LENGTH)
        header = _HEADER.fullmatch(text)
        if header is None:
            raise UnparsableError
        recipient = header["first"] or header["second"] or ""
        if recipient.startswith(FUNCTIONS) or recipient in self._tools:
            yield from self._read_call(recipient.removeprefix(FUNCTIONS))
        elif header["channel"] == "analysis":
            yield from self._pass_analysis()
        elif not recipient:
            yield from self._pass_answer()
        else:
            raise UnparsableError

    def _read_call(self, name: str) -> Reading[None]:
        if not self._tools:
            raise UnparsableError
        yield from self._reader.skip(SPACE)
        yield from self._reader.expect("{")
        self._reader.position -= 1
        self._begin_call(name)
        yield from self._read_arguments()
        yield from self._close(CALL, END, RETURN)

    def _pass_analysis(self) -> Reading[None]:
        self.is_reasoning = True
        yield from self._pass_message(self._put_reasoning)
        self.is_reasoning = False

    def _pass_answer(self) -> Reading[None]:
        yield from self._pass_message(self._put_text, NO_MARKERS if self._setting.has_form else _MESSAGE_ENDS)

    def _pass_message(self, put: Callable[[str], None], ends: Markers = _MESSAGE_ENDS) -> Reading[None]:
        end = yield from self._pass_until(ends, put)
        if end in (START + "assistant", CHANNEL):
            self._reader.rewind()

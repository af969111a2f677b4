"""gpt-oss: messages on the channels analysis, commentary and final; calls are addressed to `functions.NAME`.

Source: OpenAI's "OpenAI harmony response format", sections "Message format" and "Receiving tool calls".
"""

from __future__ import annotations

import re
from collections.abc import Callable

from services.tokenizer.replies.calls.written_arguments import CallParser
from services.tokenizer.replies.code_spans import CodeSpans
from services.tokenizer.replies.openings import Opening
from services.tokenizer.replies.parser import MAX_NAME_LENGTH
from services.tokenizer.replies.reader import Reading, UnparsableError
from services.tokenizer.text.markers import NO_MARKERS, Markers

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
FUNCTIONS = "functions."

# The model sometimes omits the start of a message.
_OPENINGS = Markers(START + "assistant", CHANNEL)
_HEADER_ENDS = Markers(MESSAGE)
_MESSAGE_ENDS = Markers(END, RETURN, CALL, START + "assistant", CHANNEL)

# Markup that an answer may show in code.
_SHOWN = (CALL, START + "assistant", CHANNEL)

# What a header has, in any order; the content's type may be marked or not.
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+?)(?=to=|\W|\Z)")
_RECIPIENT = re.compile(r"\s*to=([^\s<]+)")
_CONTENT_TYPE = re.compile(r"\s*(?:<\|constrain\|>)?\s*\w*\s*")


class HarmonyParser(CallParser):
    """Anything outside a channel, and a call of anything but a function, is text."""

    markup = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL})

    def _read(self) -> Reading[None]:
        if self._setting.opening is Opening.REASONING:
            yield from self._pass_analysis()
        elif self._setting.opening is Opening.ANSWER:
            yield from self._pass_answer()
        # The prompt ends with the start of the first message, so the reply may begin inside its header.
        if (yield from self._reader.one_of(" to=", "to=")):
            self._reader.rewind()
            yield from self._try("", self._read_message)
        yield from self._read_text(_OPENINGS, self._read_message)

    def _read_message(self, opening: str) -> Reading[None]:
        if opening == CHANNEL:
            self._reader.rewind()
        text, _ = yield from self._reader.until(_HEADER_ENDS, max_length=2 * MAX_NAME_LENGTH)
        text, recipient = _cut_out(_RECIPIENT, text)
        text, channel = _cut_out(_CHANNEL, text)
        # Models name a second channel after the recipient.
        text, second = _cut_out(_CHANNEL, text)
        channel = second or channel
        if not _CONTENT_TYPE.fullmatch(text) or not (channel or recipient):
            raise UnparsableError
        if recipient.startswith(FUNCTIONS) or recipient in self._tools:
            yield from self._read_call(recipient.removeprefix(FUNCTIONS))
        elif channel == "analysis":
            yield from self._pass_analysis()
        elif not recipient:
            yield from self._pass_answer()
        else:
            raise UnparsableError

    def _read_call(self, name: str) -> Reading[None]:
        if not self._tools:
            raise UnparsableError
        name = self._offered_name(name)
        yield from self._read_whole_arguments(lambda: self._begin_call(name), _MESSAGE_ENDS)
        yield from self._close(CALL, END, RETURN)

    def _pass_analysis(self) -> Reading[None]:
        self.is_reasoning = True
        yield from self._pass_message(self._put_reasoning)
        self.is_reasoning = False

    def _pass_answer(self) -> Reading[None]:
        yield from self._pass_message(self._put_text, NO_MARKERS if self._setting.has_form else _MESSAGE_ENDS)

    def _pass_message(self, put: Callable[[str], None], ends: Markers = _MESSAGE_ENDS) -> Reading[None]:
        self._code = CodeSpans()
        while (end := (yield from self._pass_until(ends, put))) in _SHOWN and self._code.is_in_code(end):
            put(self._reader.accept())
        if end in (START + "assistant", CHANNEL):
            self._reader.rewind()


def _cut_out(pattern: re.Pattern[str], text: str) -> tuple[str, str]:
    """The text without the first match of a pattern, and what the match says; empty if there is none."""
    match = pattern.search(text)
    return (text, "") if match is None else (text[: match.start()] + text[match.end() :], match[1])

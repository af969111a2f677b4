"""DeepSeek-V3, R1 and V3.1: `<think>` first, then calls between dedicated markers.

V3 and R1 write `function<sep>NAME`, a line break and the arguments in a Markdown code fence; V3.1 writes
`NAME<sep>ARGUMENTS`.

Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and deepseek-ai/DeepSeek-V3.1.
"""

from __future__ import annotations

from services.tokenizer.replies.calls.json_calls import JsonCallParser
from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.parser import MAX_NAME_LENGTH
from services.tokenizer.replies.reader import SPACE, Reading
from services.tokenizer.text.markers import Markers

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

_OPENINGS = Markers(CALLS_BEGIN, "\n" + CALLS_BEGIN, CALL_BEGIN)
_TYPE = "function"
_ENDS = Markers(CALL_END, CALLS_END, CALL_BEGIN, CALLS_BEGIN)
# What comes where the end of a call, or of all, is missing.
_AROUND = Markers(CALLS_END, CALL_BEGIN, CALLS_BEGIN)
_SECTIONS = Markers(CALLS_BEGIN)
# A name alone is a call without arguments.
_SEPARATORS = Markers(SEPARATOR, CALL_END, CALLS_END)
_NAME_ENDS = Markers("\n", "`", "{", CALL_END, CALLS_END, CALL_BEGIN)


class DeepseekV3Parser(JsonCallParser):
    """See the module docstring."""

    markup = frozenset({"<think>", "</think>", CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR})
    call_openings = _OPENINGS
    think_markup = THINK_MARKUP["deepseek_v3"]

    def _read(self) -> Reading[None]:
        yield from self._read_reply(self._read_calls)

    def _read_calls(self, opening: str) -> Reading[None]:
        reader = self._reader
        if opening != CALL_BEGIN:
            if (yield from self._read_marked_calls(CALLS_END)):
                return
            yield from reader.expect(CALL_BEGIN)
        while True:
            yield from self._read_call()
            if (yield from self._close(CALL_BEGIN, CALLS_END, around=_SECTIONS)) != CALL_BEGIN:
                break
        yield from self._skip_after_call("\n")

    def _read_call(self) -> Reading[None]:
        reader = self._reader
        name = yield from self._read_name(_SEPARATORS, max_length=MAX_NAME_LENGTH)
        yield from reader.one_of(SEPARATOR)
        yield from reader.skip(SPACE)
        if name == _TYPE and not (yield from self._is_at_arguments()):
            name = yield from self._read_name(_NAME_ENDS, max_length=MAX_NAME_LENGTH)
        yield from self._read_whole_arguments(lambda: self._begin_call(name), _ENDS)
        yield from self._close(CALL_END, around=_AROUND)
        reader.accept()

    def _is_at_arguments(self) -> Reading[bool]:
        """Whether these come next in V3.1's form, for a tool whose name is that of V3's only type."""
        if _TYPE not in self._tools:
            return False
        return not (character := (yield from self._reader.peek())) or character in "{`\"'<"

"""Qwen3-Coder, Qwen3.5 and Nemotron 3: `<think>` first, then calls as `<function=NAME>` and pairs of `<parameter=KEY>`.

Each value is on lines of its own: see `untyped_values`.

Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

from services.tokenizer.replies.calls.untyped_values import UntypedCallParser
from services.tokenizer.replies.calls.value_tags import ValueTags
from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.parser import MAX_NAME_LENGTH
from services.tokenizer.replies.reader import SPACE, Reading
from services.tokenizer.text.markers import Markers

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION_BEGIN, FUNCTION_END = "<function=", "</function>"
PARAMETER_BEGIN, PARAMETER_END = "<parameter=", "</parameter>"

_OPENINGS = Markers(CALL_BEGIN, "\n" + CALL_BEGIN, FUNCTION_BEGIN, "\n" + FUNCTION_BEGIN)
_NAME_ENDS = Markers(">")
_FUNCTION_ENDS = Markers(FUNCTION_END, CALL_END, FUNCTION_BEGIN, CALL_BEGIN)
_TAGS = ValueTags(
    PARAMETER_END,
    argument=PARAMETER_BEGIN,
    closings=(FUNCTION_END, CALL_END),
    openings=(FUNCTION_BEGIN, CALL_BEGIN),
    has_lines=True,
)
# What comes where the end of a function, or of a call, is missing.
_AROUND = Markers(FUNCTION_BEGIN, CALL_BEGIN)
_CALLS = Markers(CALL_BEGIN)


class Qwen3CoderParser(UntypedCallParser):
    """A function without markers around it, which the model sometimes omits, is a call if it names an offered tool."""

    markup = frozenset({"<think>", "</think>", CALL_BEGIN, CALL_END})
    call_openings = _OPENINGS
    tags = _TAGS
    think_markup = THINK_MARKUP["qwen3_coder"]

    def _read(self) -> Reading[None]:
        yield from self._read_reply(self._read_call)

    def _read_call(self, opening: str) -> Reading[None]:
        reader = self._reader
        is_bare = opening.endswith(FUNCTION_BEGIN)
        if not is_bare:
            if (yield from self._read_marked_calls(CALL_END)):
                return
            yield from reader.expect(FUNCTION_BEGIN)
        while True:
            end = yield from self._read_function()
            if end != FUNCTION_END:
                break
            # A model that omits the beginning often writes the end.
            end = yield from self._close(CALL_END, FUNCTION_BEGIN, around=_CALLS)
            if end != FUNCTION_BEGIN:
                break
            self._end_after_call()
        yield from self._skip_after_call("\n")

    def _read_function(self) -> Reading[str]:
        """Returns what has ended it; empty for the end of the reply."""
        reader = self._reader
        written, _ = yield from reader.until(_NAME_ENDS, max_length=MAX_NAME_LENGTH)
        name = self._offered_name(written)
        yield from reader.skip(SPACE)
        if (yield from reader.peek()) not in ("", "<"):
            yield from self._read_whole_arguments(lambda: self._begin_call(name), _FUNCTION_ENDS)
            return (yield from self._close(FUNCTION_END, CALL_END, around=_AROUND))
        self._begin_call(name)
        is_first = True
        closings = (PARAMETER_BEGIN, FUNCTION_END, CALL_END)
        while (end := (yield from self._close(*closings, around=_AROUND))) == PARAMETER_BEGIN:
            key = yield from self._read_key()
            self._put_key(key, is_first=is_first)
            if not (yield from self._read_value(name, key, is_text=self._forms_of(name).is_text(key))):
                return ""
            is_first = False
        self._end_object(end, is_empty=is_first)
        reader.accept()
        return end

    def _read_key(self) -> Reading[str]:
        key, _ = yield from self._reader.until(_NAME_ENDS, max_length=MAX_NAME_LENGTH)
        yield from self._reader.one_of("\n")
        return key

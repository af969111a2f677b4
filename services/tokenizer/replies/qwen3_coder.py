"""Qwen3-Coder, Qwen3.5 and Nemotron 3: `<think>` first, then calls as `<function=NAME>` and pairs of `<parameter=KEY>`.

Each value is on lines of its own: see `untyped_values`.

Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.parser import MAX_NAME_LENGTH
from services.tokenizer.replies.reader import SPACE, Reading, UnparsableError
from services.tokenizer.replies.untyped_values import UntypedCallParser
from services.tokenizer.text.markers import Markers

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION_BEGIN, FUNCTION_END = "<function=", "</function>"
PARAMETER_BEGIN, PARAMETER_END = "<parameter=", "</parameter>"

_OPENINGS = Markers(CALL_BEGIN, "\n" + CALL_BEGIN, FUNCTION_BEGIN, "\n" + FUNCTION_BEGIN)
_NAME_ENDS = Markers(">")
_VALUE_ENDS = Markers(PARAMETER_END, "\n" + PARAMETER_END)


class Qwen3CoderParser(UntypedCallParser):
    """A function without markers around it, which the model sometimes omits, is a call if it names an offered tool."""

    markup = frozenset({"<think>", "</think>", CALL_BEGIN, CALL_END})
    call_openings = _OPENINGS
    think_markup = THINK_MARKUP["qwen3_coder"]

    def _read(self) -> Reading[None]:
        yield from self._read_reply(self._read_call)

    def _read_call(self, opening: str) -> Reading[None]:
        reader = self._reader
        is_bare = opening.endswith(FUNCTION_BEGIN)
        if not is_bare:
            yield from reader.skip(SPACE)
            yield from reader.expect(FUNCTION_BEGIN)
        name, _ = yield from reader.until(_NAME_ENDS, max_length=MAX_NAME_LENGTH)
        if is_bare and name not in self._tools:
            raise UnparsableError
        self._begin_call(name)
        is_first = True
        while (end := (yield from self._close(PARAMETER_BEGIN, FUNCTION_END, CALL_END))) == PARAMETER_BEGIN:
            key, _ = yield from reader.until(_NAME_ENDS, max_length=MAX_NAME_LENGTH)
            yield from reader.one_of("\n")
            self._put_key(key, is_first=is_first)
            if not (yield from self._read_value(_VALUE_ENDS, self._types(name, key))):
                return
            is_first = False
        self._end_object(end, is_empty=is_first)
        if end == FUNCTION_END:
            # A model that omits the beginning often writes the end.
            yield from self._close(CALL_END)
        yield from self._skip_after_call("\n")

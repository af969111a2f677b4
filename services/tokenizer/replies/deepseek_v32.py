"""DeepSeek-V3.2: `<think>` first, then calls in DSML, whose parameters say whether they are strings.

Source: encoding/encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2.
"""

from __future__ import annotations

import re

from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.parser import MAX_NAME_LENGTH
from services.tokenizer.replies.reader import SPACE, Reading, UnparsableError
from services.tokenizer.replies.untyped_values import UntypedCallParser
from services.tokenizer.text.markers import Markers

DSML = "｜DSML｜"
CALLS_BEGIN, CALLS_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
INVOKE_BEGIN, INVOKE_END = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER_BEGIN, PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"

_OPENINGS = Markers(CALLS_BEGIN, "\n" + CALLS_BEGIN, "\n\n" + CALLS_BEGIN)
# The end of a tag, after its last attribute.
_TAG_ENDS = Markers('">')
_INVOKE_ENDS = Markers(INVOKE_END, CALLS_END)
_VALUE_ENDS = Markers(PARAMETER_END)
_NAME = re.compile(r'\s*name="(.*)', re.DOTALL)
_PARAMETER = re.compile(r'\s*name="(.*)"\s+string="(true|false)', re.DOTALL)
_MAX_TAG_LENGTH = MAX_NAME_LENGTH + 64


class DeepseekV32Parser(UntypedCallParser):
    """See the module docstring."""

    markup = frozenset({"<think>", "</think>", DSML})
    call_openings = _OPENINGS
    think_markup = THINK_MARKUP["deepseek_v32"]

    def _read(self) -> Reading[None]:
        yield from self._read_reply(self._read_calls)

    def _read_calls(self, _: str) -> Reading[None]:
        reader = self._reader
        if (yield from self._read_marked_calls(CALLS_END)):
            return
        yield from reader.expect(INVOKE_BEGIN)
        yield from self._read_call()
        while (yield from self._close(INVOKE_BEGIN, CALLS_END)) == INVOKE_BEGIN:
            yield from self._read_call()
        yield from self._skip_after_call("\n")

    def _read_call(self) -> Reading[None]:
        reader = self._reader
        tag, _ = yield from reader.until(_TAG_ENDS, max_length=_MAX_TAG_LENGTH)
        if (match := _NAME.fullmatch(tag)) is None:
            raise UnparsableError
        name = self._offered_name(match[1])
        yield from reader.skip(SPACE)
        if (yield from reader.peek()) not in ("", "<"):
            yield from self._read_whole_arguments(lambda: self._begin_call(name), _INVOKE_ENDS)
            yield from self._close(INVOKE_END)
            reader.accept()
            return
        self._begin_call(name)
        is_first = True
        while (end := (yield from self._close(PARAMETER_BEGIN, INVOKE_END))) == PARAMETER_BEGIN:
            tag, _ = yield from reader.until(_TAG_ENDS, max_length=_MAX_TAG_LENGTH)
            if (match := _PARAMETER.fullmatch(tag)) is None:
                raise UnparsableError
            self._put_key(match[1], is_first=is_first)
            types = self._forms_of(name).types(match[1])
            if not (yield from self._read_value(_VALUE_ENDS, types, is_text=match[2] == "true")):
                return
            is_first = False
        self._end_object(end, is_empty=is_first)
        reader.accept()

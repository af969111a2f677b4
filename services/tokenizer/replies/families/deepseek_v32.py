"""DeepSeek-V3.2: `<think>` first, then calls in DSML, whose parameters say whether they are strings.

Source: encoding/encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2.
"""

from __future__ import annotations

import re

from services.tokenizer.replies.calls.untyped_values import UntypedCallParser
from services.tokenizer.replies.calls.value_tags import ValueTags
from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.parser import MAX_NAME_LENGTH
from services.tokenizer.replies.reader import SPACE, Reading, UnparsableError
from services.tokenizer.text.markers import Markers

DSML = "｜DSML｜"
CALLS_BEGIN, CALLS_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
INVOKE_BEGIN, INVOKE_END = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER_BEGIN, PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"

_OPENINGS = Markers(CALLS_BEGIN, "\n" + CALLS_BEGIN, "\n\n" + CALLS_BEGIN)
# The end of a tag, after its last attribute.
_TAG_ENDS = Markers('">')
_TAGS = ValueTags(
    PARAMETER_END,
    argument=PARAMETER_BEGIN,
    closings=(INVOKE_END, CALLS_END),
    openings=(INVOKE_BEGIN, CALLS_BEGIN),
)
_INVOKE_ENDS = Markers(INVOKE_END, CALLS_END, INVOKE_BEGIN, CALLS_BEGIN)
# What comes where the end of a call, or of all, is missing.
_AROUND = Markers(CALLS_END, INVOKE_BEGIN, CALLS_BEGIN)
_SECTIONS = Markers(CALLS_BEGIN)
_NAME = re.compile(r'\s*name="(.*)', re.DOTALL)
_PARAMETER = re.compile(r'\s*name="(.*)"\s+string="(true|false)', re.DOTALL)
_MAX_TAG_LENGTH = MAX_NAME_LENGTH + 64


class DeepseekV32Parser(UntypedCallParser):
    """See the module docstring."""

    markup = frozenset({"<think>", "</think>", DSML})
    call_openings = _OPENINGS
    tags = _TAGS
    think_markup = THINK_MARKUP["deepseek_v32"]

    def _read(self) -> Reading[None]:
        yield from self._read_reply(self._read_calls)

    def _read_calls(self, _: str) -> Reading[None]:
        reader = self._reader
        if (yield from self._read_marked_calls(CALLS_END)):
            return
        yield from reader.expect(INVOKE_BEGIN)
        yield from self._read_call()
        while (yield from self._close(INVOKE_BEGIN, CALLS_END, around=_SECTIONS)) == INVOKE_BEGIN:
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
            yield from self._close(INVOKE_END, around=_AROUND)
            reader.accept()
            return
        self._begin_call(name)
        is_first = True
        while (end := (yield from self._close(PARAMETER_BEGIN, INVOKE_END, around=_AROUND))) == PARAMETER_BEGIN:
            key, is_text = yield from self._read_parameter()
            self._put_key(key, is_first=is_first)
            if not (yield from self._read_value(name, key, is_text=is_text)):
                return
            is_first = False
        self._end_object(end, is_empty=is_first)
        reader.accept()

    def _read_parameter(self) -> Reading[tuple[str, bool]]:
        """Read the tag after its beginning: the argument's name, and whether its value is text."""
        tag, _ = yield from self._reader.until(_TAG_ENDS, max_length=_MAX_TAG_LENGTH)
        if (match := _PARAMETER.fullmatch(tag)) is None:
            raise UnparsableError
        return match[1], match[2] == "true"

    def _read_key(self) -> Reading[str]:
        key, _ = yield from self._read_parameter()
        return key

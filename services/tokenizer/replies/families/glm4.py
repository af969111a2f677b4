"""GLM-4.5 to GLM-5.2: `<think>` first, then calls as a name and pairs of `<arg_key>` and `<arg_value>`.

Since GLM-4.7 nothing is between these; before, each was on a line of its own. See `untyped_values` for the values.

Source: the chat templates of zai-org/GLM-4.5, GLM-4.7 and GLM-5.2.
"""

from __future__ import annotations

from services.tokenizer.replies.calls.untyped_values import UntypedCallParser
from services.tokenizer.replies.calls.value_tags import ValueTags
from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.parser import MAX_NAME_LENGTH
from services.tokenizer.replies.reader import SPACE, Reading
from services.tokenizer.text.markers import Markers

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
KEY_BEGIN, KEY_END = "<arg_key>", "</arg_key>"
VALUE_BEGIN, VALUE_END = "<arg_value>", "</arg_value>"

_OPENINGS = Markers(CALL_BEGIN, "\n" + CALL_BEGIN)
_CALL_ENDS = Markers(CALL_END, CALL_BEGIN)
_NAME_ENDS = Markers(KEY_BEGIN, CALL_END, "\n", "{", "`")
_KEY_ENDS = Markers(KEY_END, VALUE_BEGIN)
_TAGS = ValueTags(VALUE_END, argument=KEY_BEGIN, closings=(CALL_END,), openings=(CALL_BEGIN,))
# What comes where the end of a call is missing.
_AROUND = Markers(CALL_BEGIN)


class Glm4Parser(UntypedCallParser):
    """See the module docstring."""

    markup = frozenset(
        {"<think>", "</think>", CALL_BEGIN, CALL_END, KEY_BEGIN, KEY_END, VALUE_BEGIN, VALUE_END},
    )
    call_openings = _OPENINGS
    tags = _TAGS
    think_markup = THINK_MARKUP["glm4"]

    def _read(self) -> Reading[None]:
        yield from self._read_reply(self._read_call)

    def _read_call(self, _: str) -> Reading[None]:
        reader = self._reader
        if (yield from self._read_marked_calls(CALL_END)):
            return
        name = self._offered_name((yield from self._read_name(_NAME_ENDS, max_length=MAX_NAME_LENGTH)))
        yield from reader.skip(SPACE)
        if (yield from reader.one_of(KEY_BEGIN)):
            yield from self._read_pairs(name)
        else:
            yield from self._read_whole_arguments(lambda: self._begin_call(name), _CALL_ENDS)
            yield from self._close(CALL_END, around=_AROUND)
        yield from self._skip_after_call("\n")

    def _read_pairs(self, name: str) -> Reading[None]:
        reader = self._reader
        self._begin_call(name)
        is_first, end = True, KEY_BEGIN
        while end == KEY_BEGIN:
            key = yield from self._read_key()
            self._put_key(key, is_first=is_first)
            if not (yield from self._read_value(name, key, is_text=self._forms_of(name).is_text(key))):
                return
            is_first = False
            end = yield from self._close(KEY_BEGIN, CALL_END, around=_AROUND)
        self._end_object(end, is_empty=False)
        reader.accept()

    def _read_key(self) -> Reading[str]:
        """Read a key after its beginning, and what is before its value. One of the two tags between may be missing."""
        reader = self._reader
        written, end = yield from reader.until(_KEY_ENDS, max_length=MAX_NAME_LENGTH)
        if end == KEY_END:
            before = reader.num_read
            yield from reader.skip(SPACE)
            if not (yield from reader.one_of(VALUE_BEGIN)):
                reader.position = reader.mark + before
                yield from reader.one_of("\n")
        return written.strip()

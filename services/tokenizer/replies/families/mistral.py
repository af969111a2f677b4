"""Mistral: `[THINK]` first, then calls after `[TOOL_CALLS]`, as a JSON list, or each as a name, `[ARGS]` and arguments.

Source: the chat templates of mistralai/Mistral-Nemo-Instruct-2407 and mistralai/Magistral-Small-2509, and the
documentation of mistral-common's tokenizers.
"""

from __future__ import annotations

from services.tokenizer.replies.calls.json_calls import JsonCallParser
from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.parser import MAX_NAME_LENGTH
from services.tokenizer.replies.reader import SPACE, Reading
from services.tokenizer.text.markers import Markers

CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_OPENINGS = Markers(CALLS, "\n" + CALLS)
_NAME_ENDS = Markers(ARGUMENTS, CALL_ID, "{", "`", CALLS)
_ID_ENDS = Markers(ARGUMENTS, "{", "`", CALLS)
_ENDS = Markers(CALLS)


class MistralParser(JsonCallParser):
    """The model's own ids are left out: they may repeat."""

    think_markup = THINK_MARKUP["mistral"]
    markup = frozenset({CALLS, ARGUMENTS, CALL_ID, think_markup.begin, think_markup.end})
    call_openings = _OPENINGS

    def _read(self) -> Reading[None]:
        yield from self._read_reply(self._read_calls)

    def _read_calls(self, _: str) -> Reading[None]:
        reader = self._reader
        yield from reader.skip(SPACE)
        if (yield from reader.peek()) in ("[", "{", "`"):
            yield from self._read_json_calls(is_bare=False)
        else:
            yield from self._read_named_call()

    def _read_named_call(self) -> Reading[None]:
        reader = self._reader
        name = yield from self._read_name(_NAME_ENDS, max_length=MAX_NAME_LENGTH)
        if (yield from reader.one_of(CALL_ID)):
            yield from self._read_name(_ID_ENDS, max_length=MAX_NAME_LENGTH)
        yield from reader.one_of(ARGUMENTS)
        yield from self._read_whole_arguments(lambda: self._begin_call(name), _ENDS, is_last=True)

"""Kimi K2: `<think>` first, then calls between dedicated markers, each after an id that has the tool's name.

The id is `functions.NAME:INDEX`, where INDEX counts the calls of the conversation. It comes back as the model wrote it,
since the template shows nothing else of a call but its arguments. One that is used already gets the next index that is
free; models also leave out the prefix, or the index.

Source: docs/tool_call_guidance.md and chat_template.jinja of moonshotai/Kimi-K2-Instruct.
"""

from __future__ import annotations

import contextlib
import itertools
import re

from services.tokenizer.chat.conversation import FUNCTIONS
from services.tokenizer.replies.calls.json_calls import JsonCallParser
from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.parser import MAX_NAME_LENGTH
from services.tokenizer.replies.reader import Reading, UnparsableError
from services.tokenizer.text.markers import Markers

CALLS_BEGIN, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"

# As models also write them: these are no tokens.
_OTHER_BEGIN, _OTHER_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"

_OPENINGS = Markers(CALLS_BEGIN, "\n" + CALLS_BEGIN, _OTHER_BEGIN, "\n" + _OTHER_BEGIN, CALL_BEGIN)
# An id alone is a call without arguments.
_SEPARATORS = Markers(ARGUMENTS, CALL_END, CALLS_END, _OTHER_END)
_ENDS = Markers(CALL_END, CALLS_END, _OTHER_END, CALL_BEGIN, CALLS_BEGIN, _OTHER_BEGIN)
# What comes where the end of a call, or of all, is missing.
_AROUND = Markers(CALLS_END, _OTHER_END, CALL_BEGIN, CALLS_BEGIN, _OTHER_BEGIN)
_SECTIONS = Markers(CALLS_BEGIN, _OTHER_BEGIN)
_INDEX = re.compile(":([0-9]+)$")
_MAX_ID_LENGTH = len(FUNCTIONS) + MAX_NAME_LENGTH + 8


class KimiK2Parser(JsonCallParser):
    """See the module docstring."""

    markup = frozenset({"<think>", "</think>", CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, ARGUMENTS})
    call_openings = _OPENINGS
    think_markup = THINK_MARKUP["kimi_k2"]

    def _read(self) -> Reading[None]:
        yield from self._read_reply(self._read_calls)

    def _read_calls(self, opening: str) -> Reading[None]:
        reader = self._reader
        if opening != CALL_BEGIN:
            if (yield from self._read_marked_calls(CALLS_END, _OTHER_END)):
                return
            yield from reader.expect(CALL_BEGIN)
        while True:
            yield from self._read_call()
            if (yield from self._close(CALL_BEGIN, CALLS_END, _OTHER_END, around=_SECTIONS)) != CALL_BEGIN:
                break
        yield from self._skip_after_call("\n")

    def _read_call(self) -> Reading[None]:
        reader = self._reader
        written = yield from self._read_name(_SEPARATORS, max_length=_MAX_ID_LENGTH)
        yield from reader.one_of(ARGUMENTS)
        name, index = self._name_and_index(written)
        yield from self._read_whole_arguments(lambda: self._begin_call(name, self._free_id(name, index)), _ENDS)
        yield from self._close(CALL_END, around=_AROUND)
        reader.accept()

    def _name_and_index(self, written: str) -> tuple[str, str]:
        """The tool's name in an id, and the index, empty if there is none.

        A tool's own name can begin or end like the rest of an id: what is offered decides.
        """
        index = _INDEX.search(written)
        ends = [(written[: index.start()], index[1]), (written, "")] if index else [(written, "")]
        for text, number in ends:
            with contextlib.suppress(UnparsableError):
                return self._offered_name(text), number
        raise UnparsableError

    def _free_id(self, name: str, index: str) -> str:
        """The id with that index, or else with the first one that is free from the number of calls so far."""
        indices = itertools.count(self._num_calls + len(self._setting.earlier_ids))
        ids = (f"{FUNCTIONS}{name}:{each}" for each in itertools.chain([index] if index else [], indices))
        return next(each for each in ids if each not in self._ids)

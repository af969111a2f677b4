"""Hermes and Qwen: `<think>` first, then calls as JSON between `<tool_call>` and `</tool_call>`.

Source: the chat templates of NousResearch/Hermes-2-Pro-Llama-3-8B and Qwen/Qwen3-8B.
"""

from __future__ import annotations

from services.tokenizer.replies.calls.json_calls import JsonCallParser
from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.reader import Reading, UnparsableError
from services.tokenizer.text.markers import Markers

_CALL_BEGIN, _CALL_END = "<tool_call>", "</tool_call>"
_OPENINGS = Markers(_CALL_BEGIN, "\n" + _CALL_BEGIN)


class HermesParser(JsonCallParser):
    """See the module docstring."""

    markup = frozenset({"<think>", "</think>", _CALL_BEGIN, _CALL_END})
    call_openings = _OPENINGS
    think_markup = THINK_MARKUP["hermes"]

    def _read(self) -> Reading[None]:
        yield from self._read_reply(self._read_calls)

    def _read_calls(self, _: str) -> Reading[None]:
        if not (yield from self._read_marked_calls(_CALL_END)):
            raise UnparsableError

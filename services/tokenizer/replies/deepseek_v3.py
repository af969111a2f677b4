"""DeepSeek-V3, R1 and V3.1: `<think>` first, then calls between dedicated markers.

V3 and R1 write `function<sep>NAME`, a line break and the arguments in a Markdown code fence; V3.1 writes
`NAME<sep>ARGUMENTS`.

Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and deepseek-ai/DeepSeek-V3.1.
"""

from __future__ import annotations

from services.tokenizer.replies.openings import THINK_MARKUP
from services.tokenizer.replies.parser import MAX_NAME_LENGTH, ReplyParser
from services.tokenizer.replies.reader import SPACE, Reading
from services.tokenizer.text.markers import Markers

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

_OPENINGS = Markers(CALLS_BEGIN, "\n" + CALLS_BEGIN, CALL_BEGIN)
_SEPARATORS = Markers(SEPARATOR)
_FENCE, _FENCES = "```", Markers("```json")


class DeepseekV3Parser(ReplyParser):
    """See the module docstring."""

    markup = frozenset({"<think>", "</think>", CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR})
    call_openings = _OPENINGS
    think_markup = THINK_MARKUP["deepseek_v3"]

    def _read(self) -> Reading[None]:
        yield from self._read_reply(self._read_calls)

    def _read_calls(self, opening: str) -> Reading[None]:
        reader = self._reader
        if opening != CALL_BEGIN:
            yield from reader.skip(SPACE)
            yield from reader.expect(CALL_BEGIN)
        while True:
            yield from self._read_call()
            if (yield from self._close(CALL_BEGIN, CALLS_END)) != CALL_BEGIN:
                break
        yield from self._skip_after_call("\n")

    def _read_call(self) -> Reading[None]:
        reader = self._reader
        name, _ = yield from reader.until(_SEPARATORS, max_length=MAX_NAME_LENGTH)
        yield from reader.skip(SPACE)
        is_fenced = (yield from reader.peek()) != "{"
        if is_fenced:
            name, _ = yield from reader.until(_FENCES, max_length=MAX_NAME_LENGTH)
            yield from reader.skip(SPACE)
            yield from reader.expect("{")
            reader.position -= 1
        self._begin_call(name.strip())
        yield from self._read_arguments()
        if is_fenced:
            yield from self._close(_FENCE)
        yield from self._close(CALL_END)
        reader.accept()

"""The tokens of an answer, and their text, reasoning and calls, from when they certainly belong to it."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.replies.parser import ReplyParser
from services.tokenizer.replies.parts import ReasoningPart, ReplyPart, TextPart, ToolCallPart
from services.tokenizer.text.detokenizer import Detokenizer
from services.tokenizer.text.stop_strings import StopMatcher

# The order of the parts in a response.
_RANKS: dict[type[ReplyPart], int] = {ReasoningPart: 0, TextPart: 1, ToolCallPart: 2}


class Completion:
    """Takes tokens, and returns them and their text once they certainly belong to the answer.

    Invariant: `_late_ids` are the tokens after a completed stop string while another, which began earlier, may still be
    completed, and `_late_parts` the reasoning and calls in them. They belong to the answer only if it is.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        *,
        parser: ReplyParser | None = None,
        includes_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Detokenizer and parser must be new; without a parser, all is text.

        `includes_stop` keeps the stop string in the text. One completed within the first `min_tokens` tokens is
        ordinary text.
        """
        self._detokenizer = detokenizer
        self._parser = parser
        self.has_parser = parser is not None
        self.has_stop_strings = bool(stop_strings)
        self._matcher = StopMatcher(stop_strings, includes_stop=includes_stop) if stop_strings else None
        self._min_tokens = min_tokens
        self._texts: list[str] = []
        # With a parser: certain parts, texts among them.
        self._parts: list[ReplyPart] = []
        self._late_parts: list[ReasoningPart | ToolCallPart] = []
        self._token_ids: list[int] = []
        self._late_ids: list[int] = []
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer; None until that is certain."""
        if self._matcher is None or not self._matcher.is_decided or self._matcher.candidate is None:
            return None
        return self._matcher.candidate.stop

    @property
    def is_over(self) -> bool:
        """Whether a tool call has ended the answer, as requested."""
        return self._parser is not None and self._parser.is_over

    def push(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens; those after a stop string, or a call that ends the answer, are dropped."""
        if self._matcher is None and self._parser is None:
            # The hot path: most requests have no stop strings, and every token passes here.
            self._accept(token_ids)
            self._texts.append(self._detokenizer.push(token_ids))
            return
        for token_id in token_ids:
            self._take_in(self._detokenizer.push((token_id,)), (token_id,))

    def push_silent(self, token_ids: Sequence[int]) -> None:
        """As `push`, without the text of the last token."""
        self.push(token_ids[:-1])
        self._take_in("", token_ids[-1:])

    def finish(self, *, is_cut: bool = False) -> None:
        """No more tokens follow, maybe since it is cut off: held-back text becomes certain, or a stop string does."""
        self._take_in(self._detokenizer.flush(), ())
        if self._parser is not None and self.stop_string is None:
            self._watch(self._parser.finish(is_cut=is_cut), ())
        if self._matcher is not None and not self._matcher.is_decided:
            self._put_text(self._matcher.finish())

    def take(self) -> tuple[str, list[int]]:
        """Certain text, unless there is a parser, and tokens since the last call. Text may lag behind tokens."""
        text, token_ids = "".join(self._texts), self._token_ids
        self._texts, self._token_ids = [], []
        return text, token_ids

    @property
    def has_parts(self) -> bool:
        """Whether there is more for `take_parts`."""
        return bool(self._parts)

    def take_parts(self) -> list[ReplyPart]:
        """The next parts of a reply that is parsed: as many as follow each other as reasoning, text, and calls."""
        ranks = [_RANKS[type(part)] for part in self._parts]
        end = next((at for at in range(1, len(ranks)) if ranks[at] < ranks[at - 1]), len(ranks))
        parts, self._parts = self._parts[:end], self._parts[end:]
        return parts

    def put_back(self, token_ids: list[int]) -> None:
        """Return tokens of the last `take`; the next one takes them first."""
        self._token_ids = token_ids + self._token_ids

    def _take_in(self, text: str, token_ids: Sequence[int]) -> None:
        if self._parser is None:
            self._watch([TextPart(text)] if text else [], token_ids)
        elif self.stop_string is None and not self._parser.is_over:
            was_reasoning = self._parser.is_reasoning
            parts = self._parser.feed(text)
            if was_reasoning or self._parser.is_reasoning or any(isinstance(part, ReasoningPart) for part in parts):
                self.num_reasoning_tokens += len(token_ids)
            self._watch(parts, token_ids)

    def _watch(self, parts: Sequence[ReplyPart], token_ids: Sequence[int]) -> None:
        """Take the parts that `token_ids` released."""
        matcher = self._matcher
        if matcher is not None and matcher.is_decided:
            return
        if matcher is not None:
            # Without a candidate there are no late tokens, so `num_tokens` counts all tokens before these.
            matcher.is_watchful = self.num_tokens + len(token_ids) > self._min_tokens
        candidate = None if matcher is None else matcher.candidate
        self._late_ids += token_ids
        for part in parts:
            if not isinstance(part, TextPart):
                self._late_parts.append(part)
                continue
            if matcher is None or matcher.candidate is None:
                self._accept_late_parts()
            self._put_text(part.text if matcher is None else matcher.push(part.text))
            if matcher is not None and matcher.is_decided:
                break
        if matcher is None or matcher.candidate is None or matcher.candidate is not candidate:
            self._accept(self._late_ids)
            self._late_ids = []
            self._accept_late_parts()

    def _put_text(self, text: str) -> None:
        if self._parser is None:
            self._texts.append(text)
        elif text:
            self._parts.append(TextPart(text))

    def _accept_late_parts(self) -> None:
        self._parts += self._late_parts
        self._late_parts = []

    def _accept(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids
        self.num_tokens += len(token_ids)

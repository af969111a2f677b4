"""One choice's tokens and text: which are certain, and which were taken. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.text.detokenizer import Detokenizer
from services.tokenizer.text.stop_strings import StopMatcher


class Completion:
    """Takes tokens, and returns them and their text once they certainly belong to the answer.

    Invariant: `_late_ids` are the tokens after a completed stop string while another, which began earlier, may still be
    completed. They belong to the answer only if it is.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        *,
        includes_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """The detokenizer must be new; `includes_stop` keeps the stop string in the text.

        A stop string completed within the first `min_tokens` tokens is ordinary text.
        """
        self._detokenizer = detokenizer
        self.has_stop_strings = bool(stop_strings)
        self._matcher = StopMatcher(stop_strings, includes_stop=includes_stop) if stop_strings else None
        self._min_tokens = min_tokens
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._late_ids: list[int] = []
        self.num_tokens = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer; None until that is certain."""
        if self._matcher is None or not self._matcher.is_decided or self._matcher.candidate is None:
            return None
        return self._matcher.candidate.stop

    def push(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens; those after a stop string are dropped."""
        if self._matcher is None:
            # The hot path: most requests have no stop strings, and every token passes here.
            self._token_ids += token_ids
            self.num_tokens += len(token_ids)
            self._texts.append(self._detokenizer.push(token_ids))
            return
        for token_id in token_ids:
            self._watch(self._matcher, self._detokenizer.push((token_id,)), (token_id,))

    def push_silent(self, token_ids: Sequence[int]) -> None:
        """As `push`, without the text of the last token."""
        self.push(token_ids[:-1])
        if self._matcher is None:
            self._accept(token_ids[-1:])
        else:
            self._watch(self._matcher, "", token_ids[-1:])

    def finish(self) -> None:
        """No more tokens follow: held-back text becomes certain, or a stop string does."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            self._texts.append(rest)
            return
        self._watch(self._matcher, rest, ())
        if not self._matcher.is_decided:
            self._texts.append(self._matcher.finish())

    def take(self) -> tuple[str, list[int]]:
        """The certain text and tokens since the last call. Text may lag behind tokens."""
        text, token_ids = "".join(self._texts), self._token_ids
        self._texts, self._token_ids = [], []
        return text, token_ids

    def put_back(self, token_ids: list[int]) -> None:
        """Return tokens of the last `take`; the next one takes them first."""
        self._token_ids = token_ids + self._token_ids

    def _watch(self, matcher: StopMatcher, text: str, token_ids: Sequence[int]) -> None:
        if matcher.is_decided:
            return
        candidate = matcher.candidate
        # Without a candidate there are no late tokens, so `num_tokens` counts all tokens before these.
        matcher.is_watchful = self.num_tokens + len(token_ids) > self._min_tokens
        self._texts.append(matcher.push(text))
        self._late_ids += token_ids
        if matcher.candidate is None or matcher.candidate is not candidate:
            self._accept(self._late_ids)
            self._late_ids = []

    def _accept(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids
        self.num_tokens += len(token_ids)

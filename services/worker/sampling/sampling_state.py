"""What rarer sampling options keep for one sequence."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.worker.drawing.row_edits import RowEdits
from services.worker.sampling.reasoning import Reasoning
from shared.request.sampling_params import SamplingOptions
from shared.step.columns import Int32Column

_FloatRow = npt.NDArray[np.float32]
_TokenIds = npt.NDArray[np.int64]

_NO_IDS: _TokenIds = np.empty(0, np.int64)
_NO_VALUES: _FloatRow = np.empty(0, np.float32)


class GrammarMatcher(Protocol):
    """Follows one completion through its grammar."""

    has_failed: bool
    """Whether the latest mask allows only the end because the grammar cannot be followed further."""

    def mask(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next, [logits_width], True for allowed; read-only.

        End-of-sequence tokens are allowed where the text may end, and only they once it has ended or failed.
        """

    def advance(self, token_id: int) -> None:
        """Advance by the next token; after one that does not fit, only the end is allowed."""

    def prepare(self) -> None:
        """Start computing the next mask, if that helps: `mask` is called after the next forward pass."""


class SamplingState:
    """One sequence's options and what they need of its tokens. A sequence without options has no state.

    Invariant: with `SamplingOptions.needs_all_tokens`, every token was passed to `extend` or `append` once, in order.
    """

    def __init__(
        self,
        options: SamplingOptions,
        *,
        stop_token_ids: Int32Column,
        num_prompt_tokens: int,
        logits_width: int,
        matcher: GrammarMatcher | None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """Begin with no token known.

        Args:
            options: In range.
            stop_token_ids: Not drawn before `options.min_tokens` completion tokens, each below `logits_width`.
            num_prompt_tokens: At least 1.
            logits_width: Length of each row of logits.
            matcher: At the beginning of the completion; None without a grammar.
            eos_token_ids: Not drawn while the completion reasons, each below `logits_width`.
        """
        self.options = options
        self.num_prompt_tokens = num_prompt_tokens
        self._matcher = matcher
        # Over if there is none, or no grammar comes after it.
        self._reasoning: Reasoning | None = None
        if matcher is not None and options.reasoning_end:
            self._reasoning = Reasoning(options.reasoning_begin, options.reasoning_end)
        self._eos_ids = np.array(sorted(eos_token_ids), np.int64)
        self._num_known = 0
        self._stop_ids = stop_token_ids.astype(np.int64)
        self._bias_ids = np.array([token_id for token_id, _ in options.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in options.logit_bias], np.float32)
        self._allowed: npt.NDArray[np.bool_] | None = None
        if options.allowed_token_ids:
            self._allowed = np.zeros(logits_width, np.bool_)
            self._allowed[list(options.allowed_token_ids)] = True
        self._bad_words = _BadWords(options.bad_words) if options.bad_words else None
        self._seen = TokenCounts() if options.repetition_penalty != 1.0 else None
        counts_completion = options.presence_penalty != 0.0 or options.frequency_penalty != 0.0
        self._drawn = TokenCounts() if counts_completion else None
        self._changes_any_text = bool(
            options.min_tokens
            or options.logit_bias
            or options.allowed_token_ids
            or options.bad_words
            or options.repetition_penalty != 1.0
            or counts_completion
        )
        # Whether `process` may change anything: log-probabilities and what filters the draw do not.
        self.changes_logits = matcher is not None or self._changes_any_text

    @property
    def needs_logits(self) -> bool:
        """Whether a step does more with the sequence's logits than draw a token."""
        return self.changes_logits or self.options.num_top is not None

    @property
    def is_free(self) -> bool:
        """Whether every next token has the same edits until the reasoning is over: an end of sequence is not drawn."""
        return self._is_reasoning and not self._changes_any_text

    @property
    def has_failed(self) -> bool:
        """Whether the last edits end the text only because the grammar could not be followed."""
        return self._matcher is not None and self._matcher.has_failed

    def extend(self, token_ids: Int32Column) -> None:
        """Add known tokens: the prompt's, then a resumed sequence's completion."""
        num_of_prompt = min(max(self.num_prompt_tokens - self._num_known, 0), len(token_ids))
        self._num_known += len(token_ids)
        if self._seen is not None:
            self._seen.add(token_ids)
        completion = token_ids[num_of_prompt:]
        if self._drawn is not None:
            self._drawn.add(completion)
        if self._bad_words is not None:
            self._bad_words.extend(completion.tolist())
        if self._matcher is not None:
            for token_id in completion.tolist():
                self._advance(self._matcher, token_id)
            self.prepare()

    def append(self, token_id: int) -> None:
        """Add the token just drawn."""
        if self._seen is not None:
            self._seen.add_one(token_id)
        if self._drawn is not None:
            self._drawn.add_one(token_id)
        if self._bad_words is not None:
            self._bad_words.extend((token_id,))
        if self._matcher is not None:
            self._advance(self._matcher, token_id)

    def prepare(self) -> None:
        """Start computing what the next token needs besides logits."""
        if self._matcher is not None and not self._is_reasoning:
            self._matcher.prepare()

    def process(self, logits: _FloatRow, position: int) -> _FloatRow:
        """A new row of logits with the options applied; see `edits` and `RowEdits.apply`."""
        return self.edits(position).apply(logits)

    def edits(self, position: int) -> RowEdits:
        """What the options change in the logits of the next token.

        `position` is the sequence's length so far, where the token will be.
        """
        repeated = _NO_IDS if self._seen is None else self._seen.token_ids
        drawn, penalties = _NO_IDS, _NO_VALUES
        if self._drawn is not None:
            drawn, counts = self._drawn.token_ids, self._drawn.counts
            penalties = (self.options.frequency_penalty * counts + self.options.presence_penalty).astype(np.float32)
        return RowEdits(
            self._mask(),
            self._banned_ids(position),
            self._bias_ids,
            self._biases,
            repeated,
            self.options.repetition_penalty,
            drawn,
            penalties,
        )

    def _banned_ids(self, position: int) -> _TokenIds:
        banned = _NO_IDS if self._bad_words is None else self._bad_words.banned_ids()
        if position - self.num_prompt_tokens < self.options.min_tokens:
            banned = np.union1d(banned, self._stop_ids)
        if self._is_reasoning:
            banned = np.union1d(banned, self._eos_ids)
        return banned

    def _mask(self) -> npt.NDArray[np.bool_] | None:
        """The tokens that may come next; if the grammar allows none of the request's, the grammar's."""
        if self._matcher is None or self._is_reasoning:
            return self._allowed
        mask = self._matcher.mask()
        if self._allowed is None:
            return mask
        both: npt.NDArray[np.bool_] = mask & self._allowed
        return both if both.any() else mask

    @property
    def _is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_open

    def _advance(self, matcher: GrammarMatcher, token_id: int) -> None:
        """The matcher takes what opens and closes the reasoning, and nothing in between."""
        if not self._is_reasoning:
            matcher.advance(token_id)
        if self._reasoning is not None and self._reasoning.advance(token_id):
            for end_id in self.options.reasoning_end:
                matcher.advance(end_id)


class TokenCounts:
    """How often each token occurs, in parallel columns, ascending by token id."""

    def __init__(self) -> None:
        self.token_ids: _TokenIds = _NO_IDS
        self.counts: _TokenIds = _NO_IDS

    def add(self, token_ids: Int32Column) -> None:
        """Count tokens, in any order."""
        new_ids, new_counts = np.unique(token_ids, return_counts=True)
        both = np.concatenate((self.token_ids, new_ids))
        self.token_ids, places = np.unique(both, return_inverse=True)
        counts = np.zeros(len(self.token_ids), np.int64)
        np.add.at(counts, places, np.concatenate((self.counts, new_counts)))
        self.counts = counts

    def add_one(self, token_id: int) -> None:
        """Count a token."""
        place = int(self.token_ids.searchsorted(token_id))
        if place < len(self.token_ids) and self.token_ids[place] == token_id:
            self.counts[place] += 1
        else:
            self.token_ids = np.insert(self.token_ids, place, token_id)
            self.counts = np.insert(self.counts, place, 1)


class _BadWords:
    """Token sequences that must not occur, and the completion's last tokens."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self._always = tuple(word[0] for word in words if len(word) == 1)
        self._runs = tuple((word[:-1], word[-1]) for word in words if len(word) > 1)
        self._end: deque[int] = deque(maxlen=max((len(before) for before, _ in self._runs), default=0))

    def extend(self, token_ids: list[int] | tuple[int, ...]) -> None:
        self._end.extend(token_ids)

    def banned_ids(self) -> _TokenIds:
        """Tokens that would complete a bad word, ascending."""
        end = tuple(self._end)
        completing = {last for before, last in self._runs if end[-len(before) :] == before}
        return np.array(sorted(completing.union(self._always)), np.int64)

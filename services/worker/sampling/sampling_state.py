"""What the rarer sampling options need to know of one sequence, and what they make of its logits.

A sequence without such options has no state. What an option does not need is not kept: token counts only for
penalties, the completion's end only for bad words.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.worker.step import Int32Column
from shared.limits import MAX_LOGIT_BIAS, MAX_PENALTY, MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, SamplingOptions

_FloatRow = npt.NDArray[np.float32]
_TokenIds = npt.NDArray[np.int64]

_NO_IDS: _TokenIds = np.empty(0, np.int64)
_LIMITS = np.finfo(np.float32)


class GrammarMatcher(Protocol):
    """Follows one sequence's completion through its grammar."""

    # Whether the newest mask is only the end because the grammar cannot be followed any further.
    has_failed: bool

    def mask(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next, [logits_width], True for allowed; not written by the caller.

        End-of-sequence tokens are where the text may end, and they alone once nothing else fits.
        """

    def advance(self, token_id: int) -> None:
        """Take in the completion's next token; one that does not fit leaves only the end."""

    def prepare(self) -> None:
        """Start to compute the next mask, if that helps: `mask` is called once a forward pass has ended."""


class SamplingState:
    """One sequence's options, and what its tokens so far make of them.

    Invariant: with an option that needs all tokens (`SamplingOptions.needs_all_tokens`), every token of the sequence
    was given to `extend` or `append` once, in order. The other options need none of them.
    """

    def __init__(
        self,
        options: SamplingOptions,
        *,
        stop_token_ids: Int32Column,
        num_prompt_tokens: int,
        logits_width: int,
        matcher: GrammarMatcher | None,
    ) -> None:
        """Begin with no token known.

        Args:
            options: The request's.
            stop_token_ids: What is not drawn before `options.min_tokens` completion tokens; an id that the model does
                not have never is.
            num_prompt_tokens: At least 1.
            logits_width: Entries of each row of logits.
            matcher: The grammar's, before the completion's first token; None without a grammar.

        Raises:
            ValueError: a number of `options` is out of range.
        """
        _check_options(options, logits_width)
        self.options = options
        self.num_prompt_tokens = num_prompt_tokens
        self._matcher = matcher
        self._num_known = 0
        self._stop_ids = stop_token_ids[(stop_token_ids >= 0) & (stop_token_ids < logits_width)].astype(np.int64)
        self._bias_ids = np.array([token_id for token_id, _ in options.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in options.logit_bias], np.float32)
        self._bad_words = _BadWords(options.bad_words) if options.bad_words else None
        self._seen = TokenCounts() if options.repetition_penalty != 1.0 else None
        counts_completion = options.presence_penalty != 0.0 or options.frequency_penalty != 0.0
        self._drawn = TokenCounts() if counts_completion else None
        # Whether `process` may change anything: not if log-probabilities or `min_p` are all that is asked for.
        self.changes_logits = bool(
            matcher is not None
            or options.min_tokens
            or options.logit_bias
            or options.bad_words
            or options.repetition_penalty != 1.0
            or counts_completion
        )

    @property
    def has_failed(self) -> bool:
        """Whether the row that `process` just made ends the text only because its grammar could not be followed."""
        return self._matcher is not None and self._matcher.has_failed

    def extend(self, token_ids: Int32Column) -> None:
        """Take in known tokens: the prompt's, then the completion's, of which a resumed sequence has some."""
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
                self._matcher.advance(token_id)
            self._matcher.prepare()

    def append(self, token_id: int) -> None:
        """Take in the token that was just drawn."""
        if self._seen is not None:
            self._seen.add_one(token_id)
        if self._drawn is not None:
            self._drawn.add_one(token_id)
        if self._bad_words is not None:
            self._bad_words.extend((token_id,))
        if self._matcher is not None:
            self._matcher.advance(token_id)

    def prepare(self) -> None:
        """Start what can be computed for the next token before its logits are there."""
        if self._matcher is not None:
            self._matcher.prepare()

    def process(self, logits: _FloatRow, position: int) -> _FloatRow:
        """Apply grammar, bad words, `min_tokens`, `logit_bias` and penalties, in this order.

        Args:
            logits: [logits_width], the largest of them finite; not written.
            position: That of the token to be drawn: the tokens that the sequence has so far.

        Returns:
            A new row whose largest entry is finite; what cannot be drawn is -Inf.
        """
        processed = self._masked(logits, position)
        if len(self._bias_ids):
            processed[self._bias_ids] += self._biases
        if self._seen is not None:
            _penalize_repetition(processed, self._seen.token_ids, self.options.repetition_penalty)
        if self._drawn is not None:
            penalties = self.options.frequency_penalty * self._drawn.counts + self.options.presence_penalty
            processed[self._drawn.token_ids] -= penalties.astype(np.float32)
        return processed

    def _masked(self, logits: _FloatRow, position: int) -> _FloatRow:
        """A new row without what must not be drawn. If nothing were left, the grammar alone decides."""
        allowed = logits.copy() if self._matcher is None else _only(self._matcher.mask(), logits)
        banned = self._banned_ids(position)
        values = allowed[banned]
        allowed[banned] = -np.inf
        if len(banned) and allowed.max() == -np.inf:
            allowed[banned] = values
        return allowed

    def _banned_ids(self, position: int) -> _TokenIds:
        banned = _NO_IDS if self._bad_words is None else self._bad_words.banned_ids()
        if position - self.num_prompt_tokens < self.options.min_tokens:
            banned = np.union1d(banned, self._stop_ids)
        return banned


class TokenCounts:
    """How often each token occurs: parallel columns, ascending by token id."""

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
        """Count one token more."""
        place = int(self.token_ids.searchsorted(token_id))
        if place < len(self.token_ids) and self.token_ids[place] == token_id:
            self.counts[place] += 1
        else:
            self.token_ids = np.insert(self.token_ids, place, token_id)
            self.counts = np.insert(self.counts, place, 1)


class _BadWords:
    """Runs of tokens that the completion must not hold, and the end of the completion."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self._always = tuple(word[0] for word in words if len(word) == 1)
        self._runs = tuple((word[:-1], word[-1]) for word in words if len(word) > 1)
        self._end: deque[int] = deque(maxlen=max((len(before) for before, _ in self._runs), default=0))

    def extend(self, token_ids: list[int] | tuple[int, ...]) -> None:
        self._end.extend(token_ids)

    def banned_ids(self) -> _TokenIds:
        """What would complete a run, ascending."""
        end = tuple(self._end)
        completing = {last for before, last in self._runs if end[-len(before) :] == before}
        return np.array(sorted(completing.union(self._always)), np.int64)


def _check_options(options: SamplingOptions, logits_width: int) -> None:
    for ids in ([token_id for token_id, _ in options.logit_bias], *options.bad_words):
        if ids and not 0 <= min(ids) <= max(ids) < logits_width:
            raise ValueError("a token id is out of range")
    is_good = (
        0.0 <= options.min_p <= 1.0
        and MIN_REPETITION_PENALTY <= options.repetition_penalty <= MAX_REPETITION_PENALTY
        and abs(options.presence_penalty) <= MAX_PENALTY
        and abs(options.frequency_penalty) <= MAX_PENALTY
        and all(abs(bias) <= MAX_LOGIT_BIAS for _, bias in options.logit_bias)
    )
    if not is_good:
        raise ValueError("min_p, a penalty or a bias is out of range")


def _only(mask: npt.NDArray[np.bool_], logits: _FloatRow) -> _FloatRow:
    """A new row with the logits of allowed tokens, the others -Inf; a mask that allows none is no mask."""
    allowed: _FloatRow = np.where(mask, logits, np.float32(-np.inf))
    if allowed.max() > -np.inf:
        return allowed
    # The model gives no allowed token a probability: the grammar wins.
    return np.where(mask, np.float32(0), np.float32(-np.inf)) if mask.any() else logits.copy()


def _penalize_repetition(logits: _FloatRow, token_ids: _TokenIds, penalty: float) -> None:
    """Divide positive logits of these tokens and multiply negative ones, in place.

    Source: Keskar et al., arXiv:1909.05858, section 4.1, with the sign taken into account.
    """
    values = logits[token_ids].astype(np.float64)
    penalized = np.where(values > 0, values / penalty, values * penalty)
    # What is finite stays finite: a row of which nothing is has no token to draw.
    bounded = np.clip(penalized, _LIMITS.min, _LIMITS.max)
    logits[token_ids] = np.where(values > -np.inf, bounded, values)

"""Drafts looked up among a sequence's own tokens. Plain numpy.

The host looks them up once it has read the tokens of the step before, so a device waits meanwhile: 0.24 ms at 1 row and
0.47 ms at 32 (`tests.bench.host_time`). The device does not look them up itself. Only it would know how many drafts a
row has, so the host would have to plan each step with the most drafts of every row, and rows without a match, which are
computed alone today, would cost as much as those with one. Nor is it the look-up that takes long: 3 to 30 µs for a
row of 512 or 4,096 tokens. One numpy form over all rows takes 4 to 15 times as long for 1 row, 0.4 to 3 times for 32.
"""

from __future__ import annotations

import numpy as np

from services.worker.batch.decodes import NO_DRAFTS, Drafts
from services.worker.drafts.drafter import DraftProposer, DraftRows
from shared.step.columns import Int32Column


class LookupProposer(DraftProposer):
    """Looks at each sequence's tokens separately; no state."""

    def propose(self, rows: DraftRows) -> Drafts:
        """See `DraftProposer.propose`; room that a row does not use is left for the next."""
        num_left = rows.most_together
        guesses = [NO_DRAFTS]
        for token_ids, most in zip(rows.token_ids, rows.most.tolist(), strict=True):
            max_tokens = min(most, num_left)
            guesses.append(self.look_up(token_ids, max_tokens) if max_tokens else NO_DRAFTS)
            num_left -= len(guesses[-1])
        counts = np.array([len(guess) for guess in guesses[1:]], np.int32)
        return Drafts(np.concatenate(guesses), counts)

    def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        """Guess up to `max_tokens` next tokens, possibly none.

        Args:
            token_ids: [num_tokens], all known tokens, at least one; not written.
            max_tokens: At least 1.
        """
        raise NotImplementedError


class NgramProposer(LookupProposer):
    """Looks up where the sequence's last tokens occurred before, and proposes what followed there.

    The longest match with up to the last `max_ngram` tokens wins, of equally long ones the latest. What followed may
    run into the proposed tokens: text that repeats with a short period is continued in full.

    Source: Saxena, "Prompt Lookup Decoding", github.com/apoorvumang/prompt-lookup-decoding, 2023; vLLM's
    `NgramProposer`, which takes the earliest match.
    """

    def __init__(self, *, min_ngram: int = 2, max_ngram: int = 8) -> None:
        """A match has at least `min_ngram` tokens; 1 <= `min_ngram` <= `max_ngram`."""
        assert 1 <= min_ngram <= max_ngram
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram

    def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        """See `LookupProposer.look_up`; 4 to 30 µs for 4,096 tokens."""
        num_tokens = len(token_ids)
        # Matches with the end of the sequence, by the index of their last token.
        places = (token_ids[:-1] == token_ids[-1]).nonzero()[0]
        num_agreed, most = 1, self._max_ngram
        start = int(places[-1]) + 1 - most if len(places) else -1
        if start >= 0 and token_ids[start : start + most].tobytes() == token_ids[-most:].tobytes():
            # Text that repeats with a short period has a match in each period, and needs only this one.
            places, num_agreed = places[-1:], most
        while num_agreed < most and len(places):
            before = places[places >= num_agreed]
            longer = before[token_ids[before - num_agreed] == token_ids[-1 - num_agreed]]
            if not len(longer):
                break
            places, num_agreed = longer, num_agreed + 1
        if not len(places) or num_agreed < self._min_ngram:
            return NO_DRAFTS
        first = int(places[-1]) + 1
        return token_ids[first + np.arange(max_tokens) % (num_tokens - first)]

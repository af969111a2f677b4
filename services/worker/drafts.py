"""Guesses of next tokens, which the model then checks several at once (speculative decoding).

Plain numpy. A draft never changes what is generated, only how many tokens a step brings (DESIGN §2.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.worker.step import Int32Column
from shared.limits import MAX_DRAFT_TOKENS

# What a sequence begins with, and how many steps it is left alone at most.
_FIRST_DRAFT = 2
_MAX_STEPS_ALONE = 32
# Bounds the logits of a step, of which each draft needs a row: 1,024 of a vocabulary of 128k are half a GiB.
_MAX_DRAFTED_TOGETHER = 1024

NO_DRAFTS: Int32Column = np.empty(0, np.int32)


class DraftProposer(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        """The next tokens of one sequence, as far as there is a guess.

        Args:
            token_ids: [num_tokens], all tokens known of it, at least one; not written.
            max_tokens: The most that can be used, at least 1.

        Returns:
            [0 to `max_tokens`].
        """


class NgramProposer:
    """Looks up where the sequence's last tokens stood before, and proposes what followed there.

    Of all earlier places it takes those that agree with the most of the last `max_ngram` tokens, and of these the
    latest. What follows may run into the end of the sequence, and goes on with what it proposed there: text that
    repeats itself with a short period is continued in full.

    Source: Saxena, "Prompt Lookup Decoding", github.com/apoorvumang/prompt-lookup-decoding, 2023; vLLM's
    `NgramProposer`, which takes the earliest such place.
    """

    def __init__(self, *, min_ngram: int = 2, max_ngram: int = 8) -> None:
        """Propose where at least the last `min_ngram` tokens stood before; 1 <= `min_ngram` <= `max_ngram`."""
        assert 1 <= min_ngram <= max_ngram
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram

    def propose(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        """See `DraftProposer.propose`; some 10 µs for 4,096 tokens."""
        num_tokens = len(token_ids)
        # Places whose tokens agree with the sequence's end, given by their last token.
        places = np.flatnonzero(token_ids[:-1] == token_ids[-1])
        num_agreed = 1
        while num_agreed < self._max_ngram and len(places):
            before = places[places >= num_agreed]
            longer = before[token_ids[before - num_agreed] == token_ids[-1 - num_agreed]]
            if not len(longer):
                break
            places, num_agreed = longer, num_agreed + 1
        if not len(places) or num_agreed < self._min_ngram:
            return NO_DRAFTS
        first = int(places[-1]) + 1
        return token_ids[first + np.arange(max_tokens) % (num_tokens - first)]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for some sequences: `token_ids` of all of them one behind the other, `counts` of each."""

    token_ids: Int32Column
    counts: Int32Column


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a worker drafts; see `Drafter`."""

    proposer: DraftProposer
    num_draft_tokens: int

    def make_drafter(self) -> Drafter:
        """For a batch that is empty."""
        return Drafter(self.proposer, self.num_draft_tokens)


class Drafter:
    """Keeps the tokens of a batch's sequences, by slot, and drafts from them.

    How much it drafts for a sequence follows from how its last drafts fared: on the CPU a rejected token costs half as
    much time as a row, unless the batch is small.

    Invariant: of each slot in use every known token was told once, in order.
    """

    def __init__(self, proposer: DraftProposer, num_draft_tokens: int) -> None:
        """Begin with an empty batch; `num_draft_tokens` is the most for one sequence in one step."""
        self._proposer = proposer
        self._num_draft_tokens = num_draft_tokens
        self._sequences: dict[int, _DraftedSequence] = {}

    def enter(self, slot: int, token_ids: Int32Column, max_num_tokens: int) -> None:
        """A sequence begins with these tokens, perhaps none; it will never have more than `max_num_tokens`."""
        self._sequences[slot] = _DraftedSequence(max_num_tokens)
        self.extend(slot, token_ids)

    def extend(self, slot: int, token_ids: Int32Column) -> None:
        """More tokens of a prompt."""
        self._sequences[slot].extend(token_ids)

    def leave(self, slots: Int32Column) -> None:
        """Forget sequences."""
        for slot in slots.tolist():
            del self._sequences[slot]

    def propose(self, slots: Int32Column, most: Int32Column, most_together: int) -> Drafts:
        """Draft for the sequences that a step decodes; `record` tells how it went.

        Args:
            slots: Theirs.
            most: [len(slots)], how many tokens each can use, at least 0.
            most_together: How many all of them can use, at least 0; the first ones get theirs first.
        """
        most_together = min(most_together, _MAX_DRAFTED_TOGETHER)
        guesses = [NO_DRAFTS]
        for slot, most_of_slot in zip(slots.tolist(), most.tolist(), strict=True):
            max_tokens = min(most_of_slot, self._num_draft_tokens, most_together)
            guesses.append(self._sequences[slot].draft(self._proposer, max_tokens))
            most_together -= len(guesses[-1])
        counts = np.array([len(guess) for guess in guesses[1:]], np.int32)
        return Drafts(np.concatenate(guesses), counts)

    def record(self, slots: Int32Column, token_ids: Int32Column, counts: Int32Column | None) -> None:
        """The tokens that a step's sequences got; see `SampledTokens`."""
        ends = np.arange(1, len(slots) + 1) if counts is None else np.cumsum(counts)
        start = 0
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            sequence = self._sequences[slot]
            sequence.learn(num_accepted=end - start - 1)
            sequence.extend(token_ids[start:end])
            start = end


class _DraftedSequence:
    """The known tokens of one sequence, and what its drafts are worth.

    As many tokens are drafted as were right the last time, and one more; twice as many once all of them were right.
    When none was, the sequence is left alone for a while, which doubles from one failure to the next.
    """

    def __init__(self, max_num_tokens: int) -> None:
        # Memory that is not touched costs nothing.
        self._token_ids: Int32Column = np.empty(max_num_tokens, np.int32)
        self._num_tokens = 0
        self._num_drafted = 0
        self._most_drafted = _FIRST_DRAFT
        self._num_failures = 0
        self._num_steps_alone = 0

    def extend(self, token_ids: Int32Column) -> None:
        """Known tokens."""
        end = self._num_tokens + len(token_ids)
        self._token_ids[self._num_tokens : end] = token_ids
        self._num_tokens = end

    def draft(self, proposer: DraftProposer, max_tokens: int) -> Int32Column:
        """What `proposer` makes of the tokens, at most `max_tokens`."""
        max_tokens = min(max_tokens, self._most_drafted)
        guess = NO_DRAFTS
        if self._num_steps_alone:
            self._num_steps_alone -= 1
        elif max_tokens > 0:
            guess = proposer.propose(self._token_ids[: self._num_tokens], max_tokens)
        self._num_drafted = len(guess)
        return guess

    def learn(self, num_accepted: int) -> None:
        """How many tokens of the last draft were right."""
        if not self._num_drafted:
            return
        if num_accepted:
            self._num_failures = 0
            are_all_right = num_accepted == self._num_drafted
            self._most_drafted = min(2 * num_accepted, MAX_DRAFT_TOKENS) if are_all_right else num_accepted + 1
        else:
            self._num_steps_alone = min(2**self._num_failures - 1, _MAX_STEPS_ALONE)
            self._num_failures += 1
            self._most_drafted = 1

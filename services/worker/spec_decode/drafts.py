"""Guesses of next tokens, which the model then checks several at once (speculative decoding).

A draft never changes what is generated, only how many tokens a step brings (DESIGN §2.6). Here are whoever keeps the
sequences' tokens and decides how many drafts are worth it (`Drafter`), and what it asks of those who guess
(`DraftProposer`): once a step, for all of its sequences together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.worker.batch.block_tables import BlockTables
from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.step_input import StepInput
from services.worker.forward.kv_cache import KvCache, KvCacheSpec
from services.worker.step import Int32Column
from shared.limits import MAX_DRAFT_TOKENS

# What a sequence begins with, and how many steps it is left alone at most.
_FIRST_DRAFT = 2
_MAX_STEPS_ALONE = 32
# Bounds the logits of a step, of which each draft needs a row: 1,024 of a vocabulary of 128k are half a GiB.
_MAX_DRAFTED_TOGETHER = 1024

NO_DRAFTS: Int32Column = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for some sequences: `token_ids` of all of them one behind the other, `counts` of each."""

    token_ids: Int32Column
    counts: Int32Column


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Sequences to draft for; columns have one entry each."""

    slots: Int32Column
    most: Int32Column  # tokens that are wanted of each, at least 1
    most_together: int  # that all of them can use; the first ones get theirs first
    token_ids: tuple[Int32Column, ...]  # all tokens known of each, at least one; not to be written
    # The worker's. Those of a row hold the places of all its tokens, and of as many more as are wanted of it.
    tables: BlockTables

    @property
    def num_known(self) -> Int32Column:
        """How many tokens are known of each."""
        return np.array([len(token_ids) for token_ids in self.token_ids], np.int32)

    def block_tables(self) -> Int32Column:
        """[num_rows, most blocks of one]."""
        return self.tables.rows(self.slots, int(self.tables.num_blocks(self.slots).max()))

    def counts_in_room(self) -> Int32Column:
        """How many of the wanted tokens `most_together` leaves each."""
        before = np.cumsum(self.most) - self.most
        counts: Int32Column = np.clip(self.most_together - before, 0, self.most).astype(np.int32)
        return counts


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """What a step computed, for proposers that go by it."""

    inputs: StepInput
    hidden: Tensor  # [num_tokens, hidden], what the model returned for the step's tokens; not to be written
    # Tokens of all rows, one row behind the other, as they are inputs of the next step, and how many each has; None:
    # one each.
    token_ids: Int32Column
    counts: Int32Column | None


class DraftProposer:
    """Guesses how sequences go on. One that keeps nothing of them has `propose` alone.

    Guesses may be wrong in any way, but they are tokens that the model knows.
    """

    # What a token needs in a KV cache of the proposer's own.
    kv_cache_spec = KvCacheSpec(())

    def attach(self, limits: BatchLimits, kv_cache: KvCache) -> None:
        """An epoch begins: there is no sequence. Blocks are those of `kv_cache`, which is the model's."""

    def forget(self, slots: Int32Column) -> None:
        """Their sequences left."""

    def observe(self, step: ComputedStep) -> None:
        """A step has been computed, of at least one token."""

    def propose(self, rows: DraftRows) -> Drafts:
        """The next tokens of sequences that a step decodes, as far as there are guesses.

        Args:
            rows: At least one.

        Returns:
            For each row 0 to `most` tokens, `most_together` at most.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a worker drafts; see `Drafter`."""

    proposer: DraftProposer
    num_draft_tokens: int

    def begin(self, limits: BatchLimits, kv_cache: KvCache) -> Drafter:
        """For the batch of a new epoch, which is empty."""
        self.proposer.attach(limits, kv_cache)
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
        self._proposer.forget(slots)
        for slot in slots.tolist():
            del self._sequences[slot]

    def propose(self, slots: Int32Column, most: Int32Column, *, most_together: int, tables: BlockTables) -> Drafts:
        """Draft for the sequences that a step decodes; `record` tells how it went.

        Args:
            slots: Theirs.
            most: [len(slots)], how many tokens each can use, at least 0.
            most_together: How many all of them can use, at least 0; the first ones get theirs first.
            tables: The blocks of every slot.
        """
        most = np.minimum(most, self._num_draft_tokens)
        sequences = [self._sequences[slot] for slot in slots.tolist()]
        wanted = np.array([seq.want(n) for seq, n in zip(sequences, most.tolist(), strict=True)], np.int32)
        rows = np.flatnonzero(wanted)
        most_together = min(most_together, _MAX_DRAFTED_TOGETHER)
        if not len(rows) or not most_together:
            return Drafts(NO_DRAFTS, np.zeros(len(slots), np.int32))
        token_ids = tuple(sequences[row].token_ids for row in rows.tolist())
        drafts = self._proposer.propose(DraftRows(slots[rows], wanted[rows], most_together, token_ids, tables))
        counts = np.zeros(len(slots), np.int32)
        counts[rows] = drafts.counts
        for row, count in zip(rows.tolist(), drafts.counts.tolist(), strict=True):
            sequences[row].num_drafted = count
        return Drafts(drafts.token_ids, counts)

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
        self.num_drafted = 0
        self._most_drafted = _FIRST_DRAFT
        self._num_failures = 0
        self._num_steps_alone = 0

    @property
    def token_ids(self) -> Int32Column:
        """All that are known: a view."""
        return self._token_ids[: self._num_tokens]

    def extend(self, token_ids: Int32Column) -> None:
        """Known tokens."""
        end = self._num_tokens + len(token_ids)
        self._token_ids[self._num_tokens : end] = token_ids
        self._num_tokens = end

    def want(self, max_tokens: int) -> int:
        """How many tokens to draft, at most `max_tokens`; `num_drafted` then takes how many there are."""
        self.num_drafted = 0
        if self._num_steps_alone:
            self._num_steps_alone -= 1
            return 0
        return min(max_tokens, self._most_drafted)

    def learn(self, num_accepted: int) -> None:
        """How many tokens of the last draft were right."""
        if not self.num_drafted:
            return
        if num_accepted:
            self._num_failures = 0
            are_all_right = num_accepted == self.num_drafted
            self._most_drafted = min(2 * num_accepted, MAX_DRAFT_TOKENS) if are_all_right else num_accepted + 1
        else:
            self._num_steps_alone = min(2**self._num_failures - 1, _MAX_STEPS_ALONE)
            self._num_failures += 1
            self._most_drafted = 1

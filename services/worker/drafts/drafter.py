"""Guesses of next tokens, several of which the model checks at once (speculative decoding).

A draft never changes what is generated, only how many tokens a step yields.

    known tokens      … a b c          c was sampled last; its KV is not in the cache yet
    the step computes       c  d0 d1   the row's own token, then its drafts, in one forward pass
    the sampler draws       x0 x1 x2   one token after each of them
    accepted                x0 == d0, x1 != d1: the sequence gets x0 x1, and x2 is not used
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor
from typing_extensions import override

from services.worker.batch.block_tables import BlockTables
from services.worker.batch.decodes import NO_DRAFTS, DraftRoom, Drafts, DraftSource
from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.step_input import StepInput
from services.worker.forward.kv_cache import KvCache, KvCacheSpec
from shared.request.limits import MAX_DRAFT_TOKENS
from shared.step.columns import Int32Column

# How many tokens are drafted at first, and for how many steps drafting pauses at most.
_FIRST_DRAFT = 2
_MAX_STEPS_ALONE = 32
# Bounds a step's logits: 1,024 rows for a vocabulary of 128k are half a GiB.
_MAX_DRAFTED_TOGETHER = 1024


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Sequences to draft for."""

    slots: Int32Column  # [num_rows]
    num_tokens: Int32Column
    """[num_rows], see `DraftRoom`."""
    most: Int32Column  # [num_rows], the most drafts wanted for each, at least 1
    most_together: int
    """Most drafts for all of them; first rows first."""
    token_ids: tuple[Int32Column, ...]
    """Each row's known tokens, at least one; not written. Those of the last step may be missing for a proposer that
    does not need them."""
    tables: BlockTables
    """The worker's. A row's blocks have room for its known tokens and `most` more."""

    @property
    def num_known(self) -> Int32Column:
        """[num_rows], how many tokens the host knows."""
        return np.array([len(token_ids) for token_ids in self.token_ids], np.int32)

    def block_tables(self) -> Int32Column:
        """[num_rows, most blocks of one row]."""
        return self.tables.ids[self.slots, : self.tables.num_blocks[self.slots].max()]

    def ends(self, limits: BatchLimits) -> Int32Column:
        """[num_rows], where the room of each for tokens ends: in its blocks, or with the context."""
        ends: Int32Column = np.minimum(self.tables.num_blocks[self.slots] * limits.block_size, limits.context_length)
        return ends

    def counts_in_room(self) -> Int32Column:
        """[num_rows], drafts each may have within `most` and `most_together`."""
        return in_room(self.most, self.most_together)


def in_room(counts: Int32Column, most: int) -> Int32Column:
    """[num_rows], what is left of each of these `counts` where all together are `most`; first rows first."""
    ends = counts.cumsum()
    if not len(ends) or ends[-1] <= most:
        return counts
    within: Int32Column = np.minimum(np.maximum(most - ends + counts, 0), counts).astype(np.int32)
    return within


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """What a step computed, on the device."""

    hidden: Tensor
    """[num_tokens, hidden], the model's output for the step's tokens; must not be written."""
    drawn: Tensor
    """[num_places] int64, what was drawn after each row's own token and each of its drafts, row after row; at least 0.

    A row's tokens are the first of its run, and any tokens come after those."""
    counts: Tensor | None
    """[num_rows] int64, tokens of each row; None means one each."""


Observe = Callable[[ComputedTokens], None]
"""A proposer's work on the device after a step; it waits for nothing that the device computes."""


class DraftProposer:
    """Guesses how sequences continue. Without state, only `propose` is needed.

    Guesses may be wrong, but must be in the vocabulary.
    """

    # What a token needs in the proposer's own KV cache.
    kv_cache_spec = KvCacheSpec(())
    needs_tokens = True
    """Whether `propose` needs all tokens so far. If not, a launch does not wait for those of the step before it until
    the device has been given its drafts."""
    reads_decodes = False
    """Whether `observe` reads the arrays of tokens of plain decodes, which the host makes for nothing else."""
    follows_steps = False
    """Whether it is told of every step, by `observe` and `learn`."""

    def attach(self, limits: BatchLimits, kv_cache: KvCache) -> None:
        """Begin an epoch. `kv_cache` is the model's; block ids refer to it."""

    def forget(self, slots: Int32Column) -> None:
        """Forget sequences."""

    def observe(self, inputs: StepInput) -> Observe | None:
        """Plan what to note of a step with at least one sequence, before its results are known. Called once per step.

        Returns:
            What then has the device note it; called once, on the stream. None if there is nothing to note.
        """

    def learn(self, slots: Int32Column, num_known: Int32Column) -> None:
        """The rows of the last step that was planned have `num_known` tokens now: [num_rows] each."""

    def propose(self, rows: DraftRows) -> Drafts:
        """Guess the next tokens of at least one sequence, after what was planned to be noted of the last step.

        What the device then computes is enqueued after that step, so it finds each row's last token and its position.

        Returns:
            For each row 0 to `most` tokens, and at most `most_together` in total.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a worker drafts; see `Drafter`."""

    proposer: DraftProposer
    num_draft_tokens: int

    def begin(self, limits: BatchLimits, kv_cache: KvCache) -> Drafter:
        """Make the drafter for a new epoch."""
        self.proposer.attach(limits, kv_cache)
        return Drafter(self.proposer, self.num_draft_tokens)


class Drafter(DraftSource):
    """Keeps the tokens of a batch's sequences, by slot, and drafts for them with a `DraftProposer`.

    How many depends on how a sequence's last drafts did: on the CPU a rejected draft costs half as much time as a row,
    unless the batch is small.

    Invariant: for each slot in use, every known token was passed in once, in order.
    """

    def __init__(self, proposer: DraftProposer, num_draft_tokens: int) -> None:
        self._proposer = proposer
        self._num_draft_tokens = num_draft_tokens
        self._sequences: dict[int, _DraftedSequence] = {}

    @override
    def enter(self, slot: int, token_ids: Int32Column, max_num_tokens: int) -> None:
        self._sequences[slot] = _DraftedSequence(max_num_tokens)
        self.extend(slot, token_ids)

    @override
    def extend(self, slot: int, token_ids: Int32Column) -> None:
        self._sequences[slot].extend(token_ids)

    @override
    def leave(self, slots: Int32Column) -> None:
        self._proposer.forget(slots)
        for slot in slots.tolist():
            del self._sequences[slot]

    @override
    def propose(self, room: DraftRoom) -> Drafts:
        slots, most = room.slots, np.minimum(room.most, self._num_draft_tokens)
        sequences = [self._sequences[slot] for slot in slots.tolist()]
        wanted = np.array([seq.want(n) for seq, n in zip(sequences, most.tolist(), strict=True)], np.int32)
        rows = np.flatnonzero(wanted)
        most_together = min(room.most_together, _MAX_DRAFTED_TOGETHER)
        if not len(rows) or not most_together:
            return Drafts(NO_DRAFTS, np.zeros(len(slots), np.int32))
        token_ids = tuple(sequences[row].token_ids for row in rows.tolist())
        drafts = self._proposer.propose(
            DraftRows(slots[rows], room.num_tokens[rows], wanted[rows], most_together, token_ids, room.tables)
        )
        counts = np.zeros(len(slots), np.int32)
        counts[rows] = drafts.counts
        return replace(drafts, counts=counts)

    @override
    def record(
        self,
        slots: Int32Column,
        token_ids: Int32Column,
        counts: Int32Column | None,
        draft_counts: Int32Column | None,
    ) -> None:
        ends = np.arange(1, len(slots) + 1) if counts is None else np.cumsum(counts)
        nums_drafted = [0] * len(slots) if draft_counts is None else draft_counts.tolist()
        start = 0
        sequences = [self._sequences[slot] for slot in slots.tolist()]
        for sequence, end, num_drafted in zip(sequences, ends.tolist(), nums_drafted, strict=True):
            if num_drafted:
                sequence.learn(num_drafted, num_accepted=end - start - 1)
            sequence.extend(token_ids[start:end])
            start = end
        if self._proposer.follows_steps:
            self._proposer.learn(slots, np.array([len(sequence.token_ids) for sequence in sequences], np.int32))


class _DraftedSequence:
    """One sequence's known tokens, and how many tokens to draft for it.

    One more than were right the last time, or twice as many if all were. If none was, drafting pauses for some steps,
    a number that doubles from one failure to the next.
    """

    def __init__(self, max_num_tokens: int) -> None:
        # Memory that is never touched costs nothing.
        self._room: Int32Column = np.empty(max_num_tokens, np.int32)
        self.token_ids = self._room[:0]
        self._most_drafted = _FIRST_DRAFT
        self._num_failures = 0
        self._num_steps_alone = 0

    def extend(self, token_ids: Int32Column) -> None:
        start, end = len(self.token_ids), len(self.token_ids) + len(token_ids)
        self._room[start:end] = token_ids
        self.token_ids = self._room[:end]

    def want(self, max_tokens: int) -> int:
        """How many tokens to draft. Call once per step."""
        if self._num_steps_alone:
            self._num_steps_alone -= 1
            return 0
        return min(max_tokens, self._most_drafted)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """See what came of a step's drafts, at least one."""
        if num_accepted:
            self._num_failures = 0
            are_all_right = num_accepted == num_drafted
            self._most_drafted = min(2 * num_accepted, MAX_DRAFT_TOKENS) if are_all_right else num_accepted + 1
        else:
            self._num_steps_alone = min(2**self._num_failures - 1, _MAX_STEPS_ALONE)
            self._num_failures += 1
            self._most_drafted = 1

"""Decides where the recurrent states of running sequences are saved; see `cache.state_checkpoints`."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.batch.slot_table import SlotTable
from services.scheduler.core.batch.step import ScheduledBatch, StepRecord
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.cache.cached_prefix import CachedPrefix
from services.scheduler.core.policy import CacheSettings
from shared.ids import Slot
from shared.step.columns import Int32Column, StatePairs

# No sequence has so many tokens.
_IN_FLIGHT = np.iinfo(np.int32).max

# How many times as often records are renewed with blocks of one token.
_FINER = 4


class StateSaves:
    """The saves of one rank's sequences.

    A state exists only at a chunk's end, so a chunk ends where one is saved. Of a prompt, states are saved:

    - on demand: a newcomer finds cached blocks behind the last saved state. It computes them again, and saves the state
      after the last of them, so the next one does not have to. So a prompt shared by many is computed twice.
    - for the other choices of its request, after the prompt's last whole block. They wait for it.
    - at intervals, for prompts that share a part of it, and for its own way back after a preemption.

    Each decoding sequence has one record, renewed at intervals, for a conversation's next turn and for its own way
    back: it overwrites its older one. A save moves a state once, as each token does, so one in 64 tokens costs about as
    much as 1.6 % of the recurrent layers' own traffic.

    With blocks of one token, a record may end anywhere. So records are finer, and a sequence whose last step is known
    when it is planned (`max_tokens`) is saved with it, at exactly its content's end. Any other end is known only once
    its step has returned. A later step may have advanced the live state then, by the last token or by one that does not
    count; and where nothing else runs, as between two turns of the only conversation, no step comes that could copy it.
    So the live slot is not handed over, and the next turn computes what came since the last record.

    With drafts, it is not known before which step passes a block's end, nor which one it passes. Then a sequence that
    is due has a checkpoint reserved in a step, again and again until one has passed an end. The last that it passed
    follows from the result, and with it the older record goes.

    All are at the ends of blocks, so intervals are rounded up to blocks. Where no room is left, nothing is saved. If
    prompts may not be computed in chunks, they are not cut here either.
    """

    def __init__(
        self, blocks: BlockManager, settings: CacheSettings, *, num_slots: int, may_cut: bool, has_drafts: bool
    ) -> None:
        """Make it for one epoch.

        Args:
            num_slots: Of running sequences.
            may_cut: Whether prompts may be computed in chunks.
            has_drafts: Whether a step may compute several tokens of a decoding sequence.
        """
        self._blocks = blocks
        self._may_cut = may_cut
        self._has_drafts = has_drafts
        # The number of tokens from which each slot's sequence is due, and the reserved checkpoints, with drafts.
        self._due_at = np.zeros(num_slots, np.int32)
        self._reserved: set[int] = set()
        self._interval = self._whole_blocks(settings.state_checkpoint_interval)
        self._has_single_tokens = blocks.block_size == 1
        renewal = settings.state_record_interval
        self._renewal = max(renewal // _FINER, 1) if self._has_single_tokens else self._whole_blocks(renewal)

    def begin(self, seq: Sequence, prefix: CachedPrefix) -> None:
        """Choose where to save the prompt of a sequence that is being admitted with a prefix."""
        block_size = self._blocks.block_size
        points: set[int] = set()
        if self._interval:
            first = prefix.num_tokens // self._interval * self._interval + self._interval
            points.update(range(first, seq.num_stored_tokens + 1, self._interval))
        if prefix.num_lost_tokens and not seq.was_admitted:
            points.add(prefix.num_tokens + prefix.num_lost_tokens)
        last = (seq.num_prompt_tokens - 1) // block_size * block_size
        if seq.num_choices > 1 and last > prefix.num_tokens:
            points.add(last)
        seq.save_points = tuple(sorted(points))
        seq.last_record_at = 0

    def cut(self, seq: Sequence, start: int, num_tokens: int) -> int:
        """How many of the `num_tokens` tokens from `start` on are before the next save."""
        return min(num_tokens, seq.save_points[0] - start) if seq.save_points and self._may_cut else num_tokens

    def save_prompt(self, seq: Sequence, num_sent_tokens: int) -> StatePairs:
        """What a step saves that was just given a sequence's tokens up to `num_sent_tokens`: one pair or none."""
        is_due = num_sent_tokens in seq.save_points
        seq.save_points = tuple(point for point in seq.save_points if point > num_sent_tokens)
        checkpoint = self._blocks.try_save_state(seq, num_sent_tokens) if is_due else None
        assert seq.slot is not None
        self._due_at[seq.slot] = self._next_renewal(num_sent_tokens)
        return () if checkpoint is None else ((seq.slot, checkpoint),)

    def add_records(self, batch: ScheduledBatch, slots: SlotTable) -> None:
        """Renew the records of a plan's decodes that are due."""
        if self._has_drafts:
            self._reserve_records(batch, slots)
            return
        rows = batch.decode_slots
        # The step computes the newest of these tokens.
        num_tokens = slots.num_planned[rows]
        is_due = num_tokens % self._renewal == 0
        if self._has_single_tokens:
            is_due |= num_tokens + 1 == slots.max_num_tokens[rows]
        due = rows[is_due]
        if not due.size:
            return
        saves = list(batch.state_saves)
        for slot in due.tolist():
            seq = slots.sequence_at(Slot(slot))
            at = int(slots.num_planned[slot])
            checkpoint = self._blocks.try_save_state(seq, at, seq.last_record_at)
            if checkpoint is not None:
                seq.last_record_at = at
                saves.append((slot, checkpoint))
        batch.state_saves = saves

    def end_records(self, record: StepRecord, counts: Int32Column | None, slots: SlotTable) -> None:
        """Note which records a step with drafts has renewed; `slots` is the state before its result.

        Args:
            counts: [num_rows], tokens of each row; None means one each.
        """
        for slot, checkpoint in record.state_saves:
            if checkpoint not in self._reserved:
                continue
            self._reserved.remove(checkpoint)
            self._due_at[slot] = 0
            if not slots.live[slot]:
                continue
            row = int((record.row_slots == slot).nonzero()[0][0])
            # The newest token is not computed yet.
            before = int(slots.num_tokens[slot]) - 1
            now = before + (1 if counts is None else int(counts[row]))
            passed = now // self._blocks.block_size * self._blocks.block_size
            if passed > before:
                seq = slots.sequence_at(Slot(slot))
                self._blocks.attach_state(seq, checkpoint, passed, seq.last_record_at)
                seq.last_record_at = passed
                self._due_at[slot] = self._next_renewal(passed)

    def _reserve_records(self, batch: ScheduledBatch, slots: SlotTable) -> None:
        rows = batch.decode_slots
        due = rows[slots.num_planned[rows] >= self._due_at[rows]]
        if not due.size:
            return
        saves = list(batch.state_saves)
        for slot in due.tolist():
            checkpoint = self._blocks.try_reserve_state()
            if checkpoint is None:
                # Later: a row costs much more than all rows that are not due.
                self._due_at[slot] = self._next_renewal(int(slots.num_planned[slot]))
                continue
            self._due_at[slot] = _IN_FLIGHT
            self._reserved.add(checkpoint)
            saves.append((slot, checkpoint))
        batch.state_saves = saves

    def _next_renewal(self, num_tokens: int) -> int:
        return num_tokens // self._renewal * self._renewal + self._renewal

    def _whole_blocks(self, num_tokens: int) -> int:
        return self._blocks.num_blocks_for(num_tokens) * self._blocks.block_size

"""Decides which running sequences the next step decodes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core.batch.sequence import Sequence, SequenceStatus
from services.scheduler.core.batch.slot_table import Slots
from services.scheduler.core.planning.kept_room import KeptRoom
from services.scheduler.core.planning.preemption import Preemption
from services.scheduler.core.running_batch import RunningBatch
from shared.step.columns import Int32Column

# Smaller blocks are taken several at a time, so that a row is visited once per 16 tokens at any block size.
MIN_TOKENS_PER_VISIT = 16

NO_SLOTS = np.empty(0, np.intp)


@dataclass(slots=True)
class Decodes:
    """What a step decodes. `append_slots` and `append_block_ids` are parallel."""

    rows: Slots = field(default_factory=lambda: NO_SLOTS)
    """Rows that are computed, in batch order."""
    append_slots: Slots = field(default_factory=lambda: NO_SLOTS)
    append_block_ids: list[int] = field(default_factory=list)
    skips_rows: bool = False
    """Whether some rows sit this step out."""


class DecodePlanner:
    """Gives rows blocks for the tokens they compute next, preempting running sequences when none are free.

    With drafts, a row's length is unknown until its steps in flight have returned. It takes part once its blocks can
    hold the most tokens it may reach; the worker drafts only as far as they go. While blocks are free, rows also get
    room for their next drafts.
    """

    def __init__(self, running: RunningBatch, preemption: Preemption, kept_room: KeptRoom) -> None:
        self._running = running
        self._slots = running.slots
        self._blocks = running.blocks
        self._preemption = preemption
        self._kept_room = kept_room
        self._num_draft_tokens = running.slots.num_draft_tokens
        self._blocks_per_visit = max(1, MIN_TOKENS_PER_VISIT // running.blocks.block_size)
        self._opens_single_blocks = self._blocks_per_visit == 1 and not self._num_draft_tokens

    def plan(self, now: float) -> Decodes:
        """Plan the rows whose prompts are computed."""
        rows = self._running.decode_rows
        self._slots.flush_full_runs(rows)
        num_tokens = self._num_tokens_to_store(rows) if self._num_draft_tokens else self._slots.num_planned[rows]
        short = rows[num_tokens > self._slots.num_blocks[rows] * self._blocks.block_size]
        if not short.size:
            return Decodes(rows)
        decodes = self._open_blocks(rows, short) if self._opens_single_blocks else self._open_runs(rows, short)
        return decodes or self._plan_short_of_blocks(now)

    def _num_tokens_to_store(self, rows: Slots) -> Int32Column:
        with_drafts = self._slots.max_num_planned(rows) + self._num_draft_tokens
        num_tokens: Int32Column = np.minimum(with_drafts, self._slots.max_num_tokens[rows])
        return num_tokens

    def _open_blocks(self, rows: Slots, short: Slots) -> Decodes | None:
        """None, with nothing changed, when too few blocks are free."""
        blocks = self._kept_room.try_take(len(short))
        if blocks is None:
            return None
        sequences = self._slots.sequences
        for slot, block in zip(short.tolist(), blocks, strict=True):
            sequences[slot].block_table.append(block)
        self._slots.num_blocks[short] += 1
        return Decodes(rows, short, blocks)

    def _open_runs(self, rows: Slots, short: Slots) -> Decodes | None:
        """Like `_open_blocks`, with several blocks per row."""
        counts = self._num_blocks_in_run(short)
        blocks = self._kept_room.try_take(int(counts.sum()))
        if blocks is None:
            return None
        sequences = self._slots.sequences
        start = 0
        for slot, count in zip(short.tolist(), counts.tolist(), strict=True):
            sequences[slot].block_table.extend(blocks[start : start + count])
            start += count
        self._slots.num_blocks[short] += counts
        return Decodes(rows, np.repeat(short, counts), blocks)

    def _num_blocks_in_run(self, short: Slots) -> Int32Column:
        num_least = -(-self._num_tokens_to_store(short) // self._blocks.block_size) - self._slots.num_blocks[short]
        num_last = -(-self._slots.max_num_tokens[short] // self._blocks.block_size) - self._slots.num_blocks[short]
        counts: Int32Column = np.maximum(num_least, np.minimum(num_last, self._blocks_per_visit))
        return counts

    def _plan_short_of_blocks(self, now: float) -> Decodes:
        """Plan row by row: one block each, only for rows that cannot continue without one.

        One is enough whatever the steps in flight return: the last of them drafts only as far as the row's blocks go,
        and samples one token after that.
        """
        rows = self._running.decode_rows
        room = self._slots.num_blocks[rows] * self._blocks.block_size
        opened: list[tuple[int, int]] = []
        sitting_out: list[int] = []
        for slot in rows[self._slots.max_num_planned(rows) > room].tolist():
            seq = self._slots.sequences[slot]
            if seq is None or seq.is_retiring:
                # It was preempted for an earlier row.
                continue
            block = self._take_or_preempt(seq, len(sitting_out), now)
            if block is not None:
                seq.block_table.append(block)
                self._slots.num_blocks[slot] += 1
                opened.append((slot, block))
            elif seq.status is SequenceStatus.RUNNING:
                sitting_out.append(slot)
        rows = self._running.decode_rows
        # A row that was given a block may have been preempted for a later one.
        running = set(rows.tolist())
        opened = [(slot, block) for slot, block in opened if slot in running]
        sitting_out = [slot for slot in sitting_out if slot in running]
        return Decodes(
            rows[~np.isin(rows, sitting_out)],
            np.array([slot for slot, _ in opened], np.intp),
            [block for _, block in opened],
            skips_rows=bool(sitting_out),
        )

    def _take_or_preempt(self, seq: Sequence, num_sitting_out: int, now: float) -> int | None:
        """Take a block for a row, preempting running sequences while it may take none.

        Returns:
            None when steps in flight will free a block (after those for `num_sitting_out` other rows), when the row may
            turn out to need none, or when `seq` itself was preempted.
        """
        while not self._may_take(num_kept := self._kept_room.num_blocks_from(seq), num_sitting_out):
            if self._num_spare(num_kept) > num_sitting_out or self._may_fit(seq):
                return None
            if self._preemption.retract(seq, now) is seq:
                return None
        blocks = self._blocks.try_take(1)
        assert blocks is not None
        return blocks[0]

    def _may_take(self, num_kept: int, num_sitting_out: int) -> bool:
        """Whether a block is free that is kept for none but the row; the last row may take any, or no step went on.

        `num_kept` blocks are kept for others.
        """
        if not self._blocks.num_free_blocks:
            return False
        has_others = num_kept and len(self._running.order) > 1
        return not has_others or self._num_spare(num_kept) > num_sitting_out

    def _num_spare(self, num_kept: int) -> int:
        """Blocks that are free or will be, without those kept for others than the row."""
        return self._blocks.num_free_blocks + self._running.num_coming_blocks() - num_kept

    def _may_fit(self, seq: Sequence) -> bool:
        """Whether the row needs no block if its steps in flight return few tokens."""
        return bool(self._slots.num_planned[seq.slot] <= len(seq.block_table) * self._blocks.block_size)

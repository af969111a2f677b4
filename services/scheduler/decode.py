"""Which running sequences the next step decodes, and the blocks that they open."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.scheduler.preemption import Preemption
from services.scheduler.running_batch import RunningBatch
from services.scheduler.sequence import Sequence, SequenceStatus
from services.scheduler.slot_table import IntColumn, Slots

# Blocks smaller than this are taken in runs, so that a row is visited once in so many tokens at any block size.
MIN_TOKENS_PER_VISIT = 16

_NO_SLOTS = np.empty(0, np.intp)


@dataclass(slots=True)
class Decodes:
    """What a step decodes: `rows`, the slots that compute their newest token, in batch order.

    `append_slots` and `append_block_ids` are parallel; `skips_rows` tells that some rows sit the step out.
    """

    rows: Slots = field(default_factory=lambda: _NO_SLOTS)
    append_slots: Slots = field(default_factory=lambda: _NO_SLOTS)
    append_block_ids: list[int] = field(default_factory=list)
    skips_rows: bool = False


class DecodePlanner:
    """Gives each row the block of the token that it computes next; where none is free, somebody gives way."""

    def __init__(self, running: RunningBatch, preemption: Preemption) -> None:
        self._running = running
        self._slots = running.slots
        self._blocks = running.blocks
        self._preemption = preemption
        self._blocks_per_visit = max(1, MIN_TOKENS_PER_VISIT // running.blocks.block_size)

    def plan(self, now: float) -> Decodes:
        """Take the running sequences whose prompts are computed; a row whose block is only coming sits out."""
        rows = self._running.decode_rows
        self._slots.flush_full_runs(rows)
        short = rows[self._slots.num_planned[rows] > self._slots.num_blocks[rows] * self._blocks.block_size]
        if not short.size:
            return Decodes(rows)
        decodes = self._open_blocks(rows, short) if self._blocks_per_visit == 1 else self._open_runs(rows, short)
        return decodes or self._plan_short_of_blocks(short, now)

    def _open_blocks(self, rows: Slots, short: Slots) -> Decodes | None:
        """Give each of the short rows a block; None, and nothing has changed, when too few are free."""
        blocks = self._blocks.try_take(len(short))
        if blocks is None:
            return None
        sequences = self._slots.sequences
        for slot, block in zip(short.tolist(), blocks, strict=True):
            sequences[slot].block_table.append(block)
        self._slots.num_blocks[short] += 1
        return Decodes(rows, short, blocks)

    def _open_runs(self, rows: Slots, short: Slots) -> Decodes | None:
        """Give each of the short rows a run of small blocks, as `_open_blocks` does one."""
        counts = self._num_blocks_in_run(short)
        blocks = self._blocks.try_take(int(counts.sum()))
        if blocks is None:
            return None
        sequences = self._slots.sequences
        start = 0
        for slot, count in zip(short.tolist(), counts.tolist(), strict=True):
            sequences[slot].block_table.extend(blocks[start : start + count])
            start += count
        self._slots.num_blocks[short] += counts
        return Decodes(rows, np.repeat(short, counts), blocks)

    def _num_blocks_in_run(self, short: Slots) -> IntColumn:
        """How many blocks each of these rows takes at once: no more than its last token needs."""
        num_last = -(-self._slots.max_num_tokens[short] // self._blocks.block_size)
        counts: IntColumn = np.clip(num_last - self._slots.num_blocks[short], 1, self._blocks_per_visit)
        return counts.astype(np.int32, copy=False)

    def _plan_short_of_blocks(self, short: Slots, now: float) -> Decodes:
        """The same row by row, each with one block, as long as there are any."""
        opened: list[tuple[int, int]] = []
        sitting_out: list[int] = []
        for slot in short.tolist():
            seq = self._slots.sequences[slot]
            if seq is None or seq.is_retiring:
                # It gave way to a row before it.
                continue
            block = self._take_or_preempt(seq, len(sitting_out), now)
            if block is not None:
                seq.block_table.append(block)
                self._slots.num_blocks[slot] += 1
                opened.append((slot, block))
            elif seq.status is SequenceStatus.RUNNING:
                sitting_out.append(slot)
        rows = self._running.decode_rows
        # A row that opened a block may have given way to one behind it.
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
        """A block for a row, preempting running sequences while none is free or coming.

        Returns:
            None when its block is coming, behind those of `num_sitting_out` others, or `seq` itself gave way.
        """
        while (blocks := self._blocks.try_take(1)) is None:
            if self._running.num_coming_blocks() > num_sitting_out:
                return None
            if self._preemption.retract(now) is seq:
                return None
        return blocks[0]

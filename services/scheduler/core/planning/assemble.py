"""Assembles a step's plan."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.batch.step import ScheduledBatch
from services.scheduler.core.planning.decode import NO_SLOTS, Decodes
from services.scheduler.core.planning.prefill import Prefill
from shared.ids import Slot
from shared.step.step import StepKind


def assemble(leave_slots: list[Slot], decodes: Decodes, prefill: Prefill) -> ScheduledBatch:
    """The rows are the decodes, then the prompts that the step completes."""
    row_slots, kind, num_tokens = decodes.rows, StepKind.DECODE, len(decodes.rows)
    partial_slots: list[Slot] = []
    if not prefill.is_empty:
        sent = [*prefill.chunks, *(entering.chunk for entering in prefill.enters)]
        complete = np.array([chunk.slot for chunk in sent if not chunk.num_later_tokens], np.intp)
        partial_slots = [chunk.slot for chunk in sent if chunk.num_later_tokens]
        row_slots = np.concatenate([decodes.rows, complete])
        kind = StepKind.MIXED if decodes.rows.size else StepKind.PREFILL
        num_tokens += sum(chunk.num_tokens for chunk in sent)
    return ScheduledBatch(
        kind,
        num_tokens=num_tokens,
        row_slots=row_slots,
        decode_slots=decodes.rows,
        partial_slots=partial_slots,
        leave_slots=leave_slots,
        chunks=prefill.chunks,
        enters=prefill.enters,
        append_slots=decodes.append_slots,
        append_block_ids=decodes.append_block_ids,
        state_saves=prefill.state_saves,
        state_restores=prefill.state_restores,
        # A step without decodes does not list them.
        skips_rows=decodes.skips_rows and kind is not StepKind.PREFILL,
    )


def dummy_batch(kind: StepKind, leave_slots: list[Slot], num_dummy_tokens: int = 1) -> ScheduledBatch:
    """A plan that computes no sequence."""
    return ScheduledBatch(
        kind,
        num_tokens=0,
        row_slots=NO_SLOTS,
        decode_slots=NO_SLOTS,
        partial_slots=[],
        leave_slots=leave_slots,
        chunks=[],
        enters=[],
        append_slots=NO_SLOTS,
        append_block_ids=[],
        skips_rows=False,
        num_dummy_tokens=num_dummy_tokens,
    )

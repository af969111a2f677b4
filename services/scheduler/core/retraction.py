"""Which sequence gives its blocks back when none are free."""

from __future__ import annotations

import enum

import numpy as np

from services.scheduler.core.batch.slot_table import IntColumn, Slots


class RetractionPolicy(enum.Enum):
    """The last to enter, as in ATOM, or the one that has generated least.

    Source of the second: SGLang, `ScheduleBatch.retract_decode` (srt/managers/schedule_batch.py). There ties go to the
    longest prompt, here to the last to enter.
    """

    LAST_IN = "last_in"
    FEWEST_OUTPUT_TOKENS = "fewest_output_tokens"


def pick_victim(policy: RetractionPolicy, order: Slots, num_completion_tokens: IntColumn) -> int:
    """Choose the running sequence to preempt next; returns its index in `order`.

    Args:
        order: [num_running], slots in order of entry; at least one.
        num_completion_tokens: [num_slots], by slot.
    """
    last = len(order) - 1
    if policy is RetractionPolicy.LAST_IN:
        return last
    return last - int(np.argmin(num_completion_tokens[order][::-1]))

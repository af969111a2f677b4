"""What a step does to recurrent states before and after it computes. Plain numpy on the host."""

from __future__ import annotations

import numpy as np

from services.worker.batch.enter_checks import BatchLimits, require
from services.worker.forward.staging import HostArrays
from shared.step.columns import Int32Column
from shared.step.step import Step


def state_changes(step: Step, limits: BatchLimits, decode_slots: Int32Column) -> HostArrays:
    """The changes as rows of the states, without those of which there are none.

    A slot's state has the slot's number, a checkpoint's comes after those of all slots.

    Args:
        decode_slots: Of those that the step decodes, even if some of them have all their tokens.

    Returns:
        `cleared_states` [n] int64; `restored_from` and `restored_to` [m] int64; `saved_from` and `saved_to` [k] int64.

    Raises:
        StepMismatchError: the columns do not fit the model or the step.
    """
    if limits.num_checkpoints is None:
        has_pairs = len(step.state_saves) or len(step.state_restores)
        require(not has_pairs, "states are saved or restored of a model that has none")
        return {}
    slots_in_step = np.concatenate([decode_slots, step.chunks.slots])
    has_room = not len(slots_in_step) or slots_in_step.max() < limits.num_live_states
    require(bool(has_room), "a slot has no state", limit=limits.num_live_states)
    arrays: HostArrays = {}
    is_continued = step.enters.num_cached_tokens > 0
    if not is_continued.all():
        arrays["cleared_states"] = step.enters.slots[~is_continued]
    slots, checkpoints = _split("state_restores", step.state_restores, limits)
    is_each_restored = np.array_equal(np.sort(slots), np.sort(step.enters.slots[is_continued]))
    require(is_each_restored, "state_restores are not those of the sequences that enter with cached tokens")
    if len(slots):
        arrays |= {"restored_from": checkpoints, "restored_to": slots}
    slots, checkpoints = _split("state_saves", step.state_saves, limits)
    require(bool(np.isin(slots, slots_in_step).all()), "a state is saved of a sequence that is not in the step")
    require(len(np.unique(checkpoints)) == len(checkpoints), "two states are saved in one checkpoint")
    if len(slots):
        arrays |= {"saved_from": slots, "saved_to": checkpoints}
    return arrays


def _split(column: str, pairs: Int32Column, limits: BatchLimits) -> tuple[np.ndarray, np.ndarray]:
    """The slots and the rows of the checkpoints, int64 each."""
    slots, checkpoints = pairs.reshape(-1, 2).astype(np.int64).T
    limit = limits.num_checkpoints or 0
    is_known = not len(checkpoints) or 0 <= checkpoints.min() <= checkpoints.max() < limit
    require(bool(is_known), "a checkpoint is out of range", column=column, limit=limit)
    return slots, checkpoints + limits.num_live_states

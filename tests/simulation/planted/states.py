"""Bugs with recurrent states that the simulation must detect."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.cache.cached_prefix import BlockIds
from services.scheduler.core.cache.state_checkpoints import StateCheckpoints
from services.scheduler.core.planning.prefill import PrefillPlanner
from services.scheduler.core.state_saves import StateSaves
from shared.step.columns import StatePairs
from shared.step.step import Step
from tests.simulation.faults import Fault
from tests.simulation.planted.planting import Patch, PlantedBug, planter
from tests.support.scheduler.cell_model import WorkerModel

STATE_BUGS: list[PlantedBug] = []
_planted = planter(STATE_BUGS)


@_planted(Fault.RECURRENT_STATE, seed=2)
def _a_save_is_visible_too_early(patch: Patch) -> None:
    """A state can be restored once the step that saves it has been sent."""
    try_save = StateCheckpoints.try_save

    def show(self: StateCheckpoints, block: int, tenant: int, weight: float) -> int | None:
        checkpoint = try_save(self, block, tenant, weight)
        if checkpoint is not None:
            self._is_visible[checkpoint] = True
            self._eviction_order.show(checkpoint)
        return checkpoint

    patch.setattr(StateCheckpoints, "try_save", show)


@_planted(Fault.RECURRENT_STATE, seed=2)
def _a_chunk_starts_anew(patch: Patch) -> None:
    """The worker clears the state of a sequence with each chunk of its prompt."""
    restore = WorkerModel._restore_states

    def clear(self: WorkerModel, step: Step) -> None:
        restore(self, step)
        if self._states.size:
            # Those of sequences that enter are the last ones.
            self._states[step.chunks.slots[: len(step.chunks.slots) - len(step.enters.slots)]] = 0

    patch.setattr(WorkerModel, "_restore_states", clear)


@_planted(Fault.RECURRENT_STATE, seed=2)
def _a_slot_is_not_cleared(patch: Patch) -> None:
    """A sequence without cached tokens begins with the state that its slot had."""
    restore = WorkerModel._restore_states

    def keep(self: WorkerModel, step: Step) -> None:
        before = self._states.copy()
        restore(self, step)
        if self._states.size:
            slots = step.enters.slots[step.enters.num_cached_tokens == 0]
            self._states[slots] = before[slots]

    patch.setattr(WorkerModel, "_restore_states", keep)


@_planted(Fault.RECURRENT_STATE, seed=2)
def _a_state_outlives_its_block(patch: Patch) -> None:
    """A state stays with a block that was evicted or never published, and is found with the block's next content."""

    def forget(_: StateCheckpoints, __: BlockIds) -> None:
        return

    patch.setattr(StateCheckpoints, "forget", forget)
    patch.setattr(StateCheckpoints, "check_integrity", lambda _: None)


@_planted(Fault.RECURRENT_STATE, seed=6)
def _chunks_run_over_save_points(patch: Patch) -> None:
    """A state is saved at the end of the chunk in which it should have been."""
    patch.setattr(StateSaves, "cut", lambda _self, _seq, _start, num_tokens: num_tokens)
    save_prompt = StateSaves.save_prompt

    def save(self: StateSaves, seq: Sequence, num_sent_tokens: int) -> StatePairs:
        passed = [point for point in seq.save_points if point <= num_sent_tokens]
        return save_prompt(self, seq, passed[-1]) if passed else ()

    patch.setattr(StateSaves, "save_prompt", save)


@_planted(Fault.RECURRENT_STATE, seed=6)
def _a_rejected_draft_is_kept(patch: Patch) -> None:
    """The worker's states take in all drafts, whether or not they are accepted."""

    def keep_all(self: WorkerModel, slot: int, cells: npt.NDArray[np.uint64], *_: int) -> None:
        if self._states.size:
            self._states[slot] = cells[-1]

    patch.setattr(WorkerModel, "_take_in", keep_all)


@_planted(Fault.RECURRENT_STATE, seed=86)
def _records_ignore_drafts(patch: Patch) -> None:
    """The scheduler takes a decode's state to be saved after as many tokens as it would be without drafts."""
    make = StateSaves.__init__

    def ignore(self: StateSaves, *args: Any, **others: Any) -> None:
        make(self, *args, **{**others, "has_drafts": False})

    patch.setattr(StateSaves, "__init__", ignore)


@_planted(Fault.RECURRENT_STATE, seed=6)
def _nothing_is_brought_back(patch: Patch) -> None:
    """What was set aside is not looked at again once the state that it waits for has come, or once it has aged."""
    patch.setattr(PrefillPlanner, "bring_back", lambda *_: None)

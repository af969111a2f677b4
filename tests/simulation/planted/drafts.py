"""Bugs in speculative decoding that the simulation must detect."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.scheduler.core.batch.row_tokens import RowTokens
from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.batch.slot_table import Slots, SlotTable
from services.scheduler.core.running_batch import RunningBatch
from shared.errors import StepMismatchError
from shared.step.columns import Int32Column
from tests.simulation.planted.planting import Patch, PlantedBug, planter

DRAFT_BUGS: list[PlantedBug] = []
_planted = planter(DRAFT_BUGS)


@_planted()
def _tokens_behind_a_stop_count(patch: Patch) -> None:
    """All tokens of a row go to its client, even those after a stop."""
    patch.setattr(RowTokens, "cut", lambda self, _: self)


@_planted()
def _stops_within_a_run_are_overlooked(patch: Patch) -> None:
    """Only the last token of a row is checked for a stop."""
    find_watched = SlotTable.find_watched

    def find(self: SlotTable, slots: Slots, *args: Any) -> Any:
        is_last_of_row = np.append(slots[1:] != slots[:-1], np.array([True]))
        watched = find_watched(self, slots, *args)
        return watched[is_last_of_row[watched]]

    patch.setattr(SlotTable, "find_watched", find)


@_planted()
def _last_tokens_within_a_run_are_overlooked(patch: Patch) -> None:
    """A request that reaches `max_tokens` within a row does not end there."""
    find_watched = SlotTable.find_watched
    patch.setattr(SlotTable, "find_watched", lambda self, slots, token_ids, *_: find_watched(self, slots, token_ids))


@_planted(raises=StepMismatchError)
def _rows_in_flight_have_no_room_for_drafts(patch: Patch) -> None:
    """When blocks are reserved, each row in flight counts as one token, without its drafts."""
    patch.setattr(SlotTable, "max_num_planned", lambda self, slots: self.num_planned[slots])


@_planted()
def _drafts_count_as_tokens_to_come(patch: Patch) -> None:
    """A request gets no further row once its drafts, if all were accepted, would reach its last token."""
    retire_complete = RunningBatch.retire_complete

    def retire_early(self: RunningBatch, slots: Slots, num_planned: Int32Column) -> None:
        retire_complete(self, slots, num_planned + self.slots.num_draft_tokens)

    patch.setattr(RunningBatch, "retire_complete", retire_early)


@_planted()
def _rejected_drafts_stay_planned(patch: Patch) -> None:
    """A row that returns more than one token counts as in flight forever."""
    append_runs = SlotTable.append_runs

    def append(self: SlotTable, slots: Slots, counts: Int32Column, *args: Any) -> None:
        append_runs(self, slots, counts, *args)
        self.num_planned[slots] += counts > 1

    patch.setattr(SlotTable, "append_runs", append)


@_planted(seed=2)
def _kv_of_rejected_drafts_is_published(patch: Patch) -> None:
    """A sequence that ends or is preempted publishes the KV cell of its newest token, which no step has computed."""
    store = RunningBatch.store

    def publish_more(self: RunningBatch, seq: Sequence) -> None:
        store(self, seq)
        room = len(seq.block_table) * self.blocks.block_size
        self.blocks.publish(seq, min(seq.num_stored_tokens - seq.num_unsent_tokens, room))

    patch.setattr(RunningBatch, "store", publish_more)

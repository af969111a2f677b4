"""What the scheduler plans, and what it keeps of a step in flight.

Never changed once made, yet not frozen: creating a frozen object takes three times as long, and every step creates
several.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.batch.slot_table import Slots
from shared.ids import Slot
from shared.step.columns import StatePairs
from shared.step.step import EnteringSequence, PrefillChunk, StepKind


@dataclass(slots=True)
class ScheduledBatch:
    """One step's plan, as changes to the worker's batch."""

    kind: StepKind
    num_tokens: int
    """Tokens computed; 0 for a dummy."""
    row_slots: Slots
    """[num_rows], rows that get a token, in result order: `decode_slots`, then the prompts that the step completes."""
    decode_slots: Slots
    """In batch order. Sent only when `skips_rows` is set; else the worker derives them: all sequences whose prompt is
    complete.
    """
    partial_slots: list[Slot]
    """Prompts that the step does not complete."""
    leave_slots: list[Slot]
    chunks: list[PrefillChunk]
    enters: list[EnteringSequence]
    append_slots: Slots
    """Parallel to `append_block_ids`; a slot may occur more than once."""
    append_block_ids: list[int]
    skips_rows: bool
    """Whether some decodes sit the step out."""
    state_saves: StatePairs = ()
    """Slots, each with the checkpoint that gets its recurrent state."""
    state_restores: StatePairs = ()
    """Slots of sequences that enter, each with the checkpoint of its recurrent state."""
    num_dummy_tokens: int = 1
    """The tokens of a dummy."""

    @property
    def is_dummy(self) -> bool:
        """Whether the step computes no sequence: it serves other ranks' collectives, or shows that its rank works."""
        return not self.num_tokens


@dataclass(slots=True)
class StepCounts:
    """Steps by what they compute."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    dummy: int = 0

    @property
    def total(self) -> int:
        """Steps of all kinds."""
        return self.prefill + self.decode + self.mixed + self.dummy

    def add(self, batch: ScheduledBatch) -> None:
        """Count a step."""
        if batch.is_dummy:
            self.dummy += 1
        elif batch.kind is StepKind.DECODE:
            self.decode += 1
        elif batch.kind is StepKind.PREFILL:
            self.prefill += 1
        else:
            self.mixed += 1


@dataclass(slots=True)
class Step:
    """A batch for its rank."""

    epoch: int
    step_id: int
    batch: ScheduledBatch
    num_tokens_across_dp: tuple[int, ...] = ()
    """Coupled ranks only; those of a dummy count too."""
    graph_batch_size: int = 0
    """Coupled ranks only: the batch size of the graph that every rank runs; 0 means that all run eagerly."""


class StepPace(NamedTuple):
    """What the duration of a step depends on."""

    kind: StepKind
    num_tokens: int


@dataclass(slots=True)
class StepRecord:
    """A step in flight; when it returns, the slots and blocks of its `retiring` sequences are freed."""

    step_id: int
    kind: StepKind
    """A prefill if any coupled rank has one."""
    num_tokens: int
    """The most of any coupled rank."""
    row_slots: Slots
    partial_slots: list[Slot]
    state_saves: StatePairs
    state_restores: StatePairs
    sent_at: float
    retiring: list[Sequence] = field(default_factory=list)

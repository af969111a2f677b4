"""The sequences that a step decodes, with their drafts. Plain numpy on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.batch.block_tables import BlockTables
from services.worker.forward.staging import HostArrays
from services.worker.ops import SlotColumns
from shared.step.columns import Int32Column
from shared.step.step import Step

NO_DRAFTS: Int32Column = np.empty(0, np.int32)


@dataclass(slots=True)
class DeviceDrafts:
    """Drafts that only the device will know."""

    compute: Callable[[SlotColumns], Tensor]
    """Computes them after the last step, without waiting: [num_drafts] int64. Called once, even without drafts.

    Of the columns it may read the last tokens and their positions; blocks that came since then are not in them."""
    token_ids: Tensor | None = None
    """[num_drafts] int64, once they are computed."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for some sequences."""

    token_ids: Int32Column  # [sum of counts], sequence after sequence; 0 where the device computes them
    counts: Int32Column  # [num_sequences], at least 0
    device: DeviceDrafts | None = None
    """None if the host knows them."""
    chosen: npt.NDArray[np.int64] | None = None
    """[sum of counts], which of those that the device computes these are; None means all."""

    @classmethod
    def on_device(cls, counts: Int32Column, compute: Callable[[SlotColumns], Tensor]) -> Drafts:
        """Drafts that only the device will know."""
        return cls(np.zeros(counts.sum(), np.int32), counts, DeviceDrafts(compute))

    def at_most(self, most: Int32Column) -> Drafts:
        """The first drafts of each sequence, `most` [num_sequences] at most; called on all drafts."""
        counts = np.minimum(self.counts, most)
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = np.repeat(starts, counts) + nth
        return Drafts(self.token_ids[chosen], counts, self.device, chosen)


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """Sequences to decode, and how much may be drafted for them."""

    slots: Int32Column  # [num_sequences]
    num_tokens: Int32Column
    """[num_sequences], the tokens of each; of what a step that is not recorded yet adds, one."""
    most: Int32Column  # [num_sequences], the most drafts that each can use, at least 0
    most_together: int
    """Limit for all of them, at least 0; first rows first."""
    tables: BlockTables
    """The blocks of every slot."""


class DraftSource(Protocol):
    """What a batch with drafts tells about its sequences, and asks for; see `Drafter`."""

    def enter(self, slot: int, token_ids: Int32Column, max_num_tokens: int) -> None:
        """Add a sequence with its first tokens, possibly none; it never has more than `max_num_tokens`."""

    def extend(self, slot: int, token_ids: Int32Column) -> None:
        """Add more tokens of a prompt."""

    def leave(self, slots: Int32Column) -> None:
        """Forget sequences."""

    def propose(self, room: DraftRoom) -> Drafts:
        """Draft for sequences to decode, of whose last step the tokens may not be known yet."""

    def record(
        self,
        slots: Int32Column,
        token_ids: Int32Column,
        counts: Int32Column | None,
        draft_counts: Int32Column | None,
    ) -> None:
        """Add the tokens that sequences got, see `SampledTokens`, of which each had `draft_counts` drafts checked.

        Both counts are [num_sequences]; None means one token each, and no draft.
        """


@dataclass(frozen=True, slots=True)
class Decodes:
    """The sequences that a step decodes."""

    num_slots: int
    """All of them, including full ones, which are not computed."""
    numbers: npt.NDArray[np.int64] | None
    """The computed sequences; None means all."""
    slots: Int32Column
    drafts: Drafts | None
    """For `slots`; None without a drafter."""

    def row_numbers(self, num_rows: int) -> npt.NDArray[np.int64]:
        """[num_rows], the result's row of each computed row, these decodes first. Only some of them are computed."""
        assert self.numbers is not None, "all are computed"
        num_others = num_rows - len(self.numbers)
        return np.concatenate([self.numbers, np.arange(self.num_slots, self.num_slots + num_others)])


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step whose changes the batch has applied, before the tokens of the step before it need to be known."""

    step: Step
    decode_slots: Int32Column
    """The sequences to decode; those that then turn out to have all their tokens are not computed."""
    changes: HostArrays
    """See `DeviceBatch.apply`."""
    drafts: Drafts | None = None
    """For `decode_slots`, possibly more than they have room for; None without a drafter."""

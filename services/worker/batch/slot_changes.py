"""What a step changes in the columns that the device keeps by slot. Plain numpy on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.forward.staging import HostArrays
from services.worker.ops import DrawRows
from shared.step.columns import Int32Column
from shared.step.step import EnteringSequence

_IntArray = npt.NDArray[np.integer[Any]]
# Slots, columns, block ids.
_Blocks = tuple[_IntArray, _IntArray, Int32Column]


class SlotChanges:
    """Collects a step's changes until they are taken; see `DeviceBatch.apply` for their columns.

    Invariant: no two changes of a step write the same entry.
    """

    def __init__(self) -> None:
        self._enters: list[tuple[EnteringSequence, bool]] = []
        self._blocks: list[_Blocks] = []

    def enter(self, enter: EnteringSequence, *, is_edited: bool) -> None:
        """A sequence enters, with its block table.

        `is_edited` says that its logits are changed before it is drawn, so the draw from what they are before costs
        as little as possible.
        """
        block_ids = enter.block_ids
        num_blocks = len(block_ids)
        self._enters.append((enter, is_edited))
        self.append_blocks(np.full(num_blocks, enter.chunk.slot), np.arange(num_blocks), block_ids)

    def append_blocks(self, slots: _IntArray, columns: _IntArray, block_ids: Int32Column) -> None:
        """Blocks are written at these (slot, column) of the block tables."""
        self._blocks.append((slots, columns, block_ids))

    def take(self, table_width: int) -> HostArrays:
        """The changes since the last call, without those of which there are none.

        Args:
            table_width: Columns of the device's block tables when it applies them.
        """
        arrays: HostArrays = {}
        if self._blocks:
            slots, columns, block_ids = (np.concatenate(parts) for parts in zip(*self._blocks, strict=True))
            arrays["table_places"] = slots.astype(np.int64) * table_width + columns
            arrays["table_ids"] = block_ids
            self._blocks = []
        if self._enters:
            arrays |= _entered(self._enters)
            self._enters = []
        return arrays


def _entered(enters: list[tuple[EnteringSequence, bool]]) -> HostArrays:
    temperatures = [0.0 if is_edited else enter.params.temperature for enter, is_edited in enters]
    params = [enter.params for enter, _ in enters]
    row_to_options = {row: each.options for row, each in enumerate(params) if each.options is not None}
    options = DrawRows.option_columns(len(params), row_to_options)
    return {
        "entered_slots": np.array([enter.chunk.slot for enter, _ in enters], np.int64),
        "entered_temperature": np.array(temperatures, np.float32),
        "entered_top_k": np.array([each.top_k for each in params], np.int32),
        "entered_top_p": np.array([each.top_p for each in params], np.float32),
        "entered_seed": np.array([each.seed for each in params], np.uint64).view(np.int64),
        "entered_choice": np.array([enter.choice for enter, _ in enters], np.int64),
        **{f"entered_{name}": column for name, column in options.items()},
    }

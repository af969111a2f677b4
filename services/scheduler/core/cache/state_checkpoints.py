"""Which checkpoint holds the recurrent state after which cached prefix.

Models with recurrent layers keep one state per sequence instead of keys and values per token. A cached prefix can be
continued only where its state was saved: in a checkpoint, which is a slot of the worker's. A checkpoint holds the state
after the last token of a block, and belongs to that block. So it belongs to the content that the block holds, a run of
tokens from the root of the prefix tree, whatever becomes of the tree's nodes: the tokens are compared when the block is
looked up, a newer block of the content takes the checkpoint over, and with the content the checkpoint goes.

    free ── a step saves ──► coming ── it has returned ──► visible ── evicted, or its content goes ──► free
                                   └── not finite, or its content has gone ──► free

With drafts, a decode's state is saved where a block ends, if one does. Which block that is, is known when the step has
returned, and until then the checkpoint is reserved: it is in use and belongs to none.

A checkpoint that a step in flight writes or reads is in use. One that has lost its block is free once it is not in use.
Which is evicted is the subject of `eviction_order`.

Source: ATOM's state checkpoints for the rules (save by copying, show a save once its step has returned, pin what is
restored, evict whole records).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from services.scheduler.core.cache.cached_prefix import BlockIds
from services.scheduler.core.cache.eviction_order import EvictionOrder
from shared.step.columns import Int32Column, StatePairs

_NONE = -1


class FoundState(NamedTuple):
    """What can be continued of a run of blocks."""

    num_blocks: int
    """Blocks up to the last one with a visible checkpoint."""
    checkpoint: int | None
    """The checkpoint there; None if there is none."""
    is_coming: bool
    """Whether a step in flight saves the state after a later block."""


class CheckpointCounts(NamedTuple):
    """Checkpoints of one rank."""

    total: int
    used: int
    """Checkpoints that hold a state, or are about to."""


NOTHING_FOUND = FoundState(0, None, is_coming=False)


class NoteChange(Protocol):
    """Whoever wants to know after which blocks states can be restored."""

    def __call__(self, block: int, *, is_saved: bool) -> None:
        """Take note that the state after a block can be restored from now on, or no longer."""


def _note_nothing(block: int, *, is_saved: bool) -> None:
    pass


class StateCheckpoints:
    """The checkpoints of one rank's worker.

    Invariant: a checkpoint is free exactly if it has no block and is not in use. One that is visible has a block, and
    holds the state after exactly the tokens up to the end of that block, saved by a step that has returned.
    """

    def __init__(self, num_blocks: int, num_checkpoints: int, note_change: NoteChange = _note_nothing) -> None:
        """Make free checkpoints for a pool of blocks; there is no use for more of them than blocks.

        `note_change` is told of blocks that get a visible checkpoint or lose it.
        """
        self._note_change = note_change
        num_checkpoints = min(num_checkpoints, num_blocks)
        self._of_block: Int32Column = np.full(num_blocks, _NONE, np.int32)
        self._block_of = [_NONE] * num_checkpoints
        self._num_uses = [0] * num_checkpoints
        self._is_visible = np.zeros(num_checkpoints, bool)
        self._free = list(range(num_checkpoints - 1, -1, -1))
        self._eviction_order = EvictionOrder(self._num_uses)

    @property
    def counts(self) -> CheckpointCounts:
        """Checkpoints by use."""
        return CheckpointCounts(len(self._block_of), len(self._block_of) - len(self._free))

    def find(self, blocks: BlockIds) -> FoundState:
        """Find how much of a prefix, given by its blocks, can be continued."""
        checkpoints = self._of_block[blocks]
        indexes = (checkpoints != _NONE).nonzero()[0]
        if not indexes.size:
            return NOTHING_FOUND
        visible = indexes[self._is_visible[checkpoints[indexes]]]
        if not visible.size:
            return FoundState(0, None, is_coming=True)
        last = int(visible[-1])
        return FoundState(last + 1, int(checkpoints[last]), is_coming=last < int(indexes[-1]))

    def are_saved(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Which of these blocks have a visible checkpoint: [num_blocks]."""
        checkpoints = self._of_block[blocks]
        are_saved: npt.NDArray[np.bool_] = checkpoints != _NONE
        are_saved[are_saved] = self._is_visible[checkpoints[are_saved]]
        return are_saved

    def try_save(self, block: int, tenant: int = 0, weight: float = 1.0) -> int | None:
        """Take a checkpoint for the state after a block, which the next step saves; `end_step` must follow.

        If none is free, one is evicted.

        Args:
            block: The block.
            tenant: The number of the tenant for which it is saved.
            weight: The tenant's.

        Returns:
            None, with nothing changed, if the block has a checkpoint, or if all are in use.
        """
        if self._of_block[block] != _NONE or not (self._free or self._evict()):
            return None
        checkpoint = self._free.pop()
        self._of_block[block], self._block_of[checkpoint] = checkpoint, block
        self._num_uses[checkpoint] = 1
        self._eviction_order.add(checkpoint, tenant, weight)
        return checkpoint

    def try_renew(self, old_block: int, block: int, tenant: int = 0, weight: float = 1.0) -> int | None:
        """As `try_save`, with the checkpoint of an older block, which loses it, if that may be overwritten."""
        checkpoint = int(self._of_block[old_block])
        if checkpoint != _NONE and not self._num_uses[checkpoint] and self._of_block[block] == _NONE:
            self._detach(checkpoint)
        return self.try_save(block, tenant, weight)

    def try_reserve(self) -> int | None:
        """Take a checkpoint for a state that the next step may save, after a block that is not known yet.

        `end_step` must follow, after `attach` if it was saved. None, with nothing changed, if all are in use.
        """
        if not (self._free or self._evict()):
            return None
        checkpoint = self._free.pop()
        self._num_uses[checkpoint] = 1
        return checkpoint

    def attach(self, checkpoint: int, old_block: int | None, block: int, tenant: int = 0, weight: float = 1.0) -> None:
        """Give a reserved checkpoint to the block after which its state was saved, unless that has one.

        That of `old_block` is taken from it if it may be. `tenant` and `weight` are as in `try_save`.
        """
        if old_block is not None:
            old = int(self._of_block[old_block])
            if old != _NONE and not self._num_uses[old]:
                self._detach(old)
        if self._of_block[block] == _NONE:
            self._of_block[block], self._block_of[checkpoint] = checkpoint, block
            self._eviction_order.add(checkpoint, tenant, weight)

    def restore(self, checkpoint: int) -> None:
        """Note that the next step reads a visible checkpoint; `end_step` must follow."""
        self._num_uses[checkpoint] += 1
        self._eviction_order.use(checkpoint)

    def end_step(self, saves: StatePairs, restores: StatePairs, not_finite_saves: Collection[int]) -> None:
        """Take in the end of a step that wrote and read these checkpoints.

        Args:
            saves: Slots and checkpoints, in the order of the step.
            restores: Likewise.
            not_finite_saves: Indexes of saves that must not be used.
        """
        for _, checkpoint in restores:
            self._num_uses[checkpoint] -= 1
            self._free_if_idle(checkpoint)
        for index, (_, checkpoint) in enumerate(saves):
            self._num_uses[checkpoint] -= 1
            if self._block_of[checkpoint] == _NONE:
                self._free_if_idle(checkpoint)
            elif index in not_finite_saves:
                self._detach(checkpoint)
            else:
                self._is_visible[checkpoint] = True
                self._eviction_order.show(checkpoint)
                self._note_change(self._block_of[checkpoint], is_saved=True)

    def forget(self, blocks: BlockIds) -> None:
        """Take the checkpoints from blocks that lose their contents, or whose states cannot be trusted."""
        checkpoints = self._of_block[blocks]
        for checkpoint in checkpoints[checkpoints != _NONE].tolist():
            self._detach(checkpoint)

    def move(self, old_blocks: BlockIds, blocks: BlockIds) -> None:
        """Give the checkpoints of blocks to those that now hold their contents, which keep any of their own."""
        checkpoints = self._of_block[old_blocks]
        for index in (checkpoints != _NONE).nonzero()[0].tolist():
            checkpoint, block = int(checkpoints[index]), int(blocks[index])
            own = int(self._of_block[block])
            if own != _NONE:
                if self._is_visible[checkpoint] and not self._is_visible[own]:
                    self._note_change(block, is_saved=False)
                self._detach(checkpoint)
                continue
            self._of_block[old_blocks[index]] = _NONE
            self._of_block[block], self._block_of[checkpoint] = checkpoint, block

    def demote(self, blocks: BlockIds) -> None:
        """Let the checkpoints of blocks that cannot be reached any more be the next to be evicted."""
        checkpoints = self._of_block[blocks]
        for checkpoint in checkpoints[checkpoints != _NONE].tolist():
            if self._is_visible[checkpoint]:
                self._eviction_order.demote(checkpoint)

    def clear(self) -> None:
        """Take the checkpoints from all blocks."""
        self.forget((self._of_block != _NONE).nonzero()[0].astype(np.int32))

    def check_integrity(self) -> None:
        """Assert the class's invariant, as far as it can be seen here."""
        blocks = (self._of_block != _NONE).nonzero()[0]
        held = {int(self._of_block[block]): int(block) for block in blocks}
        assert len(held) == len(blocks), "two blocks with one checkpoint"
        assert held == {each: block for each, block in enumerate(self._block_of) if block != _NONE}, "their blocks"
        in_use = {checkpoint for checkpoint, num_uses in enumerate(self._num_uses) if num_uses}
        assert min(self._num_uses, default=0) >= 0, "uses"
        assert sorted([*self._free, *(held.keys() | in_use)]) == list(range(len(self._block_of))), "free checkpoints"
        self._eviction_order.check_integrity()
        visible = self._eviction_order.visible
        assert visible == set(self._is_visible.nonzero()[0].tolist()), "visible checkpoints"
        assert visible <= held.keys(), "a visible checkpoint without a block"
        assert held.keys() - visible <= in_use, "a checkpoint that no step saves"

    def _evict(self) -> bool:
        """Detach the next that is not in use; returns whether there was one."""
        checkpoint = self._eviction_order.find_next()
        if checkpoint is not None:
            self._detach(checkpoint)
        return checkpoint is not None

    def _detach(self, checkpoint: int) -> None:
        if self._is_visible[checkpoint]:
            self._note_change(self._block_of[checkpoint], is_saved=False)
        self._of_block[self._block_of[checkpoint]] = _NONE
        self._block_of[checkpoint] = _NONE
        self._is_visible[checkpoint] = False
        self._eviction_order.remove(checkpoint)
        self._free_if_idle(checkpoint)

    def _free_if_idle(self, checkpoint: int) -> None:
        if not self._num_uses[checkpoint] and self._block_of[checkpoint] == _NONE:
            self._free.append(checkpoint)

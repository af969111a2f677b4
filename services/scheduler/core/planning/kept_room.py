"""The room that is kept for the next sequence once others have made way for it."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.queue.waiting_queue import WaitingQueue
from services.scheduler.core.running_batch import RunningBatch


class KeptRoom:
    """The blocks that running sequences of other tenants leave to the one that the waiting queue holds.

    What others freed for it comes back with the steps in flight, and it enters in a later step. If those that go on
    took the blocks as they grow, others would have to make way again and again. Blocks that are still to come count
    first, so growing sequences may take any that are free beyond what is missing then.
    """

    def __init__(
        self, waiting: WaitingQueue, running: RunningBatch, num_blocks_to_take: Callable[[Sequence], int]
    ) -> None:
        """`num_blocks_to_take` returns how many free blocks a waiting sequence needs."""
        self._waiting = waiting
        self._running = running
        self._blocks = running.blocks
        self._num_blocks_to_take = num_blocks_to_take

    @property
    def num_blocks(self) -> int:
        """How many blocks are kept, free ones or those to come."""
        return 0 if self._waiting.held is None else self._num_blocks_to_take(self._waiting.held)

    def num_blocks_from(self, seq: Sequence) -> int:
        """How many of them a running sequence must leave: none to its own tenant's."""
        held = self._waiting.held
        return 0 if held is None or held.tenant_number == seq.tenant_number else self.num_blocks

    def try_take(self, num_blocks: int) -> list[int] | None:
        """Take blocks for running sequences of any tenants; None, with nothing changed, when too few may be taken."""
        if self._waiting.held is not None:
            num_missing = max(0, self.num_blocks - self._running.num_coming_blocks())
            if num_blocks > self._blocks.num_free_blocks - num_missing:
                return None
        return self._blocks.try_take(num_blocks)

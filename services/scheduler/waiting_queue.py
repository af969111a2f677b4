"""The waiting queue: who comes next, how many may wait, and when a refused client should come again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from services.scheduler.drain_rate import DrainRate
from services.scheduler.sequence import Sequence
from shared.errors import QueueFullError


class WaitingQueue:
    """Waiting sequences, the next one first.

    Only newcomers are held to the bounds: a preempted sequence was admitted once and comes back in any case.

    Invariant: `num_new` and `num_new_tokens` count the sequences that were never admitted, and their prompts.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.num_new = 0
        self.num_new_tokens = 0
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._sequences: deque[Sequence] = deque()
        self._drain_rate = DrainRate()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence:
        """The next one; there is one."""
        return self._sequences[0]

    def check_room(self, num_prompt_tokens: int, now: float) -> None:
        """Refuse a newcomer while too much waits. A prompt above the token bound is taken when nothing waits.

        Raises:
            QueueFullError: with the time after which there is room, as far as the drain rate tells.
        """
        is_full = self.num_new >= self._max_requests
        is_large = self.num_new > 0 and self.num_new_tokens + num_prompt_tokens > self._max_tokens
        if is_full or is_large:
            raise QueueFullError(
                "the waiting queue is full",
                retry_delay_s=self._drain_rate.delay_s(1, now),
                num_waiting=self.num_new,
                num_waiting_tokens=self.num_new_tokens,
            )

    def append(self, seq: Sequence) -> None:
        """Put a newcomer at the end."""
        self._sequences.append(seq)
        self._count(seq, 1)

    def push_front(self, seq: Sequence) -> None:
        """Put a preempted sequence before all others."""
        self._sequences.appendleft(seq)

    def pop_first(self, now: float) -> None:
        """Take the next one out, which is admitted now."""
        seq = self._sequences.popleft()
        self._count(seq, -1)
        self._drain_rate.note(1, now)

    def remove(self, seq: Sequence) -> None:
        """Take one out, wherever it is: it ended."""
        self._sequences.remove(seq)
        self._count(seq, -1)

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        new = [seq for seq in self._sequences if not seq.was_admitted]
        assert (self.num_new, self.num_new_tokens) == (
            len(new),
            sum(seq.num_prompt_tokens for seq in new),
        ), "the waiting queue's counts"

    def _count(self, seq: Sequence, change: int) -> None:
        if not seq.was_admitted:
            self.num_new += change
            self.num_new_tokens += change * seq.num_prompt_tokens

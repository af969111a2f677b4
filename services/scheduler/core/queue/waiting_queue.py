"""The waiting queue of a rank."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.queue.drain_rate import MAX_DELAY_S, DrainRate
from services.scheduler.core.queue.queue_order import (
    ArrivalOrder,
    Key,
    NumCachedTokens,
    PrefixOrder,
    PriorityOrder,
    QueueOrder,
    SortedQueue,
)
from shared.errors import QueueFullError


class QueuePolicy(enum.Enum):
    """Which waiting sequence is next, while none has aged."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    LONGEST_PREFIX = "longest_prefix"


_ORDERS: dict[QueuePolicy, Callable[[], QueueOrder]] = {
    QueuePolicy.FCFS: ArrivalOrder,
    QueuePolicy.PRIORITY: PriorityOrder,
    QueuePolicy.LONGEST_PREFIX: PrefixOrder,
}


def max_steps_to_admission(num_ahead: int, context_length: int, token_budget: int) -> int:
    """An upper bound on the steps sent between a request turning aged and the step that admits it.

    Let A be the sequences ahead of it, L the context length, and c = ceil(L / B) the steps it takes to compute the
    longest prompt with the token budget B. The bound is |A| * L * (2c - 1):

    - While an aged request waits, only aged ones that arrived before it are admitted; others that are preempted are
      queued after it. So every step works for A only.
    - A row is a token that is kept (or several, with drafts), or one wasted by overlap; both count against max_tokens.
      So at most |A| * L steps have a row.
    - A step without a row gives its whole budget to the prompt that began first, which takes at most c - 1 such steps
      before its last chunk, which has a row. In mixed steps a decode that needs its blocks may end it early. Then
      either that step has a row, or every decode is preempted or sits out, and a step with a row comes before another
      prompt can be ended that way. So each step with a row accounts for at most two begun prompts: 2 * (c - 1) steps
      without a row.
    - Once A is gone, all blocks and slots are free, and the request is next.

    It relies on an aged sequence never being preempted for a higher class (`WaitingQueue.is_aged`). When an epoch ends,
    the count starts over. It bounds steps, not time: the steps must return, and the delay gate must be open.

    Args:
        num_ahead: Sequences that held a slot when the request turned aged, plus unfinished ones that arrived before it,
            including those resubmitted later.
        token_budget: `StepBudget.max_prompt_tokens`.
    """
    num_chunks = -(-context_length // token_budget)
    return num_ahead * context_length * (2 * num_chunks - 1)


class WaitingQueue:
    """The waiting sequences, and which of them is next.

    A sequence has aged once it has waited for more than `max_age_s` in total. Aged sequences go first, by arrival,
    under any policy, so none starves (see `max_steps_to_admission`).

    Arrival is by `arrived_at`, so a preempted or resubmitted sequence keeps its place; ties go to those admitted
    before, then to the first added. Limits apply to newcomers only. Each choice of a request counts as one waiting
    sequence; their prompt counts once.

    The clock never goes back. While a sequence waits, its priority and its times do not change.

    Invariant: each waiting sequence is either in `_aged`, or in both `_order` and `_ages`. `num_new` counts those that
    were never admitted, and `num_new_tokens` the prompt tokens of the leaders among them.
    """

    def __init__(self, policy: QueuePolicy, max_age_s: float, max_requests: int, max_tokens: int) -> None:
        self.num_new = 0
        self.num_new_tokens = 0
        self._max_age_s = max_age_s
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._arrivals: dict[Sequence, tuple[float, bool, int]] = {}
        self._num_added = 0
        self._order = _ORDERS[policy]()
        # The sequences in `_order`, by the time at which they turn aged.
        self._ages = SortedQueue()
        # By arrival.
        self._aged = SortedQueue()
        self._drain_rate = DrainRate()

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they were added."""
        return iter(self._arrivals)

    def oldest_arrived_at(self) -> float:
        """The earliest arrive time; the queue must not be empty."""
        return min(place[0][0] for place in self._fronts())

    def check_room(
        self, num_prompt_tokens: int, now: float, *, num_choices: int = 1, others: Collection[WaitingQueue] = ()
    ) -> None:
        """Refuse a newcomer if this queue and `others` together are full.

        One above a limit by itself is accepted while no newcomer is waiting.

        Raises:
            QueueFullError: with an estimate of when there will be room.
        """
        num_new = self.num_new + sum(queue.num_new for queue in others)
        num_new_tokens = self.num_new_tokens + sum(queue.num_new_tokens for queue in others)
        num_missing = num_new + num_choices - self._max_requests
        is_large = num_new_tokens + num_prompt_tokens > self._max_tokens
        if num_new and (num_missing > 0 or is_large):
            raise QueueFullError(
                "the waiting queue is full",
                retry_delay_s=self.retry_delay_s(max(1, num_missing), now, others),
                num_waiting=num_new,
                num_waiting_tokens=num_new_tokens,
            )

    def retry_delay_s(self, num_places: int, now: float, others: Collection[WaitingQueue] = ()) -> float:
        """Seconds until `num_places` newcomers will have left the queues, which drain in parallel."""
        delays_s = [queue._drain_rate.delay_s(num_places, now) for queue in (self, *others)]
        rate = sum(1.0 / delay_s for delay_s in delays_s if delay_s < MAX_DELAY_S)
        return 1.0 / rate if rate else MAX_DELAY_S

    def add(self, seq: Sequence, now: float) -> None:
        """Add a sequence at its place."""
        seq.queued_at = now
        self._num_added += 1
        is_new = not seq.was_admitted
        arrival = (seq.arrived_at, is_new, self._num_added)
        self._arrivals[seq] = arrival
        self._order.push(arrival, seq)
        self._ages.push((self._ages_at(seq), self._num_added), seq)
        if is_new:
            self.num_new += 1
            self.num_new_tokens += _num_tokens_that_count(seq)

    def next(self, now: float, num_cached_tokens: NumCachedTokens) -> Sequence:
        """The next sequence; the queue must not be empty.

        It stays the same until it leaves or one that goes before it is added. `num_cached_tokens` is called for
        LONGEST_PREFIX only, for at most `WINDOW` sequences, and not while the one it chose still waits.
        """
        if self._ages and self._ages.top[0][0] < now:
            return self._first_aged(now)
        return self._aged.top[1] if self._aged else self._order.first(now, num_cached_tokens)

    def take(self, seq: Sequence, now: float) -> None:
        """Take out a sequence that is being admitted.

        Only newcomers count towards the drain rate: a refused client waits for their places.
        """
        _, is_new, _ = self._arrivals[seq]
        self._leave(seq, now)
        if is_new:
            self._drain_rate.note(1, now)

    def remove(self, seq: Sequence, now: float) -> None:
        """Take out a sequence that ended or waits elsewhere."""
        self._leave(seq, now)

    def is_aged(self, seq: Sequence, now: float) -> bool:
        """Whether it has aged; for a running one, whether it had when admitted."""
        return self._ages_at(seq) < now if seq in self._arrivals else seq.waited_s > self._max_age_s

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        new = [seq for seq in self if not seq.was_admitted]
        assert (self.num_new, self.num_new_tokens) == (
            len(new),
            sum(_num_tokens_that_count(seq) for seq in new),
        ), "the waiting queue's counts"
        assert len(self._order) == len(self._ages) == len(self) - len(self._aged), "the waiting queue's places"
        assert all((seq in self._aged) != (seq in self._ages) for seq in self), "the waiting queue's places"
        if self:
            assert self.oldest_arrived_at() == min(seq.arrived_at for seq in self), "the oldest that waits"

    def _first_aged(self, now: float) -> Sequence:
        """At least one aged sequence must be in the policy's order."""
        if not self.is_aged(self._order.oldest[1], now):
            # It arrived before the aged ones but ran in between; it must not hide them.
            while self._ages and self._ages.top[0][0] < now:
                _, seq = self._ages.pop()
                self._order.remove(seq)
                self._aged.push(self._arrivals[seq], seq)
            return self._aged.top[1]
        return min(self._fronts())[1]

    def _fronts(self) -> Iterator[tuple[Key, Sequence]]:
        if self._order:
            yield self._order.oldest
        if self._aged:
            yield self._aged.top

    def _leave(self, seq: Sequence, now: float) -> None:
        _, is_new, _ = self._arrivals.pop(seq)
        if seq in self._aged:
            self._aged.remove(seq)
        else:
            self._order.remove(seq)
            self._ages.remove(seq)
        if is_new:
            self.num_new -= 1
            self.num_new_tokens -= _num_tokens_that_count(seq)
        seq.waited_s += now - seq.queued_at

    def _ages_at(self, seq: Sequence) -> float:
        return seq.queued_at + (self._max_age_s - seq.waited_s)


def _num_tokens_that_count(seq: Sequence) -> int:
    return seq.num_prompt_tokens if seq.is_leader else 0

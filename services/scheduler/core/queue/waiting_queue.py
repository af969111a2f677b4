"""The waiting queue: who comes next, how many may wait, and when a refused client should come again."""

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
    """Who of those that wait comes next, as long as none has aged."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    LONGEST_PREFIX = "longest_prefix"


_ORDERS: dict[QueuePolicy, Callable[[], QueueOrder]] = {
    QueuePolicy.FCFS: ArrivalOrder,
    QueuePolicy.PRIORITY: PriorityOrder,
    QueuePolicy.LONGEST_PREFIX: PrefixOrder,
}


def max_steps_to_admission(num_ahead: int, context_length: int, token_budget: int) -> int:
    """How many steps are sent at most between a request's turning aged and the step that admits it.

    Let A be the sequences ahead of it, L the context length and c = ceil(L / B) the steps that compute the longest
    prompt with the token budget B. The bound is |A| * L * (2c - 1):

    - While an aged request waits, only aged ones that arrived before it are admitted; whoever else is preempted
      comes back behind it. So every step that is sent works for A alone.
    - A row is a token that is kept, or more where the worker drafts, or one that overlap wasted; both count against
      max_tokens, so A gets fewer than |A| * L rows, and at most as many steps have one.
    - A step without a row gives its whole budget to the prompt that began first, which takes at most c - 1 of them
      before its last chunk, and that one brings a row. Only a decode that needs its block ends such a prompt early
      (in mixed steps). Then either that step has a row, or each decode is preempted or sits out, and there is a
      step with a row before another prompt can be ended so. Steps with a row thus answer for at most two prompts
      that were begun: 2 * (c - 1) steps without one.
    - When A is gone, the pool and all places are free, and nobody stands before it.

    It needs that a higher class never preempts a sequence that has aged (`WaitingQueue.is_aged`). An epoch that ends
    starts the count anew, since it takes back what was in flight. And it is a bound on steps, not on time: the steps
    must return, and the delay gate must be open.

    Args:
        num_ahead: Sequences that held a place when it turned aged, and those that arrived before it and have not
            ended, among them such as were resubmitted later.
        context_length: Tokens of a prompt and its completion, at most.
        token_budget: `StepBudget.max_prompt_tokens`.
    """
    num_chunks = -(-context_length // token_budget)
    return num_ahead * context_length * (2 * num_chunks - 1)


class WaitingQueue:
    """Waiting sequences, and who of them comes next.

    A sequence has aged when it has waited, in all its stays together, for more than `max_age_s`; the time that it
    ran does not count. Aged ones come before all others, by arrival, whatever the policy: so none starves.
    `max_steps_to_admission` has the bound.

    Arrival is by `arrive_time`; of equals, those that were admitted before come first, then who was added first. A
    preempted or resubmitted sequence thereby keeps its place. Only newcomers are held to the bounds: who was
    admitted once comes back in any case. Of a request with several choices each counts as one that waits, and its
    prompt counts once, since they share it.

    The clock never goes back. While a sequence waits, its priority and its times stay as they are.

    Invariant: each waiting sequence stands in `_order`, and then in `_ages` too, or in `_aged`. `num_new` and
    `num_new_tokens` count those that were never admitted, and the prompts of leaders among them.
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
        # Those in `_order` by the time at which they turn aged.
        self._ages = SortedQueue()
        # By arrival.
        self._aged = SortedQueue()
        self._drain_rate = DrainRate()

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they were added."""
        return iter(self._arrivals)

    def oldest_arrive_time(self) -> float:
        """When the first of all that wait arrived; there is one."""
        return min(place[0][0] for place in self._fronts())

    def check_room(
        self, num_prompt_tokens: int, now: float, *, num_choices: int = 1, others: Collection[WaitingQueue] = ()
    ) -> None:
        """Refuse a newcomer while too much waits, here and in `others`, for which the bounds hold together.

        One above a bound by itself is taken when nothing waits.

        Raises:
            QueueFullError: with the time after which there is room, as far as the drain rates tell.
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
        """In how many seconds so many newcomers will have left the queue and `others`, which empty side by side."""
        delays_s = [queue._drain_rate.delay_s(num_places, now) for queue in (self, *others)]
        rate = sum(1.0 / delay_s for delay_s in delays_s if delay_s < MAX_DELAY_S)
        return 1.0 / rate if rate else MAX_DELAY_S

    def add(self, seq: Sequence, now: float) -> None:
        """Put a sequence in its place: a newcomer, or one that was resubmitted, preempted or recovered."""
        seq.queued_at = now
        self._num_added += 1
        is_new = not seq.was_admitted
        arrival = (seq.arrive_time, is_new, self._num_added)
        self._arrivals[seq] = arrival
        self._order.push(arrival, seq)
        self._ages.push((self._ages_at(seq), self._num_added), seq)
        if is_new:
            self.num_new += 1
            self.num_new_tokens += _num_tokens_that_count(seq)

    def next(self, now: float, num_cached_tokens: NumCachedTokens) -> Sequence:
        """Who comes next; there is one. It stays so until it leaves, unless one comes that goes before it.

        Args:
            now: The time.
            num_cached_tokens: Asked for by LONGEST_PREFIX alone, for `WINDOW` sequences at most, and for none while
                the one it chose still waits.
        """
        if self._ages and self._ages.top[0][0] < now:
            return self._first_aged(now)
        return self._aged.top[1] if self._aged else self._order.first(now, num_cached_tokens)

    def take(self, seq: Sequence, now: float) -> None:
        """Take out a sequence that is admitted now.

        The drain rate is that of newcomers: only they hold places that a refused client waits for.
        """
        _, is_new, _ = self._arrivals[seq]
        self._leave(seq, now)
        if is_new:
            self._drain_rate.note(1, now)

    def remove(self, seq: Sequence, now: float) -> None:
        """Take one out, wherever it is: it ended."""
        self._leave(seq, now)

    def is_aged(self, seq: Sequence, now: float) -> bool:
        """Whether it has waited for more than `max_age_s` altogether; one that runs stays as it was admitted."""
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
            assert self.oldest_arrive_time() == min(seq.arrive_time for seq in self), "the oldest that waits"

    def _first_aged(self, now: float) -> Sequence:
        """The first of the aged; one of them stands in the policy's order."""
        if not self.is_aged(self._order.oldest[1], now):
            # It arrived before those that have aged, and ran in between: it must not hide them.
            while self._ages and self._ages.top[0][0] < now:
                _, seq = self._ages.pop()
                self._order.remove(seq)
                self._aged.push(self._arrivals[seq], seq)
            return self._aged.top[1]
        return min(self._fronts())[1]

    def _fronts(self) -> Iterator[tuple[Key, Sequence]]:
        """The first to arrive in each place."""
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
        """After which time a waiting sequence has aged."""
        return seq.queued_at + (self._max_age_s - seq.waited_s)


def _num_tokens_that_count(seq: Sequence) -> int:
    return seq.num_prompt_tokens if seq.is_leader else 0

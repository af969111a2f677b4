"""The waiting sequences of one tenant."""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.queue.queue_order import Key, NumCachedTokens, QueueOrder, SortedQueue
from services.scheduler.core.queue.tenant_counters import TenantAccount


class TenantQueue:
    """A tenant's waiting sequences: the aged ones by arrival, then the others in the order of the queue policy.

    Those that were set aside keep their places, but are not next. While one tenant waits, it is the rank's order; a
    queue that is empty may be given to another tenant.

    Invariant: each of `arrivals` is either in `_aged`, in both `_order` and `_ages`, or in `aside`. `returned` are
    those that were admitted before, by arrival. `num_new_tokens` are the prompt tokens of the leaders among the others.
    """

    def __init__(self, account: TenantAccount, order: QueueOrder, max_age_s: float) -> None:
        """Make an empty queue; a sequence ages once it has waited for more than `max_age_s` in total."""
        self.account = account
        self.weight = 0.0
        """The account's, as the waiting queue has counted it."""
        self.num_new_tokens = 0
        self.arrivals: dict[Sequence, Key] = {}
        self.returned = SortedQueue()
        self.aside: dict[Sequence, None] = {}
        """Sequences that others may pass; see `WaitingQueue.try_set_aside`."""
        self._max_age_s = max_age_s
        self._order = order
        # The sequences in `_order`, by the time at which they turn aged.
        self._ages = SortedQueue()
        # The order is that of arrival.
        self._aged = SortedQueue()

    @property
    def has_next(self) -> bool:
        """Whether any sequence is not set aside."""
        return len(self.arrivals) > len(self.aside)

    def push(self, arrival: Key, seq: Sequence) -> None:
        """Add a sequence; `arrival` ends with a number that no other one has."""
        self.arrivals[seq] = arrival
        self._line_up(seq)
        if seq.was_admitted:
            self.returned.push(arrival, seq)
        else:
            self.num_new_tokens += seq.num_limited_tokens

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from any place."""
        del self.arrivals[seq]
        if seq in self.aside:
            del self.aside[seq]
        elif self._aged and seq in self._aged:
            self._aged.remove(seq)
        else:
            self._order.remove(seq)
            self._ages.remove(seq)
        if seq.was_admitted:
            self.returned.remove(seq)
        else:
            self.num_new_tokens -= seq.num_limited_tokens

    def set_aside(self, seq: Sequence) -> float:
        """Set a sequence aside that has not aged; returns when it turns aged."""
        self._order.remove(seq)
        self._ages.remove(seq)
        self.aside[seq] = None
        return self._ages_at(seq)

    def bring_back(self) -> None:
        """Let those that were set aside go on at their places."""
        aside, self.aside = self.aside, {}
        for seq in aside:
            self._line_up(seq)

    def first(self, now: float, num_cached_tokens: NumCachedTokens) -> Sequence:
        """The next sequence that is not set aside; there must be one."""
        if self._ages and self._ages.top[0][0] < now:
            return self._first_aged(now)
        return self._aged.top[1] if self._aged else self._order.first(now, num_cached_tokens)

    def class_of(self, seq: Sequence, now: float) -> Priority:
        """The class of a sequence of this queue; an aged one is most urgent."""
        return Priority.HIGH if self.has_aged(seq, now) else seq.priority

    def first_class(self, now: float, num_cached_tokens: NumCachedTokens) -> Priority:
        """The class of the next sequence; there must be one."""
        return self.class_of(self.first(now, num_cached_tokens), now)

    def ages_at(self, now: float) -> float | None:
        """After which time the first sequence will have aged; None if one has."""
        has_aged = bool(self._aged) or self._ages.top[0][0] < now
        return None if has_aged else self._ages.top[0][0]

    def oldest_arrived_at(self) -> float:
        """The earliest arrive time; there must be one."""
        return min(key[0] for key in (*(key for key, _ in self._fronts()), *map(self.arrivals.__getitem__, self.aside)))

    def has_aged(self, seq: Sequence, now: float) -> bool:
        """Whether a sequence of this queue has aged."""
        return self._ages_at(seq) < now

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        num_in_order = len(self.arrivals) - len(self._aged) - len(self.aside)
        assert len(self._order) == len(self._ages) == num_in_order, "a tenant's places"
        assert all((seq in self._aged) + (seq in self._ages) + (seq in self.aside) == 1 for seq in self.arrivals), (
            "a tenant's places"
        )
        new = (seq for seq in self.arrivals if not seq.was_admitted)
        assert self.num_new_tokens == sum(seq.num_limited_tokens for seq in new), "a tenant's tokens"
        assert all((seq in self.returned) == seq.was_admitted for seq in self.arrivals), "a tenant's returned sequences"

    def _line_up(self, seq: Sequence) -> None:
        arrival = self.arrivals[seq]
        self._order.push(arrival, seq)
        self._ages.push((self._ages_at(seq), arrival[-1]), seq)

    def _first_aged(self, now: float) -> Sequence:
        """At least one aged sequence must be in the policy's order."""
        if not self.has_aged(self._order.oldest[1], now):
            # It arrived before the aged ones but ran in between; it must not hide them.
            while self._ages and self._ages.top[0][0] < now:
                _, seq = self._ages.pop()
                self._order.remove(seq)
                self._aged.push(self.arrivals[seq], seq)
            return self._aged.top[1]
        return min(self._fronts())[1]

    def _fronts(self) -> Iterator[tuple[Key, Sequence]]:
        if self._order:
            yield self._order.oldest
        if self._aged:
            yield self._aged.top

    def _ages_at(self, seq: Sequence) -> float:
        return seq.queued_at + (self._max_age_s - seq.waited_s)

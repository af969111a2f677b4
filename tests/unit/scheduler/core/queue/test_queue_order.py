"""The orders of the waiting queue: compared with a list, and their cost with many requests waiting."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.queue.queue_order import WINDOW, Key, PrefixOrder, SortedQueue
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from tests.support.scheduler.waiting import (
    MAX_AGE_S,
    CacheQueries,
    add_all,
    make_queue,
    make_seq,
    nothing_cached,
    take_next,
)

# Compared with a list


@dataclass
class NaiveQueue:
    """A reference for `WaitingQueue` that looks at every sequence each time."""

    policy: QueuePolicy
    waiting: list[Sequence] = field(default_factory=list)
    arrivals: dict[Sequence, Key] = field(default_factory=dict)
    ranking: list[Sequence] = field(default_factory=list)
    ranked_at: float | None = None
    choice: Sequence | None = None
    num_added: int = 0

    def add(self, seq: Sequence) -> None:
        self.num_added += 1
        self.waiting.append(seq)
        self.arrivals[seq] = (seq.arrived_at, not seq.was_admitted, self.num_added)

    def next(self, now: float, num_cached_tokens: Callable[[Sequence], int]) -> Sequence:
        by_arrival = sorted(self.waiting, key=self.arrivals.__getitem__)
        aged = [seq for seq in by_arrival if seq.waited_s + now - seq.queued_at > MAX_AGE_S]
        if aged:
            return aged[0]
        if self.policy is QueuePolicy.FCFS:
            return by_arrival[0]
        if self.policy is QueuePolicy.PRIORITY:
            return min(by_arrival, key=lambda seq: seq.priority)
        if self.choice not in self.waiting:
            self.ranking = [seq for seq in self.ranking if seq in self.waiting]
            if now != self.ranked_at or not self.ranking:
                self.ranking = sorted(by_arrival[:WINDOW], key=num_cached_tokens, reverse=True)
                self.ranked_at = now
            self.choice = self.ranking.pop(0)
        assert self.choice is not None
        return self.choice

    def remove(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        if seq is self.choice:
            self.choice = None
        if seq in self.ranking:
            self.ranking.remove(seq)


class Pair:
    """The queue and the reference under the same operations. Times are multiples of 1/4, so that sums are exact."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.queue = make_queue(policy)
        self.naive = NaiveQueue(policy)
        self.now = 0.0
        self.running: list[Sequence] = []

    def arrive(self, number: int) -> None:
        """Add a new sequence; some have an earlier arrival time, as resubmitted ones do."""
        age_s = number % 7 if number % 3 == 0 else 0
        attempt = 2 if number % 6 == 0 else 1
        seq = make_seq(
            self.now - age_s, priority=Priority(1 + number % 3), num_prompt_tokens=1 + number % 5, attempt=attempt
        )
        self._add(seq)

    def preempt(self, number: int) -> None:
        """Preempt a running sequence."""
        if self.running:
            self._add(self.running.pop(number % len(self.running)))

    def ask(self, number: int) -> None:
        """Look at the next sequence without admitting it."""
        if len(self.queue):
            assert self._next(number) is self.naive.next(self.now, self._cached(number))

    def admit(self, number: int) -> None:
        """Admit the next sequence, and up to two more."""
        for _ in range(min(1 + number % 3, len(self.queue))):
            seq = self.naive.next(self.now, self._cached(number))
            assert self._next(number) is seq
            waited_s = seq.waited_s + self.now - seq.queued_at
            self.queue.take(seq, self.now)
            self.naive.remove(seq)
            assert seq.waited_s == waited_s
            assert self.queue.is_aged(seq, self.now) == (waited_s > MAX_AGE_S)
            seq.num_first_cached_tokens = 0
            self.running.append(seq)

    def end(self, number: int) -> None:
        """End a waiting sequence."""
        if len(self.queue):
            seq = self.naive.waiting[number % len(self.queue)]
            self.queue.remove(seq, self.now)
            self.naive.remove(seq)

    def wait(self, number: int) -> None:
        self.now += (number % 50) / 4

    def check(self) -> None:
        self.queue.check_integrity()
        assert list(self.queue) == self.naive.waiting
        for seq in self.queue:
            assert self.queue.is_aged(seq, self.now) == (seq.waited_s + self.now - seq.queued_at > MAX_AGE_S)

    def _add(self, seq: Sequence) -> None:
        self.queue.add(seq, self.now)
        assert seq.queued_at == self.now
        self.naive.add(seq)

    def _next(self, number: int) -> Sequence:
        return self.queue.next(self.now, self._cached(number))

    def _cached(self, number: int) -> Callable[[Sequence], int]:
        # The cached tokens change from step to step.
        return lambda seq: (seq.num_prompt_tokens * (1 + number)) % 5


OPERATIONS = (Pair.arrive, Pair.arrive, Pair.preempt, Pair.ask, Pair.admit, Pair.end, Pair.wait)


@pytest.mark.parametrize("policy", list(QueuePolicy))
@settings(max_examples=300)
@given(operations=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 99)), max_size=80))
def test_the_queue_agrees_with_a_list(
    policy: QueuePolicy, operations: list[tuple[Callable[[Pair, int], None], int]]
) -> None:
    pair = Pair(policy)
    for operation, number in operations:
        operation(pair, number)
        pair.check()
    while len(pair.queue):
        pair.admit(0)


@settings(max_examples=500)
@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["push", "push", "remove", "first"]), st.integers(0, 99)), max_size=60
    )
)
def test_the_window_holds_the_earliest_arrivals(operations: list[tuple[str, int]]) -> None:
    order = PrefixOrder(window=3)
    waiting: list[tuple[Key, Sequence]] = []
    for step, (operation, number) in enumerate(operations):
        if operation == "push":
            item = ((float(number), step), make_seq())
            waiting.append(item)
            order.push(*item)
        elif operation == "remove" and waiting:
            _, seq = waiting.pop(number % len(waiting))
            order.remove(seq)
        elif operation == "first" and waiting:
            queries = CacheQueries()
            first = order.first(step, queries)
            assert set(queries.seqs) == {seq for _, seq in sorted(waiting)[:3]}
            order.remove(first)
            waiting = [item for item in waiting if item[1] is not first]
        assert len(order) == len(waiting)
        if waiting:
            assert order.oldest == min(waiting)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=300))
def test_a_sorted_queue_returns_the_smallest_of_its_items(operations: list[tuple[bool, int]]) -> None:
    queue = SortedQueue()
    inside: list[tuple[Key, Sequence]] = []
    for step, (adds, number) in enumerate(operations):
        if adds or not inside:
            inside.append(((number, step), make_seq()))
            queue.push(*inside[-1])
        elif number % 2:
            _, seq = inside.pop(number % len(inside))
            queue.remove(seq)
        else:
            inside.remove(min(inside))
            queue.pop()
        assert len(queue) == len(inside)
        assert not inside or queue.top == min(inside)


def test_removing_most_of_a_sorted_queue_leaves_the_others_in_order() -> None:
    rng = random.Random(0)
    items: list[tuple[Key, Sequence]] = [((float(number),), make_seq()) for number in range(500)]
    queue = SortedQueue()
    for key, seq in rng.sample(items, len(items)):
        queue.push(key, seq)
    staying = sorted(rng.sample(items, 100))
    for item in items:
        if item not in staying:
            queue.remove(item[1])
    assert [queue.pop() for _ in range(len(queue))] == staying


# Cost


class CountedTime(float):
    """A time that counts its comparisons."""

    num_comparisons = 0

    def __lt__(self, other: float) -> bool:
        CountedTime.num_comparisons += 1
        return float.__lt__(self, other)

    def __gt__(self, other: float) -> bool:
        CountedTime.num_comparisons += 1
        return float.__gt__(self, other)

    def __eq__(self, other: object) -> bool:
        CountedTime.num_comparisons += 1
        return float.__eq__(self, other)

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __add__(self, other: float) -> CountedTime:
        return CountedTime(float.__add__(self, other))


def comparisons_per_round(policy: QueuePolicy, num_waiting: int, *, is_shuffled: bool, num_rounds: int = 300) -> float:
    """The time comparisons of two arrivals, an admission and a removal in the middle while this many sequences wait."""
    queue = make_queue(policy)
    waiting = [make_seq(CountedTime(-num_waiting + number)) for number in range(num_waiting)]
    # Admissions take from the front, so these wait until they are removed.
    ending = waiting[num_waiting // 2 :: max(num_waiting // 2 // num_rounds, 1)]
    for seq in random.Random(0).sample(waiting, num_waiting) if is_shuffled else waiting:
        queue.add(seq, CountedTime(0.0))
    CountedTime.num_comparisons = 0
    for number in range(num_rounds):
        now = CountedTime(number / num_rounds)
        arrivals = [make_seq(now, priority=Priority(1 + number % 3)) for _ in range(2)]
        add_all(queue, *arrivals)
        queue.take(queue.next(now, nothing_cached), now)
        queue.remove(ending[number] if number < len(ending) else arrivals[1], now)
    return CountedTime.num_comparisons / num_rounds


@pytest.mark.parametrize("policy", list(QueuePolicy))
def test_a_round_costs_the_same_with_twenty_thousand_waiting(policy: QueuePolicy) -> None:
    many, few = (comparisons_per_round(policy, number, is_shuffled=False) for number in (20_000, 10))
    assert many < few + 10


@pytest.mark.parametrize("policy", list(QueuePolicy))
def test_a_round_costs_little_more_when_twenty_thousand_arrive_out_of_order(policy: QueuePolicy) -> None:
    many, few = (comparisons_per_round(policy, number, is_shuffled=True) for number in (20_000, 10))
    # A heap of 20,000 is 11 levels higher than one of 10.
    assert many < few + 11 * 6


@pytest.mark.parametrize("policy", list(QueuePolicy))
def test_ageing_all_at_once_makes_no_step_expensive(policy: QueuePolicy) -> None:
    queue = make_queue(policy)
    for number in range(10_000):
        queue.add(make_seq(CountedTime(number / 10_000)), CountedTime(number / 10_000))
    CountedTime.num_comparisons = 0
    assert queue.next(CountedTime(20.0), nothing_cached).arrived_at == 0.0
    assert CountedTime.num_comparisons < 100


def test_only_the_window_is_ranked_however_many_are_waiting() -> None:
    queue = make_queue(QueuePolicy.LONGEST_PREFIX)
    add_all(queue, *(make_seq() for _ in range(10_000)))
    queries = CacheQueries()
    for step in range(10):
        take_next(queue, step / 10, queries)
    assert len(queries.seqs) == 10 * WINDOW


def num_sequences_alive() -> int:
    return sum(type(thing) is Sequence for thing in gc.get_objects())


@pytest.mark.parametrize("policy", list(QueuePolicy))
def test_sequences_that_left_are_not_kept_alive_by_one_that_waits(policy: QueuePolicy) -> None:
    queue = make_queue(policy)
    num_before = num_sequences_alive()
    queue.add(make_seq(priority=Priority.HIGH, num_prompt_tokens=2), 0.0)
    for _ in range(5000):
        seq = make_seq(1.0)
        queue.add(seq, 1.0)
        queue.next(1.0, lambda seq: seq.num_prompt_tokens)
        queue.remove(seq, 1.0)
    assert num_sequences_alive() - num_before < 200

"""Which request is next under each policy, ageing, what limits what waits, and the retry delay of a refused client."""

from __future__ import annotations

import pytest

from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.policy import SchedulerPolicy
from services.scheduler.core.queue.drain_rate import MAX_DELAY_S, MIN_DELAY_S, DrainRate
from services.scheduler.core.queue.queue_order import WINDOW
from services.scheduler.core.queue.waiting_queue import MAX_ASIDE, QueuePolicy
from shared.errors import QueueFullError
from tests.support.scheduler.engine_driver import EngineDriver
from tests.support.scheduler.waiting import (
    MAX_AGE_S,
    CacheQueries,
    add_all,
    drain,
    make_queue,
    make_seq,
    nothing_cached,
    take_next,
)

# Order


def test_requests_are_served_by_arrival_whatever_the_order_of_adding() -> None:
    first, second, third = make_seq(1.0), make_seq(2.0), make_seq(3.0)
    queue = make_queue()
    for seq in (second, third, first):
        queue.add(seq, 3.0)
    assert drain(queue, 3.0) == [first, second, third]


def test_requests_with_equal_arrival_are_served_in_the_order_of_adding() -> None:
    seqs = [make_seq() for _ in range(5)]
    queue = make_queue()
    add_all(queue, *seqs)
    assert list(queue) == seqs
    assert drain(queue, 0.0) == seqs


@pytest.mark.parametrize("policy", [QueuePolicy.FCFS, QueuePolicy.LONGEST_PREFIX])
def test_a_preempted_sequence_goes_before_new_ones_with_the_same_arrival(policy: QueuePolicy) -> None:
    preempted, waiting = make_seq(), make_seq()
    queue = make_queue(policy)
    add_all(queue, preempted, waiting)
    assert take_next(queue, 0.0) is preempted
    queue.add(preempted, 1.0)
    assert drain(queue, 1.0) == [preempted, waiting]


def test_the_most_urgent_class_goes_first_each_in_order_of_arrival() -> None:
    low, late_normal, normal, high = (
        make_seq(1.0, priority=Priority.LOW),
        make_seq(3.0),
        make_seq(2.0),
        make_seq(4.0, priority=Priority.HIGH),
    )
    queue = make_queue(QueuePolicy.PRIORITY)
    add_all(queue, low, late_normal, normal, high)
    assert queue.oldest_arrived_at() == 1.0
    assert drain(queue, 4.0) == [high, normal, late_normal, low]


def test_the_longest_prefix_goes_first_and_equal_ones_by_arrival() -> None:
    seqs = [make_seq(float(number), num_prompt_tokens=length) for number, length in enumerate([1, 8, 4, 8])]
    queue = make_queue(QueuePolicy.LONGEST_PREFIX)
    add_all(queue, *seqs)
    assert drain(queue, 4.0, lambda seq: seq.num_prompt_tokens) == [seqs[1], seqs[3], seqs[2], seqs[0]]


def test_a_long_prefix_outside_the_window_waits_until_it_is_inside() -> None:
    seqs = [make_seq(number / 100) for number in range(WINDOW + 2)]
    queue = make_queue(QueuePolicy.LONGEST_PREFIX)
    add_all(queue, *seqs)
    last = seqs[-1]
    taken = [take_next(queue, 2.0 + step, lambda seq: int(seq is last)) for step in range(3)]
    assert taken == [seqs[0], seqs[1], last]


def test_the_window_is_ranked_once_per_step_and_not_while_the_chosen_sequence_waits() -> None:
    seqs = [make_seq() for _ in range(3)]
    queries = CacheQueries()
    queue = make_queue(QueuePolicy.LONGEST_PREFIX)
    add_all(queue, *seqs)
    chosen = queue.next(1.0, queries)
    assert len(queries.seqs) == 3
    # There was no room for it, and it is queries for again: neither time nor new requests change the choice.
    add_all(queue, make_seq(2.0))
    assert all(queue.next(now, queries) is chosen for now in (1.0, 2.0, 3.0))
    assert len(queries.seqs) == 3
    queue.take(chosen, 3.0)
    queue.take(queue.next(3.0, queries), 3.0)
    queue.next(3.0, queries)
    assert len(queries.seqs) == 6


def test_a_chosen_sequence_that_ended_is_replaced() -> None:
    seqs = [make_seq(num_prompt_tokens=length) for length in (3, 2, 1)]
    queue = make_queue(QueuePolicy.LONGEST_PREFIX)
    add_all(queue, *seqs)
    assert queue.next(1.0, lambda seq: seq.num_prompt_tokens) is seqs[0]
    queue.remove(seqs[0], 2.0)
    queue.remove(seqs[1], 2.0)
    assert drain(queue, 2.0) == [seqs[2]]


# Ageing


@pytest.mark.parametrize("policy", list(QueuePolicy))
def test_aged_requests_go_before_all_others_by_arrival(policy: QueuePolicy) -> None:
    old = [make_seq(0.0, priority=Priority.LOW), make_seq(1.0)]
    fresh = make_seq(9.0, priority=Priority.HIGH, num_prompt_tokens=9)
    queue = make_queue(policy)
    add_all(queue, *old, fresh)
    # At exactly the limit, no request has aged.
    assert not queue.is_aged(old[0], 10.0)
    assert queue.is_aged(old[0], 10.5)
    assert drain(queue, 11.5, lambda seq: seq.num_prompt_tokens) == [*old, fresh]


def test_waiting_time_adds_up_over_all_stays_and_excludes_running() -> None:
    seq = make_seq()
    queue = make_queue()
    queue.add(seq, 0.0)
    queue.take(seq, 6.0)
    assert not queue.is_aged(seq, 1000.0)
    queue.add(seq, 1000.0)
    assert (seq.waited_s, seq.queued_at) == (6.0, 1000.0)
    assert not queue.is_aged(seq, 1004.0)
    assert queue.is_aged(seq, 1004.5)
    queue.take(seq, 1005.0)
    # A sequence that had aged when it was admitted stays aged.
    assert queue.is_aged(seq, 1005.0)


def test_a_preempted_sequence_does_not_hide_aged_ones_that_arrived_after_it() -> None:
    ran, others = make_seq(0.0), [make_seq(1.0), make_seq(2.0), make_seq(3.0)]
    queue = make_queue()
    queue.add(ran, 0.0)
    queue.take(ran, 0.0)
    add_all(queue, *others)
    queue.add(ran, 11.0)
    assert queue.next(11.0, nothing_cached) is ran
    assert take_next(queue, 12.5) is others[0]
    assert queue.oldest_arrived_at() == 0.0
    # The third has not aged yet, so it is served after the one that arrived before it.
    assert drain(queue, 12.5) == [others[1], ran, others[2]]


def test_aged_requests_keep_their_order_when_the_one_before_them_is_removed() -> None:
    ran, others = make_seq(0.0), [make_seq(1.0), make_seq(2.0), make_seq(8.0)]
    queue = make_queue()
    queue.add(ran, 0.0)
    queue.take(ran, 0.0)
    add_all(queue, *others)
    queue.add(ran, 11.0)
    assert queue.next(12.5, nothing_cached) is others[0]
    queue.remove(ran, 13.0)
    assert queue.oldest_arrived_at() == 1.0
    assert drain(queue, 18.5) == others


def test_a_flood_of_urgent_requests_starves_no_request() -> None:
    queue = make_queue(QueuePolicy.PRIORITY)
    low = make_seq(0.0, priority=Priority.LOW)
    queue.add(low, 0.0)
    now = 0.0
    taken: Sequence | None = None
    while taken is not low:
        now += 1.0
        add_all(queue, *(make_seq(now, priority=Priority.HIGH) for _ in range(3)))
        taken = take_next(queue, now)
    assert now == MAX_AGE_S + 1


def test_what_is_set_aside_keeps_its_place_and_is_passed_until_it_is_brought_back_or_ages() -> None:
    queue = make_queue()
    seqs = [make_seq(number / 10) for number in range(4)]
    add_all(queue, *seqs)
    first, second = seqs[:2]
    for seq in (first, second):
        assert queue.next(1.0, nothing_cached) is seq
        assert queue.try_set_aside(seq, 1.0)
    assert take_next(queue, 1.0) is seqs[2]
    # It still counts as waiting, and is the oldest.
    assert (len(queue), queue.num_new_tokens, queue.oldest_arrived_at()) == (3, 3, 0.0)
    assert take_next(queue, 1.0) is seqs[3]
    assert not queue.num_next
    queue.bring_back_aged(MAX_AGE_S)
    assert not queue.num_next
    queue.bring_back_aged(MAX_AGE_S + 0.05)
    assert queue.next(MAX_AGE_S + 0.05, nothing_cached) is first
    assert not queue.try_set_aside(first, MAX_AGE_S + 0.05), "an aged one is passed"
    assert drain(queue, MAX_AGE_S + 0.05) == [first, second]


def test_no_more_are_set_aside_than_are_looked_up_at_little_cost() -> None:
    queue = make_queue()
    add_all(queue, *(make_seq(number / 1000) for number in range(MAX_ASIDE + 1)))
    for _ in range(MAX_ASIDE):
        assert queue.try_set_aside(queue.next(1.0, nothing_cached), 1.0)
    assert not queue.try_set_aside(queue.next(1.0, nothing_cached), 1.0)
    queue.bring_back()
    assert queue.next(1.0, nothing_cached).arrived_at == 0.0


# Bounds


def test_the_retry_delay_follows_what_left_the_queue() -> None:
    queue = make_queue()
    for step in range(120):
        add_all(queue, make_seq(float(step)))
        take_next(queue, step + 0.5)
    add_all(queue, make_seq(120.0), make_seq(120.0, num_prompt_tokens=5))
    assert queue.retry_delay_s(1, 120.0) == pytest.approx(1.0, rel=0.05)


def test_only_new_requests_count_and_only_they_drain_the_queue() -> None:
    preempted, resubmitted = make_seq(), make_seq(attempt=2)
    queue = make_queue()
    queue.add(preempted, 0.0)
    take_next(queue, 0.0)
    add_all(queue, preempted, resubmitted)
    assert (len(queue), queue.num_new_tokens) == (2, 0)
    queue.add(make_seq(1.0), 1.0)
    delay_s = queue.retry_delay_s(1, 2.0)
    assert take_next(queue, 2.0) is preempted
    assert take_next(queue, 2.0) is resubmitted
    assert queue.retry_delay_s(1, 2.0) == delay_s


def refusal(driver: EngineDriver, handle: int) -> QueueFullError:
    end = driver.choices[1, handle].end
    assert end is not None
    assert isinstance(end.error, QueueFullError)
    return end.error


def test_a_full_queue_refuses_at_once_and_does_not_affect_others() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, max_waiting_requests=2))
    for handle in range(5):
        driver.submit(handle, [handle], max_tokens=3)
    # One runs, two wait.
    assert [handle for (_, handle), output in driver.choices.items() if output.end] == [3, 4]
    assert refusal(driver, 3).values["num_waiting"] == "2"
    driver.run()
    assert all(len(driver.choices[1, handle].tokens) == 3 for handle in range(3))
    driver.submit(5, [5], max_tokens=1)
    driver.run()
    assert len(driver.choices[1, 5].tokens) == 1


def test_prompt_tokens_are_bounded_but_one_large_prompt_is_accepted_alone() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, max_waiting_tokens=100))
    driver.submit(1, [1], max_tokens=2)
    driver.submit(2, [2] * 150, max_tokens=2)
    driver.submit(3, [3], max_tokens=2)
    assert refusal(driver, 3).values["num_waiting_tokens"] == "150"
    driver.run()
    assert len(driver.choices[1, 2].tokens) == 2


def test_aborted_requests_make_room() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, max_waiting_requests=1))
    driver.submit(1, [1], max_tokens=2)
    driver.submit(2, [2], max_tokens=2)
    driver.abort(2)
    driver.submit(3, [3], max_tokens=2)
    driver.run()
    assert len(driver.choices[1, 3].tokens) == 2


def test_preempted_sequences_do_not_count_against_the_bound() -> None:
    driver = EngineDriver(num_blocks=4, policy=SchedulerPolicy(max_num_batched_tokens=600, max_waiting_requests=1))
    driver.submit(1, [1] * 16, max_tokens=40)
    driver.submit(2, [2] * 16, max_tokens=40)
    while not driver.engine.state().counters.num_preemptions:
        driver.step()
    driver.submit(3, [3], max_tokens=2)
    driver.run()
    assert len(driver.choices[1, 3].tokens) == 2


def test_the_delay_follows_the_measured_rate() -> None:
    rate = DrainRate()
    assert rate.delay_s(1, 0.0) == MAX_DELAY_S
    for second in range(1, 121):
        rate.note(4, float(second))
    # Four admissions per second.
    assert rate.delay_s(8, 120.0) == pytest.approx(2.0, rel=0.05)
    assert rate.delay_s(1, 120.0) == pytest.approx(0.25, rel=0.05)
    # The rate decays while no request is admitted.
    assert rate.delay_s(1, 150.0) > 0.6
    assert rate.delay_s(1, 1000.0) == MAX_DELAY_S


def test_the_delay_is_neither_zero_nor_unbounded() -> None:
    rate = DrainRate()
    rate.note(1_000_000, 1.0)
    assert rate.delay_s(1, 1.0) == MIN_DELAY_S
    assert rate.delay_s(10**12, 1.0) == MAX_DELAY_S

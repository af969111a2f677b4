"""The order of several tenants' sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.queue.tenant_counters import OUTPUT_TOKEN_COST, TenantCounters
from services.scheduler.core.queue.waiting_queue import QueuePolicy, WaitingQueue
from shared.tenants.tenant import Tenant
from tests.support.scheduler.waiting import add_all, make_queue, make_seq, nothing_cached

A, B, C = Tenant("a"), Tenant("b"), Tenant("c")


def seq_of(
    tenant: Tenant, arrived_at: float = 0.0, *, priority: Priority = Priority.NORMAL, attempt: int = 1
) -> Sequence:
    """A sequence of a tenant, with one prompt token."""
    seq = make_seq(arrived_at, priority=priority, attempt=attempt)
    seq.tenant = tenant
    return seq


def take(queue: WaitingQueue, now: float = 1.0, *, cost: int = 1, keeps_share: bool = True) -> Tenant:
    """Admit the next sequence, for which its tenant pays `cost`; returns the tenant."""
    seq = queue.next(now, nothing_cached, lambda _: keeps_share)
    queue.take(seq, now)
    if queue.tenants.are_shared:
        queue.tenants.charge_prompt(seq.tenant_number, cost)
    queue.check_integrity()
    return seq.tenant


def test_tenants_take_turns_however_many_sequences_they_have() -> None:
    queue = make_queue()
    add_all(queue, *(seq_of(A, number / 100) for number in range(50)), seq_of(B, 0.9), seq_of(B, 0.95))
    assert [take(queue).name for _ in range(5)] == ["a", "b", "a", "b", "a"]


@given(st.integers(1, 5), st.integers(1, 5))
def test_tokens_are_shared_by_weight(weight: int, other_weight: int) -> None:
    tenants = Tenant("heavy", weight), Tenant("light", other_weight)
    queue = make_queue()
    add_all(queue, *(seq_of(tenant) for tenant in tenants for _ in range(200)))
    num_taken = [take(queue) for _ in range(120)].count(tenants[0])
    assert abs(num_taken - 120 * weight / (weight + other_weight)) <= 1


def test_output_is_charged_by_its_cost_and_the_tenants_weight() -> None:
    counters = TenantCounters()
    accounts = [counters.add_waiting(seq_of(tenant)) for tenant in (Tenant("a", 2.0), B)]
    counters.charge_output(np.array([0, 1, 1, 0], np.intp), None)
    counters.charge_output(np.array([0, 1], np.intp), np.array([3, 1], np.int32))
    assert [account.counter for account in accounts] == [5 * OUTPUT_TOKEN_COST / 2.0, 3 * OUTPUT_TOKEN_COST]


def test_a_tenant_alone_pays_nothing() -> None:
    queue = make_queue()
    add_all(queue, seq_of(A), seq_of(A))
    take(queue, cost=1000)
    assert queue.tenants[0].counter == 0.0


def test_a_tenant_that_begins_to_wait_has_saved_no_credit() -> None:
    queue = make_queue()
    add_all(queue, seq_of(A), seq_of(C))
    late = seq_of(B)
    queue.tenants.account_of(B)
    for _ in range(2):
        take(queue, cost=1000)
    add_all(queue, *(seq_of(A) for _ in range(4)))
    add_all(queue, late, *(seq_of(B) for _ in range(3)))
    assert queue.tenants[late.tenant_number].counter == 1000.0
    assert [take(queue, cost=10).name for _ in range(4)] == ["a", "b", "a", "b"]


def test_a_tenant_saves_no_credit_while_another_runs_and_nobody_waits() -> None:
    queue = make_queue()
    add_all(queue, seq_of(A), seq_of(B))
    for _ in range(2):
        take(queue, cost=10)
    for _ in range(100):
        add_all(queue, seq_of(A))
        assert take(queue, cost=1000) == A
    # The first to wait is the one that was given little, then comes the other.
    add_all(queue, *(seq_of(B) for _ in range(4)), *(seq_of(A) for _ in range(4)))
    assert sorted(take(queue, cost=10).name for _ in range(4)) == ["a", "a", "b", "b"]


def test_the_next_one_stays_while_others_pay_or_come() -> None:
    queue = make_queue()
    add_all(queue, seq_of(A), seq_of(B))
    chosen = queue.next(1.0, nothing_cached)
    queue.tenants.charge_prompt(chosen.tenant_number, 1000)
    queue.add(seq_of(C), 1.0)
    assert queue.next(1.0, nothing_cached) is chosen
    queue.remove(chosen, 1.0)
    assert queue.next(1.0, nothing_cached).tenant != chosen.tenant


def test_a_sequence_that_was_admitted_before_goes_first_only_within_its_tenants_share() -> None:
    for keeps_share in (False, True):
        queue = make_queue()
        add_all(queue, seq_of(A), seq_of(B), seq_of(B))
        queue.tenants.charge_prompt(1, 100)
        queue.add(seq_of(B, attempt=2), 0.0)
        assert take(queue, keeps_share=keeps_share) == (B if keeps_share else A)


def test_what_a_flood_lost_does_not_take_the_place_of_the_one_it_was_lost_to() -> None:
    queue = make_queue()
    add_all(queue, seq_of(A), seq_of(B))
    chosen = queue.next(1.0, nothing_cached)
    victim = seq_of(B if chosen.tenant == A else A, attempt=2)
    queue.tenants.charge_prompt(chosen.tenant_number, 1000)
    queue.add(victim, 1.0)
    assert queue.next(1.0, nothing_cached, lambda seq: seq is chosen) is chosen


def test_one_that_others_made_way_for_stays_next_until_it_leaves_or_exceeds_its_share() -> None:
    queue = make_queue()
    seqs = [seq_of(A), seq_of(A), seq_of(B)]
    add_all(queue, *seqs)
    queue.hold(seqs[1])
    queue.add(seq_of(C, attempt=2), 0.0)
    assert queue.next(1.0, nothing_cached) is seqs[1]
    assert queue.next(1.0, nothing_cached, lambda seq: seq is not seqs[1]) is not seqs[1]
    for leave in (queue.take, queue.remove):
        held = queue.next(1.0, nothing_cached)
        queue.hold(held)
        leave(held, 1.0)
        assert queue.held is None
        queue.check_integrity()


def test_one_that_others_made_way_for_lets_a_more_urgent_class_go_first() -> None:
    queue = make_queue(QueuePolicy.PRIORITY)
    held = seq_of(A, 0.0)
    add_all(queue, held, seq_of(B, 0.0, priority=Priority.LOW))
    queue.hold(held)
    queue.add(seq_of(B, 1.0), 1.0)
    assert queue.next(1.0, nothing_cached) is held
    queue.add(seq_of(A, 2.0, priority=Priority.HIGH), 2.0)
    assert queue.next(2.0, nothing_cached).priority is Priority.HIGH


def test_one_that_would_exceed_its_tenants_share_holds_up_nobody() -> None:
    queue = make_queue()
    add_all(queue, seq_of(A), seq_of(B))
    chosen = queue.next(1.0, nothing_cached, lambda _: False)
    queue.tenants.charge_prompt(chosen.tenant_number, 1)
    assert queue.next(1.0, nothing_cached, lambda _: False).tenant != chosen.tenant


def test_under_the_priority_policy_the_class_comes_first_and_age_is_the_highest_class() -> None:
    queue = make_queue(QueuePolicy.PRIORITY)
    add_all(queue, seq_of(A, 0.0, priority=Priority.LOW), seq_of(B, 5.0, priority=Priority.HIGH))
    queue.tenants.charge_prompt(1, 100)
    assert queue.next(6.0, nothing_cached).tenant == B
    assert queue.next(11.0, nothing_cached).tenant == B
    queue.add(seq_of(C, 11.0), 11.0)
    assert queue.next(11.0, nothing_cached).tenant == B
    assert take(queue, 11.0) == B
    assert take(queue, 11.0) == A


def test_what_was_admitted_before_goes_first_only_within_its_class() -> None:
    queue = make_queue(QueuePolicy.PRIORITY)
    add_all(queue, seq_of(B, 0.0))
    add_all(queue, seq_of(A, 0.0, priority=Priority.LOW, attempt=2), seq_of(A, 1.0, priority=Priority.HIGH))
    assert queue.next(2.0, nothing_cached).priority is Priority.HIGH


def test_what_was_admitted_before_gives_way_to_one_of_its_tenant_that_has_aged() -> None:
    queue = make_queue(QueuePolicy.PRIORITY)
    urgent, oldest = seq_of(A, 1.0, priority=Priority.HIGH, attempt=2), seq_of(A, 0.0, attempt=2)
    add_all(queue, seq_of(B, 2.0, priority=Priority.LOW), urgent, oldest)
    assert queue.next(3.0, nothing_cached) is urgent
    # All have aged.
    assert queue.next(20.0, nothing_cached) is oldest


def test_age_orders_within_a_tenant_alone() -> None:
    queue = make_queue()
    add_all(queue, *(seq_of(A, number / 100) for number in range(20)))
    queue.tenants.account_of(B)
    for _ in range(3):
        take(queue, 12.0, cost=10)
    queue.add(seq_of(B, 12.0), 12.0)
    add_all(queue, seq_of(C, 12.0))
    assert {take(queue, 12.0, cost=10) for _ in range(3)} == {A, B, C}


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    queue = make_queue()
    queue.add(seq_of(A), 0.0)
    for tenant in (B, C) * 500:
        seq = seq_of(tenant)
        queue.add(seq, 0.0)
        queue.remove(seq, 0.0)
        queue.check_integrity()
    assert queue._turns is None
    assert len(queue.tenants._waiting._heap) < 100


def test_a_tenant_alone_leaves_nothing_behind() -> None:
    queue = make_queue()
    for _ in range(1000):
        queue.add(seq_of(A), 0.0)
        take(queue)
    assert queue._turns is None
    assert not len(queue.tenants._waiting._heap)

"""The most urgent class of several tenants, in any order of what happens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.queue.waiting_queue import QueuePolicy, WaitingQueue
from shared.tenants.tenant import Tenant
from tests.support.scheduler.waiting import MAX_AGE_S, make_queue, make_seq, nothing_cached

TENANTS = [Tenant(name) for name in "abcd"]


def class_of(seq: Sequence, now: float) -> Priority:
    """HIGH once it has waited for long."""
    return Priority.HIGH if seq.queued_at + MAX_AGE_S - seq.waited_s < now else seq.priority


def is_aside(queue: WaitingQueue, seq: Sequence) -> bool:
    """Whether others may pass it."""
    return any(seq in each.aside for each in queue.queues)


def most_urgent(queue: WaitingQueue, now: float) -> tuple[Priority, int]:
    """The most urgent class that waits, and the tenant with the lowest counter in it, from all that waits."""
    classes: dict[int, Priority] = {}
    for seq in queue:
        if is_aside(queue, seq):
            continue
        classes[seq.tenant_number] = min(class_of(seq, now), classes.get(seq.tenant_number, Priority.LOW))
    best = min(classes.values())
    return best, min((queue.tenants[each].counter, each) for each, one in classes.items() if one == best)[1]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.sampled_from(Priority)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("set aside"), st.integers(0, 20)),
        st.tuples(st.just("bring back")),
        st.tuples(st.just("charge"), st.integers(0, 3), st.integers(1, 9)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 1.0, MAX_AGE_S / 2, 2 * MAX_AGE_S])),
        st.tuples(st.just("look")),
    ),
    max_size=50,
)


@settings(max_examples=60)
@given(actions)
def test_the_lowest_counter_of_the_most_urgent_class_is_found(actions: list[tuple[str, int, int]]) -> None:
    queue, now = make_queue(QueuePolicy.PRIORITY), 0.0
    for tenant in TENANTS:
        queue.tenants.account_of(tenant)
    for name, *arguments in actions:
        waiting = list(queue)
        if name == "add":
            seq = make_seq(now, priority=Priority(arguments[1]))
            seq.tenant = TENANTS[arguments[0]]
            queue.add(seq, now)
        elif name == "leave" and arguments[0] < len(waiting):
            queue.remove(waiting[arguments[0]], now)
        elif name == "charge" and queue.tenants.are_shared:
            queue.tenants.charge_prompt(*arguments)
        elif name == "wait":
            now += arguments[0]
        elif name == "set aside" and arguments[0] < len(waiting):
            seq = waiting[arguments[0]]
            if not is_aside(queue, seq):
                has_aged = queue.is_aged(seq, now)
                assert queue.try_set_aside(seq, now) is not has_aged
        elif name == "bring back":
            queue.bring_back()
        elif name == "look" and queue.num_next:
            if queue._turns is not None and queue._turns._classes is not None:
                priority, account = queue._turns._classes.most_urgent(now, nothing_cached)
                assert (priority, account.number) == most_urgent(queue, now)
            assert not is_aside(queue, queue.next(now, nothing_cached))
        queue.check_integrity()


def test_times_of_those_that_come_and_go_leave_nothing_behind() -> None:
    queue = make_queue(QueuePolicy.PRIORITY)
    for number in range(2000):
        seq = make_seq(number / 1e6)
        seq.tenant = TENANTS[number % 4]
        queue.add(seq, seq.arrived_at)
        if number >= 8:
            queue.remove(next(iter(queue)), seq.arrived_at)
            queue.next(seq.arrived_at, nothing_cached)
    assert queue._turns is not None
    assert queue._turns._classes is not None
    assert len(queue._turns._classes._ages) < 100

"""Slots and blocks are shared among tenants, not the queue alone."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.policy import SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from services.scheduler.core.scheduler import Scheduler
from shared.tenants.tenant import Tenant
from tests.support.scheduler.core import add, give, make_scheduler, make_sequence, send
from tests.support.scheduler.engine_driver import worker_facts

LOUD, QUIET, THIRD = Tenant("loud"), Tenant("quiet"), Tenant("third")
TOKEN = 9
_handles = count(1)


def seqs_of(
    tenant: Tenant, num_seqs: int, *, prompt: int = 4, max_tokens: int = 1000, priority: Priority = Priority.NORMAL
) -> list[Sequence]:
    """Sequences of a tenant, all different."""
    seqs = [make_sequence(next(_handles), prompt, max_tokens=max_tokens, priority=priority) for _ in range(num_seqs)]
    for seq in seqs:
        seq.tenant = tenant
    return seqs


def run(scheduler: Scheduler, num_steps: int = 1) -> None:
    """Send steps and give each its tokens before the next one."""
    for _ in range(num_steps):
        scheduler.schedule(0.0)
        record = scheduler.oldest_in_flight
        assert record is not None
        give(scheduler, *[TOKEN] * len(record.row_slots))


def running(scheduler: Scheduler) -> Counter[str]:
    """How many sequences of each tenant run."""
    waiting = set(scheduler.waiting_sequences())
    return Counter(seq.tenant.name for seq in scheduler.unfinished() if seq not in waiting)


def flooded(tenants: tuple[Tenant, ...] = (LOUD,), **policy: object) -> Scheduler:
    """A rank of 8 slots that tenants have filled, with as many waiting."""
    scheduler = make_scheduler(SchedulerPolicy(max_num_seqs=8, **policy), facts=worker_facts(num_blocks=1000))  # type: ignore[arg-type]
    for tenant in tenants:
        add(scheduler, *seqs_of(tenant, 16))
    run(scheduler, 2)
    assert running(scheduler).total() == 8
    return scheduler


def test_a_quiet_tenant_enters_soon_beside_one_that_holds_every_slot() -> None:
    scheduler = flooded()
    (quiet,) = seqs_of(QUIET, 1, max_tokens=4)
    add(scheduler, quiet)
    run(scheduler, 2)
    assert running(scheduler) == {"loud": 7, "quiet": 1}
    assert quiet.was_admitted
    run(scheduler, 5)
    assert running(scheduler) == {"loud": 8}


def test_tenants_get_slots_by_weight_and_no_more_by_preemption() -> None:
    scheduler = flooded()
    add(scheduler, *seqs_of(Tenant("heavy", 3.0), 16))
    run(scheduler, 12)
    assert running(scheduler) == {"loud": 2, "heavy": 6}
    num_preemptions = scheduler.counters.num_preemptions
    run(scheduler, 20)
    assert scheduler.counters.num_preemptions == num_preemptions


def test_nobody_is_preempted_for_a_tenant_that_would_exceed_its_share() -> None:
    scheduler = flooded((LOUD, QUIET))
    run(scheduler, 12)
    assert running(scheduler) == {"loud": 4, "quiet": 4}
    num_preemptions = scheduler.counters.num_preemptions
    add(scheduler, *seqs_of(QUIET, 4))
    run(scheduler, 5)
    assert running(scheduler) == {"loud": 4, "quiet": 4}
    assert scheduler.counters.num_preemptions == num_preemptions


def test_blocks_are_shared_too() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_num_seqs=64), facts=worker_facts(num_blocks=16))
    add(scheduler, *seqs_of(LOUD, 8, prompt=24))
    run(scheduler, 2)
    assert scheduler.block_counts.free == 0
    (quiet,) = seqs_of(QUIET, 1, prompt=40, max_tokens=4)
    add(scheduler, quiet)
    run(scheduler, 2)
    assert quiet.was_admitted
    assert running(scheduler) == {"loud": 6, "quiet": 1}


def test_what_a_tenant_above_its_share_may_grow_into_keeps_no_other_one_out() -> None:
    policy = SchedulerPolicy(max_num_seqs=64, admission_policy=AdmissionPolicy.LOOK_AHEAD)
    scheduler = make_scheduler(policy, facts=worker_facts(num_blocks=16))
    add(scheduler, *seqs_of(LOUD, 1, prompt=9 * 16))
    run(scheduler)
    (quiet,) = seqs_of(QUIET, 1, prompt=16, max_tokens=4)
    add(scheduler, quiet)
    run(scheduler)
    assert quiet.was_admitted


def test_what_cannot_enter_within_its_share_preempts_nobody() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_num_seqs=64), facts=worker_facts(num_blocks=16))
    add(scheduler, *seqs_of(LOUD, 8, prompt=24))
    run(scheduler, 2)
    add(scheduler, *seqs_of(QUIET, 1, prompt=16 * 9, max_tokens=4))
    run(scheduler, 3)
    assert running(scheduler) == {"loud": 8}


def test_a_growing_sequence_takes_blocks_from_the_tenant_furthest_above_its_share() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_num_seqs=64), facts=worker_facts(num_blocks=16))
    add(scheduler, *seqs_of(LOUD, 6, prompt=31))
    add(scheduler, *seqs_of(QUIET, 2, prompt=31))
    run(scheduler)
    assert running(scheduler) == {"loud": 6, "quiet": 2}
    run(scheduler, 4)
    assert running(scheduler)["quiet"] == 2


def test_a_victim_is_taken_again_only_after_it_has_got_a_token() -> None:
    scheduler = flooded()
    victim = next(seq for seq in scheduler.unfinished() if seq.tenant == LOUD and seq.slot is not None)
    victim.num_tokens_when_made_way = 10**6
    for seq in scheduler.unfinished():
        seq.num_tokens_when_made_way = 10**6
    add(scheduler, *seqs_of(QUIET, 1))
    run(scheduler, 3)
    assert running(scheduler) == {"loud": 8}


def test_recomputation_is_free_after_making_way_and_paid_after_a_tenants_own_growth() -> None:
    scheduler = flooded()
    add(scheduler, *seqs_of(QUIET, 1, max_tokens=2))
    run(scheduler, 2)
    victim = next(seq for seq in scheduler.waiting_sequences() if seq.was_admitted)
    assert not victim.pays_again

    scheduler = make_scheduler(SchedulerPolicy(max_num_seqs=64), facts=worker_facts(num_blocks=8))
    add(scheduler, *seqs_of(LOUD, 4, prompt=31))
    run(scheduler, 4)
    victim = next(seq for seq in scheduler.waiting_sequences() if seq.was_admitted)
    assert victim.pays_again


def test_a_less_urgent_sequence_takes_no_place_from_a_more_urgent_one_of_another_tenant() -> None:
    scheduler = make_scheduler(
        SchedulerPolicy(max_num_seqs=8, queue_policy=QueuePolicy.PRIORITY), facts=worker_facts(num_blocks=1000)
    )
    add(scheduler, *seqs_of(LOUD, 8, priority=Priority.HIGH))
    run(scheduler, 2)
    add(scheduler, *seqs_of(QUIET, 1, priority=Priority.LOW))
    run(scheduler, 3)
    assert running(scheduler) == {"loud": 8}


def test_tenants_that_have_nothing_here_have_no_share() -> None:
    scheduler = flooded((LOUD, QUIET, THIRD))
    run(scheduler, 12)
    assert sorted(running(scheduler).values()) == [2, 3, 3]
    for seq in scheduler.unfinished():
        if seq.tenant == THIRD:
            scheduler.abort(seq, 0.0)
    run(scheduler, 12)
    assert running(scheduler) == {"loud": 4, "quiet": 4}


def test_a_flood_of_prompts_leaves_another_tenants_prefix_cached() -> None:
    scheduler = make_scheduler(SchedulerPolicy(max_num_seqs=8), facts=worker_facts(num_blocks=64))
    hot = list(range(160))
    for tokens in ([*hot, 1], [*hot, 2]):
        seq = make_sequence(next(_handles), tokens, max_tokens=1)
        seq.tenant, seq.cache_salt = QUIET, b"quiet"
        add(scheduler, seq)
        run(scheduler)
        # Four times as many blocks as there are.
        for flood in seqs_of(LOUD, 8, prompt=512, max_tokens=1):
            add(scheduler, flood)
            run(scheduler)
    assert seq.num_first_cached_tokens == 160


@pytest.mark.parametrize("mixes", [False, True])
def test_what_is_freed_for_the_next_one_is_left_to_it_by_others_that_grow(mixes: bool) -> None:
    policy = SchedulerPolicy(max_num_seqs=64, enable_mixed_steps=mixes)
    scheduler = make_scheduler(policy, facts=worker_facts(num_blocks=17))
    add(scheduler, *seqs_of(LOUD, 1, prompt=24), *seqs_of(LOUD, 7, prompt=20))
    run(scheduler, 8)
    send(scheduler)
    # One block is free, two come back with the step in flight, and one sequence grows.
    (quiet,) = seqs_of(QUIET, 1, prompt=40, max_tokens=4)
    add(scheduler, quiet)
    scheduler.schedule(0.0)
    assert quiet.slot is None
    while any(seq.is_retiring for seq in scheduler.unfinished()):
        record = scheduler.oldest_in_flight
        assert record is not None
        give(scheduler, *[TOKEN] * len(record.row_slots))
    scheduler.schedule(0.0)
    assert quiet.slot is not None


def long_prompts(*tenants: Tenant, **policy: object) -> tuple[Scheduler, list[Sequence]]:
    """A rank whose steps compute 16 tokens, with four prompts of 160 tokens of each tenant that wait."""
    scheduler = make_scheduler(
        SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=16, **policy),  # type: ignore[arg-type]
        facts=worker_facts(num_blocks=1000),
    )
    seqs = [seq for tenant in tenants for seq in seqs_of(tenant, 4, prompt=160)]
    add(scheduler, *seqs)
    return scheduler, seqs


@pytest.mark.parametrize("mixes", [False, True])
def test_a_short_prompt_does_not_wait_for_another_tenants_long_one(mixes: bool) -> None:
    scheduler, seqs = long_prompts(LOUD, enable_mixed_steps=mixes)
    run(scheduler, 3)
    for _ in range(10):
        (quiet,) = seqs_of(QUIET, 1, max_tokens=1)
        add(scheduler, quiet)
        run(scheduler, 3)
        assert quiet.left_at is not None
    # What is left of the budget was the long ones'.
    assert seqs[1].was_admitted


def test_long_prompts_of_tenants_go_on_by_their_weights() -> None:
    heavy = Tenant("heavy", 3.0)
    scheduler, seqs = long_prompts(LOUD, heavy)
    run(scheduler, 12)
    (light_one, *_), (heavy_one, *_) = seqs[:4], seqs[4:]
    num_sent = [seq.num_stored_tokens - seq.num_unsent_tokens for seq in (light_one, heavy_one)]
    assert sum(num_sent) == 12 * 16
    assert 3 * num_sent[0] <= num_sent[1] + 4 * 16
    assert num_sent[1] <= 3 * num_sent[0] + 4 * 16


def test_a_tenants_next_prompt_waits_until_its_first_is_sent() -> None:
    scheduler, seqs = long_prompts(LOUD, QUIET)
    run(scheduler, 6)
    assert [seq.was_admitted for seq in seqs] == [True, False, False, False] * 2


def test_a_prompt_is_charged_as_it_is_sent() -> None:
    scheduler, seqs = long_prompts(LOUD, QUIET)
    for num_steps in range(1, 6):
        run(scheduler)
        counters = [scheduler.queue.tenants.account_of(tenant).counter for tenant in (LOUD, QUIET)]
        assert sum(counters) == 16 * num_steps
        assert abs(counters[0] - counters[1]) <= 16
    # The rest of a prompt that ends is never charged.
    scheduler.abort(seqs[0], 0.0)
    assert scheduler.queue.tenants.account_of(LOUD).counter == counters[0]


def test_a_less_urgent_prompt_does_not_go_before_a_more_urgent_one_that_has_begun() -> None:
    scheduler, _ = long_prompts(LOUD, queue_policy=QueuePolicy.PRIORITY)
    run(scheduler, 2)
    less, alike = (
        seqs_of(QUIET, 1, max_tokens=1, priority=priority)[0] for priority in (Priority.LOW, Priority.NORMAL)
    )
    add(scheduler, less)
    run(scheduler, 3)
    assert not less.was_admitted
    add(scheduler, alike)
    run(scheduler, 2)
    assert alike.was_admitted

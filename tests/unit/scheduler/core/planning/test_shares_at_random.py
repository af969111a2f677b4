"""Random tenants on a small rank: what holds at every step, whatever they do."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.admission import AdmissionPolicy
from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.policy import SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from services.scheduler.core.scheduler import Scheduler
from shared.tenants.tenant import Tenant
from tests.support.scheduler.core import add, give, make_scheduler, make_sequence
from tests.support.scheduler.engine_driver import worker_facts

TENANTS = [Tenant("a"), Tenant("b", 2.0), Tenant("c", 0.5)]
NUM_BLOCKS = 24


class Rank:
    """A scheduler whose steps return in order, some steps late."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        policy = SchedulerPolicy(
            max_num_seqs=rng.choice([3, 8]),
            max_num_batched_tokens=rng.choice([64, 1000]),
            enable_mixed_steps=rng.random() < 0.5,
            max_steps_in_flight=rng.choice([1, 2, 3]),
            queue_policy=rng.choice(list(QueuePolicy)),
            admission_policy=rng.choice(list(AdmissionPolicy)),
            delay_factor=rng.choice([0.0, 0.0, 3.0]),
            max_age_s=rng.choice([5.0, 1e9]),
        )
        self.may_hold = policy.queue_policy is not QueuePolicy.PRIORITY
        facts = worker_facts(num_blocks=NUM_BLOCKS, num_checkpoint_slots=rng.choice([None, 2, NUM_BLOCKS]))
        self.scheduler: Scheduler = make_scheduler(policy, facts=facts)
        self.now = 0.0
        self.share_alike = rng.choice([0.0, 0.7])
        """The share of prompts that begin alike."""
        self.num_held = 0
        self.num_aside = 0
        self._handles = count(1)

    def arrive(self) -> None:
        """Queue a few sequences of one tenant."""
        tenant = self.rng.choice(TENANTS)
        for _ in range(self.rng.choice([1, 2, 10])):
            length = self.rng.choice([3, 15, 17, 40, 100])
            seq = make_sequence(
                next(self._handles),
                list(range(length)) if self.rng.random() < self.share_alike else length,
                max_tokens=self.rng.choice([1, 5, 40]),
                arrived_at=self.now,
                priority=self.rng.choice(list(Priority)),
            )
            seq.tenant = tenant
            add(self.scheduler, seq)

    def send(self) -> None:
        """Send the steps for which there is room, as an engine does."""
        queue = self.scheduler.queue
        while True:
            held, waiting = queue.held, set(queue)
            batch = None
            if self.scheduler.has_room:
                batch = self.scheduler.plan(self.now)
                # What was noted in the course of the plan is what would be counted now.
                self.scheduler._shares.check_integrity()
            if batch is not None:
                self.scheduler.commit(batch, self.now)
                self.check_aside()
            self.scheduler.check_integrity()
            entered = waiting.difference(queue)
            # It is let go when others have made its tenant's share smaller.
            if held is not None and self.may_hold and entered and queue.held is held:
                raise AssertionError("another sequence entered into the room of the one that is held")
            self.num_held += queue.held not in (None, held)
            if batch is None:
                break
        assert self.scheduler.is_empty or self.scheduler.oldest_in_flight is not None, "nothing will go on"

    def check_aside(self) -> None:
        """Check that others may pass only what waits for the save of a step in flight, and has not aged."""
        queue = self.scheduler.queue
        for seq in queue:
            if any(seq in each.aside for each in queue.queues):
                self.num_aside += 1
                assert self.scheduler._blocks.find_prefix(seq).awaits_state, "passed without a state that comes"
                assert not queue.is_aged(seq, self.now), "an aged sequence is passed"

    def take_result(self) -> None:
        """Return the oldest step in flight."""
        record = self.scheduler.oldest_in_flight
        if record is not None:
            give(self.scheduler, *[9] * len(record.row_slots), now=self.now)

    def abort(self) -> None:
        """Discard any sequence."""
        sequences: list[Sequence] = self.scheduler.unfinished()
        if sequences:
            self.scheduler.abort(self.rng.choice(sequences), self.now)

    def run(self) -> None:
        """Let tenants come and go, then serve all that is left."""
        for _ in range(60):
            self.now += 0.1
            self.rng.choice([self.arrive, self.take_result, self.take_result, self.take_result, self.abort])()
            self.send()
        for _ in range(20_000):
            if self.scheduler.is_empty:
                return
            self.now += 0.1
            self.take_result()
            self.send()
        raise AssertionError("not all was served")


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_all_is_served_and_what_others_made_way_for_enters_first(seed: int) -> None:
    Rank(random.Random(seed)).run()


@pytest.mark.slow
def test_all_is_served_in_many_runs_in_which_others_make_way() -> None:
    ranks = [Rank(random.Random(seed)) for seed in range(30)]
    for rank in ranks:
        rank.run()
    assert sum(rank.num_held for rank in ranks) > 10
    assert sum(rank.num_aside for rank in ranks) > 10

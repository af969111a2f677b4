"""The order does not depend on what is kept of tenants: they come, go and come back as if all were always counted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from shared.tenants.tenant import Tenant
from tests.support.scheduler.plain_queue import PlainQueue
from tests.support.scheduler.waiting import make_queue, make_seq, nothing_cached

# Costs by these weights are added up exactly, and so are the times below.
TENANTS = [Tenant("a"), Tenant("b", 2.0), Tenant("c", 0.5)]


class History:
    """Tenants that come and go, in a queue and in its reference."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        policy = rng.choice([QueuePolicy.FCFS, QueuePolicy.PRIORITY])
        self.queue, self.plain = make_queue(policy), PlainQueue(has_classes=policy is QueuePolicy.PRIORITY)
        self.now = 0.0
        self.running: list[Sequence] = []
        self.above_share: set[Tenant] = set()
        self.num_alone = 0
        """How often one tenant was alone again after there had been several."""

    def run(self, num_actions: int) -> None:
        """Do random things, and compare what is next after each."""
        for _ in range(num_actions):
            was_shared = self.queue.tenants.are_shared
            self.now += self.rng.choice([0.0, 0.125, 0.125, 3.0])
            actions = [self.add, self.take, self.take, self.end_running, self.end_running, self.generate, self.withdraw]
            self.rng.choice([*actions, self.preempt, self.change_shares])()
            self.check()
            self.num_alone += was_shared and not self.queue.tenants.are_shared

    def check(self) -> None:
        """Compare what is next."""
        self.queue.check_integrity()
        self.queue.tenants.check_integrity([*self.queue, *self.running])
        if len(self.queue) and self.rng.random() < 0.7:
            assert self.next() is self.plain.next(self.now, self.keeps_share)

    def next(self) -> Sequence:
        """What is next in the queue."""
        return self.queue.next(self.now, nothing_cached, self.keeps_share)

    def keeps_share(self, seq: Sequence) -> bool:
        """Whether a sequence leaves its tenant within its share."""
        return seq.tenant not in self.above_share

    def add(self) -> None:
        """Let a newcomer, or one of an earlier attempt, begin to wait."""
        seq = make_seq(self.now, priority=self.rng.choice(list(Priority)), attempt=self.rng.choice([1, 1, 1, 2]))
        seq.tenant = self.rng.choice(TENANTS)
        self._queue(seq)

    def take(self) -> None:
        """Admit what is next."""
        if not len(self.queue):
            return
        seq = self.next()
        assert seq is self.plain.next(self.now, self.keeps_share)
        self.queue.take(seq, self.now)
        self.plain.remove(seq, is_taken=True)
        seq.num_first_cached_tokens = 0
        self.running.append(seq)
        self._charge(seq, self.rng.randrange(1, 9))

    def generate(self) -> None:
        """Let something that runs get output."""
        if self.running:
            self._charge(self.rng.choice(self.running), self.rng.randrange(1, 4))

    def preempt(self) -> None:
        """Let something that runs wait again."""
        if self.running:
            self._queue(self.running.pop(self.rng.randrange(len(self.running))))

    def end_running(self) -> None:
        """End something that runs, by a step or without one."""
        if self.running:
            seq = self.running.pop(self.rng.randrange(len(self.running)))
            self.queue.tenants.note_end(seq)
            if self.rng.random() < 0.5:
                # The step that ended it.
                self._charge(seq, self.rng.randrange(1, 4))

    def withdraw(self) -> None:
        """End something that waits."""
        if len(self.queue):
            seq = self.rng.choice(list(self.queue))
            self.queue.remove(seq, self.now)
            self.queue.tenants.note_end(seq)
            self.plain.remove(seq, is_taken=False)

    def change_shares(self) -> None:
        """Let other tenants be above their shares."""
        self.above_share = {tenant for tenant in TENANTS if self.rng.random() < 0.3}

    def _queue(self, seq: Sequence) -> None:
        self.queue.add(seq, self.now)
        self.plain.add(seq)

    def _charge(self, seq: Sequence, cost: int) -> None:
        if self.queue.tenants.are_shared:
            self.queue.tenants.charge_prompt(seq.tenant_number, cost)
        self.plain.charge(seq.tenant, cost)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_tenants_come_and_go_as_if_all_were_always_counted(seed: int) -> None:
    History(random.Random(seed)).run(100)


@pytest.mark.proof
def test_tenants_come_and_go_as_if_all_were_always_counted_in_many_histories() -> None:
    histories = [History(random.Random(seed)) for seed in range(5000)]
    for history in histories:
        history.run(150)
    assert sum(history.num_alone for history in histories) > 10_000

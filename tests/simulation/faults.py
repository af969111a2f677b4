"""What can go wrong, and how often it does in one run."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random


class Fault(enum.Enum):
    """One kind of trouble."""

    # The worker, and the link to it.
    WORKER_CRASH = "worker_crash"
    WORKER_HANG = "worker_hang"
    WORKER_SLOW = "worker_slow"
    NOT_FINITE = "not_finite"
    LINK_BREAK = "link_break"
    STEP_LOST = "step_lost"
    STEP_REPEATED = "step_repeated"
    RESULT_LOST = "result_lost"
    RESULT_REPEATED = "result_repeated"
    RESULT_REORDERED = "result_reordered"
    RESULT_NONSENSE = "result_nonsense"
    RESULT_LATE = "result_late"
    # The streams between replicas and scheduler.
    STREAM_BREAK = "stream_break"
    MESSAGE_LOST = "message_lost"
    MESSAGE_REPEATED = "message_repeated"
    MESSAGE_REORDERED = "message_reordered"
    MESSAGE_LATE = "message_late"
    # Processes.
    SCHEDULER_RESTART = "scheduler_restart"
    SCHEDULER_ZOMBIE = "scheduler_zombie"
    REPLICA_GONE = "replica_gone"
    # Clients.
    CANCEL = "cancel"
    DEADLINE = "deadline"
    TEXT_STOP = "text_stop"
    ABORT_CALL = "abort_call"
    CACHE_FLUSH = "cache_flush"
    QUEUE_FULL = "queue_full"


# How likely each is at each of its opportunities; rates are drawn around this.
_LIKELIHOOD = {
    # At each step.
    Fault.WORKER_CRASH: 0.004,
    Fault.WORKER_HANG: 0.003,
    Fault.WORKER_SLOW: 0.02,
    # At each sequence and step.
    Fault.NOT_FINITE: 0.006,
    # At each step.
    Fault.LINK_BREAK: 0.004,
    Fault.STEP_LOST: 0.004,
    Fault.STEP_REPEATED: 0.004,
    # At each result.
    Fault.RESULT_LOST: 0.004,
    Fault.RESULT_REPEATED: 0.1,
    Fault.RESULT_REORDERED: 0.02,
    Fault.RESULT_NONSENSE: 0.004,
    # At each result of an epoch that has ended.
    Fault.RESULT_LATE: 0.3,
    # At each message.
    Fault.STREAM_BREAK: 0.01,
    Fault.MESSAGE_LOST: 0.003,
    Fault.MESSAGE_REPEATED: 0.01,
    Fault.MESSAGE_REORDERED: 0.005,
    # At each message on a stream that has ended.
    Fault.MESSAGE_LATE: 0.3,
    # At each restart of a scheduler.
    Fault.SCHEDULER_ZOMBIE: 0.5,
    # At each arrival.
    Fault.SCHEDULER_RESTART: 0.02,
    Fault.REPLICA_GONE: 0.01,
    Fault.CACHE_FLUSH: 0.03,
    # At each request.
    Fault.CANCEL: 0.2,
    Fault.DEADLINE: 0.2,
    Fault.TEXT_STOP: 0.3,
    Fault.ABORT_CALL: 0.1,
    # At each cell.
    Fault.QUEUE_FULL: 1.0,
}


@dataclass(frozen=True, slots=True)
class FaultMix:
    """The kinds of one run, how likely each is at each opportunity, and how often it happened."""

    rates: dict[Fault, float]
    counts: Counter[Fault] = field(default_factory=Counter)

    @classmethod
    def draw(cls, rng: Random, kinds: Collection[Fault] | None = None) -> FaultMix:
        """Draw the rates, some high, of `kinds`, or of a random subset of all.

        Source: swarm testing, Groce et al., ISSTA 2012: a run that leaves kinds out reaches states that one with
        all of them does not.
        """
        if kinds is None:
            share = rng.choice([0.15, 0.4, 0.7])
            kinds = [fault for fault in Fault if rng.random() < share]
        return cls(
            {fault: min(0.9, _LIKELIHOOD[fault] * rng.choice([0.3, 1.0, 4.0])) for fault in Fault if fault in kinds}
        )

    def strikes(self, fault: Fault, rng: Random) -> bool:
        """Whether a fault happens at this opportunity."""
        rate = self.rates.get(fault)
        if rate is None or rng.random() >= rate:
            return False
        self.counts[fault] += 1
        return True

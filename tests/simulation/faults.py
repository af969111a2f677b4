"""The kinds of faults, and how often each strikes in one run."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random


class Fault(enum.Enum):
    """One kind of fault, or a rare kind of workload."""

    # The workers, and the links to them.
    WORKER_CRASH = "worker_crash"
    WORKER_HANG = "worker_hang"
    WORKER_STOP = "worker_stop"
    WORKER_SLOW = "worker_slow"
    WORKER_SICK = "worker_sick"
    ATTACH_SICK = "attach_sick"
    LONG_STEP = "long_step"
    NOT_FINITE = "not_finite"
    LINK_BREAK = "link_break"
    LINK_SILENT = "link_silent"
    STEP_LOST = "step_lost"
    STEP_REPEATED = "step_repeated"
    STEP_LATE = "step_late"
    RESULT_LOST = "result_lost"
    RESULT_REPEATED = "result_repeated"
    RESULT_REORDERED = "result_reordered"
    RESULT_NONSENSE = "result_nonsense"
    RESULT_LATE = "result_late"
    # The members of TP groups, and their links to their leaders.
    MEMBER_CRASH = "member_crash"
    MEMBER_HANG = "member_hang"
    MEMBER_STOP = "member_stop"
    MEMBER_LINK_BREAK = "member_link_break"
    MEMBER_LINK_SILENT = "member_link_silent"
    # The streams between replicas and scheduler.
    STREAM_BREAK = "stream_break"
    MESSAGE_LOST = "message_lost"
    MESSAGE_REPEATED = "message_repeated"
    MESSAGE_REORDERED = "message_reordered"
    MESSAGE_LATE = "message_late"
    # Processes.
    SCHEDULER_RESTART = "scheduler_restart"
    SCHEDULER_FLAP = "scheduler_flap"
    SCHEDULER_ZOMBIE = "scheduler_zombie"
    SCHEDULER_STOP = "scheduler_stop"
    MODEL_CHANGE = "model_change"
    REPLICA_GONE = "replica_gone"
    REPLICA_STALL = "replica_stall"
    # Clients.
    DIRECT_CALL = "direct_call"
    SLOW_READER = "slow_reader"
    CANCEL = "cancel"
    DEADLINE = "deadline"
    TEXT_STOP = "text_stop"
    POISON = "poison"
    SAME_ID = "same_id"
    EXACT = "exact"
    GRAMMAR = "grammar"
    GRAMMAR_FAILURE = "grammar_failure"
    ABORT_CALL = "abort_call"
    CACHE_FLUSH = "cache_flush"
    QUEUE_FULL = "queue_full"
    LONG_ANSWER = "long_answer"
    UNEQUAL_POOLS = "unequal_pools"
    # Planned stops, and drained ranks.
    WORKER_LEAVE = "worker_leave"
    MEMBER_LEAVE = "member_leave"
    RANK_DRAIN = "rank_drain"
    # Endpoints that come and go, in cells that discover their workers.
    ENDPOINT_GONE = "endpoint_gone"
    # A replica, the scheduler and the workers are asked to end together, once in a run.
    PLANNED_STOP = "planned_stop"
    # All replicas are asked then, and the scheduler dies; the next one has not been asked.
    STOPPED_DEATH = "stopped_death"
    # A model with recurrent state.
    RECURRENT_STATE = "recurrent_state"
    # All workers are gone for long, and an operator bounds how long requests wait for them.
    WORKERS_GONE = "workers_gone"


# The probability of each at each of its opportunities; the rates of a run are drawn around it.
_LIKELIHOOD = {
    # At each step.
    Fault.WORKER_CRASH: 0.004,
    Fault.WORKER_HANG: 0.003,
    Fault.WORKER_STOP: 0.003,
    Fault.WORKER_SLOW: 0.02,
    Fault.WORKER_SICK: 0.004,
    Fault.ATTACH_SICK: 0.004,
    Fault.LONG_STEP: 0.002,
    # At each sequence in each step.
    Fault.NOT_FINITE: 0.006,
    # At each step.
    Fault.LINK_BREAK: 0.004,
    Fault.LINK_SILENT: 0.004,
    Fault.STEP_LOST: 0.004,
    Fault.STEP_REPEATED: 0.004,
    # At each step that a leader relays; few cells have groups.
    Fault.MEMBER_CRASH: 0.01,
    Fault.MEMBER_HANG: 0.006,
    Fault.MEMBER_STOP: 0.006,
    Fault.MEMBER_LINK_BREAK: 0.01,
    Fault.MEMBER_LINK_SILENT: 0.01,
    # At each result.
    Fault.RESULT_LOST: 0.004,
    Fault.RESULT_REPEATED: 0.1,
    Fault.RESULT_REORDERED: 0.02,
    Fault.RESULT_NONSENSE: 0.004,
    # At each step and each result of an epoch that has ended.
    Fault.STEP_LATE: 0.3,
    Fault.RESULT_LATE: 0.3,
    # At each message.
    Fault.STREAM_BREAK: 0.01,
    Fault.MESSAGE_LOST: 0.003,
    Fault.MESSAGE_REPEATED: 0.01,
    Fault.MESSAGE_REORDERED: 0.005,
    # At each message to a replica that reads.
    Fault.REPLICA_STALL: 0.003,
    # At each message on a stream that has ended.
    Fault.MESSAGE_LATE: 0.3,
    # At each restart of a scheduler.
    Fault.SCHEDULER_ZOMBIE: 0.5,
    # At each arrival.
    Fault.SCHEDULER_RESTART: 0.02,
    Fault.SCHEDULER_FLAP: 0.03,
    Fault.SCHEDULER_STOP: 0.01,
    Fault.MODEL_CHANGE: 0.015,
    Fault.REPLICA_GONE: 0.01,
    Fault.CACHE_FLUSH: 0.03,
    # At each response of a direct call.
    Fault.SLOW_READER: 0.03,
    # At each request.
    Fault.DIRECT_CALL: 0.3,
    Fault.CANCEL: 0.2,
    Fault.DEADLINE: 0.2,
    Fault.TEXT_STOP: 0.3,
    Fault.POISON: 0.15,
    Fault.SAME_ID: 0.1,
    Fault.EXACT: 0.2,
    Fault.GRAMMAR: 0.15,
    Fault.GRAMMAR_FAILURE: 0.1,
    Fault.ABORT_CALL: 0.1,
    # At each cell.
    Fault.QUEUE_FULL: 1.0,
    Fault.LONG_ANSWER: 0.2,
    Fault.UNEQUAL_POOLS: 0.5,
    # At each step, at each step that a leader relays, and at each arrival.
    Fault.WORKER_LEAVE: 0.004,
    Fault.MEMBER_LEAVE: 0.01,
    Fault.RANK_DRAIN: 0.03,
    # At each arrival.
    Fault.ENDPOINT_GONE: 0.05,
    Fault.PLANNED_STOP: 0.05,
    # At each planned stop.
    Fault.STOPPED_DEATH: 0.5,
    # At each cell.
    Fault.RECURRENT_STATE: 0.9,
    # At each arrival.
    Fault.WORKERS_GONE: 0.05,
}
# Most answers of a run with one of these may end with an error, so no random subset has it.
_BY_NAME_ALONE = frozenset({Fault.WORKERS_GONE})
# Faults after which a domain drains.
DRAINS = frozenset({Fault.WORKER_LEAVE, Fault.MEMBER_LEAVE, Fault.RANK_DRAIN, Fault.ENDPOINT_GONE})

# Faults that end an epoch at once, and faults that end it after a while, independently of what it computes.
KILLS = frozenset({Fault.WORKER_CRASH, Fault.LINK_BREAK, Fault.MEMBER_CRASH, Fault.MEMBER_LINK_BREAK})
SLOW_KILLS = frozenset(
    {
        Fault.WORKER_HANG,
        Fault.WORKER_STOP,
        Fault.LINK_SILENT,
        Fault.MEMBER_HANG,
        Fault.MEMBER_STOP,
        Fault.MEMBER_LINK_SILENT,
        Fault.STEP_LOST,
        Fault.STEP_REPEATED,
        Fault.RESULT_LOST,
        Fault.RESULT_REORDERED,
        Fault.RESULT_NONSENSE,
    }
)

# Faults that end no process and no link.
CALM = frozenset(
    {
        Fault.WORKER_SLOW,
        Fault.LONG_STEP,
        Fault.NOT_FINITE,
        Fault.DIRECT_CALL,
        Fault.SLOW_READER,
        Fault.CANCEL,
        Fault.DEADLINE,
        Fault.TEXT_STOP,
        Fault.SAME_ID,
        Fault.EXACT,
        Fault.GRAMMAR,
        Fault.GRAMMAR_FAILURE,
        Fault.ABORT_CALL,
        Fault.CACHE_FLUSH,
        Fault.QUEUE_FULL,
        Fault.LONG_ANSWER,
        Fault.UNEQUAL_POOLS,
        Fault.PLANNED_STOP,
        # Its scheduler's successor takes its place.
        Fault.STOPPED_DEATH,
    }
)


@dataclass(slots=True)
class FaultMix:
    """The fault kinds of one run, with the probability of each per opportunity and a count of its strikes.

    A mix that spares suspects ends epochs at once or not at all, and never while `may_kill` returns False, so that no
    innocent request is taken for poison.
    """

    rates: dict[Fault, float]
    spares_suspects: bool = False
    counts: Counter[Fault] = field(default_factory=Counter)
    may_kill: Callable[[], bool] = lambda: True

    @classmethod
    def draw(cls, rng: Random, kinds: Collection[Fault] | None = None) -> FaultMix:
        """Draw rates for `kinds`, or for a random subset of all kinds.

        Source: swarm testing, Groce et al., ISSTA 2012: a run that omits some kinds reaches states that a run with all
        of them does not.
        """
        if kinds is None:
            share = rng.choice([0.15, 0.4, 0.7])
            kinds = [fault for fault in Fault if fault not in _BY_NAME_ALONE and rng.random() < share]
        rates = {fault: min(0.9, _LIKELIHOOD[fault] * rng.choice([0.3, 1.0, 4.0])) for fault in Fault if fault in kinds}
        spares_suspects = rng.random() < 0.3
        if spares_suspects:
            rates = {fault: rate for fault, rate in rates.items() if fault not in SLOW_KILLS}
        return cls(rates, spares_suspects)

    @property
    def is_about_stops(self) -> bool:
        """Whether schedulers die in planned stops and nothing else ends a process, so that no answer may be cut."""
        return {Fault.PLANNED_STOP, Fault.STOPPED_DEATH} <= self.rates.keys() <= CALM

    def strikes(self, fault: Fault, rng: Random) -> bool:
        """Draw whether a fault strikes at this opportunity, and count it."""
        rate = self.rates.get(fault)
        if rate is None or rng.random() >= rate:
            return False
        if self.spares_suspects and fault in KILLS and not self.may_kill():
            return False
        self.counts[fault] += 1
        return True

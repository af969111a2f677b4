"""All sequences of a cell, placed or not."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.cell.domains.domain import Domain, Rank
from services.scheduler.cell.domains.drains import Drains
from services.scheduler.cell.domains.history import EventKind, History
from services.scheduler.cell.domains.placement import Placement, by_request
from services.scheduler.cell.domains.recoveries import Recoveries
from services.scheduler.cell.domains.worker_wait import WorkerWait
from services.scheduler.cell.events import Action
from services.scheduler.cell.quarantine.quarantine import Quarantine
from services.scheduler.cell.state import CellState, RankState
from services.scheduler.core.batch.sequence import Finish, RequestKey, Sequence
from services.scheduler.core.policy import CacheSettings, CellTopology, SchedulerCounters, SchedulerPolicy
from services.scheduler.core.queue.tenant_counters import TenantCounters
from services.scheduler.core.queue.waiting_queue import WaitingQueue
from services.scheduler.core.results.outputs import OutputsByClient, RequestEnd
from services.scheduler.core.scheduler import RecoveredSequences, Scheduler
from services.scheduler.core.worker_facts import WorkerFacts
from shared.step.step import StepKind, StepResult


class Cell:
    """The DP ranks, and a queue of the sequences that no rank may take now.

    When a domain is lost, drained, or emptied to try suspects, its sequences go to other ranks or to the unplaced
    queue. Suspects wait there until they are tried.

    Invariant: a sequence that has not ended is in the scheduler of its `rank`, or in the unplaced queue if it has none.
    """

    def __init__(
        self,
        policy: SchedulerPolicy,
        cache: CacheSettings,
        topology: CellTopology,
        *,
        counters: SchedulerCounters,
        is_alive: Callable[[RequestKey], bool],
        is_current: Callable[[Sequence], bool],
    ) -> None:
        """Make a cell without workers.

        Args:
            is_alive: Whether a request has not ended.
            is_current: Whether a sequence belongs to the present attempt of such a request.
        """
        self._is_current = is_current
        tenants = TenantCounters()
        self.ranks = [Rank(rank, Scheduler(policy, cache, counters, tenants)) for rank in topology.ranks]
        self.domains = [
            Domain(
                domain,
                [self.ranks[rank] for rank in topology.ranks_of(domain)],
                policy,
                is_vacant=topology.is_dynamic,
            )
            for domain in range(topology.num_domains)
        ]
        self.domain_by_rank = [self.domains[topology.domain_of(rank)] for rank in topology.ranks]
        # The unplaced queue: a scheduler that never gets a worker.
        self._unplaced = Scheduler(policy, cache, counters, tenants)
        self._block_size = cache.block_size
        self._counters = counters
        self._placement = Placement(policy.placement_tokens_per_seq)
        self._history = History()
        self._recoveries = Recoveries(counters, self._history)
        self._quarantine = Quarantine(self.domains, policy, counters, is_alive, self._num_unplaced_tokens)
        self.drains = Drains(policy.drain_s)
        self.worker_wait = WorkerWait()
        self._workers_lost_s = policy.workers_lost_s
        self.is_disturbed = False
        """Whether a trial, a drain or a recovery is in progress; every result is inspected then."""

    @property
    def num_steps(self) -> int:
        """Steps sent, including dummies."""
        return sum(rank.scheduler.num_steps.total for rank in self.ranks)

    @property
    def is_attached(self) -> bool:
        """Whether any domain is attached."""
        return any(domain.epoch is not None for domain in self.domains)

    def has_lost_workers(self, now: float) -> bool:
        """Whether no domain has been attached, or could compute, for as long as requests wait for one."""
        bound_s = self._workers_lost_s
        return bound_s is not None and not self.is_attached and self.worker_wait.is_over(bound_s, now)

    @property
    def takes_work(self) -> bool:
        """Whether a request that came now would be computed as soon as it is its turn."""
        return any(map(self._quarantine.is_open, self.domains))

    def retry_delay_s(self, now: float, num_places: int = 1) -> float:
        """Seconds until so many newcomers will have left the queues."""
        queue, *others = self._queues()
        return queue.retry_delay_s(num_places, now, others)

    def unfinished(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [seq for scheduler in self._schedulers() for seq in scheduler.unfinished()]

    def waiting(self) -> list[Sequence]:
        """The waiting sequences, placed or not."""
        return [seq for scheduler in self._schedulers() for seq in scheduler.waiting_sequences()]

    def add(self, sequences: list[Sequence], now: float) -> None:
        """Queue the choices of one request."""
        ranks = self._quarantine.ranks_for(sequences[0].key)
        if ranks:
            self._placement.place(sequences, ranks, now)
            return
        for seq in sequences:
            seq.rank = None
            self._unplaced.add(seq, now)

    def stop_at(self, seq: Sequence, num_completion_tokens: int, now: float) -> RequestEnd:
        """End a sequence at a stop string; later tokens are discarded."""
        return self._scheduler_of(seq, now).stop_at(seq, num_completion_tokens, now)

    def finish(self, seq: Sequence, finish: Finish, now: float) -> RequestEnd:
        """End a sequence with all its completion tokens, which must be stored."""
        return self._scheduler_of(seq, now).finish(seq, finish, now)

    def abort(self, seq: Sequence, now: float) -> None:
        """Discard a sequence, wherever it is."""
        self._scheduler_of(seq, now).abort(seq, now)

    def attach(self, domain: Domain, facts: tuple[WorkerFacts, ...], now: float) -> None:
        """Attach an unattached domain."""
        domain.begin_epoch(facts, now)
        self._history.record_attached(domain, now)
        self._quarantine.on_attached(domain)

    def lose(
        self, domain: Domain, now: float, *, accuses_rows: bool, reason: str
    ) -> tuple[list[Sequence], RequestKey | None]:
        """End an attached domain's epoch; its sequences wait elsewhere, with their tokens.

        Args:
            accuses_rows: Whether requests in flight may have caused the loss.
            reason: For people.

        Returns:
            The sequences, and the request found to be poison, if any.
        """
        self._counters.num_lost_epochs += 1
        self._history.record_end(EventKind.LOST, domain, now, reason)
        recovered = self._end_epoch(domain, now)
        self._recoveries.begin([seq for lost in recovered for seq in lost.computed], now)
        in_flight = [request for lost in recovered for request in lost.in_flight]
        if not accuses_rows:
            in_flight = []
        poison = self._quarantine.on_lost(domain, in_flight, now)
        if poison is not None:
            self._history.record(EventKind.POISONED, now, domain)
        elif in_flight:
            self._history.record(EventKind.SUSPECTED, now, domain, num_requests=len(set(in_flight)))
        return self._requeue(recovered, now), poison

    def release(self, domain: Domain, now: float) -> list[Sequence]:
        """End an attached domain's epoch as planned, which is no loss: as `lose`, but it is not counted or suspicious.

        Returns:
            The sequences.
        """
        self._history.record_end(EventKind.RELEASED, domain, now)
        recovered = self._end_epoch(domain, now)
        self._quarantine.on_released(domain, now)
        return self._requeue(recovered, now)

    def on_leaving(self, domain: Domain, now: float) -> None:
        """An attached domain's workers were asked to end: drain it."""
        domain.is_leaving = True
        self._history.record(EventKind.DRAINING, now, domain, reason="its workers were asked to end")
        self._begin_drain(domain, now)

    def drain(self, domain: Domain, now: float) -> None:
        """Drain a domain, and keep it empty whenever it is attached; a second call changes nothing."""
        if not domain.is_drained_by_operator:
            self._history.record(EventKind.DRAINING, now, domain, reason="an operator asked for it")
        domain.is_drained_by_operator = True
        if domain.epoch is not None and not domain.is_empty:
            self._begin_drain(domain, now)

    def undrain(self, domain: Domain, now: float) -> None:
        """Take `drain` back."""
        was_draining, domain.is_drained_by_operator = domain.is_draining, False
        self._reopen(domain, now, was_draining=was_draining)

    def withdraw(self, domain: Domain, now: float) -> None:
        """A domain's endpoint is terminating or gone: drain it; a second call changes nothing."""
        if not domain.is_withdrawn:
            self._history.record(EventKind.DRAINING, now, domain, reason="its endpoint is terminating or gone")
        domain.is_withdrawn = True
        if domain.epoch is not None:
            self._begin_drain(domain, now)

    def restore(self, domain: Domain, now: float) -> None:
        """Take `withdraw` back."""
        was_draining, domain.is_withdrawn = domain.is_draining, False
        self._reopen(domain, now, was_draining=was_draining)

    def postprocess(self, rank: Rank, result: StepResult, now: float) -> OutputsByClient:
        """Take in a valid result of a rank; it clears suspects and ends recoveries."""
        scheduler = rank.scheduler
        if not self.is_disturbed:
            return scheduler.postprocess(result, now)
        record = scheduler.oldest_in_flight
        assert record is not None
        sequences = scheduler.sequences_in(record)
        outputs = scheduler.postprocess(result, now)
        self._recoveries.note(sequences[: len(record.row_slots)], now)
        domain = self.domain_by_rank[rank.number]
        if record.kind is StepKind.DECODE and self._quarantine.is_on(domain):
            # A row of an attempt that was replaced clears nothing: the present one is tried.
            self._quarantine.suspects.clear(domain.number, {seq.key for seq in sequences if self._is_current(seq)})
        return outputs

    def settle(self, now: float) -> None:
        """Advance trials, and place what may be placed."""
        if self._quarantine:
            for domain, requests in self._quarantine.advance(now):
                self._empty(domain, now)
                if requests:
                    self._history.record(EventKind.TRIED, now, domain, num_requests=len(requests))
                    self._place_unplaced(frozenset(requests), now)
            if not self._quarantine.suspects:
                self._history.record(EventKind.CLEARED, now)
        if self._quarantine.take_has_opened():
            self._place_unplaced(None, now)
        self.is_disturbed = bool(self._quarantine) or bool(self._recoveries) or bool(self.drains)

    def send_ahead(self, now: float) -> list[Action]:
        """Send every domain the steps for which there is work and room."""
        return [action for domain in self.domains for action in domain.send_ahead(now)]

    def advance_rank(self, rank: Rank, now: float) -> list[Action]:
        """Send ahead when only a step of this rank has returned, and nothing is disturbed."""
        if len(self.ranks) > 1 and rank.scheduler.is_empty:
            self._placement.rebalance(rank, self._quarantine.open_ranks(), now)
        return self.domain_by_rank[rank.number].send_ahead(now)

    def state(self) -> CellState:
        """Take a snapshot."""
        ranks = tuple(self._rank_state(rank) for rank in self.ranks)
        return CellState(
            ready=self.is_attached,
            takes_work=self.takes_work,
            num_waiting=sum(rank.num_waiting for rank in ranks) + self._unplaced.num_waiting,
            num_running=sum(rank.num_running for rank in ranks),
            block_size=self._block_size,
            num_blocks=sum(rank.num_blocks for rank in ranks),
            num_used_blocks=sum(rank.num_used_blocks for rank in ranks),
            num_cached_blocks=sum(rank.num_cached_blocks for rank in ranks),
            num_free_blocks=sum(rank.num_free_blocks for rank in ranks),
            num_checkpoints=sum(rank.num_checkpoints for rank in ranks),
            num_used_checkpoints=sum(rank.num_used_checkpoints for rank in ranks),
            counters=self._counters,
            ranks=ranks,
            num_suspects=len(self._quarantine.suspects.all()),
            events=self._history.all(),
        )

    def check_integrity(self) -> None:
        """Assert that ranks and unplaced queue are consistent."""
        for number, scheduler in enumerate(self._schedulers()):
            scheduler.check_integrity()
            rank = number if scheduler is not self._unplaced else None
            assert all(seq.rank == rank for seq in scheduler.unfinished()), "a sequence is not where it says"
        assert not self._unplaced.num_running, "a sequence runs without a rank"
        for domain in self.domains:
            assert domain.epoch is not None or domain.is_empty, "a sequence is on a rank without a worker"
            assert domain.epoch is None or not domain.is_vacant, "a vacant place is attached"
        self.drains.check_integrity(self.domains)
        self._quarantine.check_integrity()
        self._unplaced.queue.tenants.check_integrity(self.unfinished())

    def _rank_state(self, rank: Rank) -> RankState:
        scheduler, blocks = rank.scheduler, rank.scheduler.block_counts
        checkpoints = scheduler.checkpoint_counts
        return RankState(
            rank=rank.number,
            is_vacant=self.domain_by_rank[rank.number].is_vacant,
            is_attached=self.domain_by_rank[rank.number].epoch is not None,
            is_draining=self.domain_by_rank[rank.number].is_draining,
            num_steps=scheduler.num_steps,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_blocks=blocks.total,
            num_used_blocks=blocks.total - blocks.free,
            num_cached_blocks=blocks.cached,
            num_free_blocks=blocks.free,
            num_checkpoints=checkpoints.total,
            num_used_checkpoints=checkpoints.used,
        )

    def _schedulers(self) -> list[Scheduler]:
        return [*(rank.scheduler for rank in self.ranks), self._unplaced]

    def _num_unplaced_tokens(self, requests: list[RequestKey]) -> int:
        keys = set(requests)
        return sum(seq.num_stored_tokens for seq in self._unplaced.waiting_sequences() if seq.key in keys)

    def _queues(self) -> list[WaitingQueue]:
        return [scheduler.queue for scheduler in self._schedulers()]

    def _scheduler_of(self, seq: Sequence, now: float) -> Scheduler:
        if self._recoveries:
            self._recoveries.note((seq,), now)
        return self._unplaced if seq.rank is None else self.ranks[seq.rank].scheduler

    def _end_epoch(self, domain: Domain, now: float) -> list[RecoveredSequences]:
        self.is_disturbed = True
        self.drains.end(domain)
        recovered = domain.end_epoch(now)
        self.worker_wait.on_epoch_end(domain, now)
        return recovered

    def _requeue(self, recovered: list[RecoveredSequences], now: float) -> list[Sequence]:
        sequences = [seq for lost in recovered for seq in lost.sequences]
        for choices in by_request(sequences):
            self.add(choices, now)
        return sequences

    def _begin_drain(self, domain: Domain, now: float) -> None:
        if self.drains.try_begin(domain, now):
            self.is_disturbed = True
            for rank in domain.ranks:
                self._move_waiting(rank, now)

    def _reopen(self, domain: Domain, now: float, *, was_draining: bool) -> None:
        if not domain.is_draining:
            if was_draining:
                self._history.record(EventKind.UNDRAINED, now, domain)
            self.drains.end(domain)
            self._quarantine.on_opened()

    def _move_waiting(self, rank: Rank, now: float) -> None:
        """Move the requests of which the rank computes no choice."""
        waiting = rank.scheduler.waiting_sequences()
        computed = {seq.key for seq in set(rank.scheduler.unfinished()).difference(waiting)}
        for choices in by_request(waiting):
            if choices[0].key not in computed:
                for seq in choices:
                    rank.scheduler.withdraw(seq, now)
                self.add(choices, now)

    def _empty(self, domain: Domain, now: float) -> None:
        """No step may be in flight."""
        for rank in domain.ranks:
            for choices in by_request(rank.scheduler.take_all(now)):
                self.add(choices, now)

    def _place_unplaced(self, requests: frozenset[RequestKey] | None, now: float) -> None:
        """None means all requests."""
        for choices in by_request(self._unplaced.waiting_sequences()):
            is_named = requests is None or choices[0].key in requests
            if is_named and self._quarantine.ranks_for(choices[0].key):
                for seq in choices:
                    self._unplaced.withdraw(seq, now)
                self.add(choices, now)

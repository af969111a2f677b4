"""Everybody who waits or runs in a cell: on its DP ranks, or for one of them."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.cell.domain import Domain, Rank
from services.scheduler.cell.events import Action
from services.scheduler.cell.placement import Placement, by_request
from services.scheduler.cell.quarantine.trials import Trials
from services.scheduler.cell.recoveries import Recoveries
from services.scheduler.cell.state import CellState, RankState
from services.scheduler.core.batch.sequence import Finish, Sequence
from services.scheduler.core.batch.step import OutputsByClient, RequestEnd, StepKind, StepResult
from services.scheduler.core.endings import Endings
from services.scheduler.core.policy import CacheSettings, CellTopology, SchedulerCounters, SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import WaitingQueue
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.worker_facts import WorkerFacts


class Cell:
    """The DP ranks, each with its scheduler, and a lobby for those who wait for a rank.

    A request goes to a rank as soon as one may take it. When a domain is lost, its sequences go to the ranks that are
    left, or to the lobby; so does everybody else when a domain is taken for a trial of suspects, and suspects wait in
    the lobby until theirs.

    Invariant: a sequence that has not ended is in the scheduler of its `rank`, or in the lobby when it has none. A
    domain without an epoch holds nobody.
    """

    def __init__(
        self,
        policy: SchedulerPolicy,
        cache: CacheSettings,
        topology: CellTopology,
        *,
        counters: SchedulerCounters,
        is_alive: Callable[[str], bool],
    ) -> None:
        self.ranks = [Rank(rank, Scheduler(policy, cache, counters)) for rank in range(topology.dp_size)]
        self.domains = [
            Domain(domain, [self.ranks[rank] for rank in topology.ranks_of(domain)], policy)
            for domain in range(topology.num_domains)
        ]
        self.domain_by_rank = [self.domains[topology.domain_of(rank)] for rank in range(topology.dp_size)]
        # It never gets a worker.
        self.lobby = Scheduler(policy, cache, counters)
        self._block_size = cache.block_size
        self._counters = counters
        self._placement = Placement(policy.placement_tokens_per_seq)
        self._recoveries = Recoveries(counters)
        self._trials = Trials(self.domains, policy, counters, is_alive)
        # Whether a trial or a recovery is on: every result is looked at then.
        self._is_disturbed = False

    @property
    def num_steps(self) -> int:
        """Steps that were sent, dummies included."""
        return sum(rank.scheduler.num_steps.total for rank in self.ranks)

    @property
    def is_attached(self) -> bool:
        """Whether any domain is."""
        return any(domain.epoch is not None for domain in self.domains)

    @property
    def queues(self) -> list[WaitingQueue]:
        """Where sequences wait."""
        return [scheduler.waiting for scheduler in self._schedulers()]

    def unfinished(self) -> list[Sequence]:
        """The sequences that have not ended, wherever they are."""
        return [seq for scheduler in self._schedulers() for seq in scheduler.unfinished()]

    def waiting(self) -> list[Sequence]:
        """Those of them that wait."""
        return [seq for queue in self.queues for seq in queue]

    def add(self, sequences: list[Sequence], now: float) -> None:
        """Let the choices of one request wait: on a rank, or for one."""
        ranks = self._trials.ranks_for(sequences[0].id)
        if ranks:
            self._placement.place(sequences, ranks, now)
            return
        for seq in sequences:
            seq.rank = None
            self.lobby.waiting.add(seq, now)

    def stop_at(self, seq: Sequence, num_completion_tokens: int, now: float) -> RequestEnd:
        """See `Endings.stop_at`."""
        return self._endings_of(seq, now).stop_at(seq, num_completion_tokens, now)

    def finish(self, seq: Sequence, finish: Finish, now: float) -> RequestEnd:
        """See `Endings.finish`."""
        return self._endings_of(seq, now).finish(seq, finish, now)

    def abort(self, seq: Sequence, now: float) -> None:
        """See `Endings.abort`."""
        self._endings_of(seq, now).abort(seq, now)

    def attach(self, domain: Domain, facts: tuple[WorkerFacts, ...], now: float) -> None:
        """A domain that was not attached is from now on."""
        domain.begin_epoch(facts, now)
        self._trials.on_attached(domain)

    def lose(self, domain: Domain, now: float, *, accuses_rows: bool) -> tuple[list[Sequence], str | None]:
        """A domain's epoch has ended: whom it had waits elsewhere, with the tokens they have.

        Args:
            domain: It was attached.
            now: The time.
            accuses_rows: Whether what its steps in flight computed may have been the cause.

        Returns:
            The sequences, and the id of the request that turned out to be poison, if one did.
        """
        self._counters.num_lost_epochs += 1
        self._is_disturbed = True
        survivors = domain.end_epoch(now)
        self._recoveries.begin([seq for lost in survivors for seq in lost.computed], now)
        in_flight = [request_id for lost in survivors for request_id in lost.in_flight]
        poison = self._trials.on_lost(domain, in_flight if accuses_rows else [], now)
        sequences = [seq for lost in survivors for seq in lost.sequences]
        for choices in by_request(sequences):
            self.add(choices, now)
        return sequences, poison

    def postprocess(self, rank: Rank, result: StepResult, now: float) -> OutputsByClient:
        """See `ResultTaker.take`; suspects are cleared by it, and recoveries end."""
        scheduler = rank.scheduler
        if not self._is_disturbed:
            return scheduler.results.take(result, now)
        record = scheduler.oldest_in_flight
        assert record is not None
        sequences = scheduler.sequences_in(record)
        outputs = scheduler.results.take(result, now)
        self._recoveries.note(sequences[: len(record.row_slots)], now)
        domain = self.domain_by_rank[rank.number]
        if record.kind is StepKind.DECODE and self._trials.is_on(domain):
            self._trials.suspects.acquit(domain.number, {seq.id for seq in sequences})
        return outputs

    def settle(self, now: float) -> None:
        """After everything that has happened: go on with trials, and put those in the lobby on ranks that take them."""
        if self._trials:
            for domain, request_ids in self._trials.advance(now):
                self._empty(domain, now)
                self._place_from_lobby(frozenset(request_ids), now)
        if self._trials.take_has_opened():
            self._place_from_lobby(None, now)
        self._is_disturbed = bool(self._trials) or bool(self._recoveries)

    def send_ahead(self, now: float) -> list[Action]:
        """Send the steps for which there is work and room."""
        return [action for domain in self.domains for action in domain.send_ahead(now)]

    def go_on_after(self, rank: Rank, now: float) -> list[Action]:
        """Settle and send ahead when a step of this rank has returned, and nothing else has happened."""
        if self._is_disturbed:
            self.settle(now)
            return self.send_ahead(now)
        if len(self.ranks) > 1 and rank.scheduler.is_empty:
            self._placement.feed(rank, self._trials.open_ranks(), now)
        return self.domain_by_rank[rank.number].send_ahead(now)

    def state(self) -> CellState:
        """The state now."""
        ranks = tuple(self._rank_state(rank) for rank in self.ranks)
        return CellState(
            ready=self.is_attached,
            num_waiting=sum(rank.num_waiting for rank in ranks) + len(self.lobby.waiting),
            num_running=sum(rank.num_running for rank in ranks),
            block_size=self._block_size,
            num_blocks=sum(rank.num_blocks for rank in ranks),
            num_used_blocks=sum(rank.num_used_blocks for rank in ranks),
            num_cached_blocks=sum(rank.num_cached_blocks for rank in ranks),
            num_free_blocks=sum(rank.num_free_blocks for rank in ranks),
            counters=self._counters,
            ranks=ranks,
            num_suspects=len(self._trials.suspects.ids()),
        )

    def check_integrity(self) -> None:
        """Assert that everything the ranks and the lobby hold agrees."""
        for number, scheduler in enumerate(self._schedulers()):
            scheduler.check_integrity()
            rank = number if scheduler is not self.lobby else None
            assert all(seq.rank == rank for seq in scheduler.unfinished()), "a sequence is not where it says"
        assert not self.lobby.num_running, "somebody runs in the lobby"
        for domain in self.domains:
            assert domain.epoch is not None or domain.is_empty, "somebody is on a rank without a worker"
        self._trials.check_integrity()

    def _rank_state(self, rank: Rank) -> RankState:
        scheduler, blocks = rank.scheduler, rank.scheduler.blocks
        return RankState(
            rank=rank.number,
            is_attached=self.domain_by_rank[rank.number].epoch is not None,
            num_steps=scheduler.num_steps,
            num_waiting=len(scheduler.waiting),
            num_running=scheduler.num_running,
            num_blocks=blocks.num_blocks,
            num_used_blocks=blocks.num_blocks - blocks.num_free_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_free_blocks=blocks.num_free_blocks,
        )

    def _schedulers(self) -> list[Scheduler]:
        return [*(rank.scheduler for rank in self.ranks), self.lobby]

    def _endings_of(self, seq: Sequence, now: float) -> Endings:
        """What ends a sequence where it is; it does so now."""
        if self._recoveries:
            self._recoveries.note((seq,), now)
        scheduler = self.lobby if seq.rank is None else self.ranks[seq.rank].scheduler
        return scheduler.endings

    def _empty(self, domain: Domain, now: float) -> None:
        """Put whom a domain holds elsewhere; no step is in flight."""
        for rank in domain.ranks:
            for choices in by_request(rank.scheduler.take_all(now)):
                self.add(choices, now)

    def _place_from_lobby(self, request_ids: frozenset[str] | None, now: float) -> None:
        """Put these of those in the lobby on ranks, or, without a list, whoever may be on one."""
        for choices in by_request(self.lobby.waiting):
            is_named = request_ids is None or choices[0].id in request_ids
            if is_named and self._trials.ranks_for(choices[0].id):
                for seq in choices:
                    self.lobby.waiting.remove(seq, now)
                self.add(choices, now)

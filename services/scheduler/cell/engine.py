"""The cell's decision-maker: events in, actions out.

Sans-I/O, so a whole cell can be simulated from one seed. `cell_server` wraps it.
"""

from __future__ import annotations

from services.scheduler.cell.cell import Cell
from services.scheduler.cell.cell_facts import CellFacts
from services.scheduler.cell.domains.domain import Domain
from services.scheduler.cell.events import (
    AbortRequest,
    Action,
    Beat,
    ClientClosed,
    ClientMessage,
    DomainAttached,
    DomainLost,
    DrainRank,
    DropDomain,
    EndpointsFound,
    Event,
    Exit,
    RankHeartbeat,
    ReleaseDomain,
    StepReturned,
    TimePassed,
    UndrainRank,
)
from services.scheduler.cell.heartbeat import Heartbeat
from services.scheduler.cell.model_change import ModelChange
from services.scheduler.cell.places import Places
from services.scheduler.cell.requests.request_manager import RequestManager, deliver
from services.scheduler.cell.requests.requests import RequestTable
from services.scheduler.cell.requests.tenant_totals import TenantState
from services.scheduler.cell.state import CellState
from services.scheduler.core.batch.sequence import RequestKey, Sequence
from services.scheduler.core.cache.kv_feed import KvFeed
from services.scheduler.core.policy import CacheSettings, CellTopology, SchedulerCounters, SchedulerPolicy, StepBudget
from services.scheduler.core.results.outputs import OutputsByClient
from services.scheduler.core.worker_facts import WorkerFacts
from shared.errors import ModelChangedError
from shared.ids import DpRank
from shared.step.step import StepResult

_ONE_RANK = CellTopology()


class Engine:
    """Connects clients, DP ranks and workers; owns the only mutable state of the cell.

    A domain's epoch ends when a link breaks, a result is invalid, or a rank is silent or makes no progress. Its
    requests then wait, with their tokens, for the next rank. Their clients only learn that they resume, unless a
    request turns out to crash its workers. The epoch of a domain that says that it is leaving, or whose endpoint is
    withdrawn, ends as planned, which accuses no request; see `Drains` and `Places`.

    An engine that was stopped for longer than its claim to the workers lasts, or whose workers serve another model now,
    asks for its process to end, whatever events follow.
    """

    def __init__(self, policy: SchedulerPolicy, cache: CacheSettings, topology: CellTopology = _ONE_RANK) -> None:
        self.topology = topology
        self._policy = policy
        self._counters = SchedulerCounters()
        self._requests = RequestTable(policy)
        self._cell = Cell(
            policy,
            cache,
            topology,
            counters=self._counters,
            is_alive=lambda key: self._requests.by_key(key) is not None,
            is_current=self._requests.has_request_of,
        )
        self._places = Places(self._cell, topology.preferred_zone)
        self.facts = CellFacts(cache.block_size)
        """What the cell serves; only the engine changes it."""
        self._request_manager = RequestManager(policy, cache, self._requests, self._cell, self.facts)
        self._model_change = ModelChange()
        self._heartbeat = Heartbeat()
        self._exit: Exit | None = None

    @property
    def is_ready(self) -> bool:
        """Whether any domain is attached."""
        return self._cell.is_attached

    @property
    def takes_work(self) -> bool:
        """Whether a request that came now would be computed as soon as it is its turn.

        Not while all domains are lost, drain, or try suspects: it would wait for one of them.
        """
        return self._cell.takes_work

    @property
    def num_unplaced_endpoints(self) -> int:
        """Endpoints that were found and have no place: the cell is full."""
        return self._places.num_unplaced

    def next_wakeup(self) -> float:
        """When `TimePassed` is due."""
        deadline, beat = self._requests.first_deadline, self._heartbeat.next_at
        return beat if deadline is None or beat < deadline else deadline

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Handle an event at `now` (monotonic seconds); returns the actions, in order."""
        actions = self._beat(now) if now >= self._heartbeat.next_at else []
        if self._exit is not None:
            return [self._exit]
        actions += self._request_manager.expire(now)
        match event:
            case StepReturned(rank, result):
                actions += self._on_step_returned(rank, result, now)
                return actions
            case RankHeartbeat():
                self._on_rank_heartbeat(event, now)
            case ClientMessage():
                actions += self._request_manager.on_message(event, now)
            case ClientClosed(client):
                self._request_manager.on_client_closed(client, now)
            case AbortRequest(request_id, tenant):
                actions += self._request_manager.on_abort_call(RequestKey(tenant, request_id), now)
            case DomainAttached(domain, facts):
                actions += self._on_domain_attached(self._cell.domains[domain], facts, now)
            case DomainLost():
                actions += self._on_domain_lost(event, now)
            case DrainRank() | UndrainRank():
                self._on_operator_call(event, now)
            case EndpointsFound(endpoints):
                actions += self._places.update(endpoints, now)
                self.facts.update(self._cell.domains)
            case TimePassed():
                pass
        return actions + self._advance(now)

    def flush_prefix_cache(self) -> int:
        """Clear the prefix cache; returns how many blocks held a prefix. Requests in flight are unaffected."""
        return sum(rank.scheduler.flush_prefix_cache() for rank in self._cell.ranks)

    def open_kv_feeds(self) -> list[KvFeed]:
        """Begin to report what the ranks' prefix caches hold; returns one feed per rank."""
        return [rank.scheduler.open_kv_feed() for rank in self._cell.ranks]

    def close_kv_feeds(self) -> None:
        """Take `open_kv_feeds` back."""
        for rank in self._cell.ranks:
            rank.scheduler.close_kv_feed()

    def state(self) -> CellState:
        """Take a snapshot."""
        return self._cell.state()

    def tenants(self) -> list[TenantState]:
        """Take a snapshot of what is known of each tenant, for metrics."""
        return self._request_manager.tenants()

    def is_vacant(self, rank: DpRank) -> bool:
        """Whether a rank is a place that no endpoint has."""
        return self._cell.domain_by_rank[rank].is_vacant

    def check_integrity(self) -> None:
        """Assert that all state is consistent."""
        self._requests.check_integrity()
        assert self._requests.choices() == set(self._cell.unfinished()), "a choice was forgotten, or was not ended"
        self._cell.check_integrity()
        self._places.check_integrity()

    def _beat(self, now: float) -> list[Action]:
        if self._exit is None and self._cell.is_attached and self._heartbeat.is_lease_over(now):
            self._exit = Exit("this process was stopped for so long that another scheduler may have taken its workers")
        if self._exit is not None:
            return []
        pause_s = self._heartbeat.beat(now)
        self._cell.worker_wait.begin(now)
        self._cell.worker_wait.extend(pause_s)
        # First of all, so that nothing is computed for a request whose deadline has passed.
        actions: list[Action] = [Beat(self._cell.num_steps), *self._request_manager.expire(now)]
        faults: list[tuple[Domain, str]] = []
        for domain in self._cell.domains:
            if pause_s:
                domain.extend_deadlines(pause_s, now)
            fault = domain.find_fault(now)
            if fault is not None:
                faults.append((domain, fault))
        # All are given up before any request continues: requests of one must not be sent to another that is lost too.
        for domain, fault in faults:
            actions += self._drop(domain, fault, now, accuses_rows=True)
        actions += self._request_manager.end_without_workers(now)
        return actions + self._advance(now) if faults else actions

    def _on_domain_attached(self, domain: Domain, facts: tuple[WorkerFacts, ...], now: float) -> list[Action]:
        context_length, budget = facts[0].context_length, StepBudget.of(self._policy, facts[0])
        if not self._policy.enable_chunked_prefill and budget.max_prompt_tokens < context_length:
            # A prompt of the full context could never be computed.
            return [Exit(f"max_num_batched_tokens is below the model's context of {context_length}")]
        actions: list[Action] = []
        if domain.epoch is not None:
            # It was attached again on purpose, which says nothing about what was in its steps.
            actions += self._lose(domain, now, accuses_rows=False, reason="it was attached again")
        fault = self.facts.find_fault(facts)
        if fault is not None:
            self._counters.num_unfit_workers += 1
            return [*actions, DropDomain(domain.number, facts[0].epoch, fault)]
        difference = self.facts.find_other_model(facts)
        if difference is not None:
            return actions + self._refuse_model(domain, facts[0].epoch, difference, now)
        self._model_change.on_attached(domain)
        self._cell.attach(domain, facts, now)
        self.facts.update(self._cell.domains)
        actions += self._request_manager.end_unsupported(now)
        return actions + self._request_manager.end_unservable(self._cell.waiting(), now)

    def _refuse_model(self, domain: Domain, epoch: int, difference: str, now: float) -> list[Action]:
        """Too much hangs on the first model: when it has been replaced, the process ends for another to begin anew."""
        self._counters.num_refused_models += 1
        drop = self._model_change.refuse(domain, epoch, difference, now, is_cell_attached=self._cell.is_attached)
        if not self._model_change.is_over(now):
            return [drop]
        self._exit = Exit("the workers serve another model now")
        error = ModelChangedError("the cell's workers serve another model now")
        return [drop, *self._request_manager.end_all(error, now), self._exit]

    def _on_rank_heartbeat(self, beat: RankHeartbeat, now: float) -> None:
        rank, domain = self._cell.ranks[beat.rank], self._cell.domain_by_rank[beat.rank]
        if domain.epoch != beat.epoch:
            return
        rank.heard_at = now
        if rank.progress not in (None, beat.progress):
            rank.scheduler.step_deadline.on_progress(now)
        rank.progress = beat.progress
        if beat.is_leaving and not domain.is_leaving:
            self._cell.on_leaving(domain, now)

    def _on_operator_call(self, event: DrainRank | UndrainRank, now: float) -> None:
        domain = self._cell.domain_by_rank[event.rank]
        if isinstance(event, DrainRank):
            self._cell.drain(domain, now)
        else:
            self._cell.undrain(domain, now)

    def _on_domain_lost(self, event: DomainLost, now: float) -> list[Action]:
        domain = self._cell.domains[event.domain]
        if domain.epoch != event.epoch:
            return []
        if domain.is_departing:
            return self._release(domain, now)
        return self._lose(domain, now, accuses_rows=True, reason="a link broke")

    def _lose(self, domain: Domain, now: float, *, accuses_rows: bool, reason: str) -> list[Action]:
        """Give up a lost domain: its sequences wait elsewhere, and a request that kills workers ends."""
        sequences, poison = self._cell.lose(domain, now, accuses_rows=accuses_rows, reason=reason)
        self.facts.update(self._cell.domains)
        actions = _deliver_resumes(sequences)
        if poison is not None:
            actions += self._request_manager.end_poison(poison, now)
        return actions + self._end_unservable(sequences, now)

    def _release(self, domain: Domain, now: float) -> list[Action]:
        """Let a domain that was drained go: its sequences wait elsewhere."""
        sequences = self._cell.release(domain, now)
        self.facts.update(self._cell.domains)
        return _deliver_resumes(sequences) + self._end_unservable(sequences, now)

    def _end_unservable(self, sequences: list[Sequence], now: float) -> list[Action]:
        """End those that no remaining rank can continue."""
        unfinished = [seq for seq in sequences if seq.left_at is None]
        return self._request_manager.end_unservable(unfinished, now)

    def _drop(self, domain: Domain, reason: str, now: float, *, accuses_rows: bool) -> list[Action]:
        assert domain.epoch is not None
        drop = DropDomain(domain.number, domain.epoch, reason)
        return [drop, *self._lose(domain, now, accuses_rows=accuses_rows, reason=reason)]

    def _on_step_returned(self, rank_number: int, result: StepResult, now: float) -> list[Action]:
        rank = self._cell.ranks[rank_number]
        domain = self._cell.domain_by_rank[rank_number]
        if result.epoch != domain.epoch or result.step_id <= rank.scheduler.last_returned_step_id:
            self._counters.num_late_results += 1
            return []
        assert self.facts.model is not None
        problem = rank.scheduler.validate_result(result, self.facts.model.logits_width)
        if problem is not None:
            return self._drop(domain, problem, now, accuses_rows=False) + self._advance(now)
        rank.heard_at = now
        outputs = self._cell.postprocess(rank, result, now)
        self._request_manager.take_outputs(outputs)
        actions = deliver(outputs)
        actions += self._advance(now) if self._cell.is_disturbed else self._cell.advance_rank(rank, now)
        return actions

    def _advance(self, now: float) -> list[Action]:
        actions = self._end_drains(now) if self._cell.drains else []
        if self._places.has_withdrawn:
            actions += self._settle_places()
        self._cell.settle(now)
        return actions + self._cell.send_ahead(now)

    def _settle_places(self) -> list[Action]:
        actions = self._places.settle()
        if actions:
            self.facts.update(self._cell.domains)
        return actions

    def _end_drains(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for domain in self._cell.drains.take_over(now):
            assert domain.epoch is not None
            actions += [ReleaseDomain(domain.number, domain.epoch), *self._release(domain, now)]
        return actions


def _deliver_resumes(sequences: list[Sequence]) -> list[Action]:
    """Tell the clients which of an ended epoch's sequences resume."""
    resumes = OutputsByClient()
    for seq in sequences:
        if seq.num_resumes and seq.left_at is None:
            resumes.add_resume(seq)
    return deliver(resumes)

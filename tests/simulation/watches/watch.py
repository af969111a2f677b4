"""The expected output of an engine for every event, derived independently of the engine.

The watch sees each event and every action the engine returns for it. It knows the full answer of every request, so it
knows exactly which tokens and ends an event must produce, and that nothing else may be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import (
    AbortRequest,
    Action,
    Beat,
    ClientClosed,
    ClientMessage,
    CloseClient,
    Deliver,
    DomainAttached,
    DomainLost,
    DrainRank,
    DropDomain,
    EndpointsFound,
    Event,
    Exit,
    LinkDomain,
    RankHeartbeat,
    ReleaseDomain,
    SendStep,
    StepReturned,
    Submission,
    UndrainRank,
    UnlinkDomain,
)
from services.scheduler.cell.model_change import CHANGE_S
from services.scheduler.core.batch.sequence import Finish, FinishReason, RequestKey
from services.scheduler.core.batch.step import Step
from services.scheduler.core.queue.tenant_counters import TenantAccount
from services.scheduler.core.results.outputs import Outputs
from services.scheduler.core.worker_facts import WorkerFacts
from services.scheduler.server.direct_clients import DIRECT_CLIENT
from shared.ids import DpRank
from shared.request.limits import TOKEN_DTYPE
from shared.step.step import StepResult
from shared.tenants.tenant import Tenant
from tests.simulation.network.responses import Responses
from tests.simulation.network.step_stream import Answer
from tests.simulation.watches.counter_watch import CounterWatch
from tests.simulation.watches.drain_watch import DrainWatch
from tests.simulation.watches.epoch_watch import Entry, EpochWatch, Key, Number, SentStep
from tests.simulation.watches.lockstep_watch import check_lockstep
from tests.simulation.watches.share_watch import ShareWatch
from tests.simulation.watches.suspect_watch import SuspectWatch
from tests.simulation.watches.tenant_watch import check_tenants, find_tenant_refusal, is_queue_full
from tests.simulation.watches.wait_watch import WaitWatch
from tests.simulation.workload import CellSettings, RequestPlan, number_of
from tests.support.scheduler.engine_driver import expected_scores

# The scheduler's lease on its workers, and the interval of its heartbeats.
_LEASE_S = 10.0
_BEAT_S = 0.75
# The integrity check walks all blocks, so a large pool is checked less often than at every event.
_BLOCKS_PER_EVENT = 6


class EngineWatch:
    """Follows one engine and raises AssertionError when it misbehaves."""

    def __init__(self, settings: CellSettings, plans: list[RequestPlan]) -> None:
        """Follow an engine from its start; `plans` is indexed by request number and may grow."""
        self._settings = settings
        self._plans = plans
        self._entries: dict[Key, Entry] = {}
        # Choices of accepted submissions that have not ended.
        self._live: dict[Number, Entry] = {}
        # Choices that ended during the current event.
        self._ended: dict[Key, Entry] = {}
        # By rank; only ranks whose domain is attached.
        self._epochs: dict[int, EpochWatch] = {}
        self.suspects = SuspectWatch()
        self._counters = CounterWatch() if CounterWatch.is_for(settings) else None
        self._drains = DrainWatch(settings, self._epochs)
        self._waits = WaitWatch(settings.policy.workers_lost_s)
        # Newcomers that the current event refuses because all workers are lost.
        self._turned_away: set[Key] = set()
        # By rank: the endpoint that it is linked to; of cells that discover their workers.
        self._places: dict[DpRank, str] = {}
        # The model of the first domain, and since when only another one has been offered.
        self._weights_digest: str | None = None
        self._odd_since: float | None = None
        # Domains whose newest step is a dummy of all ranks.
        self._controlled: set[int] = set()
        self._has_ended = False
        self._num_lost_epochs = 0
        self.num_steps = 0
        self.num_dummy_steps = 0
        self._engine: Engine | None = None
        self._had_worker = False
        self._answer: Answer | None = None
        self._num_blocks_unchecked = 0
        self._last_beat_at = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting for an answer or a step is in flight."""
        return bool(self._live) or any(epoch.in_flight for epoch in self._epochs.values())

    def first_deadline(self, wakeup: float) -> float:
        """The earliest deadline of a live request, but at least `wakeup`; inf if no request has a deadline."""
        deadlines = (entry.deadline for entry in self._live.values() if entry.deadline is not None)
        return max(wakeup, min(deadlines, default=float("inf")))

    def on_answer(self, answer: Answer) -> None:
        """Announce that the next event carries this answer."""
        self._answer = answer

    def on_event(self, engine: Engine, event: Event, actions: list[Action], now: float) -> None:
        """Check the actions that the engine returned for an event, and its state after it."""
        self._engine = engine
        if self._has_ended:
            assert [type(action) for action in actions] == [Exit], "it continues after its model was replaced"
            return
        if self._epochs and now - self._last_beat_at > _LEASE_S:
            assert [type(action) for action in actions] == [Exit], "it continues after its lease has run out"
            return
        due = Responses()
        self._ended.clear()
        # A request whose deadline passes at the moment a rank is dropped ends before the drop.
        self._expire(due, now)
        for action in actions:
            if isinstance(action, DropDomain) and action.reason.startswith("rank "):
                # The engine checks its ranks before it handles the event.
                assert self._is_overdue(action.domain, now), "the engine drops a healthy rank"
                self._drop(action.domain, action.epoch, due)
        live = self._live.values()
        lost, self._turned_away = self._waits.find_ends(actions, live, now, is_attached=bool(self._epochs))
        for entry in lost:
            self._end(entry, due, "WORKERS_LOST")
        if isinstance(event, RankHeartbeat | DrainRank | EndpointsFound):
            self._take_drain(event, actions, now)
        else:
            self._take_in(event, due, now)
        sent = self._take_actions(actions, now)
        assert sent == due, f"the engine sent {sent}, expected {due}"
        if self.suspects:
            self.suspects.keep({entry.plan.key for entry in self._live.values()})
        if any(isinstance(action, SendStep) for action in actions):
            self._check_domains()
        self._drains.check(now)
        check_tenants(self._live.values())
        if self._counters is not None:
            is_disturbed = bool(self.suspects) or bool(self._drains) or not self._epochs
            self._counters.check(counters_of(engine), self._live.values(), is_disturbed=is_disturbed)
        assert engine.state().counters.num_lost_epochs == self._num_lost_epochs, "losses are counted wrong"
        if not self._has_ended:
            self._check_rest(engine, now)
        if not all(isinstance(action, Beat) for action in actions):
            self._check_integrity(engine)

    def check_end(self, engine: Engine) -> None:
        """Check an engine that has finished all its work."""
        assert not self._live, f"never answered: {[entry.plan.key for entry in self._live.values()]}"
        engine.check_integrity()
        state = engine.state()
        assert (state.num_running, state.num_waiting, state.num_used_blocks) == (0, 0, 0), (
            "sequences or blocks are left over"
        )

    def _take_actions(self, actions: list[Action], now: float) -> Responses:
        """Check the steps that are sent; returns what clients receive and which domains are dropped."""
        responses = Responses()
        for action in actions:
            match action:
                case Deliver(client, outputs):
                    responses.take_in(client, outputs)
                    self._check_resumes(client, outputs)
                case CloseClient(client):
                    responses.closed.add(client)
                case DropDomain(domain):
                    responses.dropped.add(domain)
                case ReleaseDomain(domain, epoch):
                    assert self._epoch_of(domain) == epoch, "the engine releases an epoch that it does not have"
                    self._release(domain, may_resume=self._drains.check_release(domain, now))
                case SendStep(rank, step):
                    assert rank in self._epochs, "a step for a rank that is not attached"
                    if self._drains:
                        self._drains.check_step(rank, self._entering(step), self.suspects.all(), now)
                    self._epochs[rank].check_step(step, now)
                    self._note_control(rank, is_dummy=step.batch.is_dummy)
                    self.num_steps += 1
                    self.num_dummy_steps += step.batch.is_dummy
                case LinkDomain(domain, address):
                    assert address not in self._places.values(), "an endpoint has two places"
                    assert domain not in self._places, "a place has two endpoints"
                    self._places[DpRank(domain)] = address
                case UnlinkDomain(domain):
                    assert self._epoch_of(domain) is None, "the link of an attached domain is closed"
                    del self._places[DpRank(domain)]
                case Beat():
                    self._last_beat_at = now
                case Exit(reason):
                    assert self._has_ended, f"the engine wants to exit: {reason}"
        return responses

    def _check_resumes(self, client: int, outputs: Outputs) -> None:
        """Check that each end reports the number of lost epochs in which the choice lost computed work."""
        for end in outputs.ends:
            entry = self._ended.get((client, end.handle))
            if entry is not None:
                assert entry.min_resumes <= end.num_resumes <= entry.max_resumes, "resumes are counted wrong"
                assert end.is_resume_exact or not self._settings.is_exact, (
                    "a resume is inexact although all ranks are exact"
                )

    def _expire(self, due: Responses, now: float) -> None:
        for entry in list(self._live.values()):
            if entry.deadline is not None and entry.deadline <= now:
                self._end(entry, due, "DEADLINE_PASSED")

    def _take_in(self, event: Event, due: Responses, now: float) -> None:
        match event:
            case ClientMessage():
                self._take_message(event, due, now)
            case ClientClosed(client):
                self._forget_all(lambda entry: entry.key[0] == client)
            case AbortRequest(request_id, tenant):
                for entry in list(self._live.values()):
                    if entry.plan.key == RequestKey(tenant, request_id):
                        self._end(entry, due, "ABORTED_BY_CALL")
            case DomainAttached(domain, facts):
                if self._weights_digest in (None, facts[0].weights_digest):
                    self._weights_digest, self._odd_since = facts[0].weights_digest, None
                    self._attach(domain, facts, due, now)
                else:
                    self._refuse(domain, due, now)
            case DomainLost(domain, epoch):
                if self._epoch_of(domain) == epoch:
                    self._lose_link(domain, due)
            case UndrainRank(rank):
                self._drains.undrain(rank)
            case StepReturned(rank, result):
                self._take_result(rank, result, due, now)

    def _take_drain(self, event: RankHeartbeat | DrainRank | EndpointsFound, actions: list[Action], now: float) -> None:
        is_after_drop = any(isinstance(action, DropDomain) for action in actions)
        # The steps that follow a drop were sent before the event was handled.
        steps = [action.step for action in actions if isinstance(action, SendStep) and is_after_drop]
        if not isinstance(event, RankHeartbeat) or event.is_leaving:
            # Whatever runs may be queued again without making way for anybody.
            for epoch in self._epochs.values():
                epoch.shares = None
        entering = set[RequestKey]().union(*map(self._entering, steps))
        if isinstance(event, DrainRank):
            self._drains.drain(event.rank, entering, now)
        elif isinstance(event, EndpointsFound):
            self._take_endpoints(event, entering, now)
        elif event.rank in self._epochs and self._epochs[event.rank].number == event.epoch:
            self._epochs[event.rank].signs.take(event.progress, now)
            if event.is_leaving:
                self._drains.leave(event.rank, entering, now)

    def _counter_of(self, tenant: Tenant) -> float:
        assert self._engine is not None
        return counters_of(self._engine)[tenant.name].counter

    def _take_endpoints(self, event: EndpointsFound, entering: set[RequestKey], now: float) -> None:
        found = {endpoint.address for endpoint in event.endpoints if not endpoint.is_terminating}
        for rank, address in self._places.items():
            if address in found:
                self._drains.restore(rank)
            elif rank in self._epochs:
                self._drains.withdraw(rank, entering, now)

    def _forget_all(self, is_gone: Callable[[Entry], bool]) -> None:
        for entry in [entry for entry in self._live.values() if is_gone(entry)]:
            self._forget(entry)

    def _take_message(self, message: ClientMessage, due: Responses, now: float) -> None:
        for submission in message.submissions:
            handles = range(submission.handle, submission.handle + submission.n)
            if any((message.client, handle) in self._entries for handle in handles):
                due.closed.add(message.client)
                return
            self._submit(message.client, submission, due, now)
        for handle, num_tokens in message.stop_ats:
            entry = self._entries.get((message.client, handle))
            if entry is not None:
                # If the submission and the stop were both repeated, the stop may be past the tokens there are.
                num_known = min(num_tokens, entry.num_tokens)
                self._end(entry, due, (Finish(FinishReason.STOP_STRING), num_known))
        requests = {(message.client, handle) for handle in message.aborts}
        self._forget_all(lambda entry: entry.request_key in requests)

    def _submit(self, client: int, submission: Submission, due: Responses, now: float) -> None:
        plan = self._plans[number_of(submission.params.seed)]
        if client != DIRECT_CLIENT:
            _check_times(submission, plan)
        assert submission.n == plan.n, "a replica submits a different number of choices"
        earlier = [entry for entry in self._live.values() if entry.plan.key == plan.key]
        is_turned_away = submission.attempt == 1 and (client, submission.handle) in self._turned_away
        refusal = "WORKERS_LOST" if is_turned_away else self._find_refusal(client, submission, plan, earlier)
        if refusal is not None:
            due.ends.update(((client, submission.handle + choice), refusal) for choice in submission.open_choices)
            return
        for entry in earlier:
            self._end(entry, due, "ABORTED_BY_CALL" if entry.key[0] == client else "DUPLICATE_REQUEST")
        is_charged = 0 in submission.open_choices and not _num_tokens_so_far(submission, 0)
        for choice in submission.open_choices:
            entry = Entry(
                plan,
                choice,
                (client, submission.handle + choice),
                (client, submission.handle),
                submission.attempt,
                _num_tokens_so_far(submission, choice),
                now - submission.age_s,
                now,
                None if submission.time_left_s is None else now + submission.time_left_s,
                num_prompt_logprob_bytes=plan.num_prompt_logprob_bytes if is_charged else 0,
                min_resumes=submission.num_earlier_resumes,
                max_resumes=submission.num_earlier_resumes,
            )
            is_over = entry.num_tokens >= len(entry.expected.tokens) and entry.expected.finish is not None
            assert not is_over, "a replica submits a choice that has ended"
            self._entries[entry.key] = self._live[entry.number] = entry

    def _find_refusal(self, client: int, submission: Submission, plan: RequestPlan, earlier: list[Entry]) -> str | None:
        """The reason for which a submission must be refused; None if it must be accepted."""
        if not self._had_worker and submission.attempt == 1:
            return "NOT_READY"
        goes_on = submission.attempt > 1 and earlier and earlier[0].key[0] == client
        if earlier and earlier[0].attempt >= submission.attempt and not goes_on:
            return "DUPLICATE_REQUEST"
        if submission.time_left_s is not None and submission.time_left_s <= 0:
            return "DEADLINE_PASSED"
        if self._had_worker and plan.is_exact and not self._settings.is_exact:
            return "EXACT_UNAVAILABLE"
        if submission.attempt > 1:
            return None
        live = self._live.values()
        refusal = find_tenant_refusal(plan, live)
        return refusal or ("QUEUE_FULL" if is_queue_full(self._settings.policy, plan, live) else None)

    def _attach(self, domain: int, facts: tuple[WorkerFacts, ...], due: Responses, now: float) -> None:
        self._had_worker = True
        for entry in list(self._live.values()):
            # Submitted before the ranks had reported whether they are exact.
            if entry.plan.is_exact and not self._settings.is_exact:
                self._end(entry, due, "EXACT_UNAVAILABLE")
        for rank, rank_facts in zip(self._settings.topology.ranks_of(domain), facts, strict=True):
            assert rank not in self._epochs, "a domain is attached twice"
            self._drains.attach(rank)
            self.suspects.note_attach(domain)
            waits_here = partial(self._waits_at, rank)
            shares = None
            if ShareWatch.is_for(self._settings):
                shares = ShareWatch(self._settings, rank, rank_facts.num_blocks, self._counter_of)
            self._epochs[rank] = EpochWatch(
                rank,
                rank_facts.epoch,
                self._settings,
                self._live,
                now=now,
                waits_here=waits_here,
                shares=shares,
                turns=self._counters,
                has_suspects=lambda: bool(self.suspects),
            )

    def _refuse(self, domain: int, due: Responses, now: float) -> None:
        """A domain serves another model; once only that was offered for long enough, the scheduler ends."""
        due.dropped.add(domain)
        if self._epochs:
            self._odd_since = None
        elif self._odd_since is None:
            self._odd_since = now
        elif now - self._odd_since >= CHANGE_S:
            self._has_ended = True
            for entry in list(self._live.values()):
                self._end(entry, due, "MODEL_CHANGED")

    def _epoch_of(self, domain: int) -> int | None:
        epoch = self._epochs.get(self._settings.topology.ranks_of(domain)[0])
        return None if epoch is None else epoch.number

    def _lose(self, domain: int, due: Responses, *, accuses_rows: bool = True) -> None:
        """End a domain's epoch; the requests in its steps in flight become suspects if `accuses_rows`."""
        self._num_lost_epochs += 1
        self._drains.end(domain)
        lost = [self._epochs.pop(rank) for rank in self._settings.topology.ranks_of(domain)]
        # A control of which every step has returned is over.
        has_failed_control = domain in self._controlled and any(epoch.in_flight for epoch in lost)
        self._controlled.discard(domain)
        in_flight = {entry.plan.key for epoch in lost for entry in epoch.lose() if entry.is_live}
        if has_failed_control:
            self.suspects.acquit(domain)
        poison = self.suspects.accuse(in_flight, domain) if accuses_rows else None
        for entry in [entry for entry in self._live.values() if entry.plan.key == poison]:
            self._end(entry, due, "POISON_REQUEST")

    def _lose_link(self, domain: int, due: Responses) -> None:
        if self._drains.is_departing(domain):
            self._release(domain, may_resume=True)
        else:
            self._lose(domain, due)

    def _release(self, domain: int, *, may_resume: bool) -> None:
        """End a domain's epoch as planned: no request is suspected for it, and it is no loss."""
        self._drains.end(domain)
        self._controlled.discard(domain)
        for rank in self._settings.topology.ranks_of(domain):
            self._epochs.pop(rank).lose(may_resume=may_resume)
        assert self._engine is not None
        suspects = self._engine._cell._quarantine.suspects.all()
        assert all(request in self.suspects for request in suspects), "a planned stop accuses a request"

    def _entering(self, step: Step) -> set[RequestKey]:
        """The requests that enter with a step."""
        entries = (self._live[number_of(enter.params.seed), enter.choice] for enter in step.batch.enters)
        return {entry.plan.key for entry in entries}

    def _waits_at(self, rank: int, entry: Entry) -> bool:
        """Whether a choice waits in the queue to enter the batch of this rank."""
        if self.suspects:
            # Suspects wait for a trial, and all other requests for its end.
            return False
        assert self._engine is not None
        is_only_place = self._settings.topology.dp_size == 1 and not self._drains
        return is_only_place or rank_of(self._engine, entry.key) == rank

    def _take_result(self, rank: DpRank, result: StepResult, due: Responses, now: float) -> None:
        answer, epoch = self._answer, self._epochs.get(rank)
        assert answer is not None
        if epoch is None or answer.epoch != epoch.number:
            return
        if epoch.is_repeat(answer):
            return
        if answer.is_nonsense or not epoch.is_due(answer):
            # The worker itself is at fault, not the requests it computed.
            self._drop(self._settings.topology.domain_of(rank), epoch.number, due, accuses_rows=False)
            return
        epoch.signs.heard_at = epoch.signs.got_on_at = now
        not_finite_rows, failed_grammar_rows = result.not_finite_rows.tolist(), result.failed_grammar_rows.tolist()
        step = epoch.take_answer(answer, result)
        self._waits.note_result(now)
        self.suspects.note_return(self._settings.topology.domain_of(rank))
        if step.is_decode and self.suspects:
            self._clear_suspects(step)
        for entered, end in step.chunks:
            if entered.is_scored and entered.entry.is_live:
                self._take_prompt(entered.entry, end, due)
        counts = [1] * len(step.rows) if result.counts is None else result.counts.tolist()
        for row, (entered, count) in enumerate(zip(step.rows, counts, strict=True)):
            if not entered.entry.is_live:
                continue
            if row in not_finite_rows:
                self._end(entered.entry, due, "NUMERIC_ERROR")
            elif row in failed_grammar_rows:
                self._take_failed(entered.entry, count, due)
            else:
                self._take_tokens(entered.entry, count, due)

    def _clear_suspects(self, step: SentStep) -> None:
        """Clear the requests of a decode step. A superseded attempt's row clears nothing: the present one is tried."""
        present = {entry.request_key for entry in self._live.values()}
        for entered in step.rows:
            if entered.entry.request_key in present:
                self.suspects.clear(entered.entry.plan.key)

    def _note_control(self, rank: DpRank, *, is_dummy: bool) -> None:
        """Note a step that is sent; the ranks of a domain are sent theirs in order."""
        domain = self._settings.topology.domain_of(rank)
        if not is_dummy:
            self._controlled.discard(domain)
        elif rank == self._settings.topology.ranks_of(domain)[0] and self.suspects:
            self._controlled.add(domain)

    def _take_prompt(self, entry: Entry, end: int, due: Responses) -> None:
        """A chunk returns log-probabilities of the next prompt positions; those already sent are not sent again."""
        num_top, start = entry.plan.options.num_prompt_logprobs, entry.num_prompt_positions
        if num_top is None or end <= start:
            return
        due.prompt_scores[entry.key] = expected_scores(entry.plan.prompt[start:end], num_top, start=start, offset=start)
        entry.num_prompt_positions = end

    def _take_tokens(self, entry: Entry, count: int, due: Responses) -> None:
        """A row returns the next tokens of the choice's only possible answer; tokens after its end are discarded."""
        assert count, "a row returns no token for a request that has not ended"
        expected, first, options = entry.expected, entry.num_tokens, entry.plan.options
        tokens = expected.tokens[first : first + count]
        due.tokens[entry.key] = (first, tokens)
        if options.num_top is not None:
            start, requested = len(entry.plan.prompt) + first, options.logprob_token_ids
            due.scores[entry.key] = expected_scores(
                tokens, options.num_top, start=start, offset=first, requested=requested
            )
        if not first:
            due.starts[entry.key] = entry.num_cached_tokens
        entry.num_tokens += len(tokens)
        if entry.num_tokens == len(expected.tokens) and expected.finish is not None:
            self._end(entry, due, (expected.finish, entry.num_tokens))

    def _take_failed(self, entry: Entry, count: int, due: Responses) -> None:
        """The row's grammar has failed, so its last token is void; a stop among the earlier tokens takes precedence."""
        if count > 1:
            self._take_tokens(entry, count - 1, due)
        if entry.is_live:
            is_due = entry.expected.finish is None and entry.num_tokens == len(entry.expected.tokens)
            assert is_due, "a grammar fails although it could be followed"
            self._end(entry, due, "INVALID_REQUEST")

    def _drop(self, domain: int, epoch: int, due: Responses, *, accuses_rows: bool = True) -> None:
        assert self._epoch_of(domain) == epoch, "the engine drops an epoch that it does not have"
        due.dropped.add(domain)
        self._lose(domain, due, accuses_rows=accuses_rows)

    def _is_overdue(self, domain: int, now: float) -> bool:
        epochs = [self._epochs[rank] for rank in self._settings.topology.ranks_of(domain) if rank in self._epochs]
        silence_s = self._settings.policy.worker_silence_s
        return any(epoch.is_overdue(now, silence_s=silence_s) for epoch in epochs)

    def _end(self, entry: Entry, due: Responses, end: tuple[Finish | None, int] | str) -> None:
        due.ends[entry.key] = end
        self._ended[entry.key] = entry
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        entry.is_live = False
        del self._entries[entry.key], self._live[entry.number]

    def _check_domains(self) -> None:
        """Check that coupled ranks have the same steps in flight, and that suspects are tried alone."""
        topology = self._settings.topology
        for domain in range(topology.num_domains):
            ranks = [self._epochs[rank] for rank in topology.ranks_of(domain) if rank in self._epochs]
            if ranks and topology.is_coupled:
                check_lockstep(ranks, topology.dp_size)
            if ranks and self.suspects:
                entries = {entry for rank in ranks for sent in rank.in_flight for entry in sent.entries}
                requests = {entry.plan.key for entry in entries if entry.is_live}
                self.suspects.check_together(domain, requests, max(len(rank.in_flight) for rank in ranks))

    def _check_rest(self, engine: Engine, now: float) -> None:
        if self._live and any(not self._drains.is_draining(rank) for rank in self._epochs):
            is_idle = not any(epoch.in_flight for epoch in self._epochs.values())
            assert not is_idle, "requests wait, the workers are idle, and no step is sent"
        self._waits.check_rest(
            self._live.values(), now, is_attached=bool(self._epochs), last_beat_at=self._last_beat_at
        )
        wakeup = engine.next_wakeup()
        assert wakeup > now, "the engine wants to be woken in the past"
        # A late beat skips one interval: see `next_beat_at`.
        assert wakeup <= self._last_beat_at + 1.25 * _BEAT_S, "the engine sends no heartbeat"

    def _check_integrity(self, engine: Engine) -> None:
        self._num_blocks_unchecked += _BLOCKS_PER_EVENT
        if self._num_blocks_unchecked >= sum(self._settings.num_blocks):
            self._num_blocks_unchecked = 0
            engine.check_integrity()


def _check_times(submission: Submission, plan: RequestPlan) -> None:
    """Check that the deadline counts from the request's first arrival, not from this attempt."""
    if plan.patience_s is None:
        assert submission.time_left_s is None, "a deadline that the caller did not set"
        return
    assert submission.time_left_s is not None, "a deadline is lost"
    time_left_s = max(0.0, plan.patience_s - submission.age_s)
    assert abs(submission.time_left_s - time_left_s) < 1e-3, "a deadline is moved"


def _num_tokens_so_far(submission: Submission, choice: int) -> int:
    if not submission.choices_so_far:
        return 0
    return len(submission.choices_so_far[choice].output) // TOKEN_DTYPE.itemsize


def counters_of(engine: Engine) -> dict[str, TenantAccount]:
    """What an engine's tenants were given, by name."""
    return engine._cell._unplaced.queue.tenants._name_to_account


def rank_of(engine: Engine, key: Key) -> int | None:
    """The DP rank on which an engine has placed a choice; None if it is not placed yet."""
    return next(seq.rank for seq in engine._requests.choices() if (seq.client, seq.handle) == key)

"""Drives the real engine against worker models, and collects the output of each request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import (
    Action,
    Beat,
    ClientMessage,
    Deliver,
    DomainAttached,
    DomainLost,
    DropDomain,
    Event,
    RankHeartbeat,
    ReleaseDomain,
    SendStep,
    StepReturned,
    Submission,
    TimePassed,
)
from services.scheduler.core.batch.sequence import Priority
from services.scheduler.core.batch.step import Step
from services.scheduler.core.policy import CacheSettings, CellTopology, SchedulerPolicy, StepBudget
from services.scheduler.core.results.outputs import Outputs, RequestEnd
from services.scheduler.core.worker_facts import WorkerFacts
from services.worker.batch.enter_checks import BatchLimits
from shared.ids import DpRank, RequestHandle
from shared.request.limits import GRAPH_BATCH_SIZES, TOKEN_DTYPE
from shared.request.sampling_codec import encode_options
from shared.request.sampling_params import SamplingParams
from shared.step.logprobs import Logprobs
from shared.step.step import StepResult
from shared.tenants.tenant import DEFAULT_TENANT, Tenant
from shared.wire import Introduction, find_needs, introduce_self
from tests.support.scheduler.cell_model import VOCABULARY, Oracle, WorkerModel, expected_completion, logprobs_of

EOS = 7
# The integrity check walks all blocks, which takes longer than the events of a long run.
_NUM_CHECKED, _EVENTS_PER_CHECK = 40, 4


def token_bytes(token_ids: list[int]) -> bytes:
    """Token ids as int32 bytes, as on the wire."""
    return np.array(token_ids, TOKEN_DTYPE).tobytes()


def worker_facts(
    *,
    num_blocks: int = 64,
    context_length: int = 512,
    epoch: int = 1,
    num_draft_tokens: int = 0,
    numerics_fingerprint: str = "",
    is_exact: bool = False,
    graph_batch_sizes: tuple[int, ...] = GRAPH_BATCH_SIZES,
    introduction: Introduction | None = None,
    num_checkpoint_slots: int | None = None,
) -> WorkerFacts:
    """The facts that a worker, by default of this release, reports when attached; a drafting one needs all tokens.

    With `num_checkpoint_slots`, its model has recurrent states.
    """
    return WorkerFacts(
        epoch,
        "digest",
        context_length,
        VOCABULARY,
        (EOS,),
        num_blocks,
        num_draft_tokens=num_draft_tokens,
        needs_all_tokens=num_draft_tokens > 0,
        numerics_fingerprint=numerics_fingerprint,
        is_exact=is_exact,
        graph_batch_sizes=graph_batch_sizes,
        introduction=introduction or introduce_self(),
        state_bytes_per_slot=0 if num_checkpoint_slots is None else 8,
        num_checkpoint_slots=num_checkpoint_slots or 0,
    )


def attached(facts: WorkerFacts, domain: int = 0, *, num_ranks: int = 1) -> DomainAttached:
    """The event that attaches a domain whose ranks all reported the same facts."""
    return DomainAttached(domain, (facts,) * num_ranks)


def rows_of(outputs: Outputs) -> Iterator[tuple[RequestHandle, int, list[int]]]:
    """Yield each row as (handle, index of the first token, tokens); no row is without tokens."""
    counts = [1] * len(outputs.handles) if outputs.counts is None else outputs.counts.tolist()
    token_ids = iter(outputs.token_ids.tolist())
    for handle, first_index, count in zip(
        outputs.handles.tolist(), outputs.first_indexes.tolist(), counts, strict=True
    ):
        row = list(islice(token_ids, count))
        assert len(row) == count > 0, "a row without its tokens"
        yield RequestHandle(handle), first_index, row
    assert not list(token_ids), "tokens without a row"


Scores = tuple[int, tuple[int, ...], tuple[tuple[int, float], ...]]
"""Log-probabilities at one position: its number, the ranks of its token and of the requested ones, and (token, value)
entries, its own first."""


def scores_of(logprobs: Logprobs) -> list[Scores]:
    """Log-probabilities per position, numbered as in `indexes`."""
    return [
        (one.index, tuple(one.ranks), tuple(zip(one.token_ids.tolist(), one.values.tolist(), strict=True)))
        for one in logprobs.positions()
    ]


def scores_by_row(outputs: Outputs) -> dict[RequestHandle, list[Scores]]:
    """The log-probabilities of each row's tokens by handle, numbered by position in the completion."""
    if outputs.logprobs is None:
        return {}
    tokens = [
        (handle, first_index + offset)
        for handle, first_index, token_ids in rows_of(outputs)
        for offset in range(len(token_ids))
    ]
    by_row: dict[RequestHandle, list[Scores]] = {}
    for index, ranks, entries in scores_of(outputs.logprobs):
        handle, position = tokens[index]
        by_row.setdefault(handle, []).append((position, ranks, entries))
    return by_row


def expected_scores(
    tokens: list[int], num_top: int, *, start: int, offset: int = 0, requested: tuple[int, ...] = ()
) -> list[Scores]:
    """The expected log-probabilities of tokens from position `start` on, numbered from `offset`."""
    logprobs = [logprobs_of(token_id, position, num_top, requested) for position, token_id in enumerate(tokens, start)]
    return [(number, one.ranks, one.entries) for number, one in enumerate(logprobs, offset)]


@dataclass
class ChoiceOutput:
    """The output of one choice; `scores` are those of its tokens, `prompt_scores` those of its prompt."""

    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    prompt_scores: list[Scores] = field(default_factory=list)
    num_cached_tokens: int | None = None
    queue_s: float | None = None
    end: RequestEnd | None = None


class EngineDriver:
    """An engine with all ranks attached, whose steps run when the test calls `step`. The test sets `now`.

    As time passes, the engine is woken when it asks to be, and all ranks but `silent_ranks` send heartbeats with their
    `progress`; those of `leaving_domains` say that they are leaving. Drafts are always right for the first choice of a
    request submitted here, unless `oracle` is fallible. `poison`: see `WorkerModel`. Domains pass their controls at
    once, unless `passes_controls` is False; their dummies are then steps as others.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        context_length: int = 512,
        policy: SchedulerPolicy | None = None,
        depth: int = 1,
        enable_prefix_caching: bool = True,
        shares_between_tenants: bool = False,
        attach: bool = True,
        num_draft_tokens: int = 0,
        oracle: Oracle | None = None,
        topology: CellTopology | None = None,
        poison: Mapping[int, int] | None = None,
        num_checkpoint_slots: int | None = None,
        state_checkpoint_interval: int = 0,
    ) -> None:
        self.now = 0.0
        self.oracle = oracle or Oracle()
        self.silent_ranks: set[int] = set()
        self.leaving_domains: set[int] = set()
        self.progress: dict[int, int] = {}
        self._num_draft_tokens = num_draft_tokens
        self._poison = poison
        policy = replace(policy or SchedulerPolicy(), max_steps_in_flight=depth)
        self.topology = topology or CellTopology()
        cache = CacheSettings(
            block_size,
            enable_prefix_caching,
            shares_between_tenants,
            state_checkpoint_interval=state_checkpoint_interval,
        )
        self.engine = Engine(policy, cache, self.topology)
        self._facts = worker_facts(
            num_blocks=num_blocks,
            context_length=context_length,
            num_draft_tokens=num_draft_tokens,
            num_checkpoint_slots=num_checkpoint_slots,
        )
        self.limits = BatchLimits(
            policy.max_num_seqs,
            StepBudget.of(policy, self._facts).max_tokens,
            block_size,
            num_blocks,
            context_length,
            VOCABULARY,
            num_checkpoint_slots,
        )
        ranks = range(self.topology.dp_size)
        self.workers = {rank: self._make_worker() for rank in ranks}
        self.sent_to: dict[int, list[Step]] = {rank: [] for rank in ranks}
        self.epochs: dict[int, int] = {}
        self.delivered: list[Deliver] = []
        self.choices: dict[tuple[int, int], ChoiceOutput] = {}
        self.actions: list[Action] = []
        self.num_beats = 0
        self._num_events = 0
        self.passes_controls = True
        if attach:
            for domain in range(self.topology.num_domains):
                self.attach(domain)

    @property
    def worker(self) -> WorkerModel:
        """The worker of the only rank."""
        (worker,) = self.workers.values()
        return worker

    @property
    def sent(self) -> list[Step]:
        """The steps in flight of the only rank."""
        (sent,) = self.sent_to.values()
        return sent

    def attach(self, domain: int = 0, **changes: object) -> list[Action]:
        """Attach a domain under the next epoch; `changes` override its facts."""
        epoch = max(self.epochs.values(), default=0) + 1
        facts = replace(self._facts, epoch=epoch, **changes)  # type: ignore[arg-type]
        return self.on_event(attached(facts, domain, num_ranks=len(self.topology.ranks_of(domain))))

    def lose(self, domain: int = 0) -> list[Action]:
        """Break the link to an attached domain."""
        return self.on_event(DomainLost(domain, self.epochs[domain]))

    def leave(self, domain: int = 0) -> list[Action]:
        """Let an attached domain's workers say that they are leaving, from now on."""
        self.leaving_domains.add(domain)
        return self.on_event(self._heartbeat(self.topology.ranks_of(domain)[0], domain, self.epochs[domain]))

    def on_event(self, event: Event) -> list[Action]:
        """Pass an event to the engine, process its actions, and check its integrity: in a long run not at every event.

        Returns:
            The engine's actions for this event, without heartbeats and without those for time that passed before.
        """
        self._let_time_pass()
        if isinstance(event, DomainAttached):
            # The workers start empty, and steps in transit to them are lost.
            self.epochs[event.domain] = event.facts[0].epoch
            self.leaving_domains.discard(event.domain)
            for rank in self.topology.ranks_of(event.domain):
                self.workers[rank] = self._make_worker()
                self.sent_to[rank].clear()
        elif isinstance(event, DomainLost):
            self._forget_epoch(event.domain, event.epoch)
        actions = self._hand_over(event, self.now)
        while self.passes_controls and (controlled := self._next_controlled()) is not None:
            result = self.workers[controlled].run(self.sent_to[controlled].pop(0))
            actions += self._hand_over(StepReturned(controlled, result), self.now)
        self.actions += actions
        self._num_events += 1
        if self._num_events <= _NUM_CHECKED or not self._num_events % _EVENTS_PER_CHECK:
            self.engine.check_integrity()
        return actions

    def _next_controlled(self) -> DpRank | None:
        """A rank that is to compute a dummy of a control."""
        domains = (domain for domain in self.engine._cell.domains if domain.control is not None and not domain.is_held)
        ranks = (rank.number for domain in domains for rank in domain.ranks if self.sent_to[rank.number])
        return next((rank for rank in ranks if self.sent_to[rank][0].batch.is_dummy), None)

    def _let_time_pass(self) -> None:
        """Wake the engine at each time it asked for up to `now`, after heartbeats of the ranks."""
        while (wakeup := self.engine.next_wakeup()) <= self.now:
            time = max(wakeup, 0.0)
            # A domain may be lost meanwhile; heartbeats of its epoch still arrive.
            for domain, epoch in list(self.epochs.items()):
                for rank in self.topology.ranks_of(domain):
                    if rank not in self.silent_ranks:
                        self.actions += self._hand_over(self._heartbeat(rank, domain, epoch), time)
            self.actions += self._hand_over(TimePassed(), time)

    def _heartbeat(self, rank: DpRank, domain: int, epoch: int) -> RankHeartbeat:
        return RankHeartbeat(rank, epoch, self.progress.get(rank, 0), domain in self.leaving_domains)

    def _hand_over(self, event: Event, now: float) -> list[Action]:
        actions = self.engine.on_event(event, now)
        beats = [action for action in actions if isinstance(action, Beat)]
        self.num_beats += len(beats)
        for action in actions:
            if isinstance(action, SendStep):
                self.sent_to[action.rank].append(action.step)
            elif isinstance(action, DropDomain | ReleaseDomain):
                self._forget_epoch(action.domain, action.epoch)
            elif isinstance(action, Deliver):
                self.delivered.append(action)
                self._take(action)
        return [action for action in actions if action not in beats]

    def _forget_epoch(self, domain: int, epoch: int) -> None:
        if self.epochs.get(domain) == epoch:
            del self.epochs[domain]
            for rank in self.topology.ranks_of(domain):
                self.sent_to[rank].clear()

    def submit(
        self,
        handle: int,
        prompt: list[int],
        *,
        client: int = 1,
        request_id: str | None = None,
        priority: Priority = Priority.NORMAL,
        cache_salt: bytes = b"",
        n: int = 1,
        is_exact: bool = False,
        tenant: Tenant = DEFAULT_TENANT,
        **params: object,
    ) -> list[Action]:
        """Submit one request; `params` as in SamplingParams, with at most 8 tokens by default."""
        sampling = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params})  # type: ignore[arg-type]
        if self._num_draft_tokens:
            self.oracle.learn_answer(prompt, expected_completion(prompt, sampling.seed, sampling.max_tokens))
        submission = Submission(
            RequestHandle(handle),
            request_id or f"{client}-{handle}",
            token_bytes(prompt),
            sampling,
            priority=priority,
            cache_salt=cache_salt,
            n=n,
            is_exact=is_exact,
            tenant=tenant,
            needs=frozenset() if sampling.options is None else find_needs(encode_options(sampling.options)),
        )
        return self.on_event(ClientMessage(client, [submission]))

    def resume(self, client: int, submission: Submission, output: list[int]) -> list[Action]:
        """Submit a later attempt of a request whose client already has `output`."""
        self.choices[client, submission.handle] = ChoiceOutput(list(output), num_cached_tokens=0 if output else None)
        return self.on_event(ClientMessage(client, [submission]))

    def abort(self, *handles: int) -> list[Action]:
        """Abort requests of client 1; see `on_event`."""
        return self.on_event(ClientMessage(1, aborts=[RequestHandle(handle) for handle in handles]))

    def stop_at(self, handle: int, num_tokens: int) -> list[Action]:
        """Stop a choice of client 1 at this many completion tokens; see `on_event`."""
        return self.on_event(ClientMessage(1, stop_ats=[(RequestHandle(handle), num_tokens)]))

    def step(self, rank: int = 0) -> StepResult:
        """Run a rank's oldest step in flight and return its result to the engine one second later.

        Raises:
            PoisonedError: The step killed the worker; the engine is not notified.
        """
        step = self.sent_to[rank].pop(0)
        worker = self.workers[rank]
        result = worker.run(step)
        slots = dict(enumerate(step.batch.row_slots.tolist()))
        assert worker.last_rows.items() <= slots.items(), "scheduler and worker derive different rows"
        self.now += 1.0
        self.return_result(result, rank)
        return result

    def return_result(self, result: StepResult, rank: int = 0) -> list[Action]:
        """Return a step's result to the engine; see `on_event`."""
        return self.on_event(StepReturned(DpRank(rank), result))

    def run(self) -> None:
        """Run steps, one of each rank in turn, until none is left."""
        while any(self.sent_to.values()):
            for rank, sent in self.sent_to.items():
                if sent:
                    self.step(rank)
        self.engine.check_integrity()

    def _make_worker(self) -> WorkerModel:
        return WorkerModel(
            self.limits,
            proposer=self.oracle,
            num_draft_tokens=self._num_draft_tokens,
            poison=self._poison,
        )

    def _take(self, action: Deliver) -> None:
        outputs = action.outputs
        for start in outputs.starts:
            choice = self.choices.setdefault((action.client, start.handle), ChoiceOutput())
            assert (choice.num_cached_tokens, choice.tokens) == (None, []), "a choice starts twice, or late"
            choice.num_cached_tokens, choice.queue_s = start.num_cached_tokens, start.queue_s
        for handle, logprobs in outputs.prompt_logprobs:
            self.choices.setdefault((action.client, handle), ChoiceOutput()).prompt_scores += scores_of(logprobs)
        scores = scores_by_row(outputs)
        for handle, first_index, token_ids in rows_of(outputs):
            choice = self.choices.setdefault((action.client, handle), ChoiceOutput())
            assert choice.end is None, "a token after the end"
            assert first_index == len(choice.tokens), "a gap or a repeat"
            assert choice.num_cached_tokens is not None, "a token before the start"
            choice.tokens += token_ids
            choice.scores += scores.pop(handle, [])
        assert not scores, "log-probabilities without a token"
        for end in outputs.ends:
            choice = self.choices.setdefault((action.client, end.handle), ChoiceOutput())
            assert choice.end is None, "two ends"
            choice.end = end

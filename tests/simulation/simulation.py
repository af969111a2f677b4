"""A whole cell under one seed: a scheduler, its workers, replicas and their clients, and the faults that strike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from shared.tenants.tenant import DEFAULT_TENANT
from tests.simulation.faults import KILLS, SLOW_KILLS, Fault, FaultMix
from tests.simulation.network.clock import Clock
from tests.simulation.network.exchange import MAX_CLOSE_S, MAX_UNREAD_S, Ends, ExchangeStream
from tests.simulation.parts.direct_calls import DirectClient
from tests.simulation.parts.discovery import SimulatedDiscovery
from tests.simulation.parts.domain import SimulatedDomain
from tests.simulation.parts.replica import ChoiceRecord, Replica
from tests.simulation.parts.scheduler import SchedulerProcess
from tests.simulation.tenants import TenantDraw
from tests.simulation.watches.stop_watch import StopWatch
from tests.simulation.watches.watch import EngineWatch
from tests.simulation.workload import CellSettings, RequestPlan, Workload
from tests.support.scheduler.cell_model import FallibleOracle
from tests.support.scheduler.engine_driver import expected_scores

MIN_REQUESTS = 30
MIN_EVENTS = 1000
# A run with more events than this is livelocked; the longest of common seeds have 10,000.
_MAX_EVENTS = 100_000
_RESTART_S = (0.1, 3.0)
# The fault that may end a request with an error, by the error's reason.
_CAUSES = {
    "NUMERIC_ERROR": Fault.NOT_FINITE,
    "INVALID_REQUEST": Fault.GRAMMAR_FAILURE,
    "DEADLINE_PASSED": Fault.DEADLINE,
    "ABORTED_BY_CALL": Fault.ABORT_CALL,
    "POISON_REQUEST": Fault.POISON,
    "QUEUE_FULL": Fault.QUEUE_FULL,
    "TENANT_LIMIT": Fault.QUEUE_FULL,
    "REPLICA_GONE": Fault.REPLICA_GONE,
    "CLIENT_TOO_SLOW": Fault.SLOW_READER,
    "DUPLICATE_REQUEST": Fault.SAME_ID,
    "EXACT_UNAVAILABLE": Fault.EXACT,
    "MODEL_CHANGED": Fault.MODEL_CHANGE,
    "DRAINING": Fault.PLANNED_STOP,
    "WORKERS_LOST": Fault.WORKERS_GONE,
}
# With these a message may arrive although an earlier one on its stream has not.
_GAPS = (Fault.MESSAGE_LOST, Fault.MESSAGE_REORDERED, Fault.MESSAGE_LATE)
# Deaths of schedulers that a control may outlive by chance.
_BLAMING_ENDS = (
    Fault.SCHEDULER_RESTART,
    Fault.SCHEDULER_STOP,
    Fault.MODEL_CHANGE,
    Fault.PLANNED_STOP,
    Fault.STOPPED_DEATH,
)
_SCHEDULER_ENDS = (*_BLAMING_ENDS, Fault.SCHEDULER_FLAP)
# Until the last domain is restarted with another model.
_ROLLOUTS_S = (0.1, 1.0, 20.0)
# Schedulers that die one after the other, each at the latest after this time, which is shorter than a control. Most die
# sooner, before a request that was just submitted has got a token.
_NUM_FLAPS = (7, 9)
_FLAP_S = (0.3, 1.9)
_FLAP_AFTER_SUBMIT_S = (0.0, 0.005)
_ZOMBIE_S = (0.0, 3.0)
# For how long all workers are gone, by how long requests wait for them.
_ABSENCES = (0.5, 0.9, 1.5, 4.0)
_DRAINED_S = (0.0, 5.0)
# The processes of a cell are asked to end within one of these times, shorter than `SAME_STOP_S`: messages take time.
_SAME_STOPS_S = (0.05, 0.5, 1.8)
# So many steps are slow from then on that many answers take longer than a stop does.
_SHARE_OF_SLOW_STEPS = 0.9
# A scheduler dies up to this long after all processes were asked to end.
_DEATH_S = 1.0
# In a run about that, so many answers are under way then, and it is as likely as this.
_MIN_STOPPED = 3
_STOP_RATES = {Fault.PLANNED_STOP: 0.3, Fault.STOPPED_DEATH: 0.9}
# From the end of the drain times until all processes must have ended.
_STOP_MARGIN_S = 15.0
_SCHEDULER_STOPS_S = (1.0, 5.0, 15.0, 60.0)
# A replica closes its stream to a scheduler that is silent for this long.
_SCHEDULER_SILENCE_S = 5.0
# After this long every process has noticed that a worker is gone.
_KILL_GAP_S = 3.0
# The most time between a deadline and its error at the client: the stream may be lost and reopened in between.
_GRACE_S = 3.0


class SimulationError(AssertionError):
    """A violation found under a seed, with the command that reproduces it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What happened in one run without violations."""

    seed: int
    dp_size: int
    is_coupled: bool
    spares_suspects: bool
    """Whether faults that kill workers spare suspects."""
    num_events: int
    num_requests: int
    num_steps: int
    """Steps of all ranks."""
    num_dummy_steps: int
    """The dummies among them."""
    num_attaches: int
    """Streams accepted by all ranks."""
    num_deaths: int
    """Deaths of failure domains."""
    num_suspects: int
    """The most requests accused by one death."""
    num_lost_epochs: int
    num_schedulers: int
    num_controls: int
    """Schedulers to which a replica submitted nothing, before it blamed a request."""
    num_preemptions: int
    num_accepted_tokens: int
    """Accepted draft tokens."""
    max_completion_tokens: int
    """Completion tokens of the longest answer with a finish."""
    ends: Counter[str]
    """How choices ended: by finish reason or error."""
    faults: Counter[Fault]


def simulate(seed: int, kinds: Collection[Fault] | None = None) -> Report:
    """Run one seed.

    Args:
        seed: The source of all randomness.
        kinds: The kinds of faults; None means a random subset of all.

    Raises:
        SimulationError: A check failed.
    """
    simulation = Simulation(seed, kinds)
    try:
        return simulation.run()
    except Exception as error:
        names = "" if kinds is None else " FAULTS=" + (",".join(sorted(fault.value for fault in kinds)) or "none")
        raise SimulationError(
            f"seed {seed}, event {simulation.clock.num_events}: {type(error).__name__}: {error}\n"
            f"again: make simulate SEEDS=1 FIRST_SEED={seed}{names}"
        ) from error
    finally:
        simulation.close()


class Simulation:
    """One run of a cell."""

    def __init__(self, seed: int, kinds: Collection[Fault] | None = None) -> None:
        self.clock = Clock(self._has_work)
        self.seed = seed
        self._rng = Random(seed)
        self._mix = FaultMix.draw(self._rng, kinds)
        self._mix.may_kill = self._may_kill
        self._is_about_stops = self._mix.is_about_stops
        if self._is_about_stops:
            self._mix.rates |= _STOP_RATES
        self._last_kill_at = -math.inf
        self._kinds = frozenset(self._mix.rates)
        self._settings = CellSettings.draw(self._rng, self._mix)
        oracle = FallibleOracle(self._rng, share_right=self._settings.share_right)
        self._workload = Workload(self._rng, self._mix, oracle, self._settings, TenantDraw(seed, self._kinds))
        self._plans: list[RequestPlan] = []
        self._records: list[ChoiceRecord] = []
        self._num_live = 0
        self._is_paused = False
        self._is_stop_planned = False
        self._stopping_replicas: list[Replica] = []
        # A scheduler that dies soon after its start, and how many more will.
        self._flapping: SchedulerProcess | None = None
        self._num_flaps_left = 0
        self._num_flaps = 0
        topology = self._settings.topology
        self._domains = [
            SimulatedDomain(topology.ranks_of(domain), self._settings, self.clock, self._rng, self._mix, oracle=oracle)
            for domain in range(topology.num_domains)
        ]
        self._discovery = None
        if topology.is_dynamic:
            # Sometimes there are more endpoints than places, or fewer.
            num_endpoints = max(1, topology.dp_size + self._rng.choice([-1, 0, 0, 1]))
            self._discovery = SimulatedDiscovery(num_endpoints, self.clock, self._rng)
        self._num_schedulers = 0
        # Schedulers that were replaced; some of them may not have noticed yet.
        self._old_schedulers: list[SchedulerProcess] = []
        self._scheduler: SchedulerProcess | None = None
        self._start_scheduler()
        self._dead_replicas: list[Replica] = []
        self._replicas = [self._make_replica() for _ in range(self._rng.randint(1, 3))]
        self.clock.after(0.0, self._arrive)

    def run(self) -> Report:
        """Run all events and check every client's answer."""
        while self.clock.run_next():
            assert self.clock.num_events < _MAX_EVENTS, "the run does not come to an end"
        assert self._scheduler is not None
        self._scheduler.check_end()
        for record in self._records:
            self._check_record(record)
        schedulers = [*self._old_schedulers, self._scheduler]
        counters = [scheduler.engine.state().counters for scheduler in schedulers]
        return Report(
            self.seed,
            self._settings.topology.dp_size,
            self._settings.topology.is_coupled,
            self._mix.spares_suspects,
            self.clock.num_events,
            len(self._plans),
            sum(scheduler.watch.num_steps for scheduler in schedulers),
            sum(scheduler.watch.num_dummy_steps for scheduler in schedulers),
            sum(worker.num_attaches for domain in self._domains for worker in domain.workers.values()),
            sum(domain.num_deaths for domain in self._domains),
            max((scheduler.watch.suspects.max_accused for scheduler in schedulers), default=0),
            sum(one.num_lost_epochs for one in counters),
            len(schedulers),
            sum(replica.num_controls for replica in (*self._dead_replicas, *self._replicas)),
            sum(one.num_preemptions for one in counters),
            sum(one.num_accepted_tokens for one in counters),
            max(record.num_completion_tokens for record in self._records),
            Counter(_describe_end(record) for record in self._records),
            self._mix.counts,
        )

    def close(self) -> None:
        """Release everything without another event for any engine."""
        for scheduler in [*self._old_schedulers, self._scheduler]:
            if scheduler is not None:
                scheduler.close()
        for domain in self._domains:
            domain.close()

    def _has_work(self) -> bool:
        """Whether a scheduler has an unfinished request or a step in flight."""
        schedulers = [*self._old_schedulers, self._scheduler]
        return any(one is not None and one.is_alive and one.watch.has_work for one in schedulers)

    def _arrive(self) -> None:
        """Let a request arrive, with faults that strike at arrivals; after the last request faults cease."""
        if self._num_live >= self._settings.max_live_requests:
            self._is_paused = True
            return
        if len(self._plans) >= MIN_REQUESTS and self.clock.num_events >= MIN_EVENTS:
            self._mix.rates.clear()
            if self._is_stop_planned:
                self._mix.rates[Fault.WORKER_SLOW] = _SHARE_OF_SLOW_STEPS
            return
        plan = self._workload.draw()
        if all(replica.is_serving(plan.request_id) for replica in self._replicas):
            plan = replace(plan, request_id=plan.own_id)
        self._plans.append(plan)
        self._num_live += plan.n
        self._records += self._serve(plan)
        if plan.abort_call_after_s is not None:
            self.clock.after(plan.abort_call_after_s, lambda: self._abort_request(plan))
        self._disturb()
        self.clock.after(self._rng.expovariate(1.0 / self._settings.mean_gap_s), self._arrive)

    def _serve(self, plan: RequestPlan) -> list[ChoiceRecord]:
        """Serve a request through a replica, or through a direct call if it needs no text.

        Requests that share an id are served by different replicas.
        """
        is_plain = plan.text_stop_token is None and not plan.options.grammar and plan.request_id == plan.own_id
        # Direct calls have no tenant.
        if not is_plain or plan.tenant is not DEFAULT_TENANT or not self._strikes(Fault.DIRECT_CALL):
            replicas = [replica for replica in self._replicas if not replica.is_serving(plan.request_id)]
            return self._rng.choice(replicas).serve(plan)
        return DirectClient(
            plan, self.clock, self._rng, self._mix, find_server=lambda: self._scheduler, on_over=self._on_over
        ).records

    def _disturb(self) -> None:
        if self._strikes(Fault.SCHEDULER_RESTART):
            self._end_scheduler()
        if not self._num_flaps_left and self._strikes(Fault.SCHEDULER_FLAP):
            self._num_flaps_left = self._rng.randint(*_NUM_FLAPS)
            self._flap(self._scheduler)
        if self._strikes(Fault.SCHEDULER_STOP):
            self._stop_scheduler()
        if self._strikes(Fault.MODEL_CHANGE):
            self._change_model()
        if self._strikes(Fault.REPLICA_GONE):
            number = self._rng.randrange(len(self._replicas))
            self._replicas[number].die()
            self._dead_replicas.append(self._replicas[number])
            self._replicas[number] = self._make_replica()
        if self._scheduler is not None and self._may_stop() and self._strikes(Fault.PLANNED_STOP):
            self._stop_cell(self._scheduler)
        if self._strikes(Fault.RANK_DRAIN):
            self._drain_rank()
        if self._strikes(Fault.WORKERS_GONE):
            bound_s = self._settings.policy.workers_lost_s
            assert bound_s is not None
            duration_s = bound_s * self._rng.choice(_ABSENCES)
            for domain in self._domains:
                domain.vanish(duration_s)
        if self._discovery is not None and self._strikes(Fault.ENDPOINT_GONE):
            self._discovery.disturb()
        if self._strikes(Fault.CACHE_FLUSH) and self._scheduler is not None:
            self._scheduler.flush_prefix_cache()

    def _may_stop(self) -> bool:
        """Whether the cell may be asked to end now; in a run about that, with answers that outlast its scheduler."""
        if self._is_stop_planned or not self._is_about_stops:
            return not self._is_stop_planned
        is_served = all(replica.is_served for replica in self._replicas)
        return is_served and sum(replica.num_requests for replica in self._replicas) >= _MIN_STOPPED

    def _stop_cell(self, scheduler: SchedulerProcess) -> None:
        """Ask a replica, or all, the scheduler and the workers to end together; all are started anew."""
        self._is_stop_planned = True
        drain_s, is_deadly = self._settings.policy.drain_s, self._strikes(Fault.STOPPED_DEATH)
        stopped = list(self._replicas) if is_deadly else [self._rng.choice(self._replicas)]
        watch = StopWatch(
            self.clock, self._mix, drain_s=drain_s, replicas=stopped, scheduler=scheduler, domains=self._domains
        )
        on_lost = _ignore if is_deadly else watch.check_stay_over
        asks = [
            *(partial(replica.drain, drain_s, on_lost) for replica in stopped),
            partial(scheduler.ask, drain_s, watch.check_stay_over),
            *(partial(domain.ask, watch.check_stay_over) for domain in self._domains),
        ]
        same_stop_s = self._rng.choice(_SAME_STOPS_S)
        for ask in asks:
            self.clock.after(self._rng.uniform(0.0, same_stop_s), ask)
        if is_deadly:
            self.clock.after(self._rng.uniform(0.0, same_stop_s + _DEATH_S), partial(self._die_in_stop, scheduler))
            # Those that follow begin when the stop is over.
            self._stopping_replicas = stopped
        self._mix.rates[Fault.WORKER_SLOW] = _SHARE_OF_SLOW_STEPS
        self.clock.after(same_stop_s + drain_s + _STOP_MARGIN_S, watch.check_end)
        self._dead_replicas += stopped
        self._replicas = [self._make_replica() if replica in stopped else replica for replica in self._replicas]

    def _die_in_stop(self, scheduler: SchedulerProcess) -> None:
        """Kill a scheduler that was asked to end, unless it has ended."""
        if scheduler is self._scheduler:
            self._replace_scheduler()
            scheduler.kill()

    def _change_model(self) -> None:
        """Replace the model on disk, and restart the workers one domain after the other."""
        model = self._settings.model
        model.weights_digest = f"weights {self._mix.counts[Fault.MODEL_CHANGE] + 1}"
        rollout_s = self._rng.choice(_ROLLOUTS_S)
        for domain in self._domains:
            self.clock.after(self._rng.uniform(0.0, rollout_s), domain.restart)

    def _drain_rank(self) -> None:
        scheduler, rank = self._scheduler, self._rng.randrange(self._settings.topology.dp_size)
        # A place that is vacant cannot be drained.
        if scheduler is not None and self._discovery is None:
            scheduler.drain(rank)
            self.clock.after(self._rng.uniform(*_DRAINED_S), lambda: scheduler.undrain(rank))

    def _abort_request(self, plan: RequestPlan) -> None:
        if self._scheduler is not None:
            self._scheduler.abort_request(plan.key)

    def _start_scheduler(self) -> None:
        watch = EngineWatch(self._settings, self._plans)
        self._scheduler = SchedulerProcess(
            len(self._old_schedulers),
            self._settings,
            self.clock,
            self._rng,
            self._mix,
            domains=self._domains,
            discovery=self._discovery,
            watch=watch,
            on_exit=self._on_exit,
        )
        if self._num_flaps_left:
            self._num_flaps_left -= 1
            self._num_flaps += 1
            self._flapping = self._scheduler
            self.clock.after(self._rng.uniform(*_FLAP_S), partial(self._flap, self._scheduler))

    def _may_kill(self) -> bool:
        """Whether a fault may kill a worker now without striking a suspect; if True, records the kill."""
        scheduler = self._scheduler
        if scheduler is None or scheduler.watch.suspects or self.clock.now < self._last_kill_at + _KILL_GAP_S:
            return False
        self._last_kill_at = self.clock.now
        return True

    def _replace_scheduler(self) -> SchedulerProcess | None:
        """Plan a successor for the scheduler; returns the old one, None if there was none."""
        old, self._scheduler = self._scheduler, None
        if old is not None:
            self._old_schedulers.append(old)
            self.clock.after(self._rng.uniform(*_RESTART_S), self._start_scheduler)
        return old

    def _flap(self, scheduler: SchedulerProcess | None) -> None:
        """Kill a scheduler if it is still the cell's; the next ones will follow soon after their starts."""
        if scheduler is not None and scheduler is self._scheduler:
            self._replace_scheduler()
            scheduler.kill()

    def _end_scheduler(self) -> None:
        """Terminate or kill the scheduler, or cut it off from its replicas without its noticing."""
        old = self._replace_scheduler()
        if old is None:
            return
        if self._strikes(Fault.SCHEDULER_ZOMBIE):
            old.become_zombie()
            self.clock.after(self._rng.uniform(*_ZOMBIE_S) + _RESTART_S[1], old.kill)
        elif self._rng.random() < 0.5:
            old.terminate()
        else:
            old.kill()

    def _stop_scheduler(self) -> None:
        """Stop the scheduler for a while; if long enough, its replicas leave it, and it may be replaced."""
        old = self._scheduler
        if old is None or old.is_stopped:
            return
        duration_s = self._rng.choice(_SCHEDULER_STOPS_S)
        old.stop(duration_s)
        if duration_s <= _SCHEDULER_SILENCE_S:
            return
        self.clock.after(_SCHEDULER_SILENCE_S, old.lose_replicas)
        if self._rng.random() < 0.5:
            self.clock.after(_SCHEDULER_SILENCE_S, lambda: self._succeed(old))
            # A stopped scheduler that held no worker might otherwise wait for one forever.
            self.clock.after(duration_s + self._rng.uniform(*_ZOMBIE_S), old.kill)

    def _succeed(self, old: SchedulerProcess) -> None:
        if self._scheduler is old:
            self._replace_scheduler()

    def _on_exit(self, process: SchedulerProcess) -> None:
        assert any(self._mix.counts[fault] for fault in _SCHEDULER_ENDS), (
            "a scheduler exits although it was not replaced"
        )
        self._succeed(process)

    def _make_replica(self) -> Replica:
        return Replica(self.clock, self._rng, connect=self._connect, on_over=self._on_over)

    def _connect(self, replica: Replica) -> ExchangeStream | None:
        scheduler = self._scheduler
        is_early = replica not in self._stopping_replicas and any(one.is_alive for one in self._stopping_replicas)
        if is_early or scheduler is None or scheduler.is_stopped:
            return None
        ends = Ends(
            on_request=lambda payload: self._on_request(scheduler, stream, payload),
            on_response=lambda payload: replica.on_response(stream, payload),
            on_unread=lambda: scheduler.check_unread(stream),
            on_scheduler_notice=lambda: scheduler.disconnect(stream),
            on_replica_notice=lambda: replica.on_stream_lost(stream),
            is_answering=lambda: scheduler.is_alive and not scheduler.is_stopped,
        )
        stream = ExchangeStream(scheduler.instance_id, self.clock, self._rng, self._mix, ends=ends)
        scheduler.connect(stream)
        return stream

    def _on_request(self, scheduler: SchedulerProcess, stream: ExchangeStream, payload: bytes) -> None:
        scheduler.on_request(stream, payload)
        if scheduler is self._flapping:
            self.clock.after(self._rng.uniform(*_FLAP_AFTER_SUBMIT_S), partial(self._flap, scheduler))

    def _on_over(self, _: ChoiceRecord) -> None:
        self._num_live -= 1
        if self._is_paused:
            self._is_paused = False
            self.clock.after(self._rng.expovariate(1.0 / self._settings.mean_gap_s), self._arrive)

    def _strikes(self, fault: Fault) -> bool:
        return self._mix.strikes(fault, self._rng)

    def _may_be_aborted(self, plan: RequestPlan) -> bool:
        """Whether this request, or another one with its id, is aborted by a call."""
        return any(one.abort_call_after_s is not None for one in self._plans if one.key == plan.key)

    def _has_lost_workers(self) -> bool:
        return any(domain.num_deaths > domain.num_sick_deaths for domain in self._domains) or any(
            self._mix.counts[one] for one in (*KILLS, *SLOW_KILLS)
        )

    def _check_record(self, record: ChoiceRecord) -> None:
        """Check a client's answer against the answer of an undisturbed run."""
        plan, expected = record.plan, record.plan.by_text[record.choice]
        assert record.over_at is not None, f"{plan.request_id} was never answered"
        assert record.tokens == expected.tokens[: len(record.tokens)], f"{plan.request_id} got wrong tokens"
        # Several schedulers may be stopped one after the other, and a replica may not read.
        grace_s = _GRACE_S + _SCHEDULER_SILENCE_S * self._mix.counts[Fault.SCHEDULER_STOP]
        grace_s += (MAX_UNREAD_S + MAX_CLOSE_S) * self._mix.counts[Fault.REPLICA_STALL]
        is_late = record.deadline is not None and record.over_at > record.deadline + grace_s
        assert not is_late, f"{plan.request_id} outlived its deadline"
        assert len(record.weights_digests) <= 1, f"{plan.request_id} was continued with other weights"
        assert not record.tokens or record.num_cached_tokens is not None, "tokens without a start"
        _check_scores(record)
        if record.finish is not None:
            answer = (record.tokens, record.finish, record.num_completion_tokens)
            assert answer == (expected.tokens, expected.finish, len(expected.tokens)), f"{plan.request_id} ended early"
        elif record.error is not None:
            num_scheduler_ends = sum(self._mix.counts[one] for one in _SCHEDULER_ENDS)
            if record.error == "SCHEDULER_LOST":
                # The third dead control in a row, each after at least three deaths with a request.
                assert num_scheduler_ends + self._num_flaps >= 12, f"{plan.request_id} is given up too early"
                return
            max_in_flight = plan.tenant.max_in_flight
            if record.error == "INVALID_REQUEST" and max_in_flight is not None and plan.n > max_in_flight:
                return
            fault = _CAUSES[record.error]
            if fault is Fault.POISON and not plan.is_poison:
                # It was alone in two crashed steps, whatever the cause, or suspected after the deaths of schedulers
                # without a dead control.
                is_spared = self._mix.spares_suspects or not self._has_lost_workers()
                has_doubt = not any(self._mix.counts[one] for one in _BLAMING_ENDS)
                assert not (is_spared and has_doubt), f"{plan.request_id} is innocent"
                return
            assert fault in self._kinds, f"{plan.request_id} got {record.error} without a cause"
            assert fault is not Fault.DEADLINE or plan.patience_s is not None, "a deadline that the client did not set"
            is_refused = plan.is_exact and not self._settings.is_exact
            assert fault is not Fault.EXACT or is_refused, "exactness is refused although the ranks are exact"
            # The cell does not see text: it may report the grammar failure while the token with the stop is missing.
            has_gap = record.tokens != expected.tokens and any(self._mix.counts[one] for one in _GAPS)
            fails = (plan.by_cell[record.choice] if has_gap else expected).finish is None
            assert fault is not Fault.GRAMMAR_FAILURE or fails, "its grammar could be followed"
            assert fault is not Fault.ABORT_CALL or self._may_be_aborted(plan), "it was not aborted by a call"


def _ignore() -> None:
    pass


def _check_scores(record: ChoiceRecord) -> None:
    """Check that log-probabilities match the tokens and the prompt, each once and in order."""
    prompt, options = record.plan.prompt, record.plan.options
    num_top, scores = options.num_top, []
    if num_top is not None:
        scores = expected_scores(record.tokens, num_top, start=len(prompt), requested=options.logprob_token_ids)
    # Their indexes count from the start of each message, so they are not compared.
    assert [one[1:] for one in record.scores] == [one[1:] for one in scores], "wrong log-probabilities of tokens"
    num_top, scores = options.num_prompt_logprobs, []
    if num_top is not None and not record.choice:
        scores = expected_scores(prompt[1:], num_top, start=1, offset=1)
    num_sent = len(record.prompt_scores)
    assert record.prompt_scores == scores[:num_sent], "wrong log-probabilities of the prompt"
    assert num_sent == len(scores) or not record.tokens, (
        "a completion begins before all prompt log-probabilities were sent"
    )


def _describe_end(record: ChoiceRecord) -> str:
    if record.finish is not None:
        return record.finish.reason.value
    return record.error or "cancelled"

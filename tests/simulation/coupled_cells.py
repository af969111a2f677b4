"""Coupled ranks under our scheduler and under ATOM's rules, on the same arrivals: how often ranks run dummies.

Ranks are null workers: a step takes as long as its longest part by `duration_of_step_s`. Scheduling takes no time in
either cell.

Source of ATOM's rules: `DPEngineCoreProc.busy_loop` and `CoreManager` (atom/model_engine/engine_core.py,
engine_core_mgr.py).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import (
    Action,
    ClientMessage,
    Deliver,
    DomainAttached,
    Event,
    RankHeartbeat,
    SendStep,
    StepReturned,
    Submission,
    TimePassed,
)
from services.scheduler.core.batch.step import Step
from services.scheduler.core.policy import CacheSettings, CellTopology, SchedulerPolicy
from services.scheduler.core.worker_facts import WorkerFacts
from shared.ids import DpRank, RequestHandle
from shared.request.sampling_params import SamplingParams
from shared.step.step import StepResult
from tests.simulation.parts.worker import duration_of_step_s
from tests.support.scheduler.engine_driver import token_bytes

_VOCABULARY = 1000
_CONTEXT_LENGTH = 8192
_NUM_BLOCKS = 16384
_HEARTBEAT_S = 1.0
_NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and its arrival time."""

    time: float
    prompt: bytes
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive: `burst` at a time, `per_s` a second on average, `num_requests` in all.

    Prompts and completions have random lengths up to the given maxima. Prompts share `num_prefixes` prefixes of
    half the longest prompt; 0 means that they share none.
    """

    name: str
    num_requests: int
    per_s: float
    burst: int = 1
    max_prompt_tokens: int = 1024
    max_tokens: int = 256
    num_prefixes: int = 0

    def draw(self, seed: int) -> list[Arrival]:
        """Draw the arrivals of a seed, in order."""
        rng = Random(seed)
        half = self.max_prompt_tokens // 2
        prefixes = [_draw_tokens(rng, half) for _ in range(self.num_prefixes)]
        arrivals: list[Arrival] = []
        now = 0.0
        while len(arrivals) < self.num_requests:
            now += rng.expovariate(self.per_s / self.burst)
            for _ in range(self.burst):
                prefix = rng.choice(prefixes) if prefixes else []
                prompt = prefix + _draw_tokens(rng, rng.randint(1, self.max_prompt_tokens - len(prefix)))
                arrivals.append(Arrival(now, token_bytes(prompt), rng.randint(1, self.max_tokens)))
        return arrivals[: self.num_requests]


LOADS = (
    Load("light", num_requests=100, per_s=10.0),
    Load("steady", num_requests=240, per_s=60.0),
    Load("bursts of 8", num_requests=240, per_s=60.0, burst=8),
    Load("shared prefixes", num_requests=240, per_s=60.0, num_prefixes=6),
    Load("long prompts", num_requests=120, per_s=30.0, max_prompt_tokens=4096),
    Load("all at once", num_requests=240, per_s=1e6),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of serving a load."""

    num_rank_steps: int
    num_dummies: int
    num_tokens: int
    duration_s: float

    @property
    def dummy_share(self) -> float:
        """The share of all ranks' steps that were dummies."""
        return self.num_dummies / self.num_rank_steps

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second."""
        return self.num_tokens / self.duration_s


class _Core:
    """An engine with its ranks attached, its steps that have not run yet, and the number of tokens it delivered."""

    def __init__(self, policy: SchedulerPolicy, topology: CellTopology) -> None:
        self.engine = Engine(policy, CacheSettings(), topology)
        self.sent: list[deque[Step]] = [deque() for _ in range(topology.dp_size)]
        self.num_tokens = 0
        self._ranks = topology.ranks
        self._heard_at = 0.0
        facts = WorkerFacts(1, "digest", _CONTEXT_LENGTH, _VOCABULARY, (), _NUM_BLOCKS)
        for domain in range(topology.num_domains):
            self.on_event(DomainAttached(domain, (facts,) * len(topology.ranks_of(domain))), 0.0)

    def on_event(self, event: Event, now: float) -> None:
        """Pass an event to the engine, after the timers that are due before it."""
        self._pass_time(now)
        self._take(self.engine.on_event(event, now))

    def submit(self, arrivals: Iterable[tuple[int, Arrival]], now: float) -> None:
        """Submit requests; their numbers are their handles."""
        submissions = [
            Submission(
                RequestHandle(number),
                f"r{number}",
                arrival.prompt,
                SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True),
            )
            for number, arrival in arrivals
        ]
        if submissions:
            self.on_event(ClientMessage(1, submissions), now)

    def answer(self, rank: int, step: Step, now: float) -> None:
        """Return the result of a step that a rank has run."""
        tokens = np.zeros(len(step.batch.row_slots), np.int32)
        self.on_event(StepReturned(DpRank(rank), StepResult(step.epoch, step.step_id, tokens, _NO_ROWS)), now)

    def _pass_time(self, now: float) -> None:
        while now - self._heard_at > _HEARTBEAT_S:
            self._heard_at += _HEARTBEAT_S
            beats: list[Event] = [RankHeartbeat(rank, 1, 0) for rank in self._ranks]
            for event in [*beats, TimePassed()]:
                self._take(self.engine.on_event(event, self._heard_at))

    def _take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendStep(rank, step):
                    self.sent[rank].append(step)
                case Deliver(_, outputs):
                    self.num_tokens += len(outputs.token_ids)


def run_ours(arrivals: Sequence[Arrival], dp_size: int, policy: SchedulerPolicy) -> Outcome:
    """Serve the arrivals on coupled ranks under one scheduler."""
    core = _Core(policy, CellTopology(dp_size, is_coupled=True))
    coming = deque(enumerate(arrivals))
    now = 0.0
    num_steps = num_dummies = 0
    while coming or any(core.sent):
        if not any(core.sent):
            now = max(now, coming[0][1].time)
            core.submit(_take_until(coming, now), now)
            continue
        steps = [sent.popleft() for sent in core.sent]
        num_steps += 1
        num_dummies += sum(step.batch.is_dummy for step in steps)
        end = now + max(map(_duration_s, steps))
        while coming and coming[0][1].time < end:
            now = max(now, coming[0][1].time)
            core.submit(_take_until(coming, now), now)
        now = end
        for rank, step in enumerate(steps):
            core.answer(rank, step, now)
    return Outcome(num_steps * dp_size, num_dummies, core.num_tokens, now)


class AtomCell:
    """Coupled ranks with an engine core each, which get requests round robin and agree on every step.

    Before each step all cores exchange whether they have a prompt to compute. If any has, the cores without one run a
    dummy prefill, even if they have sequences to decode. If none has, the cores with nothing to decode run a dummy.
    When no core has an unfinished request, none runs a step.

    A core is our scheduler with one rank and one step in flight, so that only placement and the choice of steps differ.
    It receives arrivals, and the result of its last step, when it is about to step.
    """

    def __init__(self, arrivals: Sequence[Arrival], dp_size: int, policy: SchedulerPolicy) -> None:
        policy = replace(policy, max_steps_in_flight=1)
        self._cores = [_Core(policy, CellTopology()) for _ in range(dp_size)]
        self._coming = deque(enumerate(arrivals))
        self._queued: list[list[tuple[int, Arrival]]] = [[] for _ in range(dp_size)]
        # By core: the step that has run but whose result it has not processed, and the tokens its requests still lack.
        self._done: list[Step | None] = [None] * dp_size
        self._num_missing = [0] * dp_size
        self._now = 0.0

    def run(self) -> Outcome:
        """Serve all arrivals."""
        num_steps = num_dummies = 0
        while self._coming or any(self._num_missing):
            if not any(self._num_missing):
                self._now = max(self._now, self._coming[0][1].time)
            self._place()
            steps = self._step()
            num_steps += 1
            num_dummies += sum(step is None for step in steps)
            self._now += max(_duration_s(step) for step in steps if step is not None)
        for rank, core in enumerate(self._cores):
            self._take_result(rank, core)
        num_tokens = sum(core.num_tokens for core in self._cores)
        return Outcome(num_steps * len(self._cores), num_dummies, num_tokens, self._now)

    def _place(self) -> None:
        """Hand out the requests that have arrived, round robin."""
        for number, arrival in _take_until(self._coming, self._now):
            rank = number % len(self._cores)
            self._queued[rank].append((number, arrival))
            self._num_missing[rank] += arrival.max_tokens

    def _step(self) -> list[Step | None]:
        """Run one step on all cores; None means a dummy."""
        prefills = [self._has_prompt(rank) for rank in range(len(self._cores))]
        steps = [
            self._step_core(rank) if is_prefill or not any(prefills) else None
            for rank, is_prefill in enumerate(prefills)
        ]
        for rank, step in enumerate(steps):
            if step is not None:
                self._num_missing[rank] -= len(step.batch.row_slots)
        return steps

    def _has_prompt(self, rank: int) -> bool:
        core, done = self._cores[rank], self._done[rank]
        is_begun = done is not None and bool(done.batch.partial_slots)
        return bool(self._queued[rank]) or core.engine.state().num_waiting > 0 or is_begun

    def _step_core(self, rank: int) -> Step | None:
        core = self._cores[rank]
        queued, self._queued[rank] = self._queued[rank], []
        core.submit(queued, self._now)
        self._take_result(rank, core)
        (sent,) = core.sent
        self._done[rank] = sent.popleft() if sent else None
        return self._done[rank]

    def _take_result(self, rank: int, core: _Core) -> None:
        done, self._done[rank] = self._done[rank], None
        if done is not None:
            core.answer(0, done, self._now)


def run_atom(arrivals: Sequence[Arrival], dp_size: int, policy: SchedulerPolicy) -> Outcome:
    """Serve the arrivals on coupled ranks under ATOM's rules."""
    return AtomCell(arrivals, dp_size, policy).run()


def _take_until(coming: deque[tuple[int, Arrival]], now: float) -> list[tuple[int, Arrival]]:
    taken = list(itertools.takewhile(lambda item: item[1].time <= now, coming))
    for _ in taken:
        coming.popleft()
    return taken


def _duration_s(step: Step) -> float:
    chunks = [*step.batch.chunks, *(enter.chunk for enter in step.batch.enters)]
    return duration_of_step_s(sum(chunk.num_tokens for chunk in chunks))


def _draw_tokens(rng: Random, num_tokens: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(num_tokens)]

"""A model of schedulers that die again and again: which requests their tokenizers blame for it, and what that costs.

The tokenizers' own `SubmitSuspects` decide; clock, schedulers and requests are simulated. The scheduler lets one
replica at a time try its suspects, or, as one of an older release, each of them when it likes:
`python -m tests.simulation.scheduler_deaths` compares the two.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from random import Random

from services.tokenizer.exchange.submit_suspects import SubmitSuspects
from shared.ids import RequestHandle
from shared.network.heartbeat import HEARTBEAT_S

_TICK_S = 0.25
_BEAT_TICKS = round(HEARTBEAT_S / _TICK_S)
# Resubmissions are spread over this time.
_JITTER_S = 0.5
_RESTART_S = 1.0
# A run whose schedulers do not end to die is given up.
_MAX_DEATHS = 100
_NEVER_S = float("inf")
_TITLE = (
    "mean life of ten schedulers, first token, replicas, poisons: share of runs that blame an innocent, "
    "with trials side by side and one at a time"
)
# Those of the table.
_LIVES_S, _TOKENS_S, _COUNTS = (3.0, 6.0, 12.0), (1.0, 4.0, 9.0), (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is like."""

    first_token_s: float
    """From a request's submit to its token, up to a fifth less or more."""
    num_replicas: int = 1
    num_requests: int = 6
    """Requests of each replica; none ends during the run."""
    num_deaths: int = 10
    """Deaths of another cause than requests."""
    mean_life_s: float = 6.0
    """Mean seconds from ready to death of the schedulers that die so; exponential."""
    num_poisons: int = 0
    """Requests that kill the scheduler, each of another replica as far as there are enough."""
    kill_share: float = 0.5
    """A poison kills after this share of its time to the first token."""
    is_granted: bool = True
    """Whether the scheduler lets one replica at a time try its suspects."""
    num_dying_triers: int = 0
    """Replicas without a poison that end while they try suspects; a new one takes the place of each."""


@dataclass(slots=True)
class Outcome:
    """What became of one run."""

    num_innocents: int = 0
    num_guilty: int = 0
    num_deaths: int = 0
    is_hopeless: bool = False
    duration_s: float = 0.0
    """Until the last poison was found, or all deaths were over."""


@dataclass(slots=True)
class _Replica:
    suspects: SubmitSuspects
    handles: list[RequestHandle]
    poison: RequestHandle | None = None
    jitters: dict[RequestHandle, float] = field(default_factory=dict)
    tokens_at: dict[RequestHandle, float] = field(default_factory=dict)
    submitted: set[RequestHandle] = field(default_factory=set)


class Deaths:
    """One run."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan = plan
        self._rng = Random(seed)
        self._now = 0.0
        self._outcome = Outcome()
        self._num_trier_deaths_left = plan.num_dying_triers
        self._replicas = [self._make_replica() for _ in range(plan.num_replicas)]
        for number in range(plan.num_poisons):
            replica = self._replicas[number % plan.num_replicas]
            replica.poison = self._rng.choice(replica.handles)

    def run(self) -> Outcome:
        """Let schedulers die until nothing kills them any more."""
        num_others = self._plan.num_deaths
        while self._outcome.num_deaths < _MAX_DEATHS and not self._outcome.is_hopeless:
            has_poison = any(replica.poison is not None for replica in self._replicas)
            if not num_others and not has_poison:
                break
            num_others -= self._live(self._rng.expovariate(1 / self._plan.mean_life_s) if num_others else _NEVER_S)
        self._outcome.duration_s = self._now
        return self._outcome

    def _make_replica(self) -> _Replica:
        handles = [RequestHandle(1 + number) for number in range(self._plan.num_requests)]
        return _Replica(SubmitSuspects(self._rng.random), handles)

    def _live(self, life_s: float) -> bool:
        """One scheduler's life; returns whether it died of another cause than a request."""
        self._now += _RESTART_S
        ready_at = heard_at = self._now
        dies_at, is_killed = ready_at + life_s, False
        for replica in self._replicas:
            replica.suspects.begin_stream(ready_at, waits_for_trial=self._plan.is_granted)
            replica.submitted.clear()
            replica.tokens_at.clear()
            replica.jitters = {handle: ready_at + self._rng.uniform(0, _JITTER_S) for handle in replica.handles}
        tick = 0
        while self._now < dies_at:
            tick += 1
            self._now += _TICK_S
            if not tick % _BEAT_TICKS:
                heard_at = self._now
            for replica in self._replicas:
                if self._advance(replica, hears=not tick % _BEAT_TICKS):
                    killed_at = self._now + self._plan.kill_share * self._plan.first_token_s
                    dies_at, is_killed = min((dies_at, is_killed), (killed_at, True))
            if tick * _TICK_S > 600:
                raise AssertionError("a scheduler lives on although a poison was not tried")
        self._die(heard_at)
        return not is_killed

    def _advance(self, replica: _Replica, *, hears: bool) -> bool:
        """One tick of a replica; returns whether it submits a poison."""
        suspects, has_poison = replica.suspects, False
        suspects.close_old(self._now)
        if hears:
            if replica is next((other for other in self._replicas if other.suspects.is_trying), None):
                suspects.give_trial(self._now)
            suspects.note_alive(self._now)
        for handle in [handle for handle, at in replica.tokens_at.items() if self._now >= at]:
            del replica.tokens_at[handle]
            suspects.note_token(handle)
        for handle in replica.handles:
            is_due = handle not in replica.submitted and self._now >= replica.jitters[handle]
            if is_due and suspects.may_submit(handle):
                replica.submitted.add(handle)
                suspects.open(handle, self._now)
                if handle == replica.poison:
                    has_poison = True
                else:
                    takes_s = self._plan.first_token_s * self._rng.uniform(0.8, 1.2)
                    replica.tokens_at[handle] = self._now + takes_s
        return has_poison

    def _die(self, heard_at: float) -> None:
        self._outcome.num_deaths += 1
        for replica in self._replicas:
            guilty = replica.suspects.accuse(heard_at)
            self._outcome.is_hopeless |= replica.suspects.is_hopeless
            if guilty is None:
                continue
            if guilty == replica.poison:
                self._outcome.num_guilty += 1
                replica.poison = None
            else:
                self._outcome.num_innocents += 1
            replica.handles.remove(guilty)
            replica.suspects.close(guilty)
        if self._num_trier_deaths_left:
            for number, replica in enumerate(self._replicas):
                if replica.suspects.is_trying and replica.poison is None:
                    self._replicas[number] = self._make_replica()
                    self._num_trier_deaths_left -= 1
                    break


def share_that_blames(plan: Plan, num_runs: int, first_seed: int = 0) -> float:
    """The share of runs in which an innocent request is blamed."""
    seeds = range(first_seed, first_seed + num_runs)
    return sum(Deaths(plan, seed).run().num_innocents > 0 for seed in seeds) / num_runs


def main() -> None:
    """Print the shares of runs in which an innocent is blamed, as it is and with one trial at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    num_runs = parser.parse_args().runs
    sys.stdout.write(f"{_TITLE}\n")
    plans = [
        Plan(token_s, count, mean_life_s=life_s) for life_s in _LIVES_S for token_s in _TOKENS_S for count in _COUNTS
    ]
    plans += [
        Plan(token_s, count, num_deaths=0, num_poisons=num_poisons)
        for token_s in _TOKENS_S
        for count, num_poisons in ((1, 1), (4, 1), (4, 2))
    ]
    for plan in plans:
        shares = [share_that_blames(replace(plan, is_granted=is_granted), num_runs) for is_granted in (False, True)]
        life = f"{plan.mean_life_s:4.0f} s" if plan.num_deaths else "     -"
        facts = f"{life} {plan.first_token_s:4.0f} s {plan.num_replicas:3d} {plan.num_poisons:3d}"
        sys.stdout.write(f"{facts} {shares[0]:7.1%} {shares[1]:7.1%}\n")


if __name__ == "__main__":
    main()

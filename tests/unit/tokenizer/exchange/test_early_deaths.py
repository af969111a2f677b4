"""Deaths of schedulers at any moment, also before any token: whom they accuse, and that requests go on afterwards."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.exchange.submit_suspects import SUSPICION_S, SubmitSuspects
from shared.ids import RequestHandle
from shared.network.heartbeat import HEARTBEAT_S

SEEDS = st.integers(0, 2**32 - 1)
# Resubmissions are spread over this time.
JITTER_S = 0.5


class Lives:
    """One replica's requests, which get no token, on schedulers that live for a time each."""

    def __init__(self, rng: Random, num_requests: int) -> None:
        self.suspects = SubmitSuspects(rng.random)
        self._handles = [RequestHandle(1 + number) for number in range(num_requests)]
        self._rng = rng
        self._now = 0.0

    def live(self, life_s: float) -> RequestHandle | None:
        """One scheduler's life; returns the request that its death proves guilty."""
        ready_at = heard_at = self._now
        self.suspects.begin_stream(ready_at)
        num_beats = int(life_s / HEARTBEAT_S)
        beats = [ready_at + (1 + number) * HEARTBEAT_S for number in range(num_beats)]
        submits = [(ready_at + self._rng.uniform(0.0, JITTER_S), handle) for handle in self._handles]
        for at, handle in sorted([*submits, *((at, None) for at in beats)], key=lambda event: event[0]):
            if handle is None:
                heard_at = at
                self.suspects.note_alive(at)
            elif at < ready_at + life_s and self.suspects.may_submit(handle):
                self.suspects.open(handle, at)
        self._now = ready_at + life_s + 1.0
        return self.suspects.accuse(heard_at)


@given(SEEDS, st.integers(1, 50), st.floats(0.0, 5.7))
@settings(max_examples=200)
def test_schedulers_that_die_sooner_than_a_control_ends_condemn_no_request(
    seed: int, num_requests: int, shortest_s: float
) -> None:
    rng = Random(seed)
    # A replica last hears a scheduler up to a heartbeat before its death.
    longest_s = max(1.99, 2 * (shortest_s - HEARTBEAT_S))
    lives = Lives(rng, num_requests)
    for _ in range(500):
        assert lives.live(rng.uniform(min(shortest_s, longest_s), longest_s)) is None
        if lives.suspects.is_hopeless:
            break
    assert lives.suspects.is_hopeless


class Walk:
    """Random events, with what may be said of a request that is found guilty.

    Attributes:
        suspects: Those of the live requests.
        live: The requests that have not ended.
    """

    def __init__(self, rng: Random, num_requests: int) -> None:
        self.suspects = SubmitSuspects(rng.random)
        self.live = {RequestHandle(1 + number) for number in range(num_requests)}
        self._next = RequestHandle(1 + num_requests)
        self._rng = rng
        self._now = 0.0
        # Requests without a token on the current stream, by the time of their submit.
        self._open: dict[RequestHandle, float] = {}
        self._num_accusations: Counter[RequestHandle] = Counter()
        # Requests for which a control has lived.
        self._controlled: set[RequestHandle] = set()

    def step(self) -> None:
        """One random event."""
        self._now += self._rng.choice([0.0, 0.1, 3.0])
        event = self._rng.choice([self._submit, self._submit, self._submit, self._die, self._hear, self._arrive])
        if self._rng.random() < 0.1:
            event = self._rng.choice([self._token, self._end, self._lose_stream])
        event()
        self.check()

    def check(self) -> None:
        """Check that requests can make progress."""
        suspects, submittable = self.suspects, [one for one in self.live if self.suspects.may_submit(one)]
        assert suspects.is_trying == (suspects.num_suspects > 0)
        assert suspects.num_suspects <= len(self.live)
        assert suspects.is_trying or not suspects.is_controlling
        assert bool(submittable) == (not suspects.is_controlling) or not self.live
        assert suspects.is_trying or len(submittable) == len(self.live)

    def recover(self) -> None:
        """Have a scheduler that lives, on which every request gets a token."""
        self._lose_stream()
        for _ in range(2 * len(self.live) + 2):
            self._now += 60.0
            self.suspects.note_alive(self._now)
            for handle in [one for one in self.live if self.suspects.may_submit(one)]:
                self.suspects.open(handle, self._now)
                self.suspects.note_token(handle)

    def _submit(self) -> None:
        for handle in sorted(self.live - self._open.keys()):
            if self.suspects.may_submit(handle) and self._rng.random() < 0.7:
                self._open[handle] = self._now
                self.suspects.open(handle, self._now)

    def _die(self) -> None:
        is_control = self.suspects.is_controlling
        self._forget_old()
        guilty = self.suspects.accuse(self._now)
        if guilty is not None:
            assert not is_control
            assert self._open.keys() == {guilty}
            assert guilty in self._controlled
            assert self._num_accusations[guilty] >= 2
            self._open.clear()
            self._forget(guilty)
            self.live.remove(guilty)
            self.suspects.close(guilty)
        if is_control:
            assert not self._open
            self._num_accusations.clear()
            self._controlled.clear()
        self._num_accusations.update(self._open.keys())
        self._begin_stream()

    def _forget_old(self) -> None:
        """After a long time without a token a request is no longer suspected."""
        for handle in [one for one, since in self._open.items() if self._now >= since + SUSPICION_S]:
            self._forget(handle)

    def _hear(self) -> None:
        was_controlling = self.suspects.is_controlling
        self.suspects.note_alive(self._now)
        if was_controlling and not self.suspects.is_controlling:
            [accused] = [one for one in self.live if self.suspects.may_submit(one)]
            self._controlled.add(accused)

    def _arrive(self) -> None:
        self.live.add(self._next)
        self._next = RequestHandle(self._next + 1)

    def _token(self) -> None:
        if self._open:
            handle = self._rng.choice(sorted(self._open))
            self._forget(handle)
            self.suspects.note_token(handle)

    def _end(self) -> None:
        if self.live:
            handle = self._rng.choice(sorted(self.live))
            self._forget(handle)
            self.live.remove(handle)
            self.suspects.close(handle)

    def _lose_stream(self) -> None:
        self._begin_stream()

    def _begin_stream(self) -> None:
        self._open.clear()
        self.suspects.begin_stream(self._now)

    def _forget(self, handle: RequestHandle) -> None:
        self._open.pop(handle, None)
        self._controlled.discard(handle)
        del self._num_accusations[handle]


@given(SEEDS, st.integers(1, 12))
@settings(max_examples=300)
def test_whatever_happens_requests_make_progress_and_none_is_condemned_without_a_control_and_alone(
    seed: int, num_requests: int
) -> None:
    walk = Walk(Random(seed), num_requests)
    for _ in range(200):
        walk.step()
    walk.recover()
    assert not walk.suspects.is_trying
    assert not walk.suspects.is_hopeless

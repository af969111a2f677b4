"""Finding the request that kills the scheduler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.exchange.submit_suspects import SUSPICION_S, SubmitSuspects
from shared.ids import RequestHandle

SEEDS = st.integers(0, 2**32 - 1)


class Suspects(SubmitSuspects):
    """Suspects whose handles are plain numbers, and whose controls are the shortest unless told otherwise."""

    def __init__(self, draw: float = 0.0) -> None:
        super().__init__(lambda: draw)

    def may_submit(self, handle: int) -> bool:
        return super().may_submit(RequestHandle(handle))

    def open(self, handle: int, now: float) -> None:
        super().open(RequestHandle(handle), now)

    def close(self, handle: int) -> None:
        super().close(RequestHandle(handle))

    def note_token(self, handle: int) -> None:
        super().note_token(RequestHandle(handle))


def die(suspects: Suspects, handles: Iterable[int], now: float = 0.0) -> int | None:
    """Send requests to a scheduler that dies at once."""
    for handle in handles:
        suspects.open(handle, now)
    return suspects.accuse(now)


def live_through_control(suspects: Suspects) -> None:
    """The next scheduler lives without any request."""
    suspects.begin_stream(0.0)
    assert suspects.is_controlling
    suspects.note_alive(60.0)
    assert not suspects.is_controlling
    suspects.begin_stream(0.0)


def control_one(*, life_s: float = 0.0, draw: float = 0.0) -> Suspects:
    """Suspects of which one was alone in two deaths, each `life_s` after the scheduler was ready; the others wait."""
    suspects = Suspects(draw)
    for _ in range(2):
        die(suspects, [1, 2], life_s)
    for _ in range(2):
        assert die(suspects, [1], life_s) is None
    assert suspects.is_controlling
    suspects.begin_stream(100.0)
    return suspects


def tried(suspects: Suspects, handles: Iterable[int]) -> list[int]:
    """The requests that may be submitted."""
    return [handle for handle in handles if suspects.may_submit(handle)]


def test_one_death_makes_no_suspects() -> None:
    suspects = Suspects()
    assert die(suspects, range(4)) is None
    assert not suspects.is_trying
    assert tried(suspects, range(5)) == [0, 1, 2, 3, 4]


def test_half_of_the_requests_that_two_deaths_accuse_are_tried_alone() -> None:
    suspects = Suspects()
    die(suspects, range(6))
    die(suspects, [2, 3, 4, 5, 6])
    assert tried(suspects, range(10)) == [2, 3]


def test_a_token_clears_a_request() -> None:
    suspects = Suspects()
    die(suspects, [1, 2])
    suspects.open(1, 0.0)
    suspects.open(2, 0.0)
    suspects.close(1)
    suspects.accuse(0.0)
    assert tried(suspects, [1, 2, 3]) == [2]


def test_a_request_submitted_too_long_ago_is_not_accused() -> None:
    suspects = Suspects()
    for handle, since in ((1, 0.0), (2, 1.0)):
        suspects.open(handle, since)
    suspects.accuse(SUSPICION_S)
    die(suspects, [1, 2])
    assert tried(suspects, [1, 2]) == [2]


def test_a_stream_that_ends_without_a_death_accuses_no_request() -> None:
    suspects = Suspects()
    die(suspects, [1])
    suspects.open(1, 0.0)
    suspects.begin_stream(0.0)
    assert suspects.accuse(0.0) is None
    assert not suspects.is_trying


def test_when_the_first_half_has_its_tokens_the_other_half_is_tried() -> None:
    suspects = Suspects()
    for _ in range(2):
        die(suspects, range(8))
    assert suspects.take_change()
    assert tried(suspects, range(8)) == [0, 1, 2, 3]
    for handle in (3, 1, 0):
        suspects.close(handle)
    assert (suspects.take_change(), suspects.may_submit(4)) == (False, False)
    suspects.close(2)
    assert suspects.take_change()
    assert tried(suspects, range(8)) == [4, 5, 6, 7]


def test_a_group_that_kills_the_scheduler_is_halved() -> None:
    suspects = Suspects()
    for _ in range(2):
        die(suspects, range(8))
    assert die(suspects, [0, 1, 2, 3]) is None
    assert tried(suspects, range(8)) == [0, 1]


def test_when_all_suspects_have_their_tokens_no_request_waits() -> None:
    suspects = Suspects()
    for _ in range(2):
        die(suspects, range(3))
    for handle in range(3):
        suspects.close(handle)
    assert not suspects.is_trying
    assert suspects.take_change()
    assert tried(suspects, range(5)) == [0, 1, 2, 3, 4]


def test_a_request_that_is_the_only_suspect_of_two_deaths_and_kills_again_after_a_control_is_guilty() -> None:
    suspects = Suspects()
    for _ in range(2):
        die(suspects, [1, 2])
    for _ in range(2):
        assert die(suspects, [1]) is None
    assert tried(suspects, [1, 2, 3]) == []
    live_through_control(suspects)
    assert tried(suspects, [1, 2, 3]) == [1]
    assert die(suspects, [1]) == 1
    assert tried(suspects, [1, 2, 3]) == [2]
    suspects.close(1)
    suspects.close(2)
    assert tried(suspects, [2, 3]) == [2, 3]


def test_a_suspect_that_was_not_submitted_again_before_a_death_stays_one() -> None:
    suspects = Suspects()
    for _ in range(2):
        die(suspects, range(4))
    assert die(suspects, [1]) is None
    assert tried(suspects, range(4)) == [1]
    assert suspects.num_suspects == 4
    suspects.close(1)
    assert tried(suspects, range(4)) == [0]


def test_the_only_request_that_two_deaths_accuse_is_tried_once_more() -> None:
    suspects = Suspects()
    die(suspects, [1, 2])
    assert die(suspects, [1, 3]) is None
    assert tried(suspects, [1, 2, 3]) == [1]
    assert die(suspects, [1]) is None
    live_through_control(suspects)
    assert die(suspects, [1]) == 1


def test_a_control_lasts_at_least_twice_as_long_as_the_longest_life_that_the_request_may_have_ended() -> None:
    for life_s, draw, control_s in (
        (0.0, 0.0, 2.0),
        (3.0, 0.0, 6.0),
        (9.0, 0.0, 10.0),
        (1.5, 0.5, 4.5),
        (3.0, 1.0, 10.0),
    ):
        suspects = Suspects(draw)
        for one_life_s in (life_s / 2, life_s, 0.0):
            suspects.begin_stream(50.0)
            suspects.open(1, 50.0)
            suspects.accuse(50.0 + one_life_s)
        assert suspects.is_controlling
        suspects.begin_stream(100.0)
        suspects.note_alive(99.9 + control_s)
        assert tried(suspects, [1]) == []
        suspects.note_alive(100.0 + control_s)
        assert tried(suspects, [1, 2]) == [1]


def test_a_scheduler_that_dies_in_a_control_clears_all_suspects() -> None:
    suspects = control_one()
    assert suspects.take_change()
    assert suspects.accuse(101.0) is None
    assert suspects.take_change()
    assert tried(suspects, [1, 2, 3]) == [1, 2, 3]
    # As if they had never been accused.
    assert die(suspects, [1, 2]) is None
    assert not suspects.is_trying


def test_controls_of_two_replicas_that_begin_at_the_same_death_end_at_different_times() -> None:
    guilty, slow = control_one(draw=0.0), control_one(draw=1.0)
    for suspects in (guilty, slow):
        suspects.note_alive(102.0)
        if suspects.may_submit(1):
            suspects.open(1, 102.0)
    assert (guilty.accuse(102.1), slow.accuse(102.1)) == (1, None)
    # Its control was dead: nothing is suspected of the replica whose requests are innocent.
    assert slow.num_suspects == 0


def test_a_control_starts_again_on_a_stream_that_replaces_one_without_a_death() -> None:
    suspects = control_one()
    suspects.note_alive(101.9)
    suspects.begin_stream(101.9)
    suspects.note_alive(103.0)
    assert suspects.is_controlling
    suspects.note_alive(103.9)
    assert not suspects.is_controlling


def test_the_accused_may_end_while_the_control_runs_and_the_others_are_tried() -> None:
    suspects = control_one()
    suspects.take_change()
    suspects.close(1)
    assert suspects.take_change()
    assert tried(suspects, [1, 2, 3]) == [2]


def test_a_token_on_the_last_trial_clears_the_accused() -> None:
    suspects = control_one()
    suspects.note_alive(110.0)
    suspects.open(1, 110.0)
    suspects.note_token(1)
    assert tried(suspects, [1, 2, 3]) == [2]
    for _ in range(3):
        assert die(suspects, [1, 2], 110.0) is None


def test_a_death_before_the_accused_was_submitted_again_proves_nothing() -> None:
    suspects = control_one()
    suspects.note_alive(110.0)
    assert suspects.accuse(110.0) is None
    suspects.begin_stream(120.0)
    assert tried(suspects, [1, 2]) == [1]
    assert die(suspects, [1], 120.0) == 1


def test_suspects_wait_for_the_trial_that_the_scheduler_gives_and_no_death_before_it_speaks_against_them() -> None:
    suspects = Suspects()
    for _ in range(2):
        die(suspects, [1, 2])
    for _ in range(5):
        suspects.begin_stream(0.0, waits_for_trial=True)
        assert tried(suspects, [1, 2, 3]) == []
        suspects.note_alive(60.0)
        assert suspects.accuse(60.0) is None
    suspects.begin_stream(100.0, waits_for_trial=True)
    suspects.take_change()
    suspects.give_trial(130.0)
    assert suspects.take_change()
    assert tried(suspects, [1, 2, 3]) == [1]
    suspects.open(1, 130.0)
    suspects.note_token(1)
    assert tried(suspects, [1, 2, 3]) == [2]
    suspects.open(2, 131.0)
    suspects.note_token(2)
    assert tried(suspects, [1, 2, 3]) == [1, 2, 3]


def test_a_control_begins_with_the_trial_and_what_died_before_it_was_none() -> None:
    suspects = control_one()
    for _ in range(4):
        suspects.begin_stream(100.0, waits_for_trial=True)
        suspects.note_alive(200.0)
        assert suspects.is_controlling
        assert suspects.accuse(200.0) is None
    assert not suspects.is_hopeless
    suspects.begin_stream(300.0, waits_for_trial=True)
    suspects.give_trial(350.0)
    suspects.note_alive(351.9)
    assert suspects.is_controlling
    suspects.note_alive(352.0)
    assert tried(suspects, [1, 2]) == [1]


def test_requests_without_suspects_wait_for_no_trial() -> None:
    suspects = Suspects()
    suspects.begin_stream(0.0, waits_for_trial=True)
    assert tried(suspects, [1, 2]) == [1, 2]


def test_three_dead_controls_in_a_row_are_hopeless() -> None:
    suspects = Suspects()
    for num_dead in range(3):
        assert not suspects.is_hopeless
        for _ in range(5):
            # The last of these is the control's scheduler.
            suspects.begin_stream(float(num_dead))
            for handle in tried(suspects, [1, 2]):
                suspects.open(handle, float(num_dead))
            assert suspects.accuse(float(num_dead)) is None
        assert tried(suspects, [1, 2]) == [1, 2]
    assert suspects.is_hopeless
    suspects.forget_all()
    assert not suspects.is_hopeless


@pytest.mark.parametrize("has_token", [True, False])
def test_a_token_or_a_living_control_starts_the_count_of_dead_controls_anew(has_token: bool) -> None:
    suspects = Suspects()
    for _ in range(5):
        for _ in range(4):
            die(suspects, [1])
        assert suspects.is_controlling or suspects.accuse(0.0) is None
        if has_token:
            suspects.note_token(2)
        else:
            for _ in range(3):
                die(suspects, [3])
            live_through_control(suspects)
            suspects.close(3)
    assert not suspects.is_hopeless


def test_a_token_between_two_deaths_alone_starts_the_count_anew() -> None:
    suspects = Suspects()
    for _ in range(2):
        die(suspects, [1])
    suspects.open(1, 0.0)
    suspects.close(1)
    assert not suspects.is_trying
    for _ in range(2):
        assert die(suspects, [1]) is None
        assert not suspects.is_controlling
    assert die(suspects, [1]) is None
    assert suspects.is_controlling


def test_a_trial_waits_for_a_request_no_longer_than_it_is_suspected() -> None:
    suspects = Suspects()
    for _ in range(2):
        die(suspects, [1, 2])
    assert suspects.next_closing() is None
    suspects.open(1, 5.0)
    assert suspects.next_closing() == 5.0 + SUSPICION_S
    suspects.close_old(4.9 + SUSPICION_S)
    assert tried(suspects, [1, 2]) == [1]
    suspects.close_old(5.0 + SUSPICION_S)
    assert tried(suspects, [1, 2]) == [2]


def test_a_death_before_anything_was_sent_changes_nothing() -> None:
    suspects = Suspects()
    for _ in range(2):
        die(suspects, range(4))
    assert suspects.accuse(0.0) is None
    assert tried(suspects, range(4)) == [0, 1]


def test_when_a_request_ends_on_trial_the_next_group_is_tried() -> None:
    suspects = Suspects()
    for _ in range(2):
        die(suspects, [1, 2])
    suspects.close(1)
    assert tried(suspects, [1, 2]) == [2]


class Replica:
    """Requests that want a few tokens each, in a cell whose scheduler some of them kill, or the test does.

    Attributes:
        failed: Requests that were found guilty, in order.
        num_deaths: Deaths so far.
        num_controls: Schedulers that lived without any request.
        max_suspects: Requests that were suspects at once.
    """

    def __init__(self, rng: Random, *, num_requests: int, poison: Sequence[int] = (), num_kills: int = 0) -> None:
        self.failed: list[int] = []
        self.num_deaths = self.max_suspects = self.num_controls = 0
        self._rng = rng
        self._poison = frozenset(poison)
        self._num_kills = num_kills
        self._num_tokens_left = {handle: rng.randint(1, 3) for handle in range(num_requests)}
        self._suspects = Suspects()
        self._in_cell: set[int] = set()
        # A poison request may kill the scheduler when it is submitted, or when it is computed.
        self._dies_at_once = rng.random() < 0.5

    def run(self) -> None:
        """Run until each request has all its tokens or was found guilty."""
        while self._num_tokens_left:
            self._suspects.begin_stream(0.0)
            self._in_cell.clear()
            self._serve()

    def _serve(self) -> None:
        """One scheduler's life."""
        if self._suspects.is_controlling:
            if self._num_kills > 0 and self._rng.random() < 0.1:
                self._num_kills -= 1
                self._die()
                return
            self.num_controls += 1
            self._suspects.note_alive(60.0)
        while self._num_tokens_left:
            if self._submit() or self._compute():
                self._die()
                break

    def _submit(self) -> bool:
        """Submit all requests that may be submitted; returns whether one of them kills the scheduler."""
        waiting = [handle for handle in self._num_tokens_left if handle not in self._in_cell]
        for handle in waiting:
            if self._suspects.may_submit(handle):
                self._suspects.open(handle, 0.0)
                self._in_cell.add(handle)
                if handle in self._poison and self._dies_at_once:
                    return True
        return False

    def _compute(self) -> bool:
        """Give one request a token; returns whether the scheduler dies before it, or is killed after it."""
        handle = self._rng.choice(sorted(self._in_cell))
        if handle in self._poison:
            return True
        self._give_token(handle)
        is_killed = self._num_kills > 0 and self._rng.random() < 0.1
        self._num_kills -= is_killed
        return is_killed

    def _give_token(self, handle: int) -> None:
        self._suspects.note_token(handle)
        self._num_tokens_left[handle] -= 1
        if not self._num_tokens_left[handle]:
            del self._num_tokens_left[handle]
            self._in_cell.remove(handle)

    def _die(self) -> None:
        self.num_deaths += 1
        guilty = self._suspects.accuse(0.0)
        self.max_suspects = max(self.max_suspects, self._suspects.num_suspects)
        if guilty is not None:
            self.failed.append(guilty)
            self._suspects.close(guilty)
            del self._num_tokens_left[guilty]


@given(SEEDS, st.integers(1, 200), st.data())
@settings(max_examples=300)
def test_one_poison_among_others_is_found_after_few_deaths(seed: int, num_requests: int, data: st.DataObject) -> None:
    poison = data.draw(st.integers(0, num_requests - 1))
    replica = Replica(Random(seed), num_requests=num_requests, poison=[poison])
    replica.run()
    assert (replica.failed, replica.num_controls) == ([poison], 1)
    assert replica.num_deaths <= 4 + math.ceil(math.log2(replica.max_suspects))


@pytest.mark.parametrize("poison", [0, 77, 199])
def test_of_200_requests_199_are_unharmed(poison: int) -> None:
    for seed in range(20):
        replica = Replica(Random(seed), num_requests=200, poison=[poison])
        replica.run()
        assert replica.failed == [poison]
        assert replica.num_deaths <= 11


@given(SEEDS, st.integers(1, 200), st.integers(0, 50))
@settings(max_examples=200)
def test_kills_from_outside_condemn_no_request(seed: int, num_requests: int, num_kills: int) -> None:
    replica = Replica(Random(seed), num_requests=num_requests, num_kills=num_kills)
    replica.run()
    assert replica.failed == []


@given(SEEDS, st.integers(0, 50), st.sets(st.integers(0, 59), max_size=4))
@settings(max_examples=300)
def test_kills_from_outside_among_poisons_condemn_no_other_request(seed: int, num_kills: int, poison: set[int]) -> None:
    replica = Replica(Random(seed), num_requests=60, poison=sorted(poison), num_kills=num_kills)
    replica.run()
    assert sorted(replica.failed) == sorted(poison)

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.tokenizer.request_ledger import Attempt, ChoiceSoFar, ExchangeError, RequestLedger, ResolvedRequest
from shared.errors import DeadlinePassedError, SchedulerLostError
from shared.limits import SamplingParams
from tests.support.exchange_peer import column

LOST_AFTER_S = 60.0


def make_request(name: str = "r", n: int = 1) -> ResolvedRequest:
    sampling = SamplingParams(max_tokens=9, seed=7)
    return ResolvedRequest(name, column([1, 2, 3]), sampling, priority=1, cache_salt=b"s", n=n)


class Ledger(RequestLedger):
    """A ledger with a stream, or without one since 0."""

    def __init__(self, *, has_stream: bool = True, lost_after_s: float = LOST_AFTER_S) -> None:
        super().__init__(lost_after_s, 0.0)
        self.stream = self.open_stream()[0] if has_stream else 0

    def begin_request(self, *tokens: int, arrived_s: float = 0.0, deadline_s: float | None = None) -> int:
        """A request that was submitted and has got tokens."""
        handle = self.add(make_request(), arrived_s=arrived_s, deadline_s=deadline_s)
        assert self.next_attempt(handle, arrived_s) is not None
        if tokens:
            self.begin(self.stream, handle)
        assert self.receive(self.stream, handle, 0, list(tokens)) == list(tokens)
        return handle

    def begin_choices(self, *outputs: Sequence[int]) -> list[int]:
        """The handles of a request's choices, which was submitted; each has got its tokens."""
        handle = self.add(make_request(n=len(outputs)), arrived_s=0.0, deadline_s=None)
        assert self.next_attempt(handle, 0.0) is not None
        for number, tokens in enumerate(outputs):
            assert self.receive(self.stream, handle + number, 0, list(tokens)) == list(tokens)
        return list(range(handle, handle + len(outputs)))

    def restart(self, now: float) -> list[int]:
        """Lose the stream and get another one."""
        self.lose_stream(self.stream, now)
        self.stream, order = self.open_stream()
        return order


def test_a_first_attempt_carries_the_request_and_its_times() -> None:
    ledger = Ledger()
    handle = ledger.add(make_request(), arrived_s=10.0, deadline_s=25.0)
    assert ledger.next_attempt(handle, 12.0) == Attempt(handle, make_request(), 1, (), age_s=2.0, time_left_s=13.0)


def test_a_request_is_submitted_once_on_a_stream() -> None:
    ledger = Ledger()
    handle = ledger.begin_request()
    assert ledger.next_attempt(handle, 1.0) is None


def test_without_a_stream_nothing_is_submitted() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5)
    ledger.lose_stream(ledger.stream, 1.0)
    other = ledger.add(make_request(), arrived_s=1.0, deadline_s=None)
    assert ledger.next_attempt(handle, 2.0) is ledger.next_attempt(other, 2.0) is None


def test_a_fresh_stream_is_told_the_output_so_far_and_that_it_is_another_attempt() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5, 6, arrived_s=1.0, deadline_s=31.0)
    assert ledger.restart(now=10.0) == [handle]
    attempt = ledger.next_attempt(handle, 11.0)
    assert attempt == Attempt(handle, make_request(), 2, (ChoiceSoFar(column([5, 6])),), age_s=10.0, time_left_s=20.0)
    assert ledger.receive(ledger.stream, handle, 2, [7]) == [7]
    ledger.restart(now=12.0)
    third = ledger.next_attempt(handle, 12.0)
    assert third is not None
    assert (third.number, third.choices_so_far) == (3, (ChoiceSoFar(column([5, 6, 7])),))


def test_who_has_tokens_goes_first_and_then_the_oldest() -> None:
    ledger = Ledger()
    young_waiting = ledger.begin_request(arrived_s=4.0)
    young_running = ledger.begin_request(5, arrived_s=3.0)
    old_waiting = ledger.begin_request(arrived_s=1.0)
    old_running = ledger.begin_request(5, arrived_s=2.0)
    assert ledger.restart(now=5.0) == [old_running, young_running, old_waiting, young_waiting]


def test_a_request_that_ended_is_not_submitted_again() -> None:
    ledger = Ledger()
    ended, removed = ledger.begin_request(5), ledger.begin_request(5)
    assert ledger.end(ledger.stream, ended)
    assert ledger.remove(removed)
    assert ledger.restart(now=1.0) == []
    assert ledger.next_attempt(ended, 1.0) is ledger.next_attempt(removed, 1.0) is None


def test_repeated_tokens_are_dropped() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5, 6, 7)
    assert ledger.receive(ledger.stream, handle, 0, [5, 6]) == []
    assert ledger.receive(ledger.stream, handle, 1, [6, 7, 8]) == [8]
    assert ledger.receive(ledger.stream, handle, 4, [9]) == [9]


def test_missing_tokens_are_an_error_and_change_nothing() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5)
    with pytest.raises(ExchangeError):
        ledger.receive(ledger.stream, handle, 2, [7])
    assert ledger.receive(ledger.stream, handle, 1, [6]) == [6]


def test_what_comes_on_an_older_stream_is_dropped() -> None:
    ledger = Ledger()
    old, handle = ledger.stream, ledger.begin_request(5)
    unbegun = ledger.begin_request()
    ledger.lose_stream(old, 1.0)
    for _ in ("while there is none", "while there is another one"):
        assert ledger.receive(old, handle, 1, [6]) == []
        assert not ledger.begin(old, unbegun)
        assert not ledger.end(old, handle)
        ledger.open_stream()
        ledger.next_attempt(handle, 2.0)
    assert ledger.receive(old + 1, handle, 1, [8]) == []
    assert ledger.receive(old + 2, handle, 1, [8]) == [8]


def test_what_comes_for_a_request_before_its_submit_is_dropped() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5)
    ledger.restart(now=1.0)
    assert ledger.receive(ledger.stream, handle, 1, [6]) == []
    assert not ledger.end(ledger.stream, handle)


def test_the_loss_of_an_older_stream_changes_nothing() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5)
    old = ledger.stream
    ledger.restart(now=1.0)
    assert ledger.next_attempt(handle, 1.0) is not None
    ledger.lose_stream(old, 2.0)
    assert ledger.receive(ledger.stream, handle, 1, [6]) == [6]
    assert ledger.expire(1e9) == []


def test_only_the_first_beginning_counts() -> None:
    ledger = Ledger()
    handle = ledger.begin_request()
    ledger.restart(now=1.0)
    ledger.next_attempt(handle, 1.0)
    assert ledger.begin(ledger.stream, handle)
    assert not ledger.begin(ledger.stream, handle)


def test_a_request_ends_once() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5)
    assert ledger.end(ledger.stream, handle)
    assert not ledger.end(ledger.stream, handle)
    assert not ledger.remove(handle)
    assert ledger.receive(ledger.stream, handle, 1, [6]) == []
    assert ledger.expire(1e9) == []
    assert ledger.remove_all() == []
    assert len(ledger) == 0


def test_the_scheduler_is_told_only_of_requests_that_it_has() -> None:
    ledger = Ledger()
    sent, resubmitted, waiting = ledger.begin_request(5), ledger.begin_request(5), ledger.begin_request()
    unsent = ledger.add(make_request(), arrived_s=0.0, deadline_s=None)
    assert ledger.remove(sent)
    assert not ledger.remove(unsent)
    ledger.restart(now=1.0)
    ledger.next_attempt(resubmitted, 1.0)
    assert ledger.remove(resubmitted)
    assert not ledger.remove(waiting)


def test_requests_wait_for_a_stream_only_so_long() -> None:
    ledger = Ledger()
    handles = [ledger.begin_request(5), ledger.begin_request()]
    ledger.lose_stream(ledger.stream, 100.0)
    assert ledger.next_wakeup() == 100.0 + LOST_AFTER_S
    assert ledger.expire(99.9 + LOST_AFTER_S) == []
    ends = ledger.expire(100.0 + LOST_AFTER_S)
    assert [handle for handle, _ in ends] == handles
    assert all(isinstance(error, SchedulerLostError) for _, error in ends)
    assert (len(ledger), ledger.next_wakeup()) == (0, None)
    assert ledger.open_stream()[1] == []


def test_a_stream_in_time_starts_the_wait_anew() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5)
    ledger.restart(now=50.0)
    assert ledger.expire(1e9) == []
    assert ledger.next_attempt(handle, 55.0) is not None
    ledger.lose_stream(ledger.stream, 60.0)
    assert ledger.next_wakeup() == 60.0 + LOST_AFTER_S


def test_with_no_time_to_wait_requests_end_with_their_stream() -> None:
    ledger = Ledger(lost_after_s=0.0)
    ledger.begin_request(5)
    ledger.lose_stream(ledger.stream, 3.0)
    [(_, error)] = ledger.expire(3.0)
    assert isinstance(error, SchedulerLostError)


def test_a_request_that_never_had_a_stream_waits_no_longer_either() -> None:
    ledger = Ledger(has_stream=False)
    handle = ledger.add(make_request(), arrived_s=1.0, deadline_s=None)
    assert ledger.next_wakeup() == LOST_AFTER_S
    [(ended, error)] = ledger.expire(LOST_AFTER_S)
    assert ended == handle
    assert isinstance(error, SchedulerLostError)


def test_a_deadline_that_passes_before_the_submit_ends_the_request() -> None:
    ledger = Ledger()
    late = ledger.add(make_request(), arrived_s=0.0, deadline_s=2.0)
    patient = ledger.add(make_request(), arrived_s=0.0, deadline_s=3.0)
    assert ledger.next_wakeup() == 2.0
    [(ended, error)] = ledger.expire(2.0)
    assert ended == late
    assert isinstance(error, DeadlinePassedError)
    assert ledger.next_attempt(late, 2.0) is None
    assert ledger.next_attempt(patient, 2.0) is not None
    assert ledger.next_wakeup() is None


def test_deadlines_pass_while_requests_wait_for_a_stream() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5, deadline_s=20.0)
    # The scheduler keeps the deadline while it has the request.
    assert ledger.expire(20.0) == []
    ledger.lose_stream(ledger.stream, 10.0)
    assert ledger.next_wakeup() == 20.0
    [(ended, error)] = ledger.expire(20.0)
    assert ended == handle
    assert isinstance(error, DeadlinePassedError)


def test_a_request_has_a_handle_for_each_choice() -> None:
    ledger = Ledger()
    first = ledger.add(make_request(n=3), arrived_s=0.0, deadline_s=None)
    second = ledger.add(make_request(), arrived_s=0.0, deadline_s=None)
    assert (first, second) == (1, 4)
    assert (ledger.open_choices(1), ledger.open_choices(4), ledger.open_choices(2)) == ([1, 2, 3], [4], [])
    assert len(ledger) == 2


def test_each_choice_has_tokens_and_a_beginning_of_its_own() -> None:
    ledger = Ledger()
    first, second = ledger.begin_choices([5], [])
    assert ledger.begin(ledger.stream, second)
    assert ledger.begin(ledger.stream, first)
    assert not ledger.begin(ledger.stream, second)
    assert ledger.receive(ledger.stream, second, 0, [6, 7]) == [6, 7]
    assert ledger.receive(ledger.stream, first, 0, [5, 8]) == [8]


def test_a_request_lives_until_its_last_choice_has_ended() -> None:
    ledger = Ledger()
    first, second, third = ledger.begin_choices([5], [6], [7])
    assert ledger.end(ledger.stream, second)
    assert ledger.stop(first)
    assert not ledger.end(ledger.stream, first)
    assert not ledger.stop(second)
    assert ledger.receive(ledger.stream, second, 1, [8]) == []
    assert ledger.open_choices(first) == [third]
    assert ledger.end(ledger.stream, third)
    assert len(ledger) == 0
    assert not ledger.remove(first)


def test_a_fresh_stream_is_told_which_choices_have_ended() -> None:
    ledger = Ledger()
    first, second, _ = ledger.begin_choices([5, 6], [7], [])
    ledger.stop(first)
    assert ledger.restart(now=1.0) == [first]
    attempt = ledger.next_attempt(first, 1.0)
    assert attempt is not None
    assert attempt.choices_so_far == (
        ChoiceSoFar(column([5, 6]), has_ended=True),
        ChoiceSoFar(column([7])),
        ChoiceSoFar(b""),
    )
    assert ledger.receive(ledger.stream, second, 1, [8]) == [8]


def test_choices_of_which_nothing_is_known_are_not_told() -> None:
    ledger = Ledger()
    first, _ = ledger.begin_choices([], [])
    ledger.restart(now=1.0)
    attempt = ledger.next_attempt(first, 1.0)
    assert attempt is not None
    assert (attempt.number, attempt.choices_so_far) == (2, ())


def test_removing_a_request_ends_all_its_choices() -> None:
    ledger = Ledger()
    first, second = ledger.begin_choices([5], [])
    assert ledger.remove(first)
    assert ledger.receive(ledger.stream, second, 0, [6]) == []
    assert ledger.restart(now=1.0) == []


def test_what_expires_is_told_choice_by_choice() -> None:
    ledger = Ledger()
    first, second, third = ledger.begin_choices([5], [], [])
    ledger.end(ledger.stream, second)
    ledger.lose_stream(ledger.stream, 1.0)
    assert [handle for handle, _ in ledger.expire(1.0 + LOST_AFTER_S)] == [first, third]
    late = ledger.add(make_request(n=2), arrived_s=0.0, deadline_s=5.0)
    ledger.open_stream()
    assert [handle for handle, _ in ledger.expire(5.0)] == [late, late + 1]
    assert len(ledger) == 0


def test_positions_of_the_prompt_that_are_known_are_not_new() -> None:
    ledger = Ledger()
    first, second = ledger.begin_choices([], [])
    assert ledger.receive_prompt(ledger.stream, first, 1, 4) == 4
    assert ledger.receive_prompt(ledger.stream, first, 1, 3) == 0
    assert ledger.receive_prompt(ledger.stream, first, 3, 4) == 2
    with pytest.raises(ExchangeError):
        ledger.receive_prompt(ledger.stream, first, 8, 1)
    # Whichever choice leads, it is the same prompt.
    ledger.restart(now=1.0)
    assert ledger.receive_prompt(ledger.stream, first, 1, 9) == 0
    ledger.next_attempt(first, 1.0)
    assert ledger.receive_prompt(ledger.stream, second, 1, 7) == 1
    assert ledger.receive_prompt(ledger.stream - 1, first, 8, 1) == 0

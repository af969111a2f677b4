from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.tokenizer.exchange.request_ledger import ExchangeError
from services.tokenizer.exchange.submit_suspects import SUSPICION_S
from shared.errors import DeadlinePassedError, ExactUnavailableError, SchedulerLostError
from shared.wire import NOT_INTRODUCED, introduce_self
from tests.support.tokenizer.exchange_peer import column
from tests.support.tokenizer.ledger import LOST_AFTER_S, Ledger, make_request, sent


def test_a_first_attempt_carries_the_request_and_its_times() -> None:
    ledger = Ledger()
    request = make_request()
    handle = ledger.add(request, arrived_at=10.0, deadline_at=25.0)
    assert ledger.begin_attempt(handle, 12.0) is request
    assert sent(request, 12.0) == (handle, 1, [], 2.0, 13.0, 0)


def test_a_request_is_submitted_once_on_a_stream() -> None:
    ledger = Ledger()
    handle = ledger.begin_request()
    assert ledger.begin_attempt(handle, 1.0) is None


def test_without_a_stream_nothing_is_submitted() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5)
    ledger.lose_stream(ledger.stream, 1.0)
    other = ledger.add(make_request(), arrived_at=1.0, deadline_at=None)
    assert ledger.begin_attempt(handle, 2.0) is ledger.begin_attempt(other, 2.0) is None


def test_a_fresh_stream_is_told_the_output_so_far_and_that_it_is_another_attempt() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5, 6, arrived_at=1.0, deadline_at=31.0)
    assert ledger.restart(now=10.0) == [handle]
    second = ledger.begin_attempt(handle, 11.0)
    assert second is not None
    assert sent(second, 11.0) == (handle, 2, [(column([5, 6]), False)], 10.0, 20.0, 1)
    assert ledger.receive(ledger.stream, handle, 2, [7]) == [7]
    ledger.restart(now=12.0)
    third = ledger.begin_attempt(handle, 12.0)
    assert third is not None
    assert sent(third, 12.0)[1:3] == (3, [(column([5, 6, 7]), False)])


def test_who_has_tokens_goes_first_and_then_the_oldest() -> None:
    ledger = Ledger()
    young_waiting = ledger.begin_request(arrived_at=4.0)
    young_running = ledger.begin_request(5, arrived_at=3.0)
    old_waiting = ledger.begin_request(arrived_at=1.0)
    old_running = ledger.begin_request(5, arrived_at=2.0)
    assert ledger.restart(now=5.0) == [old_running, young_running, old_waiting, young_waiting]


def test_a_request_that_ended_is_not_submitted_again() -> None:
    ledger = Ledger()
    ended, removed = ledger.begin_request(5), ledger.begin_request(5)
    assert ledger.end(ledger.stream, ended)
    assert ledger.remove(removed)
    assert ledger.restart(now=1.0) == []
    assert ledger.begin_attempt(ended, 1.0) is ledger.begin_attempt(removed, 1.0) is None


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
        ledger.open_stream(0.0)
        ledger.begin_attempt(handle, 2.0)
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
    assert ledger.begin_attempt(handle, 1.0) is not None
    ledger.lose_stream(old, 2.0)
    assert ledger.receive(ledger.stream, handle, 1, [6]) == [6]
    assert ledger.expire(1e9) == []


def test_only_the_first_beginning_counts() -> None:
    ledger = Ledger()
    handle = ledger.begin_request()
    ledger.restart(now=1.0)
    ledger.begin_attempt(handle, 1.0)
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
    unsent = ledger.add(make_request(), arrived_at=0.0, deadline_at=None)
    assert ledger.remove(sent)
    assert not ledger.remove(unsent)
    ledger.restart(now=1.0)
    ledger.begin_attempt(resubmitted, 1.0)
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
    assert ledger.open_stream(0.0)[1] == []


def test_a_stream_in_time_starts_the_wait_anew() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5)
    ledger.restart(now=50.0)
    assert ledger.expire(1e9) == []
    assert ledger.begin_attempt(handle, 55.0) is not None
    ledger.lose_stream(ledger.stream, 60.0)
    assert ledger.next_wakeup() == 60.0 + LOST_AFTER_S


def test_the_time_in_which_a_scheduler_lives_and_does_not_serve_yet_does_not_count() -> None:
    ledger = Ledger()
    ledger.begin_request(5)
    ledger.lose_stream(ledger.stream, 100.0)
    for now in (110.0, 150.0, 200.0):
        ledger.note_scheduler_alive(now)
        assert ledger.expire(now + LOST_AFTER_S - 1.0) == []
    assert ledger.next_wakeup() == 200.0 + LOST_AFTER_S
    assert len(ledger.expire(200.0 + LOST_AFTER_S)) == 1


def test_with_no_time_to_wait_requests_end_with_their_stream() -> None:
    ledger = Ledger(lost_after_s=0.0)
    ledger.begin_request(5)
    ledger.lose_stream(ledger.stream, 3.0)
    [(_, error)] = ledger.expire(3.0)
    assert isinstance(error, SchedulerLostError)


def test_a_request_that_never_had_a_stream_waits_no_longer_either() -> None:
    ledger = Ledger(has_stream=False)
    handle = ledger.add(make_request(), arrived_at=1.0, deadline_at=None)
    assert ledger.next_wakeup() == LOST_AFTER_S
    [(ended, error)] = ledger.expire(LOST_AFTER_S)
    assert ended == handle
    assert isinstance(error, SchedulerLostError)


def test_a_deadline_that_passes_before_the_submit_ends_the_request() -> None:
    ledger = Ledger()
    late = ledger.add(make_request(), arrived_at=0.0, deadline_at=2.0)
    patient = ledger.add(make_request(), arrived_at=0.0, deadline_at=3.0)
    assert ledger.next_wakeup() == 2.0
    [(ended, error)] = ledger.expire(2.0)
    assert ended == late
    assert isinstance(error, DeadlinePassedError)
    assert ledger.begin_attempt(late, 2.0) is None
    assert ledger.begin_attempt(patient, 2.0) is not None
    assert ledger.next_wakeup() is None


def test_deadlines_pass_while_requests_wait_for_a_stream() -> None:
    ledger = Ledger()
    handle = ledger.begin_request(5, deadline_at=20.0)
    # The scheduler keeps the deadline while it has the request.
    assert ledger.expire(20.0) == []
    ledger.lose_stream(ledger.stream, 10.0)
    assert ledger.next_wakeup() == 20.0
    [(ended, error)] = ledger.expire(20.0)
    assert ended == handle
    assert isinstance(error, DeadlinePassedError)


def test_suspects_of_two_deaths_are_tried_in_halves_and_the_others_wait() -> None:
    ledger = Ledger()
    harmless = ledger.begin_request(5)
    suspects = ledger.accused(4)
    fresh = ledger.add(make_request(), arrived_at=1.0, deadline_at=None)
    all_handles = [harmless, *suspects, fresh]
    assert [handle for handle in all_handles if ledger.suspects.may_submit(handle)] == suspects[:2]
    assert ledger.submit_all(all_handles, 1.0) == suspects[:2]
    assert ledger.take_released() == []
    ledger.receive(ledger.stream, suspects[1], 0, [7])
    assert ledger.take_released() == []
    ledger.end(ledger.stream, suspects[0])
    assert ledger.take_released() == suspects[2:]
    assert ledger.submit_all(all_handles, 2.0) == suspects[2:]
    for suspect in suspects[2:]:
        ledger.receive(ledger.stream, suspect, 0, [7])
        released = ledger.take_released()
    # Requests with tokens first, then by age.
    assert (released, ledger.suspects.is_trying) == ([harmless, fresh], False)


def test_the_request_that_kills_schedulers_ends_with_all_its_choices() -> None:
    ledger = Ledger()
    neighbour = ledger.begin_request(5)
    first, second = ledger.begin_choices([], [])
    orders = []
    for _ in range(2):
        order, failed = ledger.outlive(0.0)
        orders.append(ledger.submit_all(order, 0.0))
        assert failed == []
        ledger.receive(ledger.stream, neighbour, 1, [6])
    assert orders == [[neighbour, first], [first]]
    # A control: nothing is submitted, and the scheduler lives.
    assert ledger.outlive(0.0) == ([], [])
    assert not ledger.suspects.may_submit(neighbour)
    assert not ledger.suspects.may_submit(first)
    ledger.note_heard(1.9)
    assert ledger.take_released() == []
    ledger.note_heard(2.0)
    assert ledger.submit_all(ledger.take_released(), 2.0) == [first]
    assert ledger.outlive(2.0) == ([neighbour], [first, second])
    assert len(ledger) == 1


def test_schedulers_that_die_right_after_they_are_ready_lose_no_request() -> None:
    ledger = Ledger()
    handles = [ledger.begin_request() for _ in range(4)]
    for _ in range(9):
        order, failed = ledger.outlive(1.0)
        assert failed == []
        ledger.submit_all(order, 1.0)
    assert len(ledger) == 4
    for handle in handles:
        ledger.begin_attempt(handle, 1.0)
        assert ledger.receive(ledger.stream, handle, 0, [7]) == [7]
    assert all(ledger.suspects.may_submit(handle) for handle in handles)


def test_after_three_dead_controls_in_a_row_all_requests_are_lost() -> None:
    ledger = Ledger()
    handle = ledger.begin_request()
    waiting = [ledger.add(make_request(), arrived_at=0.0, deadline_at=None) for _ in range(2)]
    for _ in range(11):
        ledger.submit_all(ledger.outlive(1.0)[0][:1], 1.0)
    ledger.lose_stream(ledger.stream, 1.0)
    ends = ledger.on_scheduler_death(1.0)
    assert [ended for ended, _ in ends] == [handle, *waiting]
    assert all(isinstance(error, SchedulerLostError) for _, error in ends)
    assert (len(ledger), ledger.suspects.is_trying) == (0, False)
    assert ledger.open_stream(2.0)[1] == []


def test_a_deadline_passes_while_a_request_waits_for_a_control() -> None:
    ledger = Ledger()
    ledger.begin_request(deadline_at=5.0)
    for _ in range(3):
        ledger.submit_all(ledger.outlive(0.0)[0], 0.0)
    assert (ledger.suspects.is_controlling, ledger.next_wakeup()) == (True, 5.0)
    [(_, error)] = ledger.expire(5.0)
    assert isinstance(error, DeadlinePassedError)
    assert not ledger.suspects.is_controlling


def test_without_a_stream_a_control_makes_no_progress() -> None:
    ledger = Ledger()
    handle = ledger.begin_request()
    for _ in range(3):
        ledger.submit_all(ledger.outlive(0.0)[0], 0.0)
    ledger.lose_stream(ledger.stream, 1.0)
    ledger.note_heard(50.0)
    assert ledger.suspects.is_controlling
    assert ledger.open_stream(51.0)[1] == []
    ledger.note_heard(53.0)
    assert ledger.take_released() == [handle]


def test_a_token_since_the_submit_clears_a_request() -> None:
    ledger = Ledger()
    handle = ledger.begin_request()
    for index in range(5):
        assert ledger.outlive(0.0) == ([handle], [])
        assert ledger.begin_attempt(handle, 0.0) is not None
        # A repeated one is none.
        assert ledger.receive(ledger.stream, handle, 0, [7] * index) == []
        assert ledger.receive(ledger.stream, handle, index, [7]) == [7]


def test_a_trial_moves_on_when_its_time_is_up() -> None:
    ledger = Ledger()
    tried, other = ledger.accused(2)
    assert ledger.next_wakeup() is None
    assert ledger.begin_attempt(tried, 3.0) is not None
    assert ledger.next_wakeup() == 3.0 + SUSPICION_S
    assert ledger.expire(3.0 + SUSPICION_S) == []
    assert ledger.take_released() == [other]


def test_while_there_is_no_stream_a_trial_makes_no_progress() -> None:
    ledger = Ledger()
    tried, other = ledger.accused(2)
    ledger.begin_attempt(tried, 3.0)
    ledger.lose_stream(ledger.stream, 4.0)
    assert ledger.next_wakeup() == 4.0 + LOST_AFTER_S
    assert ledger.expire(3.0 + SUSPICION_S) == []
    assert ledger.open_stream(0.0)[1] == [tried]
    assert not ledger.suspects.may_submit(other)


def test_a_deadline_passes_while_a_request_waits_for_a_trial() -> None:
    ledger = Ledger()
    ledger.accused(2)
    late = ledger.add(make_request(), arrived_at=0.0, deadline_at=5.0)
    assert ledger.next_wakeup() == 5.0
    [(ended, error)] = ledger.expire(5.0)
    assert ended == late
    assert isinstance(error, DeadlinePassedError)


def test_when_all_requests_end_so_does_a_trial() -> None:
    ledger = Ledger()
    ledger.accused(2)
    ledger.remove_all()
    assert not ledger.suspects.is_trying


@pytest.mark.parametrize(
    ("fingerprints", "resumes_exactly"),
    [("a", [True]), ("aaa", [True, True, True]), ("aba", [True, False, False]), (["", ""], [False, False])],
)
def test_resumes_are_exact_while_every_cell_has_one_fingerprint(
    fingerprints: Sequence[str], resumes_exactly: list[bool]
) -> None:
    ledger = Ledger(has_stream=False)
    handle = ledger.add(make_request(), arrived_at=0.0, deadline_at=None)
    told = []
    for fingerprint in fingerprints:
        assert ledger.on_cell(fingerprint) == []
        ledger.restart(0.0)
        request = ledger.begin_attempt(handle, 0.0)
        assert request is not None
        told.append((sent(request, 0.0)[-1], request.resumes_exactly))
    assert told == list(enumerate(resumes_exactly))


def test_losses_that_a_scheduler_told_are_known_after_its_death() -> None:
    ledger = Ledger()
    first, second = ledger.begin_choices([5], [6])
    assert ledger.resume(ledger.stream, first, 2)
    old_stream = ledger.stream
    ledger.restart(1.0)
    attempt = ledger.begin_attempt(first, 1.0)
    assert attempt is not None
    assert (sent(attempt, 1.0)[-1], [choice.num_resumes for choice in attempt.choices]) == (1, [3, 1])
    # The scheduler counts on from the least of them.
    assert not ledger.resume(ledger.stream, first, 2)
    assert ledger.resume(ledger.stream, second, 2)
    assert not ledger.resume(old_stream, second, 9)
    assert [choice.num_resumes for choice in attempt.choices] == [3, 2]
    ledger.end(ledger.stream, second)
    ledger.restart(2.0)
    attempt = ledger.begin_attempt(first, 2.0)
    assert attempt is not None
    assert sent(attempt, 2.0)[-1] == 4


@pytest.mark.parametrize("fingerprint", ["", "b"])
def test_an_exact_request_ends_where_its_bytes_would_be_others(fingerprint: str) -> None:
    ledger = Ledger(has_stream=False)
    ledger.on_cell("a")
    ledger.stream, _ = ledger.open_stream(0.0)
    exact = ledger.add(make_request(n=2, is_exact=True), arrived_at=0.0, deadline_at=None)
    ordinary = ledger.begin_request(5)
    ledger.begin_attempt(exact, 0.0)
    ledger.lose_stream(ledger.stream, 1.0)
    assert ledger.on_cell("a") == []
    ends = ledger.on_cell(fingerprint)
    assert [handle for handle, _ in ends] == [exact, exact + 1]
    assert all(isinstance(error, ExactUnavailableError) for _, error in ends)
    assert ledger.open_stream(0.0)[1] == [ordinary]


def test_an_exact_request_that_no_cell_has_had_takes_any_exact_one() -> None:
    ledger = Ledger(has_stream=False)
    handle = ledger.add(make_request(is_exact=True), arrived_at=0.0, deadline_at=None)
    assert ledger.on_cell("a") == ledger.on_cell("b") == []
    assert [ended for ended, _ in ledger.on_cell("")] == [handle]


def test_a_request_ends_where_the_next_cell_lacks_what_it_needs() -> None:
    ledger = Ledger(has_stream=False)
    ledger.on_cell("", introduce_self())
    request = make_request(n=2)
    request.needs = frozenset({"grammar"})
    handle = ledger.add(request, arrived_at=0.0, deadline_at=None)
    plain = ledger.add(make_request(), arrived_at=0.0, deadline_at=None)
    assert ledger.on_cell("", introduce_self()) == []
    ends = ledger.on_cell("", NOT_INTRODUCED)
    assert [(ended, error.reason) for ended, error in ends] == [
        (handle, "NOT_SUPPORTED"),
        (handle + 1, "NOT_SUPPORTED"),
    ]
    assert ledger.open_stream(0.0)[1] == [plain]

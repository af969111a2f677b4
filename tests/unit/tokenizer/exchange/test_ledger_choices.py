"""The ledger of requests with several choices."""

from __future__ import annotations

import pytest

from services.tokenizer.exchange.request_ledger import ExchangeError
from shared.ids import RequestHandle
from tests.support.tokenizer.exchange_peer import column
from tests.support.tokenizer.ledger import LOST_AFTER_S, Ledger, make_request, sent


def test_a_request_has_a_handle_for_each_choice() -> None:
    ledger = Ledger()
    first = ledger.add(make_request(n=3), arrived_at=0.0, deadline_at=None)
    second = ledger.add(make_request(), arrived_at=0.0, deadline_at=None)
    assert (first, second) == (1, 4)
    assert [ledger.open_choices(RequestHandle(number)) for number in (1, 4, 2)] == [[1, 2, 3], [4], []]
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
    attempt = ledger.begin_attempt(first, 1.0)
    assert attempt is not None
    assert sent(attempt, 1.0)[2] == [(column([5, 6]), True), (column([7]), False), (b"", False)]
    assert ledger.receive(ledger.stream, second, 1, [8]) == [8]


def test_choices_of_which_nothing_is_known_are_not_told() -> None:
    ledger = Ledger()
    first, _ = ledger.begin_choices([], [])
    ledger.restart(now=1.0)
    attempt = ledger.begin_attempt(first, 1.0)
    assert attempt is not None
    assert sent(attempt, 1.0)[1:3] == (2, [])


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
    late = ledger.add(make_request(n=2), arrived_at=0.0, deadline_at=5.0)
    ledger.open_stream(0.0)
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
    ledger.begin_attempt(first, 1.0)
    assert ledger.receive_prompt(ledger.stream, second, 1, 7) == 1
    assert ledger.receive_prompt(ledger.stream - 1, first, 8, 1) == 0

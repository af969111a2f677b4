"""How a result with drafts becomes tokens: runs of several per row, cut after a stop."""

from __future__ import annotations

import pytest

from services.scheduler.core.batch.sequence import Finish, FinishReason
from services.scheduler.core.results.outputs import RequestEnd
from shared.errors import InvalidRequestError
from shared.ids import RequestHandle
from shared.request.sampling_params import SamplingOptions
from tests.support.scheduler.core import Parts, completion_of, ends_of, make_sequence, rows_for
from tests.support.scheduler.engine_driver import worker_facts

STOP = Finish(FinishReason.STOP_TOKEN, 9)
LENGTH = Finish(FinishReason.MAX_TOKENS)


def make_drafting() -> Parts:
    """Parts whose worker drafts up to 3 tokens."""
    return Parts(facts=worker_facts(num_draft_tokens=3))


def test_rows_get_runs_of_accepted_drafts() -> None:
    parts = make_drafting()
    first, second = make_sequence(1, 5), make_sequence(2, 9)
    parts.start(first, second)
    outputs = parts.run_decode([601, 602, 603], [701])
    assert rows_for(outputs) == [(1, 1, [601, 602, 603]), (2, 1, [701])]
    assert parts.running.slots.num_tokens[:2].tolist() == [9, 11]
    # Nothing is in flight, so nothing else is planned.
    assert parts.running.slots.num_planned[:2].tolist() == [9, 11]
    parts.running.store(first)
    assert completion_of(first) == [501, 601, 602, 603]
    outputs = parts.run_decode(604, 702)
    assert rows_for(outputs) == [(1, 4, [604]), (2, 2, [702])]
    # Clients are sent counts only if a row has several tokens.
    assert outputs.by_client[1].counts is None


@pytest.mark.parametrize(
    ("params", "kept", "finish"),
    [
        ({"stop_token_ids": (9,)}, [601, 9], STOP),
        # The first stop of several counts, whatever its kind.
        ({"stop_token_ids": (9,), "stop_token_sequences": ((501, 601),)}, [601], Finish(FinishReason.STOP_SEQUENCE)),
        ({"stop_token_ids": (9, 603)}, [601, 9], STOP),
        ({"stop_token_ids": (9,), "max_tokens": 5}, [601, 9], STOP),
        ({"max_tokens": 5}, [601, 9, 603, 604], LENGTH),
        # A stop that does not count yet is passed over.
        ({"stop_token_ids": (9, 604), "options": SamplingOptions(min_tokens=4)}, [601, 9, 603, 604], None),
    ],
)
def test_a_run_is_cut_after_its_first_stop(params: dict[str, object], kept: list[int], finish: Finish | None) -> None:
    finish = finish or Finish(FinishReason.STOP_TOKEN, 604)
    parts = make_drafting()
    seq, neighbour = make_sequence(1, 5, **params), make_sequence(2, 5)  # type: ignore[arg-type]
    parts.start(seq, neighbour)
    outputs = parts.run_decode([601, 9, 603, 604], [701, 702])
    assert rows_for(outputs) == [(1, 1, kept), (2, 1, [701, 702])]
    assert ends_of(outputs) == [RequestEnd(RequestHandle(1), 1 + len(kept), finish)]
    assert (completion_of(seq), seq.slot) == ([501, *kept], None)


def test_a_run_that_leaves_a_sequence_no_further_row_retires_it() -> None:
    parts = make_drafting()
    seq, other = make_sequence(1, 5, max_tokens=5), make_sequence(2, 5)
    parts.start(seq, other)
    parts.send_decode()
    parts.send_decode()
    assert parts.running.sequences() == [seq, other]
    # Four tokens are known, and the step in flight returns at least one more.
    assert ends_of(parts.give([601, 602, 603], [701])) == []
    assert (parts.running.sequences(), parts.running.retiring()) == ([other], [seq])
    outputs = parts.give([604], [702, 703])
    assert rows_for(outputs) == [(1, 4, [604]), (2, 2, [702, 703])]
    assert ends_of(outputs) == [RequestEnd(RequestHandle(1), 5, LENGTH)]


def test_a_failed_grammar_keeps_the_tokens_before_the_failure_unless_they_stop() -> None:
    for params, end in (({}, InvalidRequestError), ({"stop_token_ids": (602,)}, None)):
        parts = make_drafting()
        seq = make_sequence(1, 5, **params)  # type: ignore[arg-type]
        parts.start(seq)
        parts.send_decode()
        outputs = parts.give([601, 602, 603], failed_grammar=(0,))
        assert rows_for(outputs) == [(1, 1, [601, 602])]
        [only] = ends_of(outputs)
        assert (only.error is None) if end is None else isinstance(only.error, end)
        assert completion_of(seq) == [501, 601, 602]


def test_drafts_are_counted() -> None:
    parts = make_drafting()
    parts.start(make_sequence(1, 5), make_sequence(2, 5))
    parts.send_decode()
    parts.give([601, 602, 603], [701], num_draft_tokens=6)
    counters = parts.counters
    assert (counters.num_draft_tokens, counters.num_accepted_tokens) == (6, 2)

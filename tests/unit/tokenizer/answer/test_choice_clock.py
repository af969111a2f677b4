"""Times and tokens of a choice, by a clock that the test moves."""

from __future__ import annotations

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.answer.choice_clock import ChoiceClock
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.tracing.choice_times import DECODE, ChoiceTimes


def finish(clock: ChoiceClock, now: float, num_tokens: int) -> tokenizer_pb2.Finish:
    """The finish of a choice of so many tokens, with its times."""
    finish = tokenizer_pb2.Finish(reason=common_pb2.FINISH_REASON_MAX_TOKENS)
    clock.finish(now, finish, common_pb2.Usage(num_prompt_tokens=5, num_completion_tokens=num_tokens))
    return finish


def test_times_are_counted_from_the_arrival_and_between_tokens() -> None:
    totals = RequestTotals()
    clock = ChoiceClock(100.0, 5, totals, None)
    clock.start(queue_s=1.5, prefill_s=None)
    clock.leave(102.0, 1)
    clock.leave(107.0, 2)

    end = finish(clock, 108.0, 3)

    assert (end.ttft.ToTimedelta().total_seconds(), end.mean_tpot.ToTimedelta().total_seconds()) == (2.0, 3.0)
    assert (totals.num_prompt_tokens, totals.num_generation_tokens) == (5, 3)
    assert (totals.queue_s.sum, totals.ttft_s.sum, totals.itl_s.sum, totals.e2e_s.sum) == (1.5, 2.0, 5.0, 8.0)


def test_a_choice_without_tokens_has_its_first_moment_at_the_end() -> None:
    totals = RequestTotals()
    clock = ChoiceClock(100.0, 5, totals, None)
    clock.leave(103.0, 0)

    end = finish(clock, 103.0, 0)

    assert end.ttft.ToTimedelta().total_seconds() == 3.0
    assert not end.HasField("mean_tpot")
    assert (totals.num_prompt_tokens, totals.num_generation_tokens) == (5, 0)


def test_a_choice_that_ends_before_its_first_token_waited_until_then() -> None:
    clock = ChoiceClock(100.0, 0, RequestTotals(), None)

    assert finish(clock, 104.0, 0).ttft.ToTimedelta().total_seconds() == 4.0
    assert clock.ttft_s is None


def test_a_traced_choice_notes_its_tokens() -> None:
    times = ChoiceTimes()
    times.note_submission(100.0)
    clock = ChoiceClock(100.0, 5, RequestTotals(), times)
    clock.start(queue_s=0.5, prefill_s=0.5)
    clock.leave(102.0, 1)
    clock.leave(104.0, 1)
    times.close(104.0)

    assert times.duration_s(DECODE) == 2.0

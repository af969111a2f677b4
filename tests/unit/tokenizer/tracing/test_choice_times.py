import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.tracing.choice_times import DECODE, PREFILL, QUEUE, RESUME, UNTOLD, ChoiceTimes, Phase

DURATION = st.none() | st.floats(0.0, 20.0)
EVENT = st.sampled_from(["submission", "resume", "tokens"])


def test_a_choice_is_queued_then_prefilled_then_decoded() -> None:
    times = ChoiceTimes()
    times.note_submission(10.0)
    times.note_start(2.0, 3.0)
    for moment in (16.0, 17.0, 19.0):
        times.note_tokens(moment)
    times.close(25.0)
    # For one second the request and its first token were on their ways.
    assert times.phases == [Phase(QUEUE, 10.0, 12.0), Phase(PREFILL, 12.0, 15.0), Phase(DECODE, 16.0, 19.0)]
    assert (times.queue_s, times.duration_s(DECODE)) == (2.0, 3.0)


def test_a_resume_lasts_from_the_last_token_before_to_the_first_token_after() -> None:
    times = ChoiceTimes()
    times.note_submission(0.0)
    times.note_start(0.0, 1.0)
    for moment in (1.0, 2.0):
        times.note_tokens(moment)
    # Both a worker and then the scheduler are lost.
    times.note_resume(4.0)
    times.note_submission(5.0)
    for moment in (8.0, 9.0):
        times.note_tokens(moment)
    times.close(9.0)
    assert times.phases[2:] == [Phase(DECODE, 1.0, 2.0), Phase(RESUME, 2.0, 8.0), Phase(DECODE, 8.0, 9.0)]


def test_what_was_lost_before_the_first_token_is_a_resume_and_its_queue_is_told_once() -> None:
    times = ChoiceTimes()
    times.note_submission(0.0)
    times.note_resume(6.0)
    # Five seconds of it were before the loss.
    times.note_start(5.5, 2.0)
    times.note_tokens(9.0)
    times.close(9.0)
    assert times.phases == [Phase(RESUME, 0.0, 6.0), Phase(QUEUE, 6.0, 7.0), Phase(PREFILL, 7.0, 9.0)]


@pytest.mark.parametrize(
    ("queue_s", "phase"),
    [(3.0, Phase(QUEUE, 0.0, 3.0)), (9.0, Phase(QUEUE, 0.0, 4.0)), (None, Phase(UNTOLD, 0.0, 4.0))],
)
def test_a_choice_without_a_token_was_in_the_queue_as_long_as_its_end_says(queue_s: float | None, phase: Phase) -> None:
    times = ChoiceTimes()
    times.note_submission(0.0)
    if queue_s is not None:
        times.note_end(queue_s)
    times.close(4.0)
    assert times.phases == [phase]


def test_a_choice_that_was_not_submitted_has_no_phases() -> None:
    times = ChoiceTimes()
    times.close(1.0)
    assert times.phases == []


@given(st.lists(st.tuples(EVENT, st.floats(0.0, 5.0))), DURATION, DURATION)
def test_phases_follow_each_other_within_the_choices_time(
    events: list[tuple[str, float]], queue_s: float | None, prefill_s: float | None
) -> None:
    times, now, has_tokens = ChoiceTimes(), 100.0, False
    times.note_submission(now)
    for event, gap_s in events:
        now += gap_s
        if event == "submission":
            times.note_submission(now)
        elif event == "resume":
            times.note_resume(now)
        else:
            if not has_tokens:
                times.note_start(queue_s, prefill_s)
            times.note_tokens(now)
            has_tokens = True
    times.close(now)
    for phase in times.phases:
        assert 100.0 <= phase.began_at <= phase.ended_at <= now
    for before, after in itertools.pairwise(times.phases):
        assert before.ended_at <= after.began_at
    # Losses one after another, without a token in between, are one pause.
    runs = [event for event, _ in itertools.groupby(event for event, _ in events)]
    first = next((index for index, event in enumerate(runs) if event == "tokens"), len(runs))
    assert (times.duration_s(RESUME) > 0.0) <= any(event != "tokens" for event in runs)
    num_pauses = sum(event == "tokens" for event in runs[first + 1 :])
    names = [phase.name for phase in times.phases]
    assert names.count(RESUME) >= num_pauses
    assert names.count(PREFILL) == has_tokens
    assert names.count(QUEUE) == (has_tokens and queue_s is not None)

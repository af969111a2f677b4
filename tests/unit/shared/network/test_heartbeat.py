"""Silence: counted in our own heartbeats, and reset when the partner is heard."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.network.heartbeat import HEARTBEAT_S, OwnPause, Silence, next_beat_at


def num_beats_until_over(silence: Silence) -> int:
    return next(number for number in itertools.count() if silence.beat())


@pytest.mark.parametrize("limit_s", [0.75, 1.0, 3.0, 10.0])
def test_silence_is_over_once_beats_have_filled_the_limit(limit_s: float) -> None:
    silence = Silence(limit_s)
    assert num_beats_until_over(silence) == math.ceil(limit_s / HEARTBEAT_S)
    assert silence.beat()


def test_hearing_the_partner_starts_the_count_again() -> None:
    silence = Silence(1.0)
    for _ in range(10):
        assert not silence.beat()
        assert not silence.beat()
        silence.note_alive()
    assert num_beats_until_over(silence) == 2


@given(st.floats(0.0, 1e6))
def test_beats_are_aligned_for_all_processes_and_never_close_together(now: float) -> None:
    at = next_beat_at(now)
    assert at % HEARTBEAT_S == 0
    assert 0.25 * HEARTBEAT_S <= at - now <= 1.25 * HEARTBEAT_S
    assert next_beat_at(at) == at + HEARTBEAT_S


def test_only_a_process_that_is_very_late_was_paused() -> None:
    pause = OwnPause(period_s=0.75, limit_s=1.0)
    assert [pause.note(now) for now in (5.0, 5.75, 7.25, 10.0, 10.75)] == [0.0, 0.0, 0.0, 2.0, 0.0]

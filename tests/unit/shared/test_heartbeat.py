"""Silence: counted in beats of our own, over once the partner is heard."""

from __future__ import annotations

import itertools

import pytest

from shared.heartbeat import HEARTBEAT_S, Silence


def num_beats_until_over(silence: Silence) -> int:
    return next(number for number in itertools.count() if silence.beat())


@pytest.mark.parametrize("limit_s", [0.5, 1.0, 3.0, 10.0])
def test_it_is_over_once_beats_have_filled_the_limit(limit_s: float) -> None:
    silence = Silence(limit_s)
    assert num_beats_until_over(silence) * HEARTBEAT_S == limit_s
    assert silence.beat()


def test_whoever_is_heard_starts_anew() -> None:
    silence = Silence(1.0)
    for _ in range(10):
        assert not silence.beat()
        assert not silence.beat()
        silence.hear()
    assert num_beats_until_over(silence) == 2

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.histogram import Histogram

BOUNDS = (0.5, 1, 2.5)


def test_a_value_is_counted_in_every_bucket_that_holds_it() -> None:
    histogram = Histogram(BOUNDS)
    for value in (0.5, 0.6, 1, 9):
        histogram.observe(value)
    assert histogram.buckets() == [("0.5", 1), ("1", 3), ("2.5", 3), ("+Inf", 4)]
    assert histogram.sum == pytest.approx(11.1)


@given(st.lists(st.floats(min_value=0, max_value=10)))
def test_buckets_hold_what_is_at_most_their_bound(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    assert [count for _, count in histogram.buckets()] == [
        sum(value <= bound for value in values) for bound in (*BOUNDS, float("inf"))
    ]

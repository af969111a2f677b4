"""Counts as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.units import parse_count

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@given(st.integers(0, 10**6), st.sampled_from(list(UNITS)), st.sampled_from(["", " "]))
def test_a_whole_number_counts_in_its_unit(number: int, unit: str, space: str) -> None:
    assert parse_count(f"{space}{number}{unit}{space}") == number * UNITS[unit]


@pytest.mark.parametrize(
    ("text", "count"), [("25.6k", 25_600), ("1.001k", 1001), ("0.5m", 500_000), ("1.0009k", 1000), ("007", 7)]
)
def test_decimal_units_take_fractions(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.5K", "only k, m, g and t take a fraction; 1.5k is 1500"),
        ("1.5", "only k, m, g and t take a fraction"),
        *((text, "is no count") for text in ("", "k", "-1", "+1", "1e3", "8kb", "1 k", ".5k", "1_000", "auto", "८k")),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_count(text)

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.text.markers import Markers

STRINGS = st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=6)


def first_of(markers: list[str], text: str) -> tuple[int, str] | None:
    """Where the first marker begins, and which one: the longest that begins there."""
    found = [
        (match.start(), -len(marker), marker) for marker in markers for match in re.finditer(re.escape(marker), text)
    ]
    return (min(found)[0], min(found)[2]) if found else None


@given(STRINGS, st.text("ab<|", max_size=12))
def test_the_first_and_longest_marker_is_found(markers: list[str], text: str) -> None:
    match = Markers(*markers).find(text, 0)
    assert (None if match is None else (match.start(), match[0])) == first_of(markers, text)


@given(STRINGS, st.text("ab<|", max_size=12), st.integers(0, 3))
def test_text_that_may_become_a_marker_is_held_back(markers: list[str], text: str, start: int) -> None:
    sizes = range(len(text[start:]) + 1)
    held = [
        size
        for size in sizes
        if any(len(marker) > size and marker.startswith(text[len(text) - size :]) for marker in markers)
    ]
    assert Markers(*markers).held_length(text, start) == max(held, default=0)


def test_a_thousand_markers_cost_no_more_than_one() -> None:
    markers = Markers(*(f"<|reserved_{number}|>" for number in range(1000)))
    text = "<|reserved_" * 100_000
    assert markers.find(text, 0) is None
    assert markers.held_length(text, 0) == len("<|reserved_")

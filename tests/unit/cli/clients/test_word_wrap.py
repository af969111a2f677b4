"""An answer that streams into a terminal is broken between words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.clients.word_wrap import WordWrap


def wrap(text: str, num_columns: int = 10, size: int = 1) -> str:
    """Wrap a text that arrives in pieces of `size` characters."""
    wrapped = WordWrap(lambda: num_columns)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return "".join(map(wrapped.add, pieces)) + wrapped.end()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three four", "one two\nthree four"),
        ("fits here.", "fits here."),
        # Line breaks and the indents of code stay.
        ("a\n\n    b c\n", "a\n\n    b c\n"),
        ("exactly 10 is ten", "exactly 10\nis ten"),
        # A word that is longer than a line is broken as the terminal would.
        ("see 0123456789abcdef on", "see\n0123456789\nabcdef on"),
        ("你好你好你好", "你好你好你\n好"),
        ("e\u0301e\u0301e\u0301 abcdef g", "e\u0301e\u0301e\u0301 abcdef\ng"),
        ("", ""),
    ],
)
def test_lines_end_between_words(text: str, shown: str) -> None:
    assert wrap(text) == shown


def test_what_is_complete_is_shown_at_once() -> None:
    wrapped = WordWrap(lambda: 80)
    assert wrapped.add("Hello wor") == "Hello"
    assert wrapped.add("ld. N") == " world."
    assert wrapped.end() == " N"


@given(st.text("ab \n\t好\u0301", max_size=60), st.integers(1, 12), st.integers(1, 7))
def test_words_are_never_changed_and_pieces_make_no_difference(text: str, num_columns: int, size: int) -> None:
    shown = wrap(text, num_columns, size)
    assert shown == wrap(text, num_columns)
    assert "".join(shown.split()) == "".join(text.split())
    assert shown.count("\n") >= text.count("\n")

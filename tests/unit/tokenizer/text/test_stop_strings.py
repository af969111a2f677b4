from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.text.stop_strings import StopMatch, StopMatcher

# Few letters, so that stop strings overlap each other and the text.
texts = st.text("abc", max_size=24)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def naive_match(text: str, stops: list[str]) -> StopMatch | None:
    """The first stop string in a whole text: by its beginning, then by its end."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    return StopMatch(min(found)[0], min(found)[2]) if found else None


def watch(pieces: list[str], stops: list[str]) -> tuple[str, StopMatch | None]:
    """The returned text, and the match."""
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.is_decided:
            return shown, matcher.candidate
    shown += matcher.finish()
    return shown, matcher.candidate


@given(texts, stop_lists, st.lists(st.integers(0, 4), max_size=12))
def test_the_match_equals_a_naive_search_however_the_text_is_cut(
    text: str, stops: list[str], lengths: list[int]
) -> None:
    pieces, position = [], 0
    for length in lengths:
        pieces.append(text[position : position + length])
        position += length
    match = naive_match(text, stops)
    assert watch([*pieces, text[position:]], stops) == (text if match is None else text[: match.start], match)


@given(texts, stop_lists)
def test_only_text_that_may_belong_to_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for index, character in enumerate(text):
        shown += matcher.push(character)
        if matcher.candidate is not None:
            break
        held = text[len(shown) : index + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_of_two_that_begin_together_the_one_completed_first_wins() -> None:
    assert watch(["xabc"], ["abc", "ab"]) == ("x", StopMatch(1, "ab"))


def test_a_stop_string_that_began_earlier_beats_one_completed_earlier() -> None:
    assert watch(["a", "b", "c", "d"], ["bc", "abcd"]) == ("", StopMatch(0, "abcd"))


def test_a_completed_stop_string_wins_once_the_earlier_one_has_failed() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert [matcher.push(character) for character in "xabc"] == ["x", "", "", ""]
    assert (matcher.candidate, matcher.is_decided) == (StopMatch(2, "bc"), False)
    assert matcher.push("x") == "a"
    assert matcher.is_decided


def test_a_completed_stop_string_wins_when_the_text_ends() -> None:
    assert watch(["xabc"], ["bc", "abcd"]) == ("xa", StopMatch(2, "bc"))


def test_text_after_the_stop_string_in_the_same_piece_is_dropped() -> None:
    assert watch(["one STOP two STOP"], ["STOP"]) == ("one ", StopMatch(4, "STOP"))


def test_text_that_only_began_like_a_stop_string_is_returned_at_the_end() -> None:
    assert watch(["a ST", "O"], ["STOP"]) == ("a STO", None)


@pytest.mark.parametrize("stop", ["😀", "你好", "\n\n", "e\u0301"])
def test_stop_strings_may_contain_any_characters(stop: str) -> None:
    assert watch([*f"text{stop}more"], [stop]) == ("text", StopMatch(4, stop))


def test_a_long_repetitive_text_is_scanned_once() -> None:
    stops = ["a" * 255 + character for character in "bcde"]
    matcher = StopMatcher(stops)
    shown = sum(len(matcher.push("a")) for _ in range(20_000))
    assert shown == 20_000 - 255

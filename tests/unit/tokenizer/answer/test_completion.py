from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.answer.completion import Completion
from services.tokenizer.text.detokenizer import ByteLevelDetokenizer, text_table

# One token per character, and two that are the halves of "é".
TABLE = {ord(letter): letter.encode() for letter in "abcdSTOPx"} | {1: b"\xc3", 2: b"\xa9"}


def make_completion(*stop_strings: str, includes_stop: bool = False, min_tokens: int = 0) -> Completion:
    detokenizer = ByteLevelDetokenizer(TABLE, text_table(TABLE))
    return Completion(detokenizer, stop_strings, includes_stop=includes_stop, min_tokens=min_tokens)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_tokens_are_taken_once_with_their_text() -> None:
    completion = make_completion()
    completion.push(ids("ab"))
    completion.push(ids("c"))
    assert completion.take() == ("abc", ids("abc"))
    assert completion.take() == ("", [])


def test_text_lags_behind_tokens_while_a_character_is_incomplete() -> None:
    completion = make_completion()
    completion.push([1])
    assert completion.take() == ("", [1])
    completion.push([2])
    assert completion.take() == ("é", [2])


def test_text_lags_behind_tokens_while_it_may_be_a_stop_string() -> None:
    completion = make_completion("STOP")
    completion.push(ids("aST"))
    assert completion.take() == ("a", ids("aST"))
    completion.push(ids("x"))
    assert completion.take() == ("STx", ids("x"))


def test_the_answer_is_cut_at_the_token_that_completed_the_stop_string() -> None:
    completion = make_completion("STOP")
    completion.push(ids("abSTOPcd"))
    assert completion.stop_string == "STOP"
    assert completion.take() == ("ab", ids("abSTOP"))
    assert completion.num_tokens == 6


def test_tokens_after_an_undecided_stop_string_are_held_back() -> None:
    completion = make_completion("bc", "abcdx")
    completion.push(ids("abcd"))
    assert completion.stop_string is None
    assert completion.take() == ("", ids("abc"))
    completion.push(ids("S"))
    assert completion.stop_string == "bc"
    assert completion.take() == ("a", [])
    assert completion.num_tokens == 3


def test_tokens_after_a_superseded_stop_string_are_part_of_the_answer() -> None:
    completion = make_completion("bc", "abcdx")
    completion.push(ids("abcd"))
    completion.push(ids("x"))
    assert completion.stop_string == "abcdx"
    assert completion.take() == ("", ids("abcdx"))
    assert completion.num_tokens == 5


def test_an_undecided_stop_string_wins_when_the_answer_ends() -> None:
    completion = make_completion("bc", "abcdx")
    completion.push(ids("abcd"))
    completion.finish()
    assert completion.stop_string == "bc"
    assert completion.take() == ("a", ids("abc"))


def test_a_silent_token_counts_and_has_no_text() -> None:
    completion = make_completion()
    completion.push_silent(ids("abx"))
    completion.finish()
    assert completion.take() == ("ab", ids("abx"))


def test_a_silent_token_completes_no_stop_string() -> None:
    completion = make_completion("STOP")
    completion.push_silent(ids("STOP"))
    completion.finish()
    assert completion.stop_string is None
    assert completion.take() == ("STO", ids("STOP"))


def test_held_back_text_is_returned_at_the_end() -> None:
    completion = make_completion("STOP")
    completion.push([*ids("aST"), 1])
    completion.finish()
    assert completion.take() == ("aST\ufffd", [*ids("aST"), 1])


def test_a_requested_stop_string_is_kept_and_the_text_after_it_is_not() -> None:
    completion = make_completion("STOP", includes_stop=True)
    completion.push(ids("aST"))
    assert completion.take() == ("a", ids("aST"))
    completion.push(ids("OPb"))
    assert completion.stop_string == "STOP"
    assert completion.take() == ("STOP", ids("OP"))


def test_a_stop_string_within_min_tokens_is_text() -> None:
    completion = make_completion("STOP", min_tokens=4)
    completion.push(ids("STOPaSTOPb"))
    assert completion.stop_string == "STOP"
    assert completion.take() == ("STOPa", ids("STOPaSTOP"))


def test_a_stop_string_that_only_begins_within_min_tokens_counts() -> None:
    completion = make_completion("STOP", min_tokens=3)
    completion.push(ids("STOPa"))
    assert (completion.stop_string, completion.take()) == ("STOP", ("", ids("STOP")))


def test_a_final_replacement_character_within_min_tokens_completes_no_stop_string() -> None:
    completion = make_completion("\ufffd", min_tokens=2)
    completion.push([*ids("a"), 1])
    completion.finish()
    assert (completion.stop_string, completion.take()) == (None, ("a\ufffd", [*ids("a"), 1]))


def test_tokens_that_are_put_back_are_taken_again() -> None:
    completion = make_completion()
    completion.push(ids("abc"))
    completion.take()
    completion.put_back(ids("bc"))
    completion.push(ids("d"))
    assert completion.take() == ("d", ids("bcd"))


@given(st.text("abSTOP", max_size=30), st.integers(0, 12), st.booleans())
def test_stop_strings_match_as_in_a_naive_search(text: str, min_tokens: int, includes_stop: bool) -> None:
    completion = make_completion("STOP", "aP", min_tokens=min_tokens, includes_stop=includes_stop)
    completion.push(ids(text))
    completion.finish()
    # Neither contains the other, so the first one completed also begins first.
    ends = [
        (end, stop)
        for end in range(min_tokens + 1, len(text) + 1)
        for stop in ("STOP", "aP")
        if text[:end].endswith(stop)
    ]
    end, stop = min(ends, default=(len(text), ""))
    assert completion.take() == (text[: end if includes_stop else end - len(stop)], ids(text[:end]))
    assert completion.stop_string == (stop or None)


@given(st.text("abSTOP", max_size=30), st.lists(st.integers(1, 4), max_size=10))
def test_results_do_not_depend_on_how_tokens_are_batched(text: str, lengths: list[int]) -> None:
    whole, pieces = make_completion("STOP", "TO"), make_completion("STOP", "TO")
    whole.push(ids(text))
    position = 0
    for length in [*lengths, len(text)]:
        pieces.push(ids(text[position : position + length]))
        position += length
    whole.finish()
    pieces.finish()
    assert (whole.take(), whole.stop_string, whole.num_tokens) == (
        pieces.take(),
        pieces.stop_string,
        pieces.num_tokens,
    )

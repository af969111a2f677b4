from __future__ import annotations

from services.tokenizer.request.bad_words import Run, add_bad_words, spellings
from shared.errors import Violation


def add(runs: list[Run], *spelled: list[int]) -> tuple[tuple[Run, ...], list[tuple[str, str]]]:
    """The token runs, and the violations."""
    violations: list[Violation] = []
    all_runs = add_bad_words(runs, spelled, violations)
    return all_runs, [(violation.field, violation.reason) for violation in violations]


def test_a_word_is_spelled_with_and_without_a_leading_space() -> None:
    assert spellings(["one", "  two words"]) == ["one", " one", "two words", " two words"]


def test_both_spellings_are_added_after_the_given_runs() -> None:
    assert add([(9, 8)], [1, 2], [3]) == (((9, 8), (1, 2), (3,)), [])


def test_a_spelling_that_ends_with_another_is_omitted() -> None:
    assert add([], [1, 2], [7, 1, 2]) == (((1, 2),), [])


def test_equal_runs_are_added_once() -> None:
    assert add([(3,), (3,)], [1], [3], [1], [3]) == (((3,), (1,)), [])


def test_a_word_of_no_or_too_many_tokens_is_named() -> None:
    _, violations = add([], [1], [2], [], [4], [5], [6] * 33)
    assert violations == [("bad_words[1]", "OUT_OF_RANGE"), ("bad_words[2]", "OUT_OF_RANGE")]


def test_the_total_length_of_all_runs_is_limited() -> None:
    words = [[number] for number in range(100, 164)]
    assert add([], *words)[1] == []
    assert add([(1,)], *words)[1] == [("bad_words", "OUT_OF_RANGE")]

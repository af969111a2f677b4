"""Spells words that a text must not hold as runs of tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import Violation
from shared.limits import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS

Run = tuple[int, ...]


def spellings(words: Sequence[str]) -> list[str]:
    """The texts whose tokens stand for `words`: each without a space before it, then with one.

    Vocabularies have tokens that begin with a space.
    """
    return [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]


def add_bad_words(
    runs: Sequence[Run], spelled: Sequence[Sequence[int]], violations: list[Violation]
) -> tuple[Run, ...]:
    """Bad words as runs of tokens behind those given as such; what is wrong with them joins `violations`.

    A spelling is left out when the other one is its end: whoever avoids that one avoids both.

    Source: vLLM's `SamplingParams.update_from_tokenizer`, but for one thing: that leaves out spellings with a space
    that have more or fewer tokens than without, and lets " word" through where it is one token and "word" two.

    Args:
        runs: Given as tokens, none of them empty.
        spelled: The ids of the words' `spellings`.
        violations: Grows.
    """
    all_runs = dict.fromkeys(runs)
    for index, (bare, spaced) in enumerate(zip(spelled[::2], spelled[1::2], strict=True)):
        word_runs = [bare] if spaced[-len(bare) :] == bare else [bare, spaced]
        if not all(1 <= len(run) <= MAX_BAD_WORD_LENGTH for run in word_runs):
            description = f"must be 1 to {MAX_BAD_WORD_LENGTH} tokens"
            violations.append(Violation(f"bad_words[{index}]", "OUT_OF_RANGE", description))
        all_runs.update((tuple(run), None) for run in word_runs)
    if len(all_runs) > MAX_BAD_WORDS:
        description = f"at most {MAX_BAD_WORDS} spellings, those of sampling.bad_words included"
        violations.append(Violation("bad_words", "OUT_OF_RANGE", description))
    return tuple(all_runs)

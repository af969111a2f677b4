"""Spells bad words as runs of tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import Violation
from shared.request.sampling_params import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS

Run = tuple[int, ...]


def spellings(words: Sequence[str]) -> list[str]:
    """Each word without a leading space, then with one: vocabularies have tokens that begin with a space."""
    return [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]


def add_bad_words(
    runs: Sequence[Run], spelled: Sequence[Sequence[int]], violations: list[Violation]
) -> tuple[Run, ...]:
    """Append the spelled bad words to `runs`, those given as tokens.

    The spelling with a space is left out when it ends with the one without: forbidding the shorter run forbids both.

    Source: vLLM's `SamplingParams.update_from_tokenizer`. That leaves out the spelling with a space whenever its number
    of tokens differs, and so lets " word" through where it is one token and "word" two.

    Args:
        spelled: The token ids of the words' `spellings`.
    """
    all_runs = dict.fromkeys(runs)
    for index, (bare, spaced) in enumerate(zip(spelled[::2], spelled[1::2], strict=True)):
        word_runs = [bare] if spaced[-len(bare) :] == bare else [bare, spaced]
        if not all(1 <= len(run) <= MAX_BAD_WORD_LENGTH for run in word_runs):
            description = f"must encode to 1 to {MAX_BAD_WORD_LENGTH} tokens"
            violations.append(Violation(f"bad_words[{index}]", "OUT_OF_RANGE", description))
        all_runs.update((tuple(run), None) for run in word_runs)
    if len(all_runs) > MAX_BAD_WORDS:
        description = f"must have at most {MAX_BAD_WORDS} spellings, including those of sampling.bad_words"
        violations.append(Violation("bad_words", "OUT_OF_RANGE", description))
    return tuple(all_runs)
